//! Lines for the journal, on standard error with the priority in front that journald understands.
//!
//! What a stranger sent is quoted before it gets here (`report::quoted`); arguments, input and output of a session
//! never get here.

use std::fmt;
use std::io::Write;

use crate::sys::message::{is_not_a_socket, send_bytes};

/// Something an operator must look at.
pub fn error(message: &str) {
    line(3, message);
}

/// Something that went wrong and was dealt with.
pub fn warning(message: &str) {
    line(4, message);
}

/// Something worth knowing.
pub fn notice(message: &str) {
    line(5, message);
}

/// The ordinary course of things.
pub fn info(message: &str) {
    line(6, message);
}

fn line(priority: u8, message: &str) {
    let text = format!("<{priority}>{}\n", OneLine(message));
    // One call for one line, so that lines of two writers can't mix. A journal that is down loses the line, and one
    // that hangs must not make us hang: as a socket, standard error is never waited for.
    match send_bytes(std::io::stderr(), text.as_bytes()) {
        Err(error) if is_not_a_socket(&error) => {
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
        Ok(_) | Err(_) => {}
    }
}

/// Text with its line breaks and control characters escaped.
struct OneLine<'a>(&'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            if character.is_control() {
                write!(f, "{}", character.escape_default())?;
            } else {
                write!(f, "{character}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_stays_one_line() {
        assert_eq!(OneLine("a\n<0>b\u{1b}é").to_string(), "a\\n<0>b\\u{1b}é");
    }
}
