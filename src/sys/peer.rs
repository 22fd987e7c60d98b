//! Who is at the other end of a Unix socket: credentials, and the process itself as a pidfd.
//!
//! A pid is a number that can be given to somebody else; a pidfd is the process. There is no fall-back from the one
//! to the other: where the kernel can't hand out the peer's pidfd, nobody is let in.
#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use libc::{SO_PEERPIDFD, SOL_SOCKET, c_int, getsockopt, socklen_t};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, getpriority_process};

/// `SO_PEERCRED`: who connected, as of `connect(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process id, in our pid namespace; 0 if it has none there.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

/// What the kernel says of the process at the other end.
#[derive(Debug)]
pub enum PeerPidfd {
    /// The process, held so that its pid cannot be reused.
    Process(OwnedFd),
    /// It exited and has been reaped.
    Reaped,
    /// This kind of socket does not know its peer.
    Unavailable,
    /// The running kernel is too old to say (before 6.5).
    Unsupported,
}

/// The credentials of the process that connected.
pub fn credentials(socket: impl AsFd) -> io::Result<Credentials> {
    let cred = socket_peercred(socket)?;
    Ok(Credentials {
        pid: u32::try_from(cred.pid.as_raw_nonzero().get()).unwrap_or(0),
        uid: cred.uid.as_raw(),
        gid: cred.gid.as_raw(),
    })
}

/// The process that connected.
pub fn pidfd(socket: impl AsFd) -> io::Result<PeerPidfd> {
    let mut pidfd: c_int = -1;
    let mut len = socklen_t::try_from(size_of::<c_int>()).expect("the size of an int fits");
    // SAFETY: the descriptor is borrowed for the whole call; `pidfd` and `len` are live and writable for the whole
    // call and `len` holds the size of `pidfd`, so the kernel writes at most `size_of::<c_int>()` bytes into it.
    let ret = unsafe {
        getsockopt(socket.as_fd().as_raw_fd(), SOL_SOCKET, SO_PEERPIDFD, (&raw mut pidfd).cast(), &raw mut len)
    };
    if ret != 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            // Reaped: EINVAL on most kernels from 6.5 on, ESRCH on some.
            Some(libc::EINVAL | libc::ESRCH) => Ok(PeerPidfd::Reaped),
            Some(libc::ENODATA) => Ok(PeerPidfd::Unavailable),
            Some(libc::ENOPROTOOPT) => Ok(PeerPidfd::Unsupported),
            _ => Err(error),
        };
    }
    if pidfd < 0 {
        return Err(io::Error::other("the kernel gave no pidfd and no error"));
    }
    // SAFETY: the call succeeded, so the kernel has just installed this descriptor (close-on-exec, as every pidfd)
    // for us; nothing else in the program knows its number.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    // Newer kernels (6.16 on) also give a pidfd of a process that is long gone.
    Ok(if is_alive(&pidfd)? { PeerPidfd::Process(pidfd) } else { PeerPidfd::Reaped })
}

/// Whether there is a process with this pid, or one that has ended and has not been reaped. Never decide by it who that is.
pub fn exists(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    // Signal 0 would be refused: we have no power over other users' processes. This asks for none. (So does getpgid, which
    // gives 0 for a process that is just being reaped, and rustix takes that for impossible.)
    pid.is_some_and(|pid| getpriority_process(Some(pid)).is_ok())
}

/// Whether the process of a pidfd still runs: a zombie does not.
pub fn is_alive(pidfd: impl AsFd) -> io::Result<bool> {
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    loop {
        match poll(&mut fds, Some(&Timespec::default())) {
            Ok(exited) => return Ok(exited == 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_socketpair_has_its_creator_at_both_ends() {
        let (left, _right) = UnixStream::pair().unwrap();
        assert_eq!(credentials(&left).unwrap().pid, std::process::id());
        let PeerPidfd::Process(pidfd) = pidfd(&left).unwrap() else { panic!("no pidfd") };
        assert!(is_alive(&pidfd).unwrap());
    }

    #[test]
    fn a_process_exists_until_it_has_been_reaped() {
        // Asked of one that is just dying, too: getpgid stumbled there.
        for _ in 0..50 {
            let mut child = std::process::Command::new("true").spawn().unwrap();
            for _ in 0..100 {
                assert!(exists(child.id()));
            }
            child.wait().unwrap();
            assert!(!exists(child.id()));
        }
        assert!(exists(1));
        assert!(!exists(0) && !exists(u32::MAX));
    }

    #[test]
    fn a_listening_socket_has_no_other_process() {
        let dir = std::env::temp_dir().join(format!("opencode-pty-peer-{}", std::process::id()));
        let listener = UnixListener::bind(&dir).unwrap();
        std::fs::remove_file(&dir).unwrap();
        // listen(2) records the listener itself as the peer; a datagram socket records nobody.
        drop(listener);
        let datagram = std::os::unix::net::UnixDatagram::unbound().unwrap();
        assert!(matches!(pidfd(&datagram).unwrap(), PeerPidfd::Unavailable));
    }
}
