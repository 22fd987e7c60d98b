//! One unit's life at the manager: starting → running → stopping → gone.
//!
//! [`Session::start`] gives a session whose command runs, or says why there is none; after either, the caller calls
//! [`Session::clean_up`], which alone decides that nothing is left. The unit's name is the only handle that
//! survives everything, so it is fixed before the manager hears of it.

use std::cell::RefCell;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use smol::future::{FutureExt, poll_once, zip};
use smol::{Async, Timer};

use super::Context;
use crate::frame::message::{ErrorCode, Exit, Start, decode_error};
use crate::frame::{self, Header, Kind};
use crate::limits::{
    CGROUP_POLL_PAUSE, CGROUP_ROOT, FRAME_HEADER_BYTES, LAUNCHER_ANSWER_TIME, START_JOB_TIME, STOP_TIME,
    STOP_TIME_WITHOUT_BUS, TERM_TO_KILL_TIME,
};
use crate::sys::{message, random, socket};
use crate::systemd::unit::{Description, UnitName};
use crate::systemd::{CallError, Manager, UnitEvents, UnitState, UnitWatch};
use crate::wait::{Watched, until, within};

/// A pause before the manager is asked again after it gave no answer. Chosen.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// A pause before a unit that is being stopped is looked at again without a signal. Chosen.
const SECOND_LOOK: Duration = Duration::from_secs(1);

/// A unit that has been asked for, and what is known of it.
#[derive(Debug)]
pub struct Session {
    name: UnitName,
    watch: UnitWatch,
    terminal: Rc<Async<UnixStream>>,
    /// Whether the manager may have, or get, a unit of this name.
    may_exist: bool,
    /// The start call got no answer: the manager may carry it out later.
    doubtful: bool,
    /// What the unit read when it ran; empty before.
    running: UnitState,
    /// What the manager's signals had said when that was asked for.
    running_since: Seen,
    /// Its end, once that has been read, and what the signals had said by then.
    end: RefCell<Option<Box<(Seen, UnitState)>>>,
    /// The terminal has ended; the manager should soon say why.
    hung_up: Watched<bool>,
    isolation: String,
}

/// Why a session did not start.
#[derive(Debug)]
pub struct StartError {
    /// The word for the client.
    pub code: ErrorCode,
    /// The sentence for the client.
    pub message: String,
    /// What the journal is told besides.
    pub detail: String,
}

impl StartError {
    fn failed(message: &str, detail: impl fmt::Display) -> Self {
        Self { code: ErrorCode::StartFailed, message: message.to_owned(), detail: detail.to_string() }
    }
}

/// How a running session ended, as far as the manager can say.
#[derive(Clone, Debug)]
pub enum End {
    /// Its unit stopped.
    Stopped(Box<UnitState>),
    /// Somebody else restarted it, or it is gone without a record.
    Lost,
}

impl End {
    /// The record for the client: believed only of the very unit that ran.
    pub fn record(&self, running: &UnitState) -> Exit {
        let Self::Stopped(state) = self else { return Exit::lost() };
        let ours = state.load == "loaded" && !running.invocation.is_empty() && state.invocation == running.invocation;
        let code = u8::try_from(state.code).ok().filter(|code| *code != 0);
        let status = u32::try_from(state.status).ok();
        match (ours, code, status) {
            (true, Some(code), Some(status)) => Exit::new(code, status, &state.result).unwrap_or_else(|_| Exit::lost()),
            _ => Exit::lost(),
        }
    }
}

/// A unit that is still there, or may be, after all we could do.
#[derive(Debug)]
pub struct StopError(String);

impl fmt::Display for StopError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a clean-up found and did.
#[derive(Debug, Default)]
pub struct CleanUp {
    /// The unit's last state, if the manager still knew it.
    pub last: Option<UnitState>,
    /// How long it took.
    pub took: Duration,
    /// SIGKILL had to be asked for by us, after the manager's own.
    pub killed: bool,
}

impl Session {
    /// Chooses a name and registers for its signals. Nothing is started yet.
    pub async fn new(context: &Context) -> Result<(Self, OwnedFd), StartError> {
        let bits = random::bits_128().map_err(|error| StartError::failed("no unit name", error))?;
        let name = UnitName::from_random(bits);
        let (terminal, theirs) = socket::pair().map_err(|error| StartError::failed("no socketpair", error))?;
        let terminal = Async::new(terminal).map_err(|error| StartError::failed("no socketpair", error))?;
        let terminal = Rc::new(terminal);
        let watch = context
            .manager
            .watch(name.as_str())
            .await
            .map_err(|error| StartError::failed("the service manager does not answer", error))?;
        let running_since = watch.events().with(Seen::of);
        let session = Self {
            name,
            watch,
            terminal,
            may_exist: false,
            doubtful: false,
            running: UnitState::default(),
            running_since,
            end: RefCell::default(),
            hung_up: Watched::new(false),
            isolation: String::new(),
        };
        Ok((session, theirs))
    }

