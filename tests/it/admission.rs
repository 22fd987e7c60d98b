//! Who gets in: the main process of the server's unit, as the manager knows it, twice; nobody else, whatever they do.

use std::sync::atomic::{AtomicBool, Ordering};

use opencode_pty::frame::message::ErrorCode;
use opencode_pty::limits::HANDSHAKE_TIME;
use rustix::process::Signal;
use support::ending::Ending;
use support::fake_manager::{Answer, NO_SUCH_UNIT, PROCESS_UNKNOWN, Server, State, UNKNOWN_METHOD};
use support::peer::{Frame, Peer};
use support::standin::Probed;

use crate::scene::{ACCOUNT_ID, LONG, SERVER_UNIT, Scene, WHILE};

/// A refusal of somebody who asked for a session: a word for the server itself, silence for a stranger.
fn refusal(scene: &Scene) -> Option<ErrorCode> {
    let peer = scene.peer();
    // The supervisor may have closed already.
    let _ = peer.start_in(scene.directory(), 60, &["/bin/true"]);
    let mut peer = peer;
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!((transcript.unit.clone(), transcript.exit.clone()), (None, None), "{transcript:?}");
    scene.fake.with(|state| assert_eq!(state.called("StartTransientUnit", ""), 0));
    transcript.error_code()
}

#[test]
fn nobody_but_the_servers_main_process_gets_a_word() {
    let scene = Scene::set();
    assert_eq!(scene.standin.probe_from_child().unwrap(), Probed::Closed, "a child of the server, in its cgroup");
    assert_eq!(scene.probe_as(ACCOUNT_ID), Probed::Closed, "another process of the account");
    assert_eq!(scene.probe_as(0), Probed::Closed, "root");
    let other = scene.probe_as(1);
    assert!(matches!(other, Probed::Refused(_)), "another account can't even connect: {other:?}");
    scene.fake.with(|state| assert_eq!(state.called("StartTransientUnit", ""), 0));
    scene.check_that_a_session_works();
}

#[test]
fn a_main_pid_that_is_not_the_peers_closes_it_without_a_word() {
    let scene = Scene::set();
    scene.fake.with(|state| state.server.main_pid = 1);
    scene.look_at_the_server_again();
    // The answer may still be on its way to the supervisor: then it knows the peer's pid and gives it a word.
    let refusals: Vec<_> = (0..20).map(|_| refusal(&scene)).take_while(Option::is_some).collect();
    assert!(refusals.len() < 20, "{refusals:?}");
    assert!(refusals.iter().all(|code| *code == Some(ErrorCode::Unauthenticated)), "{refusals:?}");
}

#[test]
fn a_server_that_is_restarted_gets_in_under_its_new_pid_without_waiting() {
    let scene = Scene::set();
    let pid = scene.standin.pid();
    scene.fake.with(|state| state.server.main_pid = 1);
    scene.look_at_the_server_again();
    // No signal this time: the connection itself must make the supervisor look.
    scene.fake.with(|state| state.server.main_pid = pid);
    scene.check_that_a_session_works();
}

