//! What breaks around a session: the supervisor is killed, the manager re-executes itself or hangs, the bus dies or
//! hangs, the journal is away, the launcher can't be executed, terminals or descriptors run out. No output is lost,
//! records are right or `lost`, and nothing stays behind.
//!
//! Two of these are longer when asked: `OPENCODE_PTY_KILLS=100`, `OPENCODE_PTY_LONG_FREEZES=1`. Random moments come
//! from `OPENCODE_PTY_SEED`, or from the clock; the seed is printed.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::mem;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use opencode_pty::frame::message::{ErrorCode, Exit};
use opencode_pty::frame::{Kind, encode};
use rustix::process::{Pid, Signal, kill_process};
use support::host::Host;
use support::peer::{Frame, Peer, Sender, Transcript, start_for};
use support::random::Random;
use support::standin::SUPERVISOR_PATH;

use crate::account::WORKSPACE;
use crate::fixture::{Fixture, PLACES, RUNTIME, SOON, Session, exited, side_by_side, wait_until};
use crate::outside::{DropIn, RestartAtEnd, SERVER, SUPERVISOR};

/// From the supervisor's death to the last of its sessions' processes gone, and to its socket answering again.
const BACK: Duration = Duration::from_secs(10);
/// From a line typed to its echo and its copy, at any time. Chosen.
const ECHOED: Duration = Duration::from_secs(5);
/// Longer than a stop may take while the bus answers (10 s), shorter than the 60 s it may take while it does not.
const FREEZE: Duration = Duration::from_secs(12);
const LONG_FREEZE: Duration = Duration::from_secs(40);

fn freeze() -> Duration {
    if std::env::var_os("OPENCODE_PTY_LONG_FREEZES").is_some() { LONG_FREEZE } else { FREEZE }
}

/// A generator whose seed is told.
fn random() -> Random {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let seed = Random::seed(now.as_secs());
    eprintln!("OPENCODE_PTY_SEED={seed}");
    Random::new(seed)
}

fn random_time(random: &mut Random, below: Duration) -> Duration {
    Duration::from_micros(random.below(usize::try_from(below.as_micros()).unwrap()) as u64)
}

/// The terminals that are open on the host, which has a devpts of its own.
fn terminals(fixture: &Fixture) -> String {
    fixture.root("ls /dev/pts")
}

/// A process of the host, as the machine numbers it.
fn outside_pid(host: &Host, inside: &str) -> Pid {
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let ours = namespace(&host.leader().to_string());
    let found = fs::read_dir("/proc").unwrap().find_map(|entry| {
        let pid = entry.ok()?.file_name().into_string().ok()?;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        (numbers.split_whitespace().next_back() == Some(inside) && namespace(&pid) == ours).then_some(pid)
    });
    let pid = found.unwrap_or_else(|| panic!("no process {inside} on {host}"));
    Pid::from_raw(pid.parse().unwrap()).unwrap()
}

/// A process that is stopped until this is dropped.
struct Frozen(How);

enum How {
    Signal(Pid),
    /// The control group whose freezer holds it.
    Freezer(PathBuf),
}

impl Frozen {
    fn new(pid: Pid) -> Self {
        kill_process(pid, Signal::STOP).unwrap();
        Self(How::Signal(pid))
    }

    /// The main process of a unit.
    fn unit(fixture: &Fixture, unit: &str) -> Self {
        Self::new(outside_pid(&fixture.host, &fixture.property(unit, "MainPID")))
    }

    /// The host's PID 1.
    fn manager(fixture: &Fixture) -> Self {
        let pid = Pid::from_raw(i32::try_from(fixture.host.leader()).unwrap()).unwrap();
        if !pid.is_init() {
            return Self::new(pid);
        }
        // Inside a virtual machine it is our own PID 1, which takes no STOP.
        let group = PathBuf::from("/sys/fs/cgroup/init.scope");
        fs::write(group.join("cgroup.freeze"), "1").unwrap();
        let frozen = Self(How::Freezer(group.clone()));
        wait_until("PID 1 to be frozen", SOON, || {
            let events = fs::read_to_string(group.join("cgroup.events")).unwrap();
            if events.contains("frozen 1") { Ok(()) } else { Err(events) }
        });
        frozen
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = match &self.0 {
            How::Signal(pid) => kill_process(*pid, Signal::CONT).map_err(Into::into),
            How::Freezer(group) => fs::write(group.join("cgroup.freeze"), "0"),
        };
    }
}

/// Counts aloud, a few thousand times a second, until the file exists; then exits with 7.
const COUNT: &str = "
import os, sys, time
count = 0
while not os.path.exists(sys.argv[1]):
    count += 1
    print(count, flush=True)
    time.sleep(0.001)
sys.exit(7)
";

/// Sessions that count until told to end, each read by a thread of its own; stopped when dropped.
struct Counting {
    end: String,
    readers: Vec<(Sender, thread::JoinHandle<Transcript>)>,
}

