//! Sends one start frame with one directory over the server's connected socket. (SPEC 5.)
//!
//! The server is a Node program, and Node can't send descriptors; so it starts this program with its connected
//! socket as descriptor 3 and the approved directory as descriptor 4. What would surprise: descriptor 3 is the
//! *server's own* socket, not a copy. So this program never reads from it, never shuts it down and never changes
//! its flags. It opens nothing that a caller named, makes no socket and connects to nothing.
//!
//! Everything the supervisor answers goes to the server; whether the session starts is not known here.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::time::Instant;
use std::{error, fmt, io};

use crate::frame::message::{Start, Words};
use crate::frame::{self, DecodeError, Kind, words};
use crate::limits::{CLIENT_SEND_TIME, RUNTIME_SECONDS_MAX};
use crate::report::{Doing, ExitStatus, SystemError, print_error};
use crate::sys::{directory, inherited, process};

const HELP: &str = "\
opencode-pty-client: sends one start frame with one directory

Usage: opencode-pty-client RUNTIME aCOMMAND [aARGUMENT...]

Arguments:
  RUNTIME      how long the session may run, whole seconds in base 10 without a leading zero:
               1 to 3600; 0 selects 3600
  aCOMMAND     the letter `a`, then the command in unpadded URL-safe base64 (A-Z a-z 0-9 - _)
  aARGUMENT    the same for each argument; an empty argument is `a`

Limits: a command of 1 to 4096 bytes; 128 arguments of 16384 bytes each, 65536 bytes together; UTF-8 without NUL.

Started by the server, with nothing else open:
  descriptor 3   the server's connected socket to the supervisor
  descriptor 4   the approved directory

Exit codes:
  0    the frame is out
  64   bad arguments, 3 is not a connected Unix stream socket, or 4 is not a directory
  71   the system refused
  75   the frame was not taken within 5 seconds
";

/// The server's socket.
const SOCKET: i32 = 3;
/// The approved directory.
const DIRECTORY: i32 = 4;

/// Runs the client.
pub fn main(args: &[OsString]) -> ExitStatus {
    if matches!(args, [word] if word == "--help" || word == "-h") {
        print!("{HELP}");
        return ExitStatus::Success;
    }
    match send(args) {
        Ok(()) => ExitStatus::Success,
        Err(error) => {
            print_error("client", &error);
            error.exit_status()
        }
    }
}

/// The client's story.
fn send(args: &[OsString]) -> Result<(), Error> {
    // Before anything else: Node can leak descriptors it inherited itself, and what is closed here can't be used
    // by mistake below. A second line only; the acceptance looks at the table before this.
    inherited::close_from(DIRECTORY.unsigned_abs() + 1).doing("close inherited descriptors")?;
    let (runtime_seconds, words) = decode_arguments(args)?;

    let bad = |number, wanted| move |source| Error::Descriptor { number, wanted, source };
    let socket = inherited::take(SOCKET).map_err(bad(SOCKET, "open"))?;
    let dir = inherited::take(DIRECTORY).map_err(bad(DIRECTORY, "open"))?;
    process::check_connected_stream(&socket).map_err(bad(SOCKET, "a connected Unix stream socket"))?;
    let identity = directory::identify(&dir).doing("identify the directory, descriptor 4")?;
    if !identity.is_directory {
        return Err(bad(DIRECTORY, "a directory")(io::ErrorKind::NotADirectory.into()));
    }

    let start = Start::new(identity.dev, identity.ino, runtime_seconds, words).map_err(Error::Words)?;
    let frame = frame::encode(Kind::Start, &start.encode()).map_err(Error::Words)?;
    let deadline = Instant::now() + CLIENT_SEND_TIME;
    process::send_all(&socket, &frame, Some(dir.as_fd()), deadline).doing("send the start frame")?;
    Ok(())
}

fn decode_arguments(args: &[OsString]) -> Result<(u32, Words), Error> {
    let args: Option<Vec<&str>> = args.iter().map(|arg| arg.to_str()).collect();
    let args = args.ok_or(Error::Words(DecodeError::Text { part: "argument" }))?;
    let (runtime, encoded) = args.split_first().ok_or(Error::Usage)?;
    let runtime_seconds = decode_runtime(runtime).ok_or(Error::Runtime)?;
    let words = words::decode_words(encoded.iter().copied()).map_err(Error::Words)?;
    Ok((runtime_seconds, words))
}

