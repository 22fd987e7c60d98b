//! The root service: account, bus, orphans, listen, accept, shut down.
//!
//! One thread and one executor: a task for the bus, one for the server's main process, one for hang-ups, one for
//! each connection. Nothing here waits for a single session. The supervisor never forks; PID 1 starts everything.

mod admission;
mod buffers;
mod connection;
/// Reachable, as `inbound` and `relay` are, for the fuzz target, the tests and the measurements that drive them alone.
pub mod foreign;
mod hangups;
pub mod inbound;
mod notify;
mod orphans;
mod peer;
pub mod relay;
mod server;
mod session;

use std::cell::RefCell;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use argh::FromArgs;
use async_signal::{Signal, Signals};
use smol::future::FutureExt;
use smol::stream::StreamExt;
use smol::{Async, LocalExecutor, Timer};

use crate::account::{self, Account};
use crate::frame::message::{ErrorCode, encode_error};
use crate::frame::{self, Kind};
use crate::journal::{self, Event, Field};
use crate::limits::{
    ACCEPT_PAUSE, ACCEPTED_IN_A_ROW_MAX, ACCOUNT_DEFAULT, LAUNCHER_PATH, REFUSAL_LOG_INTERVAL, SERVER_UNIT_DEFAULT,
    SESSIONS_MAX_CEILING, SESSIONS_MAX_DEFAULT, SLICE_DEFAULT, SOCKET_PATH, STATUS_PAUSE, STOP_TIME,
    STOP_TIME_WITHOUT_BUS, STUCK_RETRY_PAUSE, SUPERVISOR_UNIT_DEFAULT,
};
use crate::options;
use crate::report::{Chain, Doing, ExitStatus, SystemError, print_error};
use crate::sys::peer::Credentials;
use crate::sys::{message, peer as peer_socket, socket};
use crate::systemd::unit::UnitName;
use crate::systemd::{BusOptions, CallError, LinkError, Manager, SYSTEM_BUS, UnitWatch};
use crate::wait::{Watched, within};
use admission::{Admission, RefusalLog, Refused, Slot};
use foreign::Pool;
use hangups::Hangups;
use notify::Notifier;
use server::Server;

/// The root service: authenticates the server, then starts, relays and stops its sessions, each a transient systemd
/// service. Runs from opencode-pty-supervisor.service; clients set none of this. Exit codes: 0 after SIGTERM or SIGINT
/// with every session stopped; 1 it could not start, or could not confirm that a session is gone; 64 bad arguments.
#[derive(Clone, Debug, FromArgs)]
pub struct Options {
    /// account that sessions and the server run as (default byk)
    #[argh(option, default = "ACCOUNT_DEFAULT.to_owned()", arg_name = "name")]
    account: String,
    /// unit whose main process may ask for sessions (default opencode-v2.service)
    #[argh(option, default = "SERVER_UNIT_DEFAULT.to_owned()", arg_name = "unit")]
    server_unit: String,
    /// control group of that unit (default /system.slice/ and the unit)
    #[argh(option, arg_name = "path")]
    server_cgroup: Option<String>,
    /// socket to listen on (default /run/opencode-pty/supervisor.sock)
    #[argh(option, default = "SOCKET_PATH.to_owned()", arg_name = "path")]
    socket: String,
    /// launcher that every session's unit runs (default /usr/local/libexec/opencode-pty-launcher)
    #[argh(option, default = "LAUNCHER_PATH.to_owned()", arg_name = "path")]
    launcher: String,
    /// slice of the sessions (default opencode-pty.slice)
    #[argh(option, default = "SLICE_DEFAULT.to_owned()", arg_name = "unit")]
    slice: String,
    /// sessions at a time, 1 to 4096 (default 16); one more is refused
    #[argh(option, default = "SESSIONS_MAX_DEFAULT", arg_name = "n")]
    max_sessions: usize,
    /// the supervisor's own unit, to which sessions are bound (default opencode-pty-supervisor.service)
    #[argh(option, default = "SUPERVISOR_UNIT_DEFAULT.to_owned()", arg_name = "unit")]
    unit: String,
    /// for tests: D-Bus address (default the system bus)
    #[argh(option, default = "SYSTEM_BUS.to_owned()", arg_name = "address")]
    bus: String,
    /// for tests: pid that must own the service manager's name (default 1)
    #[argh(option, default = "1", arg_name = "pid")]
    manager_pid: u32,
}

impl Options {
    /// The server unit's control group.
    fn server_cgroup(&self) -> String {
        self.server_cgroup.clone().unwrap_or_else(|| format!("/system.slice/{}", self.server_unit))
    }
}

