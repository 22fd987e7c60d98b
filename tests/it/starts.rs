//! From the start frame to `started`, and every way it can fail: then nothing ran and nothing is left.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use opencode_pty::frame::Kind;
use opencode_pty::frame::encode;
use opencode_pty::frame::message::{ErrorCode, Exit};
use support::fake_manager::{Answer, Handed, JobEnd, Launcher, NO_SUCH_UNIT, Stopping};
use support::peer::Peer;
use zbus::zvariant::OwnedValue;

use crate::scene::{LONG, SERVER_UNIT, SUPERVISOR_UNIT, Scene, WHILE};

/// What must be true after a start that failed: an error, no command, no unit, no slot taken, no descriptor more.
fn assert_start_failed(scene: &Scene, mut peer: Peer, why: &str) {
    let transcript = peer.read_to_end(LONG).unwrap();
    drop(peer);
    assert_eq!(transcript.error_code(), Some(ErrorCode::StartFailed), "{why}: {transcript:?}");
    assert_eq!(transcript.frames, 1, "{why}: {transcript:?}");
    let told = transcript.error.unwrap().1;
    assert!(!told.contains("org.freedesktop") && !told.contains("job"), "{why}: the peer is told '{told}'");
    assert_nothing_ran(scene, why);
    scene.assert_idle(why);
}

/// No unit got a start frame, and none is loaded any more.
fn assert_nothing_ran(scene: &Scene, why: &str) {
    scene.fake.wait_until_empty();
    scene.fake.with(|state| {
        for unit in state.units.values() {
            assert!(!matches!(unit.handed, Handed::Start(_)), "{why}: {} got a start frame", unit.name);
        }
        state.units.clear();
        state.calls.clear();
    });
}

#[test]
fn a_session_goes_from_the_clients_request_to_its_exit_record() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.launcher = Launcher::shows("hi\r\n", (1, 7, "exit-code")));

    let mut peer = scene.standin.start(scene.path("work"), 90, &["/bin/echo", "", "é $HOME"]).unwrap();
    let transcript = peer.read_to_end(LONG).unwrap();

    assert_eq!(transcript.text(), "hi\r\n");
    assert_eq!(transcript.exit, Some(Exit::new(1, 7, "exit-code").unwrap()));
    let name = transcript.unit.unwrap();
    scene.fake.wait_until_empty();
    scene.fake.with(|state| {
        assert_eq!(state.called("StartTransientUnit", &name), 1);
        assert_eq!(state.called("UnrefUnit", &name), 1);
        let Handed::Start(start) = &state.units[&name].handed else { panic!("no start frame") };
        assert_eq!(start.words().as_slice(), ["/bin/echo", "", "é $HOME"]);
        assert_eq!(start.runtime_seconds(), 90);
        assert_eq!(start.ino(), std::fs::metadata(scene.path("work")).unwrap().ino());
        let directory = rustix::fs::fstat(state.units[&name].directory.as_ref().unwrap()).unwrap();
        assert_eq!((directory.st_dev, directory.st_ino), (start.dev(), start.ino()));
    });
}

#[test]
fn the_unit_is_bound_to_the_supervisor_and_tells_nothing_of_the_request() {
    let scene = Scene::set();
    let mut peer = scene.standin.start(scene.path("work"), 90, &["/bin/secret-command", "secret-argument"]).unwrap();
    let name = peer.started(LONG).unwrap();
    scene.fake.with(|state| {
        let properties = &state.units[&name].properties;
        let text = |name: &str| String::try_from(properties[name].try_clone().unwrap()).unwrap();
        let list = |name: &str| Vec::<String>::try_from(properties[name].try_clone().unwrap()).unwrap();
        let number = |name: &str| u64::try_from(&properties[name]).unwrap();
        assert_eq!(list("BindsTo"), [SUPERVISOR_UNIT]);
        assert_eq!(list("After"), [SUPERVISOR_UNIT]);
        assert_eq!(list("JoinsNamespaceOf"), [SERVER_UNIT]);
        assert_eq!(text("User"), crate::scene::ACCOUNT);
        assert_eq!(text("Type"), "exec");
        assert_eq!(text("CollectMode"), "inactive-or-failed");
        assert_eq!(number("RuntimeMaxUSec"), 90_000_000);
        assert_eq!(number("TimeoutStopUSec"), 2_000_000);
        assert_eq!(number("TasksMax"), 256);
        assert_eq!(number("CapabilityBoundingSet"), 1 << 6);
        assert_eq!(bool::try_from(&properties["NoNewPrivileges"]), Ok(true));
        assert!(!properties.contains_key("Environment"));
        let all = format!("{:?}", properties.iter().collect::<Vec<(&String, &OwnedValue)>>());
        assert!(!all.contains("secret") && !all.contains("/work"), "{all}");
    });
}

