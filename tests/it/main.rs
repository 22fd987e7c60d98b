//! The built supervisor against a fake manager: what a real service manager won't do on demand.
//!
//! Needs root (the supervisor refuses to run otherwise), `dbus-daemon`, and the account `nobody`. Each test sets a
//! scene of its own, a bus, a manager, a supervisor and a stand-in server, so they run side by side.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod admission;
mod answers;
mod bus;
mod ends;
mod frames;
mod lifecycle;
mod scene;
mod starts;
