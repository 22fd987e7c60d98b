//! `opencode-vm-agent`: the inside of a VM; see `support::vm`.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use support::host::{self, Host, Suite};
use support::standin::hold_sessions;
use support::vm;

const USAGE: &str = "\
opencode-vm-agent: the inside of a test VM

Usage: opencode-vm-agent serve PORT
       opencode-vm-agent install NAME DIRECTORY
       opencode-vm-agent sessions COUNT COMMAND ARGS…

  serve     runs what the machine outside asks for through this port
  install   makes this machine a host that tests attach to by this name, installs opencode-pty and
            opencode-standin from the directory as the container hosts have them, and starts both
  sessions  asks the stand-in for so many sessions of this command, prints a line when each has started,
            and keeps them until it is ended
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done: Result<(), Box<dyn Error>> = match words.as_slice() {
        ["serve", port] => vm::agent::serve(port).map_err(Into::into),
        ["install", name, directory] => install(name, Path::new(directory)).map_err(Into::into),
        ["sessions", count, command @ ..] if !command.is_empty() => match count.parse() {
            Ok(count) => hold_sessions(count, command).map_err(Into::into),
            Err(_) => return usage(),
        },
        _ => return usage(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("opencode-vm-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn install(name: &str, directory: &Path) -> Result<(), host::Error> {
    let host = Host::this_machine(name, Suite::Trixie)?;
    host.sh_ok("systemctl stop opencode-v2.service opencode-pty-supervisor.service 2>/dev/null || true")?;
    host::install(&host, &directory.join("opencode-pty"))?;
    host::install_standin(&host, &directory.join("opencode-standin"))?;
    host::start(&host)
}

fn usage() -> ExitCode {
    eprint!("{USAGE}");
    ExitCode::from(64)
}
