//! Whether the host has what sessions rest on: kernel, manager, bus, programs, account.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use landlock::{LandlockStatus, RestrictSelf};

use super::context::{Context, run};
use super::report::Finding;
use crate::limits::{CGROUP_ROOT, SCRIPT_PATH, SHELL_PATH};
use crate::report::{Chain, quoted};
use crate::sys::peer::{self, PeerPidfd};
use crate::sys::process;

/// The first Linux with SO_PEERPIDFD.
const KERNEL_MIN: (u32, u32) = (6, 5);
/// The oldest systemd this program is tested on.
const SYSTEMD_MIN: u32 = 252;
/// The first Landlock ABI with scopes (Linux 6.12).
pub const SCOPES_ABI: i32 = 6;

/// The two numbers that a version begins with.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    let major = numbers.next()?.parse().ok()?;
    Some((major, numbers.next().and_then(|minor| minor.parse().ok()).unwrap_or(0)))
}

pub fn kernel(_: &Context) -> Finding {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let (release, machine) = (release.trim(), std::env::consts::ARCH);
    let (major, minor) = KERNEL_MIN;
    match version(release) {
        Some(found) if found >= KERNEL_MIN => Finding::passed(format!("Linux {release}, {machine}")),
        _ => Finding::failed(
            format!("Linux {release}: before {major}.{minor} a socket does not say which process is its peer"),
            format!("run Linux {major}.{minor} or newer"),
        ),
    }
}

pub fn peer_pidfd(_: &Context) -> Finding {
    let remedy = "run a kernel that has SO_PEERPIDFD (Linux 6.5), and no filter that takes it away";
    let tried = UnixStream::pair().and_then(|(left, _right)| {
        let credentials = peer::credentials(&left)?;
        Ok((credentials.pid, peer::pidfd(&left)?))
    });
    match tried {
        Ok((pid, PeerPidfd::Process(_))) if pid == std::process::id() => {
            Finding::passed("a socketpair gave the pidfd of its creator")
        }
        Ok((pid, other)) => Finding::failed(format!("a socketpair said pid {pid} and {other:?}"), remedy),
        Err(error) => Finding::failed(format!("a socketpair said: {error}"), remedy),
    }
}

pub fn cgroups(_: &Context) -> Finding {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    match mounted_as(&mounts, CGROUP_ROOT) {
        Some("cgroup2") => Finding::passed(format!("the unified hierarchy is mounted at {CGROUP_ROOT}")),
        found => Finding::failed(
            format!("{CGROUP_ROOT} is {} and not the unified hierarchy", found.unwrap_or("not mounted")),
            "boot with systemd.unified_cgroup_hierarchy=1",
        ),
    }
}

/// What is mounted at `place`, by the text of `/proc/self/mounts`: the last mount covers those before it.
fn mounted_as<'a>(mounts: &'a str, place: &str) -> Option<&'a str> {
    let mount = |line: &'a str| {
        let mut fields = line.split(' ').skip(1);
        (fields.next()? == place).then(|| fields.next())?
    };
    mounts.lines().filter_map(mount).next_back()
}

pub fn controllers(_: &Context) -> Finding {
    let found = fs::read_to_string(Path::new(CGROUP_ROOT).join("cgroup.controllers")).unwrap_or_default();
    let missing: Vec<&str> = ["cpu", "io", "memory", "pids"]
        .into_iter()
        .filter(|wanted| !found.split_whitespace().any(|name| name == *wanted))
        .collect();
    if missing.is_empty() {
        Finding::passed(format!("{} (limits of sessions and slice are in force)", found.trim()))
    } else if Path::new("/run/systemd/container").exists() {
        Finding::skipped(format!("this container was given no {}: no such limit is in force here", missing.join(", ")))
    } else {
        Finding::failed(
            format!("the unified hierarchy lacks {}: sessions are not limited", missing.join(", ")),
            "boot without cgroup v1 controllers (cgroup_no_v1=all)",
        )
    }
}

pub fn manager(context: &Context) -> Finding {
    match &context.manager_version {
        Err(why) => Finding::failed(why.as_str(), "boot with systemd, and start dbus.service"),
        Ok(found) => match version(found) {
            Some((major, _)) if major >= SYSTEMD_MIN => Finding::passed(format!("systemd {found}")),
            _ => Finding::failed(format!("systemd {found}"), format!("run systemd {SYSTEMD_MIN} or newer")),
        },
    }
}

