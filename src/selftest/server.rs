//! What runs: the supervisor's socket, and the server that it serves.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use super::context::{Context, Properties, is_loaded, value};
use super::report::Finding;
use crate::limits::{SERVER_UNIT_DEFAULT, SOCKET_PATH};

/// SIGUSR1 as a bit of the masks in `/proc/PID/status`: signal 10.
const SIGUSR1_BIT: u64 = 1 << 9;
/// The name of the thread in which Node waits for SIGUSR1 to open the inspector.
const INSPECTOR_THREAD: &str = "SignalInspector";

pub fn socket(context: &Context) -> Finding {
    let is_active = context.supervisor().is_ok_and(|unit| value(unit, "ActiveState") == "active");
    let found = match fs::symlink_metadata(SOCKET_PATH) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            return Finding::not_run(format!("{SOCKET_PATH}: {error}"), "run as root");
        }
        Err(_) if !is_active => return Finding::skipped("the supervisor does not run"),
        Err(error) => return Finding::failed(format!("{SOCKET_PATH}: {error}"), "restart the supervisor"),
    };
    let Ok(account) = &context.account else {
        return Finding::not_run("there is no account whose group it should have", "see the check 'account'");
    };
    let mut problems = Vec::new();
    if !found.file_type().is_socket() {
        problems.push(format!("{SOCKET_PATH} is no socket"));
    }
    let directory = Path::new(SOCKET_PATH).parent().unwrap_or(Path::new("/"));
    let mut judge = |name: &str, found: &fs::Metadata, mode: u32| {
        let is = (found.uid(), found.gid(), found.mode() & 0o7777);
        if is != (0, account.gid(), mode) {
            let (uid, gid, found) = is;
            let wanted = account.gid();
            problems.push(format!("{name} is {uid}:{gid} {found:04o}, should be 0:{wanted} {mode:04o}"));
        }
    };
    judge(SOCKET_PATH, &found, 0o660);
    match fs::symlink_metadata(directory) {
        Ok(found) => judge(&directory.display().to_string(), &found, 0o750),
        Err(error) => problems.push(format!("{}: {error}", directory.display())),
    }
    let gid = account.gid();
    Finding::from_problems(
        &problems,
        format!("{SOCKET_PATH}, 0:{gid} 0660, in a directory of 0:{gid} 0750"),
        "systemctl restart opencode-pty-supervisor.service; find out who changed it",
    )
}

/// The running server's properties and main process, or what to say instead.
fn running(context: &Context) -> Result<(&Properties, u32), Finding> {
    let unit = context.server().map_err(|why| Finding::not_run(why, "see the check 'manager'"))?;
    let pid = value(unit, "MainPID").parse().unwrap_or(0);
    if !is_loaded(unit) || value(unit, "ActiveState") != "active" || pid == 0 {
        return Err(Finding::skipped(format!("{SERVER_UNIT_DEFAULT} does not run")));
    }
    Ok((unit, pid))
}

/// A field of `/proc/PID/status`.
fn status_field(status: &str, name: &str) -> Option<String> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(|text| text.trim().to_owned())
}

pub fn server(context: &Context) -> Finding {
    let (unit, pid) = match running(context) {
        Ok(running) => running,
        Err(finding) => return finding,
    };
    let Ok(account) = &context.account else {
        return Finding::not_run("there is no account that it should run as", "see the check 'account'");
    };
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mut problems = Vec::new();
    if !matches!(value(unit, "NotifyAccess"), "none" | "main" | "exec") {
        problems
            .push(format!("NotifyAccess is {}: any child can name itself main process", value(unit, "NotifyAccess")));
    }
    for (name, wanted) in [("PrivateTmp", "yes"), ("NoNewPrivileges", "yes")] {
        if value(unit, name) != wanted {
            problems.push(format!("{name} is {}, should be {wanted}", value(unit, name)));
        }
    }
    let cgroup = format!("/system.slice/{SERVER_UNIT_DEFAULT}");
    if value(unit, "ControlGroup") != cgroup {
        problems.push(format!("its control group is {}, should be {cgroup}", value(unit, "ControlGroup")));
    }
    if status_field(&status, "NoNewPrivs").as_deref() != Some("1") {
        problems.push(format!("its main process {pid} may gain privileges"));
    }
    let uids = status_field(&status, "Uid").unwrap_or_default();
    if !uids.split_whitespace().all(|uid| uid == account.uid().to_string()) || uids.is_empty() {
        problems.push(format!("its main process {pid} has the uids {uids}"));
    }
    Finding::from_problems(
        &problems,
        format!("main process {pid} of {cgroup}, NotifyAccess={}", value(unit, "NotifyAccess")),
        "install opencode-v2.service of this version, and restart it",
    )
}

pub fn inspector(context: &Context) -> Finding {
    let (_, pid) = match running(context) {
        Ok(running) => running,
        Err(finding) => return finding,
    };
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let Some(caught) = status_field(&status, "SigCgt").and_then(|mask| u64::from_str_radix(&mask, 16).ok()) else {
        return Finding::not_run(format!("cannot read /proc/{pid}/status"), "run as root");
    };
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let waits = threads
        .filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok())
        .any(|name| name.trim() == INSPECTOR_THREAD);
    let command_line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let disabled = command_line.split(|byte| *byte == 0).any(|word| word == b"--disable-sigusr1");
    judge_inspector(pid, caught & SIGUSR1_BIT != 0, waits, disabled)
}

/// Node starts the thread unless told not to, whether or not the program later takes the signal for itself.
fn judge_inspector(pid: u32, caught: bool, waits: bool, disabled: bool) -> Finding {
    let process = format!("main process {pid}");
    match (caught, waits, disabled) {
        (_, _, true) => Finding::passed(format!("{process} was started with --disable-sigusr1")),
        (false, _, false) => Finding::passed(format!("{process} does not catch SIGUSR1")),
        (true, false, false) => Finding::passed(format!("{process} catches SIGUSR1, and not for an inspector")),
        (true, true, false) => Finding::not_run(
            format!(
                "{process} catches SIGUSR1 and Node's inspector thread waits for it; whether a handler of the program \
                 has taken its place cannot be seen from here"
            ),
            "run the server with --disable-sigusr1; or send a disposable copy of it SIGUSR1 and see that nothing listens",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selftest::report::Status;

    #[test]
    fn an_inspector_that_waits_for_a_signal_is_no_pass() {
        for (caught, waits, disabled, want) in [
            (true, true, false, Status::NotRun),
            (true, true, true, Status::Passed),
            (true, false, false, Status::Passed),
            (false, false, false, Status::Passed),
        ] {
            assert_eq!(judge_inspector(1, caught, waits, disabled).status, want, "{caught} {waits} {disabled}");
        }
    }

    #[test]
    fn a_field_of_a_status_is_found_by_its_whole_name() {
        let status = "SigCgtX:\t1\nSigCgt:\t0000000000000200\n";
        assert_eq!(status_field(status, "SigCgt").as_deref(), Some("0000000000000200"));
        assert_eq!(status_field(status, "Sig"), None);
    }
}
