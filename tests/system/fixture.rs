//! What every system test needs: the host it runs on, sessions there, and what is left of them.
//!
//! A [`Fixture`] begins on a host without sessions and ends by making sure of it, so that no test has to trust the
//! one before it. What a test looks at behind the product's back (units, cgroups, processes, descriptors), it looks
//! at as root of that host.

use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use opencode_pty::frame::message::{ErrorCode, Exit};
use opencode_pty::limits::HANDSHAKE_TIME;
use support::host::{Host, SERVER, SUPERVISOR};
use support::peer::{Peer, Transcript};
use support::standin::{CONTROL_PATH, Standin, StartError, Tried};

use crate::account::{GID, NAME, WORKSPACE};

/// How long anything that normally takes milliseconds may take. Chosen: a loaded machine is no failure, nor is a VM.
pub const SOON: Duration = Duration::from_mins(2);
/// How long a session of a test may run, where the test is not about that.
pub const RUNTIME: u32 = 120;
/// Sessions the supervisor has places for.
pub const PLACES: usize = 16;
/// What runs whenever a test begins, and when it ends.
const SERVICES: [&str; 2] = [SUPERVISOR, SERVER];
/// The login manager, which is on the bus, too.
const LOGIND: &str = "systemd-logind.service";
/// How long a number must stay the same to be taken for one that does. Chosen.
const STAYS_TIME: Duration = Duration::from_millis(300);
/// Between two looks at something that sends no event to here.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// The host under test, with the stand-in on it.
pub struct Fixture {
    pub host: Host,
    pub standin: Standin,
    scratch: Mutex<Vec<String>>,
}

impl Fixture {
    /// The host xtask named, once nothing of an earlier test is left on it.
    pub fn new() -> Self {
        let name = std::env::var("OPENCODE_PTY_TEST_HOST").expect("OPENCODE_PTY_TEST_HOST names a host that is up");
        let host = Host::attach(&name).unwrap();
        // A test that failed may have left one of them down: that is its failure, not this one's.
        if !Units::on(&host).services_are_active() {
            support::host::start(&host).unwrap();
        }
        let standin = standin_of(&host);
        let fixture = Self { host, standin, scratch: Mutex::default() };
        fixture.assert_as_found();
        fixture
    }

    /// A host whose server or supervisor this test ends: the stand-in is another process afterwards.
    pub fn restart_what_ended(&mut self) {
        support::host::start(&self.host).unwrap();
        self.standin = standin_of(&self.host);
    }

    /// The supervisor started anew, as after a change of its unit, and the server with it.
    pub fn restart_supervisor(&mut self) {
        self.systemctl(&["restart", SUPERVISOR]);
        self.restart_what_ended();
    }

    // ---- sessions -------------------------------------------------------------------------------------------

    /// A session in the workspace that has said `started`.
    pub fn start(&self, words: &[&str]) -> Session {
        self.start_for(RUNTIME, words)
    }

    /// The same with another runtime.
    pub fn start_for(&self, runtime_seconds: u32, words: &[&str]) -> Session {
        loop {
            match self.standin.try_start(WORKSPACE, runtime_seconds, words).unwrap() {
                Tried::Started(peer, unit) => return Session { peer, unit },
                Tried::Late(answer) => one_was_late(&answer),
                other @ Tried::Busy => panic!("{other:?} instead of started"),
            }
        }
    }

    /// The same with a shell's script.
    pub fn start_sh(&self, script: &str) -> Session {
        self.start(&["/bin/sh", "-c", script])
    }

    /// A whole session in the workspace; it has ended by itself, and nothing of it is left.
    pub fn run(&self, words: &[&str]) -> Transcript {
        self.gone_after(self.run_one_of_many(words))
    }

    /// The same, one of many: what is left is looked at when the test is over.
    pub fn run_one_of_many(&self, words: &[&str]) -> Transcript {
        unless_late(|| self.standin.start(WORKSPACE, RUNTIME, words).unwrap())
    }

