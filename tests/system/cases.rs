//! What people of this trade have stumbled over (CASES.md), as far as no other test is named after it.
//!
//! Elsewhere are: C01–C05, C09, C13, C18, C29, C30, C35 in `output`; C07, C08, C11, C12, C14, C34, C46, C48 in
//! `session`; C16, C17, C23, C28, C32, C39 in `ending`; C44 in `directory`; C50 in `admission`; C22 in `threats`; C36
//! and C38 in `bytes`.

use std::time::{Duration, Instant};

use opencode_pty::frame::message::{ErrorCode, Exit};
use support::peer::Frame;
use support::random::Random;

use crate::account::HOME;
use crate::fixture::{Fixture, PLACES, SOON, Session, at_a_time, exited, side_by_side, wait_until};
use crate::flood::long;
use crate::outside::SUPERVISOR;

// ---- many, short -------------------------------------------------------------------------------------------------

#[test]
fn of_many_short_sessions_with_every_exit_code_none_loses_a_byte_or_gets_anothers_record() {
    let fixture = Fixture::new();
    let count = if long() { 10_000 } else { 256 };
    let begun = Instant::now();
    let mut wrong = side_by_side(count, |number| {
        let code = u32::try_from(number % 256).unwrap();
        let word = format!("{number:x}.").repeat(1 + number % 400);
        let transcript = fixture.run_one_of_many(&[
            "/bin/sh",
            "-c",
            "printf '%s\\n' \"$1\"; exit $2",
            "sh",
            &word,
            &code.to_string(),
        ]);
        let right = transcript.text() == format!("{word}\r\n") && transcript.exit == Some(exited(code));
        (!right).then(|| format!("number {number}: {transcript:?}"))
    });
    eprintln!("{count} short sessions in {:?}", begun.elapsed());
    wrong.retain(Option::is_some);
    assert!(wrong.is_empty(), "{} are wrong: {:?}", wrong.len(), wrong[0]);
}

/// Fewer than there are places: one that was left keeps its own a little longer.
const AT_A_TIME: usize = 8;

/// Terminals in use on this host (the kernel's own count is of all on this machine), and what the supervisor has open.
fn in_use(fixture: &Fixture) -> (String, usize) {
    (fixture.root("ls /dev/pts | grep -c '^[0-9]' || true"), fixture.supervisor_descriptors())
}

#[test]
fn c40_every_descriptor_and_terminal_comes_back_whichever_way_a_session_ends() {
    let fixture = Fixture::new();
    let mixed = |number: usize| {
        let mut random = Random::new(number as u64);
        match random.below(5) {
            0 => assert_eq!(fixture.run_one_of_many(&["true"]).exit, Some(exited(0))),
            1 => {
                let nowhere = fixture.standin.start(HOME, 60, &["/nowhere"]).unwrap().read_to_end(SOON).unwrap();
                assert_eq!(nowhere.exit, Some(exited(127)));
            }
            2 => {
                let mut session = fixture.start_sh("kill -KILL $$");
                assert_eq!(session.read_to_end().exit, Some(exited(137)));
            }
            3 => {
                let mut session = fixture.start(&["sleep", "1000"]);
                assert_eq!(session.stop_and_read().exit, Some(Exit::stopped()));
            }
            _ => {
                let session = fixture.start(&["yes"]);
                let unit = session.unit.clone();
                drop(session);
                fixture.wait_until_gone(&unit, SOON);
            }
        }
    };
    // What is opened once and kept is open after this.
    at_a_time(AT_A_TIME, 32, mixed);
    wait_until("the first of them to be gone", SOON, || {
        let left = fixture.left_of_sessions();
        if left.is_empty() { Ok(()) } else { Err(left) }
    });
    let descriptors = fixture.idle_descriptors();
    let before = (in_use(&fixture).0, descriptors);

    at_a_time(AT_A_TIME, if long() { 3_000 } else { 120 }, mixed);

    wait_until("terminals and descriptors as before", SOON, || {
        let now = in_use(&fixture);
        if now == before { Ok(()) } else { Err(format!("{now:?} instead of {before:?}")) }
    });
}

// ---- names -------------------------------------------------------------------------------------------------------

