//! However a session ends, nothing of it is left: no process, no unit, no cgroup. And the record says how.

use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use opencode_pty::frame::message::Exit;
use opencode_pty::frame::{Kind, encode};
use support::peer::{Frame, PeerError, Transcript, start_for};
use support::standin::SHORT_RUNTIME;

use crate::account::WORKSPACE;
use crate::fixture::{Fixture, RUNTIME, SOON, Session, exited, side_by_side, wait_until};
use crate::journal::took_sigkill;
use crate::outside::SUPERVISOR;

/// From a disconnect to the last trace, where TERM and HUP are obeyed or not. SPEC 3: KILL comes after 2 s.
const GONE: Duration = Duration::from_secs(10);

/// Says the pids of a child in a session of its own, of one that was forked twice, and of one that ignores signals.
const CHILDREN: &str = r"
import os, signal, time
def told(name):
    os.write(1, f'{name} {os.getpid()}\n'.encode())
    time.sleep(9999)
if os.fork() == 0:
    os.setsid()
    told('setsid')
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        told('daemon')
    os._exit(0)
if os.fork() == 0:
    os.setsid()
    for number in signal.SIGTERM, signal.SIGHUP, signal.SIGINT:
        signal.signal(number, signal.SIG_IGN)
    told('immune')
";

/// Starts [`CHILDREN`] and then `rest`; gives the session and the children's pids.
fn with_children(fixture: &Fixture, rest: &str) -> (Session, Vec<String>) {
    let mut session = fixture.start(&["python3", "-c", &format!("{CHILDREN}\n{rest}")]);
    let mut text = String::new();
    while text.matches("\r\n").count() < 3 {
        text += &String::from_utf8_lossy(&session.output_until(b"\r\n", SOON).unwrap());
    }
    let pids: Vec<String> =
        text.lines().filter_map(|line| line.split_once(' ')).map(|(_, pid)| pid.to_owned()).collect();
    assert_eq!(pids.len(), 3, "{text}");
    for pid in &pids {
        assert!(fixture.is_alive(pid), "{text}");
    }
    (session, pids)
}

/// Fails unless this is how a stop that was asked for reads, and nothing is left.
fn assert_stopped(fixture: &Fixture, unit: &str, transcript: &Transcript) {
    assert_eq!(transcript.exit, Some(Exit::stopped()), "{:?}", transcript.error);
    assert!(transcript.stopped, "{:?}", transcript.exit);
    fixture.assert_gone(unit);
}

fn assert_dead(fixture: &Fixture, pids: &[String]) {
    for pid in pids {
        assert!(!fixture.is_alive(pid), "process {pid} is left: {}", fixture.root(&format!("cat /proc/{pid}/status")));
    }
}

// ---- a stop ------------------------------------------------------------------------------------------------

#[test]
fn a_stop_of_an_interactive_shell_needs_no_kill() {
    let fixture = Fixture::new();
    let mut session = fixture.start(&["bash", "--norc", "-i"]);
    session.input(b"echo $((40 + 2))\n").unwrap();
    session.output_until(b"42", SOON).unwrap();

    let transcript = session.stop_and_read();

    assert_stopped(&fixture, &session.unit, &transcript);
    assert!(!took_sigkill(&fixture, &session.unit));
}

#[test]
fn a_stop_of_a_command_that_sleeps_needs_no_kill() {
    let fixture = Fixture::new();
    let mut session = fixture.start(&["sleep", "1000"]);
    let transcript = session.stop_and_read();

    assert_stopped(&fixture, &session.unit, &transcript);
    assert!(!took_sigkill(&fixture, &session.unit));
}

