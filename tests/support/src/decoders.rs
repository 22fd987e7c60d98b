//! What must hold for any bytes a decoder is given.
//!
//! Each function here says on its own, from SPEC 3 to 6 and without the program's code, whether the bytes are acceptable
//! and what they mean; then it asks the program and panics where the two differ. What is accepted must besides be the one
//! spelling there is, and what is refused must say why in one plain line. Fuzz targets, the replay of the corpus and
//! `tests/abuse.rs` are three ways to call these functions.

#![allow(clippy::indexing_slicing)]

use std::fmt::Display;

use opencode_pty::account::{find_by_name, find_by_uid, parse_line};
use opencode_pty::frame::message::{Exit, Start, decode_error, encode_error};
use opencode_pty::frame::words::{decode_joined, decode_word, encode_joined, encode_word};
use opencode_pty::frame::{Header, Kind, encode};

/// Longest argument or environment string Linux takes, with its NUL.
const ENVIRONMENT_STRING_MAX: usize = 131_072;

/// Asserts what must hold for some bytes; says whether they were accepted.
pub type Check = fn(&[u8]) -> bool;

/// Every decoder, by the name of its folder in the corpus.
pub const ALL: [(&str, Check); 6] =
    [("header", header), ("start", start), ("exit", exit), ("error", error), ("words", words), ("passwd", passwd)];

/// What a header's twelve bytes say: the type's number and the payload's length, if they may stand there.
pub fn header_fields(bytes: &[u8; 12]) -> Option<(u8, usize)> {
    let len = usize::try_from(number(bytes.get(8..)?)).ok()?;
    let kind = bytes[5];
    let allowed = match kind {
        1 => 25..=71_680,
        2 | 3 | 5 => 1..=32_768,
        4 => 9..=71_680,
        6 => 1..=256,
        7 | 8 => 0..=0,
        _ => return None,
    };
    (bytes.starts_with(b"OPTY\x01") && bytes[6..8] == [0, 0] && allowed.contains(&len)).then_some((kind, len))
}

/// The twelve bytes of a header.
pub fn header(bytes: &[u8]) -> bool {
    let Ok(bytes) = <&[u8; 12]>::try_from(bytes) else { return false };
    let expected = header_fields(bytes);
    match Header::decode(bytes) {
        Ok(header) => {
            assert_eq!(Some((header.kind() as u8, header.payload_len())), expected);
            assert_eq!(header.encode(), *bytes);
            assert_eq!(Header::new(header.kind(), header.payload_len()), Ok(header));
            assert_eq!(Kind::from_number(bytes[5]), Some(header.kind()));
        }
        Err(error) => {
            assert_eq!(expected, None, "{error}");
            assert_one_plain_line(&error);
        }
    }
    expected.is_some()
}

/// What a start payload says.
#[derive(Debug, PartialEq, Eq)]
pub struct StartFields<'a> {
    /// Device, inode and runtime as they stand there.
    pub numbers: (u64, u64, u64),
    /// Command and arguments.
    pub words: Vec<&'a str>,
}

/// The parts of a start payload, if each is within its limits.
pub fn start_fields(payload: &[u8]) -> Option<StartFields<'_>> {
    let mut rest = payload;
    let mut take = |len: usize| {
        let (part, behind) = rest.split_at_checked(len)?;
        rest = behind;
        Some(part)
    };
    let numbers = (number(take(8)?), number(take(8)?), number(take(4)?));
    let command_len = number(take(2)?);
    let arg_count = number(take(2)?);
    let mut words = vec![text(take(usize::try_from(command_len).ok()?)?)?];
    for _ in 0..arg_count {
        let len = number(take(2)?);
        words.push(text(take(usize::try_from(len).ok()?)?)?);
    }
    (rest.is_empty() && numbers.2 <= 3_600 && are_words(&words)).then_some(StartFields { numbers, words })
}

