//! A service manager that says what a test wants: it owns `org.freedesktop.systemd1` on a private bus and starts
//! nothing.
//!
//! A "unit" here is a record; its launcher is played by a thread of the test, at the other end of the very
//! socketpair that the supervisor put into `StartTransientUnit`. What the manager answers, when the job ends and
//! with which word, what the launcher does and how a stop goes is a [`Script`], which a test may change at any
//! time. `tests/system` runs the product against the real manager, so that this one can't drift.
//!
//! Its helpers panic, with what was waited for and the list of calls so far: they are for tests alone.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use opencode_pty::frame::message::{ErrorCode, Start, encode_error};
use opencode_pty::frame::{Header, Kind, encode};
use opencode_pty::limits::FRAME_HEADER_BYTES;
use smol::stream::StreamExt;
use zbus::zvariant::{DynamicType, Fd, OwnedObjectPath, OwnedValue, Value};
use zbus::{Connection, Message, MessageStream, message};

const MANAGER_NAME: &str = "org.freedesktop.systemd1";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER_INTERFACE: &str = "org.freedesktop.systemd1.Manager";
const UNIT_INTERFACE: &str = "org.freedesktop.systemd1.Unit";
const SERVICE_INTERFACE: &str = "org.freedesktop.systemd1.Service";
const PROPERTIES_INTERFACE: &str = "org.freedesktop.DBus.Properties";
const UNIT_PATH_PREFIX: &str = "/org/freedesktop/systemd1/unit/";

/// The error systemd gives for a unit it does not have.
pub const NO_SUCH_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
/// The error every bus gives for a method that is not there.
pub const UNKNOWN_METHOD: &str = "org.freedesktop.DBus.Error.UnknownMethod";
/// systemd's error for a process that has been reaped.
pub const PROCESS_UNKNOWN: &str = "org.freedesktop.DBus.Error.UnixProcessIdUnknown";

/// How long [`FakeManager::wait`] waits. Chosen: several times the product's longest wait.
const WAIT_TIME: Duration = Duration::from_mins(1);

// ---- the script --------------------------------------------------------------------------------------------

/// What happens, until the test says otherwise.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// What a call gets instead of its proper answer.
    pub answers: Vec<Exception>,
    /// How a start job ends.
    pub job: JobEnd,
    /// What the launcher does once the job is done.
    pub launcher: Launcher,
    /// What a unit does when it is stopped.
    pub stop: Stopping,
}

/// A call that is not answered as it should be.
#[derive(Clone, Debug)]
pub struct Exception {
    /// The method.
    pub method: &'static str,
    /// The unit, or any.
    pub unit: Option<String>,
    /// What it gets.
    pub answer: Answer,
    /// How often.
    pub times: usize,
}

/// What a call gets instead of its proper answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// This error; nothing is carried out.
    Error(&'static str, &'static str),
    /// Nothing, and nothing is carried out.
    Silence,
    /// It is carried out, and nobody is told.
    LostReply,
    /// Nothing for now; carried out and answered at [`FakeManager::release`].
    Held,
    /// An answer of the wrong type; nothing is carried out.
    Malformed,
}

/// How a start job ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// At once, with this word.
    Word(String),
    /// When the test calls [`FakeManager::finish_job`].
    Held,
}

impl Default for JobEnd {
    fn default() -> Self {
        Self::Word("done".into())
    }
}

/// What a unit does when it is stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stopping {
    /// Dies of SIGTERM at once.
    #[default]
    Obeys,
    /// Dies of `KillUnit` alone.
    NeedsKill,
    /// Does not die.
    Never,
}

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

// ---- what there is -----------------------------------------------------------------------------------------

/// The server's unit.
#[derive(Clone, Debug)]
pub struct Server {
    /// Its name.
    pub unit: String,
    /// Its main process.
    pub main_pid: u32,
    /// Its `InvocationID`.
    pub invocation: Vec<u8>,
    /// Its `ControlGroup`.
    pub control_group: String,
    /// Its `ActiveState`.
    pub active: String,
    /// Its `SubState`.
    pub sub: String,
    /// Its `NotifyAccess`.
    pub notify_access: String,
    /// The invocation `GetUnitByPIDFD` gives, if it is not the unit's.
    pub invocation_by_pidfd: Option<Vec<u8>>,
}

impl Server {
    /// A server as it should be, with `main_pid` as its main process.
    pub fn new(unit: &str, main_pid: u32) -> Self {
        Self {
            unit: unit.into(),
            main_pid,
            invocation: vec![0x5e; 16],
            control_group: format!("/system.slice/{unit}"),
            active: "active".into(),
            sub: "running".into(),
            notify_access: "none".into(),
            invocation_by_pidfd: None,
        }
    }
}

/// What came through the socketpair before anything else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Handed {
    /// Nothing so far.
    #[default]
    Nothing,
    /// A start frame.
    Start(Box<Start>),
    /// The end, after these bytes, which are no whole start frame.
    Closed(Vec<u8>),
}

