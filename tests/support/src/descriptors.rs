//! Bytes and descriptors over a Unix stream socket, each wait with a deadline.
//!
//! Nothing here changes a socket's flags: the sockets of a test share their file description with the server's
//! own, and clearing or setting `O_NONBLOCK` on one end of a duplicate changes them all. So every call carries
//! `MSG_DONTWAIT` and `poll` does the waiting.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Most descriptors one message can carry: the kernel's `SCM_MAX_FD`.
pub const DESCRIPTORS_MAX: usize = 253;

/// What one `recvmsg` gave.
#[derive(Debug)]
pub struct Received {
    /// Bytes read; 0 is the end.
    pub len: usize,
    /// Descriptors that came with them, close-on-exec.
    pub descriptors: Vec<OwnedFd>,
}

/// Waits until one of `events` is there; hang-ups and errors count as readiness.
pub fn wait_for(socket: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(|_| ErrorKind::InvalidInput)?;
        let mut polled = [PollFd::from_borrowed_fd(socket, events)];
        match poll(&mut polled, Some(&timeout)) {
            Ok(0) => return Err(ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// One attempt to send, without waiting; the descriptors go with the first byte.
pub fn send_now(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(ErrorKind::InvalidInput, "more descriptors than one message can carry"));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
}

/// Sends all of `bytes`; the descriptors go with the first part.
pub fn send_all(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    deadline: Instant,
) -> io::Result<()> {
    let (mut rest, mut descriptors) = (bytes, descriptors);
    while !rest.is_empty() {
        match send_now(socket, rest, descriptors) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(sent) => {
                rest = rest.get(sent..).unwrap_or_default();
                descriptors = &[];
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait_for(socket, PollFlags::OUT, deadline)?,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Receives what is there, waiting for the first byte, the end or an error.
pub fn receive(socket: impl AsFd, buffer: &mut [u8], deadline: Instant) -> io::Result<Received> {
    let socket = socket.as_fd();
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        match recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Ok(message) => {
                let mut descriptors = Vec::new();
                for part in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(received) = part {
                        descriptors.extend(received);
                    }
                }
                if message.flags.contains(ReturnFlags::CTRUNC) {
                    return Err(io::Error::other("descriptors were lost: MSG_CTRUNC"));
                }
                return Ok(Received { len: message.bytes, descriptors });
            }
            Err(Errno::AGAIN) => wait_for(socket, PollFlags::IN, deadline)?,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
