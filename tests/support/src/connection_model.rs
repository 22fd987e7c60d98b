//! The receiving side of a connection, driven by any sequence of sends, and a model of what has to come of it.
//!
//! `check` makes a real socketpair, sends what a `Scenario` says (bytes, in any pieces, with descriptors of many kinds),
//! lets the supervisor's own `inbound` receive it, and compares what came out with what the model expects. The model reads
//! the whole stream at once and knows nothing of pieces, so it has little to get wrong. Afterwards this process must have as
//! many descriptors as before. A fuzzer makes scenarios from its input (`Scenario::from_bytes`); tests make their own.
//!
//! What may surprise: descriptors belong to a *byte*. The kernel hands them over when the first byte of their send is read,
//! and ends that read there. So a descriptor is the start frame's if its send began inside that frame. Bytes read together
//! with a stray descriptor are lost, and how many those are is a matter of time; so a scenario says where everything sent
//! must have been received before it goes on.

#![allow(clippy::indexing_slicing)]

use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use opencode_pty::frame::message::{ErrorCode, Start, Words};
use opencode_pty::frame::{Kind, encode};
use opencode_pty::supervisor::foreign::Pool;
use opencode_pty::supervisor::inbound::{Inbound, Inbox, Over};
use opencode_pty::sys::directory::{self, Identity};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, FdFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use smol::Async;
use smol::future::{FutureExt, pending, yield_now};

use crate::decoders::{header_fields, start_fields};
use crate::descriptors::send_now;

/// How long anything here may take.
const SOON: Duration = Duration::from_secs(20);
/// Bounds of what a fuzzer can ask for: a stream's bytes, its sends, its descriptors (of 1,024 a process usually has).
const STREAM_BYTES_MAX: usize = 100_000;
const SENDS_MAX: usize = 80;
const DESCRIPTORS_MAX: usize = 300;

/// What a descriptor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The directory that a right start frame names.
    Directory,
    /// The same, opened with `O_PATH`.
    DirectoryPath,
    /// Another directory.
    OtherDirectory,
    /// A directory that has been removed.
    DeletedDirectory,
    /// A regular file.
    File,
    /// The same, opened with `O_PATH`.
    FilePath,
    /// One end of a socketpair.
    Socket,
    /// A pipe's end.
    Pipe,
    /// The client's own end of the connection.
    Connection,
}

impl What {
    /// Every kind.
    pub const ALL: [Self; 9] = [
        Self::Directory,
        Self::DirectoryPath,
        Self::OtherDirectory,
        Self::DeletedDirectory,
        Self::File,
        Self::FilePath,
        Self::Socket,
        Self::Pipe,
        Self::Connection,
    ];
}

/// One of each kind, open for as long as the process runs.
struct Shelf {
    items: Vec<(OwnedFd, Identity)>,
    pool: Pool,
}

static SHELF: LazyLock<Shelf> = LazyLock::new(Shelf::stock);
/// Descriptors are counted in the whole process, so there is one scenario at a time.
static ENGINE: LazyLock<Mutex<Engine>> = LazyLock::new(|| Mutex::new(Engine::start()));

impl Shelf {
    fn stock() -> Self {
        let open = |path: &str, flags| {
            rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).expect("it exists on every Linux")
        };
        let doomed = std::env::temp_dir().join(format!("opencode-pty-deleted-{}", std::process::id()));
        fs::create_dir(&doomed).expect("a directory can be made for temporary files");
        let deleted = File::open(&doomed).expect("it was just made");
        fs::remove_dir(&doomed).expect("it is empty");
        let (socket, _) = UnixStream::pair().expect("a socketpair can be made");
        let (pipe, _) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe can be made");
        let items = [
            open("/", OFlags::DIRECTORY),
            open("/", OFlags::DIRECTORY | OFlags::PATH),
            open("/proc", OFlags::DIRECTORY),
            deleted.into(),
            open("/proc/self/exe", OFlags::RDONLY),
            open("/proc/self/exe", OFlags::PATH),
            socket.into(),
            pipe,
        ];
        let identified = |fd: OwnedFd| {
            let identity = directory::identify(&fd).expect("fstat works on anything here");
            (fd, identity)
        };
        let shelf = Self { items: items.into_iter().map(identified).collect(), pool: Pool::new() };
        // What the reactor and the pool open once and keep is open after this.
        let (client, server) = UnixStream::pair().expect("a socketpair can be made");
        let server = Async::new(server).expect("the reactor works");
        drop(client);
        smol::block_on(async {
            server.readable().await.expect("a hang-up is an event");
            let (fd, _) = shelf.pool.identify(open("/", OFlags::DIRECTORY)).await.expect("the pool works");
            drop(fd);
        });
        shelf
    }

    /// What stands on the shelf for this kind; `None` for the connection, which each scenario has of its own.
    fn item(&self, what: What) -> Option<&(OwnedFd, Identity)> {
        self.items.get(What::ALL.iter().position(|other| *other == what)?)
    }
}