    /// What comes of a start that may be refused before the client has sent all of it.
    pub fn answer(&self, words: &[&str]) -> Transcript {
        unless_late(|| self.standin.start(WORKSPACE, RUNTIME, words).or_else(StartError::connection).unwrap())
    }

    /// The same with a shell's script.
    pub fn sh(&self, script: &str) -> Transcript {
        self.run(&["/bin/sh", "-c", script])
    }

    /// The same in a directory that is open.
    pub fn run_in(&self, dir: impl AsFd, words: &[&str]) -> Transcript {
        self.gone_after(unless_late(|| self.standin.start_in(&dir, RUNTIME, words).unwrap()))
    }

    fn gone_after(&self, transcript: Transcript) -> Transcript {
        if let Some(unit) = &transcript.unit {
            self.assert_gone(unit);
        }
        transcript
    }

    /// The words' output without the last line end, and with `\n` as line end; the session must have succeeded.
    pub fn ask(&self, words: &[&str]) -> String {
        let transcript = self.run(words);
        let text = transcript.text().replace("\r\n", "\n");
        assert_eq!(transcript.exit, Some(exited(0)), "{words:?} said '{text}' and {:?}", transcript.error);
        text.strip_suffix('\n').unwrap_or(&text).to_owned()
    }

    /// The same with a shell's script.
    pub fn ask_sh(&self, script: &str) -> String {
        self.ask(&["/bin/sh", "-c", script])
    }

    /// The same with a Python program.
    pub fn ask_python(&self, program: &str) -> String {
        self.ask(&["/usr/bin/python3", "-c", program])
    }

    // ---- what is left -----------------------------------------------------------------------------------------

    /// Fails unless the unit, its file and its cgroup are gone, now.
    pub fn assert_gone(&self, unit: &str) {
        let left = self.left_of(unit);
        assert!(left.is_empty(), "of {unit} is left: {left}");
    }

    /// Waits until they are.
    pub fn wait_until_gone(&self, unit: &str, time: Duration) {
        assert_eq!(self.gone_within(unit, time), Ok(()), "{unit} is not gone in {time:?}");
    }

    /// The same; what is left then, otherwise.
    pub fn gone_within(&self, unit: &str, time: Duration) -> Result<(), String> {
        found_within(time, || nothing_or(self.left_of(unit)))
    }

    /// What is left of a unit, in words; empty when nothing is.
    fn left_of(&self, unit: &str) -> String {
        // What cannot be asked, as while PID 1 executes itself anew, counts as left.
        let asked = self.host.run_ok("systemctl", &["show", "--property=LoadState,ActiveState", unit]);
        let state = asked.unwrap_or_else(|error| error.to_string());
        let unknown = ["LoadState=not-found\nActiveState=inactive", "ActiveState=inactive\nLoadState=not-found"];
        let mut left = self.cgroups_and_files(&|name| name.starts_with(unit));
        left.extend((!unknown.contains(&&*state)).then_some(state));
        left.join("\n")
    }

    /// The session units the manager knows, in whatever state, their files, and their cgroups.
    pub fn left_of_sessions(&self) -> String {
        self.left_beside(&Units::on(&self.host))
    }

    fn left_beside(&self, units: &Units) -> String {
        let mut left = self.cgroups_and_files(&is_of_a_session);
        left.extend(
            units.0.iter().filter(|(unit, _)| is_of_a_session(unit)).map(|(unit, state)| format!("{unit} {state}")),
        );
        left.join("\n")
    }

    /// Fails unless the host is as a test may expect it.
    fn assert_as_found(&self) {
        let units = wait_until("no session to be there", SOON, || {
            let units = Units::on(&self.host);
            nothing_or(self.left_beside(&units)).map(|()| units)
        });
        assert!(units.services_are_active(), "supervisor and server: {:?}", units.0);
    }

