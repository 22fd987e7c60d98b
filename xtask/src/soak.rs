//! `cargo xtask soak`: sessions of every kind, for a long time, and then nothing of them is left.
//!
//! As many workers as there are places choose what to do next by a generator whose seed is printed, and hold every
//! outcome against what it must be. Before and after, what the host and the supervisor hold is counted; the two must
//! be equal. "Before" is after a first minute or so of the same mix, so that what is allocated once and kept is there.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use opencode_pty::frame::message::{ErrorCode, Exit};
use opencode_pty::frame::{Kind, encode};
use opencode_pty::limits::FOREIGN_CALL_THREADS;
use opencode_pty::supervisor::foreign::THREAD_NAME;
use support::ending::Ending;
use support::host::{self, BootOptions, Host, Suite, WORKSPACE};
use support::peer::{Peer, PeerError, Transcript};
use support::random::Random;
use support::standin::{CONTROL_PATH, SHORT_RUNTIME, Standin, Tried};

use crate::Failure;
use crate::args::Args;

const USAGE: &str = "\
Usage: cargo xtask soak [--minutes N] [--sessions N] [--suite bookworm|trixie] [--seed N] [--short]

  Starts sessions of every kind on a host of its own, up to 16 at a time, and checks each one's outcome; then compares
  the supervisor's descriptors, threads and memory, and the host's terminals and units, with what they were.

  --minutes   how long (default 10)
  --sessions  go on until there have been so many, too
  --suite     the host's release (default trixie)
  --seed      chooses the same kinds in the same order again, worker by worker (default: from the clock)
  --short     short sessions alone: each says a word of its own and exits with a code of its own

  A start that takes longer than the supervisor allows (5 s) is tried again; four may, and one a worker for each time that the
  machine stood still.

Exit 0 if every outcome was right, no more starts were late, and nothing is left.
";

/// Workers: one for each of the supervisor's places.
const WORKERS: usize = 16;
/// How long one session may take. Chosen: seconds are usual.
const SESSION_TIME: Duration = Duration::from_mins(1);
/// Starts that may take longer than the supervisor allows. Chosen: none is usual.
const LATE_MAX: usize = 4;
/// The machine stood still if a short sleep took this long. Then every start that was on its way may be late, too. Chosen.
const STALL_TIME: Duration = Duration::from_secs(2);
/// A worker's sessions before the first count.
const WARM_UP: u64 = 20;
/// What the supervisor's memory may have grown by (issue 3).
const GROWTH_KIB_MAX: u64 = 1_024;
/// Until everything is as it was. Chosen.
const SETTLE_TIME: Duration = Duration::from_secs(30);
/// Between two looks at the supervisor's memory.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(30);
/// The failures that are shown in full.
const SHOWN_MAX: usize = 10;

/// What a worker may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Mix {
    Short,
    Failing,
    NotFound,
    Killed,
    UnitKilled,
    Stopped,
    StoppedFlood,
    Disconnected,
    DisconnectedEarly,
    HalfClosed,
    Malformed,
    Stray,
    Incomplete,
    SlowReader,
    BigOutput,
    Echo,
    Expired,
    Daemons,
}

/// Each kind as often as it stands here.
const MIX: [Mix; 32] = [
    Mix::Short,
    Mix::Short,
    Mix::Short,
    Mix::Short,
    Mix::Short,
    Mix::Short,
    Mix::Short,
    Mix::Failing,
    Mix::Failing,
    Mix::Failing,
    Mix::NotFound,
    Mix::Killed,
    Mix::Killed,
    Mix::UnitKilled,
    Mix::Stopped,
    Mix::Stopped,
    Mix::StoppedFlood,
    Mix::StoppedFlood,
    Mix::Disconnected,
    Mix::Disconnected,
    Mix::DisconnectedEarly,
    Mix::DisconnectedEarly,
    Mix::HalfClosed,
    Mix::Malformed,
    Mix::Stray,
    Mix::Incomplete,
    Mix::SlowReader,
    Mix::BigOutput,
    Mix::Echo,
    Mix::Echo,
    Mix::Expired,
    Mix::Daemons,
];

