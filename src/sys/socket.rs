//! The listening socket's place in the file system, and the socketpair of a session.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Uid, chmod, chownat, lstat, unlink};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, listen, shutdown, socket_with,
};

use crate::limits::{BACKLOG, SOCKET_BUFFER_BYTES};

/// What stands where the listening socket wants to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupant {
    /// Nothing.
    Nobody,
    /// A socket nobody listens on any more.
    Stale,
    /// A socket somebody listens on.
    Listening,
    /// Something that is not a socket.
    Other,
}

/// Looks at what stands at `path`.
pub fn occupant(path: &Path) -> io::Result<Occupant> {
    let stat = match lstat(path) {
        Ok(stat) => stat,
        Err(rustix::io::Errno::NOENT) => return Ok(Occupant::Nobody),
        Err(errno) => return Err(errno.into()),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Ok(Occupant::Other);
    }
    Ok(match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Occupant::Stale,
        _ => Occupant::Listening,
    })
}

/// Removes a stale socket.
pub fn remove(path: &Path) -> io::Result<()> {
    Ok(unlink(path)?)
}

/// Listens at `path` with owner root, group `gid` and mode 0660. The path must be free.
///
/// There is no window in which anyone else could connect: the file is made under a umask that gives nothing to
/// others, gets its group and mode, and only then does the socket listen.
pub fn listen_at(path: &Path, gid: u32) -> io::Result<UnixListener> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    let stat = lstat(path)?;
    if stat.st_uid != 0 || stat.st_gid != gid {
        chownat(CWD, path, Some(Uid::ROOT), Some(Gid::from_raw(gid)), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    chmod(path, Mode::from_raw_mode(0o660))?;
    listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

/// From now on, files this process makes are for their owner alone.
pub fn restrict_umask() {
    rustix::process::umask(Mode::from_raw_mode(0o177));
}

/// A socketpair with buffers of [`SOCKET_BUFFER_BYTES`] each way: our end, and the session's.
pub fn pair() -> io::Result<(UnixStream, OwnedFd)> {
    let (ours, theirs) = UnixStream::pair()?;
    set_buffers(&ours)?;
    set_buffers(&theirs)?;
    Ok((ours, theirs.into()))
}

/// Sets a socket's send and receive buffers to [`SOCKET_BUFFER_BYTES`].
pub fn set_buffers(socket: impl AsFd) -> io::Result<()> {
    set_socket_send_buffer_size(&socket, SOCKET_BUFFER_BYTES)?;
    set_socket_recv_buffer_size(&socket, SOCKET_BUFFER_BYTES)?;
    Ok(())
}

/// Shuts both directions down, whoever else holds the socket. That it is already gone is no error.
pub fn shut_down(socket: impl AsFd) {
    // The one error there can be is ENOTCONN: the other end closed first.
    let _ = shutdown(socket, Shutdown::Both);
}

/// Shuts our sending direction down: the other end reads to the end of file.
pub fn shut_down_sending(socket: impl AsFd) {
    let _ = shutdown(socket, Shutdown::Write);
}

/// What a failed `accept` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptError {
    /// This one connection is gone; the next may be fine.
    Connection,
    /// No descriptor or memory left right now, here or in the whole system.
    Resources,
    /// The listening socket is of no use any more.
    Listener,
}

/// Tells the three apart (accept(2)).
pub fn classify_accept_error(error: &io::Error) -> AcceptError {
    use rustix::io::Errno;
    match Errno::from_io_error(error) {
        Some(Errno::CONNABORTED | Errno::INTR | Errno::AGAIN | Errno::PERM | Errno::PROTO) => AcceptError::Connection,
        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => AcceptError::Resources,
        _ => AcceptError::Listener,
    }
}

/// Whether the effective user is root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
