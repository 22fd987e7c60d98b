//! `cargo xtask check`: what can be said about the tree without running it.

pub mod docs;
mod layers;
mod rust;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use support::host::workspace;
use support::markdown::{cells, code_spans, table_rows};

use crate::Failure;
use crate::args::Args;

const USAGE: &str = "\
Usage: cargo xtask check

  fmt      cargo fmt changes nothing
  clippy   no warning in any target
  layers   src/ keeps to the table in docs/architecture.md; unsafe, zbus and rustix only where it says
  docs     every link and path in README.md and docs/ leads somewhere, every test in docs/threats.md exists
  rustdoc  cargo doc warns of nothing, private items included
";

/// Answers with what is wrong, a line each; nothing: all is well.
type Check = fn(&Path) -> Vec<String>;

const CHECKS: [(&str, Check); 5] =
    [("fmt", fmt), ("clippy", clippy), ("layers", layers::check), ("docs", docs::check), ("rustdoc", rustdoc)];

pub fn main(words: &[String]) -> Result<ExitCode, Failure> {
    Args::new(words, USAGE)?.finish(0)?;

    let root = workspace();
    let mut sound = true;
    for (name, check) in CHECKS {
        let started = Instant::now();
        let faults = check(&root);
        let seconds = started.elapsed().as_secs_f32();
        sound &= faults.is_empty();
        println!("{} {name} ({seconds:.1} s)", if faults.is_empty() { "ok    " } else { "FAILED" });
        for fault in faults {
            println!("       {fault}");
        }
    }
    if sound { Ok(ExitCode::SUCCESS) } else { Err(Failure::Failed("not everything is as it should be".to_owned())) }
}

fn fmt(root: &Path) -> Vec<String> {
    let mut faults = cargo(root, &["fmt", "--all", "--", "--check", "--files-with-diff"], &[]);
    // The fuzz targets are a workspace of their own.
    let fuzz = ["fmt", "--manifest-path", "tests/fuzz/Cargo.toml", "--", "--check", "--files-with-diff"];
    faults.extend(cargo(root, &fuzz, &[]));
    faults
}

/// Twice, as `--all-targets` leaves out the tests that plain `cargo test` does not run.
fn clippy(root: &Path) -> Vec<String> {
    let mut faults = Vec::new();
    for targets in [["--all-targets"].as_slice(), &["--test", "*"]] {
        let words = [&["clippy", "--quiet", "--workspace"], targets, &["--", "-D", "warnings"]].concat();
        faults.extend(cargo(root, &words, &[]));
    }
    faults
}

fn rustdoc(root: &Path) -> Vec<String> {
    let arguments = ["doc", "--quiet", "--workspace", "--no-deps", "--document-private-items"];
    cargo(root, &arguments, &[("RUSTDOCFLAGS", "-D warnings")])
}

fn cargo(root: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Vec<String> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(arguments)
        .envs(environment.iter().copied())
        .current_dir(root)
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) if output.status.success() => Vec::new(),
        Ok(output) => {
            let said = [output.stdout, output.stderr].concat();
            let mut lines: Vec<String> = String::from_utf8_lossy(&said).lines().map(str::to_owned).collect();
            lines.push(format!("cargo {}: {}", arguments.join(" "), output.status));
            lines
        }
        Err(error) => vec![format!("cannot run cargo: {error}")],
    }
}

/// All files below a directory with this extension, in order of their names.
fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found
}

/// A file's text, or a fault that names the file.
fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}
