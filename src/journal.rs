//! Records for the journal: a line for people, fields for programs. `docs/journal.md` is the contract; a test holds
//! it to `Event` and `Field`.
//!
//! Where standard error is the journal (`$JOURNAL_STREAM`, systemd.exec(5)), a record goes there as one datagram of
//! the journal's native protocol. Anywhere else, and whenever the journal does not take the datagram, its line goes to
//! standard error with the priority in front that journald understands. Neither is ever waited for: a journal that
//! hangs costs records, not sessions.
//!
//! What a stranger sent is quoted before it gets here (`report::quoted`) and escaped here again, so that a value can't
//! end its line; arguments, input, output and the directory's path of a session never get here.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::sync::OnceLock;

use crate::limits::{JOURNAL_SOCKET_PATH, JOURNAL_VALUE_CHARS_MAX};
use crate::sys::message::{is_not_a_socket, send_bytes};

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The supervisor listens.
    Serving,
    /// It ends because something failed.
    Failed,
    /// A session runs.
    SessionStarted,
    /// A session was asked for by the server, and there is none.
    SessionNotStarted,
    /// A session that ran is over, and nothing of it is left.
    SessionEnded,
    /// A connection was refused.
    Refused,
    /// No connection can be accepted right now.
    AcceptFailed,
    /// Whether a session's unit is gone could not be found out.
    CleanUpFailed,
    /// A session of an earlier supervisor was found, and is being stopped.
    LeftoverFound,
    /// It does not stop, and is tried again.
    LeftoverStuck,
    /// It, or one that was late, is gone.
    LeftoverGone,
    /// A start that had been given up was carried out after all, and is being stopped.
    StartedLate,
    /// The system bus does not answer any more.
    BusAway,
    /// It does again.
    BusBack,
    /// Somebody who is not the service manager owns its name.
    Impostor,
}

impl Event {
    /// Every event, for pages and tests.
    pub const ALL: [Self; 15] = [
        Self::Serving,
        Self::Failed,
        Self::SessionStarted,
        Self::SessionNotStarted,
        Self::SessionEnded,
        Self::Refused,
        Self::AcceptFailed,
        Self::CleanUpFailed,
        Self::LeftoverFound,
        Self::LeftoverStuck,
        Self::LeftoverGone,
        Self::StartedLate,
        Self::BusAway,
        Self::BusBack,
        Self::Impostor,
    ];

    /// Its `MESSAGE_ID`. Random, stable, and never used for anything else.
    pub fn id(self) -> &'static str {
        match self {
            Self::Serving => "1cf2a0ea79df4540e7ad0134fe37b4f2",
            Self::Failed => "adae9be590200336a7f426a0b4c05a95",
            Self::SessionStarted => "84456e4e8edcecc69f4f5f89c36b08b0",
            Self::SessionNotStarted => "9c23f530255093330503e74b447526d5",
            Self::SessionEnded => "7d097934409f104d0d05dd9325641608",
            Self::Refused => "b26f35b9e17bce942b47d6ac2f6a4afe",
            Self::AcceptFailed => "55e7a5a7ee8e5310fa892753fbb9e177",
            Self::CleanUpFailed => "dc0b95710a424a27cb5d7a8f6fd3ba69",
            Self::LeftoverFound => "26d5c8ff171d30b95f818d05fa429224",
            Self::LeftoverStuck => "7ba3197af0ca9c518b8e40ec36cdcfbf",
            Self::LeftoverGone => "f3cb7f7de30425721a60f8faa137f9ac",
            Self::StartedLate => "a991e349526476c33e1b7f52ab0a9a2f",
            Self::BusAway => "032e689fa5c73c277762bc430ae82abf",
            Self::BusBack => "1b055f62ff013573a563613a07e82c5b",
            Self::Impostor => "3f5b42e4e409b1e9f2dcca9ac6c10422",
        }
    }

    /// Its `PRIORITY`: 3 an operator must look at it, 4 it went wrong and was dealt with, 5 worth knowing, 6 the ordinary
    /// course of things.
    pub fn priority(self) -> u8 {
        match self {
            Self::Failed | Self::CleanUpFailed | Self::LeftoverStuck | Self::Impostor => 3,
            Self::Refused | Self::AcceptFailed | Self::StartedLate | Self::BusAway => 4,
            Self::SessionNotStarted | Self::LeftoverFound | Self::LeftoverGone | Self::BusBack => 5,
            Self::Serving | Self::SessionStarted | Self::SessionEnded => 6,
        }
    }
}

