//! Properties of `frame`, for inputs nobody thought of: what was encoded comes back, what is accepted is spelled in
//! the one way there is, and no bytes at all make a decoder panic.
#![allow(clippy::unwrap_used)]

use opencode_pty::frame::message::{ErrorCode, Exit, Start, Words, decode_error, encode_error};
use opencode_pty::frame::words::{decode_joined, decode_word, encode_joined, encode_word};
use opencode_pty::frame::{Header, Kind, encode};
use opencode_pty::limits::{
    ARG_BYTES_MAX, ARGS_BYTES_MAX, ARGS_MAX, COMMAND_BYTES_MAX, DATA_BYTES_MAX, ERROR_BYTES_MAX, RESULT_BYTES_MAX,
    RUNTIME_SECONDS_MAX,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::RngSeed;

/// The same cases on every run, so that a change is judged by what it changes; `PROPTEST_RNG_SEED` and
/// `PROPTEST_CASES` look further.
fn config() -> ProptestConfig {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if config.rng_seed == RngSeed::Random {
        config.rng_seed = RngSeed::Fixed(0x4f50_5459);
    }
    config
}

/// Text as it may stand in a word: any characters but NUL, many of more than one byte.
fn text(len_max: usize) -> impl Strategy<Value = String> {
    vec(any::<char>().prop_map(|c| if c == '\0' { 'é' } else { c }), 0..len_max).prop_map(String::from_iter)
}

fn words() -> impl Strategy<Value = Words> {
    (text(40), vec(text(40), 0..20)).prop_map(|(command, args)| {
        let mut words = vec![format!("c{command}")];
        words.extend(args);
        Words::new(words).unwrap()
    })
}

fn start() -> impl Strategy<Value = Start> {
    (any::<u64>(), any::<u64>(), 0..=RUNTIME_SECONDS_MAX, words())
        .prop_map(|(dev, ino, runtime, words)| Start::new(dev, ino, runtime, words).unwrap())
}

/// One small change of some bytes.
#[derive(Clone, Debug)]
enum Change {
    Flip(Index, u8),
    Set(Index, u8),
    Insert(Index, u8),
    Remove(Index),
    Cut(Index),
    Double(Index),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        (any::<Index>(), 0..8_u8).prop_map(|(at, bit)| Change::Flip(at, 1 << bit)),
        (any::<Index>(), select(vec![0, 1, 2, 0x7f, 0x80, 0xc0, 0xff])).prop_map(|(at, byte)| Change::Set(at, byte)),
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Change::Insert(at, byte)),
        any::<Index>().prop_map(Change::Remove),
        any::<Index>().prop_map(Change::Cut),
        any::<Index>().prop_map(Change::Double),
    ]
}

fn changed(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    for change in changes {
        if bytes.is_empty() {
            return bytes;
        }
        let place = |index: &Index| index.index(bytes.len());
        match change {
            Change::Flip(at, mask) => {
                let at = place(at);
                bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= mask);
            }
            Change::Set(at, value) => {
                let at = place(at);
                bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte = *value);
            }
            Change::Insert(at, value) => bytes.insert(place(at), *value),
            Change::Remove(at) => drop(bytes.remove(place(at))),
            Change::Cut(at) => bytes.truncate(place(at)),
            Change::Double(at) => {
                let tail = bytes.split_off(place(at));
                bytes.extend_from_slice(&tail);
                bytes.extend(tail);
            }
        }
    }
    bytes
}

/// A start payload put together from its parts, whatever they are, and whether the limits of SPEC 3 allow it.
fn assembled(runtime: u32, command: &[u8], args: &[Vec<u8>]) -> (Vec<u8>, bool) {
    let length = |len: usize| u16::try_from(len).unwrap().to_be_bytes();
    let mut payload = vec![7; 16];
    payload.extend(runtime.to_be_bytes());
    payload.extend(length(command.len()));
    payload.extend(length(args.len()));
    payload.extend(command);
    for arg in args {
        payload.extend(length(arg.len()));
        payload.extend(arg);
    }
    let word_is_text = |word: &[u8]| str::from_utf8(word).is_ok() && !word.contains(&0);
    let allowed = runtime <= RUNTIME_SECONDS_MAX
        && (1..=COMMAND_BYTES_MAX).contains(&command.len())
        && args.len() <= ARGS_MAX
        && args.iter().all(|arg| arg.len() <= ARG_BYTES_MAX)
        && args.iter().map(Vec::len).sum::<usize>() <= ARGS_BYTES_MAX
        && word_is_text(command)
        && args.iter().all(|arg| word_is_text(arg));
    (payload, allowed)
}

