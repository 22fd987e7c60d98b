//! What is checked: stable names, the group and the stage each belongs to, and the acceptance checks it serves.
//!
//! `docs/root-acceptance.md` names these, and `--list-checks` prints them. A name is never given another meaning.

use super::context::Context;
use super::report::Finding;
use super::{environment, files, host, marker, server, units};

/// When it makes sense to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A disposable virtual machine, or any host that may start units.
    Vm,
    /// The target host, before anything is installed.
    BeforeInstall,
    /// The target host, installed and not started.
    Installed,
}

impl Stage {
    /// The word in lists and in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::BeforeInstall => "before-install",
            Self::Installed => "installed",
        }
    }
}

/// How a check is made.
#[derive(Clone, Copy)]
pub enum How {
    /// By looking.
    Look(fn(&Context) -> Finding),
    /// By the private supervisor of `--live`.
    Live,
}

/// One check.
pub struct Check {
    /// Its stable name.
    pub name: &'static str,
    /// `host`, `installed` or `live`.
    pub group: &'static str,
    /// When it makes sense to look.
    pub stage: Stage,
    /// The checks of root acceptance that it serves.
    pub acceptance: &'static [u8],
    /// What it establishes, in a line.
    pub what: &'static str,
    /// How it is made.
    pub how: How,
}

/// The groups that `--only` takes beside names.
pub const GROUPS: [&str; 3] = ["host", "installed", "live"];

const fn host(
    name: &'static str,
    acceptance: &'static [u8],
    look: fn(&Context) -> Finding,
    what: &'static str,
) -> Check {
    Check { name, group: "host", stage: Stage::BeforeInstall, acceptance, what, how: How::Look(look) }
}

const fn installed(
    name: &'static str,
    stage: Stage,
    acceptance: &'static [u8],
    look: fn(&Context) -> Finding,
    what: &'static str,
) -> Check {
    Check { name, group: "installed", stage, acceptance, what, how: How::Look(look) }
}

const fn live(name: &'static str, acceptance: &'static [u8], what: &'static str) -> Check {
    Check { name, group: "live", stage: Stage::Vm, acceptance, what, how: How::Live }
}

