//! Puts programs in place that a test then executes.
//!
//! By children. A child of another thread of the test has a copy of every descriptor until it executes its own program: while it
//! has one that a program was written through, executing that program fails with `ETXTBSY`.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// Writes a script that everybody may execute.
///
/// # Panics
/// If it cannot.
pub fn write(path: &Path, text: &str) {
    put(Command::new("sh").args(["-c", "printf %s \"$1\" >\"$2\"", "sh", text]).arg(path), path);
}

/// Copies a program; everybody may execute the copy.
///
/// # Panics
/// If it cannot.
pub fn copy(from: &Path, path: &Path) {
    put(Command::new("cp").arg(from).arg(path), path);
}

fn put(by: &mut Command, path: &Path) {
    let put = by.status().is_ok_and(|status| status.success());
    assert!(put, "cannot write {}", path.display());
    let set = fs::set_permissions(path, Permissions::from_mode(0o755));
    assert!(set.is_ok(), "cannot make {} executable: {set:?}", path.display());
}
