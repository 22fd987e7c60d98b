//! The stand-in for the OpenCode server: a small process that connects, opens directories and runs the real client
//! where the server would, and a test's handle on it.
//!
//! It runs as the main process of `opencode-v2.service`, under the server's account and sandbox, and does nothing
//! by itself. A test outside asks it over a control socket and gets the very sockets and directories back as
//! descriptors: `SO_PEERCRED` and `SO_PEERPIDFD` of such a socket stay the stand-in's, whoever holds it. The
//! stand-in itself keeps no copy, so that closing the test's closes the connection.
//!
//! One control connection carries one request and one reply, both in the same shape: a length (u32), then a number
//! of words (u32), then each word as a length (u32) and bytes, all big-endian, descriptors with the first byte. A
//! reply begins with the word `ok` or the word `error` and the reason.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt, FdMapping};
use opencode_pty::frame::message::ErrorCode;
use opencode_pty::frame::words::encode_word;
use opencode_pty::frame::{Header, Kind};
use opencode_pty::limits::HANDSHAKE_TIME;
use rustix::fs::{Mode, OFlags};

use crate::descriptors;
use crate::host::WORKSPACE;
use crate::peer::{Frame, Peer};

/// Where the stand-in listens for the test.
pub const CONTROL_PATH: &str = "/run/opencode-standin/control.sock";
/// Where it connects to the supervisor.
pub const SUPERVISOR_PATH: &str = "/run/opencode-pty/supervisor.sock";
/// The client it runs.
pub const CLIENT_PATH: &str = "/usr/local/libexec/opencode-pty-client";

/// Longest request or reply, bytes. Chosen: a child's output travels in it.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// How long the two sides wait for each other. Chosen: longer than anything the stand-in itself waits for.
const CONTROL_TIME: Duration = Duration::from_secs(150);
/// A session's runtime that is soon over, in seconds. It begins when the unit is up, so the rest of the start is part of it; on a
/// loaded machine that took up to 0.9 s.
pub const SHORT_RUNTIME: u32 = 3;
/// How long a child of the stand-in may run before it is killed. Chosen.
const CHILD_TIME: Duration = Duration::from_mins(2);
/// How long `probe` waits for the supervisor. Chosen: longer than any handshake.
const PROBE_TIME: Duration = Duration::from_secs(30);

// ---- messages ----------------------------------------------------------------------------------------------

/// A request or a reply.
#[derive(Debug, Default)]
struct Message {
    words: Vec<Vec<u8>>,
    fds: Vec<OwnedFd>,
}

fn send(socket: BorrowedFd<'_>, words: &[&[u8]], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let length = |len: usize| u32::try_from(len).map(u32::to_be_bytes).map_err(io::Error::other);
    let mut body = length(words.len())?.to_vec();
    for word in words {
        body.extend_from_slice(&length(word.len())?);
        body.extend_from_slice(word);
    }
    let mut bytes = length(body.len())?.to_vec();
    bytes.append(&mut body);
    descriptors::send_all(socket, &bytes, fds, Instant::now() + CONTROL_TIME)
}

fn receive(socket: BorrowedFd<'_>) -> io::Result<Message> {
    let deadline = Instant::now() + CONTROL_TIME;
    let (mut bytes, mut fds) = (Vec::new(), Vec::new());
    let mut buffer = vec![0; 64 << 10];
    loop {
        if let Some((len, body)) = bytes.split_first_chunk() {
            let len = u32::from_be_bytes(*len) as usize;
            if len > MESSAGE_BYTES_MAX || body.len() > len {
                return Err(io::Error::other("a control message of a wrong length"));
            }
            if body.len() == len {
                let words = split(body).ok_or_else(|| io::Error::other("a malformed control message"))?;
                return Ok(Message { words, fds });
            }
        }
        let received = descriptors::receive(socket, &mut buffer, deadline)?;
        if received.len == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        bytes.extend_from_slice(buffer.get(..received.len).unwrap_or_default());
        fds.extend(received.descriptors);
    }
}

/// The words of a message's body.
fn split(body: &[u8]) -> Option<Vec<Vec<u8>>> {
    fn number(rest: &mut &[u8]) -> Option<usize> {
        let (number, behind) = rest.split_first_chunk()?;
        *rest = behind;
        usize::try_from(u32::from_be_bytes(*number)).ok()
    }
    let mut rest = body;
    let mut words = Vec::new();
    for _ in 0..number(&mut rest)? {
        let len = number(&mut rest)?;
        let (word, behind) = rest.split_at_checked(len)?;
        words.push(word.to_vec());
        rest = behind;
    }
    rest.is_empty().then_some(words)
}