/// One `sendmsg`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Send {
    /// Its bytes. A send of none carries no descriptor either.
    pub bytes: Vec<u8>,
    /// What goes with its first byte.
    pub descriptors: Vec<What>,
    /// Wait until the supervisor has received all of it.
    pub settle: bool,
}

/// How the client's side ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It closes.
    Close,
    /// It shuts down its sending direction.
    HalfClose,
    /// It closes with something of ours unread, which makes it a reset.
    Reset,
    /// It says nothing more, and the supervisor gives up.
    Silence,
}

/// Who takes the input out of the queue, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Appetite {
    /// All there is, at once.
    Eager,
    /// In small bites.
    Bites,
    /// Only when the queue is full.
    Late,
}

/// What a client does, in order.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// What it sends.
    pub sends: Vec<Send>,
    /// After this many sends the session's input is closed, as when its unit has ended.
    pub closed_after: Option<usize>,
    /// How its input is taken.
    pub appetite: Appetite,
    /// How it ends.
    pub ending: Ending,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing yet: the start frame is not complete.
    Waiting,
    /// It hung up before the start frame was complete.
    Gone,
    /// What it sent first was refused, by this code.
    Refused(ErrorCode),
    /// A right start frame with one descriptor, which is not the directory it names.
    NotTheDirectory,
    /// A right start frame with one descriptor, which could not be looked at: only where there is no room for more.
    Unexamined,
    /// A session.
    Session(Session),
}

/// What a session got.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Session {
    /// Input delivered.
    pub input: Vec<u8>,
    /// Bytes of input received, those dropped included.
    pub received: u64,
    /// A stop was seen.
    pub stop: bool,
    /// Whether it ended with a protocol error.
    pub violation: bool,
}

impl Outcome {
    /// Whether there is a session to which nothing wrong was sent.
    pub fn is_sound(&self) -> bool {
        matches!(self, Self::Session(session) if !session.violation)
    }
}

/// A right start frame for this directory.
pub fn start_frame(what: What, runtime: u32, words: &[&str]) -> Vec<u8> {
    let (_, identity) = SHELF.item(what).expect("a connection has no start frame");
    let words = Words::new(words.iter().map(|&word| word.to_owned()).collect()).expect("the words are in order");
    let start = Start::new(identity.dev, identity.ino, runtime, words).expect("the runtime is in order");
    encode(Kind::Start, &start.encode()).expect("a start always fits into its frame")
}

/// Descriptors this process has open.
pub fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("/proc is mounted").count()
}

/// Runs a scenario and compares; panics where the supervisor's code and the model differ, or a descriptor stays open.
pub fn check(scenario: Scenario) -> Outcome {
    let scenario = Arc::new(scenario);
    let observed = observe(&scenario, None);
    let (expected, at_least) = expect(&scenario);
    match (&observed, &expected) {
        (Outcome::Session(observed), Outcome::Session(expected)) => {
            assert!(
                expected.input.starts_with(&observed.input) && observed.input.len() >= at_least.input.len(),
                "input is not what was sent: {} bytes, of {} to {}",
                observed.input.len(),
                at_least.input.len(),
                expected.input.len(),
            );
            assert!((at_least.received..=expected.received).contains(&observed.received), "{observed:?}");
            assert!((at_least.stop..=expected.stop).contains(&observed.stop), "stop {}", observed.stop);
            assert_eq!(observed.violation, expected.violation);
        }
        _ => assert_eq!(observed, expected),
    }
    observed
}