/// Something the manager says of the server's unit that shuts it out.
type Doubt = (&'static str, fn(&mut Server));

#[test]
fn a_server_unit_that_is_not_as_it_should_be_shuts_its_main_process_out() {
    let scene = Scene::set();
    scene.check_that_a_session_works();
    scene.fake.wait_until_empty();
    let doubts: [Doubt; 12] = [
        ("NotifyAccess=all lets any child be MainPID", |server| server.notify_access = "all".into()),
        ("a NotifyAccess nobody knows", |server| server.notify_access = "some".into()),
        ("another control group", |server| server.control_group = "/system.slice/other.service".into()),
        ("a control group below it", |server| server.control_group.push_str("/sub")),
        ("no control group", |server| server.control_group = String::new()),
        ("activating", |server| server.active = "activating".into()),
        ("deactivating", |server| server.active = "deactivating".into()),
        ("reloading", |server| server.active = "reloading".into()),
        ("stop-sigterm", |server| server.sub = "stop-sigterm".into()),
        ("no invocation", |server| server.invocation = vec![]),
        ("an invocation of 15 bytes", |server| server.invocation = vec![1; 15]),
        ("another invocation by pidfd", |server| server.invocation_by_pidfd = Some(vec![9; 16])),
    ];
    let right = scene.fake.with(|state| {
        state.calls.clear();
        state.server.clone()
    });
    for (what, doubt) in doubts {
        scene.fake.with(|state| doubt(&mut state.server));
        let code = refusal(&scene);
        assert_eq!(code, Some(ErrorCode::Unauthenticated), "{what}");
        scene.fake.with(|state| state.server = right.clone());
        scene.assert_idle(what);
    }
    for access in ["none", "main", "exec"] {
        scene.fake.with(|state| state.server.notify_access = access.into());
        scene.check_that_a_session_works();
    }
}

#[test]
fn a_manager_without_lookup_by_pidfd_is_asked_by_pid() {
    let scene = Scene::set();
    scene.fake.answer("GetUnitByPIDFD", Answer::Error(UNKNOWN_METHOD, "as on 252"), usize::MAX);
    scene.check_that_a_session_works();
    scene.fake.with(|state| assert!(state.called("GetUnitByPID", "") > 0));
    assert_eq!(scene.standin.probe_from_child().unwrap(), Probed::Closed);
}

#[test]
fn what_cannot_be_found_out_is_a_denial_and_never_the_end_of_the_supervisor() {
    let mut scene = Scene::set();
    scene.check_that_a_session_works();
    scene.fake.wait_until_empty();
    scene.fake.with(|state| state.calls.clear());
    for (method, answer) in [
        ("GetUnitByPIDFD", Answer::Error(PROCESS_UNKNOWN, "reaped")),
        ("GetUnitByPIDFD", Answer::Error("org.freedesktop.systemd1.NoUnitForPID", "none")),
        ("GetUnitByPIDFD", Answer::Error("org.freedesktop.DBus.Error.AccessDenied", "no")),
        ("GetUnitByPIDFD", Answer::Malformed),
        ("GetAll", Answer::Error(NO_SUCH_UNIT, "gone")),
        ("GetAll", Answer::Malformed),
        ("GetUnitByPIDFD", Answer::Silence),
        ("GetAll", Answer::Silence),
    ] {
        scene.fake.answer(method, answer, 1);
        let code = refusal(&scene);
        // Nothing, or a word the server may know.
        let right = match answer {
            Answer::Silence => code == Some(ErrorCode::Timeout),
            _ => matches!(code, None | Some(ErrorCode::Unauthenticated)),
        };
        assert!(right, "{method} {answer:?}: {code:?}");
        assert!(scene.supervisor().is_running(), "{method} {answer:?}");
        scene.fake.with(|state| state.script.answers.clear());
        scene.assert_idle(method);
    }
    scene.check_that_a_session_works();
}

/// A connection that has been authenticated and has not sent its start frame.
fn authenticated(scene: &Scene) -> Peer {
    scene.fake.with(|state| state.calls.clear());
    let peer = scene.peer();
    scene.fake.wait("the peer to be authenticated", |state| {
        let looked_up = state.calls.iter().position(|call| call.method == "GetUnitByPIDFD")?;
        let behind = state.calls.get(looked_up..)?;
        behind.iter().any(|call| call.method == "GetAll" && call.unit == SERVER_UNIT).then_some(())
    });
    peer
}

#[test]
fn a_server_restarted_between_authentication_and_start_is_refused() {
    let scene = Scene::set();
    let right = scene.fake.with(|state| state.server.clone());
    let doubts: [Doubt; 4] = [
        ("another invocation", |server| server.invocation = vec![7; 16]),
        ("another main process", |server| server.main_pid = 1),
        ("NotifyAccess=all", |server| server.notify_access = "all".into()),
        ("not running any more", |server| server.active = "deactivating".into()),
    ];
    for (what, doubt) in doubts {
        let mut peer = authenticated(&scene);
        scene.fake.with(|state| doubt(&mut state.server));
        peer.start_in(scene.directory(), 60, &["/bin/true"]).unwrap();
        let transcript = peer.read_to_end(LONG).unwrap();
        assert_eq!(transcript.error_code(), Some(ErrorCode::Unauthenticated), "{what}: {transcript:?}");
        scene.fake.with(|state| {
            assert_eq!(state.called("StartTransientUnit", ""), 0, "{what}");
            state.server = right.clone();
        });
    }
    scene.check_that_a_session_works();
}

#[test]
fn a_second_check_that_gets_no_answer_starts_nothing() {
    let scene = Scene::set();
    let mut peer = authenticated(&scene);
    scene.fake.answer_for("GetAll", SERVER_UNIT, Answer::Silence, usize::MAX);
    peer.start_in(scene.directory(), 60, &["/bin/true"]).unwrap();
    let (code, message) = peer.read_to_end(LONG).unwrap().error.unwrap();
    assert_eq!(code, ErrorCode::Timeout, "{message}");
    // The start frame was complete: who looks for the fault must not be sent to the client.
    assert!(message.contains("service manager"), "{message}");
    scene.fake.with(|state| {
        assert_eq!(state.called("StartTransientUnit", ""), 0);
        state.script.answers.clear();
    });
    scene.check_that_a_session_works();
}

#[test]
fn a_stranger_is_told_nothing_by_a_supervisor_whose_manager_does_not_answer() {
    let scene = Scene::set();
    scene.check_that_a_session_works();
    scene.fake.answer_for("GetAll", SERVER_UNIT, Answer::Silence, usize::MAX);
    assert_eq!(scene.standin.probe_from_child().unwrap(), Probed::Closed);
    scene.fake.with(|state| state.script.answers.clear());
}

/// A question to the manager has a limit of its own, which ends right after the handshake's. Who found both over told the server
/// that it could not be verified.
#[test]
fn a_supervisor_that_is_woken_late_says_what_was_late_and_what_was_wrong() {
    let mut scene = Scene::set();
    let (mut unanswered, mut wrong) = (authenticated(&scene), authenticated(&scene));
    scene.fake.answer_for("GetAll", SERVER_UNIT, Answer::Silence, usize::MAX);
    let asked = scene.fake.with(|state| state.called("GetAll", SERVER_UNIT));
    unanswered.start_in(scene.directory(), 60, &["/bin/true"]).unwrap();
    let again = |state: &mut State| (state.called("GetAll", SERVER_UNIT) > asked).then_some(());
    scene.fake.wait("the server's unit to be read again", again);

    scene.supervisor().signal(Signal::STOP);
    // There before the time is over, and read after it.
    wrong.send_raw(b"nonsense, at least twelve bytes of it", &[]).unwrap();
    std::thread::sleep(HANDSHAKE_TIME + WHILE);
    scene.supervisor().signal(Signal::CONT);

    let (code, message) = unanswered.read_to_end(LONG).unwrap().error.unwrap();
    assert_eq!(code, ErrorCode::Timeout, "{message}");
    assert!(message.contains("service manager"), "{message}");
    let (code, message) = wrong.read_until_closed(LONG).unwrap().error.unwrap();
    assert_eq!(code, ErrorCode::BadFrame, "{message}");
    scene.fake.with(|state| {
        assert_eq!(state.called("StartTransientUnit", ""), 0);
        state.script.answers.clear();
    });
    scene.check_that_a_session_works();
}

#[test]
fn one_session_more_than_there_are_slots_is_refused_as_busy_and_not_queued() {
    let scene = Scene::with_sessions_max(2);
    let (mut first, _) = scene.session();
    let (_second, _) = scene.session();
    for _ in 0..3 {
        // Not even a start frame is needed to be told.
        let transcript = scene.peer().read_to_end(LONG).unwrap();
        assert_eq!(transcript.error_code(), Some(ErrorCode::Busy), "{transcript:?}");
    }
    scene.assert_idle_but_for(2, "being refused as busy");
    first.stop().unwrap();
    first.read_to_end(LONG).unwrap();
    scene.check_that_a_session_works();
}

#[test]
fn a_connection_that_sends_no_start_frame_holds_its_slot_for_five_seconds_and_no_longer() {
    let scene = Scene::with_sessions_max(1);
    let mut idle = authenticated(&scene);
    assert_eq!(scene.peer().read_to_end(LONG).unwrap().error_code(), Some(ErrorCode::Busy));
    let transcript = idle.read_to_end(LONG).unwrap();
    assert_eq!(transcript.error_code(), Some(ErrorCode::Timeout), "{transcript:?}");
    drop(idle);
    scene.assert_idle("a handshake that took too long");
    scene.check_that_a_session_works();
}

#[test]
fn half_a_start_frame_is_given_up_in_time_and_its_descriptor_closed() {
    let scene = Scene::set();
    scene.check_that_a_session_works();
    let mut peer = scene.peer();
    let directory = scene.directory();
    let start = support::peer::start_for(&directory, 60, &["/bin/true"]).unwrap();
    let bytes = opencode_pty::frame::encode(opencode_pty::frame::Kind::Start, &start.encode()).unwrap();
    let half = bytes.get(..20).unwrap();
    peer.send_raw(half, &[std::os::fd::AsFd::as_fd(&directory)]).unwrap();
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.error_code(), Some(ErrorCode::Timeout), "{transcript:?}");
    drop(peer);
    scene.assert_idle("half a start frame");
}

