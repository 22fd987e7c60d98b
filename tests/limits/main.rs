//! What sessions may use, under pressure: on a machine of its own, which has every controller.
//!
//! `cargo xtask vm test` boots one and runs this binary inside it, one test after the other. Each puts one kind of pressure
//! on, by the means of a session, and looks at three things: that the limit of SPEC 8 or 9 is what the kernel holds against it,
//! that the supervisor answers and the other sessions go on meanwhile, and that the record says what happened. A line of
//! each outcome is printed, for `docs/limits.md`.
//!
//! The shipped limits are tried as they are where that is a matter of seconds; where a test lowers one, it says why.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

#[allow(dead_code)]
#[path = "../system/account.rs"]
mod account;
#[allow(dead_code)]
#[path = "../system/fixture.rs"]
mod fixture;
mod memory;
mod pressure;
mod rest;
mod tasks;
