//! Measures sessions, and what a user would pick instead, with the monotonic clock of one process on the host.
//!
//! `cargo xtask bench` asks two stand-ins: the one that is the server's main process measures sessions, a second one that
//! runs as root measures everything else (systemd-run, bare script(1), bare units). Both go through the same code here: a
//! `Line` is a program at a terminal, whoever gave it one, and the clock starts before the first system call a user would
//! make. So the numbers of one run can be put side by side.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use opencode_pty::frame::message::decode_error;
use opencode_pty::frame::words::encode_word;
use opencode_pty::frame::{self, Header, Kind};
use opencode_pty::limits::FRAME_HEADER_BYTES;
use opencode_pty::systemd::unit::{Description, UnitName, properties};
use rustix::io::Errno;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use smol::stream::StreamExt;
use zbus::zvariant::{OwnedObjectPath, Value};

use crate::descriptors;
use crate::host::{SERVER, SUPERVISOR, WORKSPACE};
use crate::standin::{Paths, connect, open_directory, with_descriptors};

/// The account's uid and gid on a host.
const ACCOUNT: (u32, u32) = (1000, 1000);
/// Bytes read at a time: what a socket's buffer holds.
const READ_BYTES: usize = 128 << 10;
/// The last bytes of an output that are kept.
const TAIL_BYTES: usize = 200;
/// How long anything here may be silent. Chosen: no measurement waits for so long.
const SILENCE: Duration = Duration::from_mins(1);
/// How long a measured session may run, seconds.
const RUNTIME: &str = "3600";

/// Sessions that stay open from one request to the next.
static HELD: Mutex<Vec<Line>> = Mutex::new(Vec::new());

/// Carries out one request of `cargo xtask bench`; gives its numbers (nanoseconds, where it is about time) as words.
pub fn carry_out(paths: &Paths, words: &[&str]) -> io::Result<Vec<String>> {
    match words {
        ["whole", needle, goodbye, means, argv @ ..] => whole(paths, needle, goodbye, means, argv),
        ["echo", count, means, argv @ ..] => echo(paths, number(count)?, means, argv),
        ["flow", count, means, argv @ ..] => flow(paths, number(count)?, means, argv),
        ["hold", count, means, argv @ ..] => hold(paths, number(count)?, means, argv),
        ["release"] => release(),
        ["helper", argv @ ..] => helper(paths, argv),
        ["child", argv @ ..] => child(argv),
        ["unit", list, argv @ ..] => smol::block_on(bare_unit(list, argv)),
        _ => Err(io::Error::other("unknown measurement")),
    }
}

fn number(word: &str) -> io::Result<usize> {
    word.parse().map_err(io::Error::other)
}

fn nanoseconds(from: Instant, to: Instant) -> String {
    to.duration_since(from).as_nanos().to_string()
}

// ---- a program at a terminal -------------------------------------------------------------------------------

/// A program at a terminal: a session of ours, or a child that has seen to a terminal itself.
enum Line {
    Session(Session),
    Child(ChildLine),
}