#[test]
fn strangers_in_any_number_take_nothing_from_the_server() {
    let scene = Scene::with_sessions_max(1);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Also when this thread fails: the scope waits for them.
        let end_floods = Ending(&ended);
        for _ in 0..3 {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    // Root is a stranger, too: it is not the account.
                    if let Ok(peer) = Peer::connect(&scene.socket()) {
                        drop(peer);
                    }
                }
            });
        }
        let probing = scope.spawn(|| {
            // More than the minute's quota of those that are the account.
            let loops = "i=0; while [ $i -lt 150 ]; do \"$0\" probe \"$1\"; i=$((i + 1)); done";
            let (program, socket) = (scene.path("opencode-standin"), scene.socket());
            let argv = ["/bin/sh", "-c", loops, program.to_str().unwrap(), socket.to_str().unwrap()];
            scene.standin.spawn(&argv).unwrap()
        });
        for _ in 0..20 {
            scene.check_that_a_session_works();
        }
        let probed = probing.join().unwrap();
        assert_eq!(probed.text().lines().filter(|line| *line != "closed").count(), 0, "{}", probed.text());
        scene.check_that_a_session_works();
        drop(end_floods);
    });
    scene.fake.with(|state| {
        assert!(state.called("GetUnitByPIDFD", "") <= 21, "strangers made the manager work");
    });
}