impl Counting {
    fn start(fixture: &Fixture, sessions: usize) -> Self {
        let end = format!("{}/end", fixture.scratch());
        let start = |_| {
            let mut session = fixture.start(&["python3", "-c", COUNT, &end]);
            // Not a frame of it may be missing: it begins with the first.
            let first = session.next_frame(SOON).unwrap();
            let Frame::Output(first) = first else { panic!("{first:?} instead of output") };
            let stops = session.peer.sender();
            let reader = thread::spawn(move || {
                let mut transcript = session.peer.read_to_end(Duration::from_mins(5)).unwrap();
                transcript.output.splice(0..0, first);
                transcript
            });
            (stops, reader)
        };
        let readers = (0..sessions).map(start).collect();
        Self { end, readers }
    }

    /// Fails unless every number came, once and in order, and the record is right.
    fn finish(mut self, fixture: &Fixture) -> usize {
        fixture.root(&format!("touch {}", self.end));
        let mut all = 0;
        for (_, reader) in mem::take(&mut self.readers) {
            let transcript = reader.join().unwrap();
            assert_eq!(transcript.exit, Some(exited(7)), "{:?}", transcript.error);
            let mut expected = String::new();
            let lines = transcript.output.split(|byte| *byte == b'\n').count() - 1;
            for number in 1..=lines {
                write!(expected, "{number}\r\n").unwrap();
            }
            let differs = transcript.output.iter().zip(expected.as_bytes()).position(|(found, wanted)| found != wanted);
            assert_eq!((differs, transcript.output.len()), (None, expected.len()), "of {lines} lines");
            all += lines;
        }
        all
    }
}

/// A test that fails in between leaves no session that keeps a processor busy while the next one waits for its end.
impl Drop for Counting {
    fn drop(&mut self) {
        for (stops, _) in &self.readers {
            let _ = stops.stop();
        }
    }
}

/// A session that says `ready` and ends with 19 as soon as `gate` exists; nothing but its file system is needed.
fn gated(fixture: &Fixture, gate: &str) -> Session {
    let mut session = fixture.start_sh(&format!("echo ready; while [ ! -e {gate} ]; do sleep 0.03; done; exit 19"));
    session.line("ready");
    session
}

/// Types a line at a `cat` and waits for its echo: bytes flow both ways.
fn assert_answers(session: &mut Session, word: &str) {
    session.input(format!("{word}\n").as_bytes()).unwrap();
    session.output_until(format!("{word}\r\n{word}\r\n").as_bytes(), ECHOED).unwrap();
}

// ---- the supervisor is killed ----------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug)]
enum Moment {
    Handshake,
    Starting,
    Running,
    Stopping,
}

const MOMENTS: [Moment; 4] = [Moment::Handshake, Moment::Starting, Moment::Running, Moment::Stopping];

/// Ignores what it can, and has a child in a session of its own.
const STUBBORN: &str = "trap '' TERM HUP INT; (setsid sleep 7001 &); echo ready; while :; do sleep 7002; done";

fn stubborn(fixture: &Fixture) -> Session {
    let mut session = fixture.start_sh(STUBBORN);
    session.line("ready");
    session
}

/// Brings sessions to a moment and kills the supervisor after a random time. What it gives keeps them connected.
fn kill_at(fixture: &Fixture, moment: Moment, random: &mut Random) -> (Vec<Peer>, Instant) {
    let supervisor = outside_pid(&fixture.host, &fixture.supervisor_pid());
    let mut peers = vec![stubborn(fixture).peer];
    let dir = fixture.standin.open(WORKSPACE).unwrap();
    let time = match moment {
        Moment::Handshake => {
            let start = start_for(&dir, RUNTIME, &["sleep", "7003"]).unwrap();
            let frame = encode(Kind::Start, &start.encode()).unwrap();
            for _ in 0..4 {
                let peer = fixture.standin.peer().unwrap();
                let part = 1 + random.below(frame.len() - 1);
                peer.send_raw(&frame[..part], &[dir.as_fd()]).unwrap();
                peers.push(peer);
            }
            Duration::from_millis(8)
        }
        Moment::Starting => {
            for _ in 0..4 {
                let peer = fixture.standin.peer().unwrap();
                peer.start_in(&dir, RUNTIME, &["sleep", "7003"]).unwrap();
                peers.push(peer);
            }
            Duration::from_millis(100)
        }
        Moment::Running => {
            peers.extend([(); 2].map(|()| fixture.start(&["yes"]).peer));
            Duration::from_millis(50)
        }
        Moment::Stopping => {
            let stopping = [(); 2].map(|()| stubborn(fixture).peer);
            for peer in &stopping {
                peer.stop().unwrap();
            }
            peers.extend(stopping);
            // The signals at once, KILL after 2 s, clean-up and drain behind it.
            Duration::from_millis(if random.one_in(2) { 20 } else { 2_200 })
        }
    };
    thread::sleep(random_time(random, time));
    kill_process(supervisor, Signal::KILL).unwrap();
    (peers, Instant::now())
}

/// The processes below the sessions' slice, and those with a session's command line wherever they are.
fn session_processes(fixture: &Fixture) -> String {
    fixture.root(
        "find /sys/fs/cgroup -path '*/opencode-pty.slice/*' -name cgroup.procs -exec cat {} + 2>/dev/null
        pgrep --full '^(sleep 700[123]|yes)$' || true",
    )
}