#[test]
fn a_stop_works_while_a_flood_comes_and_nobody_reads_it() {
    let fixture = Fixture::new();
    let mut session = fixture.start(&["yes"]);
    let pid = fixture.wait_for_process(&session.unit, "yes");
    // Its terminal is full, and script(1) is in a write that nobody takes.
    wait_until("yes to stand still", SOON, || {
        let ticks = format!("cut -d ' ' -f 14,15 /proc/{pid}/stat");
        let seen = fixture.root(&format!("{ticks}; sleep 0.2; {ticks}"));
        let mut lines = seen.lines();
        if lines.next() == lines.next() { Ok(()) } else { Err(format!("CPU time {seen}")) }
    });

    let transcript = session.stop_and_read();

    assert_stopped(&fixture, &session.unit, &transcript);
    // script(1) may have found the time to say that it ends, in between TERM and HUP.
    let text = transcript.text();
    let (said, of_script) = text.split_once("Session terminated").unwrap_or((&text, ""));
    assert!(said.lines().all(|line| ["y", ""].contains(&line.trim_end())), "it says y");
    assert!(["", ", killing shell..."].contains(&of_script.trim_end().trim_end_matches(" ...killed.")), "{of_script}");
}

#[test]
fn a_stop_works_while_a_flood_comes_and_is_read() {
    let fixture = Fixture::new();
    let mut session = fixture.start(&["yes"]);
    session.output_until(b"y", SOON).unwrap();
    let transcript = session.stop_and_read();
    assert_stopped(&fixture, &session.unit, &transcript);
}

#[test]
fn a_stop_ends_what_ignores_every_signal_it_can() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("trap '' HUP TERM INT QUIT; echo ready; while :; do sleep 0.1; done");
    session.line("ready");
    let transcript = session.stop_and_read();
    assert_stopped(&fixture, &session.unit, &transcript);
}

#[test]
fn a_stop_takes_children_with_it_wherever_they_hide() {
    let fixture = Fixture::new();
    let (mut session, pids) = with_children(&fixture, "time.sleep(9999)");
    let transcript = session.stop_and_read();
    assert_dead(&fixture, &pids);
    assert_stopped(&fixture, &session.unit, &transcript);
}

#[test]
fn a_stopped_process_can_be_stopped() {
    let fixture = Fixture::new();
    let mut session = fixture.start(&["cat"]);
    let pid = fixture.wait_for_process(&session.unit, "cat");
    fixture.root(&format!("kill -STOP {pid}"));
    let transcript = session.stop_and_read();
    assert_stopped(&fixture, &session.unit, &transcript);
}

#[test]
fn last_words_after_a_stop_arrive_before_the_record() {
    let fixture = Fixture::new();
    let mut session =
        fixture.start_sh("trap 'seq 1 5000; echo BYE; exit 0' TERM HUP; echo ready; while :; do sleep 0.01; done");
    session.line("ready");
    let transcript = session.stop_and_read();
    // How much of it there is is script(1)'s affair; what there is comes in order and before the record.
    let text = transcript.text();
    // Its last chunk may end in the middle of a line.
    let whole = text.split_inclusive('\n').filter_map(|line| line.strip_suffix("\r\n"));
    let numbers: Vec<&str> = whole.filter(|line| line.parse::<u32>().is_ok()).collect();
    assert!(numbers.iter().zip(1..).all(|(line, number): (_, u32)| *line == number.to_string()), "{text}");
    assert_stopped(&fixture, &session.unit, &transcript);
}

#[test]
fn a_second_stop_changes_nothing() {
    let fixture = Fixture::new();
    let mut session = fixture.start(&["cat"]);
    session.stop().unwrap();
    session.stop().unwrap();
    session.stop().unwrap();
    let transcript = session.read_to_end();
    assert_stopped(&fixture, &session.unit, &transcript);
}