#[test]
fn c25_sessions_that_failed_block_no_later_one_and_stay_in_no_list() {
    let mut fixture = Fixture::new();
    for round in 0..2 {
        for transcript in side_by_side(40, |_| fixture.run_one_of_many(&["/bin/sh", "-c", "exit 1"])) {
            assert_eq!(transcript.exit, Some(exited(1)), "round {round}: {transcript:?}");
        }
        wait_until("no session to be left", SOON, || {
            let left = fixture.left_of_sessions();
            if left.is_empty() { Ok(()) } else { Err(left) }
        });
        assert_eq!(fixture.root("systemctl list-units --failed --plain --no-legend 'opencode-pty-*'"), "");
        if round == 0 {
            fixture.restart_supervisor();
        }
    }
    let journal = fixture.root(&format!("journalctl --no-pager -o cat -u {SUPERVISOR}"));
    for complaint in ["already loaded", "fragment file", "UnitExists"] {
        assert!(!journal.contains(complaint), "{journal}");
    }
}

// ---- programs that go wild -----------------------------------------------------------------------------------------

/// Stops all of them and fails unless they are gone in this time.
fn stop_all(fixture: &Fixture, sessions: &mut [Session], time: Duration) {
    let begun = Instant::now();
    for session in sessions.iter() {
        session.stop().unwrap();
    }
    for session in sessions.iter_mut() {
        let transcript = session.read_to_end();
        assert_eq!((transcript.exit, transcript.stopped), (Some(Exit::stopped()), true));
        fixture.assert_gone(&session.unit);
    }
    assert!(begun.elapsed() < time, "it took {:?}", begun.elapsed());
}

#[test]
fn c27_sixteen_busy_loops_keep_neither_an_answer_nor_a_stop_waiting() {
    let fixture = Fixture::new();
    let mut sessions: Vec<Session> = (0..PLACES).map(|_| fixture.start_sh("while :; do :; done")).collect();
    let begun = Instant::now();
    let refused = fixture.answer(&["true"]);
    assert_eq!(refused.error_code(), Some(ErrorCode::Busy), "{refused:?}");
    assert!(begun.elapsed() < SOON, "the answer took {:?}", begun.elapsed());
    stop_all(&fixture, &mut sessions, SOON);
}

#[test]
fn c27_a_fork_bomb_stays_below_its_cap_and_a_stop_empties_it() {
    let fixture = Fixture::new();
    let controllers = fixture.root("cat /sys/fs/cgroup/cgroup.controllers");
    if !controllers.split(' ').any(|controller| controller == "pids") {
        eprintln!("this host counts no tasks: {controllers}");
        return;
    }
    let mut sessions = [fixture.start_sh("trap '' TERM HUP; f() { f | f & }; f; while :; do sleep 1; done")];
    let unit = sessions[0].unit.clone();
    wait_until("the cap to be reached", SOON, || {
        let events = fixture.cgroup_file(&unit, "pids.events");
        if events.contains("max 0") { Err(events) } else { Ok(()) }
    });
    assert_eq!(fixture.ask(&["echo", "well"]), "well");
    let now: u32 = fixture.cgroup_file(&unit, "pids.current").parse().unwrap();
    assert!(now <= 256, "{now} tasks");
    stop_all(&fixture, &mut sessions, SOON);
}

#[test]
fn c26_a_session_that_takes_too_much_memory_is_told_so_and_harms_nobody() {
    let fixture = Fixture::new();
    let controllers = fixture.root("cat /sys/fs/cgroup/cgroup.controllers");
    if !controllers.split(' ').any(|controller| controller == "memory") {
        eprintln!("this host limits no memory: {controllers}");
        return;
    }
    let beside = fixture.start(&["sleep", "1000"]);
    let greedy = "a = []\nwhile True: a.append(bytearray(1 << 20))";
    for words in
        [&["python3", "-c", greedy][..], &["/bin/sh", "-c", &format!("python3 -c '{greedy}'; echo rc=$?; sleep 1000")]]
    {
        let transcript = fixture.run(words);
        assert_eq!(transcript.exit.as_ref().map(Exit::result), Some("oom-kill"), "{transcript:?}");
    }
    assert_eq!(fixture.root(&format!("systemctl is-active {}", beside.unit)), "active");
}

