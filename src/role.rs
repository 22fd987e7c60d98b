//! Which program this is, by exact name; the one place where the runtime is entered.
//!
//! The rules apply top-down (SPEC 2): the file name of `argv[0]`, then inner-exec's exact two words, then a closed
//! list of subcommands. Nothing is guessed; anything else is a usage error.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;

use crate::report::ExitStatus;
use crate::{client, inner_exec, launcher, list, selftest, supervisor};

const USAGE: &str = "\
opencode-pty: terminal sessions, each in a systemd unit of its own

Usage: opencode-pty ROLE [ARGUMENTS]

Roles:
  supervisor   the root service: authenticates the server, starts, relays and stops sessions
  client       sends one start frame with one directory over an inherited socket
  launcher     runs inside a session's unit: directory, groups, isolation, then script(1)
  selftest     for operators: is this host ready, and does it hold
  list         for operators: the running sessions

  help, --help       this text; `opencode-pty ROLE --help` tells a role's arguments, limits and exit codes
  --version          name and version

Also started as opencode-pty-supervisor, opencode-pty-client and opencode-pty-launcher (links of this file).

Exit codes: 0 done, 64 usage; the others are the role's.
";

/// A role and how it was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Supervisor,
    Client,
    Launcher,
    InnerExec,
    Selftest,
    List,
    Help,
    Version,
}

/// The role for this argv, and how many words of it are used up.
fn choose(argv: &[OsString]) -> Option<(Role, usize)> {
    let name = argv.first().map_or(OsStr::new(""), |name| name.as_os_str());
    let file_name = Path::new(name).file_name().unwrap_or_default();
    let by_name = match file_name.as_bytes() {
        b"opencode-pty-supervisor" => Some(Role::Supervisor),
        b"opencode-pty-client" => Some(Role::Client),
        b"opencode-pty-launcher" => Some(Role::Launcher),
        _ => None,
    };
    if let Some(role) = by_name {
        return Some((role, 1));
    }
    if name == inner_exec::ARGV0 && argv.len() == 2 && argv.get(1).is_some_and(|word| word == inner_exec::FLAG) {
        return Some((Role::InnerExec, 2));
    }
    let role = match argv.get(1)?.as_bytes() {
        b"supervisor" => Role::Supervisor,
        b"client" => Role::Client,
        b"launcher" => Role::Launcher,
        b"selftest" => Role::Selftest,
        b"list" => Role::List,
        b"help" | b"--help" => Role::Help,
        b"--version" => Role::Version,
        _ => return None,
    };
    Some((role, 2))
}

/// Runs the role that argv names.
pub fn main(argv: &[OsString]) -> ExitCode {
    // A future that ends here would make smol start its reactor's thread on the way out. So every role ends the
    // process itself; none has anything left to drop by then.
    smol::block_on(async {
        let status = if let Some((role, used)) = choose(argv) {
            run(role, argv.get(used..).unwrap_or_default()).await
        } else {
            eprint!("{USAGE}");
            ExitStatus::Usage
        };
        std::process::exit(i32::from(status as u8))
    })
}

async fn run(role: Role, args: &[OsString]) -> ExitStatus {
    match role {
        Role::Supervisor => supervisor::main(args).await,
        Role::Client => client::main(args),
        Role::Launcher => launcher::main(args),
        Role::InnerExec => inner_exec::main(),
        Role::Selftest => Box::pin(selftest::main(args)).await,
        Role::List => Box::pin(list::main(args)).await,
        Role::Help => {
            print!("{USAGE}");
            ExitStatus::Success
        }
        Role::Version => {
            println!("opencode-pty {}", env!("CARGO_PKG_VERSION"));
            ExitStatus::Success
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(argv: &[&str]) -> Option<(Role, usize)> {
        choose(&argv.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn the_file_name_of_argv0_wins_over_every_argument() {
        for (name, role) in [
            ("/usr/local/libexec/opencode-pty-supervisor", Role::Supervisor),
            ("opencode-pty-client", Role::Client),
            ("./opencode-pty-launcher", Role::Launcher),
        ] {
            assert_eq!(chosen(&[name, "--help"]), Some((role, 1)));
            assert_eq!(chosen(&[name, "supervisor"]), Some((role, 1)));
        }
    }

    #[test]
    fn inner_exec_needs_exactly_its_two_words() {
        assert_eq!(chosen(&["/proc/self/fd/3", "--exec"]), Some((Role::InnerExec, 2)));
        assert_eq!(chosen(&["/proc/self/fd/3", "--exec", "x"]), None);
        assert_eq!(chosen(&["/proc/self/fd/03", "--exec"]), None);
        assert_eq!(chosen(&["opencode-pty", "--exec"]), None);
    }

    #[test]
    fn the_list_of_subcommands_is_closed() {
        assert_eq!(chosen(&["opencode-pty", "supervisor"]), Some((Role::Supervisor, 2)));
        assert_eq!(chosen(&["opencode-pty", "selftest", "--live"]), Some((Role::Selftest, 2)));
        assert_eq!(chosen(&["opencode-pty", "list", "--json"]), Some((Role::List, 2)));
        assert_eq!(chosen(&["opencode-pty-supervisor2", "client", "0"]), Some((Role::Client, 2)));
        for word in ["", "Supervisor", "inner-exec", "--supervisor", "supervisor ", "-h"] {
            assert_eq!(chosen(&["opencode-pty", word]), None, "'{word}'");
        }
        assert_eq!(chosen(&["opencode-pty"]), None);
        assert_eq!(chosen(&[]), None);
    }
}