/// A transient unit.
#[derive(Debug)]
pub struct Unit {
    /// Its name.
    pub name: String,
    /// The properties it was started with, without its descriptors.
    pub properties: HashMap<String, OwnedValue>,
    /// Its `ActiveState`.
    pub active: String,
    /// Its `SubState`.
    pub sub: String,
    /// Its `Result`, `ExecMainCode` and `ExecMainStatus`.
    pub result: String,
    /// See `result`.
    pub code: i32,
    /// See `result`.
    pub status: i32,
    /// Its `InvocationID`.
    pub invocation: Vec<u8>,
    /// Its `ControlGroup` while it runs.
    pub control_group: String,
    /// Its `BindsTo`.
    pub binds_to: Vec<String>,
    /// Its queued job: number and kind.
    pub job: Option<(u32, &'static str)>,
    /// Clients that keep it loaded.
    pub references: usize,
    /// Whether it has been unloaded. It stays in the list for tests to look at.
    pub removed: bool,
    /// What came through its socketpair first.
    pub handed: Handed,
    /// Bytes that lay in its socketpair when its start job ended.
    pub bytes_before_job_end: usize,
    /// The directory it was given.
    pub directory: Option<OwnedFd>,
    terminal: Option<UnixStream>,
}

impl Unit {
    /// A unit that an earlier supervisor could have left behind.
    pub fn left_behind(name: &str, active: &str, binds_to: &str) -> Self {
        Self {
            name: name.into(),
            properties: HashMap::new(),
            active: active.into(),
            sub: if active == "active" { "running" } else { "dead" }.into(),
            result: "success".into(),
            code: 0,
            status: 0,
            invocation: vec![0x0b; 16],
            control_group: format!("/opencode.slice/opencode-pty.slice/{name}"),
            binds_to: vec![binds_to.into()],
            job: None,
            references: 0,
            removed: false,
            handed: Handed::Nothing,
            bytes_before_job_end: 0,
            directory: None,
            terminal: None,
        }
    }

    fn is_ended(&self) -> bool {
        self.job.is_none() && matches!(self.active.as_str(), "inactive" | "failed")
    }
}

/// One call that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The method.
    pub method: String,
    /// The unit it is about, or nothing.
    pub unit: String,
    /// Its mode or the like, or nothing.
    pub detail: String,
}

/// Everything the fake manager knows.
#[derive(Debug)]
pub struct State {
    /// What happens.
    pub script: Script,
    /// The server's unit.
    pub server: Server,
    /// Every session unit there ever was, by name.
    pub units: BTreeMap<String, Unit>,
    /// Every call that came, in order.
    pub calls: Vec<Call>,
    held: Vec<Message>,
    jobs: u32,
}

impl State {
    /// The unit, if it is loaded.
    pub fn loaded(&self, name: &str) -> Option<&Unit> {
        self.units.get(name).filter(|unit| !unit.removed)
    }

    /// How many units are loaded and not ended.
    pub fn running(&self) -> usize {
        self.units.values().filter(|unit| !unit.removed && !unit.is_ended()).count()
    }

    /// How often a method was called, for this unit or (with an empty name) any.
    pub fn called(&self, method: &str, unit: &str) -> usize {
        self.calls.iter().filter(|call| call.method == method && (unit.is_empty() || call.unit == unit)).count()
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    connection: Mutex<Option<Connection>>,
}

/// A fake manager; clones are handles on the same one.
#[derive(Clone, Debug)]
pub struct FakeManager {
    shared: Arc<Shared>,
    address: String,
}

impl FakeManager {
    /// Takes the manager's name on this bus.
    pub fn start(address: &str, server: Server) -> zbus::Result<Self> {
        let state =
            State { script: Script::default(), server, units: BTreeMap::new(), calls: vec![], held: vec![], jobs: 0 };
        let shared = Shared { state: Mutex::new(state), changed: Condvar::new(), connection: Mutex::new(None) };
        let fake = Self { shared: Arc::new(shared), address: address.to_owned() };
        fake.connect()?;
        Ok(fake)
    }

    /// Connects and takes the name; also after the bus was restarted.
    pub fn connect(&self) -> zbus::Result<()> {
        let (connection, stream) = smol::block_on(async {
            let connection = zbus::connection::Builder::address(self.address.as_str())?.build().await?;
            // Before the name, or the first calls could be missed.
            let stream = MessageStream::from(&connection);
            connection.request_name(MANAGER_NAME).await?;
            zbus::Result::Ok((connection, stream))
        })?;
        *self.connection() = Some(connection.clone());
        let fake = self.clone();
        thread::spawn(move || smol::block_on(fake.serve(connection, stream)));
        Ok(())
    }

