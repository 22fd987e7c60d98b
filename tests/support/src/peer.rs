//! A test's side of the protocol: frames out, frames in, and the order they must come in.
//!
//! Every frame that arrives is held against SPEC 4 before the test sees it: its direction, its limits, `started`
//! first, one terminal frame, `stopped` only where a stop was asked for, nothing after the end. A test that only
//! looks at the output still fails when the order is wrong. Every wait has a deadline, and an error says what was
//! waited for and what came instead.

use std::fmt;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use opencode_pty::frame::message::{ErrorCode, Exit, Start, Words, decode_error};
use opencode_pty::frame::{self, DecodeError, Header, Kind};
use opencode_pty::limits::{DATA_BYTES_MAX, FRAME_HEADER_BYTES};
use rustix::net::{Shutdown, shutdown};

use crate::descriptors;

/// How long a send may take. Chosen: far beyond what a loaded machine needs, short enough to fail a run.
pub const SEND_TIME: Duration = Duration::from_mins(1);
/// Bytes read at a time.
const READ_BYTES: usize = 128 << 10;

/// A frame from the supervisor, or the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The unit's name.
    Started(String),
    /// Terminal bytes.
    Output(Vec<u8>),
    /// How the session ended.
    Exit(Exit),
    /// Why there is no session.
    Error(ErrorCode, String),
    /// The stop that was asked for is complete.
    Stopped,
    /// The supervisor closed the connection; also if the hang-up came as `ECONNRESET`.
    Closed,
}

/// All that came until the connection closed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transcript {
    /// The unit of `started`.
    pub unit: Option<String>,
    /// Every output byte.
    pub output: Vec<u8>,
    /// The `exit` frame.
    pub exit: Option<Exit>,
    /// The `error` frame.
    pub error: Option<(ErrorCode, String)>,
    /// Whether `stopped` came.
    pub stopped: bool,
    /// How many frames came, without the end.
    pub frames: usize,
}

impl Transcript {
    /// The output as text; malformed UTF-8 is replaced.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.output).into_owned()
    }

    /// The error's code, if there was an error.
    pub fn error_code(&self) -> Option<ErrorCode> {
        self.error.as_ref().map(|(code, _)| *code)
    }
}

/// Why what was waited for did not come.
#[derive(Debug)]
pub enum PeerError {
    /// A system call failed.
    System {
        /// What was being attempted, as it reads after "cannot".
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The deadline passed.
    TimedOut {
        /// What was waited for.
        waiting_for: &'static str,
        /// What had come until then.
        came: String,
    },
    /// Bytes that are not a frame.
    Malformed {
        /// What was wrong with them.
        source: DecodeError,
        /// What had come before them.
        came: String,
    },
    /// A frame that must not come here.
    Order {
        /// The rule that was broken.
        rule: String,
        /// What had come before it.
        came: String,
    },
}

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System { doing, source } => write!(f, "cannot {doing}: {source}"),
            Self::TimedOut { waiting_for, came } => write!(f, "waited for {waiting_for}; until then came: {came}"),
            Self::Malformed { source, came } => write!(f, "not a frame: {source}; before it came: {came}"),
            Self::Order { rule, came } => write!(f, "{rule}; before it came: {came}"),
        }
    }
}

impl std::error::Error for PeerError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System { source, .. } => Some(source),
            Self::Malformed { source, .. } => Some(source),
            Self::TimedOut { .. } | Self::Order { .. } => None,
        }
    }
}

/// The sending half; clones share the socket, which stays open until the last one and the [`Peer`] are gone.
#[derive(Clone, Debug)]
pub struct Sender {
    socket: Arc<OwnedFd>,
    stop_sent: Arc<AtomicBool>,
}

impl Sender {
    /// Sends a start frame, the directory attached to its first byte.
    pub fn send_start(&self, start: &Start, dir: impl AsFd) -> Result<(), PeerError> {
        let bytes = frame::encode(Kind::Start, &start.encode()).expect("a Start is within a frame's limits");
        self.send_raw(&bytes, &[dir.as_fd()])
    }

    /// Sends a start of these words in `dir`, with the device and inode it really has.
    pub fn start_in(&self, dir: impl AsFd, runtime_seconds: u32, words: &[&str]) -> Result<(), PeerError> {
        let start = start_for(&dir, runtime_seconds, words)
            .map_err(|source| PeerError::System { doing: "describe the start", source })?;
        self.send_start(&start, dir)
    }