impl Line {
    /// Starts `argv`. `means` is `session`, `pipe` (a child with pipes), `account-pipe` (the same as the account) or
    /// `terminal` (a child with a terminal as its standard streams).
    fn begin(paths: &Paths, means: &str, argv: &[&str]) -> io::Result<Self> {
        match means {
            "session" => Session::begin(paths, argv).map(Self::Session),
            "pipe" | "account-pipe" | "terminal" => ChildLine::begin(means, argv).map(Self::Child),
            _ => Err(io::Error::other("unknown means")),
        }
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Session(session) => session.send(Kind::Input, bytes),
            Self::Child(child) => child.input.write_all(bytes),
        }
    }

    /// Reads once and gives the terminal's bytes to `sink`; `false` once everything is over.
    fn pump(&mut self, buffer: &mut [u8], sink: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        match self {
            Self::Session(session) => session.pump(buffer, sink),
            Self::Child(child) => child.pump(buffer, sink),
        }
    }

    /// Reads until the output so far ends with or contains `needle`.
    fn wait_for(&mut self, needle: &str) -> io::Result<()> {
        let mut buffer = vec![0; READ_BYTES];
        let mut seen = Vec::new();
        let contains = |seen: &[u8]| seen.windows(needle.len().max(1)).any(|window| window == needle.as_bytes());
        while !contains(&seen) {
            if !self.pump(&mut buffer, &mut |bytes| seen.extend_from_slice(bytes))? {
                let seen = seen.escape_ascii();
                return Err(io::Error::other(format!("ended without '{needle}', with '{seen}'")));
            }
        }
        Ok(())
    }

    /// Reads until everything is over.
    fn wait_for_end(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; READ_BYTES];
        while self.pump(&mut buffer, &mut |_| {})? {}
        Ok(())
    }

    /// Ends it from outside: by a stop, or by SIGKILL to the child (a unit that systemd-run made stays).
    fn end(&mut self) -> io::Result<()> {
        match self {
            Self::Session(session) => session.stop(),
            Self::Child(child) => child.end(),
        }
    }
}

/// A session of ours, read frame by frame with as little of our own work as a client can have.
struct Session {
    stream: UnixStream,
    client_done: Instant,
    started: Option<Instant>,
    header: [u8; FRAME_HEADER_BYTES],
    have: usize,
    /// The frame that is being read, and how much of its payload is to come.
    frame: Option<(Kind, usize)>,
    payload: Vec<u8>,
    stopping: bool,
    over: bool,
}

impl Session {
    /// What a client does: connects, opens the directory, runs the helper.
    fn begin(paths: &Paths, argv: &[&str]) -> io::Result<Self> {
        let socket = connect(paths)?;
        let dir = open_directory(WORKSPACE)?;
        let mut client = client_command(paths, argv);
        let status = with_descriptors(&mut client, vec![socket.try_clone()?, dir])?.status()?;
        let client_done = Instant::now();
        drop(client);
        if !status.success() {
            return Err(io::Error::other(format!("the client ended with {status}")));
        }
        let stream = UnixStream::from(socket);
        stream.set_read_timeout(Some(SILENCE))?;
        Ok(Self {
            stream,
            client_done,
            started: None,
            header: [0; FRAME_HEADER_BYTES],
            have: 0,
            frame: None,
            payload: Vec::new(),
            stopping: false,
            over: false,
        })
    }

    fn send(&mut self, kind: Kind, bytes: &[u8]) -> io::Result<()> {
        let frame = frame::encode(kind, bytes).map_err(io::Error::other)?;
        self.stream.write_all(&frame)
    }

    fn stop(&mut self) -> io::Result<()> {
        self.stopping = true;
        self.send(Kind::Stop, &[])
    }

    fn pump(&mut self, buffer: &mut [u8], sink: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        if self.over {
            return Ok(false);
        }
        let count = self.stream.read(buffer)?;
        if count == 0 {
            return Err(io::Error::other("the supervisor closed the connection without a record"));
        }
        let mut bytes = buffer.get(..count).unwrap_or_default();
        while !bytes.is_empty() {
            let Some((kind, left)) = self.frame else {
                let place = self.header.get_mut(self.have..).unwrap_or_default();
                let (part, rest) = bytes.split_at(place.len().min(bytes.len()));
                place.get_mut(..part.len()).unwrap_or_default().copy_from_slice(part);
                self.have += part.len();
                bytes = rest;
                if self.have == FRAME_HEADER_BYTES {
                    let header = Header::decode(&self.header).map_err(io::Error::other)?;
                    self.have = 0;
                    self.frame = Some((header.kind(), header.payload_len()));
                    self.settle()?;
                }
                continue;
            };
            let (part, rest) = bytes.split_at(left.min(bytes.len()));
            bytes = rest;
            if kind == Kind::Output {
                sink(part);
            } else {
                self.payload.extend_from_slice(part);
            }
            self.frame = Some((kind, left - part.len()));
            self.settle()?;
        }
        Ok(!self.over)
    }

