//! One connection's story: identify, receive, start, relay, stop, report. All of a connection's logging is here.
//!
//! While the story goes on, four senses run beside it: what the client sends, whether it hung up, whether its
//! process lives, whether the supervisor shuts down. They never act; they raise a [`Cause`], and the story looks at
//! it between its steps.

use std::fmt;
use std::future::pending;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::{Duration, Instant};

use smol::Async;
use smol::future::{FutureExt, zip};

use super::Context;
use super::admission::{Handshake, Slot};
use super::inbound::{Inbound, Inbox, Over};
use super::peer::{self, Denial, Peer};
use super::relay::{self, Outbound};
use super::session::{CleanUp, End, Session, StopError};
use crate::frame::Kind;
use crate::frame::message::{ErrorCode, Exit, Start, encode_error};
use crate::journal::{self, Event, Field, Id};
use crate::limits::{ANSWER_TIME, HANDSHAKE_TIME};
use crate::sys::peer::Credentials;
use crate::sys::socket;
use crate::systemd::UnitState;
use crate::systemd::unit::UnitName;
use crate::wait::{Watched, until, within};

/// Why a session is to end although its unit has not.
#[derive(Clone, Debug)]
enum Cause {
    /// The client asked for it.
    Stop,
    /// The supervisor shuts down.
    Shutdown,
    /// The client hung up, or its process is gone.
    Disconnect(&'static str),
    /// The client sent what it may not.
    Violation(ErrorCode, String),
}

impl Cause {
    /// Whether the terminal is cut off at once, instead of being read to its end.
    fn is_abrupt(&self) -> bool {
        matches!(self, Self::Disconnect(_) | Self::Violation(..))
    }

    /// The word for it in the journal. Stable; docs/journal.md has the list.
    fn word(&self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Shutdown => "shutdown",
            Self::Disconnect(_) => "disconnect",
            Self::Violation(..) => "violation",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stop => f.write_str("a stop"),
            Self::Shutdown => f.write_str("the supervisor's shutdown"),
            Self::Disconnect(how) => f.write_str(how),
            Self::Violation(_, why) => write!(f, "a protocol error: {why}"),
        }
    }
}

/// Why there is no session.
#[derive(Debug)]
enum Refusal {
    /// Nothing is said to the peer.
    Silent(String),
    /// The peer is told the code and the message, the journal the detail.
    Told { code: ErrorCode, message: String, detail: String },
}

impl Refusal {
    fn told(code: ErrorCode, message: &str, detail: impl fmt::Display) -> Self {
        Self::Told { code, message: message.to_owned(), detail: detail.to_string() }
    }
}

impl From<Denial> for Refusal {
    fn from(denial: Denial) -> Self {
        match denial {
            Denial::Stranger(reason) => Self::Silent(reason),
            Denial::Unauthenticated(reason) | Denial::Unanswered(reason) => {
                Self::told(ErrorCode::Unauthenticated, "the caller could not be verified", reason)
            }
        }
    }
}

impl From<Over> for Refusal {
    fn from(over: Over) -> Self {
        match over {
            Over::HungUp => Self::Silent("it hung up before its start frame was complete".to_owned()),
            Over::Violation(code, reason) => Self::told(code, &reason, ""),
        }
    }
}

/// Serves one connection, from the accepted socket to the last frame.
pub async fn serve(context: Rc<Context>, stream: Async<UnixStream>, cred: Credentials, place: Handshake) {
    let stream = Rc::new(stream);
    let mut inbound = Inbound::new(Rc::clone(&stream), context.pool.clone());
    let mut outbound = Outbound::new(Rc::clone(&stream));
    context.conversations.change(|count| *count += 1);
    let conversed = converse(&context, &stream, &mut inbound, &mut outbound, cred, place).await;
    // Who is told nothing, needs no time to read it. A stranger's connection costs a descriptor no longer than it must.
    let lingers = !matches!(conversed, Err(Refusal::Silent(_)));
    if let Err(refusal) = conversed {
        refuse(&context, &mut outbound, cred, refusal).await;
    }
    context.conversations.change(|count| *count -= 1);
    if lingers {
        farewell(&stream, inbound).await;
    }
}