#[test]
fn a_start_job_that_is_not_done_leaves_nothing_and_frees_the_slot() {
    let scene = Scene::with_sessions_max(1);
    scene.check_that_a_session_works();
    scene.fake.wait_until_empty();
    for word in ["failed", "timeout", "canceled", "dependency", "skipped", "collected", "once", "wobbly", ""] {
        scene.fake.with(|state| {
            state.units.clear();
            state.calls.clear();
            state.script.job = JobEnd::Word(word.into());
        });
        assert_start_failed(&scene, scene.asked(), &format!("job result '{word}'"));
    }
    scene.fake.with(|state| state.script.job = JobEnd::default());
    scene.check_that_a_session_works();
}

#[test]
fn a_unit_whose_start_failed_is_stopped_by_name_with_mode_replace() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.job = JobEnd::Held);
    let mut peer = scene.asked();
    let name = scene.fake.wait_for_start(&[]);
    scene.fake.finish_job(&name, "dependency");
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.error_code(), Some(ErrorCode::StartFailed));
    scene.fake.wait_until_empty();
    scene
        .fake
        .wait("the pair to be closed", |state| (state.units[&name].handed == Handed::Closed(vec![])).then_some(()));
    scene.fake.with(|state| {
        for call in state.calls.iter().filter(|call| call.method == "StopUnit") {
            assert_eq!((call.unit.as_str(), call.detail.as_str()), (name.as_str(), "replace"));
        }
    });
}

#[test]
fn the_start_frame_is_written_after_the_job_is_done_and_not_before() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.job = JobEnd::Held);
    let mut peer = scene.asked();
    let name = scene.fake.wait_for_start(&[]);
    std::thread::sleep(WHILE);
    scene.fake.finish_job(&name, "done");
    assert_eq!(peer.started(LONG).unwrap(), name);
    scene.fake.with(|state| assert_eq!(state.units[&name].bytes_before_job_end, 0));
}

#[test]
fn a_job_of_another_unit_or_of_this_one_under_another_number_is_not_taken_for_the_start() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.job = JobEnd::Held);
    let mut peer = scene.asked();
    let name = scene.fake.wait_for_start(&[]);
    scene.fake.pretend_job_removed(999, &name, "done");
    scene.fake.pretend_job_removed(1, "opencode-pty-00000000000000000000000000000000.service", "done");
    std::thread::sleep(WHILE);
    scene.fake.finish_job(&name, "failed");
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.error_code(), Some(ErrorCode::StartFailed));
    assert_nothing_ran(&scene, "a job of somebody else");
}

#[test]
fn a_start_call_that_is_refused_fails_the_start_and_frees_the_slot() {
    let scene = Scene::with_sessions_max(1);
    scene.check_that_a_session_works();
    scene.fake.with(|state| state.units.clear());
    for (name, text) in [
        (NO_SUCH_UNIT, "what a full /run looks like"),
        ("org.freedesktop.systemd1.UnitExists", "a collision"),
        ("org.freedesktop.DBus.Error.AccessDenied", "no"),
        ("org.freedesktop.DBus.Error.PropertyReadOnly", "an older manager"),
        ("org.freedesktop.DBus.Error.NoReply", "the bus gave up"),
        ("org.freedesktop.DBus.Error.LimitsExceeded", "too many"),
    ] {
        scene.fake.answer("StartTransientUnit", Answer::Error(name, text), 1);
        assert_start_failed(&scene, scene.asked(), name);
    }
    scene.fake.answer("StartTransientUnit", Answer::Malformed, 1);
    assert_start_failed(&scene, scene.asked(), "a malformed answer");
    scene.check_that_a_session_works();
}