/// What a record says besides its line. Every record has `MESSAGE`, `MESSAGE_ID`, `PRIORITY` and `SYSLOG_IDENTIFIER`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// The session's unit. journald's name for the unit a record is about, so that `journalctl -u` finds it.
    Unit,
    /// The session's invocation, likewise.
    Invocation,
    /// Pid of the process that connected.
    PeerPid,
    /// Uid of the process that connected.
    PeerUid,
    /// Invocation of the server's unit.
    ServerInvocation,
    /// What the session's runtime is limited to.
    Runtime,
    /// The isolation the launcher reports to be in force.
    Isolation,
    /// `st_dev` of the directory.
    CwdDev,
    /// `st_ino` of the directory.
    CwdIno,
    /// Input received.
    InputBytes,
    /// Output taken from the terminal.
    OutputBytes,
    /// The exit record's result.
    Result,
    /// The exit record's code.
    Code,
    /// The exit record's status.
    Status,
    /// Who or what ended the session, or cancelled its start.
    EndedBy,
    /// From `started` to the end of the clean-up.
    Ran,
    /// The clean-up's part of it.
    CleanUp,
    /// Whether SIGKILL was needed.
    Killed,
    /// The code the peer was told, if it was told any.
    Error,
    /// Why there is no session.
    Reason,
    /// Refusals since the last such record, this one included.
    Refusals,
    /// The program's version.
    Version,
}

impl Field {
    /// Every field, for pages and tests.
    pub const ALL: [Self; 22] = [
        Self::Unit,
        Self::Invocation,
        Self::PeerPid,
        Self::PeerUid,
        Self::ServerInvocation,
        Self::Runtime,
        Self::Isolation,
        Self::CwdDev,
        Self::CwdIno,
        Self::InputBytes,
        Self::OutputBytes,
        Self::Result,
        Self::Code,
        Self::Status,
        Self::EndedBy,
        Self::Ran,
        Self::CleanUp,
        Self::Killed,
        Self::Error,
        Self::Reason,
        Self::Refusals,
        Self::Version,
    ];

    /// The name in the journal. Never `OBJECT_PID`: journald would add that process's command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unit => "OBJECT_SYSTEMD_UNIT",
            Self::Invocation => "OBJECT_SYSTEMD_INVOCATION_ID",
            Self::PeerPid => "OPENCODE_PTY_PEER_PID",
            Self::PeerUid => "OPENCODE_PTY_PEER_UID",
            Self::ServerInvocation => "OPENCODE_PTY_SERVER_INVOCATION_ID",
            Self::Runtime => "OPENCODE_PTY_RUNTIME_SEC",
            Self::Isolation => "OPENCODE_PTY_ISOLATION",
            Self::CwdDev => "OPENCODE_PTY_CWD_DEV",
            Self::CwdIno => "OPENCODE_PTY_CWD_INO",
            Self::InputBytes => "OPENCODE_PTY_INPUT_BYTES",
            Self::OutputBytes => "OPENCODE_PTY_OUTPUT_BYTES",
            Self::Result => "OPENCODE_PTY_RESULT",
            Self::Code => "OPENCODE_PTY_CODE",
            Self::Status => "OPENCODE_PTY_STATUS",
            Self::EndedBy => "OPENCODE_PTY_ENDED_BY",
            Self::Ran => "OPENCODE_PTY_RAN_USEC",
            Self::CleanUp => "OPENCODE_PTY_CLEANUP_USEC",
            Self::Killed => "OPENCODE_PTY_KILLED",
            Self::Error => "OPENCODE_PTY_ERROR",
            Self::Reason => "OPENCODE_PTY_REASON",
            Self::Refusals => "OPENCODE_PTY_REFUSALS",
            Self::Version => "OPENCODE_PTY_VERSION",
        }
    }
}

/// A field and its value; an empty one is left out.
pub type Value<'a> = (Field, &'a dyn fmt::Display);

