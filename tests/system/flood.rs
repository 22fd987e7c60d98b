//! Strangers of the server's own account connect as fast as they can: the server gets its sessions, in about the time
//! it takes without them.
//!
//! What is held against what is measured in one test, before and after the flood, so that a busy machine slows both.
//! Three processes that never pause take the processors from everybody else whatever they do: where there are few, any
//! three busy loops make a start take several times as long, most of it in the kernel and in PID 1. That is not the
//! supervisor's doing, so what counts is what strangers that connect cost *more* than strangers that compute; where
//! there are processors for all of them, quiet counts, as SPEC 7.2 has it.
//!
//! Only the long form (`OPENCODE_PTY_LONG=1`) compares, as times count on a machine that has nothing else to do; what was
//! measured is printed (`--nocapture`). What counts in the short one, beside another suite, is that every start goes through.

use std::fmt;
use std::fs;
use std::time::{Duration, Instant};

use crate::account::{NAME, WORKSPACE};
use crate::fixture::{Fixture, RUNTIME, SOON, exited, wait_until};
use crate::outside::{DropIn, PROBE, RestartAtEnd, Running, SERVER, SUPERVISOR};

const SOCKET: &str = "/run/opencode-pty/supervisor.sock";

/// Whether there is time for what the numbers in docs/reliability.md are about.
pub fn long() -> bool {
    std::env::var_os("OPENCODE_PTY_LONG").is_some()
}

/// How long a flood goes on if its test does not end it.
const FLOOD: Duration = Duration::from_mins(5);
/// How long starts go on without a flood, before and after it, for a comparison.
const AROUND: Duration = Duration::from_secs(15);
/// Fewest starts from which a median is taken.
const STARTS_MIN: usize = 20;

/// Strangers, each a process of its own that connects in its own way, until dropped.
struct Flood {
    strangers: Vec<(Running, String)>,
}

impl Flood {
    fn new(fixture: &Fixture, kinds: &[&str]) -> Self {
        let strangers = kinds.iter().enumerate().map(|(index, kind)| {
            let counted = format!("/run/test-flood-{index}");
            fixture.remove_at_end(&counted);
            let output = format!("StandardOutput=truncate:{counted}");
            let words = [PROBE, "flood", SOCKET, &FLOOD.as_secs().to_string(), kind];
            (
                Running::start(fixture, &format!("test-flood-{index}"), &[&format!("User={NAME}"), &output], &words),
                counted,
            )
        });
        Self { strangers: strangers.collect() }
    }

    /// How many connections there have been.
    fn connections(&self, fixture: &Fixture) -> u64 {
        let counts = self.strangers.iter().map(|(_, counted)| {
            let text = fs::read_to_string(fixture.host.path(counted)).unwrap();
            text.lines().last().map_or(0, |line| line.parse::<u64>().unwrap())
        });
        counts.sum()
    }
}

/// How long starts took, from the connection to `started`.
#[derive(Default)]
struct Starts(Vec<Duration>);

impl Starts {
    /// Short sessions one after the other for so long, and until there are [`STARTS_MIN`]. Each must start and end as
    /// it should.
    fn go_on(&mut self, fixture: &Fixture, time: Duration) {
        let dir = fixture.standin.open(WORKSPACE).unwrap();
        let (end, enough) = (Instant::now() + time, self.0.len() + STARTS_MIN);
        while Instant::now() < end || self.0.len() < enough {
            let begun = Instant::now();
            let mut peer = fixture.standin.peer().unwrap();
            peer.start_in(&dir, RUNTIME, &["/bin/sh", "-c", "exit 3"]).unwrap();
            peer.started(SOON).unwrap();
            self.0.push(begun.elapsed());
            let transcript = peer.read_to_end(SOON).unwrap();
            assert_eq!(transcript.exit, Some(exited(3)), "{transcript:?}");
        }
    }

    fn part(&self, hundredths: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        sorted[(sorted.len() * hundredths).div_ceil(100).max(1) - 1]
    }
}

