//! Waiting: a value that tasks of one thread can wait on (the latest state, never a queue), and deadlines.
//!
//! Events of the bus, of the kernel and of the client end up in such cells; a session looks at the latest value
//! whenever it is woken, so nothing can pile up and nobody waits for a slow reader.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use slab::Slab;
use smol::Timer;
use smol::future::FutureExt;

/// What `work` gives, or `None` if it takes longer than `limit`.
pub async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    until(Instant::now() + limit, work).await
}

/// What `work` gives, or `None` if it is not there by `deadline`.
pub async fn until<T>(deadline: Instant, work: impl Future<Output = T>) -> Option<T> {
    async { Some(work.await) }
        .or(async {
            Timer::at(deadline).await;
            None
        })
        .await
}

/// A shared value with waiters. Clones share it.
#[derive(Debug, Default)]
pub struct Watched<T>(Rc<Inner<T>>);

#[derive(Debug, Default)]
struct Inner<T> {
    value: RefCell<T>,
    version: Cell<u64>,
    waiters: Waiters,
}

/// Who waits: a place for each, empty once it has been woken.
#[derive(Debug, Default)]
struct Waiters(RefCell<Slab<Option<Waker>>>);

impl Waiters {
    fn wake_all(&self) {
        // Not borrowed while one is woken: that may drop the last of a task, and with it places of its own.
        let next = || self.0.borrow_mut().iter_mut().find_map(|(_, waker)| waker.take());
        while let Some(waker) = next() {
            waker.wake();
        }
    }
}

/// A waiter's place. Given back when the waiter is dropped: who waits in vain would keep its task's memory otherwise.
struct Place<'a> {
    waiters: &'a Waiters,
    key: Option<usize>,
}

impl Place<'_> {
    fn register(&mut self, waker: &Waker) {
        let mut waiters = self.waiters.0.borrow_mut();
        let other = match self.key.and_then(|key| waiters.get_mut(key)) {
            Some(Some(known)) if known.will_wake(waker) => None,
            Some(place) => place.replace(waker.clone()),
            None => {
                self.key = Some(waiters.insert(Some(waker.clone())));
                None
            }
        };
        drop(waiters);
        // The last of a task may go with it, so not while borrowed.
        drop(other);
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let waker = self.key.and_then(|key| self.waiters.0.borrow_mut().try_remove(key));
        drop(waker);
    }
}

impl<T> Clone for Watched<T> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<T> Watched<T> {
    /// A cell with a first value.
    pub fn new(value: T) -> Self {
        Self(Rc::new(Inner { value: RefCell::new(value), version: Cell::new(0), waiters: Waiters::default() }))
    }

    /// Looks at the value.
    pub fn with<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&self.0.value.borrow())
    }

    /// A copy of the value.
    pub fn get(&self) -> T
    where
        T: Clone,
    {
        self.0.value.borrow().clone()
    }

    /// Changes the value and wakes everyone who waits.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.0.value.borrow_mut());
        self.0.version.set(self.0.version.get() + 1);
        self.0.waiters.wake_all();
        result
    }

    /// Replaces the value and wakes everyone who waits.
    pub fn set(&self, value: T) {
        self.change(|old| *old = value);
    }

    /// Waits until `look` finds what it wants in the value, now or after a change.
    pub async fn wait_for<R>(&self, mut look: impl FnMut(&T) -> Option<R>) -> R {
        let mut seen = None;
        let mut place = Place { waiters: &self.0.waiters, key: None };
        poll_fn(|context| {
            let version = self.0.version.get();
            if seen != Some(version) {
                if let Some(found) = look(&self.0.value.borrow()) {
                    return Poll::Ready(found);
                }
                seen = Some(version);
            }
            place.register(context.waker());
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smol::future;

    #[test]
    fn a_waiter_sees_the_latest_value_and_not_each_one() {
        let cell = Watched::new(0);
        let seen = smol::block_on(future::zip(cell.wait_for(|value| (*value >= 2).then_some(*value)), async {
            cell.set(1);
            future::yield_now().await;
            cell.set(2);
            cell.set(3);
        }));
        assert_eq!(seen.0, 3);
    }

    /// The supervisor grew by the task of every connection there had been: each had waited for a shutdown.
    #[test]
    fn who_waited_in_vain_leaves_nothing() {
        let cell = Watched::new(0);
        smol::block_on(async {
            for _ in 0..100 {
                let waiting = async {
                    cell.wait_for(|value| (*value > 0).then_some(())).await;
                };
                waiting.or(future::yield_now()).await;
            }
        });
        assert!(cell.0.waiters.0.borrow().is_empty());
    }

    #[test]
    fn a_woken_task_that_ends_with_others_of_the_same_cell_disturbs_nobody() {
        let cell = Watched::new(0);
        let executor = smol::LocalExecutor::new();
        let wait = |least: i32| {
            let cell = cell.clone();
            async move { cell.wait_for(|value| (*value >= least).then_some(*value)).await }
        };
        let (first, second) = (executor.spawn(wait(1)), executor.spawn(wait(2)));
        // Waits for both; the one that is done takes the other with it.
        let either = executor.spawn(wait(2).or(wait(1)));
        smol::block_on(executor.run(async {
            future::yield_now().await;
            assert_eq!(cell.0.waiters.0.borrow().len(), 4);
            cell.set(1);
            assert_eq!((first.await, either.await), (1, 1));
            assert_eq!(cell.0.waiters.0.borrow().len(), 1);
            cell.set(2);
            assert_eq!(second.await, 2);
        }));
        assert!(cell.0.waiters.0.borrow().is_empty());
    }
}
