//! Bytes and descriptors that are not what they should be: refused, closed, and the next session works.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use opencode_pty::frame::message::{ErrorCode, Start};
use opencode_pty::frame::{Kind, encode};
use opencode_pty::limits::{DATA_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use support::peer::start_for;

use crate::scene::{LONG, Scene, WHILE};

/// A header with these fields, whatever they are.
fn header(magic: [u8; 4], version: u8, kind: u8, reserved: [u8; 2], len: usize) -> Vec<u8> {
    let mut bytes = magic.to_vec();
    bytes.extend([version, kind]);
    bytes.extend(reserved);
    bytes.extend(u32::try_from(len).unwrap().to_be_bytes());
    bytes
}

/// A frame with any payload, whether its kind may have it or not.
fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = header(*b"OPTY", 1, kind, [0, 0], payload.len());
    bytes.extend(payload);
    bytes
}

/// A start payload from raw parts.
fn payload(start: &Start, runtime: u32, command: &[u8], args: &[&[u8]]) -> Vec<u8> {
    let length = |len: usize| u16::try_from(len).unwrap().to_be_bytes();
    let mut bytes = start.dev().to_be_bytes().to_vec();
    bytes.extend(start.ino().to_be_bytes());
    bytes.extend(runtime.to_be_bytes());
    bytes.extend(length(command.len()));
    bytes.extend(length(args.len()));
    bytes.extend(command);
    for arg in args {
        bytes.extend(length(arg.len()));
        bytes.extend(*arg);
    }
    bytes
}

/// What is sent first instead of a start frame, and the word it gets.
struct Case<'a> {
    what: &'static str,
    bytes: Vec<u8>,
    descriptors: Vec<BorrowedFd<'a>>,
    code: ErrorCode,
}

/// Sends each case on a connection of its own; nothing may be started, and nothing may stay open.
fn refuse_all(scene: &Scene, cases: Vec<Case<'_>>) {
    scene.check_that_a_session_works();
    scene.fake.wait_until_empty();
    scene.fake.with(|state| state.calls.clear());
    for Case { what, bytes, descriptors, code } in cases {
        let mut peer = scene.peer();
        peer.send_raw(&bytes, &descriptors).unwrap();
        let transcript = peer.read_to_end(LONG).unwrap();
        assert_eq!(transcript.error_code(), Some(code), "{what}: {transcript:?}");
        assert_eq!(transcript.frames, 1, "{what}: {transcript:?}");
        drop(peer);
        scene.assert_idle(what);
        scene.fake.with(|state| assert_eq!(state.called("StartTransientUnit", ""), 0, "{what}"));
    }
    scene.check_that_a_session_works();
}

