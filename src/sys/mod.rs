//! Every system call that std lacks, one small file a topic.
//!
//! `unsafe` is allowed at the top of two files here, `peer` and `inherited`, and nowhere else in the program.

pub mod clock;
pub mod directory;
pub mod hangup;
pub mod inherited;
pub mod message;
pub mod peer;
pub mod privileges;
pub mod process;
pub mod random;
pub mod reach;
pub mod socket;
