//! The payloads with a structure: `start`, `exit`, `error`.
//!
//! A [`Start`] can only be had from its constructor or its decoder, so one that exists is within every limit.
//! It never says *where* to run by name: the directory travels as a descriptor, and `dev` and `ino` only tie the
//! two together.

use std::fmt;

use super::DecodeError;
use crate::limits::{
    ARG_BYTES_MAX, ARGS_BYTES_MAX, ARGS_MAX, COMMAND_BYTES_MAX, ERROR_BYTES_MAX, RESULT_BYTES_MAX, RUNTIME_SECONDS_MAX,
};

/// Bytes of a start payload before the command: dev, ino, runtime, command length, argument count.
pub const START_FIXED_BYTES: usize = 8 + 8 + 4 + 2 + 2;
/// Bytes of an exit payload before the result word: code, status, result length.
pub const EXIT_FIXED_BYTES: usize = 1 + 4 + 4;

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    dev: u64,
    ino: u64,
    runtime_seconds: u32,
    words: Words,
}

/// A command and its arguments, within the limits of `limits.rs`: UTF-8, no NUL, command not empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words(Vec<String>);

impl Words {
    /// Checks a command and its arguments.
    pub fn new(words: Vec<String>) -> Result<Self, DecodeError> {
        let (command, args) = words.split_first().ok_or(DecodeError::PartLength { part: "command", len: 0 })?;
        check_part("command", command.len(), 1, COMMAND_BYTES_MAX)?;
        check_part("number of arguments", args.len(), 0, ARGS_MAX)?;
        let mut total = 0;
        for arg in args {
            check_part("argument", arg.len(), 0, ARG_BYTES_MAX)?;
            total += arg.len();
        }
        check_part("arguments together", total, 0, ARGS_BYTES_MAX)?;
        for (index, word) in words.iter().enumerate() {
            if word.contains('\0') {
                return Err(DecodeError::Text { part: if index == 0 { "command" } else { "argument" } });
            }
        }
        Ok(Self(words))
    }

    /// The command.
    pub fn command(&self) -> &str {
        self.0.first().expect("Words::new refuses an empty list")
    }

    /// The command and then its arguments.
    pub fn as_slice(&self) -> &[String] {
        &self.0
    }
}

fn check_part(part: &'static str, len: usize, min: usize, max: usize) -> Result<(), DecodeError> {
    if (min..=max).contains(&len) { Ok(()) } else { Err(DecodeError::PartLength { part, len }) }
}

impl Start {
    /// A start of `words` in the directory with this device and inode. A runtime of 0 selects the longest.
    pub fn new(dev: u64, ino: u64, runtime_seconds: u32, words: Words) -> Result<Self, DecodeError> {
        if runtime_seconds > RUNTIME_SECONDS_MAX {
            return Err(DecodeError::Runtime { seconds: runtime_seconds });
        }
        Ok(Self { dev, ino, runtime_seconds, words })
    }

    /// Decodes a payload. The parts must add up to it exactly.
    pub fn decode(payload: &[u8]) -> Result<Self, DecodeError> {
        let mut rest = Parts { whole: payload.len(), rest: payload };
        let dev = u64::from_be_bytes(rest.array()?);
        let ino = u64::from_be_bytes(rest.array()?);
        let runtime_seconds = u32::from_be_bytes(rest.array()?);
        let command_len = usize::from(u16::from_be_bytes(rest.array()?));
        let arg_count = usize::from(u16::from_be_bytes(rest.array()?));
        check_part("command", command_len, 1, COMMAND_BYTES_MAX)?;
        check_part("number of arguments", arg_count, 0, ARGS_MAX)?;

        let mut words = Vec::with_capacity(1 + arg_count);
        words.push(rest.text("command", command_len)?);
        for _ in 0..arg_count {
            let len = usize::from(u16::from_be_bytes(rest.array()?));
            check_part("argument", len, 0, ARG_BYTES_MAX)?;
            words.push(rest.text("argument", len)?);
        }
        rest.end()?;
        Self::new(dev, ino, runtime_seconds, Words::new(words)?)
    }

