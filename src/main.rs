//! Hands argv to the roles.

use std::process::ExitCode;

fn main() -> ExitCode {
    let argv: Vec<_> = std::env::args_os().collect();
    opencode_pty::role::main(&argv)
}
