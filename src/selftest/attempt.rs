//! What is tried as somebody else: as the account, in a session, as a stranger. Each way prints `WAY: open` or
//! `WAY: shut`, with the reason behind a comma.

use crate::report::{ExitStatus, print_error};
use crate::systemd::policy;

/// Makes one attempt.
pub async fn main(words: &[&str]) -> ExitStatus {
    match words {
        ["own-manager-name"] => match policy::may_own_the_managers_name().await {
            Ok(open) => told("manager-name", open),
            Err(error) => {
                print_error("selftest", &error);
                return ExitStatus::System;
            }
        },
        _ => return ExitStatus::Usage,
    }
    ExitStatus::Success
}

fn told(way: &str, open: bool) {
    println!("{way}: {}", if open { "open" } else { "shut" });
}
