//! Whether it holds: a private supervisor, a server that is this program, and the escapes tried.
//!
//! Nothing needs to be installed. Three transient units' worth: the supervisor with the hardening that ships, the server
//! (`tries`) as the account, and the sessions it asks for; with names, a slice, a socket and a directory of this run's own.
//! All of it is taken down again whatever happens, also on SIGINT and SIGTERM; and should this process be killed, the
//! two units end by themselves after [`UNITS_TIME`] and take their sessions and the directory with them.
//!
//! The one thing that may surprise is the directory: sessions can't see `/run`, and a build tree may be shut to the
//! account, so the program is copied to where sessions can execute it.

mod session;
pub mod tries;

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use async_signal::{Signal, Signals};
use smol::future::FutureExt as _;
use smol::stream::StreamExt as _;
use smol::{Async, Timer};

use super::checks::{self, Check};
use super::context::run;
use super::report::{Finding, Status};
use super::{ATTEMPT, files, units};
use crate::account::Account;
use crate::limits::CGROUP_ROOT;
use crate::report::{Chain, quoted};
use crate::sys::random;
use crate::systemd::{CallError, Manager};
use crate::unit_files::{SERVER, SUPERVISOR};
use crate::wait::within;

/// How the supervisor's and the server's unit end if nobody is left to end them. Chosen: several times a whole run.
const UNITS_TIME: &str = "RuntimeMaxSec=300";
/// How long taking down may take. Chosen: a session's stop is bounded by ten seconds.
const DOWN_TIME: Duration = Duration::from_secs(40);
/// Between two looks at something that sends no event to here.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Nobody, an ordinary user that is in no group of the account's.
const NOBODY: u32 = 65_534;
/// Where the program may be copied to, the first that will do.
const PLACES: [&str; 4] = ["/usr/local/libexec", "/usr/local", "/opt", "/var/lib"];

/// Makes the chosen live checks; each finding goes to `found` as it comes.
pub async fn perform(
    account: &Account,
    manager: &Manager,
    chosen: &[&'static Check],
    found: &mut dyn FnMut(&'static Check, Finding),
) {
    let not_run = |why: String| Finding::not_run(why, "see docs/selftest.md");
    let signals = Signals::new([Signal::Term, Signal::Int]);
    let stand =
        Stand::new(account).and_then(|stand| signals.map(|signals| (stand, signals)).map_err(|e| e.to_string()));
    let (stand, mut signals) = match stand {
        Ok(both) => both,
        Err(why) => {
            for check in chosen {
                found(check, not_run(why.clone()));
            }
            return;
        }
    };
    let mut told: Vec<&str> = Vec::new();
    let mut children = Vec::new();
    // Not interrupted: a unit whose start is on its way could come after we have taken down what there was.
    let started = stand.start_supervisor().await;
    let work = async {
        let mut note = |check: &'static Check, finding: Finding| {
            told.push(check.name);
            found(check, finding);
        };
        let ran = match started {
            Ok(()) => stand.run_checks(manager, chosen, &mut note, &mut children).await,
            Err(why) => Err(why),
        };
        Some(ran)
    };
    let interrupted = async {
        signals.next().await;
        None
    };
    let outcome = work.or(interrupted).await;
    let left = stand.take_down(manager, &mut children).await;
    let why = match &outcome {
        None => "interrupted".to_owned(),
        Some(Ok(())) => "the server ended before this check".to_owned(),
        Some(Err(why)) => why.clone(),
    };
    for check in chosen {
        if check.name == CLEAN {
            found(check, judge_left(&left));
        } else if !told.contains(&check.name) {
            found(check, not_run(why.clone()));
        }
    }
}

/// Lines of the supervisor's unit that the private one has its own for, or none: its type is said by an option of
/// systemd-run(1), and one that fails must not come back.
const NOT_SHIPPED: [&str; 7] =
    ["Type", "ExecStart", "RuntimeDirectory", "Restart", "RestartSec", "After", "StartLimitIntervalSec"];

/// The check that is made first.
const HARDENING: &str = "live-hardening";

/// The check that is made last, on the way out.
const CLEAN: &str = "live-clean";

fn judge_left(left: &[String]) -> Finding {
    Finding::from_problems(
        left,
        "no unit, cgroup, file, socket or process of this run is left",
        "stop what is named with systemctl stop, remove the directory, and report it",
    )
}

/// Everything that a run makes, by name.
struct Stand<'a> {
    account: &'a Account,
    id: String,
    directory: PathBuf,
    socket: String,
    supervisor: String,
    server: String,
    slice: String,
    /// What its sessions' long sleeps are called: seconds that nobody else sleeps for.
    nap: String,
}