/// Runs a scenario in a process that can take only so many descriptors more, which the model knows nothing of; panics
/// where one stays open.
pub fn observe_with_room_for(descriptors: usize, scenario: Scenario) -> Outcome {
    observe(&Arc::new(scenario), Some(descriptors))
}

fn observe(scenario: &Arc<Scenario>, room: Option<usize>) -> Outcome {
    let engine = ENGINE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = open_descriptors();
    let observed = engine.run(scenario, room);
    // The pool closes on threads of its own.
    let deadline = Instant::now() + SOON;
    let mut pause = Duration::from_micros(20);
    loop {
        let after = open_descriptors();
        if after == before {
            return observed;
        }
        assert!(Instant::now() < deadline, "{after} descriptors are open instead of {before}");
        std::thread::sleep(pause);
        pause *= 2;
    }
}

/// A thread that runs scenarios, and the reactor with them: entered anew for each, it would change threads at every event.
struct Engine {
    scenarios: smol::channel::Sender<(Arc<Scenario>, Option<usize>)>,
    outcomes: mpsc::Receiver<Outcome>,
}

impl Engine {
    fn start() -> Self {
        LazyLock::force(&SHELF);
        let (scenarios, next) = smol::channel::bounded::<(Arc<Scenario>, _)>(1);
        let (outcome, outcomes) = mpsc::channel();
        std::thread::spawn(move || {
            smol::block_on(async {
                while let Ok((scenario, room)) = next.recv().await {
                    let _ = outcome.send(run(&scenario, room).await);
                }
            });
        });
        Self { scenarios, outcomes }
    }

    fn run(&self, scenario: &Arc<Scenario>, room: Option<usize>) -> Outcome {
        self.scenarios.try_send((Arc::clone(scenario), room)).expect("the engine is idle, unless it panicked");
        self.outcomes.recv_timeout(SOON).expect("an event or an end comes soon, unless the engine panicked")
    }
}

/// A limit on this process's descriptors that leaves room for a few, for as long as this exists.
struct Limited(Rlimit);

impl Limited {
    fn to(room: usize) -> Self {
        let usual = getrlimit(Resource::Nofile);
        // Numbers are given out from below: the last of these is the first there is to be no room for.
        let free: Vec<File> = (0..=room).map(|_| File::open("/").expect("it can be opened")).collect();
        let limit = free.last().map(|first_beyond| first_beyond.as_raw_fd().unsigned_abs().into());
        setrlimit(Resource::Nofile, Rlimit { current: limit, ..usual }).expect("a limit can be lowered");
        Self(usual)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        setrlimit(Resource::Nofile, self.0).expect("it is within the hard limit");
    }
}

// ---- the model ---------------------------------------------------------------------------------------------

/// What has to come of a scenario, and the least of it where time decides.
fn expect(scenario: &Scenario) -> (Outcome, Session) {
    let stream = scenario.sends.iter().map(|send| send.bytes.as_slice()).collect::<Vec<_>>().concat();
    let refused = |code| (Outcome::Refused(code), Session::default());
    let unfinished = || {
        let outcome = if scenario.ending == Ending::Silence { Outcome::Waiting } else { Outcome::Gone };
        (outcome, Session::default())
    };
    // Descriptors, by the byte they come with.
    let arrivals = |range: Range<usize>| -> Vec<What> {
        let sends = scenario.sends.iter().scan(0, |end, send| {
            let offset = *end;
            *end += send.bytes.len();
            Some((offset, send))
        });
        sends
            .filter(|(offset, send)| range.contains(offset) && !send.bytes.is_empty())
            .flat_map(|(_, send)| send.descriptors.clone())
            .collect()
    };

    if arrivals(0..12).len() > 1 {
        return refused(ErrorCode::BadFrame);
    }
    let Some(header) = stream.first_chunk::<12>() else { return unfinished() };
    let Some((1, len)) = header_fields(header) else { return refused(ErrorCode::BadFrame) };
    let end = 12 + len;
    let descriptors = arrivals(0..end);
    if descriptors.len() > 1 {
        return refused(ErrorCode::BadFrame);
    }
    let Some(payload) = stream.get(12..end) else { return unfinished() };
    let (Some(start), [descriptor]) = (start_fields(payload), descriptors.as_slice()) else {
        return refused(ErrorCode::BadStart);
    };
    let (dev, ino, _) = start.numbers;
    let names = |identity: &Identity| identity.is_directory && (identity.dev, identity.ino) == (dev, ino);
    if !SHELF.item(*descriptor).is_some_and(|(_, identity)| names(identity)) {
        return (Outcome::NotTheDirectory, Session::default());
    }
    let (session, at_least) = expect_session(scenario, &stream, end);
    (Outcome::Session(session), at_least)
}

