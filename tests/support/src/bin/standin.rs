//! `opencode-standin`: plays the OpenCode server; see `support::standin`.

use std::path::Path;
use std::process::ExitCode;

use support::standin::{Paths, probe, serve};

const USAGE: &str = "\
opencode-standin: plays the OpenCode server for tests

Usage: opencode-standin serve [--control PATH] [--supervisor PATH] [--client PATH]
       opencode-standin probe SUPERVISOR [COMMAND ARGS…]

  serve   connects, opens directories and runs the client as the control socket asks
  probe   connects as this process and prints what the supervisor did, one line:
          refused REASON, closed, answered BYTES, silent; sends a start of COMMAND first, if there is one
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
        _ => return usage(),
    };
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