impl fmt::Display for Starts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [median, most, longest] = [50, 99, 100].map(|part| self.part(part).as_secs_f32() * 1_000.0);
        write!(f, "{} starts, p50 {median:.1} ms, p99 {most:.1} ms, longest {longest:.1} ms", self.0.len())
    }
}

const KINDS: [&str; 3] = ["blocking", "non-blocking", "held"];

/// Processors that are enough for strangers, supervisor, PID 1, the session and the test at once. Chosen.
const PROCESSORS_ENOUGH: usize = 8;

/// Starts without strangers, with ones that compute, and with ones that connect.
#[derive(Default)]
struct Compared {
    quiet: Starts,
    computing: Starts,
    connecting: Starts,
}

impl Compared {
    /// The two it is held against, in the long form.
    fn without_flood(&mut self, fixture: &Fixture) {
        if long() {
            self.quiet.go_on(fixture, AROUND);
            let _computing = Flood::new(fixture, &["busy"; 3]);
            self.computing.go_on(fixture, AROUND);
        }
    }

    /// Says what strangers that connect cost; in the long form, fails if that is more than SPEC 7.2 allows.
    fn assert_fair(&self, what: &str) {
        let Self { quiet, computing, connecting } = self;
        if !long() {
            eprintln!("{what}: {connecting}");
            return;
        }
        eprintln!("{what}\n  quiet: {quiet}\n  three that compute: {computing}\n  three that connect: {connecting}");
        let enough = std::thread::available_parallelism().is_ok_and(|count| count.get() >= PROCESSORS_ENOUGH);
        let without = if enough { quiet } else { computing };
        assert!(connecting.part(50) <= without.part(50) * 2, "the median: {connecting}; without: {without}");
        let most = without.part(99) + Duration::from_millis(250);
        assert!(connecting.part(99) <= most, "the slowest: {connecting}; without: {without}");
    }
}

fn assert_flood(fixture: &Fixture, flood: &Flood, begun: Instant) {
    let connections = flood.connections(fixture);
    eprintln!("{connections} connections of strangers in {:?}", begun.elapsed());
    assert!(connections >= 10_000, "{connections} connections are no flood");
}

#[test]
fn three_strangers_that_connect_in_tight_loops_do_not_delay_the_servers_sessions() {
    let fixture = Fixture::new();
    let within = if long() { 30 } else { 6 };
    let mut compared = Compared::default();
    compared.without_flood(&fixture);

    let flood = Flood::new(&fixture, &KINDS);
    let begun = Instant::now();
    compared.connecting.go_on(&fixture, Duration::from_secs(within));
    assert_flood(&fixture, &flood, begun);
    drop(flood);

    compared.without_flood(&fixture);
    compared.assert_fair("three strangers in tight loops");
}

#[test]
fn a_server_that_is_restarted_in_the_middle_of_a_flood_gets_its_sessions() {
    let mut fixture = Fixture::new();
    let (before, after) = if long() { (60, 30) } else { (2, 4) };
    let mut compared = Compared::default();
    compared.without_flood(&fixture);

    let flood = Flood::new(&fixture, &KINDS);
    let begun = Instant::now();
    Starts::default().go_on(&fixture, Duration::from_secs(before));
    // Its very first connections, too: each of these begins as soon as the new process listens.
    for _ in 0..5 {
        fixture.root(&format!("systemctl restart {SERVER}"));
        fixture.restart_what_ended();
        assert_eq!(fixture.ask(&["echo", "again"]), "again");
    }
    compared.connecting.go_on(&fixture, Duration::from_secs(after));
    assert_flood(&fixture, &flood, begun);
    drop(flood);

    compared.without_flood(&fixture);
    compared.assert_fair("a server restarted in the middle of a flood");
}