#[test]
fn a_unit_whose_start_call_got_no_answer_is_found_and_stopped() {
    let scene = Scene::with_sessions_max(1);
    scene.check_that_a_session_works();
    scene.fake.with(|state| state.units.clear());
    scene.fake.answer("StartTransientUnit", Answer::LostReply, 1);
    let peer = scene.asked();
    let name = scene.fake.wait_for_start(&[]);
    assert_start_failed_with_unit(&scene, peer, &name);
    scene.check_that_a_session_works();
}

fn assert_start_failed_with_unit(scene: &Scene, mut peer: Peer, name: &str) {
    let transcript = peer.read_to_end(LONG).unwrap();
    drop(peer);
    assert_eq!(transcript.error_code(), Some(ErrorCode::StartFailed));
    scene.fake.wait_until_empty();
    scene.fake.with(|state| assert!(state.called("StopUnit", name) > 0, "{:#?}", state.calls));
    assert_nothing_ran(scene, "a start whose answer was lost");
    scene.assert_idle("a start whose answer was lost");
}

/// A scene in which a start got no answer and was given up, and nothing else is left.
fn scene_with_a_doomed_start() -> Scene {
    let scene = Scene::set();
    scene.fake.answer("StartTransientUnit", Answer::Held, 1);
    let mut peer = scene.asked();
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.error_code(), Some(ErrorCode::StartFailed));
    scene.check_that_a_session_works();
    scene.fake.wait_until_empty();
    scene.fake.with(|state| {
        state.units.clear();
        state.calls.clear();
    });
    scene
}

#[test]
fn a_start_that_is_carried_out_after_it_was_given_up_runs_nothing_and_its_unit_is_let_go() {
    let scene = scene_with_a_doomed_start();
    scene.fake.release();
    let name = scene.fake.wait_for_start(&[]);
    // The launcher finds an empty pair and leaves; what remains is our reference to the unit.
    scene.fake.wait("the late unit to be gone", |state| state.units[&name].removed.then_some(()));
    assert_nothing_ran(&scene, "a start that came late");
}

#[test]
fn a_start_that_is_carried_out_after_it_was_given_up_is_stopped_while_its_job_lasts() {
    let scene = scene_with_a_doomed_start();
    scene.fake.with(|state| state.script.job = JobEnd::Held);
    scene.fake.release();
    let name = scene.fake.wait_for_start(&[]);
    scene.fake.wait("the late unit to be stopped", |state| (state.called("StopUnit", &name) > 0).then_some(()));
    assert_nothing_ran(&scene, "a start that came late");
}

#[test]
fn a_start_whose_job_does_not_end_is_given_up_and_stopped() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.job = JobEnd::Held);
    let mut peer = scene.asked();
    let name = scene.fake.wait_for_start(&[]);
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.error_code(), Some(ErrorCode::StartFailed));
    scene.fake.with(|state| assert!(state.called("StopUnit", &name) > 0));
    assert_nothing_ran(&scene, "a job that does not end");
}

#[test]
fn the_launchers_refusal_reaches_the_client_with_its_own_word() {
    let scene = Scene::set();
    for code in [ErrorCode::BadCwd, ErrorCode::StartFailed] {
        scene.fake.with(|state| state.script.launcher = Launcher::Refuses(code, "no such directory here"));
        let transcript = scene.asked().read_to_end(LONG).unwrap();
        assert_eq!(transcript.error, Some((code, "no such directory here".to_owned())));
        scene.fake.wait_until_empty();
        scene.assert_idle("the launcher's refusal");
    }
}

#[test]
fn a_launcher_that_gives_no_proper_answer_fails_the_start() {
    let scene = Scene::set();
    scene.check_that_a_session_works();
    let started = encode(Kind::Started, b"groups=dropped landlock=6 scope=signal,abstract").unwrap();
    for (what, launcher) in [
        ("it leaves", Launcher::Leaves),
        ("it says nothing", Launcher::IsSilent),
        ("bytes that are no frame", Launcher::Says(b"hello, world".to_vec())),
        ("a frame of another kind", Launcher::Says(encode(Kind::Output, b"x").unwrap())),
        ("an error without a known code", Launcher::Says(encode(Kind::Error, b"what: ever").unwrap())),
        ("half an answer", Launcher::Says(started[..20].to_vec())),
        ("text that is not UTF-8", Launcher::Says(encode(Kind::Started, b"\xff").unwrap())),
    ] {
        scene.fake.with(|state| {
            state.script.launcher = launcher;
            state.units.clear();
        });
        let transcript = scene.asked().read_to_end(LONG).unwrap();
        assert_eq!(transcript.error_code(), Some(ErrorCode::StartFailed), "{what}: {transcript:?}");
        assert_eq!(transcript.frames, 1, "{what}: {transcript:?}");
        scene.fake.wait_until_empty();
        scene.assert_idle(what);
    }
    scene.fake.with(|state| state.script.launcher = Launcher::Echo);
    scene.check_that_a_session_works();
}