    /// Ends the registration of a session that the manager has not heard of.
    pub async fn abandon(self) {
        self.watch.forget().await;
    }

    /// The unit's name.
    pub fn name(&self) -> &UnitName {
        &self.name
    }

    /// Our end of the terminal.
    pub fn terminal(&self) -> &Async<UnixStream> {
        &self.terminal
    }

    /// The same, for who needs it longer than the session.
    pub fn terminal_handle(&self) -> Rc<Async<UnixStream>> {
        Rc::clone(&self.terminal)
    }

    /// The unit as it was when it began to run.
    pub fn running(&self) -> &UnitState {
        &self.running
    }

    /// The isolation the launcher reports.
    pub fn isolation(&self) -> &str {
        &self.isolation
    }

    /// Starts the unit and hands it its request; returns when the launcher has said that everything is in force.
    ///
    /// `cancelled` is watched between the steps, not in the middle of the manager's answer: whether it has the unit
    /// must be known.
    pub async fn start(
        &mut self,
        context: &Context,
        start: &Start,
        theirs: OwnedFd,
        directory: OwnedFd,
        cancelled: impl Future<Output = ()>,
    ) -> Result<(), StartError> {
        let mut cancelled = std::pin::pin!(cancelled);
        let job = if poll_once(cancelled.as_mut()).await.is_some() {
            Err(StartError::failed("cancelled", "before it was asked for"))
        } else {
            self.ask_for_unit(context, start, &theirs, &directory).await
        };
        // From here on the unit alone has them: its end of the pair must be closed when it is gone.
        drop(theirs);
        context.pool.dispose(vec![directory]);
        let job = job?;

        let rest = async {
            self.wait_for_job(context, &job).await?;
            // No command exists before this frame; a start that fails, is cancelled or comes late has none.
            let payload = start.encode();
            let frame = frame::encode(Kind::Start, &payload).map_err(|error| StartError::failed("no frame", error))?;
            let terminal = &self.terminal;
            let handed_over = async {
                let answer = within(LAUNCHER_ANSWER_TIME, hand_over(terminal, &frame)).await;
                answer.unwrap_or_else(|| Err(StartError::failed("the launcher does not answer", "in time")))
            };
            let since = self.watch.events().with(Seen::of);
            let read = context.manager.read(self.name.as_str());
            let (isolation, running) = zip(handed_over, read).await;
            Ok((isolation?, running, since))
        };
        let cancelled = async {
            cancelled.await;
            Err(StartError::failed("cancelled", "before it was running"))
        };
        let (isolation, running, since) = cancelled.or(rest).await?;
        self.running_since = since;
        // It ran, so it can be read, unless it has ended and been collected already or the bus is away. Without
        // an invocation no record will be believed.
        self.running = match running {
            Ok(state) => state,
            Err(CallError::NoAnswer { .. }) => context
                .manager
                .read(self.name.as_str())
                .await
                .map_err(|error| StartError::failed("the service manager does not answer", error))?,
            Err(error) => return Err(StartError::failed("the unit vanished", error)),
        };
        self.isolation = isolation;
        Ok(())
    }

    async fn ask_for_unit(
        &mut self,
        context: &Context,
        start: &Start,
        theirs: &OwnedFd,
        directory: &OwnedFd,
    ) -> Result<String, StartError> {
        let description = Description {
            launcher: &context.options.launcher,
            slice: &context.options.slice,
            supervisor_unit: &context.options.unit,
            server_unit: &context.options.server_unit,
            user: context.account.name(),
            uid: context.account.uid(),
            gid: context.account.gid(),
            runtime_seconds: start.runtime_seconds(),
            varlink_sockets: &context.varlink_sockets,
            terminal: theirs.as_fd(),
            directory: directory.as_fd(),
        };
        self.may_exist = true;
        let asked = context.manager.start(&self.name, &description).await;
        if let Err(CallError::Refused { .. } | CallError::NoSuchUnit | CallError::UnknownMethod) = asked {
            // A clear no. If a unit of this name exists, it is somebody else's.
            self.may_exist = false;
        }
        self.doubtful = matches!(asked, Err(CallError::NoAnswer { .. }));
        asked.map_err(|error| StartError::failed("the service manager did not start the unit", error))
    }

