//! Waiting: a value that tasks of one thread can wait on (the latest state, never a queue), and deadlines.
//!
//! Events of the bus, of the kernel and of the client end up in such cells; a session looks at the latest value
//! whenever it is woken, so nothing can pile up and nobody waits for a slow reader.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

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
    wakers: RefCell<Vec<Waker>>,
}

impl<T> Clone for Watched<T> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<T> Watched<T> {
    /// A cell with a first value.
    pub fn new(value: T) -> Self {
        Self(Rc::new(Inner { value: RefCell::new(value), version: Cell::new(0), wakers: RefCell::default() }))
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
        for waker in self.0.wakers.take() {
            waker.wake();
        }
        result
    }

    /// Replaces the value and wakes everyone who waits.
    pub fn set(&self, value: T) {
        self.change(|old| *old = value);
    }

    /// Waits until `look` finds what it wants in the value, now or after a change.
    pub async fn wait_for<R>(&self, mut look: impl FnMut(&T) -> Option<R>) -> R {
        // A waiter keeps one waker here at most: it adds one only when the value changed since its last look.
        let mut seen = None;
        let mut registered: Option<Waker> = None;
        poll_fn(|context| {
            let version = self.0.version.get();
            if seen != Some(version) {
                if let Some(found) = look(&self.0.value.borrow()) {
                    return Poll::Ready(found);
                }
                seen = Some(version);
                registered = None;
            }
            if !registered.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
                let mut wakers = self.0.wakers.borrow_mut();
                if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                    wakers.push(context.waker().clone());
                }
                registered = Some(context.waker().clone());
            }
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

    #[test]
    fn a_task_that_waits_again_and_again_leaves_one_waker() {
        let cell = Watched::new(0);
        smol::block_on(async {
            for _ in 0..100 {
                let waiting = async {
                    cell.wait_for(|value| (*value > 0).then_some(())).await;
                };
                waiting.or(future::yield_now()).await;
            }
        });
        assert_eq!(cell.0.wakers.borrow().len(), 1);
    }
}