/// The story. Each step takes what the step before it returned.
async fn converse(
    context: &Rc<Context>,
    stream: &Rc<Async<UnixStream>>,
    inbound: &mut Inbound,
    outbound: &mut Outbound,
    cred: Credentials,
    place: Handshake,
) -> Result<(), Refusal> {
    let handshake = shake_hands(context, stream, inbound, cred, place);
    let shutdown = async {
        context.shutdown.wait_for(|shutdown| shutdown.then_some(())).await;
        Err(Refusal::told(ErrorCode::Shutdown, "the supervisor is shutting down", ""))
    };
    let Admitted { peer, slot, request } = handshake.or(shutdown).await?;

    let hangup = match context.hangups.add(stream.get_ref()) {
        Ok(hangup) => hangup,
        Err(error) => {
            request.give_up(context).await;
            return Err(Refusal::told(ErrorCode::Io, "the connection cannot be watched", error));
        }
    };
    let senses = Senses::default();
    let story = run(context, &senses, outbound, &peer, request);
    let session = story.or(async {
        let follow = async {
            match inbound.follow(&senses.inbox).await {
                Over::HungUp => senses.raise(Cause::Disconnect("the client's hang-up")),
                Over::Violation(code, reason) => senses.raise(Cause::Violation(code, reason)),
            }
            pending::<()>().await;
        };
        let hung_up = async {
            hangup.happened().await;
            senses.raise(Cause::Disconnect("the client's hang-up"));
            pending::<()>().await;
        };
        let died = async {
            peer.exited().await;
            senses.raise(Cause::Disconnect("the end of the server's process"));
            pending::<()>().await;
        };
        let shutdown = async {
            context.shutdown.wait_for(|shutdown| shutdown.then_some(())).await;
            senses.raise(Cause::Shutdown);
            pending::<()>().await;
        };
        follow.or(hung_up).or(died).or(shutdown).await;
        pending().await
    });
    let last_word = session.await;
    drop(slot);
    let has_record = matches!(last_word, LastWord::Exit(_));
    conclude(&senses, outbound, last_word).await;
    // The client closes. A stop that crossed the exit on its way still gets its answer. After an error we close.
    if has_record && !senses.inbox.stop.get() && !senses.is_abrupt() {
        let lingering = async {
            let _ = inbound.follow(&senses.inbox).await;
        };
        let stopped = async {
            senses.inbox.stop.wait_for(|stop| stop.then_some(())).await;
            let _ = outbound.answer(Kind::Stopped, &[]).await;
        };
        let over = async {
            let shutdown = context.shutdown.wait_for(|shutdown| shutdown.then_some(()));
            hangup.happened().or(shutdown).await;
        };
        within(ANSWER_TIME, stopped.or(lingering).or(over)).await;
    }
    Ok(())
}

/// What a connection has shown by the end of its handshake.
struct Admitted {
    peer: Peer,
    slot: Slot,
    request: Request,
}

/// A session that may be started, and what it takes.
struct Request {
    start: Start,
    directory: OwnedFd,
    session: Session,
    /// The session's end of its terminal.
    theirs: OwnedFd,
}

impl Request {
    /// Nothing was started, and nothing will be.
    async fn give_up(self, context: &Context) {
        context.pool.dispose(vec![self.directory]);
        self.session.abandon().await;
    }
}