/// Waits until a new supervisor closes a connection that isn't the server's.
fn wait_until_socket_answers(fixture: &Fixture, deadline: Instant) {
    let path = fixture.host.path(SUPERVISOR_PATH);
    wait_until("the socket to answer", deadline.saturating_duration_since(Instant::now()), || {
        let mut peer = Peer::connect(&path).map_err(|error| error.to_string())?;
        match peer.next_frame(SOON) {
            Ok(Frame::Closed) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
}

/// Waits until both are active as other processes than before, with nothing queued for them.
fn wait_until_both_are_back(fixture: &mut Fixture, supervisor: &str, server: &str) {
    wait_until("supervisor and server to be back", SOON, || {
        let state = fixture.root(&format!(
            "systemctl show --property=ActiveState,MainPID,Job,Result {SUPERVISOR} {SERVER} | tr '\\n' ' '"
        ));
        let old = [supervisor, server].iter().any(|pid| state.contains(&format!("MainPID={pid} ")));
        let queued = state.split(' ').any(|word| word.strip_prefix("Job=").is_some_and(|job| !job.is_empty()));
        let back = state.matches("ActiveState=active").count() == 2 && !queued && !old;
        if back { Ok(()) } else { Err(state) }
    });
    fixture.restart_what_ended();
}

#[test]
fn a_supervisor_killed_at_any_moment_leaves_nothing_and_its_successor_has_every_place() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let kills = std::env::var("OPENCODE_PTY_KILLS").map_or(8, |kills| kills.parse().unwrap());
    let mut random = random();
    let (terminals_before, descriptors) = (terminals(&fixture), fixture.idle_descriptors());
    let mut slowest = [Duration::ZERO; 2];

    for (index, moment) in (0..kills).zip(MOMENTS.into_iter().cycle()) {
        let (supervisor, server) = (fixture.supervisor_pid(), fixture.standin.pid().to_string());
        let (peers, killed) = kill_at(&fixture, moment, &mut random);

        let what = format!("the sessions' processes to be gone after kill {index} ({moment:?})");
        wait_until(&what, BACK, || {
            let left = session_processes(&fixture);
            if left.is_empty() { Ok(()) } else { Err(left) }
        });
        slowest[0] = slowest[0].max(killed.elapsed());
        wait_until_socket_answers(&fixture, killed + BACK);
        slowest[1] = slowest[1].max(killed.elapsed());
        for mut peer in peers {
            let last = peer.read_until_closed(SOON).unwrap();
            // What had ended before the kill may have been told.
            assert!(last.exit.is_none_or(|exit| exit == Exit::stopped()), "{moment:?}");
        }

        wait_until_both_are_back(&mut fixture, &supervisor, &server);
        let full = side_by_side(PLACES, |_| fixture.start(&["sleep", "7003"]));
        let units: BTreeSet<&String> = full.iter().map(|session| &session.unit).collect();
        assert_eq!(units.len(), PLACES);
        drop(full);
        wait_until("the new supervisor's sessions to be gone", SOON, || {
            let left = fixture.left_of_sessions();
            if left.is_empty() { Ok(()) } else { Err(left) }
        });
    }

    eprintln!("{kills} kills: processes gone after {:?} at most, socket back after {:?}", slowest[0], slowest[1]);
    assert_eq!(fixture.property(SUPERVISOR, "Result"), "success");
    assert_eq!(terminals(&fixture), terminals_before);
    fixture.wait_for_descriptors(descriptors, "them");
}

#[test]
fn a_supervisor_that_is_terminated_during_starts_leaves_nothing_and_says_why() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let mut random = random();
    for _ in 0..8 {
        let supervisor = outside_pid(&fixture.host, &fixture.supervisor_pid());
        let dir = fixture.standin.open(WORKSPACE).unwrap();
        let peers = [(); 6].map(|()| {
            let peer = fixture.standin.peer().unwrap();
            peer.start_in(&dir, RUNTIME, &["sleep", "7003"]).unwrap();
            peer
        });
        thread::sleep(random_time(&mut random, Duration::from_millis(120)));
        kill_process(supervisor, Signal::TERM).unwrap();
        for mut peer in peers {
            let last = peer.read_until_closed(SOON).unwrap();
            match (&last.unit, &last.exit, last.error_code()) {
                (Some(_), Some(exit), None) => assert!(exit.code() == 2, "{exit}"),
                // A connection that was never accepted is closed with the socket.
                (None, None, Some(ErrorCode::Shutdown) | None) => {}
                _ => panic!("{last:?}"),
            }
        }
        wait_until("the supervisor to have ended well", SOON, || {
            let state = fixture.root(&format!("systemctl show --property=ActiveState,Result --value {SUPERVISOR}"));
            // One line each, in an order of its own.
            if state.contains("inactive") && state.contains("success") { Ok(()) } else { Err(state) }
        });
        assert_eq!((session_processes(&fixture), fixture.left_of_sessions()), Default::default());
        fixture.restart_what_ended();
    }
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}

// ---- the manager ---------------------------------------------------------------------------------------------------

#[test]
fn reloads_and_re_executions_of_the_manager_cost_no_byte_and_no_record() {
    let fixture = Fixture::new();
    let mut random = random();
    let pid = fixture.supervisor_pid();
    let counting = Counting::start(&fixture, 2);
    let mut patient = fixture.start(&["cat"]);
    for round in 0..8 {
        let verb = if round % 2 == 0 { "daemon-reexec" } else { "daemon-reload" };
        let gates = [(); 3].map(|()| format!("{}/gate", fixture.scratch()));
        let mut ending = [0, 1, 2].map(|index: usize| gated(&fixture, &gates[index]));
        let time = random_time(&mut random, Duration::from_millis(200));
        thread::scope(|scope| {
            let manager = scope.spawn(|| fixture.root(&format!("systemctl {verb}")));
            // Before, in the middle of, and after it.
            for gate in &gates {
                fixture.root(&format!("touch {gate}"));
                thread::sleep(time / 2);
            }
            manager.join().unwrap();
        });
        for session in &mut ending {
            let transcript = session.read_to_end();
            assert_eq!(transcript.exit, Some(exited(19)), "{verb}, {time:?}: {transcript:?}");
            fixture.wait_until_gone(&session.unit, SOON);
        }
        assert_answers(&mut patient, &format!("round {round}"));
        assert_eq!(fixture.ask(&["echo", "again"]), "again", "after {verb}");
    }
    assert_eq!(patient.stop_and_read().exit, Some(Exit::stopped()));
    let lines = counting.finish(&fixture);
    assert_eq!(fixture.supervisor_pid(), pid);
    eprintln!("{lines} lines over 6 re-executions and 6 reloads, 36 sessions that ended meanwhile");
}

/// What goes over the host's bus, as busctl(1) tells it.
struct Monitor {
    busctl: Child,
    lines: Receiver<String>,
}

impl Monitor {
    /// Calls of these methods.
    fn start(fixture: &Fixture, methods: &[&str]) -> Self {
        let mut busctl = fixture
            .host
            .command("timeout")
            // Killing nsenter(1) does not end what it started inside.
            .args(["100", "busctl", "monitor"])
            .args(methods.iter().map(|method| format!("--match=type='method_call',member='{method}'")))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(busctl.stderr.take().unwrap()).read_line(&mut said).unwrap();
        assert!(said.starts_with("Monitoring"), "{said}");
        let stdout = BufReader::new(busctl.stdout.take().unwrap());
        let (send, lines) = mpsc::channel();
        thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
        Self { busctl, lines }
    }

    /// Calls the manager's `Ping`, which it must have been started with, too, and waits for the answer; gives what it showed up to
    /// that call.
    fn until_ping(&self, fixture: &Fixture) -> Vec<String> {
        fixture.root(
            "busctl --quiet call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.DBus.Peer Ping",
        );
        let is_ping =
            |line: &str| line.contains("Member=Ping") && line.contains("Destination=org.freedesktop.systemd1");
        let mut shown = Vec::new();
        loop {
            let line = self.lines.recv_timeout(SOON).expect("the monitor shows the ping");
            if is_ping(&line) {
                return shown;
            }
            shown.push(line);
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.busctl.kill();
        let _ = self.busctl.wait();
    }
}

/// Freezes PID 1 between its last word on who the peer is and its hearing of the unit: the supervisor runs in short
/// slices until it registers for the unit's signals. `None` when a slice was too long for that.
fn freeze_manager_before_it_hears_of_the_unit(fixture: &Fixture, words: &[&str]) -> Option<(Frozen, Peer)> {
    let supervisor = outside_pid(&fixture.host, &fixture.supervisor_pid());
    let monitor = Monitor::start(fixture, &["AddMatch", "StartTransientUnit", "Ping"]);
    let dir = fixture.standin.open(WORKSPACE).unwrap();
    let peer = fixture.standin.peer().unwrap();
    // Well before the five seconds of a handshake are over.
    let connected = Instant::now();
    let deadline = connected + Duration::from_secs(3);
    peer.start_in(&dir, RUNTIME, words).unwrap();
    while Instant::now() < deadline {
        let slice = Instant::now() + Duration::from_micros(100);
        while Instant::now() < slice {
            std::hint::spin_loop();
        }
        let still = Frozen::new(supervisor);
        let mut registers = false;
        while let Ok(line) = monitor.lines.recv_timeout(Duration::from_millis(4)) {
            if line.contains("Member=StartTransientUnit") {
                return None;
            }
            registers |= line.contains("JobRemoved") && line.contains("opencode-pty-");
        }
        if registers {
            // Its last question is ahead of this one in PID 1's queue, and may still be unanswered on a busy machine.
            // And so would be, on the monitor, which shows messages late on such a machine, the start that it had asked for.
            if monitor.until_ping(fixture).iter().any(|line| line.contains("Member=StartTransientUnit")) {
                return None;
            }
            let frozen = Frozen::manager(fixture);
            if connected.elapsed() > Duration::from_secs(4) {
                return None;
            }
            drop(still);
            return Some((frozen, peer));
        }
    }
    None
}

#[test]
fn t15_a_start_that_a_frozen_manager_carries_out_later_runs_nothing() {
    let fixture = Fixture::new();
    let pid = fixture.supervisor_pid();
    let descriptors = fixture.idle_descriptors();
    let scratch = fixture.scratch();
    let gate = format!("{scratch}/gate");
    let mut frozen_once = false;
    for attempt in 0..20 {
        // An attempt at the wrong moment may run its command, and late.
        let ran = format!("{scratch}/ran-{attempt}");
        let counting = Counting::start(&fixture, 1);
        let mut patient = fixture.start(&["cat"]);
        let mut ending = gated(&fixture, &gate);
        let Some((frozen, mut peer)) = freeze_manager_before_it_hears_of_the_unit(&fixture, &["touch", &ran]) else {
            drop(patient);
            fixture.root(&format!("touch {gate}"));
            ending.read_to_end();
            fixture.root(&format!("rm -f {scratch}/*"));
            counting.finish(&fixture);
            continue;
        };
        let begun = Instant::now();
        fixture.root(&format!("touch {gate}"));
        while begun.elapsed() < Duration::from_secs(7) {
            assert_answers(&mut patient, &format!("after {:?}", begun.elapsed()));
            thread::sleep(Duration::from_millis(200));
        }
        drop(frozen);
        let thawed = Instant::now();

        let refused = peer.read_to_end(SOON).unwrap();
        assert_eq!((&refused.unit, refused.error_code()), (&None, Some(ErrorCode::StartFailed)), "{refused:?}");
        assert!(thawed.elapsed() < Duration::from_secs(10), "it took {:?}", thawed.elapsed());
        assert_eq!(ending.read_to_end().exit, Some(exited(19)));
        assert_answers(&mut patient, "thawed");
        assert_eq!(patient.stop_and_read().exit, Some(Exit::stopped()));
        counting.finish(&fixture);
        assert!(!fixture.host.path(&ran).exists(), "the command ran");
        frozen_once = true;
        break;
    }
    assert!(frozen_once, "never froze it at the right moment, so this test tried nothing");
    wait_until("no unit to be left", SOON, || {
        let left = fixture.left_of_sessions();
        if left.is_empty() { Ok(()) } else { Err(left) }
    });
    assert_eq!(fixture.supervisor_pid(), pid);
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
    fixture.wait_for_descriptors(descriptors, "what was not started");
}

/// Units that a test has queued, gone when dropped.
struct Queued(Host, String);

impl Drop for Queued {
    fn drop(&mut self) {
        let _ = self.0.sh(&format!("systemctl stop {}; rm -f /run/test-ran-*", self.1));
    }
}

#[test]
fn t08_a_start_that_a_dead_supervisor_left_queued_never_runs() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    fixture.root("rm -f /run/test-ran-*; systemd-run --quiet --no-block --collect --unit=test-hangs --service-type=oneshot sh -c 'sleep 7004; :'");
    let ours = [format!("opencode-pty-{}", "1".repeat(32)), format!("opencode-pty-{}", "2".repeat(32))];
    let other = format!("opencode-pty-{}", "3".repeat(32));
    for name in &ours {
        fixture.root(&format!(
            "systemd-run --quiet --no-block --collect --unit={name} -p BindsTo={SUPERVISOR} -p After={SUPERVISOR} -p After=test-hangs.service touch /run/test-ran-{name}"
        ));
    }
    // Somebody else's, who waits for the same.
    fixture.root(&format!(
        "systemd-run --quiet --no-block --collect --unit={other} -p After=test-hangs.service touch /run/test-ran-{other}"
    ));
    let _queued = Queued(
        Host::attach(fixture.host.name()).unwrap(),
        [&ours[0], &ours[1], &other, &"test-hangs".to_owned()].map(String::as_str).join(" "),
    );
    let queued = |fixture: &Fixture| -> Vec<String> {
        let jobs = fixture.root("systemctl list-jobs --no-legend --plain | grep opencode-pty- || true");
        let mut units: Vec<String> = jobs
            .lines()
            .filter_map(|line| line.split_whitespace().nth(1)?.strip_suffix(".service"))
            .map(str::to_owned)
            .collect();
        units.sort();
        units
    };
    assert_eq!(queued(&fixture), [&ours[0], &ours[1], &other].map(String::clone));
    let (supervisor, server) = (fixture.supervisor_pid(), fixture.standin.pid().to_string());

    fixture.root(&format!("kill -KILL {supervisor}"));
    wait_until_both_are_back(&mut fixture, &supervisor, &server);

    assert_eq!(queued(&fixture), std::slice::from_ref(&other));
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
    // What they waited for has come.
    fixture.root("pkill --full '^sleep 7004$'");
    wait_until("the other one to run", SOON, || {
        let ran = fixture.root("ls /run | grep test-ran- || true");
        if ran.is_empty() { Err(ran) } else { Ok(()) }
    });
    assert_eq!(fixture.root("ls /run | grep test-ran-"), format!("test-ran-{other}"));
    fixture.root("rm -f /run/test-ran-*");
}

/// How often that many sessions end together.
const ROUNDS: usize = 5;

/// The supervisor took its own queued stop for somebody's restart and asked again, which made another job: with as many
/// sessions as there are places, a busy manager had a job whenever it looked, until none of them had stopped in time.
#[test]
fn sessions_that_end_together_are_stopped_once_each() {
    let fixture = Fixture::new();
    let pid = fixture.supervisor_pid();
    let monitor = Monitor::start(&fixture, &["StopUnit", "Ping"]);
    let mut slowest = Duration::ZERO;
    for round in 0..ROUNDS {
        let full = side_by_side(PLACES, |_| fixture.start(&["sleep", "7003"]));
        let begun = Instant::now();
        // Disconnects, stops, and both.
        for (index, session) in full.iter().enumerate() {
            if (index + round) % 2 == 0 {
                session.stop().unwrap();
            }
        }
        drop(full);
        wait_until("all of them to be gone", Duration::from_secs(10), || {
            let left = fixture.left_of_sessions();
            if left.is_empty() { Ok(()) } else { Err(left) }
        });
        slowest = slowest.max(begun.elapsed());
    }
    let asked = monitor.until_ping(&fixture).iter().filter(|line| line.contains("Member=StopUnit")).count();
    eprintln!("{} sessions, {asked} stops asked for, {slowest:?} at most for {PLACES}", ROUNDS * PLACES);
    assert!((ROUNDS * PLACES..=2 * ROUNDS * PLACES).contains(&asked), "{asked} stops asked for");
    assert_eq!(fixture.supervisor_pid(), pid);
}

// ---- the bus ---------------------------------------------------------------------------------------------------------

#[test]
fn a_bus_daemon_that_is_killed_costs_no_byte_and_invents_no_record() {
    let fixture = Fixture::new();
    let pid = fixture.supervisor_pid();
    let counting = Counting::start(&fixture, 2);
    let mut patient = fixture.start(&["cat"]);
    let mut records = Vec::new();
    for round in 0..5 {
        let scratch = fixture.scratch();
        let (during, after) = (format!("{scratch}/during"), format!("{scratch}/after"));
        let mut ends_during = gated(&fixture, &during);
        let mut ends_after = gated(&fixture, &after);
        let bus = fixture.property("dbus.service", "MainPID");
        fixture.forget_starts_of_the_bus();
        fixture.root(&format!("kill -KILL {bus}; touch {during}"));
        let record = ends_during.read_to_end().exit.unwrap();
        assert!(record == Exit::lost() || record == exited(19), "{record}");
        records.push(record);
        // By socket activation: nobody told the manager.
        wait_until("sessions to start again", SOON, || {
            let again = fixture.run_one_of_many(&["echo", "again"]);
            if again.text() == "again\r\n" { Ok(()) } else { Err(format!("{again:?}")) }
        });
        assert_ne!(fixture.property("dbus.service", "MainPID"), bus);
        fixture.root(&format!("touch {after}"));
        assert_eq!(ends_after.read_to_end().exit, Some(exited(19)));
        assert_answers(&mut patient, &format!("round {round}"));
        for session in [&ends_during, &ends_after] {
            fixture.wait_until_gone(&session.unit, SOON);
        }
    }
    assert_eq!(patient.stop_and_read().exit, Some(Exit::stopped()));
    counting.finish(&fixture);
    assert_eq!(fixture.supervisor_pid(), pid);
    fixture.restart_logind();
    eprintln!(
        "ended while the bus was away: {}",
        records.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    );
}

#[test]
fn a_bus_daemon_that_hangs_longer_than_a_stop_may_take_costs_nothing_but_time() {
    let fixture = Fixture::new();
    let pid = fixture.supervisor_pid();
    let scratch = fixture.scratch();
    let gate = format!("{scratch}/gate");
    let counting = Counting::start(&fixture, 2);
    let mut patient = fixture.start(&["cat"]);
    let mut ending = gated(&fixture, &gate);
    let mut stopped = stubborn(&fixture);
    let disconnected = stubborn(&fixture);
    let gone = disconnected.unit.clone();

    let begun = Instant::now();
    let frozen = Frozen::unit(&fixture, "dbus.service");
    fixture.root(&format!("touch {gate}"));
    stopped.stop().unwrap();
    drop(disconnected);
    // Nobody can say who it is; it must not wait for ever, nor run later.
    let dir = fixture.standin.open(WORKSPACE).unwrap();
    let mut late = fixture.standin.peer().unwrap();
    late.start_in(&dir, RUNTIME, &["touch", &format!("{scratch}/ran")]).unwrap();
    let refused = late.read_until_closed(Duration::from_secs(20)).unwrap();
    assert!(refused.unit.is_none() && refused.exit.is_none(), "{refused:?}");
    while begun.elapsed() < freeze() {
        assert_answers(&mut patient, &format!("after {:?}", begun.elapsed()));
        thread::sleep(Duration::from_millis(200));
    }
    drop(frozen);

    assert_eq!(ending.read_to_end().exit, Some(exited(19)));
    let transcript = stopped.read_to_end();
    assert_eq!((&transcript.exit, transcript.stopped), (&Some(Exit::stopped()), true), "{transcript:?}");
    assert_answers(&mut patient, "thawed");
    assert_eq!(patient.stop_and_read().exit, Some(Exit::stopped()));
    for unit in [&ending.unit, &stopped.unit, &gone] {
        fixture.wait_until_gone(unit, SOON);
    }
    counting.finish(&fixture);
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
    assert!(!fixture.host.path(format!("{scratch}/ran")).exists());
    assert_eq!(fixture.supervisor_pid(), pid);
    eprintln!("frozen for {:?}; refused in it with {:?}", freeze(), refused.error);
}

// ---- the journal ---------------------------------------------------------------------------------------------------

#[test]
fn sessions_do_without_a_journal() {
    let fixture = Fixture::new();
    let pid = fixture.supervisor_pid();
    let ends = |fixture: &Fixture, state: &str| {
        let begun = Instant::now();
        for _ in 0..3 {
            assert_eq!(fixture.sh("echo hello; exit 7").exit, Some(exited(7)), "{state}");
        }
        assert_eq!(stubborn(fixture).stop_and_read().exit, Some(Exit::stopped()), "{state}");
        begun.elapsed()
    };
    let quiet = ends(&fixture, "as ever");

    let frozen = Frozen::unit(&fixture, "systemd-journald.service");
    // More lines than its socket holds.
    let refused = fixture.host.path(SUPERVISOR_PATH);
    for _ in 0..500 {
        let _ = Peer::connect(&refused);
    }
    let without = ends(&fixture, "journald hangs");
    drop(frozen);

    let sockets = "systemd-journald.socket systemd-journald-dev-log.socket systemd-journald-audit.socket";
    fixture.root(&format!("systemctl stop {sockets} systemd-journald.service 2>/dev/null || true"));
    let stopped = ends(&fixture, "journald is stopped");
    fixture.root(&format!("systemctl start {sockets} systemd-journald.service 2>/dev/null || true"));
    assert_eq!(fixture.root("systemctl is-active systemd-journald.service"), "active");
    ends(&fixture, "journald is back");
    // It takes records again, of the same supervisor.
    let unit = fixture.sh("exit 7").unit.unwrap();
    wait_until("a record with fields", SOON, || {
        let found = fixture.root(&format!("journalctl --no-pager -o cat OBJECT_SYSTEMD_UNIT={unit} _PID={pid}"));
        if found.contains("ended by itself") { Ok(()) } else { Err(found) }
    });
    assert_eq!(fixture.supervisor_pid(), pid);
    eprintln!("three sessions and a stop: {quiet:?} with, {without:?} with one that hangs, {stopped:?} without");
}

// ---- the launcher --------------------------------------------------------------------------------------------------

const LAUNCHER: &str = "/usr/local/libexec/opencode-pty-launcher";

/// The launcher's name, given back to the launcher when dropped.
struct LauncherAway<'a>(&'a Fixture);