/// The same for what follows the start frame, which ends at `begin`.
fn expect_session(scenario: &Scenario, stream: &[u8], begin: usize) -> (Session, Session) {
    let (mut stray, mut settled, mut closed, mut end) = (None, begin, usize::MAX, 0);
    for (index, send) in (0..).zip(&scenario.sends) {
        if scenario.closed_after == Some(index) {
            closed = end;
        }
        if stray.is_none() && end >= begin && !send.descriptors.is_empty() && !send.bytes.is_empty() {
            stray = Some(end);
        }
        end += send.bytes.len();
        if stray.is_none() && (send.settle || scenario.closed_after == Some(index + 1)) {
            settled = settled.max(end);
        }
    }
    let frames = frames_until(stream, begin, stray.unwrap_or(stream.len()), closed);
    let most = Session { violation: frames.violation || stray.is_some(), ..frames };
    let least = if stray.is_some() { frames_until(stream, begin, settled, closed) } else { most.clone() };
    (most, least)
}

/// What the frames between two places of the stream say, if input from `closed` on is dropped.
fn frames_until(stream: &[u8], begin: usize, end: usize, closed: usize) -> Session {
    let mut session = Session::default();
    let mut at = begin;
    let stream = stream.get(..end).unwrap_or_default();
    while let Some(header) = stream.get(at..).and_then(|rest| rest.first_chunk()) {
        at += 12;
        let len = match header_fields(header) {
            Some((7, _)) => {
                session.stop = true;
                0
            }
            Some((2, len)) => len,
            _ => {
                session.violation = true;
                break;
            }
        };
        let payload = stream.get(at..).map(|rest| rest.get(..len).unwrap_or(rest)).unwrap_or_default();
        session.received += payload.len() as u64;
        if !session.stop {
            let kept = payload.len().min(closed.saturating_sub(at));
            session.input.extend_from_slice(payload.get(..kept).unwrap_or_default());
        }
        at += len;
    }
    session
}

// ---- the real thing ----------------------------------------------------------------------------------------

/// Drives the supervisor's code through a scenario.
async fn run(scenario: &Scenario, room: Option<usize>) -> Outcome {
    let (client, server) = UnixStream::pair().expect("a socketpair can be made");
    let server = Rc::new(Async::new(server).expect("the reactor works"));
    if scenario.ending == Ending::Reset {
        send_now(server.get_ref().as_fd(), b"unread", &[]).expect("there is room");
    }
    let run = Run {
        server: Rc::clone(&server),
        inbox: Inbox::default(),
        input: RefCell::default(),
        looking: Cell::new(false),
        outcome: RefCell::new(Outcome::Waiting),
    };
    let _limited = room.map(Limited::to);
    let sending = async {
        run.send(scenario, client).await;
        if scenario.ending != Ending::Silence {
            pending::<()>().await;
        }
    };
    run.receive().or(run.take(scenario.appetite)).or(sending).await;
    run.finish()
}

struct Run {
    server: Rc<Async<UnixStream>>,
    inbox: Inbox,
    /// Input taken so far.
    input: RefCell<Vec<u8>>,
    /// The descriptor is being looked at.
    looking: Cell<bool>,
    outcome: RefCell<Outcome>,
}