#[test]
fn a_stop_that_comes_with_the_start_cancels_it() {
    let fixture = Fixture::new();
    let scratch = fixture.scratch();
    for _ in 0..10 {
        let dir = fixture.standin.open(&scratch).unwrap();
        let mut peer = fixture.standin.peer().unwrap();
        let start = encode(Kind::Start, &start_for(&dir, RUNTIME, &["touch", "it-ran"]).unwrap().encode()).unwrap();
        let both = [start, encode(Kind::Stop, b"").unwrap()].concat();
        peer.send_raw(&both, &[dir.as_fd()]).unwrap();
        // A second one, for the test's own bookkeeping; the connection may be closed already.
        let _ = peer.stop();

        let transcript = peer.read_to_end(SOON).unwrap();

        assert!(transcript.stopped, "{transcript:?}");
        assert_eq!(transcript.exit, Some(Exit::stopped()), "{transcript:?}");
        assert_eq!(transcript.unit, None, "{transcript:?}");
        assert_eq!(fixture.root(&format!("ls {scratch}")), "", "the command ran");
    }
}

#[test]
fn a_stop_after_the_session_ended_by_itself_is_answered_and_changes_no_record() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("exit 9");
    loop {
        match session.next_frame(SOON).unwrap() {
            Frame::Exit(exit) => {
                assert_eq!(exit, exited(9));
                break;
            }
            Frame::Output(_) => {}
            other => panic!("{other:?}"),
        }
    }
    session.stop().unwrap();
    assert_eq!(session.next_frame(SOON).unwrap(), Frame::Stopped);
    assert_eq!(session.next_frame(SOON).unwrap(), Frame::Closed);
    fixture.assert_gone(&session.unit);
}

#[test]
fn a_stop_that_crosses_the_end_is_answered_with_one_or_the_other_record() {
    let fixture = Fixture::new();
    let transcripts = side_by_side(64, |index| {
        let mut session = fixture.start_sh("read line; exit 9");
        session.input(b"go\n").unwrap();
        // From at once to after the end.
        let until = Instant::now() + Duration::from_micros(1_500 * index as u64);
        while Instant::now() < until {
            thread::yield_now();
        }
        session.stop_and_read()
    });
    for transcript in transcripts {
        assert!(transcript.stopped, "{transcript:?}");
        let exit = transcript.exit.clone().unwrap();
        assert!(exit == Exit::stopped() || exit == exited(9), "{transcript:?}");
    }
}

// ---- input around the ends ---------------------------------------------------------------------------------------

#[test]
fn input_that_comes_with_the_start_is_held_and_delivered() {
    let fixture = Fixture::new();
    let dir = fixture.standin.open(WORKSPACE).unwrap();
    let line = format!("{}\n", "x".repeat(99));
    let mut peer = fixture.standin.peer().unwrap();
    peer.start_in(&dir, RUNTIME, &["/bin/sh", "-c", "head -n 600 | sha256sum; exit 3"]).unwrap();
    // Nearly as much as is held at most, in many frames.
    for _ in 0..600 {
        peer.input(line.as_bytes()).unwrap();
    }

    let transcript = peer.read_to_end(SOON).unwrap();

    let wanted = fixture.root(&format!("for i in $(seq 600); do echo {}; done | sha256sum", line.trim_end()));
    assert!(transcript.text().ends_with(&format!("{wanted}\r\n")), "{}", transcript.text());
    assert_eq!(transcript.exit, Some(exited(3)));
}

#[test]
fn input_after_the_end_is_dropped() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("exit 3");
    loop {
        match session.next_frame(SOON).unwrap() {
            Frame::Exit(exit) => {
                assert_eq!(exit, exited(3));
                break;
            }
            Frame::Output(_) => {}
            other => panic!("{other:?}"),
        }
    }
    // In the five seconds that a connection stays after its record.
    for _ in 0..100 {
        session.input(b"is anybody there?\n").unwrap();
    }
    session.stop().unwrap();
    assert_eq!(session.next_frame(SOON).unwrap(), Frame::Stopped);
    assert_eq!(session.next_frame(SOON).unwrap(), Frame::Closed);
    assert_eq!(fixture.ask(&["echo", "well"]), "well");
}