    /// Gives the name up: calls in flight are lost.
    pub fn disconnect(&self) -> zbus::Result<()> {
        let connection = self.connection().take();
        if let Some(connection) = connection {
            smol::block_on(connection.close())?;
        }
        self.lock().held.clear();
        Ok(())
    }

    /// What a daemon-reexec looks like from outside: calls in flight are lost, and the name moves to a new unique
    /// name of the same process.
    pub fn reexecute(&self) -> zbus::Result<()> {
        self.disconnect()?;
        self.connect()
    }

    /// What a restart of the bus does to the manager: references are gone, and ended units with them.
    pub fn lose_references(&self) {
        let mut state = self.lock();
        for unit in state.units.values_mut() {
            unit.references = 0;
            unit.removed |= unit.is_ended();
        }
    }

    /// Changes or reads what there is.
    pub fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        let result = look(&mut self.lock());
        self.shared.changed.notify_all();
        result
    }

    /// Waits until `look` finds what it wants.
    pub fn wait<T>(&self, waiting_for: &str, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        let deadline = Instant::now() + WAIT_TIME;
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return found;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the fake manager waited for {waiting_for}; it has {state:#?}");
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until a unit has been started, which has not been asked for before, and gives its name.
    pub fn wait_for_start(&self, known: &[&str]) -> String {
        self.wait("a unit to be started", |state| {
            state.units.keys().find(|name| !known.contains(&name.as_str())).cloned()
        })
    }

    /// Waits until no unit is loaded.
    pub fn wait_until_empty(&self) {
        self.wait("every unit to be unloaded", |state| state.units.values().all(|unit| unit.removed).then_some(()));
    }

    /// Answers this method differently, `times` times.
    pub fn answer(&self, method: &'static str, answer: Answer, times: usize) {
        self.with(|state| state.script.answers.push(Exception { method, unit: None, answer, times }));
    }

    /// The same for one unit only.
    pub fn answer_for(&self, method: &'static str, unit: &str, answer: Answer, times: usize) {
        let unit = Some(unit.to_owned());
        self.with(|state| state.script.answers.push(Exception { method, unit, answer, times }));
    }

    /// Ends a held start job.
    pub fn finish_job(&self, unit: &str, word: &str) {
        let messages = self.with(|state| end_start_job(state, unit, word));
        self.send(messages);
        self.play(unit);
    }

    /// Says that a job has ended, whether there was one or not.
    pub fn pretend_job_removed(&self, job: u32, unit: &str, word: &str) {
        self.send(vec![job_removed(job, unit, word)]);
    }

    /// Ends a unit's main process, as an outsider's signal would.
    pub fn end_unit(&self, unit: &str, ending: Ending) {
        let messages = self.with(|state| end(state, unit, ending));
        self.send(messages);
    }

    /// Carries out and answers every held call.
    pub fn release(&self) {
        let held = self.with(|state| std::mem::take(&mut state.held));
        for call in held {
            self.carry_out(&call, true);
        }
    }

    /// What somebody's `systemctl restart` of a session does: another invocation.
    pub fn change_invocation(&self, name: &str) {
        let messages = self.with(|state| {
            let Some(unit) = state.units.get_mut(name) else { return vec![] };
            unit.invocation = vec![0xee; 16];
            unit_changed(unit)
        });
        self.send(messages);
    }

    /// Tells everyone about the server's unit, as a change of it would.
    pub fn announce_server(&self) {
        let messages = self.with(|state| {
            let server = &state.server;
            let path = path_of(&server.unit);
            let service = HashMap::from([("MainPID", Value::from(server.main_pid))]);
            let unit = HashMap::from([
                ("ActiveState", Value::from(server.active.clone())),
                ("SubState", Value::from(server.sub.clone())),
                ("InvocationID", Value::from(server.invocation.clone())),
            ]);
            vec![
                properties_changed(&path, SERVICE_INTERFACE, &service),
                properties_changed(&path, UNIT_INTERFACE, &unit),
            ]
        });
        self.send(messages);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connection(&self) -> MutexGuard<'_, Option<Connection>> {
        self.shared.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, messages: Vec<Message>) {
        let connection = self.connection().clone();
        let Some(connection) = connection else { return };
        for message in messages {
            // Between two connections nobody can hear us, as with the real one.
            let _ = smol::block_on(connection.send(&message));
        }
    }

    async fn serve(self, connection: Connection, mut stream: MessageStream) {
        while let Some(Ok(call)) = stream.next().await {
            if call.message_type() == message::Type::MethodCall {
                self.take(&call);
            }
        }
        drop(connection);
    }

    /// One call: noted, and answered as the script says.
    fn take(&self, call: &Message) {
        let described = describe(call);
        let exception = self.with(|state| {
            let exception = state.script.answers.iter_mut().find(|exception| {
                exception.times > 0
                    && exception.method == described.method
                    && exception.unit.as_ref().is_none_or(|unit| *unit == described.unit)
            });
            let answer = exception.map(|exception| {
                exception.times -= 1;
                exception.answer
            });
            if answer == Some(Answer::Held) {
                state.held.push(call.clone());
            }
            answer
        });
        match exception {
            None => self.carry_out(call, true),
            Some(Answer::LostReply) => self.carry_out(call, false),
            Some(Answer::Error(name, text)) => self.send(vec![error(call, name, text)]),
            Some(Answer::Malformed) => self.send(vec![reply(call, &(0_u8, "malformed"))]),
            Some(Answer::Silence | Answer::Held) => {}
        }
        // After the answer, so that a test that has seen the call knows it was answered.
        self.with(|state| state.calls.push(described));
    }

    fn carry_out(&self, call: &Message, answered: bool) {
        let mut to_play = None;
        let mut messages = self.with(|state| dispatch(state, call, &mut to_play));
        if !answered && !messages.is_empty() {
            messages.remove(0);
        }
        self.send(messages);
        if let Some(name) = to_play {
            self.play(&name);
        }
    }

    /// Plays the launcher of a unit whose start job has ended.
    fn play(&self, name: &str) {
        let (socket, launcher) = {
            let mut state = self.lock();
            let launcher = state.script.launcher.clone();
            let Some(unit) = state.units.get_mut(name) else { return };
            let Some(Ok(socket)) = unit.terminal.as_ref().map(UnixStream::try_clone) else { return };
            (socket, (unit.active == "active").then_some(launcher))
        };
        let (fake, name) = (self.clone(), name.to_owned());
        thread::spawn(move || {
            if let Some(ending) = fake.run_launcher(&name, socket, launcher) {
                fake.end_unit(&name, ending);
            }
        });
    }

    /// The launcher's side of the hand-over. Without one the unit failed to start: only what comes is noted.
    fn run_launcher(&self, name: &str, mut socket: UnixStream, launcher: Option<Launcher>) -> Option<Ending> {
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
        match socket.read(room) {
            Ok(read @ 1..) => have += read,
            Ok(0) | Err(_) => {
                bytes.truncate(have);
                return Handed::Closed(bytes);
            }
        }
    }
}

// ---- calls -------------------------------------------------------------------------------------------------

fn member(call: &Message) -> String {
    call.header().member().map(|member| member.as_str().to_owned()).unwrap_or_default()
}

/// What a call is about, for the list of calls.
fn describe(call: &Message) -> Call {
    let method = member(call);
    let body = call.body();
    let of_path = call.header().path().and_then(|path| name_of(path.as_str())).unwrap_or_default();
    let (unit, detail) = match method.as_str() {
        "StopUnit" | "StartUnit" | "RestartUnit" => body.deserialize::<(String, String)>().unwrap_or_default(),
        "StartTransientUnit" => match started(call) {
            Some((name, mode, _)) => (name, mode),
            None => (String::new(), "malformed".into()),
        },
        "KillUnit" => match body.deserialize::<(String, String, i32)>() {
            Ok((name, who, signal)) => (name, format!("{who} {signal}")),
            Err(_) => (String::new(), "malformed".into()),
        },
        "RefUnit" | "UnrefUnit" | "GetUnit" | "LoadUnit" | "ResetFailedUnit" | "GetUnitProcesses" => {
            (body.deserialize::<String>().unwrap_or_default(), String::new())
        }
        "GetUnitByPID" => (String::new(), body.deserialize::<u32>().map(|pid| pid.to_string()).unwrap_or_default()),
        _ => (of_path, String::new()),
    };
    Call { method, unit, detail }
}

type Started = (String, String, Vec<(String, OwnedValue)>);

fn started(call: &Message) -> Option<Started> {
    type Auxiliary = Vec<(String, Vec<(String, OwnedValue)>)>;
    let (name, mode, properties, _) =
        call.body().deserialize::<(String, String, Vec<(String, OwnedValue)>, Auxiliary)>().ok()?;
    Some((name, mode, properties))
}

/// Carries a call out; the first message is the answer, the others are signals.
fn dispatch(state: &mut State, call: &Message, to_play: &mut Option<String>) -> Vec<Message> {
    let header = call.header();
    let path = header.path().map(|path| path.as_str().to_owned()).unwrap_or_default();
    let described = describe(call);
    let name = described.unit.as_str();
    match described.method.as_str() {
        "Subscribe" | "Unsubscribe" => vec![reply(call, &())],
        "Get" | "GetAll" if path == MANAGER_PATH => match described.method.as_str() {
            "Get" => vec![reply(call, &Value::from("255.4"))],
            _ => vec![reply(call, &HashMap::from([("Version", Value::from("255.4"))]))],
        },
        "GetAll" => vec![reply(call, &properties_of(state, &name_of(&path).unwrap_or_default()))],
        "Get" => {
            let all = properties_of(state, &name_of(&path).unwrap_or_default());
            let wanted = call.body().deserialize::<(String, String)>().map(|(_, name)| name).unwrap_or_default();
            match all.get(wanted.as_str()) {
                Some(value) => vec![reply(call, value)],
                None => vec![error(call, "org.freedesktop.DBus.Error.UnknownProperty", "Unknown property")],
            }
        }
        "GetUnitByPIDFD" => vec![unit_by_pidfd(state, call)],
        "GetUnitByPID" => match call.body().deserialize::<u32>().ok().map(|pid| unit_of_pid(state, pid)) {
            Some(Some(unit)) => vec![reply(call, &object(&path_of(&unit)))],
            _ => vec![error(call, "org.freedesktop.systemd1.NoUnitForPID", "PID does not belong to any loaded unit.")],
        },
        "GetUnit" if state.loaded(name).is_none() && name != state.server.unit => vec![no_such_unit(call)],
        "GetUnit" | "LoadUnit" => vec![reply(call, &object(&path_of(name)))],
        "StartTransientUnit" => start_transient_unit(state, call, to_play),
        "RefUnit" | "UnrefUnit" | "StopUnit" | "KillUnit" | "ResetFailedUnit" | "GetUnitProcesses"
            if state.loaded(name).is_none() =>
        {
            vec![no_such_unit(call)]
        }
        "RefUnit" => {
            change(state, name, |unit| unit.references += 1);
            vec![reply(call, &())]
        }
        "UnrefUnit" => {
            change(state, name, |unit| unit.references = unit.references.saturating_sub(1));
            let mut messages = vec![reply(call, &())];
            messages.extend(collect(state, name));
            messages
        }
        "ResetFailedUnit" => vec![reply(call, &())],
        "GetUnitProcesses" => vec![reply(call, &Vec::<(String, u32, String)>::new())],
        "KillUnit" => {
            let mut messages = vec![reply(call, &())];
            if state.script.stop != Stopping::Never {
                messages.extend(end(state, name, (2, 9, "signal")));
            }
            messages
        }
        "StopUnit" => stop_unit(state, call, name, to_play),
        "ListUnitsByPatterns" => vec![list_units(state, call)],
        "ListJobs" => {
            let jobs: Vec<_> = state
                .units
                .values()
                .filter_map(|unit| unit.job.map(|(id, kind)| (unit, id, kind)))
                .map(|(unit, id, kind)| {
                    (id, unit.name.clone(), kind, "waiting", object(&job_path(id)), object(&path_of(&unit.name)))
                })
                .collect();
            vec![reply(call, &jobs)]
        }
        _ => vec![error(call, UNKNOWN_METHOD, "Unknown method")],
    }
}

fn change(state: &mut State, name: &str, change: impl FnOnce(&mut Unit)) {
    if let Some(unit) = state.units.get_mut(name) {
        change(unit);
    }
}

fn start_transient_unit(state: &mut State, call: &Message, to_play: &mut Option<String>) -> Vec<Message> {
    let Some((name, _, properties)) = started(call).filter(|(_, mode, _)| mode == "fail") else {
        return vec![error(call, "org.freedesktop.DBus.Error.InvalidArgs", "not a StartTransientUnit in mode fail")];
    };
    if state.loaded(&name).is_some() {
        return vec![error(call, "org.freedesktop.systemd1.UnitExists", "Unit already exists.")];
    }
    state.jobs += 1;
    let job = state.jobs;
    let mut properties: HashMap<String, OwnedValue> = properties.into_iter().collect();
    let mut descriptor = |name: &str| -> Option<OwnedFd> {
        let value = properties.remove(name)?;
        let fd = Fd::try_from(Value::from(value)).ok()?;
        fd.as_fd().try_clone_to_owned().ok()
    };
    let terminal = descriptor("StandardInputFileDescriptor").map(UnixStream::from);
    drop(descriptor("StandardOutputFileDescriptor"));
    let directory = descriptor("StandardErrorFileDescriptor");
    let flag = |name: &str| properties.get(name).is_some_and(|value| bool::try_from(value) == Ok(true));
    let binds_to = properties.get("BindsTo").and_then(|value| value.try_clone().ok());
    let unit = Unit {
        active: "activating".into(),
        sub: "start".into(),
        invocation: u128::from(job).to_be_bytes().to_vec(),
        binds_to: binds_to.and_then(|value| Vec::<String>::try_from(value).ok()).unwrap_or_default(),
        job: Some((job, "start")),
        references: usize::from(flag("AddRef")),
        directory,
        terminal,
        properties,
        ..Unit::left_behind(&name, "activating", "")
    };
    state.units.insert(name.clone(), unit);
    let mut messages = vec![
        reply(call, &object(&job_path(job))),
        signal(MANAGER_PATH, MANAGER_INTERFACE, "UnitNew", &(&name, object(&path_of(&name)))),
        signal(MANAGER_PATH, MANAGER_INTERFACE, "JobNew", &(job, object(&job_path(job)), &name)),
    ];
    if let JobEnd::Word(word) = state.script.job.clone() {
        messages.extend(end_start_job(state, &name, &word));
        *to_play = Some(name);
    }
    messages
}

fn end_start_job(state: &mut State, name: &str, word: &str) -> Vec<Message> {
    let Some(unit) = state.units.get_mut(name) else { return vec![] };
    let Some((job, _)) = unit.job.take() else { return vec![] };
    unit.bytes_before_job_end = unit
        .terminal
        .as_ref()
        .map_or(0, |socket| rustix::io::ioctl_fionread(socket).unwrap_or(0))
        .try_into()
        .unwrap_or(0);
    (unit.active, unit.sub) = match word {
        "done" => ("active".into(), "running".into()),
        "failed" | "timeout" => ("failed".into(), "failed".into()),
        _ => ("inactive".into(), "dead".into()),
    };
    if word == "failed" {
        (unit.code, unit.status, unit.result) = (1, 203, "exit-code".into());
    }
    let mut messages = unit_changed(unit);
    messages.push(job_removed(job, name, word));
    messages.extend(collect(state, name));
    messages
}

fn stop_unit(state: &mut State, call: &Message, name: &str, to_play: &mut Option<String>) -> Vec<Message> {
    state.jobs += 1;
    let (job, stopping) = (state.jobs, state.script.stop);
    let mut messages = vec![reply(call, &object(&job_path(job)))];
    let Some(unit) = state.units.get_mut(name) else { return messages };
    match unit.job {
        Some((_, "start")) => {
            messages.extend(end_start_job(state, name, "canceled"));
            messages.push(job_removed(job, name, "done"));
            *to_play = Some(name.to_owned());
        }
        Some((stop, _)) => {
            // The stop that is under way already.
            messages = vec![reply(call, &object(&job_path(stop)))];
        }
        None if unit.is_ended() => messages.push(job_removed(job, name, "done")),
        None => {
            unit.job = Some((job, "stop"));
            if stopping == Stopping::Obeys {
                messages.extend(end(state, name, (2, 15, "success")));
            } else {
                (unit.active, unit.sub) = ("deactivating".into(), "stop-sigterm".into());
                messages.extend(unit_changed(unit));
            }
        }
    }
    messages
}

/// Ends a unit: its terminal is closed, its state told, its job removed.
fn end(state: &mut State, name: &str, (code, status, result): Ending) -> Vec<Message> {
    let Some(unit) = state.units.get_mut(name) else { return vec![] };
    if unit.is_ended() || unit.removed {
        return vec![];
    }
    if let Some(socket) = unit.terminal.take() {
        // The player's thread has a duplicate; shut down, it sees the end, and so does the supervisor.
        let _ = socket.shutdown(Shutdown::Both);
    }
    let job = unit.job.take();
    (unit.code, unit.status, unit.result) = (code, status, result.into());
    unit.active = if result == "success" { "inactive" } else { "failed" }.into();
    unit.sub = if result == "success" { "dead" } else { "failed" }.into();
    let mut messages = unit_changed(unit);
    if let Some((job, kind)) = job {
        messages.push(job_removed(job, name, if kind == "stop" { "done" } else { "failed" }));
    }
    messages.extend(collect(state, name));
    messages
}

/// Unloads a unit that has ended and that nobody refers to.
fn collect(state: &mut State, name: &str) -> Vec<Message> {
    match state.units.get_mut(name) {
        Some(unit) if unit.is_ended() && unit.references == 0 && !unit.removed => {
            unit.removed = true;
            vec![signal(MANAGER_PATH, MANAGER_INTERFACE, "UnitRemoved", &(name, object(&path_of(name))))]
        }
        _ => vec![],
    }
}

fn unit_by_pidfd(state: &State, call: &Message) -> Message {
    let body = call.body();
    let Ok(fd) = body.deserialize::<zbus::zvariant::OwnedFd>() else {
        return error(call, "org.freedesktop.DBus.Error.InvalidArgs", "no descriptor");
    };
    match pid_of(&fd) {
        None => error(call, PROCESS_UNKNOWN, "Failed to get process ID from pidfd"),
        Some(pid) => match unit_of_pid(state, pid) {
            None => error(call, "org.freedesktop.systemd1.NoUnitForPID", "PID does not belong to any loaded unit."),
            Some(unit) => {
                let invocation = state.server.invocation_by_pidfd.clone().unwrap_or(state.server.invocation.clone());
                reply(call, &(object(&path_of(&unit)), unit, invocation))
            }
        },
    }
}

/// The process of a pidfd, unless it has been reaped.
fn pid_of(pidfd: impl AsFd) -> Option<u32> {
    use std::os::fd::AsRawFd;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_fd().as_raw_fd())).ok()?;
    info.lines().find_map(|line| line.strip_prefix("Pid:")).and_then(|pid| pid.trim().parse().ok())
}