pub fn main(words: &[String]) -> Result<ExitCode, Failure> {
    let mut args = Args::new(words, USAGE)?;
    let short = args.flag("--short");
    let minutes: u64 = number(&mut args, "--minutes")?.unwrap_or(10);
    let sessions: u64 = number(&mut args, "--sessions")?.unwrap_or(0);
    let seed: u64 = number(&mut args, "--seed")?
        .unwrap_or_else(|| SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs()));
    let suite: Suite = match args.option("--suite")? {
        Some(name) => name.parse().map_err(Failure::Usage)?,
        None => Suite::Trixie,
    };
    args.finish(0)?;

    let (product, standin) = (host::build_product()?, host::build_standin()?);
    let name = format!("soak-{suite}-{}", std::process::id());
    let host = Host::boot(&BootOptions { name, suite, ephemeral: true }, &mut |line| eprintln!("{line}"))?;
    host::install(&host, &product)?;
    host::install_standin(&host, &standin)?;
    host::start(&host)?;
    println!("seed {seed}, {suite}, {minutes} min");
    let standin = Standin::connect_within(host.path(CONTROL_PATH), SETTLE_TIME)
        .map_err(|error| format!("cannot reach the stand-in: {error}"))?;
    let soak = Soak { host: &host, standin, short, tally: Mutex::default(), done: AtomicU64::new(0) };
    let passed = soak.run(seed, Duration::from_secs(60 * minutes), sessions)?;
    host.down()?;
    if passed { Ok(ExitCode::SUCCESS) } else { Err(Failure::Failed(String::new())) }
}

fn number(args: &mut Args, name: &str) -> Result<Option<u64>, Failure> {
    let Some(text) = args.option(name)? else { return Ok(None) };
    text.parse().map(Some).map_err(|_| Failure::Usage(format!("{name} wants a number, not '{text}'\n{USAGE}")))
}

/// What there was of one kind.
#[derive(Debug, Default)]
struct Line {
    right: u64,
    wrong: u64,
    time: Duration,
    longest: Duration,
}

#[derive(Debug, Default)]
struct Tally {
    lines: BTreeMap<Mix, Line>,
    /// Busy answers: a session's place is free only when nothing of it is left.
    busy: u64,
    /// Starts that took longer than they may.
    late: Vec<String>,
    /// How often the machine stood still.
    stalls: usize,
    failures: Vec<String>,
}

/// What the host and the supervisor hold.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    supervisor: String,
    descriptors: usize,
    /// The names of those that are not the pool's. The pool's start when so many are first needed at once, which is for the
    /// machine to say (0 of 4 at "before" have been seen), and stay.
    threads: Vec<String>,
    pool_within_limit: bool,
    terminals: String,
    units: String,
    processes: usize,
}

struct Soak<'a> {
    host: &'a Host,
    standin: Standin,
    short: bool,
    tally: Mutex<Tally>,
    done: AtomicU64,
}

