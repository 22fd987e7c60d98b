//! Throw-away hosts: real systemd, booted in a second from a cached root, gone without a trace.
//!
//! A host is a `systemd-nspawn` container whose root is an overlay: a pristine Debian below, a tmpfs above. Everything that
//! it consists of is a process or a mount in namespaces of its own, so that it ends by ending its processes. An *ephemeral*
//! host ends with the process that booted it, however that one dies: `keep.sh` holds a pipe from it. A *persistent* one stays
//! until somebody attaches to it by name and calls [`Host::down`].
//!
//! Paths under [`Host::path`] lead through `/proc/PID/root`: a symbolic link with an absolute target (`/var/run`) would
//! lead back to the machine, so name the directory it stands for.

mod build;
mod error;
mod install;
pub(crate) mod root;

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use crate::units::Account;

pub use build::{build_bench, build_product, build_standin, build_vm_agent, target, workspace};
pub use error::Error;
pub use install::{
    ENVIRONMENT_CANARY, PASSWORD_CANARY, STANDIN_PATH, WORKSPACE, copy_library, copy_program, copy_tree, install,
    install_standin, start, write,
};
pub use root::{cache, install_missing, install_readers, install_tools};

/// The supervisor's unit.
pub const SUPERVISOR: &str = "opencode-pty-supervisor.service";
/// The server's.
pub const SERVER: &str = "opencode-v2.service";

/// Where each host that is up has a directory, made and removed by `keep.sh`.
const STATES: &str = "/run/opencode-pty-hosts";

/// The search path of everything that runs inside a host, and of the tools used to get there.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// From the first process of a host to `systemctl is-system-running`. Chosen: about a second is usual.
const BOOT_MAX: Duration = Duration::from_secs(90);

/// From SIGKILL to the last cgroup removed. Chosen: 50 ms are usual.
const DOWN_MAX: Duration = Duration::from_secs(15);

/// Between two looks at something that sends no event.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// The Debian that a host runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// Debian 12: systemd 252, util-linux 2.38.
    Bookworm,
    /// Debian 12 with the systemd of its backports: 254.
    Backports,
    /// Debian 13: systemd 257, util-linux 2.41.
    Trixie,
}

impl Suite {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Trixie, Self::Bookworm, Self::Backports];

    /// Its name here.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Backports => "backports",
            Self::Trixie => "trixie",
        }
    }

    /// The name by which archives know the release it is built from.
    pub fn release(self) -> &'static str {
        match self {
            Self::Bookworm | Self::Backports => "bookworm",
            Self::Trixie => "trixie",
        }
    }

    /// The systemd it comes with: the version's first number.
    pub fn systemd(self) -> u32 {
        match self {
            Self::Bookworm => 252,
            Self::Backports => 254,
            Self::Trixie => 257,
        }
    }
}

impl fmt::Display for Suite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Suite {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|suite| suite.name() == name)
            .ok_or_else(|| format!("no such suite '{name}': bookworm, backports or trixie"))
    }
}

/// What host to boot.
#[derive(Clone, Debug)]
pub struct BootOptions {
    /// Its host name, and the name to attach by: 1 to 40 lower-case letters, digits and inner dashes.
    pub name: String,
    /// The release it runs.
    pub suite: Suite,
    /// Whether it ends with this process (and when its [`Host`] is dropped).
    pub ephemeral: bool,
}

/// A booted host.
#[derive(Debug)]
pub struct Host {
    name: String,
    suite: Suite,
    leader: u32,
    account: Account,
    /// The keeper of an ephemeral host, and the pipe whose closing ends it.
    keeper: Option<(Child, ChildStdin)>,
}