// ---- the test's side ---------------------------------------------------------------------------------------

/// A test's handle on a running stand-in.
#[derive(Clone, Debug)]
pub struct Standin {
    control: PathBuf,
    pid: u32,
}

/// How a directory is opened, beyond `O_DIRECTORY | O_CLOEXEC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// For reading, as `fs.open` does.
    Plain,
    /// `O_PATH`.
    Path,
    /// Whatever it is, file or directory, with `O_PATH`.
    AnyKind,
}

impl Opening {
    fn word(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Path => "path",
            Self::AnyKind => "any-kind",
        }
    }

    fn flags(word: &[u8]) -> Option<OFlags> {
        Some(match word {
            b"plain" => OFlags::RDONLY | OFlags::DIRECTORY,
            b"path" => OFlags::PATH | OFlags::DIRECTORY,
            b"any-kind" => OFlags::PATH,
            _ => return None,
        })
    }
}

/// What a child of the stand-in left behind.
#[derive(Debug)]
pub struct Finished {
    /// As `waitpid` gave it.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
}

impl Finished {
    /// Its standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Its standard error as text.
    pub fn complaint(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }
}

/// What came of a start that may take too long.
#[derive(Debug)]
pub enum Tried {
    /// A session, and its unit.
    Started(Peer, String),
    /// Every place was taken.
    Busy,
    /// It took longer than the supervisor allows; what it said, and when.
    Late(String),
}

/// Why there is no session to talk to.
#[derive(Debug)]
pub enum StartError {
    /// The client did not exit with 0. The connection is there nevertheless: the supervisor may have answered.
    Client {
        /// What the client did.
        finished: Finished,
        /// The connection.
        peer: Box<Peer>,
    },
    /// The stand-in could not be asked, or could not do its part.
    Standin(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client { finished, .. } => {
                write!(f, "the client ended with {}: {}", finished.status, finished.complaint().trim_end())
            }
            Self::Standin(error) => write!(f, "the stand-in: {error}"),
        }
    }
}

impl std::error::Error for StartError {}

impl StartError {
    /// The connection, for who wants the supervisor's answer: it may have come before the client had sent everything.
    pub fn connection(self) -> io::Result<Peer> {
        match self {
            Self::Client { peer, .. } => Ok(*peer),
            Self::Standin(error) => Err(error),
        }
    }
}

impl From<io::Error> for StartError {
    fn from(error: io::Error) -> Self {
        Self::Standin(error)
    }
}

/// What a prober saw of the supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probed {
    /// No connection: the reason.
    Refused(String),
    /// Closed without a word.
    Closed,
    /// Bytes came, escaped.
    Answered(String),
    /// Neither a byte nor the end in 30 s.
    Silent,
}

impl Standin {
    /// Finds the stand-in that listens at `control`.
    pub fn connect(control: impl Into<PathBuf>) -> io::Result<Self> {
        let mut standin = Self { control: control.into(), pid: 0 };
        let reply = standin.ask(&[b"pid"], &[])?;
        let [pid] = reply.words.as_slice() else { return Err(io::Error::other("a reply without a pid")) };
        standin.pid =
            str::from_utf8(pid).ok().and_then(|pid| pid.parse().ok()).ok_or_else(|| io::Error::other("no pid"))?;
        Ok(standin)
    }