/// All of them, in the order in which they are made.
pub const CHECKS: &[Check] = &[
    host("kernel", &[4], host::kernel, "Linux 6.5 or newer on amd64"),
    host("peer-pidfd", &[4], host::peer_pidfd, "SO_PEERPIDFD, tried on a real socket"),
    host("cgroups", &[12], host::cgroups, "the unified cgroup hierarchy"),
    host("controllers", &[13], host::controllers, "its controllers cpu, io, memory and pids"),
    host("manager", &[3, 7], host::manager, "systemd 252 or newer"),
    host("bus", &[4], host::bus, "the manager's name is PID 1's, and the account may not own it"),
    host("script", &[10], host::script, "script(1) of util-linux can be executed by anybody and hands on exit codes"),
    host("shell", &[10], host::shell, "/bin/sh can be executed by anybody and runs a command"),
    host("landlock", &[8], host::landlock, "Landlock's ABI, and what is not held below ABI 6"),
    host("account", &[4, 7], host::account, "the account and its groups"),
    host("ptrace-scope", &[8], host::ptrace_scope, "Yama's ptrace scope (threat T21 stays open whatever it says)"),
    host("masks", &[8], host::masks, "daemons that would work for the account listen where sessions see nothing"),
    host(
        "drop-ins",
        &[3, 7],
        host::drop_ins,
        "no drop-in changes units by their names' beginning, sessions among them",
    ),
    installed(
        "files",
        Stage::Installed,
        &[2, 16],
        files::installed,
        "one file under three names; owners, modes, every directory above",
    ),
    installed(
        "unit-supervisor",
        Stage::Installed,
        &[3],
        units::supervisor,
        "opencode-pty-supervisor.service as loaded against what this version ships",
    ),
    installed(
        "unit-slice",
        Stage::Installed,
        &[3, 13],
        units::slice,
        "opencode-pty.slice as loaded against what this version ships",
    ),
    installed(
        "unit-server",
        Stage::Installed,
        &[3],
        units::server,
        "opencode-v2.service as loaded against what this version ships, but for its ExecStart=",
    ),
    installed(
        "unit-masks",
        Stage::Installed,
        &[3, 8],
        units::masks,
        "the supervisor's own InaccessiblePaths= are all in force",
    ),
    installed("marker", Stage::Installed, &[16], marker::marker, "the readiness marker: form, revision, hashes"),
    installed(
        "socket",
        Stage::Vm,
        &[4],
        server::socket,
        "the socket's type, owner, group and mode, and its directory's",
    ),
    installed(
        "server",
        Stage::Vm,
        &[4, 8],
        server::server,
        "the running server's NotifyAccess, PrivateTmp, NoNewPrivileges and main process",
    ),
    installed("inspector", Stage::Vm, &[8], server::inspector, "SIGUSR1 opens no inspector in the running server"),
    installed(
        "environment-files",
        Stage::Installed,
        &[8],
        environment::files,
        "owner and mode of the server's EnvironmentFiles",
    ),
    live("live-hardening", &[3, 7], "the private supervisor runs with the hardening that ships"),
    live("live-unit", &[7], "a session is one correctly named unit with the required properties"),
    live("live-client", &[5], "the client helper sends the one start frame"),
    live("live-terminal", &[10], "a real terminal of 80 x 24, both outputs in order"),
    live("live-arguments", &[10], "argument boundaries are kept, bytes unchanged"),
    live("live-exit-codes", &[10], "exit codes, and signals as 128+n"),
    live("live-environment", &[7], "exactly seven variables"),
    live("live-privileges", &[7], "the account without supplementary groups, capabilities or new privileges"),
    live("live-workspace", &[8], "the workspace can be read and written"),
    live("live-network", &[8], "IPv4 and IPv6"),
    live("live-masks", &[8], "daemons' sockets are hidden: directly, through .. and through /proc/PID/root"),
    live("live-trace", &[8], "the server cannot be traced or read"),
    live("live-signal", &[8], "the server cannot be signalled (Landlock ABI 6)"),
    live("live-rlimits", &[8], "limits of the server cannot be set"),
    live("live-abstract", &[8], "abstract sockets outside are shut (Landlock ABI 6)"),
    live(
        "live-callers",
        &[4, 6],
        "another process of the account, a child of the server, root, another user: not served",
    ),
    live("live-frames", &[9], "bad frames and descriptors are refused with the right code"),
    live("live-sessions-max", &[11], "16 sessions, a refused 17th, and a place again afterwards"),
    live("live-stop", &[11, 12], "a stop is recorded, and the cgroup is gone"),
    live("live-escapes", &[11, 12], "setsid, double fork, HUP- and TERM-immune processes end with their session"),
    live("live-disconnect", &[11, 12], "a disconnect ends the whole unit"),
    live("live-expiry", &[11, 12], "a session ends at its runtime"),
    live("live-flood", &[11, 13], "a flood of output arrives whole"),
    live("live-slow-reader", &[11, 13], "a client that does not read stops its terminal and nobody else"),
    live("live-supervisor-killed", &[12], "sessions end with a supervisor that is killed"),
    live("live-clean", &[12], "no unit, file, socket or process of these checks is left"),
];

/// The check with this name.
pub fn by_name(name: &str) -> Option<&'static Check> {
    CHECKS.iter().find(|check| check.name == name)
}

/// The checks that a list of names and groups chooses; the first word that is neither, otherwise.
pub fn choose(words: &str) -> Result<Vec<&'static Check>, String> {
    let words: Vec<&str> = words.split(',').collect();
    if let Some(unknown) = words.iter().find(|word| !GROUPS.contains(word) && by_name(word).is_none()) {
        return Err((*unknown).to_owned());
    }
    let chosen = |check: &&Check| words.iter().any(|word| *word == check.name || *word == check.group);
    Ok(CHECKS.iter().filter(chosen).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_none_is_a_group() {
        let mut names: Vec<&str> = CHECKS.iter().map(|check| check.name).chain(GROUPS).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        for check in CHECKS {
            assert!(GROUPS.contains(&check.group), "{}", check.name);
            assert!(check.acceptance.iter().all(|number| (1..=16).contains(number)) && !check.acceptance.is_empty());
        }
    }

    #[test]
    fn names_and_groups_choose_in_the_order_of_the_list_and_a_stranger_is_named() {
        let names = |words: &str| choose(words).map(|checks| checks.iter().map(|check| check.name).collect::<Vec<_>>());
        assert_eq!(names("shell,kernel"), Ok(vec!["kernel", "shell"]));
        assert_eq!(names("live").unwrap().len(), CHECKS.iter().filter(|check| check.group == "live").count());
        for words in ["", "kernel,", "Kernel", "kernel,nothing"] {
            assert!(names(words).is_err(), "'{words}'");
        }
    }
}
