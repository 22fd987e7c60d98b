//! opencode-pty: terminal sessions an AI coding server can trust.
//!
//! Not a public API: the one binary, its tests and the project's own commands share these modules. In reading
//! order, top-down; `docs/architecture.md` says which may import which.

/// Which program this is, by exact name; the one place where the runtime is entered.
pub mod role;

/// Sends one start frame with one directory.
pub mod client;

/// Runs inside the session's unit, up to script(1).
pub mod launcher;

/// Runs inside the terminal, up to the command.
pub mod inner_exec;

/// The root service.
pub mod supervisor;

/// Whether a host is ready, and whether it holds.
pub mod selftest;

/// The running sessions, for an operator.
pub mod list;

/// The only modules that speak D-Bus.
pub mod systemd;

/// Records for the journal.
pub mod journal;

/// What travels on the sockets.
pub mod frame;

/// The account that sessions run as.
pub mod account;

/// Every system call that std lacks.
pub mod sys;

/// Values that tasks of one thread wait on; deadlines.
pub mod wait;

/// The unit files that ship, for any account.
pub mod unit_files;

/// A role's words, against its options.
pub mod options;

/// Exit codes and how errors read.
pub mod report;

/// Every bound and every fixed path.
pub mod limits;
