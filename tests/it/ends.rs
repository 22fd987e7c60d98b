//! Bytes both ways, and how a session ends: by itself, by a stop, by a disconnect, by somebody else.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex, mpsc};

use opencode_pty::frame::message::{ErrorCode, Exit};
use opencode_pty::frame::{Kind, encode};
use opencode_pty::limits::CGROUP_ROOT;
use support::fake_manager::{Launcher, Stopping};
use support::peer::{Frame, PeerError};

use crate::scene::{LONG, SOON, Scene, WHILE};

#[test]
fn every_byte_of_the_output_comes_before_the_exit_record() {
    let scene = Scene::set();
    let text: Vec<u8> = (0..1_000_000_u32).flat_map(|number| format!("{number}\n").into_bytes()).collect();
    scene.fake.with(|state| state.script.launcher = Launcher::shows(text.clone(), (1, 0, "success")));
    let transcript = scene.asked().read_to_end(LONG).unwrap();
    assert_eq!(transcript.output.len(), text.len());
    assert!(transcript.output == text, "the bytes differ");
    assert_eq!(transcript.exit, Some(Exit::new(1, 0, "success").unwrap()));
}

#[test]
fn every_way_a_main_process_can_end_reaches_the_client() {
    let scene = Scene::set();
    for (code, status, result) in [
        (1, 0, "success"),
        (1, 255, "exit-code"),
        (1, 71, "exit-code"),
        (2, 9, "signal"),
        (2, 15, "success"),
        (2, 9, "oom-kill"),
        (2, 15, "timeout"),
        (2, 9, "timeout"),
        (1, 0, "timeout"),
        (3, 11, "core-dump"),
        (2, 6, "watchdog"),
        (1, 1, "some-new-word"),
    ] {
        scene.fake.with(|state| state.script.launcher = Launcher::shows("x", (code, status, result)));
        let transcript = scene.asked().read_to_end(LONG).unwrap();
        let wanted = Exit::new(u8::try_from(code).unwrap(), u32::try_from(status).unwrap(), result).unwrap();
        assert_eq!(transcript.exit, Some(wanted));
        assert_eq!(transcript.output, b"x");
    }
}

#[test]
fn a_connection_is_closed_by_the_supervisor_even_if_its_client_does_not() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.launcher = Launcher::shows("x", (1, 0, "success")));
    let mut peer = scene.asked();
    let transcript = peer.read_until_closed(LONG).unwrap();
    assert!(transcript.exit.is_some());
    scene.assert_idle("a session whose client never closed");
}

#[test]
fn output_that_a_slow_client_has_not_read_when_the_unit_ends_is_not_lost() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.launcher = Launcher::shows(vec![b'x'; 300_000], (1, 0, "success")));
    let mut peer = scene.asked();
    peer.started(LONG).unwrap();
    std::thread::sleep(WHILE);
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.output.len(), 300_000);
    assert_eq!(transcript.exit, Some(Exit::new(1, 0, "success").unwrap()));
}

#[test]
fn a_terminal_that_somebody_keeps_open_is_drained_and_given_up_in_the_end() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.launcher = Launcher::Says(started_frame()));
    let (mut peer, name) = scene.session();
    let mut kept = scene.fake.end_unit_with_its_terminal_kept(&name, (1, 4, "exit-code")).unwrap();
    kept.write_all(b"from the grave").unwrap();
    assert_eq!(peer.output_until(b"from the grave", LONG).unwrap(), b"from the grave");
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.exit, Some(Exit::new(1, 4, "exit-code").unwrap()));
    // What was shut down can't be written to any more, so nobody waits at it.
    assert!(kept.write_all(b"x").is_err());
    drop((kept, peer));
    scene.assert_idle("a terminal that was kept open");
}

/// The launcher's answer as bytes.
fn started_frame() -> Vec<u8> {
    encode(Kind::Started, b"groups=dropped landlock=6 scope=signal,abstract").unwrap()
}

#[test]
fn an_error_ends_the_connection_at_once() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.launcher = Launcher::Refuses(ErrorCode::BadCwd, "no"));
    let mut failed = scene.asked();
    assert!(matches!(failed.next_frame(LONG).unwrap(), Frame::Error(ErrorCode::BadCwd, _)));
    assert_eq!(failed.next_frame(SOON).unwrap(), Frame::Closed);

    scene.fake.with(|state| state.script.launcher = Launcher::Echo);
    let (mut running, _) = scene.session();
    running.send_raw(b"nonsense, at least twelve bytes of it", &[]).unwrap();
    assert!(matches!(running.next_frame(LONG).unwrap(), Frame::Error(ErrorCode::BadFrame, _)));
    assert_eq!(running.next_frame(SOON).unwrap(), Frame::Closed);
}