/// What every connection needs.
#[derive(Debug)]
struct Context {
    options: Options,
    account: Account,
    manager: Manager,
    server: Server,
    admission: Admission,
    pool: Pool,
    hangups: Hangups,
    executor: Rc<LocalExecutor<'static>>,
    notifier: Notifier,
    /// PID 1's varlink sockets as they existed when we started.
    varlink_sockets: Vec<String>,
    shutdown: Watched<bool>,
    /// Connections that may still be told something.
    conversations: Watched<usize>,
    /// A clean-up that could not be confirmed: the supervisor goes down with it.
    failed: Watched<Option<String>>,
    refusals: RefCell<RefusalLog>,
}

impl Context {
    /// One record a second at most, with a count of those in between. `told` is the code the peer gets, if it is
    /// answered.
    fn log_refusal(&self, cred: Credentials, told: Option<ErrorCode>, reason: &str) {
        let Some(count) = self.refusals.borrow_mut().note(Instant::now(), REFUSAL_LOG_INTERVAL) else { return };
        let others = if count > 1 { format!(" ({} more since the last line)", count - 1) } else { String::new() };
        let code = told.map(|code| format!("{code}: ")).unwrap_or_default();
        let error = told.map(ErrorCode::word).unwrap_or_default();
        journal::record(
            Event::Refused,
            &[
                (Field::PeerPid, &cred.pid),
                (Field::PeerUid, &cred.uid),
                (Field::Error, &error),
                (Field::Reason, &reason),
                (Field::Refusals, &count),
            ],
            &format!("refused pid {} uid {}: {code}{reason}{others}", cred.pid, cred.uid),
        );
    }
}

