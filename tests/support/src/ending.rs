//! Ends the threads of a scope, however the scope goes.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets the flag when it is dropped, by a panic, too: a scope waits for its threads, so those that run until they are told need to be
/// told then as well.
#[derive(Debug)]
pub struct Ending<'a>(pub &'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
