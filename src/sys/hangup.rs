//! One epoll instance that tells which peers have hung up.
//!
//! Waiting for readability can't do it: unread data hides a hang-up while we apply back-pressure. This instance
//! asks for `EPOLLRDHUP` alone, so it is silent about data; it is itself a descriptor that becomes readable when an
//! entry fires, and the supervisor awaits that. An entry fires once. A socket that is closed leaves by itself.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

/// The instance. Readable when [`HangupWatch::fired`] has something to say.
#[derive(Debug)]
pub struct HangupWatch(OwnedFd);

impl HangupWatch {
    /// An instance without entries.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Watches `socket`; `token` comes back once when its peer shuts down or closes.
    pub fn add(&self, socket: impl AsFd, token: u64) -> io::Result<()> {
        epoll::add(&self.0, socket, EventData::new_u64(token), EventFlags::RDHUP | EventFlags::ONESHOT)?;
        Ok(())
    }

    /// Hands each token that has fired to `tell`; never waits.
    pub fn fired(&self, mut tell: impl FnMut(u64)) -> io::Result<()> {
        loop {
            let mut events = [MaybeUninit::<Event>::uninit(); 64];
            let (fired, _) = match epoll::wait(&self.0, &mut events, Some(&Timespec::default())) {
                Err(rustix::io::Errno::INTR) => continue,
                other => other?,
            };
            if fired.is_empty() {
                return Ok(());
            }
            for event in fired {
                let data = event.data;
                tell(data.u64());
            }
        }
    }
}

impl AsFd for HangupWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    fn fired(watch: &HangupWatch) -> Vec<u64> {
        let mut tokens = Vec::new();
        watch.fired(|token| tokens.push(token)).unwrap();
        tokens
    }

    #[test]
    fn unread_data_is_silent_and_a_hang_up_behind_it_fires_once() {
        let watch = HangupWatch::new().unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        watch.add(&theirs, 7).unwrap();
        ours.write_all(b"unread").unwrap();
        assert_eq!(fired(&watch), [0_u64; 0]);
        ours.shutdown(Shutdown::Write).unwrap();
        assert_eq!(fired(&watch), [7]);
        drop(ours);
        assert_eq!(fired(&watch), [0_u64; 0], "an entry fires once");
    }
}