#[test]
fn a_server_whose_first_act_is_to_connect_is_let_in_in_the_middle_of_a_flood() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let told = "/run/test-eager";
    fixture.remove_at_end(told);
    let lines = format!(
        "[Service]\nExecStart=\nExecStart={PROBE} probe {SOCKET} true\nRestart=no\nStandardOutput=append:{told}"
    );
    let drop_in = DropIn::new(&fixture, SERVER, &lines);
    let flood = Flood::new(&fixture, &KINDS);
    // The strangers' quota is used up.
    std::thread::sleep(Duration::from_secs(1));
    let times = if long() { 100 } else { 4 };
    for _ in 0..times {
        fixture.root(&format!("systemctl stop {SERVER}; systemctl start {SERVER}; while systemctl -q is-active {SERVER}; do sleep 0.05; done"));
    }
    let seen = fixture.root(&format!("cat {told}"));
    drop(flood);
    drop(drop_in);
    let started = seen.lines().filter(|line| line.contains("opencode-pty-")).count();
    eprintln!("{started} of {times} servers that connected at once got their session");
    assert_eq!(started, times, "{seen}");
    fixture.root(&format!("systemctl reset-failed {SERVER} || true"));
    fixture.restart_what_ended();
}

#[test]
fn strangers_that_stay_do_not_take_the_servers_places() {
    let fixture = Fixture::new();
    let flood = Flood::new(&fixture, &["silent", "silent"]);
    let mut starts = Starts::default();
    starts.go_on(&fixture, Duration::from_secs(5));
    eprintln!("two strangers with {} connections that they keep: {starts}", flood.connections(&fixture));
    drop(flood);
}

/// The supervisor closes them where that may hang. A start was refused for the number of those that waited for it.
#[test]
fn strangers_that_send_descriptors_do_not_keep_the_servers_directories_from_being_looked_at() {
    let fixture = Fixture::new();
    let flood = Flood::new(&fixture, &["descriptors", "descriptors"]);
    let mut starts = Starts::default();
    starts.go_on(&fixture, Duration::from_secs(if long() { 20 } else { 5 }));
    eprintln!("two strangers that send descriptors on {} connections: {starts}", flood.connections(&fixture));
    drop(flood);
}

#[test]
fn a_table_full_of_descriptors_is_neither_the_end_of_accepting_nor_a_busy_loop() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let _drop_in = DropIn::new(&fixture, SUPERVISOR, "[Service]\nLimitNOFILE=36");
    fixture.restart_supervisor();
    assert_eq!(fixture.ask(&["echo", "before"]), "before");
    let supervisor = fixture.supervisor_pid();

    let flood = Flood::new(&fixture, &["silent"]);
    wait_until("the table to be full", SOON, || {
        let journal = fixture.root(&format!("journalctl --no-pager -o cat _PID={supervisor}"));
        if journal.contains("cannot accept a connection") { Ok(()) } else { Err(journal) }
    });
    let ticks = || -> u64 {
        let times = fixture.root(&format!("cut -d ' ' -f 14,15 /proc/{supervisor}/stat"));
        times.split(' ').map(|time| time.parse::<u64>().unwrap()).sum()
    };
    let (begun, before) = (Instant::now(), ticks());
    std::thread::sleep(Duration::from_secs(1));
    let (elapsed, spent) = (begun.elapsed(), ticks() - before);
    drop(flood);

    // Ticks are hundredths of a second: a loop that spins would have all of them.
    assert!(spent < 20, "{spent} ticks of {elapsed:?} went into waiting for a descriptor");
    wait_until("the strangers' descriptors to be closed", SOON, || {
        let now = fixture.supervisor_descriptors();
        if now < 24 { Ok(()) } else { Err(format!("{now} open")) }
    });
    // Some of theirs may still have been in the listening socket's queue, and the table is small: then that start fails.
    wait_until("a session after the strangers", SOON, || {
        let transcript = fixture.run(&["echo", "after"]);
        if transcript.exit == Some(exited(0)) { Ok(()) } else { Err(format!("{:?}", transcript.error)) }
    });
    assert_eq!(fixture.supervisor_pid(), supervisor, "another supervisor answers");
}