/// Why the supervisor can't serve.
#[derive(Debug)]
enum Error {
    NotRoot,
    Sessions(usize),
    Account(account::Error),
    Bus(LinkError),
    Orphans(CallError),
    SocketTaken { path: String, by: &'static str },
    System(SystemError),
    CleanUp(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRoot => f.write_str("must run as root (from its unit)"),
            Self::Sessions(count) => write!(f, "--max-sessions {count} is not within 1 and {SESSIONS_MAX_CEILING}"),
            Self::Account(_) => f.write_str("cannot use the account"),
            Self::Bus(_) => f.write_str("cannot reach the service manager"),
            Self::Orphans(_) => f.write_str("cannot look for sessions of an earlier supervisor"),
            Self::SocketTaken { path, by } => write!(f, "cannot listen on {path}: {by} is there"),
            Self::System(error) => write!(f, "{error}"),
            Self::CleanUp(what) => write!(f, "cannot confirm that a session is gone: {what}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Account(source) => Some(source),
            Self::Bus(source) => Some(source),
            Self::Orphans(source) => Some(source),
            Self::System(error) => error.source(),
            Self::NotRoot | Self::Sessions(_) | Self::SocketTaken { .. } | Self::CleanUp(_) => None,
        }
    }
}

impl From<SystemError> for Error {
    fn from(error: SystemError) -> Self {
        Self::System(error)
    }
}

/// Runs the role.
pub async fn main(args: &[OsString]) -> ExitStatus {
    let options = match options::parse("opencode-pty-supervisor", "supervisor", args) {
        Ok(options) => options,
        Err(status) => return status,
    };
    match serve(options).await {
        Ok(()) => ExitStatus::Success,
        Err(error) => {
            let message = Chain(&error).to_string();
            if journal::record_natively(Event::Failed, &[], &message).is_err() {
                print_error("supervisor", &error);
            }
            ExitStatus::Failure
        }
    }
}

async fn serve(options: Options) -> Result<(), Error> {
    if !socket::is_root() {
        return Err(Error::NotRoot);
    }
    if !(1..=SESSIONS_MAX_CEILING).contains(&options.max_sessions) {
        return Err(Error::Sessions(options.max_sessions));
    }
    socket::restrict_umask();
    let terminated = Signals::new([Signal::Term, Signal::Int]).doing("catch SIGTERM and SIGINT")?;
    let account = Account::by_name(&options.account).map_err(Error::Account)?;
    let bus = BusOptions { address: options.bus.clone(), manager_pid: options.manager_pid };
    let (manager, keep_link) = Box::pin(Manager::connect(bus)).await.map_err(Error::Bus)?;
    let executor = Rc::new(LocalExecutor::new());
    let context = Rc::new(Context {
        account,
        manager,
        server: Server::default(),
        admission: Admission::new(options.max_sessions, Instant::now()),
        pool: Pool::new(),
        hangups: Hangups::new().doing("make an epoll instance")?,
        executor: Rc::clone(&executor),
        notifier: Notifier::new(std::env::var_os("NOTIFY_SOCKET").as_deref()).doing("use NOTIFY_SOCKET")?,
        varlink_sockets: varlink_sockets(),
        shutdown: Watched::new(false),
        conversations: Watched::new(0),
        failed: Watched::new(None),
        refusals: RefCell::default(),
        options,
    });

    executor.spawn(keep_link).detach();
    // A task, which is looked at when something of its own has happened. What `run` is given is looked at on every wake-up,
    // whoever it is for: an `accept` each time.
    let serving = executor.spawn(async move { serve_on(&context, terminated).await });
    executor.run(serving).await
}

async fn serve_on(context: &Rc<Context>, mut terminated: Signals) -> Result<(), Error> {
    let executor = &context.executor;
    let stuck = Box::pin(orphans::clean_up(&context.manager, &context.options)).await.map_err(Error::Orphans)?;
    let listener = listen(context)?;
    for name in stuck {
        let slot = context.admission.occupy();
        executor.spawn(retry_stuck(Rc::clone(context), name, slot)).detach();
    }
    let ours = Rc::clone(context);
    executor.spawn(async move { ours.server.keep(&ours.manager, &ours.options.server_unit).await }).detach();
    let ours = Rc::clone(context);
    executor.spawn(async move { ours.hangups.keep().await }).detach();
    executor.spawn(keep_status(Rc::clone(context))).detach();
    executor.spawn(feed_watchdog(Rc::clone(context))).detach();
    journal::record(
        Event::Serving,
        &[(Field::Version, &env!("CARGO_PKG_VERSION"))],
        &format!("serving {} on {}", context.options.server_unit, context.options.socket),
    );
    let ours = Rc::clone(context);
    executor.spawn(async move { ours.notifier.insist("READY=1").await }).detach();

    let end = async {
        terminated.next().await;
        Ok(())
    };
    let failed = async { Err(Error::CleanUp(context.failed.wait_for(Option::clone).await)) };
    let accepting = async { Err(accept(context, &listener).await.into()) };
    let outcome = failed.or(end).or(accepting).await;
    drop(listener);
    shut_down(context).await;
    outcome?;
    context.failed.get().map_or(Ok(()), |what| Err(Error::CleanUp(what)))
}

/// Stops accepting, stops all sessions and waits for them.
async fn shut_down(context: &Context) {
    let _ = std::fs::remove_file(&context.options.socket);
    context.shutdown.set(true);
    let all_gone = async {
        let mut sessions = context.admission.sessions().0;
        while sessions > 0 {
            sessions = context.admission.sessions_changed(sessions).await;
        }
        // A session's last frames are sent after its slot is free.
        context.conversations.wait_for(|count| (*count == 0).then_some(())).await;
    };
    // Each stop is bounded; this is for one that waits for another.
    let limit = if context.manager.is_online() { STOP_TIME * 2 } else { STOP_TIME_WITHOUT_BUS };
    if within(limit, all_gone).await.is_none() {
        context.failed.set(Some("sessions were left at shutdown".to_owned()));
    }
    // Not before: a start that is on its way would find our unit stopping, and `BindsTo=` would start it anew.
    context.notifier.say("STOPPING=1");
}

fn listen(context: &Context) -> Result<Async<UnixListener>, Error> {
    let path = &context.options.socket;
    let taken = |by| Error::SocketTaken { path: path.clone(), by };
    match socket::occupant(Path::new(path)).doing(format!("look at {path}"))? {
        socket::Occupant::Nobody => {}
        socket::Occupant::Stale => socket::remove(Path::new(path)).doing(format!("remove the stale {path}"))?,
        socket::Occupant::Listening => return Err(taken("another supervisor")),
        socket::Occupant::Other => return Err(taken("something that is not a socket")),
    }
    let listener = socket::listen_at(Path::new(path), context.account.gid()).doing(format!("listen on {path}"))?;
    Ok(Async::new(listener).doing(format!("listen on {path}"))?)
}

/// Accepts until that fails for good. Running out of descriptors is a pause, not an end.
async fn accept(context: &Rc<Context>, listener: &Async<UnixListener>) -> SystemError {
    let mut accepted = 0_u32;
    let mut failures = RefusalLog::default();
    loop {
        // Not `Async::accept`: most of a flood is refused and needs no place at the reactor.
        match listener.read_with(UnixListener::accept).await {
            Ok((stream, _)) => {
                admit(context, stream);
                // A flood of connections must not have the thread for itself, nor must letting go cost it as much as
                // the refusal. By way of the reactor: an executor that always has something to run asks it what else
                // has happened every 200th time only, and the bus and the sessions would wait for that.
                accepted = accepted.wrapping_add(1);
                if accepted.is_multiple_of(ACCEPTED_IN_A_ROW_MAX)
                    && let Err(error) = listener.readable().await
                {
                    return SystemError::new("accept a connection", error);
                }
            }
            Err(error) => match socket::classify_accept_error(&error) {
                socket::AcceptError::Connection => {}
                socket::AcceptError::Resources => {
                    if failures.note(Instant::now(), REFUSAL_LOG_INTERVAL).is_some() {
                        let message = format!("cannot accept a connection: {error}");
                        journal::record(Event::AcceptFailed, &[], &message);
                    }
                    Timer::after(ACCEPT_PAUSE).await;
                }
                socket::AcceptError::Listener => return SystemError::new("accept a connection", error),
            },
        }
    }
}

/// Looks at who connected, as far as that costs nothing, and gives it a task or closes it.
fn admit(context: &Rc<Context>, stream: UnixStream) {
    let cred = match peer_socket::credentials(&stream) {
        Ok(cred) => cred,
        Err(error) => {
            let nobody = Credentials { pid: 0, uid: u32::MAX, gid: u32::MAX };
            return context.log_refusal(nobody, None, &format!("no credentials: {error}"));
        }
    };
    if (cred.uid, cred.gid) != (context.account.uid(), context.account.gid()) {
        return context.log_refusal(cred, None, "not the account");
    }
    match context.admission.arrive(context.server.judge(cred.pid), Instant::now()) {
        Ok(place) => {
            if let Err(error) = socket::set_buffers(&stream) {
                return context.log_refusal(cred, None, &format!("cannot set buffers: {error}"));
            }
            let stream = match Async::new(stream) {
                Ok(stream) => stream,
                Err(error) => return context.log_refusal(cred, None, &format!("it cannot be watched: {error}")),
            };
            context.executor.spawn(connection::serve(Rc::clone(context), stream, cred, place)).detach();
        }
        Err(refused) => {
            // It may be the server, not known yet: it should know why. One attempt; nobody waits for a stranger.
            let reason = encode_error(ErrorCode::RateLimited, "too many connections");
            if let Ok(frame) = frame::encode(Kind::Error, &reason) {
                let _ = message::send_bytes(&stream, &frame);
            }
            context.log_refusal(
                cred,
                Some(ErrorCode::RateLimited),
                match refused {
                    Refused::Rate => "too many strangers",
                    Refused::Crowded => "too many are being authenticated",
                },
            );
        }
    }
}

/// Tries again and again to end what an earlier supervisor left and nobody could end. Holds a slot meanwhile.
async fn retry_stuck(context: Rc<Context>, name: UnitName, slot: Slot) {
    while session::stop_leftover(&context.manager, &name).await.is_err() {
        Timer::after(STUCK_RETRY_PAUSE).await;
    }
    journal::record(Event::LeftoverGone, &[(Field::Unit, &name)], &format!("{name}: gone"));
    drop(slot);
}

/// Waits for a unit whose start got no answer and was given up, and ends it if it shows up after all.
async fn await_doomed(context: Rc<Context>, name: UnitName, watch: UnitWatch) {
    watch.events().wait_for(|events| (events.changes > 0 || !events.jobs.is_empty()).then_some(())).await;
    watch.forget().await;
    let message = format!("{name}: started after it had been given up; stopping it");
    journal::record(Event::StartedLate, &[(Field::Unit, &name)], &message);
    let slot = context.admission.occupy();
    retry_stuck(context, name, slot).await;
}

/// Keeps `systemctl status` current, a moment late: the manager has to tell everybody of it, and that would be in the
/// way of the start that it is about.
async fn keep_status(context: Rc<Context>) {
    let (mut sessions, max) = context.admission.sessions();
    loop {
        context.notifier.insist(&format!("STATUS={sessions}/{max} sessions")).await;
        let told = sessions;
        while sessions == told {
            context.admission.sessions_changed(told).await;
            Timer::after(STATUS_PAUSE).await;
            sessions = context.admission.sessions().0;
        }
    }
}

/// Feeds the watchdog, if the unit has one, from the loop that does the work: twice per period.
async fn feed_watchdog(context: Rc<Context>) {
    let period = std::env::var("WATCHDOG_USEC").ok().and_then(|usec| usec.parse().ok()).map(Duration::from_micros);
    let Some(period) = period else { return };
    loop {
        context.notifier.say("WATCHDOG=1");
        Timer::after(period / 2).await;
    }
}

/// PID 1's varlink sockets, as they exist.
fn varlink_sockets() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/run/systemd") else { return Vec::new() };
    let mut paths: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.path().into_os_string().into_string().ok())
        .filter(|path| path.starts_with("/run/systemd/io.systemd."))
        .collect();
    paths.sort();
    paths
}
