//! `opencode-standin`: plays the OpenCode server; see `support::standin`.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use support::attacker;
use support::flood::{Kind, flood};
use support::standin::{Paths, probe, serve};

const USAGE: &str = "\
opencode-standin: plays the OpenCode server for tests

Usage: opencode-standin serve [--control PATH] [--supervisor PATH] [--client PATH]
       opencode-standin probe SUPERVISOR [COMMAND ARGS…]
       opencode-standin flood SUPERVISOR SECONDS [blocking|non-blocking|held|descriptors|silent|busy]
       opencode-standin attack GROUP ARGS…
       opencode-standin behind ABI COMMAND ARGS…

  serve   connects, opens directories and runs the client as the control socket asks
  probe   connects as this process and prints what the supervisor did, one line:
          refused REASON, closed, answered BYTES, silent; sends a start of COMMAND first, if there is one
  flood   connects as fast as it can and prints the number of connections made, again and again
  attack  tries to get out of where it runs and prints a line for each way; see support::attacker
  behind  enters the wall that a kernel with this Landlock ABI would give a session (none: without), and executes
          COMMAND there
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["serve", options @ ..] => match paths(options) {
            Some(paths) => serve(&paths),
            None => return usage(),
        },
        ["probe", supervisor, command @ ..] => probe(Path::new(supervisor), command).map(|line| println!("{line}")),
        [attacker::COMMAND, words @ ..] => attacker::attack(words),
        [attacker::BEHIND, abi, words @ ..] => attacker::behind(abi, words),
        ["flood", supervisor, seconds] => return flood_for(supervisor, seconds, "blocking"),
        ["flood", supervisor, seconds, kind] => return flood_for(supervisor, seconds, kind),
        _ => return usage(),
    };
    ended(done)
}

fn flood_for(supervisor: &str, seconds: &str, kind: &str) -> ExitCode {
    match (seconds.parse().map(Duration::from_secs), Kind::named(kind)) {
        (Ok(time), Some(kind)) => ended(flood(Path::new(supervisor), time, kind)),
        _ => usage(),
    }
}

fn ended(done: std::io::Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("opencode-standin: {error}");
            ExitCode::FAILURE
        }
    }
}

fn paths(options: &[&str]) -> Option<Paths> {
    let mut paths = Paths::default();
    let mut rest = options;
    while let [name, value, behind @ ..] = rest {
        match *name {
            "--control" => paths.control = value.into(),
            "--supervisor" => paths.supervisor = value.into(),
            "--client" => paths.client = value.into(),
            _ => return None,
        }
        rest = behind;
    }
    rest.is_empty().then_some(paths)
}

fn usage() -> ExitCode {
    eprint!("{USAGE}");
    ExitCode::from(64)
}