impl Soak<'_> {
    fn run(&self, seed: u64, time: Duration, sessions: u64) -> Result<bool, Failure> {
        // One alone: until the supervisor has found out who the server is, the workers' connections can be too many.
        self.one(true, &mut Random::new(seed ^ 2));
        self.work(seed ^ 1, false, |count| count < WARM_UP * WORKERS as u64);
        let before = self.settled(None)?;
        let resident_before = self.resident_kib(&before)?;
        let warm = self.tally.lock().map(|mut tally| std::mem::take(&mut *tally)).unwrap_or_default();
        self.done.store(0, Ordering::Relaxed);

        let begun = Instant::now();
        let over = AtomicBool::new(false);
        let samples = thread::scope(|scope| {
            let samples = scope.spawn(|| self.samples(&before, begun, &over));
            let ends = Ending(&over);
            self.work(seed, self.short, |count| begun.elapsed() < time || count < sessions);
            drop(ends);
            samples.join()
        });
        let took = begun.elapsed();
        let after = self.settled(Some(&before))?;
        let resident_after = self.resident_kib(&after)?;

        let tally = self.tally.lock().map_err(|_| "a worker panicked".to_owned())?;
        let wrong: u64 = warm.lines.values().chain(tally.lines.values()).map(|line| line.wrong).sum();
        let late: Vec<_> = warm.late.iter().chain(&tally.late).collect();
        let stalls = warm.stalls + tally.stalls;
        print!("{}", table(&tally, took));
        println!("before  {before:?}, {resident_before} KiB");
        println!("after   {after:?}, {resident_after} KiB");
        println!("KiB resident every {SAMPLE_INTERVAL:?}: {:?}", samples.unwrap_or_default());
        for failure in warm.failures.iter().chain(&tally.failures).take(SHOWN_MAX) {
            println!("wrong: {failure}");
        }
        for start in late.iter().take(SHOWN_MAX) {
            println!("late: {start}");
        }
        let grown = resident_after.saturating_sub(resident_before);
        let in_time = late.len() <= LATE_MAX + WORKERS * stalls;
        let passed = wrong == 0 && in_time && after == before && grown <= GROWTH_KIB_MAX;
        println!(
            "{}: {wrong} wrong outcomes, {} late starts, {stalls} stalls, {}, {grown} KiB more resident",
            if passed { "ok" } else { "FAILED" },
            late.len(),
            if after == before { "nothing left" } else { "something is left" },
        );
        Ok(passed)
    }

    /// The supervisor's memory, every so often while the workers work: whether it grows or has grown.
    fn samples(&self, held: &Held, begun: Instant, over: &AtomicBool) -> Vec<u64> {
        let mut samples = Vec::new();
        while !over.load(Ordering::Relaxed) {
            if begun.elapsed() >= SAMPLE_INTERVAL * u32::try_from(samples.len()).unwrap_or(u32::MAX) {
                samples.extend(self.resident_kib(held));
            }
            thread::sleep(Duration::from_millis(100));
        }
        samples
    }

    /// One session after the other on each worker, as long as `more` says so of the number there have been.
    fn work(&self, seed: u64, short: bool, more: impl Fn(u64) -> bool + Sync) {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| self.count_stalls(&over));
            let _ends = Ending(&over);
            thread::scope(|workers| {
                for worker in 0..WORKERS {
                    let more = &more;
                    workers.spawn(move || {
                        let mut random = Random::new(seed.wrapping_mul(1_000_003).wrapping_add(worker as u64));
                        while more(self.done.fetch_add(1, Ordering::Relaxed)) {
                            self.one(short, &mut random);
                        }
                    });
                }
            });
        });
    }

    fn count_stalls(&self, over: &AtomicBool) {
        while !over.load(Ordering::Relaxed) {
            let asleep = Instant::now();
            thread::sleep(Duration::from_millis(100));
            if asleep.elapsed() >= STALL_TIME
                && let Ok(mut tally) = self.tally.lock()
            {
                tally.stalls += 1;
            }
        }
    }

    fn one(&self, short: bool, random: &mut Random) {
        let kind = if short { Mix::Short } else { *random.choose(&MIX) };
        let begun = Instant::now();
        let outcome = loop {
            let again = random.clone();
            let outcome = self.session(kind, random);
            if !matches!(outcome, Err(Wrong::Busy | Wrong::Late(_))) || begun.elapsed() >= SESSION_TIME {
                break outcome;
            }
            // One that is being cleaned up still has its place: as a client would, try again.
            *random = again;
            if let Ok(mut tally) = self.tally.lock() {
                match outcome {
                    Err(Wrong::Late(start)) => tally.late.push(format!("{kind:?}: {start}")),
                    _ => tally.busy += 1,
                }
            }
            thread::sleep(Duration::from_millis(20));
        };
        let time = begun.elapsed();
        let Ok(mut tally) = self.tally.lock() else { return };
        let line = tally.lines.entry(kind).or_default();
        line.time += time;
        line.longest = line.longest.max(time);
        match outcome {
            Ok(()) => line.right += 1,
            Err(wrong) => {
                line.wrong += 1;
                tally.failures.push(format!("{kind:?} after {time:?}: {wrong:?}"));
            }
        }
    }

    /// One session of a kind; an error unless it went as it must.
    #[expect(clippy::too_many_lines, reason = "a table: one arm a kind, each read on its own")]
    fn session(&self, kind: Mix, random: &mut Random) -> Result<(), Wrong> {
        match kind {
            Mix::Short => {
                let code = u32::from(random.byte());
                let word = format!("{:016x}", random.number()).repeat(1 + random.below(600));
                let script = "printf '%s\n' \"$1\"; exit $2";
                let ended = self.whole(&["/bin/sh", "-c", script, "sh", &word, &code.to_string()])?;
                check(ended.text() == format!("{word}\r\n") && ended.exit == exited(code), &ended)
            }
            Mix::Failing => {
                let code = 1 + u32::try_from(random.below(255)).unwrap_or(0);
                let ended = self.whole(&["/bin/sh", "-c", &format!("exit {code}")])?;
                check(ended.exit == exited(code) && ended.output.is_empty(), &ended)
            }
            Mix::NotFound => {
                let ended = self.whole(&["/nonexistent/command"])?;
                check(ended.exit == exited(127), &ended)
            }
            Mix::Killed => {
                let signal = *random.choose(&[("KILL", 9), ("SEGV", 11), ("TERM", 15), ("HUP", 1), ("PIPE", 13)]);
                let ended = self.whole(&["/bin/sh", "-c", &format!("kill -{} $$", signal.0)])?;
                check(ended.exit == exited(128 + signal.1), &ended)
            }
            Mix::UnitKilled => {
                let (mut peer, unit) = self.started(&["sleep", "1000"], 60)?;
                self.host.sh_ok(&format!("systemctl kill --signal=KILL {unit}"))?;
                let ended = peer.read_to_end(SESSION_TIME)?;
                check(ended.exit == Exit::new(2, 9, "signal").ok(), &ended)
            }
            Mix::Stopped => {
                let (mut peer, _) = self.started(&["/bin/sh", "-c", "echo ready; exec sleep 1000"], 60)?;
                peer.output_until(b"ready", SESSION_TIME)?;
                stopped(&mut peer)
            }
            Mix::StoppedFlood => {
                let (mut peer, _) = self.started(&["yes"], 60)?;
                pause(random, 30);
                stopped(&mut peer)
            }
            Mix::Disconnected => {
                let (mut peer, _) = self.started(&["yes"], 60)?;
                if random.one_in(2) {
                    peer.output_until(b"y", SESSION_TIME)?;
                }
                peer.input(&random.bytes(100_000))?;
                Ok(())
            }
            Mix::DisconnectedEarly => {
                let dir = self.standin.open(WORKSPACE)?;
                let peer = self.standin.peer()?;
                // It may be refused already, for want of a place.
                let _ = peer.start_in(&dir, 60, &["sleep", "1000"]);
                pause(random, 60);
                Ok(())
            }
            Mix::HalfClosed => {
                let (mut peer, _) = self.started(&["sleep", "1000"], 60)?;
                peer.half_close()?;
                let ended = peer.read_until_closed(SESSION_TIME)?;
                check(ended.exit.is_none() && ended.error.is_none(), &ended)
            }
            Mix::Malformed => {
                let (mut peer, _) = self.started(&["sleep", "1000"], 60)?;
                let mut frame = encode(Kind::Input, b"hello").map_err(|error| Wrong::Other(error.to_string()))?;
                let place = *random.choose(&[0, 1, 2, 3, 4, 5, 6, 7]);
                if let Some(byte) = frame.get_mut(place) {
                    *byte = byte.wrapping_add(100);
                }
                peer.send_raw(&frame, &[])?;
                failed(&mut peer, &[ErrorCode::BadFrame])
            }
            Mix::Stray => {
                let dir = self.standin.open(WORKSPACE)?;
                let (mut peer, _) = self.started(&["sleep", "1000"], 60)?;
                let frame = encode(Kind::Input, b"hello").map_err(|error| Wrong::Other(error.to_string()))?;
                let descriptors = vec![std::os::fd::AsFd::as_fd(&dir); 1 + random.below(64)];
                peer.send_raw(&frame, &descriptors)?;
                failed(&mut peer, &[ErrorCode::BadFrame])
            }
            Mix::Incomplete => {
                let dir = self.standin.open(WORKSPACE)?;
                let peer = self.standin.peer()?;
                let count = random.below(12);
                let part = b"OPTY\x01\x01\0\0\0\0\0\x30".get(..count).unwrap_or_default();
                if !part.is_empty() {
                    let _ = peer.send_raw(part, &[std::os::fd::AsFd::as_fd(&dir)]);
                }
                pause(random, 20);
                Ok(())
            }
            Mix::SlowReader => {
                let last = 20_000 + random.below(60_000);
                let (mut peer, _) = self.started(&["seq", "1", &last.to_string()], 60)?;
                pause(random, 1_500);
                let ended = peer.read_to_end(SESSION_TIME)?;
                check(ended.output == numbers(last) && ended.exit == exited(0), &ended)
            }
            Mix::BigOutput => {
                let last = 100_000 + random.below(200_000);
                let ended = self.whole(&["seq", "1", &last.to_string()])?;
                check(ended.output == numbers(last) && ended.exit == exited(0), &ended)
            }
            Mix::Echo => {
                let code = u32::from(random.byte());
                let typed = random.bytes(200_000);
                let script = format!("stty raw -echo; echo ready; head -c {}; exit {code}", typed.len());
                let (mut peer, _) = self.started(&["/bin/sh", "-c", &script], 60)?;
                let mut came = peer.output_until(b"ready\n", SESSION_TIME)?;
                let sender = peer.sender();
                let sending = typed.clone();
                let typing = thread::spawn(move || -> Result<(), PeerError> {
                    // In frames of every size, down to a byte.
                    let mut rest = sending.as_slice();
                    let mut size = 1;
                    while !rest.is_empty() {
                        let (part, behind) = rest.split_at(rest.len().min(size));
                        sender.input(part)?;
                        rest = behind;
                        size = if size > 20_000 { 1 } else { size * 3 };
                    }
                    Ok(())
                });
                let ended = peer.read_to_end(SESSION_TIME)?;
                typing.join().map_err(|_| Wrong::Other("the typist panicked".to_owned()))??;
                came.extend_from_slice(&ended.output);
                let right = came.strip_prefix(b"ready\n") == Some(typed.as_slice()) && ended.exit == exited(code);
                check(right, &ended)
            }
            Mix::Expired => {
                let (mut peer, _) = self.started(&["sleep", "1000"], SHORT_RUNTIME)?;
                let ended = peer.read_to_end(SESSION_TIME)?;
                check(ended.exit.as_ref().map(Exit::result) == Some("timeout"), &ended)
            }
            Mix::Daemons => {
                let script = "setsid nohup sleep 9999 >/dev/null 2>&1 & (setsid sh -c 'setsid sleep 9998 &') & exit 6";
                let ended = self.whole(&["/bin/sh", "-c", script])?;
                check(ended.exit == exited(6), &ended)
            }
        }
    }

    /// A session that has said `started`.
    fn started(&self, words: &[&str], runtime: u32) -> Result<(Peer, String), Wrong> {
        match self.standin.try_start(WORKSPACE, runtime, words)? {
            Tried::Started(peer, unit) => Ok((peer, unit)),
            Tried::Busy => Err(Wrong::Busy),
            Tried::Late(answer) => Err(Wrong::Late(answer)),
        }
    }

    /// A session from beginning to end.
    fn whole(&self, words: &[&str]) -> Result<Transcript, Wrong> {
        let (mut peer, _) = self.started(words, 60)?;
        Ok(peer.read_to_end(SESSION_TIME)?)
    }

    /// What is held once no session is left and the numbers stay, or are what they were; or else what there is in the end.
    fn settled(&self, before: Option<&Held>) -> Result<Held, Failure> {
        let deadline = Instant::now() + SETTLE_TIME;
        let mut last = self.held()?;
        loop {
            thread::sleep(Duration::from_millis(500));
            let now = self.held()?;
            let same = before.map_or(now == last && now.units.is_empty(), |before| now == *before);
            if same || (before.is_some() && Instant::now() >= deadline) {
                return Ok(now);
            }
            if Instant::now() >= deadline {
                return Err(Failure::Failed(format!("not at rest before the first count: {now:?}")));
            }
            last = now;
        }
    }

    fn held(&self) -> Result<Held, Failure> {
        let root = |script: &str| self.host.sh_ok(script);
        let supervisor = root("systemctl show --property=MainPID --value opencode-pty-supervisor.service")?;
        let entries = |what: &str| {
            fs::read_dir(self.host.path(format!("/proc/{supervisor}/{what}")))
                .map_err(|error| Failure::Failed(format!("cannot look at {what}: {error}")))
        };
        let descriptors = entries("fd")?.count();
        let names = entries("task")?.flatten().filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        let (pool, mut threads): (Vec<String>, Vec<String>) =
            names.map(|name| name.trim_end().to_owned()).partition(|name| name == THREAD_NAME);
        threads.sort();
        // The kernel's own count is that of all hosts on this machine.
        let terminals = root("ls /dev/pts | grep -c '^[0-9]' || true")?;
        let units = root(
            "{
                systemctl list-units --all --plain --no-legend 'opencode-pty-*.service'
                find /sys/fs/cgroup -type d -name 'opencode-pty-*.service' 2>/dev/null
                find /run/systemd/transient -name 'opencode-pty-*'
            } | grep -v opencode-pty-supervisor || true",
        )?;
        let processes = root("pgrep -c -u byk")?.parse().unwrap_or(0);
        let pool_within_limit = pool.len() <= FOREIGN_CALL_THREADS;
        Ok(Held { supervisor, descriptors, threads, pool_within_limit, terminals, units, processes })
    }

    fn resident_kib(&self, held: &Held) -> Result<u64, Failure> {
        let status = fs::read_to_string(self.host.path(format!("/proc/{}/status", held.supervisor)))
            .map_err(|error| format!("cannot look at the supervisor: {error}"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
        line.split_whitespace()
            .next()
            .and_then(|number| number.parse().ok())
            .ok_or_else(|| Failure::Failed("the supervisor has no VmRSS".to_owned()))
    }
}

/// Why a session counts as wrong.
enum Wrong {
    /// Every place was taken.
    Busy,
    /// A start took too long.
    Late(String),
    Other(String),
}

impl std::fmt::Debug for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Busy => f.write_str("busy all the time"),
            Self::Late(what) | Self::Other(what) => f.write_str(what),
        }
    }
}