/// A start frame's payload.
pub fn start(bytes: &[u8]) -> bool {
    let expected = start_fields(bytes);
    match Start::decode(bytes) {
        Ok(start) => {
            let fields = expected.as_ref().unwrap_or_else(|| panic!("accepted: {start:?}"));
            let (dev, ino, runtime) = fields.numbers;
            assert_eq!((start.dev(), start.ino()), (dev, ino));
            assert_eq!(u64::from(start.runtime_seconds()), if runtime == 0 { 3_600 } else { runtime });
            assert_eq!(start.words().as_slice(), fields.words);
            assert_eq!(start.words().command(), fields.words[0]);
            assert_eq!(start.encode(), bytes);
            assert_frame(Kind::Start, bytes);
            let joined = encode_joined(start.words());
            assert!("OPENCODE_PTY_ARGV=".len() + joined.len() < ENVIRONMENT_STRING_MAX);
            assert_eq!(decode_joined(&joined).as_ref(), Ok(start.words()));
        }
        Err(error) => {
            assert_eq!(expected, None, "{error}");
            assert_one_plain_line(&error);
        }
    }
    expected.is_some()
}

/// An exit frame's payload.
pub fn exit(bytes: &[u8]) -> bool {
    let expected = exit_fields(bytes);
    match Exit::decode(bytes) {
        Ok(exit) => {
            assert_eq!(Some((exit.code(), u64::from(exit.status()), exit.result())), expected);
            assert_eq!(exit.encode(), bytes);
            assert_frame(Kind::Exit, bytes);
        }
        Err(error) => {
            assert_eq!(expected, None, "{error}");
            assert_one_plain_line(&error);
        }
    }
    expected.is_some()
}

fn exit_fields(payload: &[u8]) -> Option<(u8, u64, &str)> {
    let (fixed, result) = payload.split_at_checked(9)?;
    let (code, status, len) = (fixed[0], number(&fixed[1..5]), number(&fixed[5..9]));
    let result = text(result)?;
    let known = matches!(code, 1..=3) || (code, status, result) == (0, 0, "lost");
    let sized = (1..=64).contains(&result.len()) && len == result.len() as u64;
    (known && sized).then_some((code, status, result))
}

/// An error frame's payload.
pub fn error(bytes: &[u8]) -> bool {
    const CODES: [&str; 11] = [
        "unauthenticated",
        "rate-limited",
        "busy",
        "timeout",
        "bad-frame",
        "bad-start",
        "bad-cwd",
        "start-failed",
        "stop-failed",
        "io",
        "shutdown",
    ];
    let text = str::from_utf8(bytes).ok().filter(|text| text.len() <= 32_768);
    let expected = CODES.iter().find_map(|code| {
        let message = text?.strip_prefix(code)?.strip_prefix(": ")?;
        Some((*code, message.to_owned()))
    });
    match decode_error(bytes) {
        Ok((code, message)) => {
            assert_eq!(encode_error(code, &message), bytes);
            assert_eq!(Some((code.word(), message)), expected);
            assert_frame(Kind::Error, bytes);
        }
        Err(error) => {
            assert_eq!(expected, None, "{error}");
            assert_one_plain_line(&error);
        }
    }
    expected.is_some()
}

/// What `OPENCODE_PTY_ARGV` carries: encoded words, joined by dots.
pub fn words(bytes: &[u8]) -> bool {
    let Ok(joined) = str::from_utf8(bytes) else { return false };
    let mut decoded = Some(Vec::new());
    for encoded in joined.split('.') {
        let word = word(encoded);
        // One of more bytes than an argument may have is nobody's word.
        let expected = word.clone().filter(|word| word.len() <= 16_384);
        let found = decode_word(encoded);
        assert_eq!(found, expected);
        if let Some(found) = found {
            assert_eq!(encode_word(&found), encoded);
        }
        decoded = decoded.zip(word).map(|(mut words, word)| {
            words.push(word);
            words
        });
    }
    let expected = decoded.filter(|words| are_words(&words.iter().map(String::as_str).collect::<Vec<_>>()));
    match decode_joined(joined) {
        Ok(words) => {
            assert_eq!(Some(words.as_slice()), expected.as_deref());
            assert_eq!(encode_joined(&words), joined);
            let fits = Start::new(0, 0, 0, words).expect("any words may be started");
            assert_eq!(Start::decode(&fits.encode()), Ok(fits));
        }
        Err(error) => {
            assert_eq!(expected, None, "{error}");
            assert_one_plain_line(&error);
        }
    }
    expected.is_some()
}

/// A word decoded bit by bit, as RFC 4648 says; nothing behind the last whole byte but zeros, and fewer than six of them.
fn word(encoded: &str) -> Option<String> {
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for letter in encoded.strip_prefix('a')?.chars() {
        let value = match letter {
            'A'..='Z' => letter as u32 - 65,
            'a'..='z' => letter as u32 - 97 + 26,
            '0'..='9' => letter as u32 - 48 + 52,
            '-' => 62,
            '_' => 63,
            _ => return None,
        };
        bits = bits << 6 | value;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from(bits >> count).ok()?);
            bits &= (1 << count) - 1;
        }
    }
    if count >= 6 || bits != 0 { None } else { String::from_utf8(bytes).ok() }
}