/// Tries to become the manager's name's owner as the account: the policy is what the bus does, not what files say.
pub fn bus(context: &Context) -> Finding {
    let remedy = "remove what allows it from /etc/dbus-1/system.d and /usr/share/dbus-1/system.d, reload dbus.service";
    if let Err(why) = &context.manager_version {
        return Finding::failed(why.as_str(), "start dbus.service, and nothing else that owns the manager's name");
    }
    let Ok(account) = &context.account else {
        return Finding::not_run("there is no account to try it as", "see the check 'account'");
    };
    let mut command = Command::new("/proc/self/exe");
    command.args(["selftest", super::ATTEMPT, "own-manager-name"]);
    let own = crate::account::Account::of_this_process();
    if context.is_root {
        command.uid(account.uid()).gid(account.gid());
    } else if own.map(|own| own.uid()).ok() != Some(account.uid()) {
        return Finding::not_run("the account's rights on the bus can only be tried as the account", "run as root");
    }
    match run(&mut command) {
        Ok(ran) if ran.said == "manager-name: shut" => {
            Finding::passed("the manager's name is owned by PID 1 as root, and the account is refused it")
        }
        Ok(ran) if ran.said == "manager-name: open" => Finding::failed(
            format!("the bus policy lets {} own org.freedesktop.systemd1", quoted(&context.account_name)),
            remedy,
        ),
        Ok(ran) => Finding::not_run(format!("the attempt said {}", quoted(&ran.said)), remedy),
        Err(why) => Finding::not_run(why, "run from a place that the account may execute programs in"),
    }
}

/// Whether anybody may execute `path`; whoever runs this check may be root, whom nothing stops.
fn for_anybody(path: &str) -> Result<(), String> {
    process::check_executable(path.as_ref()).map_err(|error| format!("{path}: {error}"))?;
    let mode = fs::metadata(path).map_err(|error| format!("{path}: {error}"))?.permissions().mode();
    if mode & 0o005 == 0o005 { Ok(()) } else { Err(format!("{path}: mode {:04o}", mode & 0o7777)) }
}

pub fn script(_: &Context) -> Finding {
    let remedy = "install script(1) of util-linux (Debian: bsdutils) at /usr/bin/script";
    if let Err(why) = for_anybody(SCRIPT_PATH) {
        return Finding::failed(why, remedy);
    }
    match run(Command::new(SCRIPT_PATH).args(["-q", "-e", "-f", "-c", "echo said; exit 7", "/dev/null"])) {
        Ok(ran) if ran.code == Some(7) && ran.said.contains("said") => {
            let version = run(Command::new(SCRIPT_PATH).arg("--version"));
            Finding::passed(version.map_or_else(|why| why, |ran| ran.said))
        }
        Ok(ran) => Finding::failed(format!("`exit 7` in it gave {:?}, with {}", ran.code, quoted(&ran.said)), remedy),
        Err(why) => Finding::failed(why, remedy),
    }
}

pub fn shell(_: &Context) -> Finding {
    let remedy = "put a POSIX shell at /bin/sh";
    if let Err(why) = for_anybody(SHELL_PATH) {
        return Finding::failed(why, remedy);
    }
    match run(Command::new(SHELL_PATH).args(["-c", "exit 7"])) {
        Ok(ran) if ran.code == Some(7) => Finding::passed(format!(
            "{SHELL_PATH} is {}",
            fs::canonicalize(SHELL_PATH).map_or_else(|error| error.to_string(), |path| path.display().to_string())
        )),
        Ok(ran) => Finding::failed(format!("`exit 7` in it gave {:?}", ran.code), remedy),
        Err(why) => Finding::failed(why, remedy),
    }
}

/// The Landlock ABI that processes of this host have, or none.
pub fn landlock_abi() -> Result<Option<i32>, String> {
    // Without a flag to set, `apply` restricts nothing: it is the crate's only way to ask.
    match RestrictSelf::default().no_new_privs(false).apply() {
        Ok(status) => Ok(match status.landlock {
            LandlockStatus::Available { effective_abi, .. } => Some(effective_abi as i32),
            LandlockStatus::NotEnabled | LandlockStatus::NotImplemented => None,
        }),
        Err(error) => Err(format!("the kernel says: {error}")),
    }
}

