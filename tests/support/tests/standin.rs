//! The stand-in and the peer, against a listener of the test's own: what they give a test is what they promise.
#![allow(clippy::unwrap_used)]

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use opencode_pty::frame::message::{ErrorCode, Exit, encode_error};
use opencode_pty::frame::{Kind, encode};
use support::peer::{Frame, Peer, PeerError};
use support::programs;
use support::standin::{Probed, Standin, StartError};

const SOON: Duration = Duration::from_secs(30);

/// A stand-in whose supervisor is `listener` and whose client is a shell script.
struct Scene {
    dir: PathBuf,
    process: Child,
    standin: Standin,
    listener: UnixListener,
}

impl Scene {
    fn set(name: &str, client: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("opencode-standin-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (control, supervisor, script) = (dir.join("control.sock"), dir.join("supervisor.sock"), dir.join("client"));
        programs::write(&script, &format!("#!/bin/sh\n{client}\n"));
        let listener = UnixListener::bind(&supervisor).unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_opencode-standin"))
            .arg("serve")
            .args(["--control".as_ref(), control.as_os_str(), "--supervisor".as_ref(), supervisor.as_os_str()])
            .args(["--client".as_ref(), script.as_os_str()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let standin = Standin::connect_within(control, SOON).unwrap();
        Self { dir, process, standin, listener }
    }

    fn accept(&self) -> Peer {
        Peer::new(self.listener.accept().unwrap().0.into())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        std::fs::remove_dir_all(&self.dir).unwrap();
    }
}

#[test]
fn a_peer_of_the_standin_stays_the_standins_and_closes_with_the_tests_copy() {
    let scene = Scene::set("peer", "exit 0");
    let peer = scene.standin.peer().unwrap();
    let mut supervisor = scene.accept();

    let credentials = rustix::net::sockopt::socket_peercred(supervisor.socket()).unwrap();
    assert_eq!(credentials.pid.as_raw_nonzero().get().cast_unsigned(), scene.process.id());
    assert_eq!(scene.standin.pid(), scene.process.id());
    drop(peer);
    assert_eq!(supervisor.next_frame(SOON).unwrap(), Frame::Closed);
}

#[test]
fn the_client_gets_the_socket_at_3_the_directory_at_4_and_nothing_else() {
    let scene = Scene::set(
        "client",
        "[ -S /dev/fd/3 ] && [ -d /dev/fd/4 ] && [ ! -e /dev/fd/5 ] || exit 9\necho \"$@\" >&2; exit 3",
    );
    let StartError::Client { finished, .. } = scene.standin.start("/tmp", 60, &["echo", ""]).unwrap_err() else {
        panic!("the stand-in itself failed");
    };
    assert_eq!(finished.status.code(), Some(3));
    assert_eq!(finished.complaint(), "60 aZWNobw a\n");
}

#[test]
fn a_directory_is_opened_by_the_standin_and_a_missing_one_is_an_error() {
    let scene = Scene::set("open", "exit 0");
    let dir = scene.standin.open(&scene.dir).unwrap();
    assert_eq!(rustix::fs::fstat(dir.as_fd()).unwrap().st_ino, std::fs::metadata(&scene.dir).unwrap().ino());
    assert!(scene.standin.open(scene.dir.join("missing")).is_err());
    assert!(scene.standin.open(scene.dir.join("client")).is_err(), "a file is no directory");
}

#[test]
fn a_child_keeps_the_socket_it_was_given() {
    let scene = Scene::set("hold", "exit 0");
    let (peer, child) = scene.standin.peer_held_by_child().unwrap();
    let mut supervisor = scene.accept();
    drop(peer);
    let waited = supervisor.next_frame(Duration::from_millis(300));
    assert!(matches!(waited, Err(PeerError::TimedOut { .. })), "{waited:?}");
    let child = rustix::process::Pid::from_raw(child.cast_signed()).unwrap();
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
    assert_eq!(supervisor.next_frame(SOON).unwrap(), Frame::Closed);
}

#[test]
fn a_child_reports_its_status_its_output_and_what_it_saw_of_the_supervisor() {
    let scene = Scene::set("spawn", "exit 0");
    let finished = scene.standin.spawn(&["/bin/sh", "-c", "echo out; echo err >&2; exit 7"]).unwrap();
    assert_eq!(
        (finished.status.code(), finished.text(), finished.complaint()),
        (Some(7), "out\n".into(), "err\n".into())
    );

    std::thread::scope(|scope| {
        let probe = scope.spawn(|| scene.standin.probe_from_child().unwrap());
        drop(scene.accept());
        assert_eq!(probe.join().unwrap(), Probed::Closed);
        let probe = scope.spawn(|| scene.standin.probe_from_child().unwrap());
        scene.accept().send_raw(b"no\n", &[]).unwrap();
        assert_eq!(probe.join().unwrap(), Probed::Answered("no\\n".into()));
    });
}

const UNIT: &str = "opencode-pty-0123456789abcdef0123456789abcdef.service";

/// A peer, and the other end's frames already sent and the connection closed.
fn peer_that_got(frames: &[(Kind, &[u8])], stop: bool) -> Peer {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let (peer, supervisor) = (Peer::new(ours.into()), Peer::new(theirs.into()));
    if stop {
        peer.stop().unwrap();
    }
    for (kind, payload) in frames {
        supervisor.send_raw(&encode(*kind, payload).unwrap(), &[]).unwrap();
    }
    supervisor.half_close().unwrap();
    peer
}

#[test]
fn a_transcript_has_everything_in_its_place() {
    let exit = Exit::new(1, 7, "exit-code").unwrap();
    let mut peer = peer_that_got(
        &[
            (Kind::Started, UNIT.as_bytes()),
            (Kind::Output, b"a"),
            (Kind::Output, b"b"),
            (Kind::Exit, &exit.encode()),
            (Kind::Stopped, b""),
        ],
        true,
    );
    let transcript = peer.read_to_end(SOON).unwrap();
    assert_eq!(transcript.unit.as_deref(), Some(UNIT));
    assert_eq!((transcript.text().as_str(), transcript.exit, transcript.stopped), ("ab", Some(exit), true));
    assert_eq!((transcript.frames, transcript.error), (5, None));
}

#[test]
fn frames_out_of_order_are_refused() {
    let exit = Exit::new(1, 0, "success").unwrap().encode();
    let error = encode_error(ErrorCode::Io, "x");
    let started = (Kind::Started, UNIT.as_bytes());
    for (what, frames) in [
        ("output first", vec![(Kind::Output, b"a".as_slice())]),
        ("exit first", vec![(Kind::Exit, &exit)]),
        ("started twice", vec![started, started]),
        ("output after exit", vec![started, (Kind::Exit, &exit), (Kind::Output, b"a")]),
        ("two terminal frames", vec![started, (Kind::Exit, &exit), (Kind::Error, &error)]),
        ("something after error", vec![(Kind::Error, &error), started]),
        ("stopped without stop", vec![started, (Kind::Exit, &exit), (Kind::Stopped, b"")]),
        ("input", vec![started, (Kind::Input, b"a")]),
        ("another name", vec![(Kind::Started, b"opencode-pty-x.service")]),
    ] {
        let read = peer_that_got(&frames, false).read_to_end(SOON);
        assert!(matches!(read, Err(PeerError::Order { .. } | PeerError::Malformed { .. })), "{what}: {read:?}");
    }
}