#[test]
fn the_rate_of_looks_that_strangers_cause_is_bounded() {
    let scene = Scene::set();
    let reads = |scene: &Scene| scene.fake.with(|state| state.called("GetAll", SERVER_UNIT));
    let (before, begun) = (reads(&scene), std::time::Instant::now());
    let (program, socket) = (scene.path("opencode-standin"), scene.socket());
    let loops = "i=0; while [ $i -lt 100 ]; do \"$0\" probe \"$1\" & i=$((i + 1)); done; wait";
    let argv = ["/bin/sh", "-c", loops, program.to_str().unwrap(), socket.to_str().unwrap()];
    scene.standin.spawn(&argv).unwrap();
    let caused = reads(&scene) - before;
    // Four a second; the first may come at once.
    let seconds = usize::try_from(begun.elapsed().as_secs()).unwrap();
    assert!(caused <= 4 * (seconds + 1) + 1, "{caused} looks in {seconds} s");
}

#[test]
fn a_connection_of_a_server_that_has_died_is_refused() {
    let mut scene = Scene::set();
    let mut peer = authenticated(&scene);
    scene.kill_server();
    let directory = scene.directory();
    // The supervisor may have closed already, or may close while we write.
    let _ = peer.start_in(&directory, 60, &["/bin/true"]);
    loop {
        match peer.next_frame(LONG).unwrap() {
            Frame::Closed => break,
            Frame::Error(code, _) => assert_eq!(code, ErrorCode::Unauthenticated),
            other => panic!("{other:?} for a process that has died"),
        }
    }
    scene.fake.with(|state| assert_eq!(state.called("StartTransientUnit", ""), 0));
    assert!(scene.supervisor().is_running());
}