    /// The control groups and the transient units' files whose name is one of these.
    fn cgroups_and_files(&self, is_one: &dyn Fn(&str) -> bool) -> Vec<String> {
        let files = named(&self.host.path("/run/systemd/transient"), is_one);
        self.cgroups(is_one).into_iter().chain(files).map(|path| path.display().to_string()).collect()
    }

    fn cgroups(&self, is_one: &dyn Fn(&str) -> bool) -> Vec<PathBuf> {
        let all = self.host.path("/sys/fs/cgroup");
        assert!(all.join("cgroup.procs").exists(), "control groups can be seen");
        named(&all, is_one)
    }

    // ---- behind the product's back ------------------------------------------------------------------------------

    /// Runs a script as root of the host; gives what it prints, without the last line end.
    pub fn root(&self, script: &str) -> String {
        self.host.sh_ok(script).unwrap()
    }

    /// Runs systemctl(1) with these words; gives what it prints, without the last line end.
    pub fn systemctl(&self, words: &[&str]) -> String {
        self.host.run_ok("systemctl", words).unwrap()
    }

    /// Makes PID 1 forget how often it has started the bus and logind: from the sixth time in ten seconds on it would not, whoever
    /// asks.
    pub fn forget_starts_of_the_bus(&self) {
        self.systemctl(&["reset-failed", "dbus.service", LOGIND]);
    }

    /// Gives the host its logind back after the bus was away. Under systemd 257 it does not come back to a new one by itself: a
    /// reboot would ask for it twice, and wait for 25 seconds each time. (Under 252 it ends with the bus and is started again.)
    pub fn restart_logind(&self) {
        self.forget_starts_of_the_bus();
        self.systemctl(&["try-restart", LOGIND]);
    }

    /// A unit's property as systemctl(1) shows it.
    pub fn property(&self, unit: &str, property: &str) -> String {
        self.systemctl(&["show", "--property", property, "--value", unit])
    }

    /// Whether a unit has a control group: whether it runs.
    pub fn has_cgroup(&self, unit: &str) -> bool {
        !self.cgroups(&|name| name == unit).is_empty()
    }

    /// A file of a unit's control group, without the last line end.
    pub fn cgroup_file(&self, unit: &str, file: &str) -> String {
        let groups = self.cgroups(&|name| name == unit);
        let group = groups.first().unwrap_or_else(|| panic!("{unit} has no control group"));
        std::fs::read_to_string(group.join(file)).unwrap().trim_end().to_owned()
    }

    /// The process that listens.
    pub fn supervisor_pid(&self) -> String {
        self.property(SUPERVISOR, "MainPID")
    }

    /// Whether the last session was held by scopes (Landlock ABI 6).
    pub fn has_scopes(&self) -> bool {
        self.isolation().contains("scope=signal,abstract")
    }

    /// What held the last session, in the launcher's words.
    pub fn isolation(&self) -> String {
        let read = "journalctl --sync
            journalctl --no-pager -o cat -u opencode-pty-supervisor.service | grep 'started for' | tail -n 1";
        let journal = self.root(read);
        let isolation = journal.split_once("groups=").map(|(_, isolation)| format!("groups={isolation}"));
        isolation.unwrap_or_else(|| panic!("the journal does not say it: {journal}"))
    }

    /// How many descriptors the supervisor has open when it has served and nobody is there, once that stays the same: what it opens
    /// once and keeps is among them, and it may still be closing what an earlier test had.
    pub fn idle_descriptors(&self) -> usize {
        self.ask(&["true"]);
        let (mut last, mut since) = (self.supervisor_descriptors(), Instant::now());
        wait_until("the supervisor to be idle", SOON, || {
            let now = self.supervisor_descriptors();
            if now != last {
                (last, since) = (now, Instant::now());
            }
            if since.elapsed() >= STAYS_TIME { Ok(now) } else { Err(format!("{now}, for {:?}", since.elapsed())) }
        })
    }

    /// Waits until it has so many open as before.
    pub fn wait_for_descriptors(&self, before: usize, after: &str) {
        wait_until(&format!("the supervisor to close what came with {after}"), SOON, || {
            let now = self.supervisor_descriptors();
            if now == before { Ok(()) } else { Err(format!("{now} descriptors instead of {before}")) }
        });
    }