#[test]
fn input_that_comes_all_the_time_does_not_harm_the_record() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("stty raw -echo; exit 3");
    let sender = session.sender();
    let typing = thread::spawn(move || {
        for _ in 0..1_000 {
            match sender.input(b"more\n") {
                Ok(()) => {}
                // The supervisor has closed.
                Err(PeerError::System { .. }) => return,
                Err(other) => panic!("{other}"),
            }
        }
    });
    let transcript = session.read_to_end();
    typing.join().unwrap();
    assert_eq!(transcript.exit, Some(exited(3)), "{transcript:?}");
    fixture.assert_gone(&session.unit);
}

// ---- its own end -------------------------------------------------------------------------------------------------

#[test]
fn children_go_with_a_command_that_exits_and_its_code_is_told() {
    let fixture = Fixture::new();
    let (mut session, pids) = with_children(&fixture, "import sys; sys.stdin.readline(); sys.exit(4)");
    session.input(b"\n").unwrap();
    let transcript = session.read_to_end();
    assert_dead(&fixture, &pids);
    fixture.assert_gone(&session.unit);
    // One child had to be killed, and then systemd's word is `timeout` (docs/protocol.md); the code is the command's.
    let exit = transcript.exit.unwrap();
    assert_eq!((exit.code(), exit.status()), (1, 4), "{exit}");
    assert!(["exit-code", "timeout"].contains(&exit.result()), "{exit}");
}

#[test]
fn children_that_obey_do_not_change_how_their_parents_exit_reads() {
    let fixture = Fixture::new();
    let script = "setsid nohup sleep 9999 >/dev/null 2>&1 & (setsid sh -c 'setsid sleep 9998 &') & exit 0";
    for _ in 0..5 {
        let transcript = fixture.sh(script);
        assert_eq!(transcript.exit, Some(exited(0)), "{transcript:?}");
    }
    assert_eq!(fixture.root("pgrep -f 'sleep 999[89]' || true"), "");
}

#[test]
fn an_expired_runtime_is_told_as_a_timeout() {
    let fixture = Fixture::new();
    let mut session = fixture.start_for(SHORT_RUNTIME, &["sleep", "1000"]);
    let transcript = session.read_to_end();
    let exit = transcript.exit.unwrap();
    // It obeys TERM and HUP, which come together: script(1) dies of either.
    assert_eq!((exit.result(), exit.code()), ("timeout", 2), "{exit}");
    assert!([15, 1].contains(&exit.status()), "{exit}");
    fixture.assert_gone(&session.unit);
}

#[test]
fn a_command_that_exits_0_when_its_runtime_expires_has_timed_out_all_the_same() {
    let fixture = Fixture::new();
    let script = "trap 'echo T; exit 0' TERM HUP; echo ready; while :; do sleep 0.05; done";
    let mut session = fixture.start_for(SHORT_RUNTIME, &["/bin/sh", "-c", script]);
    let transcript = session.read_to_end();
    assert_eq!(transcript.exit.as_ref().map(Exit::result), Some("timeout"), "{transcript:?}");
    fixture.assert_gone(&session.unit);
}

#[test]
fn children_do_not_outlive_an_expired_runtime() {
    let fixture = Fixture::new();
    // In it, too: an interpreter's start and five forks.
    let runtime = 2 * SHORT_RUNTIME;
    let mut session = fixture.start_for(runtime, &["python3", "-c", &format!("{CHILDREN}\ntime.sleep(9999)")]);
    let transcript = session.read_to_end();
    // script(1) may have found the time to say that it ends.
    let text = transcript.text();
    let named = |line: &str| {
        ["setsid ", "immune ", "daemon "].iter().find_map(|name| line.strip_prefix(name).map(str::to_owned))
    };
    let pids: Vec<String> = text.lines().filter_map(named).collect();
    assert_eq!(pids.len(), 3, "{transcript:?}");
    assert_dead(&fixture, &pids);
    fixture.assert_gone(&session.unit);
    assert_eq!(transcript.exit.as_ref().map(Exit::result), Some("timeout"), "{transcript:?}");
}

