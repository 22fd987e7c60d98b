//! The bus and the manager going away, coming back, and being somebody else.

use std::process::{Child, Command, Stdio};

use opencode_pty::frame::message::Exit;
use support::fake_manager::Launcher;

use crate::scene::{LONG, Scene, impostor_path};

/// A session whose echo works.
fn echoing(scene: &Scene) -> (support::peer::Peer, String) {
    let (mut peer, name) = scene.session();
    peer.input(b"before").unwrap();
    peer.output_until(b"before", LONG).unwrap();
    (peer, name)
}

#[test]
fn a_session_outlives_the_managers_reexecution_and_keeps_its_record() {
    let scene = Scene::set();
    let (mut peer, name) = echoing(&scene);
    scene.fake.reexecute().unwrap();
    peer.input(b"after").unwrap();
    peer.output_until(b"after", LONG).unwrap();
    scene.wait_for_a_session();
    scene.fake.end_unit(&name, (1, 5, "exit-code"));
    assert_eq!(peer.read_to_end(LONG).unwrap().exit, Some(Exit::new(1, 5, "exit-code").unwrap()));
}

#[test]
fn a_session_that_ends_during_the_managers_reexecution_keeps_its_record() {
    let scene = Scene::set();
    let (mut peer, name) = echoing(&scene);
    scene.fake.disconnect().unwrap();
    scene.fake.end_unit(&name, (1, 6, "exit-code"));
    scene.fake.connect().unwrap();
    assert_eq!(peer.read_to_end(LONG).unwrap().exit, Some(Exit::new(1, 6, "exit-code").unwrap()));
}

#[test]
fn a_session_outlives_a_restart_of_the_bus_and_is_referenced_again() {
    let mut scene = Scene::set();
    let (mut peer, name) = echoing(&scene);
    scene.bus.stop().unwrap();
    scene.fake.lose_references();
    peer.input(b"without a bus").unwrap();
    peer.output_until(b"without a bus", LONG).unwrap();
    scene.bus.resume().unwrap();
    scene.fake.connect().unwrap();
    scene.fake.wait("the unit to be referenced again", |state| (state.called("RefUnit", &name) > 0).then_some(()));
    scene.fake.end_unit(&name, (1, 9, "exit-code"));
    assert_eq!(peer.read_to_end(LONG).unwrap().exit, Some(Exit::new(1, 9, "exit-code").unwrap()));
    scene.wait_for_a_session();
}

#[test]
fn a_session_that_ended_while_the_bus_was_away_is_lost_and_never_a_success() {
    let mut scene = Scene::set();
    let (mut peer, name) = echoing(&scene);
    scene.bus.stop().unwrap();
    scene.fake.lose_references();
    scene.fake.end_unit(&name, (1, 3, "exit-code"));
    scene.bus.resume().unwrap();
    scene.fake.connect().unwrap();
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.exit, Some(Exit::lost()));
    scene.wait_for_a_session();
}

#[test]
fn a_stop_while_the_bus_is_away_is_carried_out_when_it_is_back() {
    let mut scene = Scene::set();
    let (mut peer, name) = echoing(&scene);
    scene.bus.stop().unwrap();
    scene.fake.lose_references();
    peer.stop().unwrap();
    std::thread::sleep(crate::scene::WHILE);
    scene.bus.resume().unwrap();
    scene.fake.connect().unwrap();
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.exit, Some(Exit::stopped()));
    assert!(transcript.stopped);
    scene.fake.with(|state| assert!(state.called("StopUnit", &name) > 0));
}

#[test]
fn without_a_bus_nobody_gets_in_and_the_supervisor_stays() {
    let mut scene = Scene::set();
    scene.bus.stop().unwrap();
    let mut peer = scene.peer();
    let _ = peer.start_in(scene.directory(), 60, &["/bin/true"]);
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.unit, None);
    assert!(scene.supervisor().is_running());
    scene.bus.resume().unwrap();
    scene.fake.connect().unwrap();
    scene.wait_for_a_session();
}

#[test]
fn output_during_a_restart_of_the_bus_is_whole() {
    let mut scene = Scene::set();
    let text: Vec<u8> = (0..200_000_u32).flat_map(|number| format!("{number}\n").into_bytes()).collect();
    scene.fake.with(|state| state.script.launcher = Launcher::shows(text.clone(), (1, 0, "success")));
    let mut peer = scene.asked();
    peer.started(LONG).unwrap();
    // Nothing is read yet, so the program is stuck in its output.
    scene.bus.stop().unwrap();
    scene.fake.lose_references();
    scene.bus.resume().unwrap();
    scene.fake.connect().unwrap();
    let transcript = peer.read_to_end(LONG).unwrap();
    assert_eq!(transcript.output.len(), text.len());
    let exit = transcript.exit.unwrap();
    assert!(exit == Exit::lost() || exit == Exit::new(1, 0, "success").unwrap(), "{exit}");
}

/// Another process that takes the manager's name.
fn impostor(scene: &Scene) -> Child {
    let mut process = Command::new(impostor_path())
        .arg(scene.bus.address())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It says so when it has the name.
    let mut line = String::new();
    let mut output = std::io::BufReader::new(process.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    assert_eq!(line, "has the name\n");
    process
}

#[test]
fn a_manager_that_is_replaced_by_another_process_is_not_believed() {
    let mut scene = Scene::set();
    let (mut running, _) = echoing(&scene);
    scene.fake.disconnect().unwrap();
    let mut impostor = impostor(&scene);

    let mut peer = scene.peer();
    let _ = peer.start_in(scene.directory(), 60, &["/bin/true"]);
    assert_eq!(peer.read_to_end(LONG).unwrap().unit, None);
    running.input(b"still here").unwrap();
    running.output_until(b"still here", LONG).unwrap();
    assert!(scene.supervisor().is_running());

    impostor.kill().unwrap();
    impostor.wait().unwrap();
    scene.fake.connect().unwrap();
    scene.wait_for_a_session();
}
