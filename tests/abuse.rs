//! A million inputs nobody would send, and ten thousand descriptors nobody asked for.
//!
//! The same numbers on every run; `OPENCODE_PTY_SEED` takes another way through them.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use opencode_pty::frame::{Kind, encode};
use support::connection_model::{
    Appetite, Ending, Outcome, Scenario, Send, What, check, open_descriptors, start_frame,
};
use support::decoders;
use support::random::Random;

/// Inputs for each decoder, and for the receiving side of a connection: a million together.
const DECODED: usize = 163_400;
const RECEIVED: usize = 20_000;
const _: () = assert!(DECODED * decoders::ALL.len() + RECEIVED >= 1_000_000);
const ABUSES: usize = 10_000;
const SEED: u64 = 0x4f50_5459;

/// Held while descriptors are counted, and while files are open.
static COUNTING: Mutex<()> = Mutex::new(());

/// The corpus's files of one folder; large ones are left to the replay.
fn corpus(folder: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(folder);
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).filter(|bytes| bytes.len() <= 400).collect()
}

#[test]
fn no_input_of_a_million_is_decoded_otherwise_than_the_specification_says() {
    let seed = Random::seed(SEED);
    let began = Instant::now();
    let mut random = Random::new(seed);
    let corpora = {
        let _alone = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
        decoders::ALL.map(|(name, _)| corpus(name))
    };
    for ((name, check), corpus) in decoders::ALL.into_iter().zip(corpora) {
        let mut accepted = 0;
        for _ in 0..DECODED {
            let input = if random.one_in(4) {
                random.bytes(64)
            } else {
                let mut input = random.choose(&corpus).clone();
                random.mutate(&mut input);
                input
            };
            accepted += usize::from(check(&input));
        }
        assert!(accepted > DECODED / 100, "{name}: {accepted} accepted: these inputs try nothing");
        println!("{name}: {DECODED} inputs, {accepted} accepted, seed {seed}, {:.1} s", began.elapsed().as_secs_f32());
    }
}

#[test]
fn no_stream_of_frames_is_received_otherwise_than_the_specification_says() {
    let _alone = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let seed = Random::seed(SEED);
    let mut random = Random::new(seed);
    let began = Instant::now();
    let start = start_frame(What::Directory, 60, &["/bin/sh", "-c", "é"]);
    let (mut sound, mut violated, mut refused) = (0, 0, 0);
    for _ in 0..RECEIVED {
        let mut stream = start.clone();
        for _ in 0..random.below(6) {
            let payload = random.bytes(300);
            let kind = if payload.is_empty() { Kind::Stop } else { Kind::Input };
            stream.extend(encode(kind, &payload).unwrap());
        }
        if random.one_in(4) {
            random.mutate(&mut stream);
        } else if random.one_in(2) {
            // Past the start frame, which most changes would spoil.
            let mut rest = stream.split_off(start.len());
            random.mutate(&mut rest);
            stream.extend(rest);
        }
        let mut sends = Vec::new();
        while !stream.is_empty() {
            let rest = stream.split_off(random.below(stream.len()) + 1);
            let descriptors = if sends.is_empty() { vec![What::Directory] } else { Vec::new() };
            sends.push(Send { bytes: stream, descriptors, settle: random.one_in(4) });
            stream = rest;
        }
        let ending = *random.choose(&[Ending::Close, Ending::HalfClose, Ending::Reset, Ending::Silence]);
        match check(Scenario { sends, closed_after: None, appetite: Appetite::Eager, ending }) {
            Outcome::Session(session) if session.violation => violated += 1,
            Outcome::Session(_) => sound += 1,
            _ => refused += 1,
        }
    }
    println!(
        "connection: {RECEIVED} streams, {sound} sound, {violated} with a violation, {refused} without a session, \
         seed {seed}, {:.1} s",
        began.elapsed().as_secs_f32()
    );
    assert!(sound.min(violated).min(refused) > RECEIVED / 100, "these streams try nothing");
}

/// How many descriptors come, of what kind, and where.
#[derive(Clone, Debug)]
struct Abuse {
    what: What,
    count: usize,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// With the start frame, sent as one.
    Start,
    /// With the first byte of a start frame in pieces.
    FirstByte,
    /// With a piece in the middle of a start frame.
    LaterPiece,
    /// One directory with the start frame, as it should be, and these with an input frame behind it.
    LaterFrame,
    /// The same, with the first byte of an input frame in pieces.
    FirstByteOfLaterFrame,
    /// The same, with the stop frame.
    StopFrame,
}

