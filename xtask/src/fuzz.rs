//! `cargo xtask fuzz`: a bounded run of every fuzz target, from the committed corpus, with one line each.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use support::host;

use crate::Failure;
use crate::args::Args;

const USAGE: &str = "\
Usage: cargo xtask fuzz [--seconds N] [--only TARGET,TARGET…] [--sanitizer NAME]

  header      the twelve bytes of a frame's header
  start       a start frame's payload
  exit        an exit frame's payload
  error       an error frame's payload
  words       what OPENCODE_PTY_ARGV carries
  passwd      the account database
  connection  a client's whole say: bytes in any pieces, with any descriptors, through a real socket

  --seconds    how long each target runs (60)
  --sanitizer  none (the default: no unsafe code of ours is on these paths) or address (for that of the crates, slower)

Needs the nightly toolchain; installs cargo-fuzz from crates.io if it is missing. Starts from tests/fuzz/corpus, which it
does not change: what it finds is below target/fuzz, and the next run starts from that, too. Exit 1 if a target crashed.
";

const TARGETS: [&str; 7] = ["header", "start", "exit", "error", "words", "passwd", "connection"];

/// Longest one input may take, seconds: the model of a connection gives up before.
const INPUT_SECONDS_MAX: u32 = 60;

/// Where things are.
struct Places {
    root: PathBuf,
    /// Everything of ours below `target/`.
    scratch: PathBuf,
    sanitizer: String,
}

pub fn main(words: &[String]) -> Result<ExitCode, Failure> {
    let mut args = Args::new(words, USAGE)?;
    let number = |text: String| text.parse().ok().filter(|seconds| *seconds > 0);
    let seconds: u32 = match args.option("--seconds")?.map(number) {
        Some(None) => return Err(Failure::Usage(format!("--seconds needs a number above 0\n{USAGE}"))),
        Some(Some(seconds)) => seconds,
        None => 60,
    };
    let only: Option<Vec<String>> = args.option("--only")?.map(|names| names.split(',').map(str::to_owned).collect());
    let sanitizer = args.option("--sanitizer")?.unwrap_or_else(|| "none".to_owned());
    args.finish(0)?;
    for name in only.iter().flatten() {
        if !TARGETS.contains(&name.as_str()) {
            return Err(Failure::Usage(format!("no such target '{name}'\n{USAGE}")));
        }
    }
    let chosen = |name: &str| only.as_ref().is_none_or(|only| only.iter().any(|chosen| chosen == name));

    let places = Places { root: host::workspace(), scratch: host::target().join("fuzz"), sanitizer };
    let programs = build(&places)?;
    let mut sound = true;
    for target in TARGETS.into_iter().filter(|target| chosen(target)) {
        sound &= run(&places, &programs, target, seconds)?;
    }
    if sound { Ok(ExitCode::SUCCESS) } else { Err(Failure::Failed("not everything is as it should be".to_owned())) }
}

/// `cargo fuzz` of the nightly toolchain, whichever one we were built with.
fn cargo_fuzz(places: &Places, verb: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo", "fuzz", verb]).current_dir(&places.root).stdin(Stdio::null());
    command
}

/// Builds every target; gives back the directory they are in.
fn build(places: &Places) -> Result<PathBuf, Failure> {
    let nightly = Command::new("rustup").args(["run", "nightly", "rustc", "--version", "--verbose"]).output();
    let nightly = nightly.map_err(|error| Failure::Failed(format!("cannot run rustup: {error}")))?;
    let version = String::from_utf8_lossy(&nightly.stdout).into_owned();
    let Some(machine) = version.lines().find_map(|line| line.strip_prefix("host: ")) else {
        return Err(Failure::Failed("no nightly toolchain: rustup toolchain install nightly".to_owned()));
    };
    let installed = cargo_fuzz(places, "--version").output().is_ok_and(|output| output.status.success());
    if !installed {
        eprintln!("       installing cargo-fuzz …");
        succeed(Command::new("rustup").args([
            "run",
            "nightly",
            "cargo",
            "install",
            "--quiet",
            "--locked",
            "cargo-fuzz",
        ]))?;
    }
    eprintln!("       building …");
    let programs = places.scratch.join(&places.sanitizer);
    succeed(
        cargo_fuzz(places, "build")
            .args(["--fuzz-dir", "tests/fuzz", "--sanitizer", &places.sanitizer, "--target-dir"])
            .arg(&programs),
    )?;
    Ok(programs.join(machine).join("release"))
}

