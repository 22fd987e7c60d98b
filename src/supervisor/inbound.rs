//! What a client sends: the one start frame with its one descriptor, then input and stop.
//!
//! Every byte comes through `recvmsg` with room for every descriptor there can be, so a stray one is seen, closed
//! and ends the session. No more is read than there is room for; a full queue leaves the socket unread.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use smol::Async;
use smol::future::yield_now;

use super::buffers::{Buffer, ByteQueue};
use super::foreign::Pool;
use crate::frame::message::{ErrorCode, Start};
use crate::frame::{DecodeError, Header, Kind};
use crate::limits::FRAME_HEADER_BYTES;
use crate::sys::message;
use crate::wait::Watched;

/// Why the client's side of a connection is over.
#[derive(Clone, Debug)]
pub enum Over {
    /// It shut down or closed.
    HungUp,
    /// It sent what it may not.
    Violation(ErrorCode, String),
}

impl From<DecodeError> for Over {
    fn from(error: DecodeError) -> Self {
        Self::Violation(ErrorCode::BadFrame, error.to_string())
    }
}

/// What the client has asked for so far, for those who act on it.
#[derive(Clone, Debug, Default)]
pub struct Inbox {
    /// Input that nobody has taken yet.
    pub input: Watched<ByteQueue>,
    /// It wants the session stopped, once the input before that is taken.
    pub stop: Watched<bool>,
    /// Input is not wanted any more: drop it.
    pub closed: Watched<bool>,
    /// Bytes of input received.
    pub received: Watched<u64>,
}

/// Where in a frame we are.
#[derive(Clone, Copy, Debug)]
enum Position {
    Header { have: usize },
    Input { left: usize },
}

/// What came with a start frame: closed where that may hang, also when nobody waits for the rest of the frame any more.
#[derive(Debug)]
struct Arrived {
    descriptors: Vec<OwnedFd>,
    pool: Pool,
}

impl Drop for Arrived {
    fn drop(&mut self) {
        self.pool.dispose(std::mem::take(&mut self.descriptors));
    }
}

/// The receiving side of one connection.
#[derive(Debug)]
pub struct Inbound {
    stream: Rc<Async<UnixStream>>,
    pool: Pool,
    header: [u8; FRAME_HEADER_BYTES],
    position: Position,
    /// Less came than there was room for: the reactor tells of what comes next.
    emptied: bool,
}

impl Inbound {
    /// Nothing received yet.
    pub fn new(stream: Rc<Async<UnixStream>>, pool: Pool) -> Self {
        Self { stream, pool, header: [0; FRAME_HEADER_BYTES], position: Position::Header { have: 0 }, emptied: false }
    }