impl Host {
    /// Boots a host and waits until its systemd says that it is up.
    ///
    /// Installs the tools it needs, and builds the pristine root if it is not in the cache; both take a while and say so
    /// through `progress`.
    pub fn boot(options: &BootOptions, progress: &mut dyn FnMut(&str)) -> Result<Self, Error> {
        check_name(&options.name)?;
        let root = root::pristine(options.suite, progress)?;
        let life = if options.ephemeral { "ephemeral" } else { "persistent" };
        let mut keeper = Command::new("setsid")
            .args([
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "bash",
                "-c",
                include_str!("host/keep.sh"),
                "keep.sh",
            ])
            .arg(&options.name)
            .arg(&root)
            .args([STATES, life])
            .current_dir("/")
            .env("PATH", PATH)
            .stdin(if options.ephemeral { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Error::system("start the host's keeper"))?;

        // Without a pipe (a persistent host) there is nothing to hold.
        let pipe = keeper.stdin.take();
        let below = booting(&mut keeper)?;
        let console = File::open(state_dir(&options.name).join("console")).ok();
        let leader = match wait_for_leader(&mut keeper, below) {
            Ok(leader) => leader,
            Err(error) => return Err(error.and_detail(&tail(console))),
        };
        let keeper = pipe.map(|pipe| (keeper, pipe));
        let host =
            Self { name: options.name.clone(), suite: options.suite, leader, account: Account::default(), keeper };

        let ready = host.wait_until_up(progress).and_then(|()| host.write_state());
        if let Err(error) = ready {
            let error = error.and_detail(&tail(console));
            host.down()?;
            return Err(error);
        }
        Ok(host)
    }

    /// The host of this name that is already up, booted by this process or another.
    pub fn attach(name: &str) -> Result<Self, Error> {
        check_name(name)?;
        let gone = || Error::failed("find the host", format!("no host '{name}' is up"));
        let state = fs::read_to_string(state_dir(name).join("state")).map_err(|_| gone())?;
        let value =
            |key: &str| state.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).ok_or_else(gone);

        let leader = value("leader")?.parse().map_err(|_| gone())?;
        if start_time(leader).as_deref() != Some(value("starttime")?) {
            return Err(gone());
        }
        let suite = value("suite")?.parse().map_err(|_| gone())?;
        // Of a host whose account is the usual one, nothing is said.
        let account = match value("account") {
            Ok(words) => account_of(words).ok_or_else(gone)?,
            Err(_) => Account::default(),
        };
        Ok(Self { name: name.to_owned(), suite, leader, account, keeper: None })
    }

    /// The machine this process runs on, as a host of this name: the inside of a VM. [`Host::attach`] finds it from now on.
    pub fn this_machine(name: &str, suite: Suite) -> Result<Self, Error> {
        check_name(name)?;
        let host = Self { name: name.to_owned(), suite, leader: 1, account: Account::default(), keeper: None };
        fs::create_dir_all(state_dir(name)).map_err(Error::system(format!("make a directory for {host}")))?;
        host.write_state()?;
        Ok(host)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The release it runs.
    pub fn suite(&self) -> Suite {
        self.suite
    }

    /// The account that sessions and the server run as there.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Puts another account in the place of `byk`, with all its groups and the shell that lets nobody log in; before
    /// anything is installed.
    pub fn change_account(&mut self, account: Account) -> Result<(), Error> {
        let Account { name, group, uid, gid, home } = &account;
        let old = &self.account.name;
        self.sh_ok(&format!(
            "set -e
            groups=$(id -nG {old} | tr ' ' '\\n' | grep -vx {old} | paste -sd,)
            userdel --remove {old} 2>/dev/null
            groupadd --gid {gid} {group}
            useradd --create-home --home-dir {home} --uid {uid} --gid {gid} --shell /usr/sbin/nologin --groups $groups {name}
            chmod 0755 {home}"
        ))?;
        self.account = account;
        self.write_state()
    }

    /// The process, as seen from the machine, that is PID 1 inside.
    pub fn leader(&self) -> u32 {
        self.leader
    }

    /// What the host knows as `path`, as seen from the machine.
    ///
    /// # Panics
    /// If `path` is not absolute.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let inside = path.as_ref().strip_prefix("/").expect("a path inside a host is absolute");
        Path::new("/proc").join(self.leader.to_string()).join("root").join(inside)
    }