impl<'a> Stand<'a> {
    /// Copies the program to where sessions can execute it.
    fn new(account: &'a Account) -> Result<Self, String> {
        let bits = u128::from_be_bytes(random::bits_128().map_err(|error| error.to_string())?);
        let id = format!("opencode-pty-selftest-{:08x}", bits & 0xffff_ffff);
        let will_do =
            |place: &&&str| Path::new(place).is_dir() && files::judge_parents(&Path::new(place).join("x")).is_empty();
        let place = PLACES.iter().find(will_do).ok_or("there is no directory of root's alone to run from")?;
        let directory = Path::new(place).join(&id);
        let stand = Self {
            account,
            socket: format!("/run/{id}/supervisor.sock"),
            supervisor: format!("{id}-supervisor.service"),
            server: format!("{id}-server.service"),
            // Not below opencode.slice: the one that is installed is none of our business. A dash would nest.
            slice: format!("{}.slice", id.replace('-', "")),
            nap: format!("86400.{}", bits >> 96),
            directory,
            id,
        };
        match stand.copy_program() {
            Ok(()) => Ok(stand),
            Err(error) => {
                let _ = fs::remove_dir_all(&stand.directory);
                Err(format!("cannot copy this program to {}: {error}", stand.directory.display()))
            }
        }
    }

    fn copy_program(&self) -> io::Result<()> {
        fs::DirBuilder::new().mode(0o755).create(&self.directory)?;
        fs::set_permissions(&self.directory, fs::Permissions::from_mode(0o755))?;
        let program = self.directory.join("opencode-pty");
        fs::copy("/proc/self/exe", &program)?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        files::NAMES.iter().try_for_each(|name| fs::hard_link(&program, self.directory.join(name)))
    }

