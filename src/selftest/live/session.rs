//! A session as the server sees it: the client's side of the protocol, blocking, every wait with a deadline.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::frame::message::{ErrorCode, Exit, Start, Words, decode_error};
use crate::frame::{self, Header, Kind};
use crate::limits::FRAME_HEADER_BYTES;
use crate::sys::{directory, peer, process};

/// How long anything that normally takes milliseconds may take. Chosen: a loaded machine is no failure.
pub const SOON: Duration = Duration::from_secs(30);

/// A frame from the supervisor, or the end.
#[derive(Debug)]
pub enum Frame {
    Started(String),
    Output(Vec<u8>),
    Exit(Exit),
    Error(ErrorCode, String),
    Stopped,
    Closed,
}

/// How a connection ended, and what came before.
#[derive(Debug, Default)]
pub struct Ended {
    pub unit: Option<String>,
    pub output: Vec<u8>,
    pub exit: Option<Exit>,
    pub error: Option<(ErrorCode, String)>,
    pub stopped: bool,
}

impl Ended {
    /// The output as text, with plain line ends.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.output).replace("\r\n", "\n")
    }

    /// How it ended, in words.
    pub fn how(&self) -> String {
        match (&self.exit, &self.error) {
            (Some(exit), _) => exit.to_string(),
            (None, Some((code, why))) => format!("error {code}: {why}"),
            (None, None) => "the connection closed".to_owned(),
        }
    }
}

/// One connection.
#[derive(Debug)]
pub struct Session {
    socket: UnixStream,
    stop_sent: bool,
}

impl Session {
    /// Connects.
    pub fn connect(path: &str) -> Result<Self, String> {
        let socket = UnixStream::connect(path).map_err(|error| format!("cannot connect to {path}: {error}"))?;
        Ok(Self { socket, stop_sent: false })
    }

    /// Connects and asks for these words in this directory.
    pub fn start(path: &str, dir: &File, runtime: u32, words: &[&str]) -> Result<Self, String> {
        let session = Self::connect(path)?;
        session.send(&start_frame(dir, runtime, words)?, Some(dir))?;
        Ok(session)
    }

    /// The socket.
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// The process that listens.
    pub fn supervisor_pid(&self) -> Result<u32, String> {
        peer::credentials(&self.socket).map(|credentials| credentials.pid).map_err(|error| error.to_string())
    }

    /// Sends bytes, with a descriptor if there is one.
    pub fn send(&self, bytes: &[u8], dir: Option<&File>) -> Result<(), String> {
        let sent = process::send_all(&self.socket, bytes, dir.map(AsFd::as_fd), Instant::now() + SOON);
        sent.map_err(|error| format!("cannot send: {error}"))
    }

    /// Asks for the whole unit to be stopped.
    pub fn stop(&mut self) -> Result<(), String> {
        self.stop_sent = true;
        self.send(&frame::encode(Kind::Stop, &[]).map_err(|error| error.to_string())?, None)
    }

    /// The next frame.
    pub fn next(&self) -> Result<Frame, String> {
        let deadline = Instant::now() + SOON;
        let mut header = [0; FRAME_HEADER_BYTES];
        if let Err(error) = process::receive_exact(&self.socket, &mut header, deadline) {
            return match error.kind() {
                std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset => Ok(Frame::Closed),
                _ => Err(format!("no frame came: {error}")),
            };
        }
        let malformed = |error: frame::DecodeError| format!("what came is no frame: {error}");
        let header = Header::decode(&header).map_err(malformed)?;
        let mut payload = vec![0; header.payload_len()];
        process::receive_exact(&self.socket, &mut payload, deadline)
            .map_err(|error| format!("a frame came in part: {error}"))?;
        Ok(match header.kind() {
            Kind::Started => Frame::Started(String::from_utf8_lossy(&payload).into_owned()),
            Kind::Output => Frame::Output(payload),
            Kind::Exit => Frame::Exit(Exit::decode(&payload).map_err(malformed)?),
            Kind::Error => decode_error(&payload).map(|(code, why)| Frame::Error(code, why)).map_err(malformed)?,
            Kind::Stopped => Frame::Stopped,
            other => return Err(format!("a frame came that never comes here: {other:?}")),
        })
    }

    /// The `started` frame; gives the unit.
    pub fn started(&self) -> Result<String, String> {
        match self.next()? {
            Frame::Started(unit) => Ok(unit),
            other => Err(format!("instead of `started` came {other:?}")),
        }
    }

    /// Reads everything until the session is over: `exit` or `error`, and `stopped` where a stop was asked for.
    pub fn finish(&self) -> Result<Ended, String> {
        let mut ended = Ended::default();
        loop {
            match self.next()? {
                Frame::Started(unit) => ended.unit = Some(unit),
                Frame::Output(bytes) => ended.output.extend_from_slice(&bytes),
                Frame::Exit(exit) => {
                    ended.exit = Some(exit);
                    if !self.stop_sent {
                        return Ok(ended);
                    }
                }
                Frame::Error(code, why) => ended.error = Some((code, why)),
                Frame::Stopped => ended.stopped = true,
                Frame::Closed => return Ok(ended),
            }
        }
    }
}

/// A start frame of these words in this directory.
pub fn start_frame(dir: &File, runtime: u32, words: &[&str]) -> Result<Vec<u8>, String> {
    let identity = directory::identify(dir).map_err(|error| error.to_string())?;
    let words = Words::new(words.iter().map(|word| (*word).to_owned()).collect()).map_err(|error| error.to_string())?;
    let start = Start::new(identity.dev, identity.ino, runtime, words).map_err(|error| error.to_string())?;
    frame::encode(Kind::Start, &start.encode()).map_err(|error| error.to_string())
}
