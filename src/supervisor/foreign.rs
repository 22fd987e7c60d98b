//! File-system calls on descriptors that came from outside: on threads of their own, with a deadline.
//!
//! A directory on a dead FUSE or NFS mount makes `fstat`, and even `close`, hang for good. So neither happens in the
//! event loop: a small fixed pool does them, and whoever waits gives up in time. Calls on one mount are done one after
//! the other, so that a mount that hangs keeps one thread and one descriptor, and the other threads are for the others.
//! Looking at a start's directory goes before closing: whoever connects can send descriptors to be closed, by the hundred.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

use smol::channel::{Receiver, Sender, bounded, unbounded};
use smol::future::{FutureExt, block_on};

use crate::limits::{FOREIGN_CALL_QUEUE_MAX, FOREIGN_CALL_THREADS, FOREIGN_CALL_TIME};
use crate::sys::directory::{self, Identity};
use crate::wait::within;

type Job = Box<dyn FnOnce() + Send>;

/// What the pool's threads are called: at most 15 bytes, the kernel's limit.
pub const THREAD_NAME: &str = "foreign-files";

/// The pool. Threads start when they are first needed, and stay.
#[derive(Clone, Debug)]
pub struct Pool {
    looks: Lane,
    closes: Lane,
    /// Threads started, and the jobs there are for them.
    threads: Arc<Mutex<Threads>>,
    mounts: Mounts,
}

/// Jobs that wait for a thread.
#[derive(Clone, Debug)]
struct Lane {
    jobs: Sender<Job>,
    queue: Receiver<Job>,
}

impl Lane {
    fn new() -> Self {
        let (jobs, queue) = unbounded();
        Self { jobs, queue }
    }
}

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Somebody waits for it.
    Look,
    /// Nobody does.
    Close,
}

/// What waits for its turn on each mount that a thread is at, or will be.
type Mounts = Arc<Mutex<HashMap<u64, Turns>>>;

#[derive(Default)]
struct Turns {
    looks: VecDeque<Job>,
    closes: VecDeque<Job>,
}

impl Turns {
    fn push(&mut self, work: Work, job: Job) {
        match work {
            Work::Look => self.looks.push_back(job),
            Work::Close => self.closes.push_back(job),
        }
    }

    fn next(&mut self) -> Option<Job> {
        self.looks.pop_front().or_else(|| self.closes.pop_front())
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} looks, {} closes", self.looks.len(), self.closes.len())
    }
}

#[derive(Debug, Default)]
struct Threads {
    started: usize,
    /// Jobs submitted and not done yet, so also those that hang.
    jobs: usize,
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

/// Nothing panics while it holds one of these.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A descriptor that waits for its turn, for as long as somebody waits for the answer.
struct Waiting<'a> {
    descriptor: Arc<Mutex<Option<OwnedFd>>>,
    pool: &'a Pool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let descriptor = lock(&self.descriptor).take();
        self.pool.dispose(descriptor.into_iter().collect());
    }
}

impl Pool {
    /// A pool without threads yet.
    pub fn new() -> Self {
        Self { looks: Lane::new(), closes: Lane::new(), threads: Arc::default(), mounts: Arc::default() }
    }

    /// Device, inode and type of a foreign descriptor, or `None` where root may not look (a FUSE mount of the
    /// account: the launcher, as the account, then decides alone). Gives the descriptor back with it.
    pub async fn identify(&self, descriptor: OwnedFd) -> Result<(OwnedFd, Option<Identity>), Unknown> {
        let mount = match directory::mount_of(&descriptor) {
            Ok(mount) => mount,
            Err(error) => {
                self.dispose(vec![descriptor]);
                return Err(Unknown::Failed(error));
            }
        };
        if self.looks.queue.len() >= FOREIGN_CALL_QUEUE_MAX || self.waiting_for(mount) >= FOREIGN_CALL_QUEUE_MAX {
            self.dispose(vec![descriptor]);
            return Err(Unknown::Crowded);
        }
        let (answer, answered) = bounded(1);
        // Taken back when nobody waits any more, so that what has not had its turn by then holds no descriptor.
        let ours = Waiting { descriptor: Arc::new(Mutex::new(Some(descriptor))), pool: self };
        let theirs = Arc::clone(&ours.descriptor);
        self.submit_for(
            mount,
            Work::Look,
            Box::new(move || {
                let Some(descriptor) = lock(&theirs).take() else { return };
                let identity = directory::identify(&descriptor);
                let _ = answer.try_send((descriptor, identity));
            }),
        );
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
        for descriptor in descriptors {
            let mount =
                if directory::closes_at_once(&descriptor) { None } else { Some(directory::mount_of(&descriptor)) };
            let close: Job = Box::new(move || drop(descriptor));
            match mount {
                Some(Ok(mount)) => self.submit_for(mount, Work::Close, close),
                Some(Err(_)) | None => self.submit(Work::Close, close),
            }
        }
    }

    /// How many looks wait for a call on this mount to end.
    fn waiting_for(&self, mount: u64) -> usize {
        lock(&self.mounts).get(&mount).map_or(0, |turns| turns.looks.len())
    }

    /// A job that may hang as long as this mount does.
    fn submit_for(&self, mount: u64, work: Work, job: Job) {
        match lock(&self.mounts).entry(mount) {
            Entry::Occupied(mut turns) => return turns.get_mut().push(work, job),
            Entry::Vacant(place) => drop(place.insert_entry(Turns::default())),
        }
        let mounts = Arc::clone(&self.mounts);
        let all = move || {
            let mut next = Some(job);
            while let Some(job) = next {
                job();
                let mut mounts = lock(&mounts);
                next = mounts.get_mut(&mount).and_then(Turns::next);
                if next.is_none() {
                    mounts.remove(&mount);
                }
            }
        };
        self.submit(work, Box::new(all));
    }

