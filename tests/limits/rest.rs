//! The limits as the kernel has them, accounting, processors, disks and output.

use std::time::Instant;

use crate::fixture::{Fixture, SOON, wait_until};
use crate::pressure::{Others, SLICE, SUPERVISOR, count, number, outcome, set, start, start_sh, stop};

/// What a control group must say, file by file.
fn assert_files(who: &str, found: impl Fn(&str) -> String, wanted: &[(&str, &str)]) {
    let other: Vec<String> = wanted
        .iter()
        .map(|(file, value)| (file, value, found(file)))
        .filter(|(_, value, found)| found.trim() != **value)
        .map(|(file, value, found)| format!("{file} is '{}' instead of '{value}'", found.trim()))
        .collect();
    assert!(other.is_empty(), "{who}: {other:#?}");
}

#[test]
fn the_kernel_holds_every_shipped_limit_and_a_session_reads_its_own() {
    let fixture = Fixture::new();
    let session = [
        ("memory.high", "805306368"),
        ("memory.max", "1073741824"),
        ("memory.oom.group", "1"),
        ("pids.max", "256"),
        ("cpu.max", "400000 100000"),
        ("io.weight", "default 100"),
        ("io.bfq.weight", "default 100"),
    ];
    let files = session.map(|(file, _)| file).join(" ");
    // From inside, where the program that it is about can see it.
    let said = fixture.ask_sh(&format!(
        "cd /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup) && grep -H . {files}; echo max >memory.max || echo closed"
    ));
    assert_files(
        "a session",
        |file| said.lines().find_map(|line| line.strip_prefix(&format!("{file}:"))).unwrap_or("missing").to_owned(),
        &session,
    );
    assert!(said.ends_with("closed"), "a session raised its own limit: {said}");

    let others = Others::new(&fixture);
    let slice = [
        ("memory.high", "1610612736"),
        ("memory.max", "2147483648"),
        ("pids.max", "512"),
        ("cpu.max", "800000 100000"),
        ("io.weight", "default 100"),
        ("io.bfq.weight", "default 100"),
    ];
    assert_files("the slice", |file| fixture.cgroup_file(SLICE, file), &slice);
    let supervisor = [
        ("memory.high", "201326592"),
        ("memory.max", "268435456"),
        ("memory.oom.group", "1"),
        ("pids.max", "64"),
        ("cpu.weight", "1000"),
    ];
    assert_files("the supervisor", |file| fixture.cgroup_file(SUPERVISOR, file), &supervisor);
    outcome(
        "none",
        "all of them",
        "the kernel's files have the shipped numbers; a session reads its own and cannot write them",
    );
    others.end();
}

#[test]
fn accounting_counts_a_sessions_memory_tasks_time_and_disk() {
    let fixture = Fixture::new();
    let scratch = fixture.scratch();
    let write = "dd if=/dev/zero of=$0/file bs=1M count=8 conv=fsync 2>/dev/null; echo ready; read line";
    let mut session = start(&fixture, &["/bin/sh", "-c", write, &scratch]);
    session.line("ready");
    let shown = |property: &str| -> u64 {
        fixture.property(&session.unit, property).parse().unwrap_or_else(|error| panic!("{property}: {error}"))
    };
    let counted = ["MemoryCurrent", "MemoryPeak", "TasksCurrent", "CPUUsageNSec", "IOWriteBytes"].map(shown);
    let [memory, peak, tasks, cpu, written] = counted;
    assert!(memory > 64 << 10 && peak >= memory && peak < u64::MAX, "{counted:?}");
    assert!((2..=256).contains(&tasks), "{counted:?}");
    assert!(cpu > 1_000_000 && cpu < u64::MAX, "{counted:?}");
    assert!((8 << 20..u64::MAX).contains(&written), "{counted:?}");
    outcome(
        "8 MiB written",
        "accounting",
        &format!("{tasks} tasks, {} KiB of memory, {} ms, {written} bytes written", memory >> 10, cpu / 1_000_000),
    );
    stop(&mut session);
}