/// Writes one record.
pub fn record(event: Event, values: &[Value<'_>], message: &str) {
    if record_natively(event, values, message).is_err() {
        line(event.priority(), message);
    }
}

/// Writes one record if it can have its fields. Why not, otherwise: then nothing has been written.
pub fn record_natively(event: Event, values: &[Value<'_>], message: &str) -> io::Result<()> {
    static SOCKET: OnceLock<Option<UnixDatagram>> = OnceLock::new();
    let Some(socket) = SOCKET.get_or_init(|| open().ok().flatten()) else {
        return Err(io::ErrorKind::NotConnected.into());
    };
    // Not connected: the journal may be restarted, and then listens on another socket of the same name.
    socket.send_to(datagram(event, values, message).as_bytes(), JOURNAL_SOCKET_PATH)?;
    Ok(())
}

/// A socket for datagrams to the journal, if that is where standard error goes. Whoever started us may have sent it
/// elsewhere, and wants the lines there.
fn open() -> io::Result<Option<UnixDatagram>> {
    let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?).metadata()?;
    if stream != format!("{}:{}", stderr.dev(), stderr.ino()) {
        return Ok(None);
    }
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok(Some(socket))
}

/// The record as the native protocol has it, a line for each field. No value has a line break, so none needs the
/// protocol's other form, with a length.
fn datagram(event: Event, values: &[Value<'_>], message: &str) -> String {
    let mut text = format!(
        "MESSAGE_ID={}\nPRIORITY={}\nSYSLOG_IDENTIFIER=opencode-pty-supervisor\nMESSAGE={}\n",
        event.id(),
        event.priority(),
        OneLine(message),
    );
    for (field, value) in values {
        let value = value.to_string();
        if !value.is_empty() {
            let _ = writeln!(text, "{}={}", field.name(), OneLine(&value));
        }
    }
    text
}

fn line(priority: u8, message: &str) {
    let text = format!("<{priority}>{}\n", OneLine(message));
    // One call for one line, so that lines of two writers can't mix. A journal that is down loses the line, and one
    // that hangs must not make us hang: as a socket, standard error is never waited for.
    match send_bytes(io::stderr(), text.as_bytes()) {
        Err(error) if is_not_a_socket(&error) => {
            let _ = io::stderr().write_all(text.as_bytes());
        }
        Ok(_) | Err(_) => {}
    }
}

/// Text with its line breaks and control characters escaped, and no more than [`JOURNAL_VALUE_CHARS_MAX`] of it.
struct OneLine<'a>(&'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars().take(JOURNAL_VALUE_CHARS_MAX) {
            if character.is_control() {
                write!(f, "{}", character.escape_default())?;
            } else {
                f.write_char(character)?;
            }
        }
        if self.0.chars().nth(JOURNAL_VALUE_CHARS_MAX).is_some() {
            f.write_char('…')?;
        }
        Ok(())
    }
}

/// An ID of 128 bits, as systemd writes it: 32 hexadecimal digits.
#[derive(Debug)]
pub struct Id<'a>(pub &'a [u8]);

impl fmt::Display for Id<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_message_stays_one_line() {
        assert_eq!(OneLine("a\n<0>b\u{1b}é").to_string(), "a\\n<0>b\\u{1b}é");
    }

    #[test]
    fn a_value_can_not_add_a_field() {
        let text = datagram(Event::Refused, &[(Field::Reason, &"x\nPRIORITY=0\0y")], "a\nMESSAGE_ID=b");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "MESSAGE_ID=b26f35b9e17bce942b47d6ac2f6a4afe",
                "PRIORITY=4",
                "SYSLOG_IDENTIFIER=opencode-pty-supervisor",
                "MESSAGE=a\\nMESSAGE_ID=b",
                "OPENCODE_PTY_REASON=x\\nPRIORITY=0\\u{0}y",
            ]
        );
    }

    #[test]
    fn a_long_value_is_cut() {
        let cut = OneLine(&"é\n".repeat(JOURNAL_VALUE_CHARS_MAX)).to_string();
        assert_eq!(cut.matches('é').count(), JOURNAL_VALUE_CHARS_MAX / 2);
        assert!(cut.ends_with('…'));
        assert!(!OneLine(&"é".repeat(JOURNAL_VALUE_CHARS_MAX)).to_string().contains('…'));
    }

    #[test]
    fn no_two_events_and_no_two_fields_have_one_name() {
        assert_eq!(Event::ALL.map(Event::id).into_iter().collect::<BTreeSet<_>>().len(), Event::ALL.len());
        assert_eq!(Field::ALL.map(Field::name).into_iter().collect::<BTreeSet<_>>().len(), Field::ALL.len());
        for event in Event::ALL {
            let id = event.id();
            assert!(id.len() == 32 && id.bytes().all(|byte| b"0123456789abcdef".contains(&byte)), "{id}");
        }
        for field in Field::ALL {
            // What journald takes: 64 letters at most, none of them small, and no underscore in front.
            let name = field.name();
            let valid = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
            assert!(name.len() <= 64 && name.bytes().all(valid) && !name.starts_with('_'), "{name}");
        }
    }

    #[test]
    fn an_id_reads_as_systemd_writes_it() {
        assert_eq!(Id(&[0x0a; 16]).to_string(), "0a".repeat(16));
        assert_eq!(Id(&[]).to_string(), "");
    }
}