#[test]
fn c16_the_journal_tells_when_a_session_had_to_be_killed() {
    let fixture = Fixture::new();
    let told = |script: &str| {
        let mut session = fixture.start_sh(&format!("{script}; echo ready; while :; do sleep 0.1; done"));
        session.line("ready");
        let unit = session.unit.clone();
        drop(session);
        wait_until("the journal to tell of the end", SOON, || {
            let journal = fixture.root(&format!("journalctl --no-pager -o cat -u {SUPERVISOR}"));
            let line = journal.lines().find(|line| line.contains(&unit) && line.contains("ended by"));
            line.map(str::to_owned).ok_or(journal)
        })
    };
    let killed = told("trap '' TERM HUP");
    assert!(killed.contains("SIGKILL"), "{killed}");
    let obeyed = told("true");
    assert!(!obeyed.contains("SIGKILL"), "{obeyed}");
}

// ---- frames of another time ----------------------------------------------------------------------------------------

/// A frame as a later version of the protocol may have it to resize a terminal.
fn resize(columns: u16, rows: u16) -> Vec<u8> {
    let mut bytes = b"OPTY\x01\x09\0\0\0\0\0\x04".to_vec();
    bytes.extend(columns.to_be_bytes());
    bytes.extend(rows.to_be_bytes());
    bytes
}

#[test]
fn c33_a_resize_is_a_frame_of_an_unknown_type_before_and_after_the_end() {
    let fixture = Fixture::new();
    for (columns, rows) in [(0, 0), (1, 1), (65_535, 65_535), (132, 43)] {
        let mut session = fixture.start(&["sleep", "1000"]);
        for _ in 0..100 {
            if session.send_raw(&resize(columns, rows), &[]).is_err() {
                break;
            }
        }
        let transcript = session.peer.read_until_closed(SOON).unwrap();
        assert_eq!(transcript.error_code(), Some(ErrorCode::BadFrame), "{transcript:?}");
        fixture.assert_gone(&session.unit);

        let mut session = fixture.start_sh("exit 9");
        loop {
            match session.next_frame(SOON).unwrap() {
                Frame::Exit(exit) => break assert_eq!(exit, exited(9)),
                Frame::Output(_) => {}
                other => panic!("{other:?}"),
            }
        }
        for _ in 0..100 {
            if session.send_raw(&resize(columns, rows), &[]).is_err() {
                break;
            }
        }
        assert_eq!(session.next_frame(SOON).unwrap(), Frame::Closed, "the record was the last word");
    }
    assert_eq!(fixture.ask(&["echo", "well"]), "well");
}

// ---- keys of another terminal --------------------------------------------------------------------------------------

#[test]
fn c51_a_session_types_into_no_terminal_but_its_own() {
    let fixture = Fixture::new();
    let program = r"
$| = 1;
print 'own ', readlink('/proc/self/fd/0'), qq(\n);
open(my $terminal, '+<', '/dev/tty') or die $!;
for my $handle (*STDIN, *STDOUT, *STDERR, $terminal) {
    if (ioctl($handle, 0x5412, my $key = 'x')) { # TIOCSTI
        sysread($handle, my $typed, 1);
        print 'typed ', $typed, qq(\n);
    } else {
        print 'refused ', $!, qq(\n);
    }
}
sysread(STDIN, my $key, 1);
";
    let mut session = fixture.start(&["/bin/sh", "-c", "stty raw -echo; exec perl -e \"$1\"", "sh", program]);
    let mut said = String::new();
    while said.matches("typed x\n").count() + said.matches("refused ").count() < 4 {
        said += &String::from_utf8_lossy(&session.output_until(b"\n", SOON).unwrap());
    }
    // No process of it has another terminal: script(1) has none at all, the rest the session's.
    let own = said.split_whitespace().nth(1).unwrap();
    let pids = fixture.pids(&session.unit);
    assert!(pids.len() >= 2, "script(1) and perl: {pids:?}");
    let terminals = fixture.host.run_ok("ps", &["-o", "tty=", "-p", &pids.join(",")]).unwrap();
    let known = ["?", own.trim_start_matches("/dev/")];
    assert!(terminals.lines().all(|terminal| known.contains(&terminal.trim())), "{terminals}, own {own}");
    session.stop_and_read();
}
