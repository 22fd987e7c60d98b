//! Who the server's main process is: one read of its unit for everybody who asks.
//!
//! The manager's signals say when it may have changed, so the answer is there before the server's first connection
//! comes. A stranger can make us look again, but only so often (`REFRESHES_PER_SECOND`), and all strangers of that
//! time share the one look.

use std::rc::Rc;
use std::time::{Duration, Instant};

use smol::Timer;
use smol::future::FutureExt;

use super::admission::Caller;
use crate::limits::REFRESHES_PER_SECOND;
use crate::sys::peer;
use crate::systemd::Manager;
use crate::wait::Watched;

/// What is known of the server. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Server(Rc<Cells>);

#[derive(Debug, Default)]
struct Cells {
    known: Watched<Known>,
    /// The look that somebody waits for.
    wanted: Watched<u64>,
}

#[derive(Debug, Default)]
struct Known {
    main_pid: u32,
    /// Looks begun so far; the last of them may be under way.
    begun: u64,
    /// Looks completed so far.
    done: u64,
}

impl Server {
    /// Whether this pid is the server's main process as far as we know. Costs nothing.
    pub fn is_known(&self, pid: u32) -> bool {
        pid != 0 && self.0.known.with(|known| known.main_pid == pid)
    }

    /// Who this pid is as far as we know. Costs at most one system call.
    pub fn judge(&self, pid: u32) -> Caller {
        if self.is_known(pid) {
            return Caller::Server;
        }
        // One that has been reaped may have a successor that PID 1 hasn't told us of yet.
        let main_pid = self.0.known.with(|known| known.main_pid);
        if peer::exists(main_pid) { Caller::Stranger(pid) } else { Caller::Unknown(pid) }
    }

    /// Whether it is the main process, after a look that begins later than this call if we don't know it yet.
    pub async fn is_main(&self, pid: u32) -> bool {
        if self.is_known(pid) {
            return true;
        }
        let look = self.0.known.with(|known| known.begun + 1);
        self.0.wanted.change(|wanted| *wanted = look.max(*wanted));
        self.0.known.wait_for(|known| (known.done >= look || known.main_pid == pid).then_some(())).await;
        self.is_known(pid)
    }

    /// Keeps the answer current. Never ends.
    pub async fn keep(&self, manager: &Manager, unit: &str) {
        let pause = Duration::from_secs(1) / REFRESHES_PER_SECOND;
        let watch = loop {
            if let Ok(watch) = manager.watch(unit).await {
                break watch;
            }
            Timer::after(pause).await;
        };
        loop {
            let (changes, generation) = watch.events().with(|events| (events.changes, events.generation));
            let look = self.0.known.change(|known| {
                known.begun += 1;
                known.begun
            });
            // Could not find out is nobody.
            let main_pid = manager.read(unit).await.map_or(0, |state| state.main_pid);
            self.0.known.change(|known| {
                known.main_pid = main_pid;
                known.done = look;
            });
            let looked = Instant::now();

            let news =
                watch.events().wait_for(|now| (now.changes != changes || now.generation != generation).then_some(()));
            let wanted = async {
                self.0.wanted.wait_for(|asked| (*asked > look).then_some(())).await;
                Timer::at(looked + pause).await;
            };
            news.or(wanted).await;
        }
    }
}