#[test]
fn sixteen_busy_loops_of_a_session_are_held_to_its_quota_and_to_the_slices() {
    let fixture = Fixture::new();
    let mut others = Others::new(&fixture);
    let script = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do (while :; do :; done) & done; echo begin; wait";
    let mut busy = start_sh(&fixture, script);
    busy.line("begin");
    assert_eq!(fixture.cgroup_file(&busy.unit, "cpu.max"), "400000 100000");
    let during = others.go_on(&fixture);
    outcome("16 busy loops in a session", "CPUQuota=400%, equal weights", &during);

    // This machine has two processors, so four are more than the loops can get: the same with a quarter of one.
    set(&fixture, &busy.unit, "CPUQuota=25%");
    let before = (Instant::now(), count(&fixture, &busy.unit, "cpu.stat", "usage_usec"));
    wait_until("the loops to be held back", SOON, || {
        let throttled = count(&fixture, &busy.unit, "cpu.stat", "nr_throttled");
        if throttled > 20 { Ok(()) } else { Err(throttled.to_string()) }
    });
    let used = count(&fixture, &busy.unit, "cpu.stat", "usage_usec") - before.1;
    let percent = u128::from(used) * 100 / before.0.elapsed().as_micros();
    // The period in which the quota was changed may have been used up before.
    assert!(percent < 60, "{percent} % of a processor");
    let held = others.go_on(&fixture);
    stop(&mut busy);
    outcome("the same", "CPUQuota=25%, lowered as there are two processors", &format!("{percent} % used; {held}"));
    others.end();
}

#[test]
fn a_storm_on_the_disk_leaves_the_others_going() {
    let fixture = Fixture::new();
    let mut others = Others::new(&fixture);
    let scratch = fixture.scratch();
    let storm = "for i in 1 2 3 4; do (while :; do dd if=/dev/zero of=$0/$i bs=256k count=64 conv=fsync 2>/dev/null; done) & done; echo begin; wait";
    let mut session = start(&fixture, &["/bin/sh", "-c", storm, &scratch]);
    session.line("begin");
    let written = || -> u64 {
        fixture
            .cgroup_file(&session.unit, "io.stat")
            .split_whitespace()
            .filter_map(|word| word.strip_prefix("wbytes=")?.parse::<u64>().ok())
            .sum()
    };
    wait_until("the storm", SOON, || if written() > 32 << 20 { Ok(()) } else { Err(written().to_string()) });
    assert_eq!(fixture.cgroup_file(&session.unit, "io.bfq.weight"), "default 100");
    let during = others.go_on(&fixture);
    let time = stop(&mut session);
    fixture.assert_gone(&session.unit);
    outcome("four writers with fsync", "IOWeight=100", &format!("{during}; stopped after {} ms", time.as_millis()));
    others.end();
}

#[test]
fn floods_of_output_leave_memory_flat_and_the_others_going() {
    let fixture = Fixture::new();
    let mut others = Others::new(&fixture);
    let mut unread = start(&fixture, &["yes", "nobody reads this"]);
    let mut read = start(&fixture, &["yes", "somebody reads this"]);
    let mut bytes = 0;
    while bytes < 16 << 20 {
        bytes += read.peer.output_until(b"", SOON).unwrap().len();
    }
    let during = others.go_on(&fixture);
    assert_eq!(count(&fixture, SUPERVISOR, "memory.events", "high"), 0);
    for session in [&unread, &read] {
        assert_eq!(count(&fixture, &session.unit, "memory.events", "high"), 0, "{}", session.unit);
    }
    let peak = number(&fixture, SUPERVISOR, "memory.peak") >> 20;
    let time = stop(&mut unread).max(stop(&mut read));
    outcome(
        "two floods of output, one of them unread",
        "back-pressure",
        &format!("supervisor's peak {peak} MiB; {during}; stopped after {} ms", time.as_millis()),
    );
    others.end();
}