impl From<PeerError> for Wrong {
    fn from(error: PeerError) -> Self {
        Self::Other(error.to_string())
    }
}

impl From<std::io::Error> for Wrong {
    fn from(error: std::io::Error) -> Self {
        Self::Other(error.to_string())
    }
}

impl From<host::Error> for Wrong {
    fn from(error: host::Error) -> Self {
        Self::Other(error.to_string())
    }
}

fn exited(code: u32) -> Option<Exit> {
    Exit::new(1, code, if code == 0 { "success" } else { "exit-code" }).ok()
}

fn check(right: bool, ended: &Transcript) -> Result<(), Wrong> {
    if right {
        return Ok(());
    }
    let text = ended.text();
    let said: String = text.chars().take(200).collect();
    let Transcript { exit, error, stopped, frames, .. } = ended;
    let bytes = ended.output.len();
    Err(Wrong::Other(format!("{exit:?}, {error:?}, stopped {stopped}, {frames} frames, {bytes} bytes: {said:?}")))
}

/// Stops a session and reads to the end.
fn stopped(peer: &mut Peer) -> Result<(), Wrong> {
    peer.stop()?;
    let ended = peer.read_to_end(SESSION_TIME)?;
    check(ended.stopped && ended.exit == Some(Exit::stopped()), &ended)
}