pub fn landlock(_: &Context) -> Finding {
    match landlock_abi() {
        Err(why) => Finding::failed(why, "let processes use Landlock"),
        Ok(Some(abi)) if abi >= SCOPES_ABI => Finding::passed(format!(
            "ABI {abi}: sessions cannot trace, read, signal or reach by abstract sockets what is outside"
        )),
        Ok(Some(abi)) => Finding::passed(format!(
            "ABI {abi}: sessions cannot trace or read what is outside. NOT held below ABI {SCOPES_ABI}: signals to the \
             account's processes (see 'inspector'), and abstract sockets"
        )),
        Ok(None) => Finding::failed(
            "no Landlock: a session can read the server's environment, memory and descriptors, and signal it",
            "enable it in the kernel (CONFIG_SECURITY_LANDLOCK, lsm=landlock,...), and let no filter take it away",
        ),
    }
}

pub fn account(context: &Context) -> Finding {
    let account = match &context.account {
        Ok(account) => account,
        Err(error) => {
            let remedy = "make the account, or say --account NAME; sessions never run as root";
            return Finding::failed(Chain(error).to_string(), remedy);
        }
    };
    let database = fs::read_to_string("/etc/group").unwrap_or_default();
    let groups = groups_of(&database, account.name());
    let groups = if groups.is_empty() { "none".to_owned() } else { groups.join(" ") };
    let (name, uid, gid) = (account.name(), account.uid(), account.gid());
    if !Path::new(account.home()).is_dir() {
        let reason = format!("{name} ({uid}:{gid}) has no home {}", quoted(account.home()));
        return Finding::failed(reason, "make it");
    }
    Finding::passed(format!("{name} ({uid}:{gid}); in the groups {groups}, which the server has and sessions have not"))
}

/// The groups that have this member, by the text of `/etc/group`.
fn groups_of<'a>(database: &'a str, member: &str) -> Vec<&'a str> {
    let entry = |line: &'a str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        fields.nth(2)?.split(',').any(|known| known == member).then_some(name)
    };
    database.lines().filter_map(entry).collect()
}

pub fn ptrace_scope(_: &Context) -> Finding {
    let open = "Threat T21 stays open: other processes of the account can still read the server's /proc";
    match fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") {
        Ok(scope) if scope.trim() == "0" => Finding::failed(
            format!("0: any process of the account, outside sessions, can trace the server. {open}"),
            "sysctl kernel.yama.ptrace_scope=1 (or more), and in /etc/sysctl.d",
        ),
        Ok(scope) => Finding::passed(format!("{}. {open}", scope.trim())),
        Err(_) => Finding::skipped(format!("this kernel has no Yama to ask. {open}")),
    }
}

/// Where a manager looks for drop-ins.
const UNIT_PATHS: [&str; 7] = [
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
];

/// Sessions have random names, but drop-ins go by a name's beginning, too (systemd.unit(5)), and by type.
pub fn drop_ins(_: &Context) -> Finding {
    let found = |directory: &str| -> Vec<String> {
        let files = UNIT_PATHS.iter().flat_map(|path| fs::read_dir(format!("{path}/{directory}"))).flatten().flatten();
        let mut files: Vec<String> = files
            .map(|file| file.path().display().to_string())
            .filter(|path| Path::new(path).extension().is_some_and(|extension| extension == "conf"))
            .collect();
        files.sort();
        files
    };
    let ours: Vec<String> = ["opencode-.service.d", "opencode-pty-.service.d"].into_iter().flat_map(found).collect();
    let problems: Vec<String> = ours.iter().map(|path| format!("{path} changes sessions")).collect();
    let all = found("service.d");
    let reason = if all.is_empty() {
        "none, neither by name nor for every service".to_owned()
    } else {
        format!("none by name; for every service, for you to judge: {}", all.join(" "))
    };
    Finding::from_problems(&problems, reason, "remove it, systemctl daemon-reload")
}