    async fn wait_for_job(&self, context: &Context, job: &str) -> Result<(), StartError> {
        let finished =
            |events: &UnitEvents| events.jobs.iter().find(|(path, _)| path == job).map(|(_, result)| result.clone());
        // After a new connection, signals are lost; and a removal is said of every unit at each reload of the manager.
        let doubt = |events: &UnitEvents| (events.generation, events.removals);
        let first = self.watch.events().with(doubt);
        let result = async {
            let mut known = first;
            loop {
                let seen = self.watch.events().wait_for(|events| {
                    let now = doubt(events);
                    finished(events).map(Ok).or_else(|| (now != known).then_some(Err(now)))
                });
                match seen.await {
                    Ok(result) => return result,
                    // Look.
                    Err(now) => known = now,
                }
                match context.manager.read(self.name.as_str()).await {
                    Ok(state) if state.job != 0 => {}
                    Ok(state) if state.active == "active" => return "done".to_owned(),
                    Ok(state) => return state.active,
                    Err(CallError::NoAnswer { .. }) => {}
                    Err(error) => return error.to_string(),
                }
            }
        };
        // The manager itself ends the job after START_JOB_TIME; the margin is for its word to arrive.
        let limit = START_JOB_TIME + RETRY_PAUSE;
        match within(limit, result).await.as_deref() {
            Some("done") => Ok(()),
            Some(result) => Err(StartError::failed("the unit did not start", format!("its start job: {result}"))),
            None => Err(StartError::failed("the unit did not start", "its start job did not end in time")),
        }
    }

    /// Whether the manager has said that the unit stopped, as far as its signals go.
    pub fn seems_ended(&self) -> bool {
        self.watch.events().with(UnitEvents::has_ended)
    }

    /// Notes that nobody holds the terminal's other end any more.
    pub fn note_hang_up(&self) {
        self.hung_up.set(true);
    }

    /// Waits for a signal, or for the terminal's end and then a while in vain: once, since a signal may be lost.
    async fn something(&self, signal: impl Future<Output = ()>) {
        let in_vain = async {
            self.hung_up.wait_for(|hung_up| hung_up.then_some(())).await;
            Timer::after(SECOND_LOOK).await;
            self.hung_up.set(false);
        };
        signal.or(in_vain).await;
    }

    /// Waits until the unit has stopped, was restarted by somebody, or is gone.
    pub async fn ended(&self, context: &Context) -> End {
        let name = self.name.as_str();
        let events = self.watch.events();
        let mut referenced = self.running_since.generation;
        let mut unreadable = None;
        // The end may have come before this call, so a look comes first, unless the latest one is no older than the signals.
        let fresh = self.running_since;
        if !self.running.has_ended() {
            self.something(events.wait_for(|events| (Seen::of(events) != fresh).then_some(()))).await;
        }
        loop {
            let seen = events.with(Seen::of);
            if seen.generation != referenced {
                // A reference ends with the bus connection it was taken on.
                let _ = context.manager.reference(name).await;
                referenced = seen.generation;
            }
            match context.manager.read(name).await {
                Ok(state) if state.load != "loaded" => return End::Lost,
                Ok(state) if state.invocation != self.running.invocation => return End::Lost,
                // A job for a unit that has stopped will start it again: somebody's restart. The manager sends no HUP
                // for one, so script(1) died of TERM, which it tells as an exit with 0: nothing to pass on.
                Ok(state) if state.has_ended() && state.job != 0 => return End::Lost,
                Ok(state) if state.has_ended() => {
                    self.end.replace(Some(Box::new((seen, state.clone()))));
                    return End::Stopped(Box::new(state));
                }
                Ok(_) => {}
                Err(CallError::NoSuchUnit) => return End::Lost,
                Err(_) => {
                    // The manager may come back and tell. If it has said that this is the end, there is one, told
                    // or not.
                    let since = *unreadable.get_or_insert_with(Instant::now);
                    let limit = if context.manager.is_online() { STOP_TIME } else { STOP_TIME_WITHOUT_BUS };
                    if since.elapsed() >= limit && self.seems_ended() {
                        return End::Lost;
                    }
                    Timer::after(RETRY_PAUSE).await;
                    continue;
                }
            }
            unreadable = None;
            let signal = events.wait_for(|events| {
                let stopping = events.active.as_deref() == Some("deactivating");
                let now = Seen::of(events);
                (now != seen && (!stopping || now.removals != seen.removals || now.generation != referenced))
                    .then_some(())
            });
            self.something(signal).await;
        }
    }

