//! What is installed: one file under three names that nobody but root can change, down to the last directory.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use super::context::{Context, is_loaded};
use super::report::Finding;
use crate::report::quoted;

/// Where the three names are.
pub const LIBEXEC: &str = "/usr/local/libexec";
/// The names, in the order of the marker.
pub const NAMES: [&str; 3] = ["opencode-pty-supervisor", "opencode-pty-launcher", "opencode-pty-client"];
/// The readiness verifier, a script of its own.
pub const VERIFIER: &str = "/usr/local/libexec/opencode-pty-verify-readiness";
/// The operator's link.
const LINK: &str = "/usr/local/sbin/opencode-pty";
/// Where units are installed.
const UNITS: &str = "/etc/systemd/system";

/// Who may own a file or directory, and with which mode at most.
pub struct Rule {
    /// The one mode it may have; `None` for a directory, which only has to be closed to others' writing.
    pub mode: Option<u32>,
    /// Regular file or directory.
    pub directory: bool,
}

/// What is wrong with this file or directory, which must be root's; `None` if nothing is there.
pub fn judge(path: &Path, rule: &Rule) -> Option<Vec<String>> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => return Some(vec![format!("{}: {error}", path.display())]),
    };
    Some(judge_metadata(&path.display().to_string(), &found, rule))
}

fn judge_metadata(name: &str, found: &Metadata, rule: &Rule) -> Vec<String> {
    let kind = found.file_type();
    let mut problems = Vec::new();
    if kind.is_symlink() || kind.is_dir() != rule.directory || (!rule.directory && !kind.is_file()) {
        let wanted = if rule.directory { "directory" } else { "regular file" };
        let is = if kind.is_symlink() {
            "a link"
        } else if kind.is_socket() {
            "a socket"
        } else {
            "something else"
        };
        problems.push(format!("{name} is {is} and no {wanted}"));
        return problems;
    }
    let mode = found.mode() & 0o7777;
    let (uid, gid) = (found.uid(), found.gid());
    if uid != 0 {
        problems.push(format!("{name} is owned by uid {uid}, not by root"));
    }
    match rule.mode {
        Some(wanted) if mode != wanted => problems.push(format!("{name} has mode {mode:04o}, not {wanted:04o}")),
        Some(_) if gid != 0 => problems.push(format!("{name} has group {gid}, not root's")),
        None if mode & 0o022 != 0 => {
            problems.push(format!("{name} has mode {mode:04o}: others than root can put files there (group {gid})"));
        }
        _ => {}
    }
    problems
}

/// What is wrong with the directories above `path`: each must be root's and closed to others' writing.
pub fn judge_parents(path: &Path) -> Vec<String> {
    let rule = Rule { mode: None, directory: true };
    let mut problems: Vec<String> = path
        .ancestors()
        .skip(1)
        .flat_map(|parent| judge(parent, &rule).unwrap_or_else(|| vec![format!("{} is missing", parent.display())]))
        .collect();
    problems.reverse();
    problems
}

/// Whether anything of the product is installed.
pub fn anything_installed(context: &Context) -> bool {
    let file = NAMES.iter().any(|name| Path::new(LIBEXEC).join(name).symlink_metadata().is_ok());
    file || context.supervisor().is_ok_and(is_loaded)
}

pub fn installed(context: &Context) -> Finding {
    if !anything_installed(context) {
        return Finding::skipped(format!("nothing is installed in {LIBEXEC}"));
    }
    let mut problems = judge_parents(&Path::new(LIBEXEC).join("x"));
    let mut inodes = Vec::new();
    for name in NAMES {
        let path = Path::new(LIBEXEC).join(name);
        match judge(&path, &Rule { mode: Some(0o755), directory: false }) {
            None => problems.push(format!("{} is missing", path.display())),
            Some(found) => problems.extend(found),
        }
        inodes.extend(fs::symlink_metadata(&path).map(|found| (found.dev(), found.ino())));
    }
    inodes.dedup();
    if inodes.len() > 1 {
        problems.push("supervisor, launcher and client are not three names of one file (second inode)".to_owned());
    }
    for unit in ["opencode-pty-supervisor.service", "opencode-pty.slice", "opencode-v2.service"] {
        let path = Path::new(UNITS).join(unit);
        problems.extend(judge(&path, &Rule { mode: Some(0o644), directory: false }).unwrap_or_default());
    }
    problems.extend(judge_parents(&Path::new(UNITS).join("x")));
    problems.extend(judge(VERIFIER.as_ref(), &Rule { mode: Some(0o755), directory: false }).unwrap_or_default());
    if let Ok(target) = fs::read_link(LINK)
        && fs::canonicalize(LINK).ok().as_deref() != Some(&Path::new(LIBEXEC).join(NAMES[0]))
    {
        problems.push(format!("{LINK} leads to {}", quoted(&target.to_string_lossy())));
    }
    problems.sort();
    problems.dedup();
    let hash = super::marker::hash_of(&Path::new(LIBEXEC).join(NAMES[0])).unwrap_or_else(|why| why);
    Finding::from_problems(
        &problems,
        format!("one file under three names, sha256 {hash}; root's alone, like every directory above"),
        "install again as docs/install.md says; chown root:root, chmod 0755 (units 0644); find out who changed it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_a_link_and_a_directory_in_a_files_place_are_named() {
        let of = |path: &str, mode| judge(path.as_ref(), &Rule { mode: Some(mode), directory: false });
        assert_eq!(of("/etc/passwd", 0o644), Some(vec![]));
        assert_eq!(of("/etc/passwd", 0o600), Some(vec!["/etc/passwd has mode 0644, not 0600".to_owned()]));
        assert_eq!(of("/etc", 0o755), Some(vec!["/etc is something else and no regular file".to_owned()]));
        assert_eq!(of("/proc/self", 0o755), Some(vec!["/proc/self is a link and no regular file".to_owned()]));
        assert_eq!(of("/nonexistent", 0o755), None);
    }

    #[test]
    fn a_directory_above_that_others_can_write_to_is_named() {
        let problems = judge_parents("/tmp/a".as_ref());
        assert!(problems.iter().any(|problem| problem.starts_with("/tmp has mode 1777")), "{problems:?}");
        assert_eq!(judge_parents("/etc/passwd".as_ref()), Vec::<String>::new());
    }
}