impl Drop for LauncherAway<'_> {
    fn drop(&mut self) {
        let _ = self.0.host.sh(&format!("mv -f {LAUNCHER}.away {LAUNCHER}"));
    }
}

#[test]
fn a_launcher_that_can_not_be_executed_is_a_start_that_failed() {
    let fixture = Fixture::new();
    let pid = fixture.supervisor_pid();
    let (terminals_before, descriptors) = (terminals(&fixture), fixture.idle_descriptors());
    for (what, instead) in [
        ("missing", "true".to_owned()),
        ("not executable", format!("install -m 0644 {LAUNCHER}.away {LAUNCHER}")),
        ("of another format", format!("echo no program >{LAUNCHER}; chmod 0755 {LAUNCHER}")),
        ("of another machine", format!("printf '\\177ELF\\2\\1\\1%57s' '' >{LAUNCHER}; chmod 0755 {LAUNCHER}")),
        ("a directory", format!("mkdir {LAUNCHER}")),
        ("one that ends at once", format!("cp /bin/true {LAUNCHER}")),
    ] {
        fixture.root(&format!("mv {LAUNCHER} {LAUNCHER}.away"));
        let away = LauncherAway(&fixture);
        fixture.root(&instead);
        let begun = Instant::now();
        let refused = side_by_side(4, |_| fixture.run_one_of_many(&["true"]));
        assert!(begun.elapsed() < Duration::from_secs(4), "{what}: {:?}", begun.elapsed());
        for transcript in refused {
            assert_eq!(
                (&transcript.unit, transcript.error_code()),
                (&None, Some(ErrorCode::StartFailed)),
                "{what}: {transcript:?}"
            );
        }
        assert_eq!(fixture.left_of_sessions(), "", "{what}");
        fixture.root(&format!("rm -rf {LAUNCHER}"));
        drop(away);
        assert_eq!(fixture.ask(&["echo", "again"]), "again", "{what}");
    }
    assert_eq!((fixture.supervisor_pid(), terminals(&fixture)), (pid, terminals_before));
    fixture.wait_for_descriptors(descriptors, "what was not started");
}