/// The server's unit for its main process and whoever descends from it, nothing for anybody else.
fn unit_of_pid(state: &State, pid: u32) -> Option<String> {
    let mut pid = pid;
    while pid > 1 {
        if pid == state.server.main_pid {
            return Some(state.server.unit.clone());
        }
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        pid = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
    }
    None
}

type ListedUnit = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

fn list_units(state: &State, call: &Message) -> Message {
    let Ok((states, patterns)) = call.body().deserialize::<(Vec<String>, Vec<String>)>() else {
        return error(call, "org.freedesktop.DBus.Error.InvalidArgs", "malformed ListUnitsByPatterns");
    };
    let listed: Vec<ListedUnit> = state
        .units
        .values()
        .filter(|unit| !unit.removed && (states.is_empty() || states.contains(&unit.active)))
        .filter(|unit| patterns.is_empty() || patterns.iter().any(|pattern| matches(pattern, &unit.name)))
        .map(|unit| {
            let (id, kind) = unit.job.unwrap_or((0, ""));
            (
                unit.name.clone(),
                "opencode-pty session".to_owned(),
                "loaded".to_owned(),
                unit.active.clone(),
                unit.sub.clone(),
                String::new(),
                object(&path_of(&unit.name)),
                id,
                kind.to_owned(),
                if id == 0 { object("/") } else { object(&job_path(id)) },
            )
        })
        .collect();
    reply(call, &listed)
}

