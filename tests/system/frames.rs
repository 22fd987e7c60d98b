//! Whatever is wrong with what the client sends, it is refused by its code, everything it sent is closed, and the next
//! session works.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use opencode_pty::frame::message::{ErrorCode, Start, Words};
use opencode_pty::frame::{Kind, encode};
use opencode_pty::limits::{
    ARG_BYTES_MAX, ARGS_MAX, COMMAND_BYTES_MAX, DATA_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX, HANDSHAKE_TIME,
    MESSAGE_DESCRIPTORS_MAX, RUNTIME_SECONDS_MAX,
};
use support::peer::{Peer, Transcript, start_for};
use support::standin::Opening;

use crate::account::{HOME, WORKSPACE};
use crate::fixture::{Fixture, PLACES, RUNTIME, SOON, exited, wait_until};

/// A fixture that knows how many descriptors the supervisor has when it is idle.
struct Scene {
    fixture: Fixture,
    dir: OwnedFd,
    descriptors: usize,
}

impl Scene {
    fn new() -> Self {
        let fixture = Fixture::new();
        let dir = fixture.standin.open(WORKSPACE).unwrap();
        let descriptors = fixture.idle_descriptors();
        Self { fixture, dir, descriptors }
    }

    /// The payload of a start that is right in every respect.
    fn start(&self) -> Vec<u8> {
        self.start_of(&["true"])
    }

    /// The same with these words.
    fn start_of(&self, words: &[&str]) -> Vec<u8> {
        start_for(&self.dir, RUNTIME, words).unwrap().encode()
    }

    /// Sends this as a client's whole say and reads the answer.
    fn answer_to(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Transcript {
        let mut peer = self.fixture.standin.peer().unwrap();
        peer.send_raw(bytes, descriptors).unwrap();
        peer.read_until_closed(SOON).unwrap()
    }

    /// Fails unless there is no session but this error, nothing stays open, and the next session works.
    fn assert_refused(&self, what: &str, code: ErrorCode, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let transcript = self.answer_to(bytes, descriptors);
        assert_eq!(transcript.error_code(), Some(code), "{what}: {transcript:?}");
        assert_eq!(
            (transcript.frames, &transcript.unit, &transcript.exit),
            (1, &None, &None),
            "{what}: {transcript:?}"
        );
        let (_, message) = transcript.error.unwrap();
        assert!(!message.contains('/') && !message.contains('\n'), "{what}: it tells too much: {message}");
        self.assert_intact(what);
    }

    /// Fails unless the supervisor is as it was before, and works.
    fn assert_intact(&self, what: &str) {
        self.fixture.wait_for_descriptors(self.descriptors, what);
        assert_eq!(self.fixture.run_one_of_many(&["echo", "next"]).text(), "next\r\n", "after {what}");
    }
}

/// A frame of this type as it stands, right or wrong.
fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&b"OPTY"[..], &[1, kind, 0, 0], &len, payload].concat()
}

/// A right start frame with some of its bytes changed.
fn changed(payload: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut whole = frame(1, payload);
    whole[at..at + bytes.len()].copy_from_slice(bytes);
    whole
}

/// A start payload in parts, right or wrong.
fn payload(dir: &OwnedFd, runtime: u32, command_len: u16, arg_count: u16, rest: &[u8]) -> Vec<u8> {
    let stat = rustix::fs::fstat(dir).unwrap();
    [
        &stat.st_dev.to_be_bytes()[..],
        &stat.st_ino.to_be_bytes(),
        &runtime.to_be_bytes(),
        &command_len.to_be_bytes(),
        &arg_count.to_be_bytes(),
        rest,
    ]
    .concat()
}

// ---- the first frame -----------------------------------------------------------------------------------------