#[test]
fn a_stop_is_an_exit_record_of_its_own_and_then_stopped() {
    let scene = Scene::set();
    let (mut peer, name) = scene.session();
    peer.stop().unwrap();
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.exit, Some(Exit::stopped()));
    assert!(transcript.stopped);
    scene.fake.wait_until_empty();
    scene.fake.with(|state| {
        let stops: Vec<_> = state.calls.iter().filter(|call| call.method == "StopUnit").collect();
        assert!(!stops.is_empty());
        assert!(stops.iter().all(|call| call.unit == name && call.detail == "replace"), "{stops:?}");
    });
}

#[test]
fn a_stop_travels_behind_the_input_sent_before_it() {
    let scene = Scene::set();
    let (say, said) = mpsc::channel();
    scene.fake.with(|state| {
        state.script.launcher = Launcher::runs(move |terminal| {
            let mut seen = Vec::new();
            let _ = terminal.socket.read_to_end(&mut seen);
            let _ = say.send(seen);
            (1, 0, "success")
        });
    });
    let (mut peer, _) = scene.session();
    peer.input(b"some last words").unwrap();
    peer.stop().unwrap();
    peer.input(b"dropped").unwrap();
    assert!(peer.read_to_end(LONG).unwrap().stopped);
    // The program is a thread of this test, which may come to its end later than the manager's word of it does.
    assert_eq!(said.recv_timeout(LONG).unwrap(), b"some last words");
}

#[test]
fn a_stop_that_crosses_the_exit_leaves_the_real_record_and_is_still_answered() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.launcher = Launcher::shows("x", (1, 3, "exit-code")));
    let mut peer = scene.asked();
    loop {
        if let Frame::Exit(exit) = peer.next_frame(LONG).unwrap() {
            assert_eq!(exit, Exit::new(1, 3, "exit-code").unwrap());
            break;
        }
    }
    peer.stop().unwrap();
    assert_eq!(peer.next_frame(LONG).unwrap(), Frame::Stopped);
    assert_eq!(peer.next_frame(LONG).unwrap(), Frame::Closed);
}

#[test]
fn input_after_the_end_is_read_and_dropped() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.launcher = Launcher::shows("x", (1, 0, "success")));
    let mut peer = scene.asked();
    while !matches!(peer.next_frame(LONG).unwrap(), Frame::Exit(_)) {}
    for _ in 0..64 {
        // 2 MiB in all, far beyond what any buffer holds. The supervisor may close while it comes.
        if peer.input(&vec![b'x'; 32_768]).is_err() {
            break;
        }
    }
    assert_eq!(peer.next_frame(LONG).unwrap(), Frame::Closed);
}

#[test]
fn a_client_that_does_not_read_stops_the_program_and_nobody_else() {
    let mut scene = Scene::set();
    let memory_before = scene.supervisor().resident_bytes();
    let written = Arc::new(Mutex::new(0_usize));
    let shared = Arc::clone(&written);
    scene.fake.with(|state| {
        state.script.launcher = Launcher::runs(move |terminal| {
            while terminal.socket.write_all(&[b'y'; 4096]).is_ok() {
                *shared.lock().unwrap() += 4096;
            }
            (2, 15, "success")
        });
    });
    let (stalled, name) = scene.session();
    let mut before = usize::MAX;
    // Flows until every buffer is full; then it stands still.
    while before != *written.lock().unwrap() {
        before = *written.lock().unwrap();
        std::thread::sleep(WHILE);
    }
    assert!(before < 4 << 20, "{before} bytes went somewhere");
    let memory = scene.supervisor().resident_bytes();
    assert!(memory < memory_before + (2 << 20), "{memory_before} bytes resident before, {memory} now");
    scene.fake.with(|state| state.script.launcher = Launcher::Echo);
    scene.check_that_a_session_works();

    // And a disconnect is noticed although both directions are blocked.
    let input = encode(Kind::Input, &vec![b'i'; 32_768]).unwrap();
    while stalled.sender().send_now(&input).unwrap() > 0 {}
    drop(stalled);
    scene.fake.wait("the flooding unit to be stopped", |state| (state.called("StopUnit", &name) > 0).then_some(()));
    scene.fake.wait_until_empty();
}