    /// Makes sure that nothing is left: no process, no unit, no job, no cgroup. Bounded by `STOP_TIME`, longer only
    /// while the bus is away. Does what it takes from wherever the unit is.
    pub async fn clean_up(self, context: &Rc<Context>) -> Result<CleanUp, StopError> {
        let begun = Instant::now();
        let mut report = CleanUp::default();
        let result = self.clean_up_into(context, begun, &mut report).await;
        report.took = begun.elapsed();
        if self.doubtful && report.last.is_none() {
            let doomed = super::await_doomed(Rc::clone(context), self.name, self.watch);
            context.executor.spawn(doomed).detach();
        } else {
            self.watch.forget().await;
        }
        result.map(|()| report)
    }

    async fn clean_up_into(&self, context: &Context, begun: Instant, report: &mut CleanUp) -> Result<(), StopError> {
        if !self.may_exist {
            return Ok(());
        }
        let stopped = self.stop(context, &mut report.last);
        if bounded(context, begun, stopped).await.is_none() {
            // The last word: the manager may be slow to stop, but it can still kill.
            report.killed = true;
            let _ = context.manager.kill(self.name.as_str()).await;
            let again = self.stop(context, &mut report.last);
            if within(TERM_TO_KILL_TIME, again).await.is_none() {
                return Err(StopError(format!("{} did not stop in time", self.name)));
            }
        }
        let group = report.last.as_ref().map_or("", |state| state.control_group.as_str());
        let group = if group.is_empty() { &self.running.control_group } else { group };
        if !group.is_empty() {
            let path = PathBuf::from(format!("{CGROUP_ROOT}{group}"));
            let gone = async {
                while path.exists() {
                    // The kernel tells when a cgroup is empty, not when it is removed; this is the rare case.
                    Timer::after(CGROUP_POLL_PAUSE).await;
                }
            };
            if bounded(context, begun, gone).await.is_none() {
                return Err(StopError(format!("the control group of {} is still there", self.name)));
            }
        }
        Ok(())
    }

    /// Stops the unit if it isn't stopped, lets it go, and waits until the manager has forgotten it.
    async fn stop(&self, context: &Context, last: &mut Option<UnitState>) {
        let name = self.name.as_str();
        let events = self.watch.events();
        let mut known_end = self.end.take();
        let mut ask = known_end.is_none() && !self.seems_ended();
        let mut our_job = 0;
        let mut restarts = 0;
        loop {
            let seen = events.with(Seen::of);
            let known = known_end.take().filter(|end| end.0 == seen && end.1.is_at_rest());
            let asked = if ask { context.manager.stop(name).await } else { Ok(our_job) };
            let state = match (asked, known) {
                (Ok(_), Some(end)) => Ok(end.1),
                (Ok(job), None) => {
                    our_job = job;
                    context.manager.read(name).await
                }
                (Err(error), _) => Err(error),
            };
            match state {
                // This counts as gone: the start call has been answered, or was sent before this one on the same
                // connection, and the manager takes its calls in order.
                Err(CallError::NoSuchUnit) => return,
                Ok(state) if state.load != "loaded" => return,
                Ok(state) if state.is_at_rest() => {
                    last.get_or_insert(state);
                    ask = false;
                    // The references are counted: the start's, and one more for each manager that has come since. When
                    // there is none of ours left, the unit goes by itself, before the manager takes another call.
                    let (released, there) = zip(context.manager.release(name), context.manager.find(name)).await;
                    match (released, there) {
                        (_, Err(CallError::NoSuchUnit)) => return,
                        (Ok(()), _) => continue,
                        (Err(_), _) => {}
                    }
                }
                Ok(state) => {
                    // Started again by somebody's restart, or about to be: not while we can help it. A stop of ours
                    // that is still on its way shows as a job, of a unit that has stopped, too. To ask again would make
                    // another, and a busy manager would have one every time we look.
                    ask = state.active != "deactivating" && (state.job == 0 || state.job != our_job);
                    restarts += u32::from(ask);
                    if restarts == 1 {
                        continue;
                    }
                }
                Err(_) => {
                    // Asking twice does no harm; not having asked would.
                    ask = true;
                    Timer::after(RETRY_PAUSE).await;
                    continue;
                }
            }
            // That it was removed is a hint to look again, too: at a reload, the manager says so of every unit.
            let changed = events.wait_for(|events| (Seen::of(events) != seen).then_some(()));
            // Signals tell; the second look is for one that was lost with a bus connection.
            within(SECOND_LOOK, changed).await;
        }
    }
}