// ---- terminals and descriptors -----------------------------------------------------------------------------------------

/// The host's terminals, limited until dropped.
struct FewTerminals<'a>(&'a Fixture);

impl FewTerminals<'_> {
    fn limit(fixture: &Fixture, max: usize) {
        fixture.root(&format!("mount -o remount,gid=5,mode=620,ptmxmode=666,max={max} /dev/pts"));
    }
}

impl Drop for FewTerminals<'_> {
    fn drop(&mut self) {
        // The kernel's own limit, which it does not show as an option.
        Self::limit(self.0, 1 << 20);
    }
}

#[test]
fn sessions_that_find_no_terminal_say_so_and_keep_no_place() {
    let fixture = Fixture::new();
    let device = |path: &str| fs::metadata(path).map(|meta| std::os::unix::fs::MetadataExt::dev(&meta)).unwrap();
    let hosts = fixture.host.path("/dev/pts");
    assert_ne!(device("/dev/pts"), device(hosts.to_str().unwrap()), "the host has a devpts of its own");
    let before = terminals(&fixture);
    let in_use = before.lines().filter(|name| *name != "ptmx").count();
    {
        let few = FewTerminals(&fixture);
        FewTerminals::limit(&fixture, in_use + 1);
        let mut winner = fixture.start(&["cat"]);
        assert_answers(&mut winner, "the last one");
        for _ in 0..2 {
            for loser in side_by_side(PLACES - 1, |_| fixture.run_one_of_many(&["echo", "never"])) {
                // The launcher looks, and between its look and script(1)'s another session may take the last one.
                let refused = loser.error.as_ref().is_some_and(|(code, message)| {
                    *code == ErrorCode::StartFailed && message.contains("cannot open a new terminal")
                });
                let failed = loser.exit == Some(exited(1)) && loser.text().contains("failed to create pseudo-terminal");
                assert!(refused || failed, "{loser:?}");
            }
        }
        assert_answers(&mut winner, "still here");
        winner.stop_and_read();
        assert_eq!(fixture.ask(&["echo", "next"]), "next");
        drop(few);
    }
    let full = side_by_side(PLACES, |_| fixture.start(&["cat"]));
    assert_eq!(full.len(), PLACES);
    drop(full);
    wait_until("the terminals to be given back", SOON, || {
        let now = terminals(&fixture);
        if now == before { Ok(()) } else { Err(now) }
    });
}