/// Digits only, no leading zero, at most [`RUNTIME_SECONDS_MAX`].
fn decode_runtime(text: &str) -> Option<u32> {
    let canonical = text == "0" || !text.starts_with('0');
    if !canonical || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|seconds| *seconds <= RUNTIME_SECONDS_MAX)
}

/// Why the frame is not out. Never quotes an argument: they may be secret, and the server logs this line.
#[derive(Debug)]
enum Error {
    /// No arguments.
    Usage,
    /// A runtime that is none.
    Runtime,
    /// Words that are none, or too long or too many.
    Words(DecodeError),
    /// An inherited descriptor is not what it has to be.
    Descriptor { number: i32, wanted: &'static str, source: io::Error },
    /// The system refused, or the time is up.
    System(SystemError),
}

impl Error {
    fn exit_status(&self) -> ExitStatus {
        match self {
            Self::Usage | Self::Runtime | Self::Words(_) | Self::Descriptor { .. } => ExitStatus::Usage,
            Self::System(error) if is_timeout(error) => ExitStatus::TimedOut,
            Self::System(_) => ExitStatus::System,
        }
    }
}

fn is_timeout(error: &SystemError) -> bool {
    let source = error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    source.is_some_and(|source| source.kind() == io::ErrorKind::TimedOut)
}

impl From<SystemError> for Error {
    fn from(error: SystemError) -> Self {
        Self::System(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage => f.write_str("no arguments: RUNTIME aCOMMAND [aARGUMENT...] (see --help)"),
            Self::Runtime => {
                write!(f, "the runtime is not a whole number of seconds from 0 to {RUNTIME_SECONDS_MAX} (see --help)")
            }
            Self::Words(_) => f.write_str("the command or an argument can't be used"),
            Self::Descriptor { number, wanted, .. } => write!(f, "descriptor {number} is not {wanted}"),
            Self::System(error) => error.fmt(f),
        }
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Usage | Self::Runtime => None,
            Self::Words(source) => Some(source),
            Self::Descriptor { source, .. } => Some(source),
            // Shown as this error itself, so its source is ours.
            Self::System(error) => error.source(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::words::encode_word;
    use std::os::unix::ffi::OsStringExt;

    fn decoded(args: &[&str]) -> Result<(u32, Words), Error> {
        decode_arguments(&args.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn a_runtime_has_one_spelling_and_a_limit() {
        for (text, seconds) in [("0", 0), ("1", 1), ("60", 60), ("3600", 3_600)] {
            assert_eq!(decode_runtime(text), Some(seconds));
        }
        for text in ["", "00", "01", "+1", "-1", " 1", "1 ", "1s", "0x10", "1e3", "3601", "4294967296", "٣", "1.0"] {
            assert_eq!(decode_runtime(text), None, "'{text}'");
        }
    }

    #[test]
    fn words_keep_their_boundaries() {
        let encoded: Vec<String> = ["sh", "", "a b", "$HOME"].into_iter().map(encode_word).collect();
        let mut args = vec!["0"];
        args.extend(encoded.iter().map(String::as_str));
        let (seconds, words) = decoded(&args).unwrap();
        assert_eq!(seconds, 0);
        assert_eq!(words.as_slice(), ["sh", "", "a b", "$HOME"]);
    }

    #[test]
    fn bad_arguments_are_a_matter_of_usage() {
        let many = vec!["aZg"; 131];
        for args in [&[][..], &["0"], &["x", "aZg"], &["0", "Zg"], &["0", "aZg=="], &["0", "a"], &many] {
            assert_eq!(decoded(args).unwrap_err().exit_status(), ExitStatus::Usage, "{args:?}");
        }
        let not_utf8 = [OsString::from("0"), OsString::from_vec(vec![b'a', 0xff])];
        assert_eq!(decode_arguments(&not_utf8).unwrap_err().exit_status(), ExitStatus::Usage);
    }
}
