//! What the tests share: the numbers a control group has, and the sessions beside the one that misbehaves.

use std::time::{Duration, Instant};

use opencode_pty::frame::message::Exit;
use support::host::WORKSPACE;
use support::standin::{LATE_STARTS_MAX, Tried};

pub use support::host::SUPERVISOR;

use crate::fixture::{Fixture, SOON, Session, wait_until};

/// The sessions' slice.
pub const SLICE: &str = "opencode-pty.slice";

/// The number behind a word in a file of a unit's control group.
pub fn count(fixture: &Fixture, unit: &str, file: &str, word: &str) -> u64 {
    let text = fixture.cgroup_file(unit, file);
    let found = text.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(' ')?.trim().parse().ok());
    found.unwrap_or_else(|| panic!("{unit} has no {word} in {file}: {text}"))
}

/// The number that is such a file.
pub fn number(fixture: &Fixture, unit: &str, file: &str) -> u64 {
    fixture.cgroup_file(unit, file).parse().unwrap()
}

/// Waits until a counter has moved.
pub fn wait_for_count(fixture: &Fixture, unit: &str, file: &str, word: &str, at_least: u64) {
    wait_until(&format!("{word} of {unit} in {file}"), SOON, || {
        let found = count(fixture, unit, file, word);
        if found >= at_least { Ok(()) } else { Err(found.to_string()) }
    });
}

/// Changes a unit's limit until it ends, for a test that the shipped one would take too long.
pub fn set(fixture: &Fixture, unit: &str, property: &str) {
    fixture.root(&format!("systemctl set-property --runtime {unit} {property}"));
}

/// Takes what [`set`] did to the slice back, also if the test fails.
pub struct SliceAsShipped<'a>(pub &'a Fixture);

impl Drop for SliceAsShipped<'_> {
    fn drop(&mut self) {
        let _ = self.0.host.sh(&format!("systemctl revert {SLICE}; systemctl daemon-reload"));
    }
}

/// How long a session of these tests may run. Chosen: they are many times slower here than elsewhere.
const RUNTIME: u32 = 3_600;

/// A session in the workspace that has said `started`. A start that was too slow is tried again, and said: one was seen, on a
/// machine outside that had ten times the work it can do.
pub fn start(fixture: &Fixture, words: &[&str]) -> Session {
    for _ in 0..LATE_STARTS_MAX {
        match fixture.standin.try_start(WORKSPACE, RUNTIME, words).unwrap() {
            Tried::Started(peer, unit) => return Session { peer, unit },
            Tried::Late(answer) => outcome("a start", "5 s, 10 s", &format!("{answer}: not in time on this machine")),
            other @ Tried::Busy => panic!("instead of started came {other:?}"),
        }
    }
    panic!("{LATE_STARTS_MAX} starts failed");
}

/// The same with a shell's script.
pub fn start_sh(fixture: &Fixture, script: &str) -> Session {
    start(fixture, &["/bin/sh", "-c", script])
}

/// A session that was there before, and the supervisor as it was.
pub struct Others {
    neighbour: Session,
    supervisor: String,
    asked: u32,
}

impl Others {
    pub fn new(fixture: &Fixture) -> Self {
        let neighbour = start_sh(fixture, "stty -echo; echo here; exec cat");
        let mut others = Self { neighbour, supervisor: fixture.supervisor_pid(), asked: 0 };
        others.neighbour.line("here");
        others
    }

    /// Fails unless the session beside answers and a new one starts, runs and ends; how long each took.
    pub fn go_on(&mut self, fixture: &Fixture) -> String {
        let answer = self.answers(fixture);
        let started = Instant::now();
        let mut session = start(fixture, &["echo", "hi"]);
        let transcript = session.read_to_end();
        fixture.assert_gone(&session.unit);
        assert_eq!((transcript.text().as_str(), transcript.exit.unwrap().status()), ("hi\r\n", 0));
        format!("{answer}; a new session ran in {} ms", started.elapsed().as_millis())
    }

    /// The same without a new session, where there is no place for one.
    pub fn answers(&mut self, fixture: &Fixture) -> String {
        self.asked += 1;
        let started = Instant::now();
        let question = format!("question-{}", self.asked);
        self.neighbour.peer.input(format!("{question}\n").as_bytes()).unwrap();
        self.neighbour.line(&question);
        assert_eq!(fixture.supervisor_pid(), self.supervisor, "the supervisor is another process");
        format!("the session beside answered in {} ms", started.elapsed().as_millis())
    }

    pub fn end(mut self) {
        let transcript = self.neighbour.stop_and_read();
        assert_eq!(transcript.exit, Some(Exit::stopped()));
    }
}

/// A line of the table in `docs/limits.md`.
pub fn outcome(pressure: &str, limit: &str, outcome: &str) {
    println!("| {pressure} | {limit} | {outcome} |");
}

/// Stops a session; how long that took.
pub fn stop(session: &mut Session) -> Duration {
    let started = Instant::now();
    let transcript = session.stop_and_read();
    assert_eq!((transcript.exit, transcript.stopped), (Some(Exit::stopped()), true));
    started.elapsed()
}