    /// The payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut payload = Vec::new();
        payload.extend_from_slice(&self.dev.to_be_bytes());
        payload.extend_from_slice(&self.ino.to_be_bytes());
        payload.extend_from_slice(&self.runtime_seconds.to_be_bytes());
        let (command, args) = self.words.0.split_first().expect("Words::new refuses an empty list");
        payload.extend_from_slice(&length_u16(command.len()).to_be_bytes());
        payload.extend_from_slice(&length_u16(args.len()).to_be_bytes());
        payload.extend_from_slice(command.as_bytes());
        for arg in args {
            payload.extend_from_slice(&length_u16(arg.len()).to_be_bytes());
            payload.extend_from_slice(arg.as_bytes());
        }
        payload
    }

    /// `st_dev` of the directory, as the sender saw it.
    pub fn dev(&self) -> u64 {
        self.dev
    }

    /// `st_ino` of the directory.
    pub fn ino(&self) -> u64 {
        self.ino
    }

    /// How long the session may run, seconds: what was asked for, or the longest where that was 0.
    pub fn runtime_seconds(&self) -> u32 {
        if self.runtime_seconds == 0 { RUNTIME_SECONDS_MAX } else { self.runtime_seconds }
    }

    /// Command and arguments.
    pub fn words(&self) -> &Words {
        &self.words
    }
}

fn length_u16(len: usize) -> u16 {
    u16::try_from(len).expect("limits.rs asserts that each length fits")
}

/// What is left of a payload.
struct Parts<'a> {
    whole: usize,
    rest: &'a [u8],
}

impl<'a> Parts<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], DecodeError> {
        let used = self.whole - self.rest.len();
        let (part, rest) =
            self.rest.split_at_checked(len).ok_or(DecodeError::Length { want: used + len, have: self.whole })?;
        self.rest = rest;
        Ok(part)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        Ok(self.take(N)?.try_into().expect("take gives exactly N bytes"))
    }

    fn text(&mut self, part: &'static str, len: usize) -> Result<String, DecodeError> {
        let text = str::from_utf8(self.take(len)?).map_err(|_| DecodeError::Text { part })?;
        Ok(text.to_owned())
    }

    fn end(&self) -> Result<(), DecodeError> {
        let used = self.whole - self.rest.len();
        if self.rest.is_empty() { Ok(()) } else { Err(DecodeError::Length { want: used, have: self.whole }) }
    }
}

/// How a session ended: `ExecMainCode`, `ExecMainStatus` and `Result` of its unit, or one of our own two words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    code: u8,
    status: u32,
    result: String,
}

/// `CLD_EXITED`: the status is an exit code.
pub const CLD_EXITED: u8 = 1;
/// `CLD_KILLED`: the status is a signal.
pub const CLD_KILLED: u8 = 2;
/// `CLD_DUMPED`: the status is a signal, and there is a core file.
pub const CLD_DUMPED: u8 = 3;

impl Exit {
    /// What the manager said: a code of 1 to 3, and a result word that can travel.
    pub fn new(code: u8, status: u32, result: &str) -> Result<Self, DecodeError> {
        let lost = code == 0 && status == 0 && result == "lost";
        if !lost && !(CLD_EXITED..=CLD_DUMPED).contains(&code) {
            return Err(DecodeError::Number { part: "code", number: u32::from(code) });
        }
        check_part("result", result.len(), 1, RESULT_BYTES_MAX)?;
        if result.contains('\0') {
            return Err(DecodeError::Text { part: "result" });
        }
        Ok(Self { code, status, result: result.to_owned() })
    }

    /// The record of a stop that the client asked for.
    pub fn stopped() -> Self {
        Self { code: CLD_KILLED, status: 15, result: "stopped".to_owned() }
    }

    /// The record of a session whose end nobody can tell any more.
    pub fn lost() -> Self {
        Self { code: 0, status: 0, result: "lost".to_owned() }
    }

    /// Decodes a payload.
    pub fn decode(payload: &[u8]) -> Result<Self, DecodeError> {
        let mut rest = Parts { whole: payload.len(), rest: payload };
        let [code] = rest.array()?;
        let status = u32::from_be_bytes(rest.array()?);
        let len = usize::try_from(u32::from_be_bytes(rest.array()?)).unwrap_or(usize::MAX);
        check_part("result", len, 1, RESULT_BYTES_MAX)?;
        let result = rest.text("result", len)?;
        rest.end()?;
        Self::new(code, status, &result)
    }