    /// Receives some bytes, at least one. Descriptors go onto the end of `descriptors`.
    async fn receive(&self, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<usize, Over> {
        loop {
            match message::receive(self.stream.get_ref(), buffer, descriptors) {
                Ok(received) if received.control_cut => {
                    let reason = "descriptors were lost on the way (MSG_CTRUNC)".to_owned();
                    return Err(Over::Violation(ErrorCode::BadFrame, reason));
                }
                Ok(received) if received.bytes == 0 => return Err(Over::HungUp),
                Ok(received) => return Ok(received.bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.stream.readable().await.is_err() {
                        return Err(Over::HungUp);
                    }
                }
                // ECONNRESET above all: the peer closed with something of ours unread.
                Err(_) => return Err(Over::HungUp),
            }
        }
    }

    /// Receives the start frame and its descriptor, in any number of pieces, and not a byte more.
    pub async fn start(&mut self) -> Result<(Start, OwnedFd), Over> {
        let mut arrived = Arrived { descriptors: Vec::new(), pool: self.pool.clone() };
        let start = self.start_frame(&mut arrived.descriptors).await?;
        match arrived.descriptors.len() {
            1 => {
                let directory = arrived.descriptors.pop().expect("there is exactly one");
                Ok((start, directory))
            }
            count => {
                let reason = format!("{count} descriptors with the start frame instead of one");
                Err(Over::Violation(ErrorCode::BadStart, reason))
            }
        }
    }

    async fn start_frame(&mut self, descriptors: &mut Vec<OwnedFd>) -> Result<Start, Over> {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        self.fill(&mut bytes, descriptors).await?;
        let header = Header::decode(&bytes)?;
        if header.kind() != Kind::Start {
            return Err(DecodeError::UnexpectedKind { kind: header.kind() }.into());
        }
        let mut payload = vec![0; header.payload_len()];
        self.fill(&mut payload, descriptors).await?;
        Start::decode(&payload).map_err(|error| Over::Violation(ErrorCode::BadStart, error.to_string()))
    }

    async fn fill(&self, mut buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<(), Over> {
        while !buffer.is_empty() {
            let count = self.receive(buffer, descriptors).await?;
            if descriptors.len() > 1 {
                let reason = "more than one descriptor".to_owned();
                return Err(Over::Violation(ErrorCode::BadFrame, reason));
            }
            buffer = buffer.get_mut(count..).unwrap_or_default();
        }
        Ok(())
    }

    /// Receives input and stop into `inbox` until the client's side is over.
    pub async fn follow(&mut self, inbox: &Inbox) -> Over {
        loop {
            match self.follow_once(inbox).await {
                // One client that sends as fast as we read must not have the thread for itself.
                Ok(()) if !self.emptied => yield_now().await,
                Ok(()) => {}
                Err(over) => return over,
            }
        }
    }

    async fn follow_once(&mut self, inbox: &Inbox) -> Result<(), Over> {
        let room = inbox.input.wait_for(|queue| (queue.space() > 0).then(|| queue.space())).await;
        if std::mem::take(&mut self.emptied) {
            self.stream.readable().await.map_err(|_| Over::HungUp)?;
        }
        let mut buffer = Buffer::take();
        let mut descriptors = Vec::new();
        let window = buffer.get_mut(..room).unwrap_or_default();
        let received = message::receive(self.stream.get_ref(), window, &mut descriptors);
        let stray = !descriptors.is_empty();
        self.pool.dispose(descriptors);
        let count = match received {
            Ok(received) if stray || received.control_cut => {
                let reason = "a descriptor where none may come".to_owned();
                return Err(Over::Violation(ErrorCode::BadFrame, reason));
            }
            Ok(received) if received.bytes == 0 => return Err(Over::HungUp),
            Ok(received) => received.bytes,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.emptied = true;
                return Ok(());
            }
            Err(_) => return Err(Over::HungUp),
        };
        self.emptied = count < room;
        self.parse(buffer.get(..count).unwrap_or_default(), inbox)?;
        Ok(())
    }

    /// Reads and drops everything until the client closes; descriptors are closed where that may hang.
    pub async fn discard(&mut self) {
        loop {
            let mut buffer = Buffer::take();
            let mut descriptors = Vec::new();
            let received = message::receive(self.stream.get_ref(), &mut buffer, &mut descriptors);
            drop(buffer);
            self.pool.dispose(descriptors);
            match received {
                Ok(received) if received.bytes > 0 => yield_now().await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.stream.readable().await.is_err() {
                        return;
                    }
                }
                Ok(_) | Err(_) => return,
            }
        }
    }

    /// Takes frames apart, wherever the pieces begin and end.
    fn parse(&mut self, mut bytes: &[u8], inbox: &Inbox) -> Result<(), DecodeError> {
        while !bytes.is_empty() {
            match self.position {
                Position::Header { have } => {
                    let place = self.header.get_mut(have..).unwrap_or_default();
                    let count = place.len().min(bytes.len());
                    let (part, rest) = bytes.split_at(count);
                    place.get_mut(..count).unwrap_or_default().copy_from_slice(part);
                    bytes = rest;
                    self.position = Position::Header { have: have + count };
                    if have + count == FRAME_HEADER_BYTES {
                        self.position = Self::begin(Header::decode(&self.header)?, inbox)?;
                    }
                }
                Position::Input { left } => {
                    let (part, rest) = bytes.split_at(left.min(bytes.len()));
                    bytes = rest;
                    inbox.received.change(|received| *received += part.len() as u64);
                    // Input after the end, or behind a stop, is read and dropped.
                    if !inbox.closed.get() && !inbox.stop.get() {
                        inbox.input.change(|queue| queue.push(part));
                    }
                    let left = left - part.len();
                    self.position = if left == 0 { Position::Header { have: 0 } } else { Position::Input { left } };
                }
            }
        }
        Ok(())
    }