impl Run {
    /// The supervisor's steps, as `connection` takes them.
    async fn receive(&self) {
        let pool = &SHELF.pool;
        let mut inbound = Inbound::new(Rc::clone(&self.server), pool.clone());
        let (start, descriptor) = match inbound.start().await {
            Ok(received) => received,
            Err(Over::HungUp) => {
                self.outcome.replace(Outcome::Gone);
                return;
            }
            Err(Over::Violation(code, reason)) => {
                assert_reason(&reason);
                self.outcome.replace(Outcome::Refused(code));
                return inbound.discard().await;
            }
        };
        self.looking.set(true);
        let flags = rustix::io::fcntl_getfd(&descriptor).expect("it is open");
        assert!(flags.contains(FdFlags::CLOEXEC), "a descriptor without close-on-exec");
        let looked = pool.identify(descriptor).await;
        self.looking.set(false);
        let Ok((descriptor, identity)) = looked else {
            self.outcome.replace(Outcome::Unexamined);
            return inbound.discard().await;
        };
        let identity = identity.expect("fstat works on anything here");
        pool.dispose(vec![descriptor]);
        if !identity.is_directory || (identity.dev, identity.ino) != (start.dev(), start.ino()) {
            self.outcome.replace(Outcome::NotTheDirectory);
            return inbound.discard().await;
        }
        self.outcome.replace(Outcome::Session(Session::default()));
        match inbound.follow(&self.inbox).await {
            Over::HungUp => {}
            Over::Violation(code, reason) => {
                assert_reason(&reason);
                assert_eq!(code, ErrorCode::BadFrame);
                self.outcome.replace(Outcome::Session(Session { violation: true, ..Session::default() }));
                inbound.discard().await;
            }
        }
    }

    /// The session's side of the queue.
    async fn take(&self, appetite: Appetite) {
        loop {
            let least_space = if appetite == Appetite::Late { 0 } else { usize::MAX };
            self.inbox.input.wait_for(|queue| (!queue.is_empty() && queue.space() <= least_space).then_some(())).await;
            self.take_up_to(if appetite == Appetite::Bites { 5_003 } else { usize::MAX });
            yield_now().await;
        }
    }

    fn take_up_to(&self, most: usize) {
        self.inbox.input.change(|queue| {
            let count = queue.bytes().len().min(most);
            self.input.borrow_mut().extend_from_slice(queue.bytes().get(..count).unwrap_or_default());
            queue.consume(count);
        });
    }

    /// The client's side.
    async fn send(&self, scenario: &Scenario, client: UnixStream) {
        for (index, send) in (0..).zip(&scenario.sends) {
            if scenario.closed_after == Some(index) {
                self.settle().await;
                self.take_up_to(usize::MAX);
                self.inbox.closed.set(true);
            }
            send_one(&client, send).await;
            if send.settle {
                self.settle().await;
            }
        }
        // Whoever holds the client's end as a descriptor does not see it closed.
        let held = scenario.sends.iter().any(|send| send.descriptors.contains(&What::Connection));
        match scenario.ending {
            Ending::Close | Ending::Reset if !held => {}
            Ending::Close | Ending::Reset | Ending::HalfClose => {
                client.shutdown(std::net::Shutdown::Write).expect("it is connected");
                // Open until the end, which is the supervisor's to find.
                pending::<()>().await;
            }
            Ending::Silence => self.settle().await,
        }
    }

    /// Waits until everything sent has been received, and looked at.
    async fn settle(&self) {
        while self.looking.get() || rustix::io::ioctl_fionread(self.server.get_ref()).is_ok_and(|unread| unread > 0) {
            yield_now().await;
        }
    }

    fn finish(self) -> Outcome {
        self.take_up_to(usize::MAX);
        match self.outcome.into_inner() {
            Outcome::Session(Session { violation, .. }) => Outcome::Session(Session {
                input: self.input.into_inner(),
                received: self.inbox.received.get(),
                stop: self.inbox.stop.get(),
                violation,
            }),
            other => other,
        }
    }
}