/// Lengths around a limit.
fn around(limit: usize) -> impl Strategy<Value = usize> {
    prop_oneof![0..4_usize, (limit - 1)..=(limit + 1)]
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_start_comes_back_as_it_was(start in start()) {
        let payload = start.encode();
        prop_assert_eq!(Start::decode(&payload), Ok(start));
        prop_assert!(encode(Kind::Start, &payload).is_ok());
    }

    #[test]
    fn a_changed_start_is_refused_or_is_another_start_spelled_canonically(
        start in start(),
        changes in vec(change(), 1..4),
    ) {
        let payload = changed(start.encode(), &changes);
        if let Ok(decoded) = Start::decode(&payload) {
            prop_assert_eq!(decoded.encode(), payload);
            prop_assert!(decoded.runtime_seconds() >= 1 && decoded.runtime_seconds() <= RUNTIME_SECONDS_MAX);
        }
    }

    #[test]
    fn a_start_is_accepted_exactly_if_every_limit_is_kept(
        runtime in prop_oneof![3_598..3_603_u32, any::<u32>(), Just(0)],
        command in prop_oneof![
            around(COMMAND_BYTES_MAX).prop_map(|len| vec![b'c'; len]),
            vec(any::<u8>(), 1..6),
        ],
        args in prop_oneof![
            vec(around(ARG_BYTES_MAX).prop_map(|len| vec![b'a'; len]), 0..6),
            around(ARGS_MAX).prop_map(|count| vec![vec![]; count]),
            vec(vec(any::<u8>(), 0..4), 0..3),
        ],
    ) {
        let (payload, allowed) = assembled(runtime, &command, &args);
        let decoded = Start::decode(&payload);
        prop_assert_eq!(decoded.is_ok(), allowed, "{:?}", decoded.err());
    }

    #[test]
    fn no_bytes_make_a_decoder_panic_and_what_is_accepted_is_canonical(bytes in vec(any::<u8>(), 0..200)) {
        if let Ok(start) = Start::decode(&bytes) {
            prop_assert_eq!(start.encode(), bytes.clone());
        }
        if let Ok(exit) = Exit::decode(&bytes) {
            prop_assert_eq!(exit.encode(), bytes.clone());
        }
        if let Ok((code, message)) = decode_error(&bytes) {
            prop_assert_eq!(encode_error(code, &message), bytes.clone());
        }
        if let Some(header) = bytes.first_chunk() && let Ok(decoded) = Header::decode(header) {
            prop_assert_eq!(&decoded.encode(), header);
        }
    }

    #[test]
    fn a_changed_header_is_refused_or_within_its_kinds_limits(
        kind in 0..=9_u8,
        len in prop_oneof![0..80_u32, 32_766..32_771_u32, 71_678..71_683_u32, any::<u32>()],
        changes in vec((any::<Index>(), 0..8_u8), 0..3),
    ) {
        let [a, b, c, d] = len.to_be_bytes();
        let header = vec![b'O', b'P', b'T', b'Y', 1, kind, 0, 0, a, b, c, d];
        let flips: Vec<_> = changes.iter().map(|(at, bit)| Change::Flip(*at, 1 << bit)).collect();
        let bytes: [u8; 12] = changed(header, &flips).try_into().unwrap();
        if let Ok(header) = Header::decode(&bytes) {
            prop_assert_eq!(header.encode(), bytes);
            prop_assert!(Header::new(header.kind(), header.payload_len()).is_ok());
            let data = matches!(header.kind(), Kind::Input | Kind::Output);
            prop_assert!(!data || (1..=DATA_BYTES_MAX).contains(&header.payload_len()));
        }
    }

    #[test]
    fn an_exit_comes_back_as_it_was_and_a_changed_one_is_canonical(
        code in 0..6_u8,
        status in any::<u32>(),
        result in "[a-zé-]{0,70}",
        changes in vec(change(), 1..3),
    ) {
        let made = Exit::new(code, status, &result);
        let allowed = (1..=3).contains(&code) && (1..=RESULT_BYTES_MAX).contains(&result.len());
        prop_assert_eq!(made.is_ok(), allowed);
        if let Ok(exit) = made {
            prop_assert_eq!(Exit::decode(&exit.encode()), Ok(exit.clone()));
            let bytes = changed(exit.encode(), &changes);
            if let Ok(other) = Exit::decode(&bytes) {
                prop_assert_eq!(other.encode(), bytes);
            }
        }
    }

    #[test]
    fn an_error_keeps_its_code_and_as_much_of_its_message_as_fits(
        code in select(ErrorCode::ALL.to_vec()),
        message in text(80),
        times in prop_oneof![Just(1_usize), 300..1_200_usize],
    ) {
        let message = message.repeat(times);
        let payload = encode_error(code, &message);
        prop_assert!(payload.len() <= ERROR_BYTES_MAX);
        let (decoded, kept) = decode_error(&payload).unwrap();
        prop_assert_eq!(decoded, code);
        prop_assert!(message.starts_with(&kept));
        prop_assert!(kept == message || payload.len() > ERROR_BYTES_MAX - 4, "cut at {} bytes", payload.len());
    }

    #[test]
    fn a_word_comes_back_as_it_was_in_letters_that_no_shell_or_option_parser_touches(word in text(60)) {
        let encoded = encode_word(&word);
        prop_assert!(encoded.starts_with('a'));
        prop_assert!(encoded.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'));
        prop_assert_eq!(decode_word(&encoded), Some(word));
    }

    #[test]
    fn a_list_of_words_comes_back_as_it_was(words in words()) {
        prop_assert_eq!(decode_joined(&encode_joined(&words)), Ok(words));
    }

    #[test]
    fn a_changed_list_of_words_is_refused_or_spelled_canonically(words in words(), changes in vec(change(), 1..4)) {
        let bytes = changed(encode_joined(&words).into_bytes(), &changes);
        if let Ok(text) = str::from_utf8(&bytes) && let Ok(decoded) = decode_joined(text) {
            prop_assert_eq!(encode_joined(&decoded), text);
        }
    }
}