/// Who is it, is there room, what does it want, is the directory what it says, and is it still the same: in
/// [`HANDSHAKE_TIME`] together.
async fn shake_hands(
    context: &Rc<Context>,
    stream: &Rc<Async<UnixStream>>,
    inbound: &mut Inbound,
    cred: Credentials,
    place: Handshake,
) -> Result<Admitted, Refusal> {
    let deadline = Instant::now() + HANDSHAKE_TIME;
    let late = |message| Refusal::told(ErrorCode::Timeout, message, "");

    let peer = find_out(deadline, peer::identify(stream, cred, context)).await.ok_or_else(|| {
        // Its user was right by then. The server is told, a stranger isn't.
        if context.server.is_known(cred.pid) {
            late("the service manager did not say in time who the caller is")
        } else {
            Refusal::Silent("its identity was not found out in time".to_owned())
        }
    })??;
    drop(place);
    let slot = context
        .admission
        .reserve(&peer)
        .ok_or_else(|| Refusal::told(ErrorCode::Busy, "every session slot is taken", ""))?;
    let (start, directory) =
        until(deadline, inbound.start()).await.ok_or_else(|| late("the start frame was not complete in time"))??;
    let directory = until(deadline, check_directory(context, &start, directory))
        .await
        .ok_or_else(|| late("the directory could not be examined in time"))??;
    // The second look comes last. What a session registers at the bus is on its way meanwhile; its time is bounded, too.
    let (confirmed, session) = zip(find_out(deadline, peer.confirm(context)), Session::new(context)).await;
    let denied = match confirmed {
        Some(Ok(())) => None,
        Some(Err(denial)) => Some(denial.into()),
        None => Some(late("the service manager did not say in time that the server is still the same")),
    };
    let refusal = match (denied, session) {
        (None, Ok((session, theirs))) => {
            return Ok(Admitted { peer, slot, request: Request { start, directory, session, theirs } });
        }
        (Some(denied), Ok((session, _))) => {
            session.abandon().await;
            denied
        }
        (denied, Err(error)) => {
            denied.unwrap_or(Refusal::Told { code: error.code, message: error.message, detail: error.detail })
        }
    };
    context.pool.dispose(vec![directory]);
    Err(refusal)
}

/// What is found out of the peer, or `None` if that is not there by `deadline`.
///
/// A question to the manager has a limit of its own, as long as a handshake's. Who is woken late finds both over, and then the
/// manager was late: that says nothing of the peer.
async fn find_out<T>(deadline: Instant, work: impl Future<Output = Result<T, Denial>>) -> Option<Result<T, Denial>> {
    let found = until(deadline, work).await?;
    let late = matches!(found, Err(Denial::Unanswered(_))) && Instant::now() >= deadline;
    (!late).then_some(found)
}

/// Whether the descriptor is the directory the frame speaks of.
async fn check_directory(context: &Rc<Context>, start: &Start, directory: OwnedFd) -> Result<OwnedFd, Refusal> {
    let bad = |message: &str| Refusal::told(ErrorCode::BadCwd, message, "");
    let (directory, identity) = context
        .pool
        .identify(directory)
        .await
        .map_err(|error| Refusal::told(ErrorCode::BadCwd, "the directory cannot be examined", error))?;
    let problem = match identity {
        Some(found) if !found.is_directory => Some("the descriptor is not a directory"),
        Some(found) if (found.dev, found.ino) != (start.dev(), start.ino()) => {
            Some("the descriptor is another directory than the start frame names")
        }
        // Ours, or one that root may not look at: the launcher, as the account, looks again anyway.
        Some(_) | None => None,
    };
    match problem {
        None => Ok(directory),
        Some(problem) => {
            context.pool.dispose(vec![directory]);
            Err(bad(problem))
        }
    }
}

/// What the senses found.
#[derive(Debug, Default)]
struct Senses {
    inbox: Inbox,
    cause: Watched<Option<Cause>>,
}

impl Senses {
    /// The first cause counts, but an abrupt one overrides one that is not.
    fn raise(&self, cause: Cause) {
        self.cause.change(|known| {
            if known.as_ref().is_none_or(|known| cause.is_abrupt() && !known.is_abrupt()) {
                *known = Some(cause);
            }
        });
    }

    async fn raised(&self) -> Cause {
        self.cause.wait_for(Option::clone).await
    }

    async fn abrupt(&self) {
        self.cause.wait_for(|cause| cause.as_ref().filter(|cause| cause.is_abrupt()).map(|_| ())).await;
    }

