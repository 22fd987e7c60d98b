//! Builds what a host is given: static binaries, so that one build runs on every suite.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::Error;

const TARGET: &str = "x86_64-unknown-linux-gnu";

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
    build("opencode-pty", "opencode-pty", "release")
}

/// Builds the stand-in server; the path of the binary.
///
/// Apart from the product, so that what its dependencies ask of theirs does not get into the product.
pub fn build_standin() -> Result<PathBuf, Error> {
    build("support", "opencode-standin", "dev")
}

fn build(package: &str, binary: &str, profile: &str) -> Result<PathBuf, Error> {
    let doing = format!("build {binary}");
    let workspace = workspace();
    let target = target().join("static");
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--quiet", "--package", package, "--bin", binary, "--profile", profile, "--target", TARGET])
        .arg("--target-dir")
        .arg(&target)
        .current_dir(&workspace)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .output()
        .map_err(Error::system(doing.clone()))?;
    if !output.status.success() {
        return Err(Error::failed(doing, format!("{}\n{}", output.status, String::from_utf8_lossy(&output.stderr))));
    }
    let directory = if profile == "dev" { "debug" } else { profile };
    Ok(target.join(TARGET).join(directory).join(binary))
}