/// CPU time a process of the host has used so far, in clock ticks.
fn cpu_ticks(fixture: &Fixture, pid: &str) -> u64 {
    let stat = fs::read_to_string(fixture.host.path(format!("/proc/{pid}/stat"))).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn a_supervisor_without_descriptors_neither_spins_nor_dies() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let idle = fixture.idle_descriptors();
    for spare in [1, 3, 6, 10, 17] {
        let lines = format!("[Service]\nLimitNOFILE={}", idle + spare);
        let drop_in = DropIn::new(&fixture, SUPERVISOR, &lines);
        let (supervisor, server) = (fixture.supervisor_pid(), fixture.standin.pid().to_string());
        fixture.root(&format!("systemctl restart {SUPERVISOR}"));
        wait_until_both_are_back(&mut fixture, &supervisor, &server);
        let pid = fixture.supervisor_pid();
        // Sessions as far as it goes, and connections that nobody can accept.
        let dir = fixture.standin.open(WORKSPACE).unwrap();
        let ticks = cpu_ticks(&fixture, &pid);
        let begun = Instant::now();
        let peers: Vec<Peer> = (0..40)
            .map(|index| {
                let peer = fixture.standin.peer().unwrap();
                if index % 2 == 0 {
                    // It may have been refused already.
                    let _ = peer.start_in(&dir, RUNTIME, &["cat"]);
                }
                peer
            })
            .collect();
        thread::sleep(Duration::from_secs(2).saturating_sub(begun.elapsed()));
        let used = cpu_ticks(&fixture, &pid) - ticks;
        assert!(used < 30, "{used} ticks of CPU time in 2 s with {spare} descriptors to spare");
        assert_eq!(fixture.supervisor_pid(), pid, "{spare}");
        drop(peers);
        wait_until("the descriptors to come back", SOON, || {
            let (now, left) = (fixture.supervisor_descriptors(), fixture.left_of_sessions());
            if now <= idle && left.is_empty() { Ok(()) } else { Err(format!("{now} instead of {idle}; {left}")) }
        });
        assert_eq!(fixture.supervisor_pid(), pid, "{spare}");
        if spare >= 10 {
            // What was never accepted is in the backlog still.
            wait_until("a session to start with few descriptors to spare", SOON, || {
                let again = fixture.run_one_of_many(&["echo", "again"]);
                if again.text() == "again\r\n" { Ok(()) } else { Err(format!("{spare} to spare: {again:?}")) }
            });
        }
        eprintln!("{spare} to spare: {used} ticks in 2 s");
        drop(drop_in);
    }
    let (supervisor, server) = (fixture.supervisor_pid(), fixture.standin.pid().to_string());
    fixture.root(&format!("systemctl restart {SUPERVISOR}"));
    wait_until_both_are_back(&mut fixture, &supervisor, &server);
}