/// How far a unit's events had got at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    changes: u64,
    removals: u64,
    generation: u64,
}

impl Seen {
    fn of(events: &UnitEvents) -> Self {
        Self { changes: events.changes, removals: events.removals, generation: events.generation }
    }
}

/// `work`, given up after `STOP_TIME` from `begun`; if the bus is away by then, `STOP_TIME` after it is back or
/// `STOP_TIME_WITHOUT_BUS` are over.
async fn bounded<T>(context: &Context, begun: Instant, work: impl Future<Output = T>) -> Option<T> {
    let limit = async {
        Timer::at(begun + STOP_TIME).await;
        if !context.manager.is_online() {
            until(begun + STOP_TIME_WITHOUT_BUS, context.manager.online()).await;
            Timer::after(STOP_TIME).await;
        }
        None
    };
    async { Some(work.await) }.or(limit).await
}

/// Puts the start frame into the pair and reads the launcher's answer, not a byte more: what follows is the
/// terminal's.
async fn hand_over(terminal: &Async<UnixStream>, frame: &[u8]) -> Result<String, StartError> {
    let lost = |error: std::io::Error| StartError::failed("the launcher did not answer", error);
    let mut rest = frame;
    while !rest.is_empty() {
        match message::send_bytes(terminal.get_ref(), rest) {
            Ok(count) => rest = rest.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                terminal.writable().await.map_err(lost)?;
            }
            Err(error) => return Err(lost(error)),
        }
    }
    let mut header = [0; FRAME_HEADER_BYTES];
    read_exactly(terminal, &mut header).await.map_err(lost)?;
    let header =
        Header::decode(&header).map_err(|error| StartError::failed("the launcher's answer is no frame", error))?;
    let mut payload = vec![0; header.payload_len()];
    read_exactly(terminal, &mut payload).await.map_err(lost)?;
    match header.kind() {
        Kind::Started => {
            String::from_utf8(payload).map_err(|error| StartError::failed("the launcher's answer is not text", error))
        }
        Kind::Error => Err(match decode_error(&payload) {
            Ok((code, message)) => StartError { code, message, detail: "said by the launcher".to_owned() },
            Err(error) => StartError::failed("the launcher refused", error),
        }),
        kind => Err(StartError::failed("the launcher's answer is none", format!("frame type {}", kind as u8))),
    }
}

async fn read_exactly(terminal: &Async<UnixStream>, mut buffer: &mut [u8]) -> std::io::Result<()> {
    while !buffer.is_empty() {
        match message::receive_bytes(terminal.get_ref(), buffer) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => buffer = buffer.get_mut(count..).unwrap_or_default(),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => terminal.readable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Stops what an earlier supervisor left behind under this name; `Err` if it is still there in time.
pub async fn stop_leftover(manager: &Manager, name: &UnitName) -> Result<(), StopError> {
    let deadline = Instant::now() + STOP_TIME;
    let failed = |what: &str| StopError(format!("{name}, left by an earlier supervisor, {what}"));
    let watch = manager.watch(name.as_str()).await.map_err(|error| failed(&error.to_string()))?;
    let stopped = async {
        let mut our_job = 0;
        loop {
            let seen = watch.events().with(|events| (events.changes, events.removals, events.jobs.len()));
            match manager.read(name.as_str()).await {
                Err(CallError::NoSuchUnit) => return,
                Ok(state) if state.load != "loaded" => return,
                // A start of ours that was given up has our reference, if it is carried out after all.
                Ok(state) if state.is_at_rest() => {
                    let _ = manager.release(name.as_str()).await;
                }
                Ok(state) if state.job == 0 || state.job != our_job => {
                    our_job = manager.stop(name.as_str()).await.unwrap_or_default();
                }
                Ok(_) | Err(_) => {}
            }
            let changed = watch
                .events()
                .wait_for(|events| ((events.changes, events.removals, events.jobs.len()) != seen).then_some(()));
            within(RETRY_PAUSE, changed).await;
        }
    };
    let done = until(deadline, stopped).await;
    watch.forget().await;
    if done.is_some() {
        return Ok(());
    }
    let _ = manager.kill(name.as_str()).await;
    Err(failed("does not stop"))
}