    /// Takes note of a frame that is complete.
    fn settle(&mut self) -> io::Result<()> {
        let Some((kind, 0)) = self.frame else { return Ok(()) };
        self.frame = None;
        match kind {
            Kind::Started => self.started = Some(Instant::now()),
            Kind::Exit => self.over = !self.stopping,
            Kind::Stopped => self.over = true,
            Kind::Error => {
                let (code, message) = decode_error(&self.payload).map_err(io::Error::other)?;
                return Err(io::Error::other(format!("the supervisor says {code}: {message}")));
            }
            Kind::Output | Kind::Start | Kind::Input | Kind::Stop => {}
        }
        self.payload.clear();
        Ok(())
    }
}

fn client_command(paths: &Paths, argv: &[&str]) -> Command {
    let mut client = Command::new(&paths.client);
    client.arg(RUNTIME).args(argv.iter().map(|word| encode_word(word)));
    client.stdin(Stdio::null()).stdout(Stdio::null());
    client
}

/// A child, and its standard streams.
struct ChildLine {
    child: Child,
    input: std::fs::File,
    output: std::fs::File,
    /// It was killed: what it left behind may keep its output open.
    killed: bool,
}

impl ChildLine {
    fn begin(means: &str, argv: &[&str]) -> io::Result<Self> {
        let (program, arguments) = argv.split_first().ok_or_else(|| io::Error::other("no program"))?;
        let mut command = Command::new(program);
        // `dumb`: systemd-run asks any other terminal for its colours, and waits for an answer.
        command.args(arguments).env_clear().env("PATH", "/usr/bin:/bin").env("TERM", "dumb").env("LANG", "C.UTF-8");
        if means == "account-pipe" {
            command.uid(ACCOUNT.0).gid(ACCOUNT.1).current_dir(WORKSPACE);
            command.env("HOME", "/home/byk").env("USER", "byk").env("SHELL", "/bin/sh");
        }
        if means == "terminal" {
            let leader = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
            grantpt(&leader)?;
            unlockpt(&leader)?;
            let name = ptsname(&leader, Vec::new())?;
            let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC;
            let end = rustix::fs::open(&*name, flags, rustix::fs::Mode::empty())?;
            command.stdin(end.try_clone()?).stdout(end.try_clone()?).stderr(end);
            let child = command.spawn()?;
            return Ok(Self { child, input: leader.try_clone()?.into(), output: leader.into(), killed: false });
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn()?;
        let pipe = |end: Option<OwnedFd>| end.ok_or_else(|| io::Error::other("no pipe"));
        let input = pipe(child.stdin.take().map(OwnedFd::from))?.into();
        let output = pipe(child.stdout.take().map(OwnedFd::from))?.into();
        Ok(Self { child, input, output, killed: false })
    }

    fn end(&mut self) -> io::Result<()> {
        self.killed = true;
        self.child.kill()
    }

    fn pump(&mut self, buffer: &mut [u8], sink: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        if self.killed {
            self.child.wait()?;
            return Ok(false);
        }
        match self.output.read(buffer) {
            Ok(0) => {}
            Ok(count) => {
                sink(buffer.get(..count).unwrap_or_default());
                return Ok(true);
            }
            // A terminal that nobody has open any more.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::IO) => {}
            Err(error) => return Err(error),
        }
        // The whole process: that is what a user waits for.
        self.child.wait()?;
        Ok(false)
    }
}

impl Drop for ChildLine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// ---- measurements ------------------------------------------------------------------------------------------

/// From the first system call to `needle` in the output, and to the end. `goodbye`: `none` if it ends by itself, `stop`, or
/// what is typed to end it. Gives: first, end, goodbye to end, and of a session client and `started`.
fn whole(paths: &Paths, needle: &str, goodbye: &str, means: &str, argv: &[&str]) -> io::Result<Vec<String>> {
    let begun = Instant::now();
    let mut line = Line::begin(paths, means, argv)?;
    line.wait_for(needle)?;
    let first = Instant::now();
    match goodbye {
        "none" => {}
        "stop" => line.end()?,
        typed => line.send(format!("{typed}\n").as_bytes())?,
    }
    line.wait_for_end()?;
    let end = Instant::now();
    let mut times = vec![nanoseconds(begun, first), nanoseconds(begun, end), nanoseconds(first, end)];
    if let Line::Session(session) = &line {
        let started = session.started.ok_or_else(|| io::Error::other("output without 'started'"))?;
        times.extend([nanoseconds(begun, session.client_done), nanoseconds(begun, started)]);
    }
    Ok(times)
}

/// Round trips of one byte, once the program has said `ready`.
fn echo(paths: &Paths, count: usize, means: &str, argv: &[&str]) -> io::Result<Vec<String>> {
    let mut line = Line::begin(paths, means, argv)?;
    line.wait_for("ready\n")?;
    let mut buffer = vec![0; READ_BYTES];
    let mut trips = Vec::with_capacity(count);
    // The first ones find cold caches, whoever is measured.
    for trip in 0..count + count / 10 {
        let begun = Instant::now();
        line.send(b"x")?;
        let mut back = 0;
        while back == 0 {
            if !line.pump(&mut buffer, &mut |bytes| back += bytes.len())? {
                return Err(io::Error::other("it ended instead of answering"));
            }
        }
        if trip >= count / 10 {
            trips.push(nanoseconds(begun, Instant::now()));
        }
    }
    line.end()?;
    line.wait_for_end()?;
    Ok(trips)
}

/// The output of `count` programs at once. Each says `ready` and waits for a line; then all are let go. Gives the time from
/// there to the last byte of all, and of each its bytes and the end of its output.
fn flow(paths: &Paths, count: usize, means: &str, argv: &[&str]) -> io::Result<Vec<String>> {
    let mut lines = Vec::new();
    for _ in 0..count {
        let mut line = Line::begin(paths, means, argv)?;
        line.wait_for("ready")?;
        lines.push(line);
    }
    let all_ready = Barrier::new(count);
    let flows: Vec<io::Result<_>> = thread::scope(|scope| {
        let running: Vec<_> = lines.iter_mut().map(|line| scope.spawn(|| one_flow(line, &all_ready))).collect();
        running
            .into_iter()
            .map(|flow| flow.join().unwrap_or_else(|_| Err(io::Error::other("a reader panicked"))))
            .collect()
    });
    let flows = flows.into_iter().collect::<io::Result<Vec<_>>>()?;
    let begun = flows.iter().map(|(begun, ..)| *begun).min().unwrap_or_else(Instant::now);
    let last = flows.iter().map(|(_, last, ..)| *last).max().unwrap_or(begun);
    let mut words = vec![nanoseconds(begun, last)];
    for (_, _, bytes, tail) in flows {
        words.push(bytes.to_string());
        words.push(String::from_utf8_lossy(&tail).into_owned());
    }
    Ok(words)
}

fn one_flow(line: &mut Line, all_ready: &Barrier) -> io::Result<(Instant, Instant, u64, Vec<u8>)> {
    let mut buffer = vec![0; READ_BYTES];
    let (mut bytes, mut tail) = (0_u64, Vec::with_capacity(2 * READ_BYTES));
    all_ready.wait();
    let begun = Instant::now();
    let mut last = begun;
    line.send(b"\n")?;
    while line.pump(&mut buffer, &mut |part| {
        bytes += part.len() as u64;
        last = Instant::now();
        let kept = part.get(part.len().saturating_sub(TAIL_BYTES)..).unwrap_or_default();
        tail.extend_from_slice(kept);
        let surplus = tail.len().saturating_sub(TAIL_BYTES);
        tail.drain(..surplus);
    })? {}
    Ok((begun, last, bytes, tail))
}

/// Makes the number of idle programs that are held `count`. Gives how long each start took.
fn hold(paths: &Paths, count: usize, means: &str, argv: &[&str]) -> io::Result<Vec<String>> {
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    let mut times = Vec::new();
    while held.len() < count {
        let begun = Instant::now();
        let mut line = Line::begin(paths, means, argv)?;
        line.wait_for("ready")?;
        times.push(nanoseconds(begun, Instant::now()));
        held.push(line);
    }
    Ok(times)
}

/// Ends all that are held, and waits for it.
fn release() -> io::Result<Vec<String>> {
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    for line in held.iter_mut() {
        line.end()?;
    }
    for line in held.iter_mut() {
        line.wait_for_end()?;
    }
    held.clear();
    Ok(Vec::new())
}

/// The client alone, with a socket of our own at its descriptor 3: to the whole frame on the wire, and to its end.
fn helper(paths: &Paths, argv: &[&str]) -> io::Result<Vec<String>> {
    let (ours, theirs) = UnixStream::pair()?;
    let dir = open_directory(WORKSPACE)?;
    let begun = Instant::now();
    let mut client = client_command(paths, argv);
    let mut child = with_descriptors(&mut client, vec![theirs.into(), dir])?.spawn()?;
    let deadline = begun + SILENCE;
    let (mut bytes, mut buffer, mut descriptors) = (Vec::new(), vec![0; READ_BYTES], 0);
    while !is_whole(&bytes) {
        let received = descriptors::receive(ours.as_fd(), &mut buffer, deadline)?;
        if received.len == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        bytes.extend_from_slice(buffer.get(..received.len).unwrap_or_default());
        descriptors += received.descriptors.len();
    }
    let on_the_wire = Instant::now();
    let status = child.wait()?;
    let ended = Instant::now();
    if !status.success() || descriptors != 1 {
        return Err(io::Error::other(format!("the client ended with {status} and {descriptors} descriptors")));
    }
    Ok(vec![nanoseconds(begun, on_the_wire), nanoseconds(begun, ended)])
}

fn is_whole(bytes: &[u8]) -> bool {
    let header = bytes.first_chunk().and_then(|header| Header::decode(header).ok());
    header.is_some_and(|header| bytes.len() == FRAME_HEADER_BYTES + header.payload_len())
}

/// Any child, from its start to its end, without streams.
fn child(argv: &[&str]) -> io::Result<Vec<String>> {
    let (program, arguments) = argv.split_first().ok_or_else(|| io::Error::other("no program"))?;
    let begun = Instant::now();
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // As the client is started: with two descriptors placed.
    let (left, right) = UnixStream::pair()?;
    let status = with_descriptors(&mut command, vec![left.into(), right.into()])?.status()?;
    if !status.success() {
        return Err(io::Error::other(format!("{program} ended with {status}")));
    }
    Ok(vec![nanoseconds(begun, Instant::now())])
}

const MANAGER: &str = "org.freedesktop.systemd1";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER_INTERFACE: &str = "org.freedesktop.systemd1.Manager";

/// A transient unit that executes `argv` with a socketpair, and nothing behind it: the floor below every session. `list` says
/// with which properties: `session` (those of a session) or `plain`. Gives: the start job's end, first byte, end of file, and
/// the unit's removal.
async fn bare_unit(list: &str, argv: &[&str]) -> io::Result<Vec<String>> {
    let other = io::Error::other::<zbus::Error>;
    let bus = zbus::Connection::system().await.map_err(other)?;
    let rule = format!("type='signal',sender='{MANAGER}',path='{MANAGER_PATH}',interface='{MANAGER_INTERFACE}'");
    let driver = "org.freedesktop.DBus";
    let path = "/org/freedesktop/DBus";
    bus.call_method(Some(driver), path, Some(driver), "AddMatch", &(rule.as_str(),)).await.map_err(other)?;
    bus.call_method(Some(MANAGER), MANAGER_PATH, Some(MANAGER_INTERFACE), "Subscribe", &()).await.map_err(other)?;
    let mut messages = zbus::MessageStream::from(&bus);

    let (ours, theirs) = UnixStream::pair()?;
    let dir = open_directory(WORKSPACE)?;
    let mut random = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    // A name that the supervisor does not take for one of its sessions.
    let id = UnitName::from_random(random);
    let name = id.as_str().replace("opencode-pty-", "bench-");
    let program = argv.first().ok_or_else(|| io::Error::other("no program"))?;
    let command = vec![((*program).to_owned(), argv.iter().map(|&word| word.to_owned()).collect::<Vec<_>>(), false)];
    let description = Description {
        launcher: program,
        slice: "opencode-pty.slice",
        supervisor_unit: SUPERVISOR,
        server_unit: SERVER,
        user: "byk",
        uid: ACCOUNT.0,
        gid: ACCOUNT.1,
        runtime_seconds: 3_600,
        varlink_sockets: &[],
        terminal: theirs.as_fd(),
        directory: dir.as_fd(),
    };
    let plain = ["Type", "User", "StandardInputFileDescriptor", "StandardOutputFileDescriptor", "CollectMode"];
    let mut wanted: Vec<(&str, Value<'_>)> = properties(&description)
        .into_iter()
        .filter(|(name, _)| *name != "ExecStart" && *name != "AddRef")
        .filter(|(name, _)| list == "session" || plain.contains(name))
        .collect();
    wanted.push(("ExecStart", Value::from(command)));
    let auxiliary: Vec<(&str, Vec<(&str, Value<'_>)>)> = Vec::new();

    let begun = Instant::now();
    let reader = thread::spawn(move || -> io::Result<(Instant, Instant)> {
        let mut ours = ours;
        ours.set_read_timeout(Some(SILENCE))?;
        let mut buffer = [0; 4096];
        if ours.read(&mut buffer)? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let first = Instant::now();
        while ours.read(&mut buffer)? > 0 {}
        Ok((first, Instant::now()))
    });
    let body = (name.as_str(), "fail", wanted, auxiliary);
    let call = bus.call_method(Some(MANAGER), MANAGER_PATH, Some(MANAGER_INTERFACE), "StartTransientUnit", &body);
    let job: OwnedObjectPath = call.await.and_then(|answer| answer.body().deserialize()).map_err(other)?;
    drop(body);
    drop(theirs);
    let mut job_done = None;
    loop {
        let message = messages.next().await.ok_or(ErrorKind::UnexpectedEof)?.map_err(other)?;
        let header = message.header();
        match header.member().map(zbus::names::MemberName::as_str) {
            Some("JobRemoved") => {
                let (_, path, _, result): (u32, OwnedObjectPath, String, String) =
                    message.body().deserialize().map_err(other)?;
                if path == job && result != "done" {
                    return Err(io::Error::other(format!("the unit's start job: {result}")));
                }
                if path == job {
                    job_done = Some(Instant::now());
                }
            }
            Some("UnitRemoved") => {
                let (removed, _): (String, OwnedObjectPath) = message.body().deserialize().map_err(other)?;
                if removed == name {
                    break;
                }
            }
            _ => {}
        }
    }
    let removed = Instant::now();
    let (first, end) = reader.join().map_err(|_| io::Error::other("the reader panicked"))??;
    let job_done = job_done.ok_or_else(|| io::Error::other("no start job ended"))?;
    Ok([job_done, first, end, removed].map(|at| nanoseconds(begun, at)).to_vec())
}