/// A pattern with at most one star.
fn matches(pattern: &str, name: &str) -> bool {
    pattern.split_once('*').map_or(pattern == name, |(begin, end)| {
        name.len() >= begin.len() + end.len() && name.starts_with(begin) && name.ends_with(end)
    })
}

// ---- properties and messages -------------------------------------------------------------------------------

fn properties_of(state: &State, name: &str) -> HashMap<&'static str, Value<'static>> {
    let server = &state.server;
    if name == server.unit {
        return all_properties(&Shown {
            id: name,
            load: "loaded",
            active: &server.active,
            sub: &server.sub,
            result: "success",
            code: 0,
            status: 0,
            invocation: &server.invocation,
            control_group: &server.control_group,
            main_pid: server.main_pid,
            notify_access: &server.notify_access,
            binds_to: &[],
            job: 0,
        });
    }
    let Some(unit) = state.loaded(name) else {
        // What the real one says of a unit it does not have: a lie to whoever reads on.
        return all_properties(&Shown {
            id: name,
            load: "not-found",
            active: "inactive",
            sub: "dead",
            result: "success",
            code: 0,
            status: 0,
            invocation: &[],
            control_group: "",
            main_pid: 0,
            notify_access: "none",
            binds_to: &[],
            job: 0,
        });
    };
    let alive = matches!(unit.active.as_str(), "active" | "deactivating");
    all_properties(&Shown {
        id: &unit.name,
        load: "loaded",
        active: &unit.active,
        sub: &unit.sub,
        result: &unit.result,
        code: unit.code,
        status: unit.status,
        invocation: &unit.invocation,
        control_group: if alive { &unit.control_group } else { "" },
        main_pid: if alive { u32::MAX >> 10 } else { 0 },
        notify_access: "none",
        binds_to: &unit.binds_to,
        job: unit.job.map_or(0, |(id, _)| id),
    })
}

