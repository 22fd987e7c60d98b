//! The newcomer's terminal: raw while a session is joined to it, and as it was afterwards, whatever happens.

use std::io::{IsTerminal as _, stdin};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::Failure;

/// What has to be put back; `None` while the terminal is as it was found, or is none.
type Changed = Arc<Mutex<Option<Termios>>>;

/// Standard input, if it is a terminal.
pub struct Terminal {
    is_some: bool,
    changed: Changed,
}

/// The terminal is raw while this lives.
pub struct Raw {
    changed: Changed,
}

impl Terminal {
    /// Takes charge of the terminal. From here on a signal that ends this process restores it first.
    ///
    /// The host needs no word from us: it ends when we do.
    pub fn take() -> Result<Self, Failure> {
        let changed = Changed::default();
        let mut signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM])
            .map_err(|error| format!("cannot watch for signals: {error}"))?;
        let to_restore = Arc::clone(&changed);
        thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                restore(&to_restore);
                std::process::exit(128 + signal);
            }
        });
        Ok(Self { is_some: stdin().is_terminal(), changed })
    }

    /// Whether there is one.
    pub fn is_some(&self) -> bool {
        self.is_some
    }

    /// Hands every key on as it is, Ctrl-C too.
    pub fn raw(&self) -> Result<Raw, Failure> {
        if self.is_some {
            let found = tcgetattr(stdin()).map_err(|error| format!("cannot read the terminal's settings: {error}"))?;
            let mut raw = found.clone();
            raw.make_raw();
            *self.changed.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
            tcsetattr(stdin(), OptionalActions::Drain, &raw)
                .map_err(|error| format!("cannot make the terminal raw: {error}"))?;
        }
        Ok(Raw { changed: Arc::clone(&self.changed) })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore(&self.changed);
    }
}

fn restore(changed: &Changed) {
    if let Some(found) = changed.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // If the terminal is gone there is nothing to put back.
        let _ = tcsetattr(stdin(), OptionalActions::Drain, &found);
    }
}