/// Reads to an error of one of these codes.
fn failed(peer: &mut Peer, codes: &[ErrorCode]) -> Result<(), Wrong> {
    let ended = peer.read_until_closed(SESSION_TIME)?;
    check(ended.error_code().is_some_and(|code| codes.contains(&code)) && ended.exit.is_none(), &ended)
}

/// Waits for any time below this many milliseconds.
fn pause(random: &mut Random, below: usize) {
    thread::sleep(Duration::from_millis(random.below(below) as u64));
}

/// The numbers up to `last` as a terminal shows them.
fn numbers(last: usize) -> Vec<u8> {
    let mut text = String::new();
    for number in 1..=last {
        // Writing to a string does not fail.
        let _ = write!(text, "{number}\r\n");
    }
    text.into_bytes()
}

fn table(tally: &Tally, took: Duration) -> String {
    let mut text = format!("{:<20} {:>7} {:>6} {:>9} {:>9}\n", "kind", "right", "wrong", "mean ms", "most ms");
    let (mut right, mut wrong) = (0, 0);
    for (kind, line) in &tally.lines {
        let sessions = u32::try_from((line.right + line.wrong).max(1)).unwrap_or(u32::MAX);
        let mean = (line.time / sessions).as_millis();
        let name = format!("{kind:?}");
        let _ =
            writeln!(text, "{name:<20} {:>7} {:>6} {mean:>9} {:>9}", line.right, line.wrong, line.longest.as_millis());
        right += line.right;
        wrong += line.wrong;
    }
    let _ = writeln!(
        text,
        "{:<20} {right:>7} {wrong:>6}   in {:.0} s, {} waits for a place",
        "sum",
        took.as_secs_f64(),
        tally.busy
    );
    text
}