    /// Sends any bytes with any descriptors.
    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), PeerError> {
        descriptors::send_all(self.socket.as_fd(), bytes, fds, Instant::now() + SEND_TIME).map_err(|source| {
            if source.kind() == ErrorKind::TimedOut {
                PeerError::TimedOut { waiting_for: "room to send", came: "nothing that matters here".into() }
            } else {
                PeerError::System { doing: "send", source }
            }
        })
    }

    /// Sends what fits at once and says how much that was; 0 if the supervisor isn't reading.
    pub fn send_now(&self, bytes: &[u8]) -> Result<usize, PeerError> {
        match descriptors::send_now(self.socket.as_fd(), bytes, &[]) {
            Ok(sent) => Ok(sent),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(source) => Err(PeerError::System { doing: "send", source }),
        }
    }

    /// Types these bytes, in as many input frames as they need.
    pub fn input(&self, bytes: &[u8]) -> Result<(), PeerError> {
        for part in bytes.chunks(DATA_BYTES_MAX) {
            let bytes = frame::encode(Kind::Input, part).expect("chunks are within a frame's limits");
            self.send_raw(&bytes, &[])?;
        }
        Ok(())
    }

    /// Asks for the whole unit to be stopped.
    pub fn stop(&self) -> Result<(), PeerError> {
        self.stop_sent.store(true, Ordering::SeqCst);
        let bytes = frame::encode(Kind::Stop, &[]).expect("a stop frame is empty");
        self.send_raw(&bytes, &[])
    }

    /// Ends the sending side: a disconnect, by SPEC 4.
    pub fn half_close(&self) -> Result<(), PeerError> {
        shutdown(&*self.socket, Shutdown::Write)
            .map_err(|errno| PeerError::System { doing: "half-close", source: errno.into() })
    }
}

/// A start of these words in `dir`, with the device and inode it really has.
pub fn start_for(dir: impl AsFd, runtime_seconds: u32, words: &[&str]) -> io::Result<Start> {
    let stat = rustix::fs::fstat(dir)?;
    let words = Words::new(words.iter().map(|word| (*word).to_owned()).collect()).map_err(io::Error::other)?;
    Start::new(stat.st_dev, stat.st_ino, runtime_seconds, words).map_err(io::Error::other)
}

/// How far a connection has come, as its client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Nothing,
    Started,
    Exited,
    Failed,
    Stopped,
    Closed,
}

/// One connection to the supervisor.
#[derive(Debug)]
pub struct Peer {
    sender: Sender,
    pending: Vec<u8>,
    used: usize,
    phase: Phase,
    frames: usize,
    output_bytes: u64,
    came: Vec<String>,
}

impl Peer {
    /// A connected socket, of whichever process.
    pub fn new(socket: OwnedFd) -> Self {
        let sender = Sender { socket: Arc::new(socket), stop_sent: Arc::new(AtomicBool::new(false)) };
        Self { sender, pending: Vec::new(), used: 0, phase: Phase::Nothing, frames: 0, output_bytes: 0, came: vec![] }
    }

    /// Connects as this process.
    pub fn connect(path: &Path) -> io::Result<Self> {
        Ok(Self::new(UnixStream::connect(path)?.into()))
    }

