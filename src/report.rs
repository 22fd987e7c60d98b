//! Exit codes, and how an error reaches whoever started us: once, on one line, with its sources, prefixed by the
//! role.

use std::borrow::Cow;
use std::error::Error;
use std::fmt::Write as _;
use std::{fmt, io};

/// Exit codes, from sysexits.h where it has a word for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitStatus {
    /// What was asked for is done.
    Success = 0,
    /// It was tried, and could not be done: the supervisor could not start or go on serving, say.
    Failure = 1,
    /// Something that is needed could not be found out.
    Incomplete = 2,
    /// `EX_USAGE`: bad arguments, or metadata that is not what it should be.
    Usage = 64,
    /// `EX_OSERR`: the system refused.
    System = 71,
    /// `EX_TEMPFAIL`: not done in time.
    TimedOut = 75,
    /// The shell's word for a command that was found and can't be executed.
    NotExecutable = 126,
    /// The shell's word for a command that was not found.
    NotFound = 127,
}

/// A system call that failed, and what it was needed for: "cannot bind the listening socket: …".
#[derive(Debug)]
pub struct SystemError {
    doing: Cow<'static, str>,
    source: io::Error,
}

impl SystemError {
    /// `doing` completes the sentence "cannot …".
    pub fn new(doing: impl Into<Cow<'static, str>>, source: io::Error) -> Self {
        Self { doing: doing.into(), source }
    }

    /// What was being attempted, as it reads after "cannot".
    pub fn doing(&self) -> &str {
        &self.doing
    }
}

impl fmt::Display for SystemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}", self.doing)
    }
}

impl Error for SystemError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.source)
    }
}

/// Adds what was being attempted to an error of the system.
pub trait Doing<T> {
    /// `doing` completes the sentence "cannot …".
    fn doing(self, doing: impl Into<Cow<'static, str>>) -> Result<T, SystemError>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, doing: impl Into<Cow<'static, str>>) -> Result<T, SystemError> {
        self.map_err(|source| SystemError { doing: doing.into(), source: source.into() })
    }
}

/// An error and its sources as one line: "cannot open '/x': No such file or directory (os error 2)".
pub struct Chain<'a>(pub &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut next = self.0.source();
        while let Some(error) = next {
            write!(f, ": {error}")?;
            next = error.source();
        }
        Ok(())
    }
}

/// Prints an error on standard error, prefixed by the role.
pub fn print_error(role: &str, error: &dyn Error) {
    eprintln!("opencode-pty {role}: {}", Chain(error));
}

/// Bytes or text of a stranger for a message: in single ticks, escaped, at most 80 characters of it.
pub fn quoted(text: &str) -> String {
    let mut quoted = String::from("'");
    for character in text.chars().take(80) {
        quoted.extend(character.escape_debug());
    }
    quoted.push_str(if text.chars().nth(80).is_some() { "…'" } else { "'" });
    quoted
}

/// A JSON string (RFC 8259).
pub fn json_string(text: &str) -> String {
    let mut json = String::from("\"");
    for character in text.chars() {
        match character {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            control if control < ' ' => {
                let _ = write!(json, "\\u{:04x}", u32::from(control));
            }
            other => json.push(other),
        }
    }
    json.push('"');
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_end_a_json_string_is_escaped() {
        assert_eq!(json_string("a\"b\\c\n\0\u{1f}é"), "\"a\\\"b\\\\c\\u000a\\u0000\\u001fé\"");
    }

    #[test]
    fn an_error_is_one_line_with_its_sources() {
        let failed: Result<(), _> = Err(io::Error::from_raw_os_error(2));
        let error = failed.doing("open 'x'").unwrap_err();
        assert_eq!(Chain(&error).to_string(), "cannot open 'x': No such file or directory (os error 2)");
    }

    #[test]
    fn a_strangers_text_is_escaped_and_cut() {
        assert_eq!(quoted("a\n\u{1b}[31m"), "'a\\n\\u{1b}[31m'");
        assert_eq!(quoted(&"x".repeat(81)), format!("'{}…'", "x".repeat(80)));
    }
}
