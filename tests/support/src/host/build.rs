//! Builds what a host is given: static binaries, so that one build runs on every suite.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::Error;

/// Named, so that what cargo builds to run here (build scripts, macros) is not built with [`STATIC`].
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// The flags of a binary that needs nothing of its host but the kernel.
const STATIC: &str = "-C target-feature=+crt-static";

/// The workspace's directory.
pub fn workspace() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(2).unwrap_or(manifest).to_owned()
}

/// Where cargo puts what it builds here.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

/// Builds the product as it is shipped; the path of the binary.
pub fn build_product() -> Result<PathBuf, Error> {
    let target = target().join("static");
    let mut build = cargo(&["build", "--package", "opencode-pty", "--bin", "opencode-pty", "--release"]);
    build.args(["--target", TRIPLE, "--target-dir"]).arg(&target).env("RUSTFLAGS", STATIC);
    run(&mut build, "build opencode-pty")?;
    Ok(target.join(TRIPLE).join("release/opencode-pty"))
}

/// Builds the stand-in server; the path of the binary.
pub fn build_standin() -> Result<PathBuf, Error> {
    build_helper("opencode-standin")
}

/// Builds the program that answers inside a VM; the path of the binary.
pub fn build_vm_agent() -> Result<PathBuf, Error> {
    build_helper("opencode-vm-agent")
}

/// Builds one of the support crate's programs.
///
/// Apart from the product, so that what its dependencies ask of theirs does not get into the product. Only the last step is
/// different from a plain build, so that a plain build's libraries serve.
fn build_helper(name: &str) -> Result<PathBuf, Error> {
    let doing = format!("build {name}");
    let mut build = cargo(&["rustc", "--package", "support", "--bin", name, "--"]);
    build.args(STATIC.split(' '));
    run(&mut build, &doing)?;
    // Where cargo puts it, the next plain build puts another. By a rename: another command may be reading the one that is there.
    let copy = target().join("static").join(name);
    let new = copy.with_extension(format!("{}.new", std::process::id()));
    std::fs::create_dir_all(target().join("static"))
        .and_then(|()| std::fs::copy(target().join("debug").join(name), &new))
        .and_then(|_| std::fs::rename(&new, &copy))
        .map_err(Error::system(doing))?;
    Ok(copy)
}

/// Builds what measures, optimized: the stand-in with its measurements, and the hot loops. The paths of both binaries.
pub fn build_bench() -> Result<(PathBuf, PathBuf), Error> {
    let target = target().join("static");
    let mut build = cargo(&["build", "--package", "support", "--profile", "measuring"]);
    build.args(["--bin", "opencode-standin", "--bin", "opencode-loops", "--target", TRIPLE, "--target-dir"]);
    build.arg(&target).env("RUSTFLAGS", STATIC);
    run(&mut build, "build what measures")?;
    let binaries = target.join(TRIPLE).join("measuring");
    Ok((binaries.join("opencode-standin"), binaries.join("opencode-loops")))
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(workspace()).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Runs cargo: with its own progress if somebody watches, otherwise silently.
fn run(cargo: &mut Command, doing: &str) -> Result<(), Error> {
    let watched = std::io::stderr().is_terminal();
    if !watched {
        cargo.env("CARGO_TERM_QUIET", "true");
    }
    let stderr = if watched { Stdio::inherit() } else { Stdio::piped() };
    let output =
        cargo.stderr(stderr).spawn().and_then(Child::wait_with_output).map_err(Error::system(doing.to_owned()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::failed(doing, format!("{}\n{}", output.status, String::from_utf8_lossy(&output.stderr))))
}