// ---- a client that goes ------------------------------------------------------------------------------------------

#[test]
fn a_disconnect_ends_everything() {
    let fixture = Fixture::new();
    let (session, pids) = with_children(&fixture, "time.sleep(9999)");
    let unit = session.unit.clone();
    drop(session);
    fixture.wait_until_gone(&unit, GONE);
    assert_dead(&fixture, &pids);
}

#[test]
fn a_disconnect_ends_a_flood_that_nobody_read() {
    let fixture = Fixture::new();
    let session = fixture.start(&["yes"]);
    let unit = session.unit.clone();
    drop(session);
    fixture.wait_until_gone(&unit, GONE);
    // script(1) in a write that goes nowhere would have to be killed.
    assert!(!took_sigkill(&fixture, &unit));
}

#[test]
fn a_disconnect_ends_what_people_forget() {
    let fixture = Fixture::new();
    fixture.root("seq 1 100000 >/srv/long && chmod 644 /srv/long");
    fixture.remove_at_end("/srv/long");
    for words in [
        &["tail", "-f", "/srv/long"][..],
        &["more", "/srv/long"],
        &["/bin/sh", "-c", "trap '' HUP TERM; while :; do :; done"],
        &["/bin/sh", "-c", "while :; do date; sleep 0.1; done"],
    ] {
        let mut session = fixture.start(words);
        if words[0] == "more" {
            session.output_until(b"More", SOON).unwrap();
        }
        let unit = session.unit.clone();
        drop(session);
        fixture.wait_until_gone(&unit, GONE);
    }
}

#[test]
fn a_disconnect_ends_a_process_that_is_stopped() {
    let fixture = Fixture::new();
    let session = fixture.start(&["cat"]);
    let pid = fixture.wait_for_process(&session.unit, "cat");
    fixture.root(&format!("kill -STOP {pid}"));
    let unit = session.unit.clone();
    drop(session);
    fixture.wait_until_gone(&unit, GONE);
}

#[test]
fn a_half_close_is_a_disconnect() {
    let fixture = Fixture::new();
    let (mut session, pids) = with_children(&fixture, "time.sleep(9999)");
    session.half_close().unwrap();
    let transcript = session.peer.read_until_closed(GONE).unwrap();
    assert_eq!((transcript.exit, transcript.error, transcript.stopped), (None, None, false));
    fixture.assert_gone(&session.unit);
    assert_dead(&fixture, &pids);
}

#[test]
fn a_disconnect_at_any_moment_of_a_start_leaves_nothing() {
    let fixture = Fixture::new();
    let descriptors = fixture.idle_descriptors();
    side_by_side(300, |index| {
        let dir = fixture.standin.open(WORKSPACE).unwrap();
        let peer = fixture.standin.peer().unwrap();
        peer.start_in(&dir, RUNTIME, &["sleep", "1000"]).unwrap();
        // From at once to well after the start, whatever the machine's speed.
        let until = Instant::now() + Duration::from_micros(400 * (index as u64 * 7 % 300));
        while Instant::now() < until {
            thread::yield_now();
        }
        drop(peer);
    });
    wait_until("every session to be gone", GONE + GONE, || {
        let left = fixture.left_of_sessions();
        if left.is_empty() { Ok(()) } else { Err(left) }
    });
    fixture.wait_for_descriptors(descriptors, "them");
}

// ---- a server that goes ------------------------------------------------------------------------------------------

#[test]
fn the_end_of_the_servers_process_ends_its_sessions() {
    let mut fixture = Fixture::new();
    let (session, pids) = with_children(&fixture, "time.sleep(9999)");
    // The test holds the socket, as a child of the server might.
    fixture.root("systemctl kill --signal=KILL --kill-whom=main opencode-v2.service");
    fixture.wait_until_gone(&session.unit, GONE);
    assert_dead(&fixture, &pids);
    drop(session);
    fixture.restart_what_ended();
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}

