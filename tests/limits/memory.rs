//! Memory: one program, many children, all sessions together, and input that nobody reads.

use std::thread;
use std::time::Instant;

use opencode_pty::frame::message::Exit;

use crate::fixture::{Fixture, SOON, Session, wait_until};
use crate::pressure::{
    Others, SLICE, SUPERVISOR, SliceAsShipped, count, number, outcome, set, start, start_sh, stop, wait_for_count,
};

/// Takes memory without end, in steps of 8 MiB that it really writes to.
const HOG: &str = "import time\nprint('begin', flush=True)\nheld = []\nwhile True: held.append(b'x' * (8 << 20))";

/// Takes what its argument says in MiB, and keeps it.
const HOLDER: &str =
    "import sys, time\nheld = b'x' * (int(sys.argv[1]) << 20)\nprint('held', flush=True)\ntime.sleep(600)";

/// 64 children that take 24 MiB each: half as much again as a session may have. They begin when all are there: who forks is
/// slowed down as well.
const HOGS: &str = "\
import os, time
print('begin', flush=True)
wait, go = os.pipe()
for _ in range(64):
    if os.fork() == 0:
        os.close(go)
        os.read(wait, 1)
        held = b'x' * (24 << 20)
        time.sleep(600)
os.close(go)
time.sleep(600)";

const PYTHON: &str = "/usr/bin/python3";

/// What the kernel's killer leaves: every process of the session killed at once, the first one too.
fn out_of_memory() -> Exit {
    Exit::new(2, 9, "oom-kill").unwrap()
}

fn wait_for_oom_kill_in_the_journal(fixture: &Fixture, unit: &str) {
    wait_until("the journal to say oom-kill", SOON, || {
        let lines = fixture.root(&format!("journalctl --boot --output=cat --unit={SUPERVISOR} --grep={unit} || true"));
        if lines.lines().any(|line| line.contains("oom-kill")) { Ok(()) } else { Err(lines) }
    });
}

#[test]
fn a_program_that_takes_memory_without_end_is_slowed_at_memory_high_and_killed_at_memory_max() {
    let fixture = Fixture::new();
    let mut others = Others::new(&fixture);
    let mut hog = start(&fixture, &[PYTHON, "-c", HOG]);
    hog.line("begin");

    // The shipped MemoryHigh: the kernel makes it wait at each further page.
    wait_for_count(&fixture, &hog.unit, "memory.events", "high", 10);
    let slowed = others.go_on(&fixture);
    assert!(number(&fixture, &hog.unit, "memory.current") > 700 << 20);
    outcome("a program that takes memory without end", "MemoryHigh=768M", &format!("it is slowed down; {slowed}"));

    // From here to MemoryMax it would take this slowness twenty minutes, so MemoryHigh goes.
    set(&fixture, &hog.unit, "MemoryHigh=infinity");
    let transcript = hog.read_to_end();
    assert_eq!(transcript.exit, Some(out_of_memory()));
    fixture.assert_gone(&hog.unit);
    wait_for_oom_kill_in_the_journal(&fixture, &hog.unit);
    let after = others.go_on(&fixture);
    outcome("the same, where MemoryHigh was lifted", "MemoryMax=1G", &format!("{}; {after}", out_of_memory()));
    others.end();
}

#[test]
fn a_program_slowed_at_memory_high_is_stopped_in_time() {
    let fixture = Fixture::new();
    let mut hog = start(&fixture, &[PYTHON, "-c", HOG]);
    hog.line("begin");
    wait_for_count(&fixture, &hog.unit, "memory.events", "high", 10);
    let time = stop(&mut hog);
    fixture.assert_gone(&hog.unit);
    outcome("a stop of it", "MemoryHigh=768M", &format!("stopped after {} ms", time.as_millis()));
}

#[test]
fn children_that_take_too_much_together_end_the_whole_session_as_oom_kill() {
    let fixture = Fixture::new();
    let mut others = Others::new(&fixture);
    let mut hogs = start(&fixture, &[PYTHON, "-c", HOGS]);
    hogs.line("begin");
    let started = Instant::now();
    // All limits as shipped: many that are slowed are not slow together.
    let transcript = hogs.read_to_end();
    let time = started.elapsed();
    assert_eq!(transcript.exit, Some(out_of_memory()));
    fixture.assert_gone(&hogs.unit);
    wait_for_oom_kill_in_the_journal(&fixture, &hogs.unit);
    let after = others.go_on(&fixture);
    outcome(
        "64 children with 24 MiB each",
        "MemoryHigh=768M, MemoryMax=1G",
        &format!("{} after {} s, every process of the session at once; {after}", out_of_memory(), time.as_secs()),
    );
    others.end();
}