    fn is_abrupt(&self) -> bool {
        self.cause.with(|cause| cause.as_ref().is_some_and(Cause::is_abrupt))
    }
}

/// The terminal frame a session ends with, if anybody is there to read it.
#[derive(Debug)]
enum LastWord {
    Exit(Exit),
    Error(ErrorCode, String),
    Nothing,
}

/// A session, from the verified request to the unit's certain end.
async fn run(
    context: &Rc<Context>,
    senses: &Senses,
    outbound: &mut Outbound,
    peer: &Peer,
    request: Request,
) -> LastWord {
    let Request { start, directory, mut session, theirs } = request;
    let name = session.name().clone();

    // A stop before the start is complete cancels it at once; later it waits for the input before it.
    let cancelled = async {
        let stop = async {
            senses.inbox.stop.wait_for(|stop| stop.then_some(())).await;
            senses.raise(Cause::Stop);
        };
        let raised = async {
            senses.raised().await;
        };
        raised.or(stop).await;
    };
    let started = session.start(context, &start, theirs, directory, cancelled).await;
    if let Err(error) = started {
        let cause = senses.cause.get();
        socket::shut_down(session.terminal().get_ref());
        if finish(context, session).await.is_err() {
            return LastWord::Error(ErrorCode::StopFailed, "the unit's end is not certain".to_owned());
        }
        let (cancelled_by, code, reason) = match &cause {
            Some(cause) => (cause.word(), "", format!("cancelled by {cause}")),
            None => ("", error.code.word(), format!("{}: {} ({})", error.code, error.message, error.detail)),
        };
        journal::record(
            Event::SessionNotStarted,
            &[
                (Field::Unit, &name),
                (Field::PeerPid, &peer.pid()),
                (Field::ServerInvocation, &Id(peer.invocation())),
                (Field::EndedBy, &cancelled_by),
                (Field::Error, &code),
                (Field::Reason, &reason),
            ],
            &format!("{name}: not started for pid {}: {reason}", peer.pid()),
        );
        return match cause {
            None => LastWord::Error(error.code, error.message),
            Some(Cause::Stop) => LastWord::Exit(Exit::stopped()),
            Some(Cause::Shutdown) => LastWord::Error(ErrorCode::Shutdown, "the supervisor is shutting down".to_owned()),
            Some(Cause::Violation(code, reason)) => LastWord::Error(code, reason),
            Some(Cause::Disconnect(_)) => LastWord::Nothing,
        };
    }

    let began = Instant::now();
    log_start(&session, peer, &start);
    if outbound.answer(Kind::Started, name.as_str().as_bytes()).await.is_err() {
        senses.raise(Cause::Disconnect("a client that did not take the answer"));
    }

    let end = relay(context, senses, outbound, &session).await;

    // Whatever ended it: first the unit, then the rest of its output, then the record.
    let running = session.running().clone();
    // Large, and not before the end: a session that runs does not carry it.
    let (terminal, cleaned) = Box::pin(stop_and_drain(context, senses, outbound, session, end.is_none())).await;
    drop(terminal);
    let cause = senses.cause.get();
    let exit = match (&end, &cause, &cleaned) {
        // It ended by itself; a stop that came later does not change how.
        (Some(end), ..) => end.record(&running),
        (None, Some(Cause::Stop), _) => Exit::stopped(),
        (None, _, Ok(CleanUp { last: Some(state), .. })) => End::Stopped(Box::new(state.clone())).record(&running),
        (None, ..) => Exit::lost(),
    };
    let Ok(cleaned) = cleaned else {
        return LastWord::Error(ErrorCode::StopFailed, "the unit's end is not certain".to_owned());
    };
    let ending = Ending {
        exit: &exit,
        cause: cause.as_ref().filter(|_| end.is_none()),
        runtime: Duration::from_secs(start.runtime_seconds().into()),
        cleaned: &cleaned,
    };
    log_end(&name, peer, (&running, began), (senses.inbox.received.get(), outbound.output_bytes()), &ending);
    match cause {
        Some(Cause::Disconnect(_)) => LastWord::Nothing,
        // A session that has ended by itself keeps its record, whatever the client sends then.
        Some(Cause::Violation(code, reason)) if end.is_none() => LastWord::Error(code, reason),
        _ => LastWord::Exit(exit),
    }
}

