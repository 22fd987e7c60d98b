//! The protocol's page and the corpus, held against the decoders.
//!
//! `docs/protocol.md` is what a plugin author writes code from, so its examples are decoded here, byte by byte. The
//! corpus under `tests/fuzz/corpus` is what fuzzers start from and what they found; a file whose name begins with
//! `ok-` or `bad-` also says what the decoder must think of it. (Connections, which are not decoded, are replayed in
//! `tests/inbound.rs`.)
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use opencode_pty::frame::message::{Exit, Start, decode_error, encode_error};
use opencode_pty::frame::{DecodeError, Header, Kind, encode};
use support::decoders;

const KINDS: [(&str, Kind); 8] = [
    ("start", Kind::Start),
    ("input", Kind::Input),
    ("output", Kind::Output),
    ("exit", Kind::Exit),
    ("error", Kind::Error),
    ("started", Kind::Started),
    ("stop", Kind::Stop),
    ("stopped", Kind::Stopped),
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// A payload decoded and encoded again.
fn again(kind: Kind, payload: &[u8]) -> Result<Vec<u8>, DecodeError> {
    Ok(match kind {
        Kind::Start => Start::decode(payload)?.encode(),
        Kind::Exit => Exit::decode(payload)?.encode(),
        Kind::Error => {
            let (code, message) = decode_error(payload)?;
            encode_error(code, &message)
        }
        Kind::Input | Kind::Output | Kind::Started | Kind::Stop | Kind::Stopped => payload.to_vec(),
    })
}

// ---- the page ----------------------------------------------------------------------------------------------

/// One code fence whose info string is `hex KIND`.
struct Example {
    line: usize,
    kind: String,
    bytes: Vec<u8>,
}

/// The page's examples. White space means nothing inside, and `#` begins a comment.
fn examples(page: &str) -> Vec<Example> {
    let mut examples = Vec::new();
    let mut lines = (1..).zip(page.lines());
    while let Some((line, text)) = lines.next() {
        let Some(kind) = text.trim().strip_prefix("```hex ") else { continue };
        let mut digits = String::new();
        for (_, text) in lines.by_ref().take_while(|(_, text)| text.trim() != "```") {
            let data = text.split_once('#').map_or(text, |(data, _)| data);
            digits.extend(data.split_whitespace());
        }
        let bytes = unhex(&digits).unwrap_or_else(|| panic!("docs/protocol.md:{line}: '{digits}' is not hex"));
        examples.push(Example { line, kind: kind.trim().to_owned(), bytes });
    }
    examples
}

fn unhex(digits: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = digits.chars().map(|c| u8::try_from(c.to_digit(16)?).ok()).collect();
    let pairs = digits?;
    let mut pairs = pairs.chunks_exact(2);
    let bytes = pairs.by_ref().map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect();
    pairs.remainder().is_empty().then_some(bytes)
}

#[test]
fn every_example_of_the_page_is_a_frame_of_the_kind_it_says_and_comes_back_as_it_was() {
    let page = std::fs::read_to_string(root().join("docs/protocol.md")).unwrap();
    let mut seen = BTreeMap::new();
    for Example { line, kind, bytes } in examples(&page) {
        let place = format!("docs/protocol.md:{line}, hex {kind}");
        let (name, wanted) =
            *KINDS.iter().find(|(name, _)| *name == kind).unwrap_or_else(|| panic!("{place}: unknown"));
        let (header, payload) = bytes.split_first_chunk().unwrap_or_else(|| panic!("{place}: shorter than a header"));
        let header = Header::decode(header).unwrap_or_else(|error| panic!("{place}: {error}"));
        assert_eq!(header.kind(), wanted, "{place}");
        assert_eq!(header.payload_len(), payload.len(), "{place}");
        let payload = again(wanted, payload).unwrap_or_else(|error| panic!("{place}: {error}"));
        assert_eq!(encode(wanted, &payload).unwrap(), bytes, "{place}");
        *seen.entry(name).or_insert(0) += 1;
    }
    for (name, _) in KINDS {
        assert!(seen.contains_key(name), "docs/protocol.md has no example of a {name} frame");
    }
}

#[test]
fn an_example_is_read_without_its_spaces_and_comments() {
    let page = "text\n```hex stop\n4f 50 54 59 # OPTY\n01 07 0000\n\n00000000\n```\n```sh\nls\n```\n";
    let [example] = examples(page).try_into().unwrap_or_else(|_| panic!("not one example"));
    assert_eq!((example.line, example.kind.as_str()), (2, "stop"));
    assert_eq!(example.bytes, encode(Kind::Stop, &[]).unwrap());
    assert_eq!(unhex("4f5"), None);
    assert_eq!(unhex("4g"), None);
}

// ---- the corpus --------------------------------------------------------------------------------------------

/// Replays one folder of the corpus: `accepts` says whether the bytes were accepted, after asserting all that must hold.
fn replay(folder: &str, accepts: decoders::Check) {
    let (mut accepted, mut refused) = (0, 0);
    for entry in std::fs::read_dir(root().join("tests/fuzz/corpus").join(folder)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        println!("{folder}/{name}");
        let is_accepted = accepts(&std::fs::read(&path).unwrap());
        assert!(!name.starts_with("ok-") || is_accepted, "{folder}/{name} was refused");
        assert!(!name.starts_with("bad-") || !is_accepted, "{folder}/{name} was accepted");
        *if is_accepted { &mut accepted } else { &mut refused } += 1;
    }
    assert!(accepted > 0 && refused > 0, "{folder}: {accepted} accepted, {refused} refused: not a corpus");
}

#[test]
fn the_corpus_is_decoded_as_its_names_say() {
    for (folder, accepts) in decoders::ALL {
        replay(folder, accepts);
    }
}