#[test]
fn one_session_ends_when_all_together_take_more_than_the_slice_may() {
    let fixture = Fixture::new();
    let mut others = Others::new(&fixture);
    let _as_shipped = SliceAsShipped(&fixture);
    let hold = |mib: &str| start(&fixture, &[PYTHON, "-c", HOLDER, mib]);
    let (mut first, mut second) = (hold("720"), hold("700"));
    first.line("held");
    second.line("held");

    // 1,420 MiB are held; this one takes them to 1,920, over the slice's MemoryHigh of 1,536 and below its MemoryMax of 2,048.
    // The tests before this one have made the slice's sessions wait, and it counts for them, too.
    let waits = count(&fixture, SLICE, "memory.events", "high");
    let mut third = hold("500");
    wait_for_count(&fixture, SLICE, "memory.events", "high", waits + 1);
    let slowed = others.go_on(&fixture);
    outcome(
        "three sessions that want 1,920 MiB together",
        "slice MemoryHigh=1536M",
        &format!("the third is slowed down; {slowed}"),
    );

    // The way from there to 2 GiB would take it too long.
    set(&fixture, SLICE, "MemoryHigh=infinity");
    third.line("held");
    let kills_before = oom_kills(&fixture);
    let fourth = hold("600");
    let killed = wait_until("the kernel to kill one of them", SOON, || {
        // Until then the fourth may not have come to its program yet.
        if oom_kills(&fixture) == kills_before {
            return Err("no kill".to_owned());
        }
        let dead: Vec<usize> = [&first, &second, &third, &fourth]
            .iter()
            .enumerate()
            .filter(|(_, session)| !fixture.processes(&session.unit).contains("held = b"))
            .map(|(index, _)| index)
            .collect();
        dead.first().copied().ok_or_else(|| "all of them".to_owned())
    });
    let after = others.go_on(&fixture);
    let mut sessions: Vec<Session> = vec![first, second, third, fourth];
    let mut dead = sessions.remove(killed);
    assert_eq!(dead.read_to_end().exit, Some(out_of_memory()));
    for mut session in sessions {
        stop(&mut session);
    }
    outcome(
        "a fourth that wants 600 MiB",
        "slice MemoryMax=2G",
        &format!("{} of one of them, the others go on; {after}", out_of_memory()),
    );
    others.end();
}

fn oom_kills(fixture: &Fixture) -> u64 {
    count(fixture, SLICE, "memory.events", "oom")
}

#[test]
fn input_that_nobody_reads_ends_as_oom_kill_and_costs_the_supervisor_nothing() {
    let fixture = Fixture::new();
    let mut others = Others::new(&fixture);
    let mut session = start_sh(&fixture, "stty -icanon -echo; echo begin; exec sleep 600");
    session.line("begin");
    assert_eq!(number(&fixture, &session.unit, "memory.max"), 1 << 30);
    // script(1) keeps all of it. A gigabyte takes minutes here; OPENCODE_PTY_LONG=1 sends it nevertheless.
    let long = std::env::var_os("OPENCODE_PTY_LONG").is_some();
    set(&fixture, &session.unit, if long { "MemoryHigh=infinity" } else { "MemoryHigh=infinity MemoryMax=96M" });

    let sender = session.peer.sender();
    let typist = thread::spawn(move || {
        let part = vec![b'x'; 1 << 20];
        // Until the connection is closed: behind the end the supervisor reads on for a while, and drops it.
        let mut sent = 0_u32;
        while sent < 4_096 && sender.input(&part).is_ok() {
            sent += 1;
        }
        sent
    });
    let during = others.go_on(&fixture);
    let transcript = session.read_to_end();
    let sent = typist.join().unwrap();
    assert_eq!(transcript.exit, Some(out_of_memory()));
    fixture.assert_gone(&session.unit);
    let peak = number(&fixture, SUPERVISOR, "memory.peak") >> 20;
    assert_eq!(count(&fixture, SUPERVISOR, "memory.events", "high"), 0, "the supervisor came to its MemoryHigh");
    outcome(
        "input without end to a program that never reads",
        if long { "MemoryMax=1G" } else { "MemoryMax=96M, lowered for speed" },
        &format!("{} after {sent} MiB; supervisor's peak {peak} MiB; {during}", out_of_memory()),
    );
    others.end();
}
