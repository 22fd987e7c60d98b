//! What a unit runs: the launcher's side of the hand-over, and what stands in for script(1) and the command.

use std::fmt;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use opencode_pty::frame::message::{ErrorCode, Start, encode_error};
use opencode_pty::frame::{Header, Kind, encode};
use opencode_pty::limits::FRAME_HEADER_BYTES;

use super::{FakeManager, Handed};

/// How a unit's main process ends: `ExecMainCode`, `ExecMainStatus` and `Result`.
pub type Ending = (i32, i32, &'static str);

/// What stands in for script(1) and the command: it has the terminal's bytes and says how it ended.
pub type Program = Arc<dyn Fn(&mut Terminal) -> Ending + Send + Sync>;

/// What the launcher does with its start frame.
#[derive(Clone, Default)]
pub enum Launcher {
    /// Answers `started` and echoes what is typed until its terminal is closed.
    #[default]
    Echo,
    /// Answers `started` and runs this.
    Runs(Program),
    /// Answers with an error and ends with 71.
    Refuses(ErrorCode, &'static str),
    /// Answers with these bytes and then stays, whatever becomes of its terminal.
    Says(Vec<u8>),
    /// Reads the frame and leaves without an answer.
    Leaves,
    /// Reads the frame, says nothing and stays.
    IsSilent,
}

impl Launcher {
    /// Answers `started` and runs `program`.
    pub fn runs(program: impl Fn(&mut Terminal) -> Ending + Send + Sync + 'static) -> Self {
        Self::Runs(Arc::new(program))
    }

    /// Answers `started`, shows these bytes and ends like this.
    pub fn shows(bytes: impl Into<Vec<u8>>, ending: Ending) -> Self {
        let bytes = bytes.into();
        Self::runs(move |terminal| {
            // A supervisor that closed in the middle is the test's to notice, at the client's side.
            let _ = terminal.socket.write_all(&bytes);
            ending
        })
    }
}

impl fmt::Debug for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Echo => "Echo",
            Self::Runs(_) => "Runs",
            Self::Refuses(..) => "Refuses",
            Self::Says(_) => "Says",
            Self::Leaves => "Leaves",
            Self::IsSilent => "IsSilent",
        })
    }
}

/// The session's end of the socketpair, after the launcher's answer.
#[derive(Debug)]
pub struct Terminal {
    /// What the supervisor handed over.
    pub start: Start,
    /// Raw terminal bytes, both ways.
    pub socket: UnixStream,
}

impl FakeManager {
    /// The launcher's side of the hand-over. Without one the unit failed to start: only what comes is noted.
    pub(super) fn run_launcher(
        &self,
        name: &str,
        mut socket: UnixStream,
        launcher: Option<Launcher>,
    ) -> Option<Ending> {
        let handed = read_start(&mut socket);
        let start = match &handed {
            Handed::Start(start) => Some(start.clone()),
            _ => None,
        };
        self.with(|state| {
            if let Some(unit) = state.units.get_mut(name) {
                unit.handed = handed;
            }
        });
        let launcher = launcher?;
        let Some(start) = start else { return Some((1, 71, "exit-code")) };
        // What the supervisor closes early is the test's to notice, so failed writes end the play quietly.
        let mut answer = |kind, payload: &[u8]| {
            let bytes = encode(kind, payload).expect("the launcher's answers are within a frame's limits");
            socket.write_all(&bytes).is_ok()
        };
        match launcher {
            Launcher::Echo | Launcher::Runs(_) => {
                answer(Kind::Started, b"groups=dropped landlock=6 scope=signal,abstract");
                let mut terminal = Terminal { start: *start, socket };
                match launcher {
                    Launcher::Runs(program) => Some(program(&mut terminal)),
                    _ => Some(echo(&mut terminal)),
                }
            }
            Launcher::Refuses(code, text) => {
                answer(Kind::Error, &encode_error(code, text));
                Some((1, 71, "exit-code"))
            }
            Launcher::Says(bytes) => {
                let _ = socket.write_all(&bytes);
                None
            }
            Launcher::Leaves => Some((1, 71, "exit-code")),
            Launcher::IsSilent => None,
        }
    }
}

fn echo(terminal: &mut Terminal) -> Ending {
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = terminal.socket.read(&mut buffer) {
        if terminal.socket.write_all(buffer.get(..read).unwrap_or_default()).is_err() {
            break;
        }
    }
    (1, 0, "success")
}

fn read_start(socket: &mut UnixStream) -> Handed {
    let mut bytes = vec![0; FRAME_HEADER_BYTES];
    let mut have = 0;
    loop {
        let room = bytes.get_mut(have..).unwrap_or_default();
        if room.is_empty() {
            let header = bytes.first_chunk().and_then(|header| Header::decode(header).ok());
            let payload = bytes.get(FRAME_HEADER_BYTES..).unwrap_or_default();
            match header {
                Some(header) if payload.len() < header.payload_len() => {
                    bytes.resize(FRAME_HEADER_BYTES + header.payload_len(), 0);
                    continue;
                }
                Some(header) if header.kind() == Kind::Start => {
                    if let Ok(start) = Start::decode(payload) {
                        return Handed::Start(Box::new(start));
                    }
                }
                _ => {}
            }
            return Handed::Closed(bytes);
        }
        if let Ok(read @ 1..) = socket.read(room) {
            have += read;
        } else {
            bytes.truncate(have);
            return Handed::Closed(bytes);
        }
    }
}