    fn begin(header: Header, inbox: &Inbox) -> Result<Position, DecodeError> {
        match header.kind() {
            Kind::Input => Ok(Position::Input { left: header.payload_len() }),
            Kind::Stop => {
                inbox.stop.set(true);
                Ok(Position::Header { have: 0 })
            }
            kind => Err(DecodeError::UnexpectedKind { kind }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::foreign::Work;
    use super::*;
    use crate::frame::encode;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use smol::future::FutureExt;
    use std::io::{IoSlice, Read, Write};
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;

    fn connection() -> (UnixStream, Inbound) {
        let (client, server) = UnixStream::pair().unwrap();
        (client, Inbound::new(Rc::new(Async::new(server).unwrap()), Pool::new()))
    }

    #[test]
    fn input_and_stop_arrive_whatever_the_pieces() {
        let mut stream = encode(Kind::Input, b"hello ").unwrap();
        stream.extend(encode(Kind::Input, b"world").unwrap());
        stream.extend(encode(Kind::Stop, b"").unwrap());
        stream.extend(encode(Kind::Input, b"dropped").unwrap());
        for size in 1..stream.len() {
            let (_client, mut inbound) = connection();
            let inbox = Inbox::default();
            for piece in stream.chunks(size) {
                inbound.parse(piece, &inbox).unwrap();
            }
            inbox.input.with(|queue| assert_eq!(queue.bytes(), b"hello world"));
            assert!(inbox.stop.get());
        }
    }

    #[test]
    fn a_second_start_and_every_frame_of_the_other_direction_end_the_session() {
        for (kind, payload) in [
            (Kind::Start, &[0_u8; 25][..]),
            (Kind::Output, b"x"),
            (Kind::Exit, &[0; 9]),
            (Kind::Error, b"io: x"),
            (Kind::Started, b"x"),
            (Kind::Stopped, b""),
        ] {
            let (mut client, mut inbound) = connection();
            client.write_all(&encode(kind, payload).unwrap()).unwrap();
            let over = smol::block_on(inbound.follow(&Inbox::default()));
            assert!(matches!(over, Over::Violation(ErrorCode::BadFrame, _)), "{kind:?}: {over:?}");
        }
    }

    #[test]
    fn a_hang_up_in_the_middle_of_a_frame_is_a_hang_up() {
        let (mut client, mut inbound) = connection();
        client.write_all(b"OPTY\x01").unwrap();
        drop(client);
        assert!(matches!(smol::block_on(inbound.follow(&Inbox::default())), Over::HungUp));
    }
    /// A start that was given up while its descriptor was there closed it in the event loop, where a dead FUSE or NFS
    /// mount would have held up every session. Here the pool is busy, and so the descriptor stays open.
    #[test]
    fn a_start_that_is_given_up_leaves_closing_to_the_pool() {
        let (client, mut inbound) = connection();
        let stream = Rc::clone(&inbound.stream);
        let (release, released) = smol::channel::bounded::<()>(1);
        for _ in 0..crate::limits::FOREIGN_CALL_THREADS {
            let released = released.clone();
            inbound.pool.submit(
                Work::Close,
                Box::new(move || {
                    let _ = released.recv_blocking();
                }),
            );
        }
        let (sent, mut kept) = UnixStream::pair().unwrap();
        kept.set_nonblocking(true).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [sent.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&client, &[IoSlice::new(b"OPTY")], &mut control, SendFlags::empty()).unwrap();
        drop(sent);

        let received = async { drop(inbound.start().await) };
        smol::block_on(received.or(async {
            while rustix::io::ioctl_fionread(stream.get_ref()).unwrap() > 0 {
                yield_now().await;
            }
        }));

        assert_eq!(kept.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(release);
        kept.set_nonblocking(false).unwrap();
        assert_eq!(kept.read(&mut [0]).unwrap(), 0);
    }
}