#[test]
fn a_header_that_is_wrong_is_refused() {
    let scene = Scene::new();
    let start = scene.start();
    let dir = [scene.dir.as_fd()];
    for (what, at, bytes) in [
        ("magic in lower case", 0, &b"opty"[..]),
        ("another magic", 0, b"GET "),
        ("version 0", 4, &[0]),
        ("version 2", 4, &[2]),
        ("type 0", 5, &[0]),
        ("type 9", 5, &[9]),
        ("type 255", 5, &[255]),
        ("first reserved byte", 6, &[1]),
        ("second reserved byte", 7, &[1]),
        ("a payload over the limit", 8, &(FRAME_PAYLOAD_BYTES_MAX + 1).to_be_bytes()[4..]),
        ("the longest length there is", 8, &[0xff; 4]),
        ("an empty start", 8, &[0; 4]),
        ("a start too short to be one", 8, &24_u32.to_be_bytes()),
    ] {
        scene.assert_refused(what, ErrorCode::BadFrame, &changed(&start, at, bytes), &dir);
    }
}

#[test]
fn a_first_frame_that_is_no_start_is_refused() {
    let scene = Scene::new();
    for (what, kind, payload) in [
        ("input", 2, &b"ls\n"[..]),
        ("empty input", 2, b""),
        ("output", 3, b"x"),
        ("exit", 4, &[1, 0, 0, 0, 0, 0, 0, 0, 7, b's', b'u', b'c', b'c', b'e', b's', b's']),
        ("error", 5, b"io: x"),
        ("started", 6, b"opencode-pty-0123456789abcdef0123456789abcdef.service"),
        ("stop", 7, b""),
        ("stopped", 8, b""),
    ] {
        scene.assert_refused(what, ErrorCode::BadFrame, &frame(kind, payload), &[]);
        scene.assert_refused(what, ErrorCode::BadFrame, &frame(kind, payload), &[scene.dir.as_fd()]);
    }
}

#[test]
fn a_start_whose_parts_are_wrong_is_refused() {
    let scene = Scene::new();
    let dir = &scene.dir;
    let part = |text: &[u8]| [&u16::try_from(text.len()).unwrap().to_be_bytes()[..], text].concat();
    let long_arg = vec![b'x'; ARG_BYTES_MAX + 1];
    let args_over = part(&vec![b'x'; ARG_BYTES_MAX]).repeat(4);
    let long_command = vec![b'x'; COMMAND_BYTES_MAX + 1];
    let with_args = |count: u16, args: &[u8]| payload(dir, RUNTIME, 4, count, &[b"true", args].concat());

    for (what, payload) in [
        ("an empty command", payload(dir, RUNTIME, 0, 1, &part(b"x"))),
        ("a command over the limit", payload(dir, RUNTIME, 4_097, 0, &long_command)),
        ("a command longer than the payload", payload(dir, RUNTIME, 5, 0, b"true")),
        ("a command shorter than the payload", payload(dir, RUNTIME, 3, 0, b"true")),
        ("NUL in the command", payload(dir, RUNTIME, 4, 0, b"tr\0e")),
        ("a command that is not UTF-8", payload(dir, RUNTIME, 4, 0, b"tr\xffe")),
        ("a command with half a character", payload(dir, RUNTIME, 4, 0, b"tru\xc3")),
        ("a runtime over the limit", payload(dir, RUNTIME_SECONDS_MAX + 1, 4, 0, b"true")),
        ("the longest runtime there is", payload(dir, u32::MAX, 4, 0, b"true")),
        ("an argument that is announced and missing", with_args(1, b"")),
        ("an argument that is there and not announced", with_args(0, &part(b"x"))),
        ("an argument longer than the payload", with_args(1, &[0, 2, b'x'])),
        ("half of an argument's length", with_args(1, &[0])),
        ("a byte too many", with_args(1, &[0, 1, b'x', b'y'])),
        ("an argument over the limit", with_args(1, &part(&long_arg))),
        ("arguments together over the limit", with_args(5, &[args_over, part(b"x")].concat())),
        ("an argument too many", with_args(129, &part(b"x").repeat(ARGS_MAX + 1))),
        ("as many arguments as can be said", with_args(u16::MAX, &part(b"x"))),
        ("NUL in an argument", with_args(1, &part(b"a\0b"))),
        ("an argument that is not UTF-8", with_args(2, &[part(b"fine"), part(b"\xf0\x9f\xa6")].concat())),
        ("an argument with a surrogate", with_args(1, &part(b"\xed\xa0\x80"))),
        ("an argument with an overlong letter", with_args(1, &part(b"\xc1\x81"))),
    ] {
        scene.assert_refused(what, ErrorCode::BadStart, &frame(1, &payload), &[dir.as_fd()]);
    }
}

