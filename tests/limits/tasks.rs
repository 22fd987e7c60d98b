//! Processes: a fork bomb, two sessions with all they may have, and sixteen sessions at once.

use opencode_pty::frame::message::ErrorCode;

use crate::fixture::{Fixture, PLACES, SOON, wait_until};
use crate::pressure::{Others, SLICE, SUPERVISOR, count, number, outcome, start, start_sh, stop, wait_for_count};

/// Children until no more are to be had; says so, and keeps them.
const MANY: &str = "\
import os, time
try:
    while True:
        if os.fork() == 0: time.sleep(600)
except OSError as error:
    print('no more', flush=True)
time.sleep(600)";

#[test]
fn a_fork_bomb_ends_at_tasks_max_and_with_its_session() {
    let fixture = Fixture::new();
    let mut others = Others::new(&fixture);
    let mut bomb = start(&fixture, &["/bin/bash", "-c", "bomb() { bomb | bomb & }; bomb; wait; exec sleep 600"]);
    wait_for_count(&fixture, &bomb.unit, "pids.events", "max", 1);
    let peak = number(&fixture, &bomb.unit, "pids.peak");
    assert!(peak <= 256, "{peak}");
    let during = others.go_on(&fixture);
    let time = stop(&mut bomb);
    fixture.assert_gone(&bomb.unit);
    outcome(
        "a fork bomb",
        "TasksMax=256",
        &format!("{peak} tasks at most, fork fails; {during}; stopped with all of them after {} ms", time.as_millis()),
    );
    others.end();
}

#[test]
fn sessions_with_all_tasks_of_the_slice_leave_the_running_ones_alone_and_starts_fail_cleanly() {
    let fixture = Fixture::new();
    let mut others = Others::new(&fixture);
    let mut full = [0, 1].map(|_| start(&fixture, &["/usr/bin/python3", "-c", MANY]));
    for session in &mut full {
        session.line("no more");
    }
    let tasks = number(&fixture, SLICE, "pids.current");
    assert_eq!((number(&fixture, SLICE, "pids.max"), tasks), (512, 512));
    assert!(number(&fixture, &full[0].unit, "pids.current") <= 256);
    let during = others.answers(&fixture);

    let transcript = fixture.answer(&["echo", "hi"]);
    assert_eq!((transcript.error_code(), transcript.unit), (Some(ErrorCode::StartFailed), None));
    stop(&mut full[0]);
    let after = others.go_on(&fixture);
    stop(&mut full[1]);
    outcome(
        "two sessions with all the processes they can get",
        "slice TasksMax=512",
        &format!("{during}; a new session is `start-failed`; when one of the two has been stopped, {after}"),
    );
    others.end();
}

#[test]
fn sixteen_sessions_with_busy_loops_leave_the_supervisor_within_its_own_limits() {
    let fixture = Fixture::new();
    let mut others = Others::new(&fixture);
    let loops = "stty -echo; echo ready; read go; while :; do :; done";
    // One after the other, and busy only when all are there: this machine is slow, and a start has ten seconds.
    let mut busy: Vec<_> = (1..PLACES).map(|_| start_sh(&fixture, loops)).collect();
    for session in &mut busy {
        session.line("ready");
        session.peer.input(b"go\n").unwrap();
    }
    for session in &busy {
        wait_until("the loop to run", SOON, || {
            let usec = count(&fixture, &session.unit, "cpu.stat", "user_usec");
            if usec > 0 { Ok(()) } else { Err("no time used".to_owned()) }
        });
    }
    let during = others.answers(&fixture);
    let seventeenth = fixture.answer(&["echo", "hi"]);
    assert_eq!(seventeenth.error_code(), Some(ErrorCode::Busy));

    let (memory, tasks) = (number(&fixture, SUPERVISOR, "memory.peak"), number(&fixture, SUPERVISOR, "pids.peak"));
    assert_eq!(number(&fixture, SUPERVISOR, "memory.max"), 256 << 20);
    assert_eq!(number(&fixture, SUPERVISOR, "pids.max"), 64);
    for (file, word) in
        [("memory.events", "high"), ("memory.events", "max"), ("memory.events", "oom"), ("pids.events", "max")]
    {
        assert_eq!(count(&fixture, SUPERVISOR, file, word), 0, "{file} {word}");
    }
    assert!(tasks < 64);
    for session in &mut busy {
        stop(session);
    }
    outcome(
        "16 sessions, 15 of them busy loops",
        "the supervisor's MemoryMax=256M, TasksMax=64",
        &format!("{during}; the 17th is `busy`; supervisor's peak {} MiB, {tasks} tasks", memory >> 20),
    );
    others.end();
}
