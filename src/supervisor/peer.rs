//! Credentials and pidfd → [`Peer`]: who is there. The only way to a `Peer` is [`identify`].
//!
//! Each check that can't be made is a denial. Somebody whose pid is not the server's main process is a stranger and
//! is closed without a word; from then on a refusal is answered, since it is the server itself that must know.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use smol::Async;
use smol::future::zip;

use super::Context;
use crate::report::Chain;
use crate::sys::peer::{self, Credentials, PeerPidfd};
use crate::systemd::{CallError, UnitState};

/// The server's main process: held, and known to be in one invocation of its unit.
#[derive(Debug)]
pub struct Peer {
    pid: u32,
    pidfd: Async<OwnedFd>,
    invocation: Vec<u8>,
}

/// Why somebody is not the server.
#[derive(Debug)]
pub enum Denial {
    /// Not the server's main process: closed without a word.
    Stranger(String),
    /// It has the server's pid, and something else is wrong.
    Unauthenticated(String),
    /// It has the server's pid, and the manager did not answer.
    Unanswered(String),
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stranger(reason) => write!(f, "a stranger: {reason}"),
            Self::Unauthenticated(reason) | Self::Unanswered(reason) => write!(f, "not authenticated: {reason}"),
        }
    }
}

/// Finds out whether a connection is the server's.
pub async fn identify(stream: &Async<UnixStream>, cred: Credentials, context: &Context) -> Result<Peer, Denial> {
    // 1: uid and gid are the account's. The accept loop looked already; here it is what a Peer rests on.
    if (cred.uid, cred.gid) != (context.account.uid(), context.account.gid()) {
        return Err(Denial::Stranger("not the account".to_owned()));
    }
    if !context.server.is_main(cred.pid).await {
        return Err(Denial::Stranger(format!("not the main process of {}", context.options.server_unit)));
    }

    // 2: the process itself, not its number.
    let pidfd = match peer::pidfd(stream.get_ref()) {
        Ok(PeerPidfd::Process(pidfd)) => pidfd,
        Ok(PeerPidfd::Reaped) => return Err(Denial::Stranger("it has exited".to_owned())),
        Ok(PeerPidfd::Unavailable) => return Err(denied("this kind of socket has no peer pidfd")),
        Ok(PeerPidfd::Unsupported) => return Err(denied("this kernel has no SO_PEERPIDFD")),
        Err(error) => return Err(denied(format!("cannot get the peer's pidfd: {error}"))),
    };

    // 3: what PID 1 says of it. Both at once: it answers in order, and what holds of the process before step 4 holds then.
    let (membership, state) = zip(context.manager.unit_of(pidfd.as_fd(), cred.pid), read_server(context)).await;
    let membership = membership.map_err(|error| unknown("cannot find its unit", &error))?;
    if membership.unit != context.options.server_unit {
        return Err(denied(format!("it belongs to {}", crate::report::quoted(&membership.unit))));
    }
    let state = state?;
    check_server(&state, cred.pid, context)?;
    if membership.invocation.as_ref().is_some_and(|invocation| *invocation != state.invocation) {
        return Err(denied("its unit was restarted meanwhile"));
    }

    // 4: it is still there. What was found out by number was about this process, then.
    let peer = Peer {
        pid: cred.pid,
        pidfd: Async::new(pidfd).map_err(|error| denied(format!("cannot watch the peer's pidfd: {error}")))?,
        invocation: state.invocation,
    };
    peer.check_alive()?;
    Ok(peer)
}

async fn read_server(context: &Context) -> Result<UnitState, Denial> {
    let read = context.manager.read(&context.options.server_unit).await;
    read.map_err(|error| unknown("cannot read the server's unit", &error))
}

/// What the server's unit must say for `pid` to be its main process.
fn check_server(state: &UnitState, pid: u32, context: &Context) -> Result<(), Denial> {
    let problem = if state.id != context.options.server_unit || state.load != "loaded" {
        "the server's unit is not loaded"
    } else if state.main_pid != pid {
        "it is not the main process"
    } else if state.control_group != context.options.server_cgroup() {
        "the server's unit is in another control group"
    } else if state.active != "active" || state.sub != "running" {
        "the server's unit is not running"
    } else if state.invocation.len() != 16 {
        "the server's unit has no invocation"
    } else if !matches!(state.notify_access.as_str(), "none" | "main" | "exec") {
        "any child of the server could name itself its main process (NotifyAccess)"
    } else {
        return Ok(());
    };
    Err(denied(problem))
}

/// A call to the manager that failed.
fn unknown(what: &str, error: &CallError) -> Denial {
    let reason = format!("{what}: {}", Chain(error));
    match error {
        CallError::NoAnswer { .. } => Denial::Unanswered(reason),
        _ => Denial::Unauthenticated(reason),
    }
}

fn denied(reason: impl Into<String>) -> Denial {
    Denial::Unauthenticated(reason.into())
}

impl Peer {
    /// Its pid, for records. Never decide by it.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The invocation of the server's unit that it is in, for records.
    pub fn invocation(&self) -> &[u8] {
        &self.invocation
    }

    /// Looks again, right before something is started for it.
    pub async fn confirm(&self, context: &Context) -> Result<(), Denial> {
        let state = read_server(context).await?;
        check_server(&state, self.pid, context)?;
        if state.invocation != self.invocation {
            return Err(denied("its unit was restarted meanwhile"));
        }
        self.check_alive()
    }

    fn check_alive(&self) -> Result<(), Denial> {
        match peer::is_alive(self.pidfd.get_ref()) {
            Ok(true) => Ok(()),
            Ok(false) => Err(denied("it has exited")),
            Err(error) => Err(denied(format!("cannot ask its pidfd: {error}"))),
        }
    }

    /// Waits until the process is gone, whoever else still holds its socket.
    pub async fn exited(&self) {
        // Not being able to wait for it is as good as its end: the session must not outlive its peer unseen.
        let _ = self.pidfd.readable().await;
    }

    #[cfg(test)]
    pub fn for_tests() -> Self {
        let (left, _) = UnixStream::pair().expect("a socketpair can be made");
        let pidfd = Async::new(OwnedFd::from(left)).expect("a socket can be watched");
        Self { pid: 0, pidfd, invocation: Vec::new() }
    }
}