#[test]
fn a_start_at_each_limit_is_accepted() {
    let scene = Scene::new();
    let arg = "x".repeat(ARG_BYTES_MAX);
    let words: Vec<String> = [vec!["true".to_owned()], vec![arg; 4], vec![String::new(); ARGS_MAX - 4]].concat();
    let found = rustix::fs::fstat(&scene.dir).unwrap();
    let run = |runtime| {
        let start = Start::new(found.st_dev, found.st_ino, runtime, Words::new(words.clone()).unwrap()).unwrap();
        let mut peer = scene.fixture.standin.peer().unwrap();
        peer.send_start(&start, &scene.dir).unwrap();
        peer.read_to_end(SOON).unwrap()
    };
    for runtime in [0, RUNTIME_SECONDS_MAX] {
        let transcript = run(runtime);
        assert_eq!(transcript.exit, Some(exited(0)), "runtime {runtime}: {transcript:?}");
    }
    // A second is a runtime, too. On a busy machine the start alone may take it, but not each time.
    wait_until("a session of one second to be in time", SOON, || {
        let transcript = run(1);
        let over = transcript.error_code() == Some(ErrorCode::StartFailed)
            || transcript.exit.as_ref().is_some_and(|exit| exit.result() == "timeout");
        assert!(over || transcript.exit == Some(exited(0)), "{transcript:?}");
        if over { Err(format!("{transcript:?}")) } else { Ok(()) }
    });
    scene.assert_intact("starts at the limits");
}

// ---- descriptors ---------------------------------------------------------------------------------------------

#[test]
fn a_start_without_its_one_descriptor_or_with_more_is_refused() {
    let scene = Scene::new();
    let start = frame(1, &scene.start());
    let dir = scene.dir.as_fd();
    scene.assert_refused("no descriptor", ErrorCode::BadStart, &start, &[]);
    for count in [2, 3, 100, MESSAGE_DESCRIPTORS_MAX] {
        scene.assert_refused(&format!("{count} descriptors"), ErrorCode::BadFrame, &start, &vec![dir; count]);
    }
}

#[test]
fn a_second_descriptor_with_a_later_piece_of_the_start_is_refused() {
    let scene = Scene::new();
    let start = frame(1, &scene.start());
    for cut in [1, 12, 13, start.len() - 1] {
        let mut peer = scene.fixture.standin.peer().unwrap();
        peer.send_raw(&start[..cut], &[scene.dir.as_fd()]).unwrap();
        // It may have been refused by then, if the two were received as one.
        peer.send_raw(&start[cut..], &[scene.dir.as_fd()]).unwrap();
        let transcript = peer.read_until_closed(SOON).unwrap();
        assert_eq!(transcript.error_code(), Some(ErrorCode::BadFrame), "cut at {cut}: {transcript:?}");
        drop(peer);
        scene.assert_intact(&format!("a second descriptor, cut at {cut}"));
    }
}

#[test]
fn a_start_in_pieces_is_accepted() {
    let scene = Scene::new();
    let start = frame(1, &scene.start_of(&["echo", "in pieces"]));
    for size in [1, 5, 12, 13] {
        let mut peer = scene.fixture.standin.peer().unwrap();
        let mut descriptors = vec![scene.dir.as_fd()];
        for piece in start.chunks(size) {
            peer.send_raw(piece, &descriptors).unwrap();
            descriptors.clear();
        }
        let transcript = peer.read_to_end(SOON).unwrap();
        assert_eq!((transcript.text().as_str(), transcript.exit), ("in pieces\r\n", Some(exited(0))), "{size}");
    }
    scene.assert_intact("starts in pieces");
}