    fn program(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    /// The lines of a shipped unit as systemd-run(1) takes them, without those of `except`.
    fn properties(&self, unit: &str, except: &[&str]) -> Vec<String> {
        let rendered = units::rendered(unit, self.account);
        units::section(&rendered, "Service")
            .into_iter()
            .filter(|line| !except.contains(&line.key))
            .map(|line| format!("--property={}={}", line.key, line.value))
            .collect()
    }

    /// Starts the private supervisor; returns when it listens.
    async fn start_supervisor(&self) -> Result<(), String> {
        let mut command = Command::new("systemd-run");
        command
            .args(["--quiet", "--collect", "--service-type=notify", &format!("--unit={}", self.supervisor)])
            .args(self.properties(SUPERVISOR, &NOT_SHIPPED))
            .args([&format!("--property=RuntimeDirectory={}", self.id), &format!("--property={UNITS_TIME}")])
            // As root and outside the unit's mounts, for a run whose process was killed.
            .args([&format!("--property=ExecStopPost=+/bin/rm -rf {}", self.directory.display()), "--"])
            .args([&self.program("opencode-pty-supervisor"), "--account", self.account.name()])
            .args(["--server-unit", &self.server, "--socket", &self.socket, "--slice", &self.slice])
            .args(["--launcher", &self.program("opencode-pty-launcher"), "--unit", &self.supervisor]);
        // In a thread of its own, so that a signal does not have to wait for it.
        let ran = smol::unblock(move || run(&mut command)).await?;
        if ran.code == Some(0) {
            Ok(())
        } else {
            Err(format!("the private supervisor did not start: {}", quoted(&ran.said)))
        }
    }

    /// Whether the private supervisor has the hardening that ships; all that follows is tried on one that has.
    async fn judge_hardening(&self, manager: &Manager) -> Finding {
        let loaded = match manager.properties(&self.supervisor).await {
            Ok(loaded) => loaded,
            Err(error) => return Finding::not_run(Chain(&error).to_string(), "see the check 'manager'"),
        };
        let shipped = units::rendered(SUPERVISOR, self.account);
        let problems = units::compare(&shipped, &loaded, &NOT_SHIPPED);
        Finding::from_problems(
            &problems,
            "the private supervisor runs with every line that ships but for its own paths",
            "find out what changes units here (a drop-in for service, say: systemctl cat)",
        )
    }

    /// Starts the server; its standard input and output are the other end of the socket that is returned.
    fn start_server(&self, chosen: &[&'static Check]) -> Result<(Async<UnixStream>, Child), String> {
        let names: Vec<&str> = chosen.iter().map(|check| check.name).collect();
        let start = || -> io::Result<(Async<UnixStream>, Child)> {
            let (ours, theirs) = UnixStream::pair()?;
            let (input, output) = (OwnedFd::from(theirs.try_clone()?), OwnedFd::from(theirs));
            let child = Command::new("systemd-run")
                .args(["--quiet", "--collect", "--pipe", "--wait", &format!("--unit={}", self.server)])
                .args(self.properties(
                    SERVER,
                    &["Type", "ExecCondition", "ExecStart", "EnvironmentFile", "Environment", "Restart", "RestartSec"],
                ))
                .args([&format!("--property={UNITS_TIME}"), "--"])
                .args([&self.program("opencode-pty"), "selftest", tries::AS_SERVER])
                .args([&self.program(""), &self.socket, &self.slice, &self.supervisor, &self.server, &self.nap])
                .arg(names.join(","))
                .stdin(Stdio::from(input))
                .stdout(Stdio::from(output))
                .stderr(Stdio::null())
                // A terminal's Ctrl-C is for us alone.
                .process_group(0)
                .spawn()?;
            Ok((Async::new(ours)?, child))
        };
        start().map_err(|error| format!("cannot run systemd-run: {error}"))
    }

    async fn run_checks(
        &self,
        manager: &Manager,
        chosen: &[&'static Check],
        found: &mut dyn FnMut(&'static Check, Finding),
        children: &mut Vec<Child>,
    ) -> Result<(), String> {
        if let Some(check) = chosen.iter().find(|check| check.name == HARDENING) {
            found(check, self.judge_hardening(manager).await);
        }
        let (server, child) = self.start_server(chosen)?;
        children.push(child);
        let mut pending = Vec::new();
        let mut noise = String::new();
        while let Some(line) = next_line(&server, &mut pending).await? {
            let mut words = line.split('\t');
            match (words.next(), words.next()) {
                (Some("found"), Some(name)) => {
                    let finding = decode_finding(&mut words);
                    let check =
                        checks::by_name(name).filter(|check| chosen.iter().any(|known| known.name == check.name));
                    if let (Some(check), Some(finding)) = (check, finding) {
                        found(check, finding);
                    }
                }
                (Some("ask"), Some("strangers")) => answer(&server, &self.call_as_strangers()).await?,
                (Some("ask"), Some("kill-supervisor")) => {
                    let killed = manager.kill(&self.supervisor).await;
                    answer(&server, &killed.map_or_else(|error| Chain(&error).to_string(), |()| String::new())).await?;
                }
                _ => noise.push_str(&line),
            }
        }
        if noise.is_empty() { Ok(()) } else { Err(format!("the server said {}", quoted(&noise))) }
    }

    /// What the supervisor does to strangers that is not as it should be: another process of the account, root, nobody.
    fn call_as_strangers(&self) -> String {
        let call = |uid: u32, gid: u32| {
            let mut command = Command::new(self.program("opencode-pty"));
            command.args(["selftest", ATTEMPT, "call", &self.socket]).uid(uid).gid(gid);
            run(&mut command).map_or_else(|why| why, |ran| ran.said)
        };
        let (uid, gid) = (self.account.uid(), self.account.gid());
        let strangers = [
            ("another process of the account", call(uid, gid), "call: closed"),
            ("root", call(0, 0), "call: closed"),
            ("nobody", call(NOBODY, NOBODY), "call: refused, Permission denied"),
        ];
        let served = strangers.iter().filter(|(_, said, wanted)| !said.starts_with(wanted));
        served.map(|(who, said, _)| format!("{who} was told {}", quoted(said))).collect::<Vec<_>>().join("; ")
    }

    /// Ends everything and says what is left of it.
    async fn take_down(&self, manager: &Manager, children: &mut Vec<Child>) -> Vec<String> {
        // First, so that it does not start a unit that we have stopped already.
        for child in children {
            let _ = child.kill();
            let _ = child.wait();
        }
        for unit in [&self.server, &self.supervisor] {
            stop_and_wait(manager, unit).await;
        }
        for (name, ..) in manager.sessions_of(&self.supervisor).await.unwrap_or_default() {
            stop_and_wait(manager, name.as_str()).await;
        }
        stop_and_wait(manager, &self.slice).await;
        let mut left = Vec::new();
        if let Err(error) = fs::remove_dir_all(&self.directory)
            && error.kind() != io::ErrorKind::NotFound
        {
            left.push(format!("{}: {error}", self.directory.display()));
        }
        left.extend(self.look_for_rest(manager).await);
        left
    }

    async fn look_for_rest(&self, manager: &Manager) -> Vec<String> {
        let mut left = Vec::new();
        for unit in [&self.server, &self.supervisor, &self.slice] {
            match manager.read(unit).await {
                Err(CallError::NoSuchUnit) => {}
                Ok(state) if state.load != "loaded" || state.has_ended() => {}
                Ok(state) => left.push(format!("{unit} is {}", state.active)),
                Err(error) => left.push(format!("{unit}: {}", Chain(&error))),
            }
        }
        let paths = [PathBuf::from("/run").join(&self.id), Path::new(CGROUP_ROOT).join(&self.slice)];
        left.extend(paths.iter().filter(|path| path.symlink_metadata().is_ok()).map(|path| path.display().to_string()));
        let naps = tries::naps(&self.nap);
        if naps > 0 {
            left.push(format!("{naps} processes"));
        }
        left
    }
}

/// Stops a unit and waits until nothing of it runs; one that is not there is as good.
async fn stop_and_wait(manager: &Manager, unit: &str) {
    let stopping = async {
        while !matches!(manager.stop(unit).await, Ok(_) | Err(CallError::NoSuchUnit)) {
            Timer::after(LOOK_AGAIN).await;
        }
        while manager.read(unit).await.is_ok_and(|state| !state.is_at_rest()) {
            Timer::after(LOOK_AGAIN).await;
        }
    };
    // What does not end in time is found by `look_for_rest`.
    let _ = within(DOWN_TIME, Box::pin(stopping)).await;
}

/// The server's next line; `None` when it has gone.
async fn next_line(server: &Async<UnixStream>, pending: &mut Vec<u8>) -> Result<Option<String>, String> {
    loop {
        if let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            return Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()));
        }
        let mut buffer = [0; 4096];
        match server.read_with(|mut socket| socket.read(&mut buffer)).await {
            Ok(0) => return Ok(None),
            Ok(count) => pending.extend_from_slice(buffer.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(format!("cannot read what the server says: {error}")),
        }
    }
}

/// Answers the server in one line.
async fn answer(server: &Async<UnixStream>, text: &str) -> Result<(), String> {
    let line = format!("{}\n", super::report::one_line(text));
    // Short enough for a socket's buffer to take it at once.
    let sent = server.write_with(|mut socket| socket.write_all(line.as_bytes())).await;
    sent.map_err(|error| format!("cannot answer the server: {error}"))
}

/// A finding as one line of the server's.
fn encode_finding(name: &str, finding: &Finding) -> String {
    let text = |text: &str| super::report::one_line(text);
    let remedy = finding.remedy.as_deref().map(text).unwrap_or_default();
    format!("found\t{name}\t{}\t{}\t{remedy}", finding.status.word(), text(&finding.reason))
}

fn decode_finding<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<Finding> {
    let status = Status::from_word(words.next()?)?;
    let reason = words.next()?.to_owned();
    let remedy = words.next().filter(|remedy| !remedy.is_empty()).map(str::to_owned);
    Some(Finding { status, reason, remedy })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_travels_whole_whatever_is_in_it() {
        for finding in [Finding::passed("a"), Finding::failed("b\tc\nd", "e"), Finding::not_run("f", "g")] {
            let line = encode_finding("live-stop", &finding);
            let mut words = line.split('\t').skip(2);
            let decoded = decode_finding(&mut words).unwrap();
            assert_eq!(decoded.status, finding.status);
            assert_eq!(decoded.reason, finding.reason.replace('\t', "\\t").replace('\n', "\\n"));
            assert_eq!(decoded.remedy, finding.remedy);
        }
    }
}