    /// How many descriptors the supervisor has open.
    pub fn supervisor_descriptors(&self) -> usize {
        std::fs::read_dir(self.host.path(format!("/proc/{}/fd", self.supervisor_pid()))).unwrap().count()
    }

    /// Whether the host has a process with this pid that has not ended; it may be waiting to be reaped.
    pub fn is_alive(&self, pid: &str) -> bool {
        let stat = std::fs::read_to_string(self.host.path(format!("/proc/{pid}/stat"))).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, fields)| !fields.starts_with(['Z', 'X']))
    }

    /// The command lines of a unit's processes, a line each, after its pid.
    pub fn processes(&self, unit: &str) -> String {
        // The control group's own list would have the pids of the machine outside.
        let all = std::fs::read_dir(self.host.path("/proc")).unwrap();
        let pids = all.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut lines = Vec::new();
        for pid in pids.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) {
            // What cannot be read is gone by now.
            let of = |file: &str| std::fs::read(self.host.path(format!("/proc/{pid}/{file}"))).unwrap_or_default();
            if String::from_utf8_lossy(&of("cgroup")).lines().any(|line| line.ends_with(&format!("/{unit}"))) {
                lines.push(format!("{pid} {}", String::from_utf8_lossy(&of("cmdline")).replace(['\0', '\n'], " ")));
            }
        }
        lines.join("\n")
    }

    /// The pids of a unit's processes.
    pub fn pids(&self, unit: &str) -> Vec<String> {
        self.processes(unit).lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect()
    }

    /// Waits until one of a unit's processes has exactly this command line; gives its pid.
    pub fn wait_for_process(&self, unit: &str, command: &str) -> String {
        wait_until(&format!("'{command}' to run in {unit}"), SOON, || {
            let processes = self.processes(unit);
            let mut lines = processes.lines().filter_map(|line| line.trim_end().split_once(' '));
            match lines.find(|(_, line)| *line == command) {
                Some((pid, _)) => Ok(pid.to_owned()),
                None => Err(processes),
            }
        })
    }

    /// A new directory of the account in the workspace, removed at the end of the test.
    pub fn scratch(&self) -> String {
        let path = self
            .root(&format!("setpriv --reuid {NAME} --regid {GID} --clear-groups mktemp -d {WORKSPACE}/test-XXXXXX"));
        self.remove_at_end(&path);
        path
    }

    /// Something a test made on the host.
    pub fn remove_at_end(&self, path: &str) {
        self.scratch.lock().unwrap().push(path.to_owned());
    }

    /// Writes a file of the account.
    pub fn write(&self, path: &str, mode: u32, text: &str) {
        std::fs::write(self.host.path(path), text).unwrap();
        self.root(&format!("chown {NAME}:{GID} '{path}' && chmod {mode:o} '{path}'"));
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        for path in self.scratch.lock().unwrap().drain(..) {
            let _ = self.host.sh(&format!("rm -rf --one-file-system '{path}'"));
        }
        if !thread::panicking() {
            self.assert_as_found();
        }
    }
}

/// The product's units and the server's, each with its state, as the manager has them now.
struct Units(Vec<(String, String)>);

impl Units {
    fn on(host: &Host) -> Self {
        let words = ["show", "--property=Id,ActiveState", "opencode-pty-*.service", SERVER];
        let shown = host.run_ok("systemctl", &words).unwrap();
        let value = |unit: &str, key: &str| {
            unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).unwrap_or_default().to_owned()
        };
        Self(shown.split("\n\n").map(|unit| (value(unit, "Id"), value(unit, "ActiveState"))).collect())
    }

    fn services_are_active(&self) -> bool {
        SERVICES.iter().all(|service| self.0.iter().any(|(unit, state)| unit == service && state == "active"))
    }
}

