//! The server's EnvironmentFiles: the password is in one of them (threat T23).

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;

use super::context::{Context, is_loaded};
use super::report::Finding;

pub fn files(context: &Context) -> Finding {
    let unit = match context.server() {
        Ok(unit) if is_loaded(unit) => unit,
        Ok(_) => return Finding::skipped("there is no opencode-v2.service"),
        Err(why) => return Finding::not_run(why, "see the check 'manager'"),
    };
    let Ok(account) = &context.account else {
        return Finding::not_run("there is no account that could own them", "see the check 'account'");
    };
    // Each is shown as its path and whether it may be missing.
    let paths: Vec<&str> = unit
        .get("EnvironmentFiles")
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .filter_map(|entry| entry.rsplit_once(' ').map(|(path, _)| path))
        .collect();
    if paths.is_empty() {
        return Finding::skipped("opencode-v2.service has no EnvironmentFile=");
    }
    let (mut problems, mut readable) = (Vec::new(), Vec::new());
    for path in &paths {
        match fs::symlink_metadata(path) {
            Ok(found) => {
                problems.extend(judge(path, &found, account.uid()));
                if found.uid() != 0 {
                    readable.push(*path);
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                return Finding::not_run(format!("{path}: {error}"), "run as root");
            }
            Err(error) => problems.push(format!("{path}: {error}")),
        }
    }
    let remedy = "chown root:root and chmod 0600: PID 1 reads them";
    let reason = if readable.is_empty() {
        format!("{} are root's and 0600, which no session can read", paths.join(" "))
    } else {
        format!("0600, but readable by the account and so by EVERY SESSION: {} (T23; {remedy})", readable.join(" "))
    };
    Finding::from_problems(&problems, reason, remedy)
}

/// A regular file of root's or the account's that nobody else can open.
fn judge(path: &str, found: &Metadata, account: u32) -> Option<String> {
    let (uid, mode) = (found.uid(), found.mode() & 0o7777);
    if !found.is_file() {
        Some(format!("{path} is no regular file"))
    } else if uid != 0 && uid != account {
        Some(format!("{path} is owned by uid {uid}"))
    } else if mode & 0o177 != 0 {
        Some(format!("{path} has mode {mode:04o}, should be 0600"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_others_can_open_is_named() {
        let judged = |path: &str, account| judge(path, &fs::symlink_metadata(path).unwrap(), account);
        assert_eq!(judged("/etc/passwd", 1000).as_deref(), Some("/etc/passwd has mode 0644, should be 0600"));
        assert_eq!(judged("/proc/self", 1000).as_deref(), Some("/proc/self is no regular file"));
    }
}
