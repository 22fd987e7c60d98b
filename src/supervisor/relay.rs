//! Terminal bytes both ways, bounded: one output frame, and the input queue.
//!
//! Whatever is half sent lives in [`Outbound`] and not in a future, so any of these can be dropped between two
//! polls and taken up again.

use std::future::pending;
use std::io;
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use smol::Async;
use smol::future::{FutureExt, yield_now};

use super::buffers::Buffer;
use super::inbound::Inbox;
use crate::frame::{Header, Kind};
use crate::limits::{ANSWER_TIME, DATA_BYTES_MAX, DRAIN_IDLE_TIME, DRAIN_TIME, FRAME_HEADER_BYTES};
use crate::sys::message;
use crate::wait::within;

/// The sending side of one connection.
#[derive(Debug)]
pub struct Outbound {
    stream: Rc<Async<UnixStream>>,
    /// A frame that is not out yet, from `start` to `end`.
    frame: Option<Buffer>,
    start: usize,
    end: usize,
    /// Bytes given to the client so far, headers included: how a drain sees progress.
    sent: u64,
    /// Bytes of output taken from the terminal.
    output: u64,
}

impl Outbound {
    /// Nothing sent yet.
    pub fn new(stream: Rc<Async<UnixStream>>) -> Self {
        Self { stream, frame: None, start: 0, end: 0, sent: 0, output: 0 }
    }

    /// Bytes of output taken from the terminal so far.
    pub fn output_bytes(&self) -> u64 {
        self.output
    }

    /// Sends what is left of the frame in hand.
    async fn flush(&mut self) -> io::Result<()> {
        while let Some(rest) = self.frame.as_ref().and_then(|frame| frame.get(self.start..self.end)) {
            if rest.is_empty() {
                break;
            }
            match message::send_bytes(self.stream.get_ref(), rest) {
                Ok(count) => {
                    self.start += count;
                    self.sent += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.stream.writable().await?,
                Err(error) => return Err(error),
            }
        }
        self.frame = None;
        Ok(())
    }

    /// Sends one frame that is not output, in [`ANSWER_TIME`].
    pub async fn answer(&mut self, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let work = async {
            self.flush().await?;
            let header = Header::new(kind, payload.len()).map_err(io::Error::other)?;
            let mut buffer = Buffer::take();
            let end = FRAME_HEADER_BYTES + payload.len();
            let place = buffer.get_mut(..end).ok_or_else(|| io::Error::other("an answer larger than a buffer"))?;
            place.get_mut(..FRAME_HEADER_BYTES).unwrap_or_default().copy_from_slice(&header.encode());
            place.get_mut(FRAME_HEADER_BYTES..).unwrap_or_default().copy_from_slice(payload);
            (self.frame, self.start, self.end) = (Some(buffer), 0, end);
            self.flush().await
        };
        within(ANSWER_TIME, work).await.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Carries output from the terminal to the client until the terminal's end of file. An error is the client's.
    pub async fn forward(&mut self, terminal: &Async<UnixStream>) -> io::Result<()> {
        let mut emptied = false;
        loop {
            self.flush().await?;
            // Less came than there was room for: to ask again would give nothing, and the reactor tells of what comes next.
            if std::mem::take(&mut emptied) && terminal.readable().await.is_err() {
                return Ok(());
            }
            let mut buffer = Buffer::take();
            let place = buffer.get_mut(FRAME_HEADER_BYTES..FRAME_HEADER_BYTES + DATA_BYTES_MAX).unwrap_or_default();
            match message::receive_bytes(terminal.get_ref(), place) {
                Ok(0) => return Ok(()),
                Ok(count) => {
                    let header = Header::new(Kind::Output, count).map_err(io::Error::other)?;
                    buffer.get_mut(..FRAME_HEADER_BYTES).unwrap_or_default().copy_from_slice(&header.encode());
                    (self.frame, self.start, self.end) = (Some(buffer), 0, FRAME_HEADER_BYTES + count);
                    self.output += count as u64;
                    emptied = count < DATA_BYTES_MAX;
                    if !emptied {
                        // A terminal that never pauses must not have the thread for itself.
                        yield_now().await;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => emptied = true,
                // The session's end is gone with input of ours unread: that is its end of file.
                Err(_) => return Ok(()),
            }
        }
    }

    /// [`Outbound::forward`] for as long as `work` takes.
    pub async fn forward_during<T>(&mut self, terminal: &Async<UnixStream>, work: impl Future<Output = T>) -> T {
        let forwarding = async {
            let _ = self.forward(terminal).await;
            pending().await
        };
        work.or(forwarding).await
    }

    /// Carries what is left to the client once the unit is gone. Whether it got to the terminal's end of file.
    pub async fn drain(&mut self, terminal: &Async<UnixStream>) -> bool {
        let whole = async {
            loop {
                let before = (self.sent, self.output);
                match within(DRAIN_IDLE_TIME, self.forward(terminal)).await {
                    Some(drained) => return drained.is_ok(),
                    None if (self.sent, self.output) == before => return false,
                    None => {}
                }
            }
        };
        within(DRAIN_TIME, whole).await.unwrap_or(false)
    }
}

/// Carries input from the queue to the terminal until a stop, asked for behind it, is due.
pub async fn feed(inbox: &Inbox, terminal: &Async<UnixStream>) {
    loop {
        let waiting = inbox.input.wait_for(|queue| (!queue.is_empty()).then_some(true));
        let stopping = async {
            inbox.stop.wait_for(|stop| stop.then_some(())).await;
            // What came before the stop goes first.
            inbox.input.with(|queue| !queue.is_empty())
        };
        if !waiting.or(stopping).await {
            return;
        }
        match inbox.input.with(|queue| message::send_bytes(terminal.get_ref(), queue.bytes())) {
            Ok(count) => inbox.input.change(|queue| queue.consume(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if terminal.writable().await.is_err() {
                    close(inbox);
                }
            }
            // The session is over: its unit's end will tell.
            Err(_) => close(inbox),
        }
        yield_now().await;
    }
}

/// From now on input is dropped.
pub fn close(inbox: &Inbox) {
    inbox.closed.set(true);
    inbox.input.change(super::buffers::ByteQueue::clear);
}