/// Whether a unit, a control group or a file is a session's, by its name.
fn is_of_a_session(name: &str) -> bool {
    name.starts_with("opencode-pty-") && !name.starts_with("opencode-pty-supervisor")
}

/// What is called by one of these names, however far below a directory.
fn named(directory: &Path, is_one: &dyn Fn(&str) -> bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        // One that is gone by now has nothing in it.
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(is_one) {
                found.push(entry.path());
            }
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                directories.push(entry.path());
            }
        }
    }
    found
}

fn standin_of(host: &Host) -> Standin {
    Standin::connect_within(host.path(CONTROL_PATH), SOON).unwrap()
}

fn nothing_or(left: String) -> Result<(), String> {
    if left.is_empty() { Ok(()) } else { Err(left) }
}

/// A session that has started.
pub struct Session {
    pub peer: Peer,
    pub unit: String,
}

impl Deref for Session {
    type Target = Peer;

    fn deref(&self) -> &Peer {
        &self.peer
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut Peer {
        &mut self.peer
    }
}

impl Session {
    /// Reads until a line of output is exactly this; gives all that was read.
    pub fn line(&mut self, line: &str) -> String {
        let wanted = format!("{line}\r\n");
        String::from_utf8_lossy(&self.peer.output_until(wanted.as_bytes(), SOON).unwrap()).into_owned()
    }

    /// Reads everything until the supervisor is done with the connection.
    pub fn read_to_end(&mut self) -> Transcript {
        self.peer.read_to_end(SOON).unwrap()
    }

    /// Asks for a stop and reads everything.
    pub fn stop_and_read(&mut self) -> Transcript {
        self.peer.stop().unwrap();
        self.read_to_end()
    }
}

/// The record of a command that exited.
pub fn exited(code: u32) -> Exit {
    Exit::new(1, code, if code == 0 { "success" } else { "exit-code" }).unwrap()
}

/// What comes of a start; once more where the handshake's time was over before anything was done, on a machine that stood still.
fn unless_late(start: impl Fn() -> Peer) -> Transcript {
    loop {
        let begun = Instant::now();
        let transcript = start().read_to_end(SOON).unwrap();
        let nothing = transcript.frames == 0 || transcript.error_code() == Some(ErrorCode::Timeout);
        if !nothing || begun.elapsed() < HANDSHAKE_TIME {
            return transcript;
        }
        one_was_late(&format!("{transcript:?}"));
    }
}

/// Counts a late start. Sixteen may be on their way when a machine stands still; more in one run of the tests are a failure.
fn one_was_late(answer: &str) {
    static LATE: AtomicUsize = AtomicUsize::new(0);
    let late = LATE.fetch_add(1, Ordering::Relaxed) + 1;
    eprintln!("a start was late, number {late}: {answer}");
    assert!(late <= 2 * PLACES, "{late} starts were late: {answer}");
}

/// Waits until `look` finds what it looks for; while it doesn't, it says what there is instead.
pub fn wait_until<T>(what: &str, time: Duration, look: impl FnMut() -> Result<T, String>) -> T {
    found_within(time, look)
        .unwrap_or_else(|instead| panic!("waited {} s for {what}, and there is: {instead}", time.as_secs_f32()))
}

/// The same; what there is instead when the time is up.
fn found_within<T>(time: Duration, mut look: impl FnMut() -> Result<T, String>) -> Result<T, String> {
    let deadline = Instant::now() + time;
    loop {
        match look() {
            Err(_) if Instant::now() < deadline => thread::sleep(LOOK_AGAIN),
            result => return result,
        }
    }
}

/// Does `work` for 0, 1, … `count - 1`, as many at a time as there are places; gives the results in this order.
pub fn side_by_side<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    at_a_time(PLACES, count, work)
}

/// The same with fewer at a time.
pub fn at_a_time<T: Send>(workers: usize, count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(count)));
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count {
                        return;
                    }
                    let result = work(index);
                    results.lock().unwrap().push((index, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap();
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}