/// Sockets whose daemons do what they are asked for, by their file names.
const POWERFUL: [&str; 9] = [
    "docker.sock",
    "containerd.sock",
    "podman.sock",
    "crio.sock",
    "buildkitd.sock",
    "unix.socket",
    "libvirt-sock",
    "system_bus_socket",
    "io.systemd.Machine",
];
/// Where a session sees nothing of the host: replaced or hidden in its unit.
const HIDDEN: [&str; 6] = ["/run/", "/var/run/", "/tmp/", "/var/tmp/", "/var/lib/lxd/", "/var/snap/lxd/"];

pub fn masks(_: &Context) -> Finding {
    let remedy = "have the daemon listen below /run alone";
    if fs::canonicalize("/var/run").is_ok_and(|path| path != Path::new("/run")) {
        return Finding::failed("/var/run is not /run: sockets there are not hidden", "make /var/run a link to /run");
    }
    let sockets = match fs::read_to_string("/proc/net/unix") {
        Ok(sockets) => sockets,
        Err(error) => return Finding::not_run(format!("cannot read /proc/net/unix: {error}"), "mount /proc"),
    };
    let listening = listening(&sockets);
    let (hidden, seen): (Vec<&str>, Vec<&str>) =
        listening.into_iter().partition(|path| HIDDEN.iter().any(|place| path.starts_with(place)));
    let problems: Vec<String> = seen
        .iter()
        .filter(|path| POWERFUL.iter().any(|name| path.rsplit('/').next() == Some(name)))
        .map(|path| format!("a session can reach {}", quoted(path)))
        .collect();
    let others = if seen.is_empty() {
        "none elsewhere".to_owned()
    } else {
        format!("elsewhere, for you to judge: {}", seen.join(" "))
    };
    Finding::from_problems(
        &problems,
        format!("{} sockets listen where sessions see nothing; {others}", hidden.len()),
        remedy,
    )
}

/// The paths of listening sockets in the text of `/proc/net/unix`: flag `SO_ACCEPTCON`, a path from the root.
fn listening(sockets: &str) -> Vec<&str> {
    let mut paths: Vec<&str> = sockets
        .lines()
        .filter(|line| line.split_ascii_whitespace().nth(3) == Some("00010000"))
        .filter_map(|line| line.get(line.find(" /")? + 1..))
        .collect();
    paths.sort_unstable();
    paths.dedup();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_kernels_and_managers_are_read() {
        assert_eq!(version("6.8.0-45-generic"), Some((6, 8)));
        assert_eq!(version("257.13-1~deb13u1"), Some((257, 13)));
        assert_eq!(version("252 (252.39-1~deb12u1)"), Some((252, 0)));
        assert_eq!(version("v6"), None);
    }

    #[test]
    fn groups_are_found_by_member_and_not_by_a_part_of_a_name() {
        let database = "adm:x:4:byk,eve\nsudo:x:27:bykk\nbyk:x:1000:\ndocker:x:1:eve,byk\nlxd:x:2:xbyk,b\nbroken";
        assert_eq!(groups_of(database, "byk"), ["adm", "docker"]);
    }

    #[test]
    fn of_two_mounts_at_one_place_the_last_counts() {
        let mounts = "cgroup /sys/fs/cgroup tmpfs rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(mounted_as(mounts, CGROUP_ROOT), Some("tmpfs"));
        assert_eq!(mounted_as(&format!("{mounts}x /sys/fs/cgroup cgroup2 rw 0 0\n"), CGROUP_ROOT), Some("cgroup2"));
        assert_eq!(mounted_as("", CGROUP_ROOT), None);
    }

    #[test]
    fn only_listening_sockets_with_a_path_count() {
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000: 00000002 00000000 00010000 0001 01 1 /run/docker.sock\n\
            0000: 00000003 00000000 00000000 0001 03 2 /run/docker.sock\n\
            0000: 00000002 00000000 00010000 0001 01 3 @abstract\n\
            0000: 00000002 00000000 00010000 0001 01 4\n\
            0000: 00000002 00000000 00010000 0001 01 5 /srv/a b\n";
        assert_eq!(listening(table), ["/run/docker.sock", "/srv/a b"]);
    }
}