    /// The socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.sender.socket.as_fd()
    }

    /// A second handle for another thread to send with.
    pub fn sender(&self) -> Sender {
        self.sender.clone()
    }

    /// Sends a start frame, the directory attached to its first byte.
    pub fn send_start(&self, start: &Start, dir: impl AsFd) -> Result<(), PeerError> {
        self.sender.send_start(start, dir)
    }

    /// Sends a start of these words in `dir`, with the device and inode it really has.
    pub fn start_in(&self, dir: impl AsFd, runtime_seconds: u32, words: &[&str]) -> Result<(), PeerError> {
        self.sender.start_in(dir, runtime_seconds, words)
    }

    /// Sends any bytes with any descriptors.
    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), PeerError> {
        self.sender.send_raw(bytes, fds)
    }

    /// Types these bytes.
    pub fn input(&self, bytes: &[u8]) -> Result<(), PeerError> {
        self.sender.input(bytes)
    }

    /// Asks for the whole unit to be stopped.
    pub fn stop(&self) -> Result<(), PeerError> {
        self.sender.stop()
    }

    /// Ends the sending side.
    pub fn half_close(&self) -> Result<(), PeerError> {
        self.sender.half_close()
    }

    /// The next frame, or the end.
    pub fn next_frame(&mut self, timeout: Duration) -> Result<Frame, PeerError> {
        self.next("a frame", Instant::now() + timeout)
    }

    /// The `started` frame, and nothing else.
    pub fn started(&mut self, timeout: Duration) -> Result<String, PeerError> {
        match self.next("started", Instant::now() + timeout)? {
            Frame::Started(unit) => Ok(unit),
            other => Err(self.order(format!("waited for started, not for {other:?}"))),
        }
    }

    /// Reads output until `wanted` is in it; gives all that was read. What comes with it stays for later only
    /// frame by frame, so the match may lie in the middle of the answer.
    pub fn output_until(&mut self, wanted: &[u8], timeout: Duration) -> Result<Vec<u8>, PeerError> {
        let deadline = Instant::now() + timeout;
        let mut output: Vec<u8> = Vec::new();
        loop {
            match self.next("certain output", deadline) {
                Ok(Frame::Output(bytes)) => {
                    let searched = output.len().saturating_sub(wanted.len());
                    output.extend_from_slice(&bytes);
                    let fresh = output.get(searched..).unwrap_or_default();
                    if wanted.is_empty() || fresh.windows(wanted.len()).any(|window| window == wanted) {
                        return Ok(output);
                    }
                }
                Ok(Frame::Started(_)) => {}
                Ok(other) => {
                    let (wanted, output) = (wanted.escape_ascii(), output.escape_ascii());
                    return Err(self.order(format!("waited for output '{wanted}', not for {other:?} after '{output}'")));
                }
                Err(PeerError::TimedOut { came, .. }) => {
                    let came =
                        format!("{came}; output '{}' without '{}'", output.escape_ascii(), wanted.escape_ascii());
                    return Err(PeerError::TimedOut { waiting_for: "certain output", came });
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Everything until the supervisor closes the connection. As a client should, it hangs up after `exit`, or after
    /// `stopped` where a stop was asked for; [`Peer::read_until_closed`] leaves that to the supervisor.
    pub fn read_to_end(&mut self, timeout: Duration) -> Result<Transcript, PeerError> {
        self.read(timeout, true)
    }

    /// The same without hanging up: the supervisor waits a while for a stop that may be on its way.
    pub fn read_until_closed(&mut self, timeout: Duration) -> Result<Transcript, PeerError> {
        self.read(timeout, false)
    }

    fn read(&mut self, timeout: Duration, hang_up: bool) -> Result<Transcript, PeerError> {
        let deadline = Instant::now() + timeout;
        let mut transcript = Transcript::default();
        loop {
            match self.next("the end of the connection", deadline)? {
                Frame::Started(unit) => transcript.unit = Some(unit),
                Frame::Output(bytes) => transcript.output.extend_from_slice(&bytes),
                Frame::Exit(exit) => {
                    transcript.exit = Some(exit);
                    if hang_up && !self.sender.stop_sent.load(Ordering::SeqCst) {
                        // It fails where the supervisor has closed already.
                        let _ = self.half_close();
                    }
                }
                Frame::Error(code, message) => transcript.error = Some((code, message)),
                Frame::Stopped => transcript.stopped = true,
                Frame::Closed => return Ok(transcript),
            }
            transcript.frames += 1;
        }
    }

    fn next(&mut self, waiting_for: &'static str, deadline: Instant) -> Result<Frame, PeerError> {
        if !self.fill(FRAME_HEADER_BYTES, waiting_for, deadline)? {
            self.phase = Phase::Closed;
            self.came.push("the end".into());
            return Ok(Frame::Closed);
        }
        let header = *self.unread().first_chunk().expect("fill gives as many bytes as it was asked for");
        let header = Header::decode(&header).map_err(|source| self.malformed(source))?;
        // Nothing is used up before the whole frame is here, so that a caller may go on after a timeout.
        let whole = FRAME_HEADER_BYTES + header.payload_len();
        self.fill(whole, waiting_for, deadline)?;
        let payload =
            self.unread().get(FRAME_HEADER_BYTES..whole).expect("fill gives as many bytes as it was asked for");
        let frame = decode(header.kind(), payload.to_vec()).map_err(|source| self.malformed(source))?;
        self.used += whole;
        self.judge(&frame)?;
        Ok(frame)
    }

    fn unread(&self) -> &[u8] {
        self.pending.get(self.used..).expect("no more is used than there is")
    }

    /// Reads until there are `len` unread bytes; `false` if the end comes before the first of them.
    fn fill(&mut self, len: usize, waiting_for: &'static str, deadline: Instant) -> Result<bool, PeerError> {
        while self.unread().len() < len {
            self.pending.drain(..self.used);
            self.used = 0;
            let had = self.pending.len();
            self.pending.resize(had + READ_BYTES, 0);
            let room = self.pending.get_mut(had..).expect("the buffer was grown by what is read into it");
            let received = descriptors::receive(&self.sender.socket, room, deadline);
            self.pending.truncate(had + received.as_ref().map_or(0, |received| received.len));
            match received {
                Ok(received) if !received.descriptors.is_empty() => {
                    return Err(self.order("the supervisor sent a descriptor".into()));
                }
                Ok(received) if received.len > 0 => {}
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    return Err(PeerError::TimedOut { waiting_for, came: self.came() });
                }
                Err(error) if error.kind() != ErrorKind::ConnectionReset => {
                    return Err(PeerError::System { doing: "receive", source: error });
                }
                Ok(_) | Err(_) if had == 0 => return Ok(false),
                Ok(_) | Err(_) => {
                    return Err(self.order(format!("the connection ended inside a frame, after {had} bytes")));
                }
            }
        }
        Ok(true)
    }

    /// Holds a frame against the order of SPEC 4 and notes that it came.
    fn judge(&mut self, frame: &Frame) -> Result<(), PeerError> {
        let stop_sent = self.sender.stop_sent.load(Ordering::SeqCst);
        let next = match (self.phase, frame) {
            (Phase::Nothing, Frame::Started(unit)) if is_unit_name(unit) => Phase::Started,
            (Phase::Started, Frame::Output(_)) => Phase::Started,
            (Phase::Started, Frame::Exit(_)) => Phase::Exited,
            // A start that a stop cancelled has a record, too.
            (Phase::Nothing, Frame::Exit(exit)) if stop_sent && *exit == Exit::stopped() => Phase::Exited,
            (Phase::Nothing | Phase::Started, Frame::Error(..)) => Phase::Failed,
            (Phase::Nothing | Phase::Exited, Frame::Stopped) if stop_sent => Phase::Stopped,
            (phase, frame) => return Err(self.order(format!("{} must not come now ({phase:?})", brief(frame)))),
        };
        self.phase = next;
        self.frames += 1;
        if let Frame::Output(bytes) = frame {
            self.output_bytes += bytes.len() as u64;
        } else {
            self.came.push(brief(frame));
        }
        Ok(())
    }

    fn came(&self) -> String {
        let list = if self.came.is_empty() { "nothing".to_owned() } else { self.came.join(", ") };
        format!("{list} ({} frames, {} bytes of output)", self.frames, self.output_bytes)
    }

    fn order(&self, rule: String) -> PeerError {
        PeerError::Order { rule, came: self.came() }
    }

    fn malformed(&self, source: DecodeError) -> PeerError {
        PeerError::Malformed { source, came: self.came() }
    }
}

fn decode(kind: Kind, payload: Vec<u8>) -> Result<Frame, DecodeError> {
    Ok(match kind {
        Kind::Started => {
            Frame::Started(String::from_utf8(payload).map_err(|_| DecodeError::Text { part: "unit name" })?)
        }
        Kind::Output => Frame::Output(payload),
        Kind::Exit => Frame::Exit(Exit::decode(&payload)?),
        Kind::Error => {
            let (code, message) = decode_error(&payload)?;
            Frame::Error(code, message)
        }
        Kind::Stopped => Frame::Stopped,
        Kind::Start | Kind::Input | Kind::Stop => return Err(DecodeError::UnexpectedKind { kind }),
    })
}

/// Whether this is a session unit's name, by SPEC 4's grammar and independent of the product's own check.
pub fn is_unit_name(text: &str) -> bool {
    text.strip_prefix("opencode-pty-").and_then(|rest| rest.strip_suffix(".service")).is_some_and(|digits| {
        digits.len() == 32 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

fn brief(frame: &Frame) -> String {
    match frame {
        Frame::Output(bytes) => format!("output of {} bytes", bytes.len()),
        Frame::Exit(exit) => format!("exit: {exit}"),
        Frame::Error(code, message) => format!("error '{code}: {message}'"),
        other => format!("{other:?}"),
    }
}