#[test]
fn a_stop_works_while_output_floods_and_nobody_reads() {
    let scene = Scene::set();
    scene.fake.with(|state| {
        state.script.launcher = Launcher::runs(|terminal| {
            while terminal.socket.write_all(&[b'y'; 4096]).is_ok() {}
            (2, 15, "success")
        });
    });
    let (mut peer, name) = scene.session();
    std::thread::sleep(WHILE);
    peer.stop().unwrap();
    scene.fake.wait("the unit to be stopped", |state| (state.called("StopUnit", &name) > 0).then_some(()));
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.exit, Some(Exit::stopped()));
    assert!(transcript.stopped);
}

#[test]
fn a_disconnect_in_either_form_stops_the_unit() {
    let scene = Scene::set();
    scene.check_that_a_session_works();
    for how in ["close", "half-close", "close with output unread"] {
        scene.fake.with(|state| {
            state.calls.clear();
            state.units.clear();
        });
        let (peer, name) = scene.session();
        match how {
            "half-close" => peer.half_close().unwrap(),
            "close" => drop(peer),
            _ => {
                peer.input(b"echoed and never read").unwrap();
                std::thread::sleep(WHILE);
                drop(peer);
            }
        }
        scene.fake.wait(how, |state| (state.called("StopUnit", &name) > 0).then_some(()));
        scene.fake.wait_until_empty();
        scene.assert_idle(how);
    }
}

#[test]
fn a_half_closed_client_gets_no_frame_after_it() {
    let scene = Scene::set();
    let (mut peer, _) = scene.session();
    peer.half_close().unwrap();
    assert_eq!(peer.next_frame(LONG).unwrap(), Frame::Closed);
}

#[test]
fn a_unit_that_does_not_die_of_term_is_killed_and_the_stop_confirmed() {
    let mut scene = Scene::set();
    scene.fake.with(|state| state.script.stop = Stopping::NeedsKill);
    let (mut peer, name) = scene.session();
    peer.stop().unwrap();
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.exit, Some(Exit::stopped()));
    assert!(transcript.stopped);
    scene.fake.with(|state| {
        let kill = state.calls.iter().find(|call| call.method == "KillUnit").unwrap();
        assert_eq!((kill.unit.as_str(), kill.detail.as_str()), (name.as_str(), "all 9"));
    });
    assert!(scene.supervisor().is_running());
}

#[test]
fn a_unit_that_cannot_be_stopped_is_said_so_and_takes_the_supervisor_down() {
    let mut scene = Scene::set();
    scene.fake.with(|state| state.script.stop = Stopping::Never);
    let (mut peer, name) = scene.session();
    peer.stop().unwrap();
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.error_code(), Some(ErrorCode::StopFailed), "{transcript:?}");
    assert!(!transcript.stopped);
    let (status, log) = scene.supervisor().wait();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains(&name), "{log}");
}

/// A directory where control groups are, or nothing where this machine lets nobody make one.
struct ControlGroup(String);

impl ControlGroup {
    fn make(name: &str) -> Option<Self> {
        let path = format!("/opencode-it-{}-{name}", std::process::id());
        match std::fs::create_dir(format!("{CGROUP_ROOT}{path}")) {
            Ok(()) => Some(Self(path)),
            Err(error) => {
                eprintln!("skipped: cannot make a control group: {error}");
                None
            }
        }
    }

    fn remove(&self) {
        std::fs::remove_dir(format!("{CGROUP_ROOT}{}", self.0)).unwrap();
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // The test has removed it, unless it failed before.
        let _ = std::fs::remove_dir(format!("{CGROUP_ROOT}{}", self.0));
    }
}

#[test]
fn a_stop_is_complete_when_the_control_group_is_gone_and_not_before() {
    let Some(group) = ControlGroup::make("goes") else { return };
    let scene = Scene::set();
    scene.fake.with(|state| state.script.control_group = Some(group.0.clone()));
    let (mut peer, _) = scene.session();
    peer.stop().unwrap();
    scene.fake.wait_until_empty();
    let early = peer.next_frame(WHILE);
    assert!(matches!(early, Err(PeerError::TimedOut { .. })), "{early:?}");
    group.remove();
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!((transcript.exit, transcript.stopped), (Some(Exit::stopped()), true));
}

