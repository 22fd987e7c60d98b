//! Test support.

/// Bytes and descriptors over a Unix socket, with deadlines.
pub mod descriptors;
/// A service manager that says what a test wants, on a private bus.
pub mod fake_manager;
pub mod host;
/// A test's side of the protocol.
pub mod peer;
/// Plays the server.
pub mod standin;