/// The properties of a unit that anybody asks for.
struct Shown<'a> {
    id: &'a str,
    load: &'a str,
    active: &'a str,
    sub: &'a str,
    result: &'a str,
    code: i32,
    status: i32,
    invocation: &'a [u8],
    control_group: &'a str,
    main_pid: u32,
    notify_access: &'a str,
    binds_to: &'a [String],
    job: u32,
}

fn all_properties(shown: &Shown<'_>) -> HashMap<&'static str, Value<'static>> {
    let text = |text: &str| Value::from(text.to_owned());
    let job = (shown.job, if shown.job == 0 { object("/") } else { object(&job_path(shown.job)) });
    HashMap::from([
        ("Id", text(shown.id)),
        ("Names", Value::from(vec![shown.id.to_owned()])),
        ("LoadState", text(shown.load)),
        ("ActiveState", text(shown.active)),
        ("SubState", text(shown.sub)),
        ("InvocationID", Value::from(shown.invocation.to_vec())),
        ("BindsTo", Value::from(shown.binds_to.to_vec())),
        ("Job", Value::from(job)),
        ("Result", text(shown.result)),
        ("ExecMainCode", Value::from(shown.code)),
        ("ExecMainStatus", Value::from(shown.status)),
        ("ControlGroup", text(shown.control_group)),
        ("MainPID", Value::from(shown.main_pid)),
        ("NotifyAccess", text(shown.notify_access)),
    ])
}