#[test]
fn a_descriptor_that_is_no_directory_is_refused() {
    let scene = Scene::new();
    let fixture = &scene.fixture;
    let scratch = fixture.scratch();
    fixture.write(&format!("{scratch}/file"), 0o644, "a file\n");
    fixture.root(&format!("mkfifo {scratch}/fifo && ln -s {WORKSPACE} {scratch}/link"));
    let mut things: Vec<(String, OwnedFd)> = ["file", "fifo", "link"]
        .map(|name| (name.to_owned(), fixture.standin.open_as(format!("{scratch}/{name}"), Opening::AnyKind).unwrap()))
        .into();
    let file = File::open(fixture.host.path(format!("{scratch}/file"))).unwrap();
    things.push(("a file that is open for reading".into(), file.into()));
    things.push(("/dev/null".into(), File::open(fixture.host.path("/dev/null")).unwrap().into()));
    things.push(("a socket".into(), std::os::unix::net::UnixStream::pair().unwrap().0.into()));

    for (what, descriptor) in &things {
        // With its own device and inode, and with the directory's.
        for of in [descriptor, &scene.dir] {
            let start = start_for(of, RUNTIME, &["true"]).unwrap().encode();
            scene.assert_refused(what, ErrorCode::BadCwd, &frame(1, &start), &[descriptor.as_fd()]);
        }
    }
}

#[test]
fn a_directory_that_is_not_the_one_in_the_frame_is_refused() {
    let scene = Scene::new();
    let found = rustix::fs::fstat(&scene.dir).unwrap();
    let words = || Words::new(vec!["true".to_owned()]).unwrap();
    for (what, dev, ino) in [
        ("another inode", found.st_dev, found.st_ino + 1),
        ("another device", found.st_dev + 1, found.st_ino),
        ("nothing", 0, 0),
        ("everything", u64::MAX, u64::MAX),
    ] {
        let start = Start::new(dev, ino, RUNTIME, words()).unwrap().encode();
        scene.assert_refused(what, ErrorCode::BadCwd, &frame(1, &start), &[scene.dir.as_fd()]);
    }
    let other = scene.fixture.standin.open(HOME).unwrap();
    scene.assert_refused("another directory", ErrorCode::BadCwd, &frame(1, &scene.start()), &[other.as_fd()]);
}

// ---- what comes behind a start ---------------------------------------------------------------------------------

/// What a client may not send once its start frame is out.
fn later_frames(scene: &Scene) -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("a second start", frame(1, &scene.start())),
        ("empty input", frame(2, b"")),
        ("input over the limit", frame(2, &vec![b'x'; DATA_BYTES_MAX + 1])),
        ("output", frame(3, b"x")),
        ("exit", frame(4, &opencode_pty::frame::message::Exit::stopped().encode())),
        ("error", frame(5, b"io: x")),
        ("started", frame(6, b"opencode-pty-0123456789abcdef0123456789abcdef.service")),
        ("a stop with a payload", frame(7, b"now")),
        ("stopped", frame(8, b"")),
        ("type 9", frame(9, b"x")),
        ("garbage", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("version 2", changed(b"x", 4, &[2])),
        ("a reserved byte", changed(b"x", 7, &[1])),
    ]
}

#[test]
fn a_frame_that_may_not_come_ends_a_running_session() {
    let scene = Scene::new();
    for (what, bytes) in later_frames(&scene) {
        let mut session = scene.fixture.start(&["sleep", "1000"]);
        session.input(b"this was fine\n").unwrap();
        session.send_raw(&bytes, &[]).unwrap();
        let transcript = session.peer.read_until_closed(SOON).unwrap();
        assert_eq!(transcript.error_code(), Some(ErrorCode::BadFrame), "{what}: {transcript:?}");
        assert_eq!(transcript.exit, None, "{what}: {transcript:?}");
        scene.fixture.assert_gone(&session.unit);
        drop(session);
        scene.assert_intact(what);
    }
}