impl Place {
    const ALL: [Self; 6] = [
        Self::Start,
        Self::FirstByte,
        Self::LaterPiece,
        Self::LaterFrame,
        Self::FirstByteOfLaterFrame,
        Self::StopFrame,
    ];

    fn is_in_the_start(self) -> bool {
        matches!(self, Self::Start | Self::FirstByte | Self::LaterPiece)
    }
}

impl Abuse {
    fn scenario(&self, random: &mut Random) -> Scenario {
        let settle = random.one_in(2);
        let send = |bytes: &[u8], descriptors: &[What]| Send {
            bytes: bytes.to_vec(),
            descriptors: descriptors.to_vec(),
            settle,
        };
        // These descriptors with the byte at `at`, which is a send of its own.
        let stray = vec![self.what; self.count];
        let in_pieces = |bytes: &[u8], at: usize| {
            let (before, rest) = bytes.split_at(at);
            let (byte, behind) = rest.split_at(1);
            vec![send(before, &[]), send(byte, &stray), send(behind, &[])]
        };
        // A deleted directory is not refused for being another than the start names.
        let named = if self.what == What::DeletedDirectory { self.what } else { What::Directory };
        let start = start_frame(if self.place.is_in_the_start() { named } else { What::Directory }, 60, &["/bin/true"]);
        let input = encode(Kind::Input, b"typed").unwrap();
        let mut sends = match self.place {
            Place::Start => vec![send(&start, &stray)],
            Place::FirstByte => in_pieces(&start, 0),
            Place::LaterPiece => in_pieces(&start, 1 + random.below(start.len() - 1)),
            Place::LaterFrame | Place::FirstByteOfLaterFrame | Place::StopFrame => {
                vec![send(&start, &[What::Directory])]
            }
        };
        sends.extend(match self.place {
            Place::LaterFrame => vec![send(&input, &stray)],
            Place::FirstByteOfLaterFrame => in_pieces(&input, 0),
            Place::StopFrame => vec![send(&encode(Kind::Stop, &[]).unwrap(), &stray)],
            Place::Start | Place::FirstByte | Place::LaterPiece => vec![send(&input, &[])],
        });
        let ending = *random.choose(&[Ending::Close, Ending::HalfClose, Ending::Reset, Ending::Silence]);
        Scenario { sends, closed_after: None, appetite: Appetite::Eager, ending }
    }

    /// What has to come of it, said without the model.
    fn passes(&self) -> bool {
        let directory = matches!(self.what, What::Directory | What::DirectoryPath | What::DeletedDirectory);
        if self.place.is_in_the_start() { self.count == 1 && directory } else { self.count == 0 }
    }
}

#[test]
fn of_ten_thousand_abuses_only_exactly_one_directory_passes_and_no_descriptor_stays_open() {
    let _alone = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let seed = Random::seed(SEED);
    let mut random = Random::new(seed);
    let began = Instant::now();
    // Every combination in turn, and again with other cuts and endings, until there are enough.
    let combinations = (0..).flat_map(|round: usize| {
        // Great numbers take long, so they come in every eighth round.
        let counts: &[usize] = if round.is_multiple_of(8) { &[0, 1, 2, 64, 253] } else { &[0, 1, 2, 3] };
        Place::ALL.into_iter().flat_map(move |place| {
            What::ALL.into_iter().flat_map(move |what| counts.iter().map(move |&count| Abuse { what, count, place }))
        })
    });
    let (mut refused, mut passed, mut carried) = (0, 0, 0);
    // The harness opens what it keeps.
    check(Abuse { what: What::Directory, count: 1, place: Place::Start }.scenario(&mut random));
    let before = open_descriptors();
    for abuse in combinations {
        if refused == ABUSES {
            break;
        }
        let outcome = check(abuse.scenario(&mut random));
        assert_eq!(outcome.is_sound(), abuse.passes(), "{abuse:?}: {outcome:?}");
        carried += abuse.count;
        if abuse.passes() {
            passed += 1;
        } else {
            refused += 1;
        }
    }
    assert_eq!(open_descriptors(), before);
    println!(
        "{refused} abuses refused, {passed} others passed, {carried} descriptors carried, {before} open before and after, \
         seed {seed}, {:.1} s",
        began.elapsed().as_secs_f32()
    );
}