#[test]
fn output_that_comes_right_behind_the_launchers_answer_waits_for_started() {
    let scene = Scene::set();
    let mut bytes = encode(Kind::Started, b"groups=dropped landlock=none").unwrap();
    bytes.extend(b"first words");
    scene.fake.with(|state| state.script.launcher = Launcher::Says(bytes));
    let (mut peer, _) = scene.session();
    assert_eq!(peer.output_until(b"first words", LONG).unwrap(), b"first words");
}

#[test]
fn input_sent_with_the_start_frame_is_held_and_arrives_in_order() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.job = JobEnd::Held);
    let mut peer = scene.peer();
    let directory = scene.directory();
    let start = support::peer::start_for(&directory, 60, &["/bin/cat"]).unwrap();
    let mut bytes = encode(Kind::Start, &start.encode()).unwrap();
    for word in ["one ", "two ", "three"] {
        bytes.extend(encode(Kind::Input, word.as_bytes()).unwrap());
    }
    peer.send_raw(&bytes, &[directory.as_fd()]).unwrap();
    let name = scene.fake.wait_for_start(&[]);
    scene.fake.finish_job(&name, "done");
    peer.started(LONG).unwrap();
    assert_eq!(peer.output_until(b"three", LONG).unwrap(), b"one two three");
}

#[test]
fn a_client_that_leaves_during_the_start_cancels_it() {
    let scene = Scene::set();
    scene.check_that_a_session_works();
    for how in ["close", "half-close"] {
        scene.fake.with(|state| {
            state.script.job = JobEnd::Held;
            state.units.clear();
            state.calls.clear();
        });
        let peer = scene.asked();
        let name = scene.fake.wait_for_start(&[]);
        match how {
            "close" => drop(peer),
            _ => peer.half_close().unwrap(),
        }
        scene.fake.wait("the unit to be stopped", |state| (state.called("StopUnit", &name) > 0).then_some(()));
        assert_nothing_ran(&scene, how);
        scene.assert_idle(how);
    }
}

#[test]
fn a_stop_during_the_start_cancels_it_and_is_confirmed() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.job = JobEnd::Held);
    let mut peer = scene.asked();
    let name = scene.fake.wait_for_start(&[]);
    peer.stop().unwrap();
    let transcript = peer.read_to_end(LONG).unwrap();
    assert!(transcript.stopped, "{transcript:?}");
    assert_eq!(transcript.unit, None);
    scene.fake.with(|state| assert!(state.called("StopUnit", &name) > 0));
    assert_nothing_ran(&scene, "a stop during the start");
}

#[test]
fn a_client_that_leaves_while_the_launcher_is_silent_ends_the_unit() {
    let scene = Scene::set();
    scene.fake.with(|state| state.script.launcher = Launcher::IsSilent);
    let peer = scene.asked();
    let name = scene.fake.wait_for_start(&[]);
    scene.fake.wait("the start frame", |state| matches!(state.units[&name].handed, Handed::Start(_)).then_some(()));
    drop(peer);
    scene.fake.wait("the unit to be stopped", |state| (state.called("StopUnit", &name) > 0).then_some(()));
    scene.fake.wait_until_empty();
}

#[test]
fn a_failed_start_whose_unit_does_not_die_of_term_is_killed() {
    let scene = Scene::set();
    scene.fake.with(|state| {
        state.script.launcher = Launcher::Says(b"no frame at all".to_vec());
        state.script.stop = Stopping::NeedsKill;
    });
    let mut peer = scene.asked();
    let name = scene.fake.wait_for_start(&[]);
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.error_code(), Some(ErrorCode::StartFailed));
    scene.fake.with(|state| {
        assert!(state.calls.iter().any(|call| call.method == "KillUnit" && call.unit == name), "{:#?}", state.calls);
    });
    scene.fake.wait_until_empty();
}
