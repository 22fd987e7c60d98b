//! The project's own commands. `cargo xtask` without arguments lists them.

mod args;
mod bench;
mod check;
mod containment;
mod demo;
mod dist;
mod fuzz;
mod host;
mod node_test;
mod soak;
mod test;
mod vm;

use std::fmt;
use std::process::ExitCode;

const USAGE: &str = "\
Usage: cargo xtask COMMAND

  bench  how fast it is, beside what a user would pick instead
  demo   one session from end to end, in this terminal
  test   everything that shows whether the tree works
  check  format, lints, layers, documents
  dist   what an operator installs: two equal builds, units, verifier, manifest
  containment  every attack on every kind of host, and docs/containment.md of it
  fuzz   every fuzz target for a while: nightly Rust and cargo-fuzz
  host   throw-away hosts with the product installed: up, shell, down
  node-test  the Node side under every runtime it is for
  source-hash  the hash that names the content of HEAD
  soak   sessions of every kind for a long time, and what is left of them
  vm     a virtual machine with every controller: up, shell, run, down

Each command explains itself with --help. Exit codes: 0 done, 1 failed, 64 wrong usage.
";

/// Why a command did nothing, or not what it was asked to.
pub enum Failure {
    /// Only this explanation was asked for.
    Help(&'static str),
    /// The words make no sense; the text says which.
    Usage(String),
    /// It was tried, and this is why it did not work. Empty: everything has been said already.
    Failed(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Help(text) => f.write_str(text),
            Self::Usage(text) | Self::Failed(text) => f.write_str(text),
        }
    }
}

impl From<support::host::Error> for Failure {
    fn from(error: support::host::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Self::Failed(message)
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = words.split_first().map_or(("", [].as_slice()), |(command, rest)| (command.as_str(), rest));
    let done = match command {
        "bench" => bench::main(rest),
        "check" => check::main(rest),
        "containment" => containment::main(rest),
        "demo" => demo::main(rest),
        "dist" => dist::main(rest),
        "fuzz" => fuzz::main(rest),
        "host" => host::main(rest),
        "node-test" => node_test::main(rest),
        "source-hash" => dist::source_hash(rest),
        "soak" => soak::main(rest),
        "test" => test::main(rest),
        "vm" => vm::main(rest),
        "help" | "--help" | "-h" => Err(Failure::Help(USAGE)),
        "" => Err(Failure::Usage(USAGE.to_owned())),
        other => Err(Failure::Usage(format!("no such command '{other}'\n{USAGE}"))),
    };
    match done {
        Ok(code) => code,
        Err(Failure::Help(usage)) => {
            print!("{usage}");
            ExitCode::SUCCESS
        }
        Err(Failure::Usage(message)) => {
            eprintln!("{}", message.trim_end());
            ExitCode::from(64)
        }
        Err(Failure::Failed(message)) => {
            if !message.is_empty() {
                eprintln!("xtask {command}: {message}");
            }
            ExitCode::FAILURE
        }
    }
}