/// The account database, of which the first line counts. (As the program does: what is not UTF-8 is replaced.)
pub fn passwd(bytes: &[u8]) -> bool {
    let database = String::from_utf8_lossy(bytes);
    for line in database.lines().take(8) {
        let expected = passwd_fields(line);
        match parse_line(line) {
            Ok(account) => {
                assert_eq!(Some((account.name(), account.uid(), account.gid(), account.home())), expected);
                assert_ne!(account.uid(), 0);
                for (name, value) in account.environment() {
                    assert!(!value.contains(char::is_control) && !value.is_empty(), "{name}={value:?}");
                }
            }
            Err(error) => {
                assert_eq!(expected, None, "{error}");
                assert_one_plain_line(&error);
            }
        }
        check_lookups(&database, line);
    }
    database.lines().next().is_some_and(|line| passwd_fields(line).is_some())
}

/// Whoever is looked up by this line's name or id is who stands first in the file with it, usable or not.
fn check_lookups(database: &str, line: &str) {
    let fields: Vec<&str> = line.split(':').collect();
    let first = |index: usize, same: &dyn Fn(&str) -> bool| {
        let line = database.lines().find(|line| line.split(':').nth(index).is_some_and(same));
        line.map(|line| parse_line(line).map_err(|error| error.to_string()))
    };
    let name = fields[0];
    let found = find_by_name(database, name).map_err(|error| error.to_string());
    match first(0, &|other| other == name && !name.is_empty()) {
        Some(expected) => assert_eq!(found, expected),
        None => assert!(found.is_err_and(|error| error.starts_with("no account '")), "'{name}'"),
    }
    if let Some(uid) = fields.get(2).and_then(|field| id(field)) {
        let found = find_by_uid(database, uid).map_err(|error| error.to_string());
        assert_eq!(Some(found), first(2, &|other| id(other) == Some(uid)));
    }
}

fn passwd_fields(line: &str) -> Option<(&str, u32, u32, &str)> {
    let fields: [&str; 7] = line.split(':').collect::<Vec<_>>().try_into().ok()?;
    let [name, _, uid, gid, _, home, _] = fields;
    let (uid, gid) = (id(uid)?, id(gid)?);
    let spoilt = |c: char| c.is_control() || c == '\u{fffd}';
    let named = !name.contains(|c: char| spoilt(c) || c.is_whitespace() || c == '/');
    let numbered = name.chars().all(|c| c.is_ascii_digit());
    (named && !numbered && uid != 0 && home.starts_with('/') && !home.contains(spoilt))
        .then_some((name, uid, gid, home))
}

/// Digits that give less than the largest 32-bit number.
fn id(digits: &str) -> Option<u32> {
    let mut id = 0_u64;
    for digit in digits.chars() {
        id = (id * 10 + u64::from(digit.to_digit(10)?)).min(u64::from(u32::MAX));
    }
    u32::try_from(id).ok().filter(|id| !digits.is_empty() && *id != u32::MAX)
}

/// Whether a command and its arguments keep every limit. That each is text is the caller's business.
fn are_words(words: &[&str]) -> bool {
    let Some((command, args)) = words.split_first() else { return false };
    (1..=4_096).contains(&command.len())
        && args.len() <= 128
        && args.iter().all(|arg| arg.len() <= 16_384)
        && args.iter().map(|arg| arg.len()).sum::<usize>() <= 65_536
        && !words.iter().any(|word| word.contains('\0'))
}

fn assert_frame(kind: Kind, payload: &[u8]) {
    let frame = encode(kind, payload).expect("a payload that is accepted fits into its frame");
    assert!(header(&frame[..12]) && frame[12..] == *payload);
}

/// A reason goes into the journal and to the peer.
fn assert_one_plain_line(reason: &impl Display) {
    let reason = reason.to_string();
    assert!(!reason.is_empty() && reason.len() < 200 && !reason.contains(char::is_control), "{reason:?}");
}

fn text(bytes: &[u8]) -> Option<&str> {
    str::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
}

/// Unsigned, big-endian.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
