//! Test support.

/// Tries to get out of a session.
pub mod attacker;
pub mod bench;
/// A connection's receiving side under any sequence of sends, and a model of it.
pub mod connection_model;
/// What must hold for any bytes a decoder is given.
pub mod decoders;
/// Bytes and descriptors over a Unix socket, with deadlines.
pub mod descriptors;
pub mod ending;
/// A service manager that says what a test wants, on a private bus.
pub mod fake_manager;
pub mod flood;
pub mod host;
pub mod markdown;
/// Commands out of documents.
pub mod page;
/// A test's side of the protocol.
pub mod peer;
pub mod programs;
/// Random numbers that are the same on every run.
pub mod random;
/// The readiness verifier and its marker.
pub mod readiness;
/// Plays the server.
pub mod standin;
/// The unit files for another account.
pub mod units;
pub mod usage;
/// A machine of its own: virtual, with every controller, slow.
pub mod vm;