    pub(super) fn submit(&self, work: Work, job: Job) {
        let start_one = {
            let mut threads = lock(&self.threads);
            threads.jobs += 1;
            let start_one = threads.jobs > threads.started && threads.started < FOREIGN_CALL_THREADS;
            if start_one {
                threads.started += 1;
            }
            start_one
        };
        if start_one {
            let (looks, closes) = (self.looks.queue.clone(), self.closes.queue.clone());
            let threads = Arc::clone(&self.threads);
            let started = std::thread::Builder::new().name(THREAD_NAME.to_owned()).spawn(move || {
                while let Ok(job) = block_on(looks.recv().or(closes.recv())) {
                    job();
                    lock(&threads).jobs -= 1;
                }
            });
            if started.is_err() {
                lock(&self.threads).started -= 1;
            }
        }
        // The queues have no bound of their own: each job holds a descriptor, and those are bounded.
        let lane = match work {
            Work::Look => &self.looks,
            Work::Close => &self.closes,
        };
        let _ = lane.jobs.try_send(job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};
    use std::path::Path;

    #[test]
    fn a_directory_and_a_file_are_told_apart() {
        let pool = Pool::new();
        for (path, is_directory) in [("/", true), ("/proc/self/exe", false)] {
            let descriptor = OwnedFd::from(std::fs::File::open(path).unwrap());
            let (_, identity) = smol::block_on(pool.identify(descriptor)).unwrap();
            assert_eq!(identity.unwrap().is_directory, is_directory, "{path}");
        }
    }

    /// Four starts on one dead mount took all four threads, and every directory after them was refused. Here the calls on
    /// one mount hang, and those on another are answered; what was given up holds no descriptor.
    #[test]
    fn a_mount_that_hangs_keeps_one_thread_and_one_descriptor() {
        let pool = Pool::new();
        let (release, released) = bounded::<()>(1);
        let open = |path: &str| rustix::fs::open(path, OFlags::DIRECTORY, Mode::empty()).unwrap();
        let hanging = directory::mount_of(open("/proc/sys")).unwrap();
        assert_ne!(hanging, directory::mount_of(open("/")).unwrap());
        for _ in 0..2 * FOREIGN_CALL_THREADS {
            let released = released.clone();
            pool.submit_for(
                hanging,
                Work::Look,
                Box::new(move || {
                    let _ = released.recv_blocking();
                }),
            );
        }
        let given_up = |_| {
            let asking = Box::pin(pool.identify(open("/proc/sys")));
            assert!(smol::block_on(smol::future::poll_once(asking)).is_none_or(|asked| asked.is_err()));
        };
        (0..20).for_each(given_up);

        assert!(smol::block_on(pool.identify(open("/"))).unwrap().1.unwrap().is_directory);
        let held = || {
            let open = std::fs::read_dir("/proc/self/fd").unwrap();
            open.filter(|entry| {
                std::fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|path| path == Path::new("/proc/sys"))
            })
            .count()
        };
        // They are closed by the threads that do not hang.
        let deadline = std::time::Instant::now() + FOREIGN_CALL_TIME;
        while held() > 0 && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(held(), 0);
        (0..FOREIGN_CALL_QUEUE_MAX).for_each(given_up);
        let asked = smol::block_on(pool.identify(open("/proc/sys")));
        assert!(matches!(asked, Err(Unknown::Crowded)), "{asked:?}");

        drop(release);
        while pool.waiting_for(hanging) > 0 {
            std::thread::yield_now();
        }
        assert!(smol::block_on(pool.identify(open("/proc/sys"))).is_ok());
    }

    /// A soak found it: descriptors that nobody had asked for waited to be closed, and a start was refused for their number.
    #[test]
    fn a_look_does_not_wait_for_descriptors_to_be_closed() {
        let pool = Pool::new();
        let (release, released) = bounded::<()>(1);
        let open = |path: &str| OwnedFd::from(std::fs::File::open(path).unwrap());
        // One thread is free; what is to be closed has come first, and more of it than looks may wait.
        for _ in 0..FOREIGN_CALL_THREADS - 1 {
            let released = released.clone();
            pool.submit(
                Work::Look,
                Box::new(move || {
                    let _ = released.recv_blocking();
                }),
            );
        }
        let closing = (0..10 * FOREIGN_CALL_QUEUE_MAX).map(|_| open("/proc/self/exe")).collect();
        pool.dispose(closing);
        pool.dispose((0..10 * FOREIGN_CALL_QUEUE_MAX).map(|_| open("/")).collect());

        assert!(block_on(pool.identify(open("/"))).unwrap().1.unwrap().is_directory);
        drop(release);
    }

    #[test]
    fn the_pool_never_has_more_threads_than_its_limit() {
        let pool = Pool::new();
        let (release, released) = bounded::<()>(1);
        for _ in 0..20 {
            let released = released.clone();
            pool.submit(
                Work::Close,
                Box::new(move || {
                    let _ = released.recv_blocking();
                }),
            );
        }
        assert_eq!(pool.threads.lock().unwrap().started, FOREIGN_CALL_THREADS);
        drop(release);
        let descriptor = OwnedFd::from(std::fs::File::open("/").unwrap());
        assert!(smol::block_on(pool.identify(descriptor)).is_ok());
    }
}