async fn send_one(client: &UnixStream, send: &Send) {
    let descriptor = |what: &What| SHELF.item(*what).map_or(client.as_fd(), |(fd, _)| fd.as_fd());
    let descriptors: Vec<BorrowedFd<'_>> = send.descriptors.iter().map(descriptor).collect();
    let (mut rest, mut descriptors) = (send.bytes.as_slice(), descriptors.as_slice());
    loop {
        match send_now(client.as_fd(), rest, descriptors) {
            Ok(count) => {
                rest = rest.get(count..).unwrap_or_default();
                descriptors = &[];
            }
            // No room, or too many of this user's descriptors on their way: until some are received.
            Err(error)
                if error.kind() == ErrorKind::WouldBlock
                    || Errno::from_io_error(&error) == Some(Errno::TOOMANYREFS) =>
            {
                yield_now().await;
            }
            Err(error) => panic!("cannot send to descriptor {}: {error}", client.as_raw_fd()),
        }
        if rest.is_empty() {
            return;
        }
    }
}

/// What the peer is told about a violation: one plain line, and not much.
fn assert_reason(reason: &str) {
    assert!(!reason.is_empty() && reason.len() < 200 && !reason.contains(char::is_control), "{reason:?}");
}

// ---- a scenario from bytes ---------------------------------------------------------------------------------

impl Scenario {
    /// The scenario some bytes stand for. Every byte string is one.
    ///
    /// The first byte chooses ending (its last two bits) and appetite (the next two). Each step then begins with a byte whose
    /// last three bits say what it does, and whose other five are its number `n`. Frames and bytes are put behind what is
    /// there to be sent; a send takes all of it.
    ///
    /// | step | does |
    /// | --- | --- |
    /// | 0 | the next `n + 1` bytes as they are |
    /// | 1 | a right start frame with `n % 8` arguments, for the directory, the deleted one, or another, or a large one |
    /// | 2 | an input frame of `n + 1` bytes; with `n` 31, of a length in the next two bytes |
    /// | 3 | a stop frame |
    /// | 4 | sends; the next byte chooses the descriptors, and `n` odd waits |
    /// | 5 | sends in pieces of `n + 1` bytes; the next bytes choose the piece with descriptors, and these |
    /// | 6 | a header of type `n` with a length in the next three bytes |
    /// | 7 | changes a byte: how far from the end, and by what; with `n` 31, closes the session's input |
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut script =
            Script { rest: bytes, pending: Vec::new(), sends: Vec::new(), total: 0, descriptors: 0, input: 0 };
        let choice = script.byte();
        let ending = [Ending::Close, Ending::HalfClose, Ending::Reset, Ending::Silence][usize::from(choice & 3)];
        let appetite = match choice >> 2 & 3 {
            0 | 1 => Appetite::Eager,
            2 => Appetite::Bites,
            _ => Appetite::Late,
        };
        let mut closed_after = None;
        while !script.rest.is_empty() {
            let step = script.byte();
            let number = usize::from(step >> 3);
            if (step & 7, number) == (7, 31) {
                closed_after = closed_after.or(Some(script.sends.len()));
            } else {
                script.step(step & 7, number);
            }
        }
        script.send(Vec::new(), false);
        Self { sends: script.sends, closed_after, appetite, ending }
    }
}

/// What is typed: bytes that differ from those 256 or 512 places on, so that none can stand in for another unnoticed.
static PATTERN: LazyLock<Vec<u8>> =
    LazyLock::new(|| (0..PATTERN_PERIOD).cycle().take(usize::from(PATTERN_PERIOD) + 32_768).collect());
const PATTERN_PERIOD: u8 = 251;

struct Script<'a> {
    rest: &'a [u8],
    pending: Vec<u8>,
    sends: Vec<Send>,
    total: usize,
    descriptors: usize,
    /// Bytes of input made so far: each is another than the one before.
    input: usize,
}

