//! The supervisor's receiving side, where a program of its own is needed: descriptors are counted, and their limit is a
//! whole process's.
//!
//! A file of `tests/fuzz/corpus/connection` is a scenario (`support::connection_model` says how it is written). One whose name
//! begins with `ok-` begins a session and sends nothing wrong to it; one with `bad-` is refused, before or after the start.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use opencode_pty::frame::message::ErrorCode;
use opencode_pty::frame::{Kind, encode};
use support::connection_model::{
    Appetite, Ending, Outcome, Scenario, Send, What, check, observe_with_room_for, start_frame,
};

/// Tests of this program run one after the other.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn the_corpus_of_connections_is_received_as_its_names_say() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus/connection");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let (mut sound, mut refused) = (0, 0);
    for path in files {
        let name = path.file_name().unwrap().to_str().unwrap();
        let scenario = Scenario::from_bytes(&std::fs::read(&path).unwrap());
        println!("{name}: {} sends, {:?}, {:?}", scenario.sends.len(), scenario.appetite, scenario.ending);
        let outcome = check(scenario);
        let over = matches!(outcome, Outcome::Waiting | Outcome::Gone);
        assert!(!name.starts_with("ok-") || outcome.is_sound(), "{name}: {outcome:?}");
        assert!(!name.starts_with("bad-") || !(outcome.is_sound() || over), "{name}: {outcome:?}");
        sound += usize::from(outcome.is_sound());
        refused += usize::from(!outcome.is_sound() && !over);
    }
    assert!(sound > 0 && refused > 0, "{sound} sound, {refused} refused: not a corpus");
}

/// A table without room for all that comes takes some, and the kernel says MSG_CTRUNC: none of them may stay (T5).
#[test]
fn descriptors_that_do_not_fit_into_the_table_end_the_session_and_those_that_did_are_closed() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let sent = |bytes: Vec<u8>, count| Send { bytes, descriptors: vec![What::Directory; count], settle: true };
    for room in 0..8 {
        for count in [1, 2, 3, 7, 8, 9, 64, 253] {
            let start = start_frame(What::Directory, 60, &["/bin/true"]);
            let input = encode(Kind::Input, b"typed").unwrap();
            let scenario =
                |sends| Scenario { sends, closed_after: None, appetite: Appetite::Eager, ending: Ending::Close };

            let outcome = observe_with_room_for(room, scenario(vec![sent(start.clone(), count)]));
            // One that took the last place may be refused all the same: looking at it takes a descriptor.
            match (count, room, &outcome) {
                (1, 1, Outcome::Unexamined | Outcome::Session(_)) => {}
                (1, 2.., outcome) => assert!(outcome.is_sound(), "room {room}: {outcome:?}"),
                _ => assert_eq!(outcome, Outcome::Refused(ErrorCode::BadFrame), "room {room}, {count} with the start"),
            }

            let outcome = observe_with_room_for(room, scenario(vec![sent(start, 1), sent(input, count)]));
            match (room, &outcome) {
                (0, Outcome::Refused(ErrorCode::BadFrame)) | (1, Outcome::Unexamined) => {}
                (_, Outcome::Session(session)) => {
                    assert!(room > 0 && session.violation, "room {room}, {count} behind it");
                }
                _ => panic!("room {room}, {count} behind the start: {outcome:?}"),
            }
        }
    }
}