fn unit_changed(unit: &Unit) -> Vec<Message> {
    let path = path_of(&unit.name);
    let service = HashMap::from([
        ("Result", Value::from(unit.result.clone())),
        ("ExecMainCode", Value::from(unit.code)),
        ("ExecMainStatus", Value::from(unit.status)),
    ]);
    let state = HashMap::from([
        ("ActiveState", Value::from(unit.active.clone())),
        ("SubState", Value::from(unit.sub.clone())),
        ("InvocationID", Value::from(unit.invocation.clone())),
    ]);
    vec![properties_changed(&path, SERVICE_INTERFACE, &service), properties_changed(&path, UNIT_INTERFACE, &state)]
}

fn properties_changed(path: &str, interface: &str, changed: &HashMap<&str, Value<'_>>) -> Message {
    let invalidated: &[&str] = &[];
    signal(path, PROPERTIES_INTERFACE, "PropertiesChanged", &(interface, changed, invalidated))
}

fn job_removed(job: u32, unit: &str, word: &str) -> Message {
    signal(MANAGER_PATH, MANAGER_INTERFACE, "JobRemoved", &(job, object(&job_path(job)), unit, word))
}

fn job_path(job: u32) -> String {
    format!("/org/freedesktop/systemd1/job/{job}")
}