impl Script<'_> {
    fn byte(&mut self) -> u8 {
        let (byte, rest) = self.rest.split_first().unwrap_or((&0, &[]));
        self.rest = rest;
        *byte
    }

    fn number(&mut self, bytes: usize) -> usize {
        (0..bytes).fold(0, |number, _| number << 8 | usize::from(self.byte()))
    }

    fn step(&mut self, step: u8, number: usize) {
        match step {
            0 => {
                let (raw, rest) = self.rest.split_at(self.rest.len().min(number + 1));
                self.rest = rest;
                self.put(raw);
            }
            1 => self.put_start(number),
            2 => self.put_input(number),
            3 => self.put(&encode(Kind::Stop, &[]).expect("a stop has no payload")),
            4 => {
                let descriptors = self.choose_descriptors();
                self.send(descriptors, number & 1 == 1);
            }
            5 => self.send_in_pieces(number + 1),
            6 => {
                let len = u32::try_from(self.number(3)).expect("three bytes");
                let kind = u8::try_from(number).expect("five bits");
                self.put(&[b"OPTY\x01".as_slice(), &[kind, 0, 0], &len.to_be_bytes()].concat());
            }
            _ => {
                let (back, change) = (usize::from(self.byte()), self.byte());
                let at = self.pending.len().saturating_sub(1 + back);
                if let Some(byte) = self.pending.get_mut(at) {
                    *byte ^= change;
                }
            }
        }
    }

    /// Puts bytes behind what is there to be sent, unless that would be too much.
    fn put(&mut self, bytes: &[u8]) {
        if self.total + bytes.len() <= STREAM_BYTES_MAX {
            self.total += bytes.len();
            self.pending.extend_from_slice(bytes);
        }
    }

    fn put_start(&mut self, number: usize) {
        let what = [What::Directory, What::DeletedDirectory, What::OtherDirectory, What::Directory][number / 8];
        let argument = if number >= 24 { "é".repeat(4_096) } else { "-c".to_owned() };
        let words: Vec<&str> = std::iter::once("/bin/sh").chain(std::iter::repeat_n(&*argument, number % 8)).collect();
        self.put(&start_frame(what, 60, &words));
    }

    fn put_input(&mut self, number: usize) {
        let len = if number == 31 { self.number(2) % 32_768 } else { number };
        let from = self.input % usize::from(PATTERN_PERIOD);
        self.input += len + 1;
        self.put(&encode(Kind::Input, &PATTERN[from..=from + len]).expect("1 to 32,768 bytes"));
    }

    /// Descriptors: the byte's last four bits say of what kind, the others how many. Great numbers cost most of a
    /// scenario's time, so there is one byte for 64 and one for 253.
    fn choose_descriptors(&mut self) -> Vec<What> {
        let choice = self.byte();
        let count = match choice {
            0xcf => 64,
            0xdf => 253,
            _ => [0, 1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 8, 16, 16, 0, 0][usize::from(choice >> 4)],
        };
        let count = count.min(DESCRIPTORS_MAX - self.descriptors);
        self.descriptors += count;
        // Sixteen for nine kinds: the last seven are mixtures.
        let kind = usize::from(choice & 15);
        match What::ALL.get(kind) {
            Some(what) => vec![*what; count],
            None => What::ALL.into_iter().cycle().skip(kind).take(count).collect(),
        }
    }

    fn send(&mut self, descriptors: Vec<What>, settle: bool) {
        let bytes = std::mem::take(&mut self.pending);
        if self.sends.len() < SENDS_MAX {
            self.sends.push(Send { bytes, descriptors, settle });
        } else if let Some(last) = self.sends.last_mut() {
            last.bytes.extend_from_slice(&bytes);
        }
    }

    fn send_in_pieces(&mut self, size: usize) {
        let (with, settle) = (usize::from(self.byte()), size.is_multiple_of(2));
        let mut descriptors = self.choose_descriptors();
        let bytes = std::mem::take(&mut self.pending);
        let mut rest = bytes.as_slice();
        for index in 0.. {
            // Where there can be no further send, the last one takes the rest.
            let full = self.sends.len() + 1 >= SENDS_MAX;
            let (piece, behind) = rest.split_at(if full { rest.len() } else { size.min(rest.len()) });
            if piece.is_empty() {
                break;
            }
            rest = behind;
            self.pending.extend_from_slice(piece);
            self.send(if index == with { std::mem::take(&mut descriptors) } else { Vec::new() }, settle);
        }
    }
}
