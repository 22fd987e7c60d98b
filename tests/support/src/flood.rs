//! Strangers that connect to the supervisor as fast as they can, for what fair admission has to withstand.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::descriptors::{self, DESCRIPTORS_MAX};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Connections that a flood of the kind `held` keeps open at a time. Chosen: more than are authenticated at a time.
const HELD: usize = 64;
/// The same for the kind `silent`. Chosen: below a usual limit of 1,024 descriptors.
const SILENT: usize = 900;
/// Between two lines of output. Chosen.
const BETWEEN_COUNTS: Duration = Duration::from_millis(100);

/// How a flood connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Waits for room in the backlog, and closes at once.
    Blocking,
    /// Never waits, and closes at once.
    NonBlocking,
    /// Never waits, and keeps its latest connections open.
    Held,
    /// The same, and sends on each connection as many descriptors as it can.
    Descriptors,
    /// Connects to nobody, and computes: what three busy processes cost whoever shares the processors with them.
    Busy,
    /// Makes `SILENT` connections and keeps them all, without a word.
    Silent,
}

impl Kind {
    /// The kind of this name.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "blocking" => Self::Blocking,
            "non-blocking" => Self::NonBlocking,
            "held" => Self::Held,
            "descriptors" => Self::Descriptors,
            "busy" => Self::Busy,
            "silent" => Self::Silent,
            _ => return None,
        })
    }
}

/// Connects for this long. Prints the number of connections made: now and then, as it may be ended before, and last.
pub fn flood(supervisor: &Path, time: Duration, kind: Kind) -> io::Result<()> {
    let address = SocketAddrUnix::new(supervisor)?;
    let flags = match kind {
        Kind::Blocking => SocketFlags::CLOEXEC,
        Kind::NonBlocking | Kind::Held | Kind::Descriptors | Kind::Silent | Kind::Busy => {
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK
        }
    };
    let held_max = match kind {
        Kind::Blocking | Kind::NonBlocking | Kind::Busy => 0,
        Kind::Held | Kind::Descriptors => HELD,
        Kind::Silent => SILENT,
    };
    // Of a file, since closing one may take its file system's time.
    let file = File::open("/proc/self/exe")?;
    let begun = Instant::now();
    let end = begun + time;
    let mut held: VecDeque<OwnedFd> = VecDeque::new();
    let mut count = 0_u64;
    let mut told = begun;
    loop {
        let now = Instant::now();
        if now >= end {
            break;
        }
        if now.duration_since(told) >= BETWEEN_COUNTS {
            println!("{count}");
            told = now;
        }
        if kind == Kind::Busy {
            continue;
        }
        if kind == Kind::Silent && held.len() == held_max {
            println!("{count}");
            thread::sleep(end.saturating_duration_since(Instant::now()));
            break;
        }
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &address) {
            Ok(()) => count += 1,
            // The backlog is full.
            Err(Errno::AGAIN) if kind == Kind::Silent => {
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(Errno::AGAIN) => continue,
            // The supervisor is being restarted, perhaps.
            Err(Errno::NOENT | Errno::CONNREFUSED) => {
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(errno) => return Err(errno.into()),
        }
        if kind == Kind::Descriptors {
            // Until the connection is full, or closed, or the account has too many on their way.
            while descriptors::send_now(socket.as_fd(), b"?", &[file.as_fd(); DESCRIPTORS_MAX]).is_ok() {}
        }
        if held_max > 0 {
            if held.len() == held_max {
                held.pop_front();
            }
            held.push_back(socket);
        }
    }
    println!("{count}");
    Ok(())
}