    /// The payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut payload = Vec::with_capacity(EXIT_FIXED_BYTES + self.result.len());
        payload.push(self.code);
        payload.extend_from_slice(&self.status.to_be_bytes());
        let len = u32::try_from(self.result.len()).expect("Exit::new bounds the result");
        payload.extend_from_slice(&len.to_be_bytes());
        payload.extend_from_slice(self.result.as_bytes());
        payload
    }

    /// `ExecMainCode`: 1 exited, 2 killed, 3 dumped; 0 only for `lost`.
    pub fn code(&self) -> u8 {
        self.code
    }

    /// `ExecMainStatus`: an exit code or a signal, as `code` says.
    pub fn status(&self) -> u32 {
        self.status
    }

    /// systemd's `Result`, or `stopped`, or `lost`.
    pub fn result(&self) -> &str {
        &self.result
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            CLD_EXITED => write!(f, "exited {}", self.status)?,
            CLD_KILLED => write!(f, "killed by signal {}", self.status)?,
            CLD_DUMPED => write!(f, "killed by signal {} with a core dump", self.status)?,
            _ => return f.write_str("lost"),
        }
        write!(f, " (result {})", self.result)
    }
}

/// The stable words an `error` frame begins with. `docs/protocol.md` says when each is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    /// The process was the server's main process, and a later check failed.
    Unauthenticated,
    /// Too many admissions in a minute.
    RateLimited,
    /// Every session slot is taken.
    Busy,
    /// The start frame, or what has to be found out before anything is started, was not complete in time.
    Timeout,
    /// Not a frame, or not one that may come now.
    BadFrame,
    /// A start frame whose content can't be used.
    BadStart,
    /// The directory can't be used.
    BadCwd,
    /// The unit or the launcher did not start.
    StartFailed,
    /// The unit's end can't be confirmed.
    StopFailed,
    /// Reading or writing the session's bytes failed.
    Io,
    /// The supervisor is shutting down.
    Shutdown,
}

impl ErrorCode {
    /// Every code, for pages and tests.
    pub const ALL: [Self; 11] = [
        Self::Unauthenticated,
        Self::RateLimited,
        Self::Busy,
        Self::Timeout,
        Self::BadFrame,
        Self::BadStart,
        Self::BadCwd,
        Self::StartFailed,
        Self::StopFailed,
        Self::Io,
        Self::Shutdown,
    ];

    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Self::Unauthenticated => "unauthenticated",
            Self::RateLimited => "rate-limited",
            Self::Busy => "busy",
            Self::Timeout => "timeout",
            Self::BadFrame => "bad-frame",
            Self::BadStart => "bad-start",
            Self::BadCwd => "bad-cwd",
            Self::StartFailed => "start-failed",
            Self::StopFailed => "stop-failed",
            Self::Io => "io",
            Self::Shutdown => "shutdown",
        }
    }

    /// The code with this word.
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.word() == word)
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// The payload of an `error` frame, `code: message`, cut to its limit at a character boundary.
pub fn encode_error(code: ErrorCode, message: &str) -> Vec<u8> {
    let mut text = format!("{code}: {message}");
    text.truncate(text.floor_char_boundary(ERROR_BYTES_MAX));
    text.into_bytes()
}

