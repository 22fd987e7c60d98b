//! The exact runtimes: from the package registry into the cache, checked; and the single executable, built now.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;
use support::host;

use super::run_here;
use crate::Failure;

/// What is run the smoke.
pub struct Runtime {
    /// A short name: `sea`, `node26`, `node20`, `bun`.
    pub name: &'static str,
    /// A name for people.
    pub title: String,
    /// The exact version.
    pub version: String,
    /// The program, on the machine.
    pub program: PathBuf,
    /// Whether the smoke's main module is in it.
    pub is_single: bool,
}

/// The names, in the table's order. `sea` is made of `node26`.
const NAMES: [(&str, &str, &str); 4] =
    [("sea", "node26", "Node SEA"), ("node26", "node26", "Node"), ("node20", "node20", "Node"), ("bun", "bun", "bun")];

/// One line of `tests/node/runtimes.lock`.
struct Locked {
    package: String,
    version: String,
    sha512: String,
    program: String,
}

/// The chosen runtimes, or all.
pub fn get(
    chosen: Option<&BTreeSet<&str>>,
    work: &Path,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Runtime>, Failure> {
    for name in chosen.into_iter().flatten() {
        if *name != super::opencode::NAME && !NAMES.iter().any(|(known, ..)| known == name) {
            return Err(Failure::Usage(format!("no such runtime '{name}'")));
        }
    }
    let mut runtimes = Vec::new();
    for (name, locked, title) in NAMES {
        if chosen.is_some_and(|chosen| !chosen.contains(name)) {
            continue;
        }
        let locked = lock(locked)?;
        let program = program(&locked, progress)?;
        let is_single = name == "sea";
        let program = if is_single { build_single(&program, work)? } else { program };
        let title = format!("{title} {}", locked.version);
        runtimes.push(Runtime { name, title, version: locked.version, program, is_single });
    }
    Ok(runtimes)
}

/// Version and program of another line of the lock file.
pub fn locked_program(name: &str, progress: &mut dyn FnMut(&str)) -> Result<(String, PathBuf), Failure> {
    let locked = lock(name)?;
    let program = program(&locked, progress)?;
    Ok((locked.version, program))
}

fn lock(name: &str) -> Result<Locked, String> {
    let file = host::workspace().join("tests/node/runtimes.lock");
    let text = fs::read_to_string(&file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    parse(&text, name).ok_or_else(|| format!("{} has no line for {name}", file.display()))
}

fn parse(text: &str, name: &str) -> Option<Locked> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    let [package, sha512, program] = <[&str; 3]>::try_from(line.split(' ').collect::<Vec<_>>()).ok()?;
    // The scope of a package begins with the same letter.
    let (package, version) = package.rsplit_once('@')?;
    let own = |text: &str| text.to_owned();
    Some(Locked { package: own(package), version: own(version), sha512: own(sha512), program: own(program) })
}

/// A program from the cache, or from the registry into it.
fn program(locked: &Locked, progress: &mut dyn FnMut(&str)) -> Result<PathBuf, Failure> {
    let cache = host::cache().join("node");
    // The hash is part of the name: another lock file finds another directory.
    let short = locked.sha512.get(..16).unwrap_or_default();
    let directory = cache.join(format!("{}-{}-{short}", locked.package.replace(['@', '/'], "_"), locked.version));
    let program = directory.join(&locked.program);
    if program.exists() {
        return Ok(program);
    }
    host::install_missing(&[("npm", "npm")], progress)?;
    progress(&format!("getting {}@{} from the package registry, once on this machine", locked.package, locked.version));
    let unfinished = cache.join(format!("unfinished-{}", std::process::id()));
    let cannot = |error| format!("cannot use {}: {error}", unfinished.display());
    let _ = fs::remove_dir_all(&unfinished);
    fs::create_dir_all(&unfinished).map_err(cannot)?;
    let got = unpack(locked, &unfinished);
    if let Err(error) = got {
        let _ = fs::remove_dir_all(&unfinished);
        return Err(Failure::Failed(error));
    }
    if directory.exists() {
        // Another process was faster, or left half of it.
        let _ = fs::remove_dir_all(&directory);
    }
    fs::rename(&unfinished, &directory).map_err(cannot)?;
    Ok(program)
}

/// Gets a package, checks it, and takes the one program out.
fn unpack(locked: &Locked, directory: &Path) -> Result<(), String> {
    let name = format!("{}@{}", locked.package, locked.version);
    // `pack` only gets the file; it runs nothing of it.
    run_here(Command::new("npm").args(["pack", "--silent", &name]).current_dir(directory))?;
    let packed: Vec<PathBuf> = fs::read_dir(directory)
        .map_err(|error| format!("cannot read {}: {error}", directory.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    let [tarball] = packed.as_slice() else { return Err(format!("npm pack {name} left {packed:?}")) };
    let sum = run_here(Command::new("sha512sum").arg(tarball))?;
    if sum.split_whitespace().next() != Some(locked.sha512.as_str()) {
        return Err(format!("{name} is not what tests/node/runtimes.lock says: SHA-512 {sum}"));
    }
    run_here(Command::new("tar").arg("-xzf").arg(tarball).arg("-C").arg(directory).arg(&locked.program))?;
    fs::remove_file(tarball).map_err(|error| format!("cannot remove {}: {error}", tarball.display()))
}

/// Builds a single executable of the smoke's main module, as OpenCode's own build does.
fn build_single(node: &Path, work: &Path) -> Result<PathBuf, String> {
    let (config, output) = (work.join("sea.json"), work.join("smoke-sea"));
    let text = json!({
        "main": host::workspace().join("tests/node/smoke/main.js"),
        "mainFormat": "module",
        "output": output,
        "disableExperimentalSEAWarning": true,
        "execArgvExtension": "none",
    });
    fs::write(&config, text.to_string()).map_err(|error| format!("cannot write {}: {error}", config.display()))?;
    run_here(Command::new(node).arg("--build-sea").arg(&config))?;
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_lock_file_is_taken_apart() {
        let text = "# comment\nnode one@1.2.3 aa package/bin/node\nbun @oven/bun@4.5 bb package/bin/bun\n";
        let bun = parse(text, "bun").expect("it is there");
        assert_eq!((bun.package.as_str(), bun.version.as_str()), ("@oven/bun", "4.5"));
        assert_eq!((bun.sha512.as_str(), bun.program.as_str()), ("bb", "package/bin/bun"));
        assert!(parse(text, "nod").is_none());
        assert!(parse("node one@1 aa\n", "node").is_none());
    }

    #[test]
    fn every_runtime_is_in_the_lock_file() {
        for (_, locked, _) in NAMES {
            let locked = lock(locked).expect("a line");
            assert_eq!(locked.sha512.len(), 128);
        }
    }
}