#[test]
fn a_child_of_the_server_that_holds_the_socket_does_not_keep_a_session() {
    let mut fixture = Fixture::new();
    let (mut peer, child) = fixture.standin.peer_held_by_child().unwrap();
    let child = child.to_string();
    let dir = fixture.standin.open(WORKSPACE).unwrap();
    peer.start_in(&dir, RUNTIME, &["sleep", "1000"]).unwrap();
    let unit = peer.started(SOON).unwrap();
    assert!(fixture.is_alive(&child));

    fixture.root("systemctl kill --signal=KILL --kill-whom=main opencode-v2.service");

    let gone = fixture.gone_within(&unit, GONE);
    let held = fixture.is_alive(&child);
    // It ignores TERM: left alone, it would hold up the server's restart.
    fixture.root(&format!("kill -KILL {child}"));
    assert_eq!((gone, held), (Ok(()), true), "the session's remains, and whether the child held the socket");
    drop(peer);
    fixture.restart_what_ended();
}

#[test]
fn a_supervisor_that_shuts_down_tells_its_clients_and_leaves_nothing() {
    let mut fixture = Fixture::new();
    let mut sessions: Vec<Session> = (0..4).map(|_| fixture.start(&["sleep", "1000"])).collect();

    // Not by `systemctl stop`, with which the server would go first.
    fixture.root(&format!("kill -TERM {}", fixture.supervisor_pid()));

    for session in &mut sessions {
        let transcript = session.read_to_end();
        let exit = transcript.exit.unwrap();
        // What the manager says: TERM ended it, or the HUP behind it.
        assert_eq!((exit.code(), exit.result()), (2, "success"), "{exit}");
        assert!([15, 1].contains(&exit.status()), "{exit}");
        fixture.assert_gone(&session.unit);
    }
    wait_until("the supervisor to be gone", SOON, || {
        let state = fixture.root("systemctl show --property=ActiveState,Result opencode-pty-supervisor.service");
        if state.contains("ActiveState=inactive") && state.contains("Result=success") { Ok(()) } else { Err(state) }
    });
    assert!(!fixture.host.path("/run/opencode-pty/supervisor.sock").exists());
    drop(sessions);
    fixture.restart_what_ended();
}

#[test]
fn a_stop_of_the_supervisors_unit_leaves_nothing() {
    let mut fixture = Fixture::new();
    let (session, pids) = with_children(&fixture, "time.sleep(9999)");
    let begun = Instant::now();

    fixture.root("systemctl stop opencode-pty-supervisor.service");

    assert!(begun.elapsed() < Duration::from_secs(15), "it took {:?}", begun.elapsed());
    fixture.assert_gone(&session.unit);
    assert_dead(&fixture, &pids);
    assert_eq!(fixture.property(SUPERVISOR, "Result"), "success");
    drop(session);
    fixture.restart_what_ended();
}

#[test]
fn a_killed_supervisor_takes_its_sessions_with_it_and_comes_back() {
    let mut fixture = Fixture::new();
    let (mut session, pids) = with_children(&fixture, "time.sleep(9999)");
    let before = fixture.supervisor_pid();

    fixture.root(&format!("kill -KILL {before}"));

    fixture.wait_until_gone(&session.unit, GONE);
    assert_dead(&fixture, &pids);
    let transcript = session.peer.read_until_closed(SOON).unwrap();
    assert!(transcript.exit.is_none() && transcript.error.is_none(), "{transcript:?}");
    wait_until("the supervisor to be back", SOON, || {
        let state = fixture
            .root("systemctl show --property=MainPID,ActiveState opencode-pty-supervisor.service | tr '\\n' ' '");
        if state.contains("ActiveState=active") && !state.contains(&format!("={before} ")) {
            Ok(())
        } else {
            Err(state)
        }
    });
    // The server goes with it, and comes back by Requires= and Restart=.
    fixture.restart_what_ended();
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}