#[test]
fn a_frame_that_may_not_come_ends_a_session_that_is_being_started() {
    let scene = Scene::new();
    let scratch = scene.fixture.scratch();
    let dir = scene.fixture.standin.open(&scratch).unwrap();
    for (what, bytes) in later_frames(&scene) {
        let mut start = frame(1, &start_for(&dir, RUNTIME, &["touch", "it-ran"]).unwrap().encode());
        start.extend(bytes);
        let mut peer = scene.fixture.standin.peer().unwrap();
        peer.send_raw(&start, &[dir.as_fd()]).unwrap();
        let transcript = peer.read_until_closed(SOON).unwrap();
        assert_eq!(transcript.error_code(), Some(ErrorCode::BadFrame), "{what}: {transcript:?}");
        assert_eq!((&transcript.unit, &transcript.exit), (&None, &None), "{what}: {transcript:?}");
        drop(peer);
        scene.assert_intact(what);
        assert_eq!(scene.fixture.root(&format!("ls {scratch}")), "", "{what}: the command ran");
    }
}

#[test]
fn a_descriptor_with_a_later_frame_ends_the_session() {
    let scene = Scene::new();
    for (what, bytes) in [
        ("input", encode(Kind::Input, b"x").unwrap()),
        ("stop", encode(Kind::Stop, b"").unwrap()),
        ("half a header", b"OPTY".to_vec()),
    ] {
        for count in [1, MESSAGE_DESCRIPTORS_MAX] {
            let mut session = scene.fixture.start(&["sleep", "1000"]);
            session.send_raw(&bytes, &vec![scene.dir.as_fd(); count]).unwrap();
            let transcript = session.peer.read_until_closed(SOON).unwrap();
            assert_eq!(transcript.error_code(), Some(ErrorCode::BadFrame), "{what}, {count}: {transcript:?}");
            scene.fixture.assert_gone(&session.unit);
            drop(session);
            scene.assert_intact(what);
        }
    }
}

// ---- what is not complete --------------------------------------------------------------------------------------

#[test]
fn a_client_that_goes_before_its_start_is_complete_leaves_nothing() {
    let scene = Scene::new();
    let start = frame(1, &scene.start());
    for cut in [0, 1, 11, 12, 13, start.len() - 1] {
        let mut peer = scene.fixture.standin.peer().unwrap();
        if cut > 0 {
            peer.send_raw(&start[..cut], &[scene.dir.as_fd()]).unwrap();
        }
        peer.half_close().unwrap();
        let transcript = peer.read_until_closed(SOON).unwrap();
        assert_eq!(transcript.frames, 0, "cut at {cut}: {transcript:?}");
        drop(peer);
        // And without a word.
        let peer = scene.fixture.standin.peer().unwrap();
        if cut > 0 {
            peer.send_raw(&start[..cut], &[scene.dir.as_fd()]).unwrap();
        }
        drop(peer);
        scene.assert_intact(&format!("a start cut at {cut}"));
    }
}

#[test]
fn starts_that_are_not_complete_in_time_are_refused_and_give_their_places_back() {
    let scene = Scene::new();
    let start = frame(1, &scene.start());
    let incomplete = || -> Vec<Peer> {
        let one = |index: usize| {
            let peer = scene.fixture.standin.peer().unwrap();
            if index > 0 {
                peer.send_raw(&start[..(2 * index).min(start.len() - 1)], &[scene.dir.as_fd()]).unwrap();
            }
            peer
        };
        (0..PLACES).map(one).collect()
    };
    // Every place is taken by them, for five seconds. On a machine that stands still for as long, by new ones.
    let mut peers: Vec<Peer> = Vec::new();
    let mut begun: Option<Instant> = None;
    wait_until("every place to be taken", SOON, || {
        if begun.is_none_or(|begun| begun.elapsed() >= HANDSHAKE_TIME) {
            peers.clear();
            scene.fixture.wait_for_descriptors(scene.descriptors, "those that were too early");
            (begun, peers) = (Some(Instant::now()), incomplete());
        }
        let mut peer = scene.fixture.standin.peer().unwrap();
        peer.send_raw(&start, &[scene.dir.as_fd()]).unwrap();
        let transcript = peer.read_to_end(SOON).unwrap();
        if transcript.error_code() == Some(ErrorCode::Busy) { Ok(()) } else { Err(format!("{transcript:?}")) }
    });
    for peer in &mut peers {
        let transcript = peer.read_until_closed(SOON).unwrap();
        assert_eq!(transcript.error_code(), Some(ErrorCode::Timeout), "{transcript:?}");
    }
    drop(peers);
    scene.assert_intact("starts that were not complete in time");
}
