//! The installed product on real hosts: the same facts on every systemd we support.
//!
//! `cargo xtask test` boots a host, installs product and stand-in on it, starts both and runs this binary with the
//! host's name in `OPENCODE_PTY_TEST_HOST`. Tests run one after the other, since they share the host, and each leaves
//! it as it found it: supervisor and server active, no session.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod account;
mod admission;
mod arguments;
mod attacks;
mod bytes;
mod cases;
mod directory;
mod ending;
mod faults;
mod fixture;
mod flood;
mod frames;
mod hanging;
mod hardening;
mod journal;
mod list;
mod operations;
mod output;
mod outside;
mod readiness;
mod selftest;
mod session;
mod threats;
