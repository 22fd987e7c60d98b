//! A role's words, against its options: what argh makes of them, and how that ends.

use std::ffi::OsString;

use argh::FromArgs;

use crate::report::ExitStatus;

/// The options, or how the program ends without them: after its help, or after a complaint. `command` is how the help
/// calls it, `role` how a complaint does.
pub fn parse<T: FromArgs>(command: &str, role: &str, args: &[OsString]) -> Result<T, ExitStatus> {
    let Some(args) = args.iter().map(|arg| arg.to_str()).collect::<Option<Vec<&str>>>() else {
        eprintln!("opencode-pty {role}: an argument is not UTF-8");
        return Err(ExitStatus::Usage);
    };
    T::from_args(&[command], &args).map_err(|early| {
        if early.status.is_ok() {
            println!("{}", early.output.trim_end());
            ExitStatus::Success
        } else {
            eprintln!("opencode-pty {role}: {}", early.output.trim_end());
            ExitStatus::Usage
        }
    })
}