    /// The same, for a stand-in that is still being started.
    pub fn connect_within(control: impl Into<PathBuf>, timeout: Duration) -> io::Result<Self> {
        let (control, deadline) = (control.into(), Instant::now() + timeout);
        loop {
            match Self::connect(&control) {
                Ok(standin) => return Ok(standin),
                Err(error) if Instant::now() >= deadline => return Err(error),
                // A socket that does not exist yet has no event that reaches across mount namespaces.
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Its pid, in its own pid namespace.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Connects to the supervisor; the stand-in is the peer.
    pub fn peer(&self) -> io::Result<Peer> {
        Ok(Peer::new(one(self.ask(&[b"connect"], &[])?.fds)?))
    }

    /// The same, and a child of the stand-in that ignores TERM and HUP, in a session of its own, keeps a copy of
    /// the socket for ten minutes. Gives the child's pid, too.
    pub fn peer_held_by_child(&self) -> io::Result<(Peer, u32)> {
        let reply = self.ask(&[b"hold"], &[])?;
        let pid = reply.words.first().and_then(|pid| str::from_utf8(pid).ok()?.parse().ok());
        Ok((Peer::new(one(reply.fds)?), pid.ok_or_else(|| io::Error::other("a reply without a pid"))?))
    }

    /// Opens a directory where the stand-in sees it.
    pub fn open(&self, path: impl AsRef<Path>) -> io::Result<OwnedFd> {
        self.open_as(path, Opening::Plain)
    }

    /// The same, in another way.
    pub fn open_as(&self, path: impl AsRef<Path>, opening: Opening) -> io::Result<OwnedFd> {
        let path = path.as_ref().as_os_str().as_bytes();
        one(self.ask(&[b"open", path, opening.word().as_bytes()], &[])?.fds)
    }

    /// A session: connects, opens `dir`, runs the real client with descriptors 3 and 4 and nothing else.
    pub fn start(&self, dir: impl AsRef<Path>, runtime_seconds: u32, words: &[&str]) -> Result<Peer, StartError> {
        let dir = dir.as_ref().as_os_str().as_bytes();
        self.start_by(b"start", Some(dir), runtime_seconds, words, &[])
    }

    /// The same in a directory that is already open.
    pub fn start_in(&self, dir: impl AsFd, runtime_seconds: u32, words: &[&str]) -> Result<Peer, StartError> {
        self.start_by(b"start-in", None, runtime_seconds, words, &[dir.as_fd()])
    }

    /// A start whose answer may be that it took too long.
    ///
    /// The supervisor's limits on a start's time are real, and a machine may stand still for seconds; the runtime is one of them.
    /// An answer of that kind that comes before the shortest of them is over is none, nor is one to a client that failed for
    /// another reason.
    pub fn try_start(&self, dir: impl AsRef<Path>, runtime_seconds: u32, words: &[&str]) -> io::Result<Tried> {
        let begun = Instant::now();
        let (mut peer, client) = match self.start(dir, runtime_seconds, words) {
            Ok(peer) => (peer, None),
            Err(StartError::Client { finished, peer }) => (*peer, Some(finished)),
            Err(StartError::Standin(error)) => return Err(error),
        };
        let frame = peer.next_frame(CHILD_TIME).map_err(io::Error::other)?;
        let took = begun.elapsed();
        // None given is an hour.
        let runtime = if runtime_seconds == 0 { HANDSHAKE_TIME } else { Duration::from_secs(runtime_seconds.into()) };
        // A connection that closes under its hands is an error of the system's for the client.
        let sent = client.as_ref().is_none_or(|finished| [Some(71), Some(75)].contains(&finished.status.code()));
        Ok(match frame {
            Frame::Started(unit) if client.is_none() => Tried::Started(peer, unit),
            Frame::Error(ErrorCode::Busy, _) if sent => Tried::Busy,
            Frame::Error(ErrorCode::StartFailed, _) if sent && took >= HANDSHAKE_TIME.min(runtime) => {
                Tried::Late(format!("{frame:?} after {took:?}"))
            }
            Frame::Error(ErrorCode::Timeout, _) | Frame::Closed if sent && took >= HANDSHAKE_TIME => {
                Tried::Late(format!("{frame:?} after {took:?}"))
            }
            other => {
                let complaint = client.map(|finished| finished.complaint()).unwrap_or_default();
                return Err(io::Error::other(format!("{other:?} instead of started; the client: {complaint:?}")));
            }
        })
    }

    fn start_by(
        &self,
        verb: &[u8],
        dir: Option<&[u8]>,
        runtime_seconds: u32,
        words: &[&str],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Peer, StartError> {
        let runtime = runtime_seconds.to_string();
        let mut request = vec![verb];
        request.extend(dir);
        request.push(runtime.as_bytes());
        request.extend(words.iter().map(|word| word.as_bytes()));
        let mut reply = self.ask(&request, fds)?;
        let peer = Peer::new(one(std::mem::take(&mut reply.fds))?);
        let finished = finished(reply)?;
        if finished.status.success() { Ok(peer) } else { Err(StartError::Client { finished, peer: Box::new(peer) }) }
    }

    /// Runs the client as a child with these arguments and these descriptors at 3, 4, ….
    pub fn client(&self, args: &[&str], fds: &[BorrowedFd<'_>]) -> io::Result<Finished> {
        let mut request: Vec<&[u8]> = vec![b"client"];
        request.extend(args.iter().map(|arg| arg.as_bytes()));
        finished(self.ask(&request, fds)?)
    }

    /// Runs a program as a child of the stand-in, in the server's cgroup, and waits for its end.
    pub fn spawn(&self, argv: &[&str]) -> io::Result<Finished> {
        let mut request: Vec<&[u8]> = vec![b"spawn"];
        request.extend(argv.iter().map(|arg| arg.as_bytes()));
        finished(self.ask(&request, &[])?)
    }

    /// Asks for one measurement (`crate::bench`); gives its words.
    pub fn bench(&self, words: &[&str]) -> io::Result<Vec<String>> {
        let mut request: Vec<&[u8]> = vec![b"bench"];
        request.extend(words.iter().map(|word| word.as_bytes()));
        let reply = self.ask(&request, &[])?;
        Ok(reply.words.iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect())
    }

    /// What a *child* of the stand-in sees when it connects to the supervisor.
    pub fn probe_from_child(&self) -> io::Result<Probed> {
        probed(&finished(self.ask(&[b"probe"], &[])?)?)
    }

    fn ask(&self, words: &[&[u8]], fds: &[BorrowedFd<'_>]) -> io::Result<Message> {
        let stream = UnixStream::connect(&self.control).map_err(|error| {
            io::Error::new(error.kind(), format!("control socket {}: {error}", self.control.display()))
        })?;
        send(stream.as_fd(), words, fds)?;
        let mut reply = receive(stream.as_fd())?;
        let verdict = if reply.words.is_empty() { Vec::new() } else { reply.words.remove(0) };
        match verdict.as_slice() {
            b"ok" => Ok(reply),
            _ => Err(io::Error::other(String::from_utf8_lossy(&reply.words.concat()).into_owned())),
        }
    }
}

/// How many starts one after the other may take too long. Chosen.
pub const LATE_STARTS_MAX: u32 = 4;

/// Asks the stand-in of this machine for sessions, says `started UNIT` for each, and keeps them until it is killed.
pub fn hold_sessions(count: usize, words: &[&str]) -> io::Result<()> {
    let standin = Standin::connect(CONTROL_PATH)?;
    let mut held = Vec::with_capacity(count);
    let mut late = 0;
    while held.len() < count {
        match standin.try_start(WORKSPACE, 3_600, words)? {
            Tried::Started(peer, unit) => {
                println!("started {unit}");
                held.push(peer);
            }
            // In a VM, beside whatever its machine does.
            Tried::Late(_) if late < LATE_STARTS_MAX => late += 1,
            other => return Err(io::Error::other(format!("{other:?} instead of started"))),
        }
    }
    println!("all");
    loop {
        thread::park();
    }
}

/// What a `probe` run says it saw: the last line of its output.
pub fn probed(finished: &Finished) -> io::Result<Probed> {
    let text = finished.text();
    let line = text.lines().last().unwrap_or_default();
    Ok(match line.split_once(' ') {
        Some(("refused", reason)) => Probed::Refused(reason.to_owned()),
        Some(("answered", bytes)) => Probed::Answered(bytes.to_owned()),
        None if line == "closed" => Probed::Closed,
        None if line == "silent" => Probed::Silent,
        _ => return Err(io::Error::other(format!("probe said '{line}' and '{}'", finished.complaint()))),
    })
}

fn one(fds: Vec<OwnedFd>) -> io::Result<OwnedFd> {
    let [fd] = <[OwnedFd; 1]>::try_from(fds)
        .map_err(|fds| io::Error::other(format!("a reply with {} descriptors instead of one", fds.len())))?;
    Ok(fd)
}

fn finished(reply: Message) -> io::Result<Finished> {
    let [status, stdout, stderr] = <[Vec<u8>; 3]>::try_from(reply.words)
        .map_err(|words| io::Error::other(format!("a reply with {} words instead of three", words.len())))?;
    let status = str::from_utf8(&status).ok().and_then(|text| text.parse().ok());
    let status = ExitStatus::from_raw(status.ok_or_else(|| io::Error::other("a reply without a status"))?);
    Ok(Finished { status, stdout, stderr })
}

// ---- the stand-in's side -----------------------------------------------------------------------------------

/// Where a stand-in finds what it needs.
#[derive(Clone, Debug)]
pub struct Paths {
    /// Its control socket.
    pub control: PathBuf,
    /// The supervisor's socket.
    pub supervisor: PathBuf,
    /// The client.
    pub client: PathBuf,
}

impl Default for Paths {
    fn default() -> Self {
        Self { control: CONTROL_PATH.into(), supervisor: SUPERVISOR_PATH.into(), client: CLIENT_PATH.into() }
    }
}

/// Serves control connections until the process is killed. Says `ready` on standard output once it listens.
pub fn serve(paths: &Paths) -> io::Result<()> {
    match std::fs::remove_file(&paths.control) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&paths.control)?;
    println!("ready");
    loop {
        let (stream, _) = listener.accept()?;
        let paths = paths.clone();
        thread::spawn(move || {
            if let Err(error) = answer(&stream, &paths) {
                eprintln!("opencode-standin: {error}");
            }
        });
    }
}

fn answer(stream: &UnixStream, paths: &Paths) -> io::Result<()> {
    let request = receive(stream.as_fd())?;
    match carry_out(request, paths) {
        Ok(reply) => {
            let mut words: Vec<&[u8]> = vec![b"ok"];
            words.extend(reply.words.iter().map(Vec::as_slice));
            let fds: Vec<_> = reply.fds.iter().map(AsFd::as_fd).collect();
            send(stream.as_fd(), &words, &fds)
        }
        Err(error) => send(stream.as_fd(), &[b"error", error.to_string().as_bytes()], &[]),
    }
}

fn carry_out(request: Message, paths: &Paths) -> io::Result<Message> {
    let words: Vec<&[u8]> = request.words.iter().map(Vec::as_slice).collect();
    match (words.as_slice(), request.fds) {
        ([b"pid"], _) => Ok(Message { words: vec![std::process::id().to_string().into()], fds: vec![] }),
        ([b"connect"], _) => Ok(Message { words: vec![], fds: vec![connect(paths)?] }),
        ([b"hold"], _) => {
            let socket = connect(paths)?;
            let mut child = Command::new("/bin/sh");
            child.args(["-c", "trap '' TERM HUP; echo deaf; exec sleep 600"]).process_group(0).stdin(Stdio::null());
            let mut child = with_descriptors(&mut child, vec![socket.try_clone()?])?.stdout(Stdio::piped()).spawn()?;
            // Until then a signal would end it.
            child.stdout.take().map_or(Ok(()), |mut said| said.read_exact(&mut [0; 5]))?;
            Ok(Message { words: vec![child.id().to_string().into()], fds: vec![socket] })
        }
        ([b"open", path, opening], _) => {
            let flags = Opening::flags(opening).ok_or_else(|| io::Error::other("unknown way of opening"))?;
            Ok(Message { words: vec![], fds: vec![open(path, flags)?] })
        }
        ([b"start", dir, runtime, words @ ..], _) => {
            start(paths, open(dir, OFlags::RDONLY | OFlags::DIRECTORY)?, runtime, words)
        }
        ([b"start-in", runtime, words @ ..], fds) => start(paths, one(fds)?, runtime, words),
        ([b"client", args @ ..], fds) => {
            let mut client = Command::new(&paths.client);
            client.args(args.iter().map(|arg| OsStr::from_bytes(arg)));
            run(with_descriptors(&mut client, fds)?)
        }
        ([b"probe"], _) => {
            let mut probe = Command::new("/proc/self/exe");
            run(probe.arg("probe").arg(&paths.supervisor))
        }
        ([b"spawn", program, args @ ..], fds) => {
            let mut command = Command::new(OsStr::from_bytes(program));
            command.args(args.iter().map(|arg| OsStr::from_bytes(arg)));
            run(with_descriptors(&mut command, fds)?)
        }
        ([b"bench", words @ ..], _) => {
            let words: Result<Vec<&str>, _> = words.iter().map(|word| str::from_utf8(word)).collect();
            let numbers = crate::bench::carry_out(paths, &words.map_err(io::Error::other)?)?;
            Ok(Message { words: numbers.into_iter().map(String::into_bytes).collect(), fds: vec![] })
        }
        _ => Err(io::Error::other("unknown request")),
    }
}

/// Connects to the supervisor.
pub(crate) fn connect(paths: &Paths) -> io::Result<OwnedFd> {
    let stream = UnixStream::connect(&paths.supervisor)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", paths.supervisor.display())))?;
    Ok(stream.into())
}

fn open(path: &[u8], flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::open(path, flags, Mode::empty())
        .map_err(|errno| io::Error::new(io::Error::from(errno).kind(), format!("{}: {errno}", path.escape_ascii())))
}

/// Opens a directory as a client does.
pub(crate) fn open_directory(path: &str) -> io::Result<OwnedFd> {
    open(path.as_bytes(), OFlags::RDONLY | OFlags::DIRECTORY)
}

fn start(paths: &Paths, dir: OwnedFd, runtime: &[u8], words: &[&[u8]]) -> io::Result<Message> {
    let socket = connect(paths)?;
    let mut client = Command::new(&paths.client);
    client.arg(OsStr::from_bytes(runtime));
    for word in words {
        client.arg(encode_word(str::from_utf8(word).map_err(io::Error::other)?));
    }
    let mut reply = run(with_descriptors(&mut client, vec![socket.try_clone()?, dir])?)?;
    reply.fds.push(socket);
    Ok(reply)
}

/// Places these descriptors at 3, 4, …; everything else the stand-in has is close-on-exec.
pub(crate) fn with_descriptors(command: &mut Command, fds: Vec<OwnedFd>) -> io::Result<&mut Command> {
    let mappings = (3..).zip(fds).map(|(child_fd, parent_fd)| FdMapping { parent_fd, child_fd }).collect();
    command.fd_mappings(mappings).map_err(io::Error::other)
}

/// Runs a child to its end; the reply is its wait status, standard output and standard error.
fn run(command: &mut Command) -> io::Result<Message> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let stdout = read_aside(child.stdout.take());
    let stderr = read_aside(child.stderr.take());
    let status = wait(&mut child)?;
    let words = vec![
        status.into_raw().to_string().into(),
        stdout.join().map_err(|_| io::Error::other("a reader panicked"))??,
        stderr.join().map_err(|_| io::Error::other("a reader panicked"))??,
    ];
    Ok(Message { words, fds: vec![] })
}

fn read_aside(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<io::Result<Vec<u8>>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            pipe.read_to_end(&mut bytes)?;
        }
        Ok(bytes)
    })
}

/// Waits for a child; kills it when its time is up.
fn wait(child: &mut Child) -> io::Result<ExitStatus> {
    let pid = rustix::process::Pid::from_child(child);
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
    let deadline = Instant::now() + CHILD_TIME;
    match descriptors::wait_for(pidfd.as_fd(), rustix::event::PollFlags::IN, deadline) {
        Err(error) if error.kind() == ErrorKind::TimedOut => child.kill()?,
        other => other?,
    }
    child.wait()
}

/// Whether a session's record is among these frames: then a client hangs up, and so does a probe.
fn has_exit(mut bytes: &[u8]) -> bool {
    while let Some((header, rest)) = bytes.split_first_chunk() {
        let Ok(header) = Header::decode(header) else { return false };
        let Some(behind) = rest.get(header.payload_len()..) else { return false };
        if header.kind() == Kind::Exit {
            return true;
        }
        bytes = behind;
    }
    false
}

/// Connects as this process and tells what the supervisor does, in one line: `refused REASON`, `closed`, `answered
/// BYTES` or `silent`. With words, it sends a start frame for the present directory first.
pub fn probe(supervisor: &Path, words: &[&str]) -> io::Result<String> {
    let stream = match UnixStream::connect(supervisor) {
        Ok(stream) => stream,
        Err(error) => return Ok(format!("refused {error}")),
    };
    let peer = Peer::new(stream.into());
    if !words.is_empty() {
        let here = rustix::fs::open(".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        // A supervisor that has already closed is what we are here to see, so a failed send is not the answer.
        let _ = peer.start_in(here, 60, words);
    }
    let (mut bytes, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
    let deadline = Instant::now() + PROBE_TIME;
    loop {
        match descriptors::receive(peer.socket(), &mut buffer, deadline) {
            Ok(received) if received.len > 0 => {
                bytes.extend_from_slice(buffer.get(..received.len).unwrap_or_default());
                if has_exit(&bytes) {
                    return Ok(format!("answered {}", bytes.escape_ascii()));
                }
            }
            Err(error) if error.kind() == ErrorKind::TimedOut && bytes.is_empty() => return Ok("silent".into()),
            Err(error) if error.kind() != ErrorKind::ConnectionReset && error.kind() != ErrorKind::TimedOut => {
                return Err(error);
            }
            Ok(_) | Err(_) if bytes.is_empty() => return Ok("closed".into()),
            Ok(_) | Err(_) => return Ok(format!("answered {}", bytes.escape_ascii())),
        }
    }
}