#[test]
fn a_header_that_is_not_a_start_frames_is_refused() {
    let scene = Scene::set();
    let directory = scene.directory();
    let start = start_for(&directory, 60, &["/bin/true"]).unwrap();
    let body = start.encode();
    let whole = |magic, version, kind, reserved| {
        let mut bytes = header(magic, version, kind, reserved, body.len());
        bytes.extend(&body);
        bytes
    };
    let mut cases = vec![
        ("lower-case magic", whole(*b"opty", 1, 1, [0, 0])),
        ("another program's bytes", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("version 0", whole(*b"OPTY", 0, 1, [0, 0])),
        ("version 2", whole(*b"OPTY", 2, 1, [0, 0])),
        ("first reserved byte", whole(*b"OPTY", 1, 1, [1, 0])),
        ("second reserved byte", whole(*b"OPTY", 1, 1, [0, 1])),
        ("type 0", whole(*b"OPTY", 1, 0, [0, 0])),
        ("type 9", whole(*b"OPTY", 1, 9, [0, 0])),
        ("type 255", whole(*b"OPTY", 1, 255, [0, 0])),
        ("input first", frame(2, b"ls\n")),
        ("output first", frame(3, b"hi")),
        ("exit first", frame(4, b"\x01\0\0\0\0\0\0\0\x07success")),
        ("error first", frame(5, b"io: x")),
        ("started first", frame(6, b"opencode-pty-00000000000000000000000000000000.service")),
        ("stop first", frame(7, b"")),
        ("stopped first", frame(8, b"")),
        ("a length over the limit", header(*b"OPTY", 1, 1, [0, 0], FRAME_PAYLOAD_BYTES_MAX + 1)),
        ("a length of 4 GiB", header(*b"OPTY", 1, 1, [0, 0], u32::MAX as usize)),
        ("no payload at all", header(*b"OPTY", 1, 1, [0, 0], 0)),
    ];
    let cases = cases.drain(..).map(|(what, bytes)| Case {
        what,
        bytes,
        descriptors: vec![directory.as_fd()],
        code: ErrorCode::BadFrame,
    });
    refuse_all(&scene, cases.collect());
}

#[test]
fn a_start_payload_that_breaks_a_rule_is_refused() {
    let scene = Scene::set();
    let directory = scene.directory();
    let start = start_for(&directory, 60, &["/bin/true"]).unwrap();
    let good = payload(&start, 60, b"/bin/echo", &[b"a"]);
    let mut longer = good.clone();
    longer.push(0);
    let mut miscounted = good.clone();
    *miscounted.get_mut(23).unwrap() = 2;
    let large = vec![b'x'; 16_384];
    let cases = vec![
        ("a runtime of 3601 s", payload(&start, 3_601, b"/bin/true", &[])),
        ("an empty command", payload(&start, 60, b"", &[b"a"])),
        ("a command of 4097 bytes", payload(&start, 60, &[b'c'; 4_097], &[])),
        ("129 arguments", payload(&start, 60, b"c", &[b"".as_slice(); 129])),
        ("an argument of 16385 bytes", payload(&start, 60, b"c", &[&[b'x'; 16_385]])),
        ("arguments of 65537 bytes", payload(&start, 60, b"c", &[&large, &large, &large, &large, b"x"])),
        ("NUL in the command", payload(&start, 60, b"/bin/\0true", &[])),
        ("NUL in an argument", payload(&start, 60, b"/bin/true", &[b"a\0"])),
        ("malformed UTF-8 in the command", payload(&start, 60, b"/bin/\xff", &[])),
        ("malformed UTF-8 in an argument", payload(&start, 60, b"/bin/true", &[b"\xc0\xaf"])),
        ("one byte more than the parts", longer),
        ("one argument fewer than counted", miscounted),
    ];
    let cases = cases.into_iter().map(|(what, payload)| Case {
        what,
        bytes: frame(1, &payload),
        descriptors: vec![directory.as_fd()],
        code: ErrorCode::BadStart,
    });
    refuse_all(&scene, cases.collect());
}

#[test]
fn a_start_without_exactly_its_one_directory_is_refused() {
    let scene = Scene::set();
    let directory = scene.directory();
    let start = start_for(&directory, 60, &["/bin/true"]).unwrap();
    let bytes = frame(1, &start.encode());
    let file: OwnedFd = File::open("/dev/null").unwrap().into();
    let file_start = frame(1, &start_for(&file, 60, &["/bin/true"]).unwrap().encode());
    let tmp: OwnedFd = File::open("/tmp").unwrap().into();
    let (pipe, _writer) = std::io::pipe().unwrap();
    let pipe = OwnedFd::from(pipe);
    let elsewhere = |dev: u64, ino: u64| {
        let words = start.words().clone();
        frame(1, &Start::new(dev, ino, 60, words).unwrap().encode())
    };
    let dir = directory.as_fd();
    let case = |what, bytes: &[u8], descriptors, code| Case { what, bytes: bytes.to_vec(), descriptors, code };
    refuse_all(
        &scene,
        vec![
            case("two descriptors", &bytes, vec![dir, dir], ErrorCode::BadFrame),
            case("three descriptors", &bytes, vec![dir, dir, dir], ErrorCode::BadFrame),
            case("253 descriptors", &bytes, vec![dir; 253], ErrorCode::BadFrame),
            case("no descriptor", &bytes, vec![], ErrorCode::BadStart),
            case("a file", &bytes, vec![file.as_fd()], ErrorCode::BadCwd),
            case("a file, truthfully", &file_start, vec![file.as_fd()], ErrorCode::BadCwd),
            case("a pipe", &bytes, vec![pipe.as_fd()], ErrorCode::BadCwd),
            case("another directory", &bytes, vec![tmp.as_fd()], ErrorCode::BadCwd),
            case("another inode", &elsewhere(start.dev(), start.ino() + 1), vec![dir], ErrorCode::BadCwd),
            case("another device", &elsewhere(start.dev() + 1, start.ino()), vec![dir], ErrorCode::BadCwd),
        ],
    );
}

#[test]
fn a_running_session_ends_at_the_first_byte_that_is_wrong() {
    let scene = Scene::set();
    scene.check_that_a_session_works();
    scene.fake.wait_until_empty();
    let directory = scene.directory();
    let dir = directory.as_fd();
    let start = start_for(&directory, 60, &["/bin/true"]).unwrap();
    let input = frame(2, b"ls\n");
    let cases: Vec<(&str, Vec<u8>, Vec<BorrowedFd<'_>>)> = vec![
        ("a second start", frame(1, &start.encode()), vec![]),
        ("a second start with a directory", frame(1, &start.encode()), vec![dir]),
        ("an output frame", frame(3, b"x"), vec![]),
        ("an exit frame", frame(4, b"\x01\0\0\0\0\0\0\0\x07success"), vec![]),
        ("an error frame", frame(5, b"io: x"), vec![]),
        ("a started frame", frame(6, b"x"), vec![]),
        ("a stopped frame", frame(8, b""), vec![]),
        ("type 9", frame(9, b""), vec![]),
        ("an empty input", frame(2, b""), vec![]),
        ("an input over the limit", frame(2, &vec![b'x'; DATA_BYTES_MAX + 1]), vec![]),
        ("a stop with a payload", frame(7, b"x"), vec![]),
        ("no magic", b"xxxxxxxxxxxx".to_vec(), vec![]),
        ("version 2", header(*b"OPTY", 2, 2, [0, 0], 1), vec![]),
        ("a reserved byte", header(*b"OPTY", 1, 2, [0, 9], 1), vec![]),
        ("a descriptor with input", input.clone(), vec![dir]),
        ("a descriptor with a stop", frame(7, b""), vec![dir]),
        ("253 descriptors with input", input.clone(), vec![dir; 253]),
        ("a descriptor with half a header", input.get(..5).unwrap().to_vec(), vec![dir]),
    ];
    for (what, bytes, descriptors) in cases {
        scene.fake.with(|state| {
            state.calls.clear();
            state.units.clear();
        });
        let (mut peer, name) = scene.session();
        peer.send_raw(&bytes, &descriptors).unwrap();
        let transcript = peer.read_to_end(LONG).unwrap();
        assert_eq!(transcript.error_code(), Some(ErrorCode::BadFrame), "{what}: {transcript:?}");
        assert_eq!(transcript.exit, None, "{what}");
        drop(peer);
        scene.fake.wait_until_empty();
        scene.fake.with(|state| assert!(state.called("StopUnit", &name) > 0, "{what}: {:#?}", state.calls));
        scene.assert_idle(what);
    }
    scene.check_that_a_session_works();
}

#[test]
fn a_start_frame_may_come_in_any_pieces_with_the_descriptor_at_the_first() {
    let scene = Scene::set();
    let directory = scene.directory();
    let start = start_for(&directory, 60, &["/bin/echo", "one", "two"]).unwrap();
    let bytes = encode(Kind::Start, &start.encode()).unwrap();
    for size in [1, 5, 11, 12, 13, 40] {
        let mut peer = scene.peer();
        let mut descriptors = vec![directory.as_fd()];
        for piece in bytes.chunks(size) {
            peer.send_raw(piece, &descriptors).unwrap();
            descriptors.clear();
        }
        let name = peer.started(LONG).unwrap();
        scene.fake.with(|state| {
            let handed = format!("{:?}", state.units[&name].handed);
            assert!(handed.contains("\"two\""), "pieces of {size}: {handed}");
        });
    }
}

#[test]
fn the_largest_start_there_can_be_arrives_whole() {
    let scene = Scene::set();
    let large = "x".repeat(16_384);
    let command = "c".repeat(4_096);
    let mut words = vec![command.as_str()];
    words.extend([large.as_str(); 4]);
    words.extend([""; 124]);
    let mut peer = scene.standin.start(scene.path("work"), 0, &words).unwrap();
    let name = peer.started(LONG).unwrap();
    scene.fake.with(|state| {
        let support::fake_manager::Handed::Start(start) = &state.units[&name].handed else { panic!("no start") };
        assert_eq!(start.words().as_slice(), words);
        assert_eq!(start.runtime_seconds(), 3_600);
    });
}

#[test]
fn input_in_any_pieces_and_at_the_limit_arrives_as_it_was() {
    let scene = Scene::set();
    let (mut peer, _) = scene.session();
    let text: Vec<u8> = (0..DATA_BYTES_MAX).map(|index| b"0123456789abcdef"[index % 16]).collect();
    let bytes = frame(2, &text);
    for piece in bytes.chunks(4_099) {
        peer.send_raw(piece, &[]).unwrap();
    }
    for byte in frame(2, b"the end") {
        peer.send_raw(&[byte], &[]).unwrap();
    }
    let output = peer.output_until(b"the end", LONG).unwrap();
    assert_eq!(output.len(), text.len() + 7);
    assert!(output.starts_with(&text));
}

/// Takes every free place in the supervisor's descriptor table away, and gives them back when dropped.
struct FullTable(Pid, Rlimit);

impl FullTable {
    fn of(scene: &mut Scene) -> Self {
        let pid = scene.supervisor().pid();
        let mut taken: Vec<u64> = std::fs::read_dir(format!("/proc/{pid}/fd"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
            .collect();
        taken.sort_unstable();
        let free =
            (0..).zip(&taken).find(|(number, taken)| number != *taken).map_or(taken.len() as u64, |(free, _)| free);
        let pid = Pid::from_raw(pid.cast_signed()).unwrap();
        let usual = prlimit(Some(pid), Resource::Nofile, Rlimit { current: Some(free), ..getrlimit(Resource::Nofile) });
        Self(pid, usual.unwrap())
    }
}

impl Drop for FullTable {
    fn drop(&mut self) {
        prlimit(Some(self.0), Resource::Nofile, self.1).unwrap();
    }
}

#[test]
fn a_descriptor_lost_to_a_full_table_is_refused_and_everything_works_again_afterwards() {
    let mut scene = Scene::set();
    let directory = scene.directory();

    let mut starting = scene.peer();
    scene.fake.wait("the peer to be looked up", |state| (state.called("GetUnitByPIDFD", "") > 0).then_some(()));
    std::thread::sleep(WHILE);
    let full = FullTable::of(&mut scene);
    starting.start_in(&directory, 60, &["/bin/true"]).unwrap();
    let transcript = starting.read_to_end(LONG).unwrap();
    assert_eq!(transcript.error_code(), Some(ErrorCode::BadFrame), "{transcript:?}");
    drop((full, starting));
    scene.assert_idle("a start whose directory was lost");

    let (mut running, name) = scene.session();
    scene.assert_idle_but_for(1, "a start");
    let full = FullTable::of(&mut scene);
    running.send_raw(&frame(2, b"ls"), &[directory.as_fd()]).unwrap();
    let transcript = running.read_to_end(LONG).unwrap();
    assert_eq!(transcript.error_code(), Some(ErrorCode::BadFrame), "{transcript:?}");
    scene.fake.with(|state| assert!(state.called("StopUnit", &name) > 0));
    drop((full, running));
    scene.assert_idle("a session whose stray descriptor was lost");
    scene.check_that_a_session_works();
}