    /// A command that will run inside as root, in `/`, with a clean environment and in all of the host's namespaces.
    ///
    /// It belongs to no unit there. Killing the child ends `nsenter` only; what it started inside goes on.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = if self.leader == 1 {
            // The inside of a VM: there is nothing to enter.
            Command::new(program)
        } else {
            let mut enter = Command::new("nsenter");
            enter.args(["--all", "--target", &self.leader.to_string(), "--"]).arg(program);
            enter
        };
        command
            .current_dir("/")
            .env_clear()
            .env("PATH", PATH)
            .env("HOME", "/root")
            .env("USER", "root")
            .env("LOGNAME", "root")
            .env("LANG", "C.UTF-8");
        command
    }

    /// Runs a bash script inside, as root, without input, and waits for it.
    pub fn sh(&self, script: &str) -> Result<Output, Error> {
        self.run("/bin/bash", &["-c", script])
    }

    /// Like [`Host::sh`], but a failure is an error; what it printed, without the last newline.
    pub fn sh_ok(&self, script: &str) -> Result<String, Error> {
        self.run_ok("/bin/bash", &["-c", script])
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Result<Output, Error> {
        let output = self.command(program).args(arguments).stdin(Stdio::null()).output();
        output.map_err(Error::system(format!("run '{program} {}' in {self}", arguments.join(" "))))
    }

    /// Runs a program inside, as root, without input, and waits for it; what it printed, without the last newline. A failure
    /// is an error.
    pub fn run_ok(&self, program: &str, arguments: &[&str]) -> Result<String, Error> {
        let output = self.run(program, arguments)?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(Error::failed(
                format!("run '{program} {}' in {self}", arguments.join(" ")),
                format!("{}\n{stdout}{stderr}", output.status),
            ));
        }
        Ok(stdout.strip_suffix('\n').unwrap_or(&stdout).to_owned())
    }

    /// The whole journal since the host booted.
    pub fn journal(&self) -> Result<String, Error> {
        self.sh_ok("journalctl --boot --output=short-precise --no-pager")
    }

    /// Ends the host at once and waits until nothing of it is left.
    pub fn down(mut self) -> Result<(), Error> {
        self.end()
    }

    /// Blocks until its systemd has finished starting, whatever it thinks of the result.
    fn wait_until_up(&self, progress: &mut dyn FnMut(&str)) -> Result<(), Error> {
        let deadline = Instant::now() + BOOT_MAX;
        let socket = self.path("/run/systemd/private");
        while !socket.exists() {
            if Instant::now() > deadline || start_time(self.leader).is_none() {
                return Err(Error::failed(format!("boot {self}"), "systemd does not listen".to_owned()));
            }
            thread::sleep(LOOK_AGAIN);
        }
        let seconds = BOOT_MAX.as_secs();
        let output = self.sh(&format!("timeout {seconds} systemctl is-system-running --wait"))?;
        match String::from_utf8_lossy(&output.stdout).trim() {
            "running" => Ok(()),
            "degraded" => {
                let failed = self.sh_ok("systemctl list-units --failed --plain --no-legend --no-pager")?;
                progress(&format!("{self} is up, without: {failed}"));
                Ok(())
            }
            other => Err(Error::failed(format!("boot {self}"), format!("its systemd says '{other}'"))),
        }
    }

    fn write_state(&self) -> Result<(), Error> {
        let doing = format!("write the state file of {self}");
        let start_time =
            start_time(self.leader).ok_or_else(|| Error::failed(doing.clone(), "its systemd is gone".to_owned()))?;
        let account = if self.account == Account::default() {
            String::new()
        } else {
            let Account { name, group, uid, gid, home } = &self.account;
            format!("account={name} {group} {uid} {gid} {home}\n")
        };
        let text = format!("leader={}\nstarttime={start_time}\nsuite={}\n{account}", self.leader, self.suite);
        let dir = state_dir(&self.name);
        let unfinished = dir.join("state.new");
        File::create(&unfinished)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .and_then(|()| fs::rename(&unfinished, dir.join("state")))
            .map_err(Error::system(doing))
    }

    fn end(&mut self) -> Result<(), Error> {
        let pid = i32::try_from(self.leader).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid.filter(|_| state_dir(&self.name).exists()) {
            // It may have ended by itself.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        let deadline = Instant::now() + DOWN_MAX;
        if let Some((mut keeper, pipe)) = self.keeper.take() {
            drop(pipe);
            while matches!(keeper.try_wait(), Ok(None)) && Instant::now() < deadline {
                thread::sleep(LOOK_AGAIN);
            }
        }
        while state_dir(&self.name).exists() {
            if Instant::now() > deadline {
                return Err(Error::failed(format!("end {self}"), "something of it is still there".to_owned()));
            }
            thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host {} ({})", self.name, self.suite)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if self.keeper.is_some() {
            // Nobody is there to tell; the next host sweeps up what is left.
            let _ = self.end();
        }
    }
}

/// Names become host names, cgroup names and file names.
pub(crate) fn check_name(name: &str) -> Result<(), Error> {
    let letters = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    if letters && (1..=40).contains(&name.len()) && !name.starts_with('-') && !name.ends_with('-') {
        return Ok(());
    }
    let rule = "1 to 40 lower-case letters, digits and inner dashes";
    Err(Error::failed("name a host", format!("'{}' is not {rule}", name.escape_default())))
}