/// Runs a command to its end; what it says is shown if it fails.
fn succeed(command: &mut Command) -> Result<(), Failure> {
    let name = command.get_program().display().to_string();
    let output = command.output().map_err(|error| Failure::Failed(format!("cannot run {name}: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Failure::Failed(format!("{name} ended with {}\n{}", output.status, said.trim_end())))
}

/// Runs one target and prints its line; says whether all was well.
fn run(places: &Places, programs: &Path, target: &str, seconds: u32) -> Result<bool, Failure> {
    let found = places.scratch.join("corpus").join(target);
    let artifacts = places.scratch.join("artifacts").join(target);
    for directory in [&found, &artifacts] {
        fs::create_dir_all(directory)
            .map_err(|error| Failure::Failed(format!("cannot make {}: {error}", directory.display())))?;
    }
    // The first directory gets what is new; the others are only read.
    let output = Command::new(programs.join(target))
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg("-print_final_stats=1")
        .arg(&found)
        .arg(places.root.join("tests/fuzz/corpus").join(target))
        .current_dir(&places.root)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Failure::Failed(format!("cannot run the target {target}: {error}")))?;
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    let kept = places.scratch.join(format!("{target}.log"));
    fs::write(&kept, &log).map_err(|error| Failure::Failed(format!("cannot write {}: {error}", kept.display())))?;

    let report = Report::of(&log);
    let sound = output.status.success() && report.executions > 0;
    let mut line = format!("{} {target:<10} {report}", if sound { "ok    " } else { "FAILED" });
    if !sound {
        let _ = write!(line, " ({}, {})", output.status, kept.display());
        for panic in log.lines().skip_while(|line| !line.contains("panicked at")).take(3) {
            let _ = write!(line, "\n       | {panic}");
        }
        for artifact in report.artifacts {
            let _ = write!(line, "\n       {artifact}\n       again: {} {artifact}", programs.join(target).display());
        }
    }
    println!("{line}");
    Ok(sound)
}

/// What libFuzzer says at the end.
#[derive(Debug, Default, PartialEq, Eq)]
struct Report {
    executions: u64,
    per_second: u64,
    /// Edges of the program seen.
    coverage: u64,
    /// Inputs that reached something new.
    new: u64,
    /// Inputs it crashed on, if any.
    artifacts: Vec<String>,
}

impl Report {
    fn of(log: &str) -> Self {
        let mut report = Self::default();
        for line in log.lines() {
            let number = |name: &str| Some(line.strip_prefix(name)?.trim().parse().unwrap_or(0));
            if let Some(count) = number("stat::number_of_executed_units:") {
                report.executions = count;
            } else if let Some(count) = number("stat::average_exec_per_sec:") {
                report.per_second = count;
            } else if let Some(count) = number("stat::new_units_added:") {
                report.new = count;
            } else if let Some((_, path)) = line.split_once("Test unit written to ") {
                report.artifacts.push(path.trim().to_owned());
            } else if let Some((_, rest)) = line.split_once(" cov: ") {
                let edges = rest.split_whitespace().next().and_then(|edges| edges.parse().ok());
                report.coverage = edges.unwrap_or(report.coverage);
            }
        }
        report
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:>11} execs {:>7}/s {:>5} edges {:>5} new {:>2} crashes",
            self.executions,
            self.per_second,
            self.coverage,
            self.new,
            self.artifacts.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
#31\tINITED cov: 142 ft: 170 corp: 17/203b exec/s: 0 rss: 36Mb
#2048\tNEW    cov: 151 ft: 190 corp: 19/240b lim: 14 exec/s: 0 rss: 36Mb L: 12/14 MS: 1 ChangeBit-
artifact_prefix='/t/'; Test unit written to /t/crash-0a
stat::number_of_executed_units: 2048
stat::average_exec_per_sec:     512
stat::new_units_added:          2
";

    #[test]
    fn libfuzzers_last_words_are_understood() {
        let expected = Report {
            executions: 2_048,
            per_second: 512,
            coverage: 151,
            new: 2,
            artifacts: vec!["/t/crash-0a".to_owned()],
        };
        assert_eq!(Report::of(LOG), expected);
    }

    #[test]
    fn every_target_has_a_corpus_and_a_program() {
        let fuzz = host::workspace().join("tests/fuzz");
        let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).expect("it is there");
        for target in TARGETS {
            assert!(fuzz.join("corpus").join(target).is_dir(), "{target}");
            assert!(manifest.contains(&format!("path = \"targets/{target}.rs\"")), "{target}");
        }
    }
}
