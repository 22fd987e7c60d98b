//! Which connections have been hung up, seen at once even while both directions are blocked.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;

use smol::Async;

use crate::sys::hangup::HangupWatch;
use crate::wait::Watched;

/// Every connection that is watched.
#[derive(Debug)]
pub struct Hangups {
    watch: Async<HangupWatch>,
    latches: RefCell<HashMap<u64, Watched<bool>>>,
    next: Cell<u64>,
}

/// One connection's watch; dropping it ends it.
#[derive(Debug)]
pub struct Hangup<'a> {
    hangups: &'a Hangups,
    token: u64,
    latch: Watched<bool>,
}

impl Hangups {
    /// None yet.
    pub fn new() -> io::Result<Self> {
        let watch = Async::new_nonblocking(HangupWatch::new()?)?;
        Ok(Self { watch, latches: RefCell::default(), next: Cell::new(0) })
    }

    /// Watches a connection.
    pub fn add(&self, socket: impl AsFd) -> io::Result<Hangup<'_>> {
        let token = self.next.get();
        self.next.set(token + 1);
        let latch = Watched::new(false);
        self.watch.get_ref().add(socket, token)?;
        self.latches.borrow_mut().insert(token, latch.clone());
        Ok(Hangup { hangups: self, token, latch })
    }

    /// Passes the kernel's word on. Ends only when the kernel refuses to speak.
    pub async fn keep(&self) -> io::Error {
        loop {
            if let Err(error) = self.watch.readable().await {
                return error;
            }
            let told = self.watch.get_ref().fired(|token| {
                if let Some(latch) = self.latches.borrow().get(&token) {
                    latch.set(true);
                }
            });
            if let Err(error) = told {
                return error;
            }
        }
    }
}

impl Hangup<'_> {
    /// Waits for the peer to shut down or close.
    pub async fn happened(&self) {
        self.latch.wait_for(|happened| happened.then_some(())).await;
    }
}

impl Drop for Hangup<'_> {
    fn drop(&mut self) {
        self.hangups.latches.borrow_mut().remove(&self.token);
    }
}