/// An account's line in the state file.
fn account_of(words: &str) -> Option<Account> {
    let words: Vec<&str> = words.split(' ').collect();
    let [name, group, uid, gid, home] = words.as_slice() else { return None };
    Some(Account {
        name: (*name).to_owned(),
        group: (*group).to_owned(),
        uid: uid.parse().ok()?,
        gid: gid.parse().ok()?,
        home: (*home).to_owned(),
    })
}

fn state_dir(name: &str) -> PathBuf {
    Path::new(STATES).join(name)
}

/// Reads the keeper's line: the process below which all of the host will be.
fn booting(keeper: &mut Child) -> Result<u32, Error> {
    let doing = "boot a host";
    let stdout = keeper.stdout.take().ok_or_else(|| Error::failed(doing, "no pipe".to_owned()))?;
    let mut said = String::new();
    for line in BufReader::new(stdout).lines() {
        let line = line.map_err(Error::system("read from the host's keeper"))?;
        if let Some(pid) = line.strip_prefix("booting ").and_then(|pid| pid.parse().ok()) {
            return Ok(pid);
        }
        said.push_str(&line);
        said.push('\n');
    }
    let _ = keeper.wait();
    Err(Error::failed(doing, said))
}

/// Waits until PID 1 of the host is systemd.
fn wait_for_leader(keeper: &mut Child, below: u32) -> Result<u32, Error> {
    let deadline = Instant::now() + BOOT_MAX;
    loop {
        if let Some(leader) = find_leader(below) {
            return Ok(leader);
        }
        let ended = keeper.try_wait().map_err(Error::system("wait for the host's keeper"))?;
        if let Some(status) = ended {
            return Err(Error::failed("boot a host", format!("systemd-nspawn ended ({status})")));
        }
        if Instant::now() > deadline {
            return Err(Error::failed("boot a host", "systemd did not appear".to_owned()));
        }
        thread::sleep(LOOK_AGAIN);
    }
}

/// A systemd that is PID 1 two namespaces down (the keeper's, the host's) and a descendant of `below`.
fn find_leader(below: u32) -> Option<u32> {
    let processes: Vec<(u32, Status)> = fs::read_dir("/proc")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, Status::of(pid)?)))
        .collect();
    let parent = |child: u32| processes.iter().find(|(pid, _)| *pid == child).map(|(_, status)| status.parent);
    let descends = |pid: u32| {
        let mut ancestor = parent(pid);
        while let Some(pid) = ancestor {
            if pid == below {
                return true;
            }
            ancestor = parent(pid);
        }
        false
    };
    processes
        .iter()
        .filter(|(_, status)| status.name == "systemd" && status.pids.len() == 3 && status.pids.last() == Some(&1))
        .map(|(pid, _)| *pid)
        .find(|pid| descends(*pid))
}

/// What `/proc/PID/status` says.
struct Status {
    name: String,
    parent: u32,
    /// Its pid in each PID namespace, outermost first.
    pids: Vec<u32>,
}

impl Status {
    fn of(pid: u32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(":\t"));
        Some(Self {
            name: value("Name")?.to_owned(),
            parent: value("PPid")?.parse().ok()?,
            pids: value("NSpid")?.split_whitespace().filter_map(|pid| pid.parse().ok()).collect(),
        })
    }
}

/// When a process started, in clock ticks since the machine booted: with the pid, its identity.
pub(crate) fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets can hold anything; field 22 is the 20th after it.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19).map(str::to_owned)
}

/// The last lines of a host's console.
fn tail(console: Option<File>) -> String {
    let mut text = Vec::new();
    if let Some(mut console) = console {
        let _ = console.read_to_end(&mut text);
    }
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines.get(lines.len().saturating_sub(20)..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_could_leave_its_directory_is_refused() {
        for name in ["", "..", "a/b", "A", "-a", "a-", "a b", &"a".repeat(41)] {
            assert!(check_name(name).is_err(), "{name}");
        }
        for name in ["a", "demo-1", &"a".repeat(40)] {
            assert!(check_name(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_process_is_known_by_its_start_time() {
        let own = start_time(std::process::id()).expect("this process runs");
        assert!(own.parse::<u64>().is_ok(), "{own}");
        assert_eq!(start_time(0), None);
    }

    #[test]
    fn every_suite_is_found_by_its_name() {
        for suite in Suite::ALL {
            assert_eq!(suite.name().parse(), Ok(suite));
        }
        assert!("sid".parse::<Suite>().is_err());
    }
}