/// Decodes an `error` payload: a known code and its message.
pub fn decode_error(payload: &[u8]) -> Result<(ErrorCode, String), DecodeError> {
    check_part("error", payload.len(), 1, ERROR_BYTES_MAX)?;
    let text = str::from_utf8(payload).map_err(|_| DecodeError::Text { part: "error" })?;
    let (word, message) = text.split_once(": ").ok_or(DecodeError::Text { part: "error" })?;
    let code = ErrorCode::from_word(word).ok_or(DecodeError::Text { part: "error code" })?;
    Ok((code, message.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(list: &[&str]) -> Words {
        Words::new(list.iter().map(|word| (*word).to_owned()).collect()).unwrap()
    }

    fn payload() -> Vec<u8> {
        Start::new(2, 77, 60, words(&["/bin/echo", "", "é", "a b"])).unwrap().encode()
    }

    #[test]
    fn a_start_comes_back_as_it_was() {
        let start = Start::decode(&payload()).unwrap();
        assert_eq!((start.dev(), start.ino(), start.runtime_seconds()), (2, 77, 60));
        assert_eq!(start.words().as_slice(), ["/bin/echo", "", "é", "a b"]);
        assert_eq!(start.encode(), payload());
    }

    #[test]
    fn a_runtime_of_zero_selects_the_longest() {
        let start = Start::new(1, 1, 0, words(&["true"])).unwrap();
        assert_eq!(start.runtime_seconds(), 3_600);
        assert_eq!(Start::new(1, 1, 3_601, words(&["true"])), Err(DecodeError::Runtime { seconds: 3_601 }));
    }

    #[test]
    fn every_prefix_of_a_start_and_one_byte_more_is_refused() {
        let whole = payload();
        for len in 0..whole.len() {
            assert!(Start::decode(&whole[..len]).is_err(), "a prefix of {len} bytes passed");
        }
        let mut longer = whole.clone();
        longer.push(0);
        assert_eq!(Start::decode(&longer), Err(DecodeError::Length { want: whole.len(), have: whole.len() + 1 }));
    }

    #[test]
    fn words_at_each_limit_pass_and_one_beyond_is_refused() {
        let word = |len: usize| "x".repeat(len);
        let with_args = |args: Vec<String>| {
            let mut all = vec!["c".to_owned()];
            all.extend(args);
            Words::new(all)
        };
        assert!(Words::new(vec![word(4_096)]).is_ok());
        assert!(Words::new(vec![word(4_097)]).is_err());
        assert!(Words::new(vec![String::new()]).is_err());
        assert!(Words::new(vec![]).is_err());
        assert!(with_args(vec![String::new(); 128]).is_ok());
        assert!(with_args(vec![String::new(); 129]).is_err());
        assert!(with_args(vec![word(16_384); 4]).is_ok());
        assert!(with_args(vec![word(16_385)]).is_err());
        assert!(with_args(vec![word(16_384), word(16_384), word(16_384), word(16_384), word(1)]).is_err());
    }

    #[test]
    fn nul_and_malformed_utf8_are_refused_in_every_word() {
        assert_eq!(Words::new(vec!["a\0".into()]), Err(DecodeError::Text { part: "command" }));
        assert_eq!(Words::new(vec!["a".into(), "\0".into()]), Err(DecodeError::Text { part: "argument" }));
        let mut bytes = payload();
        let at = bytes.len() - 1;
        bytes[at] = 0xff;
        assert_eq!(Start::decode(&bytes), Err(DecodeError::Text { part: "argument" }));
        let mut bytes = payload();
        bytes[START_FIXED_BYTES] = 0xff;
        assert_eq!(Start::decode(&bytes), Err(DecodeError::Text { part: "command" }));
    }

    #[test]
    fn an_exit_comes_back_as_it_was_and_keeps_its_word() {
        for exit in
            [Exit::new(1, 7, "exit-code").unwrap(), Exit::new(2, 9, "oom-kill").unwrap(), Exit::stopped(), Exit::lost()]
        {
            assert_eq!(Exit::decode(&exit.encode()), Ok(exit));
        }
    }

    #[test]
    fn an_exit_with_a_code_that_means_nothing_is_refused() {
        for code in [0, 4, 255] {
            let refused = Err(DecodeError::Number { part: "code", number: u32::from(code) });
            assert_eq!(Exit::new(code, 0, "success"), refused);
        }
        assert!(Exit::new(1, 0, "").is_err());
        assert!(Exit::new(1, 0, &"r".repeat(65)).is_err());
    }

    #[test]
    fn a_long_error_is_cut_at_a_character_boundary() {
        let payload = encode_error(ErrorCode::Io, &"é".repeat(20_000));
        assert!(payload.len() <= ERROR_BYTES_MAX && payload.len() > ERROR_BYTES_MAX - 2);
        let (code, message) = decode_error(&payload).unwrap();
        assert_eq!(code, ErrorCode::Io);
        assert!(message.chars().all(|c| c == 'é'));
    }

    #[test]
    fn every_error_code_has_a_word_of_its_own() {
        for code in ErrorCode::ALL {
            assert_eq!(ErrorCode::from_word(code.word()), Some(code));
            assert_eq!(decode_error(&encode_error(code, "why")), Ok((code, "why".to_owned())));
        }
        assert_eq!(ErrorCode::from_word("Busy"), None);
    }
}
