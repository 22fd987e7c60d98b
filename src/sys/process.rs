//! What the small roles need around their own process: an inherited socket with a deadline, standard descriptors,
//! programs and the terminal.
//!
//! The surprising part is the sockets. An inherited one shares its file description with whoever passed it on, so
//! `O_NONBLOCK` is never touched in either direction: clearing it would stall the server's event loop. Each call
//! is non-blocking by its own flag, and `poll` waits. The supervisor's sockets are its own: `sys::message`.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Access, AtFlags, CWD, FileType, accessat, stat};
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType, getpeername, recv,
    send, sendmsg, sockopt,
};
use rustix::pty::{OpenptFlags, openpt};
use rustix::termios::{tcgetwinsize, tcsetwinsize};

// ---- sockets -----------------------------------------------------------------------------------------------

/// Fails unless `fd` is a Unix stream socket that has a peer.
pub fn check_connected_stream(fd: impl AsFd) -> io::Result<()> {
    if sockopt::socket_domain(&fd)? != AddressFamily::UNIX || sockopt::socket_type(&fd)? != SocketType::STREAM {
        return Err(Errno::PROTOTYPE.into());
    }
    getpeername(&fd)?;
    Ok(())
}

/// Sends all of `bytes`, with `passenger` attached to the first part. `TimedOut` after `deadline`.
pub fn send_all(
    socket: impl AsFd,
    mut bytes: &[u8],
    mut passenger: Option<BorrowedFd<'_>>,
    deadline: Instant,
) -> io::Result<()> {
    let socket = socket.as_fd();
    while !bytes.is_empty() {
        let sent = match passenger {
            Some(fd) => send_with(socket, bytes, fd),
            None => send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
        };
        match sent {
            Ok(0) => return Err(Errno::IO.into()),
            Ok(sent) => {
                // The kernel attaches descriptors to the first byte it takes: they have gone, however few went.
                passenger = None;
                bytes = bytes.get(sent..).ok_or(Errno::IO)?;
            }
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, deadline)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn send_with(socket: BorrowedFd<'_>, bytes: &[u8], passenger: BorrowedFd<'_>) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let passengers = [passenger];
    if !control.push(SendAncillaryMessage::ScmRights(&passengers)) {
        return Err(Errno::NOBUFS);
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
}

/// Fills `bytes` and takes not one more. `TimedOut` after `deadline`, `UnexpectedEof` if the peer has closed.
///
/// There is no room for descriptors in this call, so the kernel closes any that come along.
pub fn receive_exact(socket: impl AsFd, bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    let socket = socket.as_fd();
    let mut rest = bytes;
    while !rest.is_empty() {
        match recv(socket, &mut *rest, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((received, _)) => rest = rest.get_mut(received..).ok_or(Errno::IO)?,
            Err(Errno::AGAIN) => wait(socket, PollFlags::IN, deadline)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Waits for `events`, a hang-up or an error: the caller's next call then says which.
fn wait(fd: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let timeout = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
    match poll(&mut [PollFd::from_borrowed_fd(fd, events)], Some(&timeout)) {
        Ok(0) => Err(io::ErrorKind::TimedOut.into()),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

// ---- standard descriptors ----------------------------------------------------------------------------------

/// Makes descriptor 2 a duplicate of descriptor 1.
pub fn join_stderr_to_stdout() -> io::Result<()> {
    Ok(rustix::stdio::dup2_stderr(rustix::stdio::stdout())?)
}

/// Gives `fd` the number `wanted` and lets it pass through execve. `EBUSY` if another descriptor has the number.
///
/// Usually `fd` has it already, and `dup3(3, 3)` would be an error.
pub fn keep_as(fd: OwnedFd, wanted: RawFd) -> io::Result<OwnedFd> {
    let kept = if fd.as_raw_fd() == wanted { fd } else { fcntl_dupfd_cloexec(&fd, wanted)? };
    if kept.as_raw_fd() != wanted {
        return Err(Errno::BUSY.into());
    }
    fcntl_setfd(&kept, FdFlags::empty())?;
    Ok(kept)
}

// ---- programs ----------------------------------------------------------------------------------------------

/// Fails unless `path` is a regular file that this process may execute, by its effective ids.
pub fn check_executable(path: &Path) -> io::Result<()> {
    if FileType::from_raw_mode(stat(path)?.st_mode) != FileType::RegularFile {
        return Err(Errno::ACCESS.into());
    }
    Ok(accessat(CWD, path, Access::EXEC_OK, AtFlags::EACCESS)?)
}

// ---- terminals ---------------------------------------------------------------------------------------------

/// Fails unless a new terminal can be had, and gives it back.
pub fn check_new_terminal() -> io::Result<()> {
    openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    Ok(())
}

/// Gives a terminal that does not know its size this one. Says whether it did.
pub fn give_size_if_unknown(terminal: impl AsFd, (columns, rows): (u16, u16)) -> io::Result<bool> {
    let mut size = tcgetwinsize(&terminal)?;
    if size.ws_col != 0 && size.ws_row != 0 {
        return Ok(false);
    }
    (size.ws_col, size.ws_row) = (columns, rows);
    tcsetwinsize(&terminal, size)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[test]
    fn only_a_connected_unix_stream_passes() {
        let (stream, _peer) = UnixStream::pair().unwrap();
        check_connected_stream(&stream).unwrap();

        let (datagram, _peer) = UnixDatagram::pair().unwrap();
        assert_eq!(check_connected_stream(&datagram).unwrap_err().raw_os_error(), Some(libc::EPROTOTYPE));
        let tcp = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        assert_eq!(check_connected_stream(&tcp).unwrap_err().raw_os_error(), Some(libc::EPROTOTYPE));
        let path = std::env::temp_dir().join(format!("opencode-pty-listener-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(check_connected_stream(&listener).unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
        let file = std::fs::File::open("/").unwrap();
        assert_eq!(check_connected_stream(&file).unwrap_err().raw_os_error(), Some(libc::ENOTSOCK));
    }

    #[test]
    fn a_reader_that_never_reads_ends_the_sending_at_its_deadline() {
        let (ours, _peer) = UnixStream::pair().unwrap();
        let deadline = Instant::now() + Duration::from_millis(50);

        let refused = send_all(&ours, &vec![0; 8 << 20], None, deadline).unwrap_err();

        assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
        assert!(Instant::now() >= deadline);
    }

    #[test]
    fn what_does_not_fit_at_once_follows_in_order_and_blocking_mode_is_left_alone() {
        for nonblocking in [false, true] {
            let (ours, mut peer) = UnixStream::pair().unwrap();
            ours.set_nonblocking(nonblocking).unwrap();
            let sent: Vec<u8> = (0..=250).cycle().take(4 << 20).collect();
            let reader = std::thread::spawn(move || {
                let mut all = Vec::new();
                peer.read_to_end(&mut all).unwrap();
                all
            });

            send_all(&ours, &sent, None, soon()).unwrap();

            let flags = rustix::fs::fcntl_getfl(&ours).unwrap();
            assert_eq!(flags.contains(rustix::fs::OFlags::NONBLOCK), nonblocking);
            drop(ours);
            assert!(reader.join().unwrap() == sent);
        }
    }

    #[test]
    fn a_peer_that_has_gone_is_an_error_and_no_signal() {
        let (ours, peer) = UnixStream::pair().unwrap();
        drop(peer);
        // A child that another test starts has a copy of it until it executes its program.
        assert_eq!((&ours).read(&mut [0]).unwrap(), 0);
        let refused = send_all(&ours, b"x", None, soon()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn receiving_takes_what_was_asked_for_and_not_a_byte_more() {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        peer.write_all(b"abcdef").unwrap();
        let mut four = [0; 4];
        receive_exact(&ours, &mut four, soon()).unwrap();
        assert_eq!(&four, b"abcd");
        drop(peer);
        assert_eq!(receive_exact(&ours, &mut four, soon()).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn silence_ends_the_receiving_at_its_deadline() {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        peer.write_all(b"abc").unwrap();
        let refused = receive_exact(&ours, &mut [0; 4], Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_directory_a_plain_file_and_nothing_can_not_be_executed() {
        check_executable("/bin/sh".as_ref()).unwrap();
        for path in ["/", "/etc/passwd"] {
            let refused = check_executable(path.as_ref()).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "{path}");
        }
        assert_eq!(check_executable("/nonexistent".as_ref()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn only_a_terminal_without_a_size_is_given_one() {
        let leader = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        for (before, after) in [((0, 0), (80, 24)), ((100, 0), (80, 24)), ((0, 50), (80, 24)), ((132, 43), (132, 43))] {
            let mut size = tcgetwinsize(&leader).unwrap();
            (size.ws_col, size.ws_row) = before;
            tcsetwinsize(&leader, size).unwrap();
            assert_eq!(give_size_if_unknown(&leader, (80, 24)).unwrap(), before != after);
            let size = tcgetwinsize(&leader).unwrap();
            assert_eq!((size.ws_col, size.ws_row), after);
        }
        let (no_terminal, _peer) = UnixStream::pair().unwrap();
        assert!(give_size_if_unknown(&no_terminal, (80, 24)).is_err());
    }

    #[test]
    fn a_kept_descriptor_has_its_number_and_passes_through_execve() {
        let (end, _peer) = UnixStream::pair().unwrap();
        let number = end.as_raw_fd();
        let kept = keep_as(end.into(), number).unwrap();
        assert_eq!(rustix::io::fcntl_getfd(&kept).unwrap(), FdFlags::empty());

        // A number nothing else in this test program comes near.
        let moved = keep_as(kept, 700).unwrap();
        assert_eq!(moved.as_raw_fd(), 700);
        assert_eq!(rustix::io::fcntl_getfd(&moved).unwrap(), FdFlags::empty());
    }
}