/// Bytes both ways until the unit ends by itself (how) or is to be stopped (`None`).
async fn relay(context: &Rc<Context>, senses: &Senses, outbound: &mut Outbound, session: &Session) -> Option<End> {
    let ended = async { Some(session.ended(context).await) };
    let to_be_stopped = async {
        senses.raised().await;
        None
    };
    let input = async {
        relay::feed(&senses.inbox, session.terminal()).await;
        senses.raise(Cause::Stop);
        pending().await
    };
    let output = async {
        match outbound.forward(session.terminal()).await {
            Ok(()) => session.note_hang_up(),
            Err(_) => senses.raise(Cause::Disconnect("the client's hang-up")),
        }
        pending().await
    };
    let end = ended.or(to_be_stopped).or(output).or(input).await;
    // It ended by itself just before the stop: that is how it ended.
    let by_itself = end.is_none() && !senses.is_abrupt() && session.seems_ended();
    if by_itself { Some(session.ended(context).await) } else { end }
}

/// Ends the unit and takes what is left of its output: going on to forward while a stop takes its course, cutting
/// the terminal off when nobody listens any more.
async fn stop_and_drain(
    context: &Rc<Context>,
    senses: &Senses,
    outbound: &mut Outbound,
    session: Session,
    close_input: bool,
) -> (Rc<Async<UnixStream>>, Result<CleanUp, StopError>) {
    relay::close(&senses.inbox);
    let terminal = session.terminal_handle();
    if senses.is_abrupt() && close_input {
        socket::shut_down(terminal.get_ref());
        return (terminal, finish(context, session).await);
    }
    let cut_off = async {
        senses.abrupt().await;
        socket::shut_down(terminal.get_ref());
        pending::<()>().await;
    };
    let work = async {
        let cleaned = outbound.forward_during(&terminal, finish(context, session)).await;
        if !outbound.drain(&terminal).await {
            socket::shut_down(terminal.get_ref());
        }
        cleaned
    };
    let cleaned = work
        .or(async {
            cut_off.await;
            pending().await
        })
        .await;
    (terminal, cleaned)
}

/// The clean-up, and what follows for the whole supervisor if it fails.
async fn finish(context: &Rc<Context>, session: Session) -> Result<CleanUp, StopError> {
    let name = session.name().clone();
    session.clean_up(context).await.inspect_err(|error| {
        // Whoever restarts us finds the unit again; meanwhile BindsTo= takes it down with us.
        let message = format!("cannot confirm a clean-up: {error}");
        journal::record(Event::CleanUpFailed, &[(Field::Unit, &name)], &message);
        context.failed.set(Some(error.to_string()));
    })
}

async fn conclude(senses: &Senses, outbound: &mut Outbound, last_word: LastWord) {
    let sent = match last_word {
        LastWord::Exit(exit) => outbound.answer(Kind::Exit, &exit.encode()).await,
        // `stopped` would say that all is gone; the connection closes after an error instead.
        LastWord::Error(code, message) => {
            let _ = outbound.answer(Kind::Error, &encode_error(code, &message)).await;
            return;
        }
        LastWord::Nothing => return,
    };
    if sent.is_ok() && senses.inbox.stop.get() && !senses.is_abrupt() {
        let _ = outbound.answer(Kind::Stopped, &[]).await;
    }
}

fn log_start(session: &Session, peer: &Peer, start: &Start) {
    let (name, running) = (session.name(), session.running());
    journal::record(
        Event::SessionStarted,
        &[
            (Field::Unit, name),
            (Field::Invocation, &Id(&running.invocation)),
            (Field::PeerPid, &peer.pid()),
            (Field::ServerInvocation, &Id(peer.invocation())),
            (Field::Runtime, &start.runtime_seconds()),
            (Field::Isolation, &session.isolation()),
            (Field::CwdDev, &start.dev()),
            (Field::CwdIno, &start.ino()),
        ],
        &format!(
            "{name}: started for pid {}, runtime {} s, directory {}:{}, {}",
            peer.pid(),
            start.runtime_seconds(),
            start.dev(),
            start.ino(),
            session.isolation(),
        ),
    );
}