#[test]
fn a_control_group_that_stays_is_a_stop_that_failed() {
    let Some(group) = ControlGroup::make("stays") else { return };
    let mut scene = Scene::set();
    scene.fake.with(|state| state.script.control_group = Some(group.0.clone()));
    let (mut peer, _) = scene.session();
    peer.stop().unwrap();
    let transcript = peer.read_to_end(LONG).unwrap();
    group.remove();
    assert_eq!(transcript.error_code(), Some(ErrorCode::StopFailed), "{transcript:?}");
    let (status, log) = scene.supervisor().wait();
    assert_eq!(status.code(), Some(1), "{log}");
}

#[test]
fn a_unit_collected_before_it_was_read_is_lost_and_never_a_success() {
    let scene = Scene::set();
    let (mut peer, name) = scene.session();
    scene.fake.with(|state| state.units.get_mut(&name).unwrap().references = 0);
    scene.fake.end_unit(&name, (1, 7, "exit-code"));
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.exit, Some(Exit::lost()));
}

#[test]
fn a_unit_restarted_by_somebody_is_stopped_and_lost() {
    let scene = Scene::set();
    let (mut peer, name) = scene.session();
    scene.fake.change_invocation(&name);
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.exit, Some(Exit::lost()));
    scene.fake.wait_until_empty();
    scene.fake.with(|state| assert!(state.called("StopUnit", &name) > 0));
}

#[test]
fn a_record_of_another_invocation_or_without_a_code_is_lost() {
    let scene = Scene::set();
    let (mut peer, name) = scene.session();
    scene.fake.end_unit(&name, (0, 0, "success"));
    assert_eq!(peer.read_to_end(LONG).unwrap().exit, Some(Exit::lost()));

    let (mut peer, name) = scene.session();
    scene.fake.with(|state| state.units.get_mut(&name).unwrap().invocation = vec![0xaa; 16]);
    scene.fake.end_unit(&name, (1, 0, "success"));
    assert_eq!(peer.read_to_end(LONG).unwrap().exit, Some(Exit::lost()));
}

#[test]
fn an_outsiders_kill_is_reported_as_what_it_was() {
    let scene = Scene::set();
    let (mut peer, name) = scene.session();
    peer.input(b"typed").unwrap();
    peer.output_until(b"typed", LONG).unwrap();
    scene.fake.end_unit(&name, (2, 9, "signal"));
    assert_eq!(peer.read_to_end(LONG).unwrap().exit, Some(Exit::new(2, 9, "signal").unwrap()));
}

#[test]
fn the_death_of_the_servers_process_ends_its_sessions_whoever_holds_the_socket() {
    let mut scene = Scene::set();
    let (mut peer, child) = scene.standin.peer_held_by_child().unwrap();
    peer.start_in(scene.directory(), 60, &["/bin/cat"]).unwrap();
    let name = peer.started(LONG).unwrap();
    scene.kill_server();
    scene.fake.wait("the session to be stopped", |state| (state.called("StopUnit", &name) > 0).then_some(()));
    scene.fake.wait_until_empty();
    let child = rustix::process::Pid::from_raw(child.cast_signed()).unwrap();
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn an_idle_session_stays() {
    let scene = Scene::set();
    let (mut peer, name) = scene.session();
    let waited = peer.next_frame(WHILE);
    assert!(matches!(waited, Err(PeerError::TimedOut { .. })), "{waited:?}");
    scene.fake.with(|state| assert_eq!(state.units[&name].active, "active"));
    peer.input(b"awake").unwrap();
    peer.output_until(b"awake", LONG).unwrap();
}

#[test]
fn sixteen_sessions_at_once_keep_their_bytes_apart() {
    let scene = Scene::set();
    std::thread::scope(|scope| {
        for number in 0..16 {
            let scene = &scene;
            scope.spawn(move || {
                let (mut peer, _) = scene.session();
                for round in 0..50 {
                    let text = format!("session {number} round {round};");
                    peer.input(text.as_bytes()).unwrap();
                    assert_eq!(peer.output_until(b";", LONG).unwrap(), text.as_bytes());
                }
                peer.stop().unwrap();
                assert!(peer.read_to_end(LONG).unwrap().stopped);
            });
        }
    });
    scene.fake.wait_until_empty();
}

/// The manager's word that a unit has gone may be lost; the end of its terminal is a hint to ask.
#[test]
fn a_unit_that_goes_without_a_signal_is_noticed_by_its_terminal() {
    let scene = Scene::set();
    let (mut peer, name) = scene.session();
    peer.input(b"typed").unwrap();
    peer.output_until(b"typed", LONG).unwrap();
    scene.fake.vanish(&name);
    assert_eq!(peer.read_to_end(LONG).unwrap().exit, Some(Exit::lost()));
}
