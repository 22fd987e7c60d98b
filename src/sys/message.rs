//! Bytes with descriptors: `recvmsg` that loses none, `send` that raises no signal.
//!
//! The control buffer has room for the kernel's maximum, so nothing is cut for want of space; whatever arrives is
//! owned before anyone looks at it. A cut control message (no descriptor left in our table) is reported, and the
//! caller ends the connection.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::{Errno, IoSliceMut};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recv, recvmsg, send};

use crate::limits::MESSAGE_DESCRIPTORS_MAX;

/// What one `recvmsg` brought besides its descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes; 0 is the end of the stream.
    pub bytes: usize,
    /// The control data did not arrive whole (MSG_CTRUNC): descriptors may be missing.
    pub control_cut: bool,
}

/// Receives bytes into `buffer` and descriptors, close-on-exec, onto the end of `descriptors`; never waits.
pub fn receive(socket: impl AsFd, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok(Received {
        bytes: received.bytes,
        control_cut: received.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC),
    })
}

/// Receives bytes; never waits. For our own socketpair, whose other end is a session: descriptors it may send are
/// dropped by the kernel, as with `read(2)`.
pub fn receive_bytes(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match recv(&socket, &mut *buffer, RecvFlags::DONTWAIT) {
            Err(Errno::INTR) => {}
            other => return Ok(other?.0),
        }
    }
}

/// Sends bytes; never waits and never raises SIGPIPE.
pub fn send_bytes(socket: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    loop {
        match send(&socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Err(Errno::INTR) => {}
            Ok(0) if !bytes.is_empty() => return Err(io::ErrorKind::WriteZero.into()),
            other => return Ok(other?),
        }
    }
}

/// Whether a call failed because its descriptor is no socket.
pub fn is_not_a_socket(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::NOTSOCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};
    use std::io::{IoSlice, Read};
    use std::os::fd::BorrowedFd;
    use std::os::unix::net::UnixStream;

    fn send_with(socket: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    }

    #[test]
    fn every_descriptor_of_the_largest_message_arrives() {
        let (left, right) = UnixStream::pair().unwrap();
        for count in [1, 2, 64, 253] {
            send_with(&left, b"x", &vec![left.as_fd(); count]);
            let mut descriptors = Vec::new();
            let received = receive(&right, &mut [0; 8], &mut descriptors).unwrap();
            assert_eq!(received, Received { bytes: 1, control_cut: false });
            assert_eq!(descriptors.len(), count);
            for descriptor in &descriptors {
                assert!(rustix::io::fcntl_getfd(descriptor).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
            }
        }
    }

    #[test]
    fn a_closed_peer_is_the_end_of_the_stream_and_an_error_to_send_to() {
        let (left, right) = UnixStream::pair().unwrap();
        drop(left);
        // A child that another test starts has a copy of it until it executes its program: this waits for that.
        assert_eq!((&right).read(&mut [0]).unwrap(), 0);
        let received = receive(&right, &mut [0; 8], &mut Vec::new()).unwrap();
        assert_eq!(received.bytes, 0);
        assert_eq!(send_bytes(&right, b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