/// How a session came to its end.
struct Ending<'a> {
    exit: &'a Exit,
    /// Why it was stopped, unless it ended without us.
    cause: Option<&'a Cause>,
    runtime: Duration,
    cleaned: &'a CleanUp,
}

impl Ending<'_> {
    /// Whether the manager ended it because its runtime was over. Its result is `timeout` then, but also when somebody
    /// else's stop needed SIGKILL.
    fn is_expiry(&self) -> bool {
        let ran = self.cleaned.last.as_ref().map_or(Duration::ZERO, UnitState::was_active_for);
        self.cause.is_none() && self.exit.result() == "timeout" && ran >= self.runtime
    }

    /// Whether it took SIGKILL.
    fn is_kill(&self) -> bool {
        // The manager tells of its own SIGKILL by `timeout` alone. Of an expired runtime that is the result in any case;
        // then only the main process shows what it took.
        let by_manager = self.cleaned.last.as_ref().is_some_and(|state| {
            state.result == "timeout" && (!self.is_expiry() || (state.code, state.status) == (2, 9))
        });
        self.cleaned.killed || by_manager
    }
}

fn log_end(
    name: &UnitName,
    peer: &Peer,
    (running, began): (&UnitState, Instant),
    (bytes_in, bytes_out): (u64, u64),
    ending: &Ending<'_>,
) {
    let Ending { exit, cause, cleaned, .. } = ending;
    let (ran, killed) = (began.elapsed(), ending.is_kill());
    let (word, ended_by) = match cause {
        Some(cause) => (cause.word(), cause.to_string()),
        None if ending.is_expiry() => ("runtime", "its runtime".to_owned()),
        None => ("itself", "itself".to_owned()),
    };
    journal::record(
        Event::SessionEnded,
        &[
            (Field::Unit, name),
            (Field::Invocation, &Id(&running.invocation)),
            (Field::PeerPid, &peer.pid()),
            (Field::ServerInvocation, &Id(peer.invocation())),
            (Field::EndedBy, &word),
            (Field::Result, &exit.result()),
            (Field::Code, &exit.code()),
            (Field::Status, &exit.status()),
            (Field::Ran, &ran.as_micros()),
            (Field::InputBytes, &bytes_in),
            (Field::OutputBytes, &bytes_out),
            (Field::CleanUp, &cleaned.took.as_micros()),
            (Field::Killed, &u8::from(killed)),
        ],
        &format!(
            "{name}: ended by {ended_by}: {exit}; {} s, {bytes_in} bytes in, {bytes_out} bytes out, clean-up {} ms{}",
            ran.as_secs(),
            cleaned.took.as_millis(),
            if killed { ", SIGKILL needed" } else { "" },
        ),
    );
}

/// Says no, to the peer if it may know, to the journal always (at most a line a second).
async fn refuse(context: &Rc<Context>, outbound: &mut Outbound, cred: Credentials, refusal: Refusal) {
    match refusal {
        Refusal::Silent(reason) => context.log_refusal(cred, None, &reason),
        Refusal::Told { code, message, detail } => {
            let detail = if detail.is_empty() { String::new() } else { format!(" ({detail})") };
            context.log_refusal(cred, Some(code), &format!("{message}{detail}"));
            let _ = outbound.answer(Kind::Error, &encode_error(code, &message)).await;
        }
    }
}

/// Ends the connection so that the peer gets all we sent: closing with something of its unread would be a reset.
async fn farewell(stream: &Async<UnixStream>, mut inbound: Inbound) {
    socket::shut_down_sending(stream.get_ref());
    within(ANSWER_TIME, inbound.discard()).await;
}