fn object(path: &str) -> OwnedObjectPath {
    OwnedObjectPath::try_from(path).expect("the fake makes well-formed paths")
}

fn no_such_unit(call: &Message) -> Message {
    error(call, NO_SUCH_UNIT, "Unit not loaded.")
}

fn reply(call: &Message, body: &(impl serde::Serialize + DynamicType)) -> Message {
    Message::method_return(&call.header()).and_then(|reply| reply.build(body)).expect("an answer can be built")
}

fn error(call: &Message, name: &str, text: &str) -> Message {
    Message::error(&call.header(), name).and_then(|error| error.build(&(text,))).expect("an error can be built")
}

fn signal(path: &str, interface: &str, member: &str, body: &(impl serde::Serialize + DynamicType)) -> Message {
    Message::signal(path, interface, member).and_then(|signal| signal.build(body)).expect("a signal can be built")
}

/// The object path of a unit, escaped as systemd does: all but letters and digits, and a digit in front.
fn path_of(name: &str) -> String {
    let mut path = UNIT_PATH_PREFIX.to_owned();
    for (index, byte) in name.bytes().enumerate() {
        if byte.is_ascii_alphabetic() || (byte.is_ascii_digit() && index > 0) {
            path.push(char::from(byte));
        } else {
            path.push_str(&format!("_{byte:02x}"));
        }
    }
    path
}

/// The reverse of [`path_of`].
fn name_of(path: &str) -> Option<String> {
    let mut rest = path.strip_prefix(UNIT_PATH_PREFIX)?.bytes();
    let mut name = Vec::new();
    while let Some(byte) = rest.next() {
        if byte == b'_' {
            let digits = [rest.next()?, rest.next()?];
            name.push(u8::from_str_radix(str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            name.push(byte);
        }
    }
    String::from_utf8(name).ok()
}

// ---- the bus -----------------------------------------------------------------------------------------------

/// A message bus of the test's own.
#[derive(Debug)]
pub struct Bus {
    process: Child,
    dir: PathBuf,
}

impl Bus {
    /// Starts one with its socket in `dir`.
    pub fn start(dir: &Path) -> io::Result<Self> {
        let config = format!(
            "<!DOCTYPE busconfig PUBLIC \"-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN\"\n \
             \"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd\">\n\
             <busconfig><listen>unix:path={}</listen><auth>EXTERNAL</auth>\n\
             <policy context=\"default\"><allow user=\"*\"/><allow own=\"*\"/><allow send_destination=\"*\"/>\n\
             <allow receive_sender=\"*\"/></policy></busconfig>\n",
            dir.join("bus.sock").display()
        );
        std::fs::write(dir.join("bus.conf"), config)?;
        Ok(Self { process: Self::run(dir)?, dir: dir.to_owned() })
    }

    fn run(dir: &Path) -> io::Result<Child> {
        let mut process = Command::new("dbus-daemon")
            .arg(format!("--config-file={}", dir.join("bus.conf").display()))
            .args(["--nofork", "--nopidfile", "--print-address=1"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        // It prints its address once it listens.
        let mut line = Vec::new();
        let mut byte = [0];
        let stdout = process.stdout.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        while !line.ends_with(b"\n") {
            stdout.read_exact(&mut byte)?;
            line.extend(byte);
        }
        Ok(process)
    }

    /// Its address.
    pub fn address(&self) -> String {
        format!("unix:path={}", self.dir.join("bus.sock").display())
    }

    /// Ends it; [`Bus::resume`] starts another in its place.
    pub fn stop(&mut self) -> io::Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        match std::fs::remove_file(self.dir.join("bus.sock")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Starts another bus at the same address.
    pub fn resume(&mut self) -> io::Result<()> {
        self.process = Self::run(&self.dir)?;
        Ok(())
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        // Nothing can be done about a bus that is gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
