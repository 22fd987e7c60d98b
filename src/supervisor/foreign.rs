//! File-system calls on descriptors that came from outside: on threads of their own, with a deadline.
//!
//! A directory on a dead FUSE or NFS mount makes `fstat`, and even `close`, hang for good. So neither happens in the
//! event loop: a small fixed pool does them, and whoever waits gives up in time. What hangs keeps its thread and its
//! descriptor, and nothing else.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, io};

use smol::channel::{Receiver, Sender, bounded, unbounded};

use crate::limits::{FOREIGN_CALL_QUEUE_MAX, FOREIGN_CALL_THREADS, FOREIGN_CALL_TIME};
use crate::sys::directory::{self, Identity};
use crate::wait::within;

type Job = Box<dyn FnOnce() + Send>;

/// The pool. Threads start when they are first needed, and stay.
#[derive(Clone, Debug)]
pub struct Pool {
    jobs: Sender<Job>,
    queue: Receiver<Job>,
    /// Threads started, and how many of them wait for a job.
    threads: Arc<Mutex<Threads>>,
}

#[derive(Debug, Default)]
struct Threads {
    started: usize,
    idle: usize,
}

/// Why a directory can't be looked at.
#[derive(Debug)]
pub enum Unknown {
    /// Its file system did not answer in time.
    Hangs,
    /// Too many others hang already.
    Crowded,
    /// The call failed.
    Failed(io::Error),
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hangs => f.write_str("its file system does not answer"),
            Self::Crowded => f.write_str("too many file systems do not answer"),
            Self::Failed(error) => write!(f, "cannot look at it: {error}"),
        }
    }
}

impl Default for Pool {
    fn default() -> Self {
        Self::new()
    }
}

impl Pool {
    /// A pool without threads yet.
    pub fn new() -> Self {
        let (jobs, queue) = unbounded();
        Self { jobs, queue, threads: Arc::default() }
    }

    /// Device, inode and type of a foreign descriptor, or `None` where root may not look (a FUSE mount of the
    /// account: the launcher, as the account, then decides alone). Gives the descriptor back with it.
    pub async fn identify(&self, descriptor: OwnedFd) -> Result<(OwnedFd, Option<Identity>), Unknown> {
        if self.queue.len() >= FOREIGN_CALL_QUEUE_MAX {
            self.dispose(vec![descriptor]);
            return Err(Unknown::Crowded);
        }
        let (answer, answered) = bounded(1);
        self.submit(Box::new(move || {
            // Nobody waits any more: don't hang for them, too.
            if !answer.is_closed() {
                let identity = directory::identify(&descriptor);
                let _ = answer.try_send((descriptor, identity));
            }
        }));
        match within(FOREIGN_CALL_TIME, answered.recv()).await {
            Some(Ok((descriptor, Ok(identity)))) => Ok((descriptor, Some(identity))),
            Some(Ok((descriptor, Err(error)))) if error.kind() == io::ErrorKind::PermissionDenied => {
                Ok((descriptor, None))
            }
            Some(Ok((descriptor, Err(error)))) => {
                self.dispose(vec![descriptor]);
                Err(Unknown::Failed(error))
            }
            Some(Err(_)) | None => Err(Unknown::Hangs),
        }
    }

    /// Closes descriptors, whenever their file systems let us.
    pub fn dispose(&self, descriptors: Vec<OwnedFd>) {
        if !descriptors.is_empty() {
            self.submit(Box::new(move || drop(descriptors)));
        }
    }

    pub(super) fn submit(&self, job: Job) {
        let start_one = {
            let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
            let start_one = threads.idle <= self.queue.len() && threads.started < FOREIGN_CALL_THREADS;
            if start_one {
                threads.started += 1;
            }
            start_one
        };
        if start_one {
            let (queue, threads) = (self.queue.clone(), Arc::clone(&self.threads));
            let started = std::thread::Builder::new().name("foreign-files".to_owned()).spawn(move || {
                loop {
                    let count = |delta: isize| {
                        let mut threads = threads.lock().unwrap_or_else(PoisonError::into_inner);
                        threads.idle = threads.idle.saturating_add_signed(delta);
                    };
                    count(1);
                    let job = queue.recv_blocking();
                    count(-1);
                    let Ok(job) = job else { return };
                    job();
                }
            });
            if started.is_err() {
                self.threads.lock().unwrap_or_else(PoisonError::into_inner).started -= 1;
            }
        }
        // The queue has no bound of its own: each job holds a descriptor, and those are bounded.
        let _ = self.jobs.try_send(job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_and_a_file_are_told_apart() {
        let pool = Pool::new();
        for (path, is_directory) in [("/", true), ("/proc/self/exe", false)] {
            let descriptor = OwnedFd::from(std::fs::File::open(path).unwrap());
            let (_, identity) = smol::block_on(pool.identify(descriptor)).unwrap();
            assert_eq!(identity.unwrap().is_directory, is_directory, "{path}");
        }
    }

    #[test]
    fn the_pool_never_has_more_threads_than_its_limit() {
        let pool = Pool::new();
        let (release, released) = bounded::<()>(1);
        for _ in 0..20 {
            let released = released.clone();
            pool.submit(Box::new(move || {
                let _ = released.recv_blocking();
            }));
        }
        assert_eq!(pool.threads.lock().unwrap().started, FOREIGN_CALL_THREADS);
        drop(release);
        let descriptor = OwnedFd::from(std::fs::File::open("/").unwrap());
        assert!(smol::block_on(pool.identify(descriptor)).is_ok());
    }
}
