//! Slots and quotas: who may wait, who is turned away. Pure: time comes in as an argument.
//!
//! The server is bounded by its session slots alone; the quota is for everybody else. While nobody knows which process
//! is the server, anyone may be: then there is no quota to run out of, and a process has no more places than are free:
//! alone it gets half of them, and beside others that flood there is always one left for one more. A slot
//! is a value: whoever holds it has it, and dropping it gives it back.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::peer::Peer;
use crate::limits::{HANDSHAKES_MAX, STRANGERS_PER_MINUTE};
use crate::wait::Watched;

/// The counters. Clones share them.
#[derive(Clone, Debug)]
pub struct Admission(Watched<Counters>);

#[derive(Debug)]
struct Counters {
    sessions_max: usize,
    sessions: usize,
    handshakes: usize,
    /// How many of the handshakes are whose.
    by_process: HashMap<u32, usize>,
    strangers: Bucket,
}

/// Who connects, as far as its pid tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The server's main process.
    Server,
    /// Another process than the server's main process, which is known and runs.
    Stranger(u32),
    /// No main process of the server is known to run: it may have been started a moment ago.
    Unknown(u32),
}

/// Why a connection is turned away before anything is known of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Too many strangers in the last minute.
    Rate,
    /// Too many connections are being authenticated.
    Crowded,
}

impl Admission {
    /// No session, no handshake, a full quota.
    pub fn new(sessions_max: usize, now: Instant) -> Self {
        let strangers = Bucket { tokens: f64::from(STRANGERS_PER_MINUTE), filled: now };
        let by_process = HashMap::new();
        Self(Watched::new(Counters { sessions_max, sessions: 0, handshakes: 0, by_process, strangers }))
    }

    /// A place to be authenticated in. A stranger pays from the quota; the server does not, and the places strangers
    /// hold are not its. Who may be the server is not refused for what others did, as long as those are few processes.
    pub fn arrive(&self, caller: Caller, now: Instant) -> Result<Handshake, Refused> {
        let pid = match caller {
            Caller::Server => return Ok(Handshake { admission: self.clone(), counted_for: None }),
            Caller::Stranger(pid) | Caller::Unknown(pid) => pid,
        };
        self.0.change(|counters| {
            if counters.handshakes >= HANDSHAKES_MAX {
                return Err(Refused::Crowded);
            }
            let has_quota = counters.strangers.take(now);
            let own = counters.by_process.get(&pid).copied().unwrap_or(0);
            match caller {
                Caller::Unknown(_) if own >= HANDSHAKES_MAX - counters.handshakes => return Err(Refused::Crowded),
                Caller::Stranger(_) if !has_quota => return Err(Refused::Rate),
                _ => {}
            }
            counters.handshakes += 1;
            counters.by_process.insert(pid, own + 1);
            Ok(())
        })?;
        Ok(Handshake { admission: self.clone(), counted_for: Some(pid) })
    }

    /// A session slot for an authenticated peer; `None` when all are taken.
    pub fn reserve(&self, _peer: &Peer) -> Option<Slot> {
        let free = self.0.with(|counters| counters.sessions < counters.sessions_max);
        free.then(|| {
            self.0.change(|counters| counters.sessions += 1);
            Slot(self.clone())
        })
    }

    /// A slot for what an earlier supervisor left behind and nobody can end. There may be more of these than slots.
    pub fn occupy(&self) -> Slot {
        self.0.change(|counters| counters.sessions += 1);
        Slot(self.clone())
    }

    /// Sessions now, and at most.
    pub fn sessions(&self) -> (usize, usize) {
        self.0.with(|counters| (counters.sessions, counters.sessions_max))
    }

    /// Waits until the number of sessions is not `known` any more, and gives it.
    pub async fn sessions_changed(&self, known: usize) -> usize {
        self.0.wait_for(|counters| (counters.sessions != known).then_some(counters.sessions)).await
    }
}

/// A place among those who are being authenticated.
#[derive(Debug)]
pub struct Handshake {
    admission: Admission,
    /// The process it counts for; the server's do not count.
    counted_for: Option<u32>,
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let Some(pid) = self.counted_for else { return };
        self.admission.0.change(|counters| {
            counters.handshakes -= 1;
            let left = counters.by_process.get(&pid).map_or(0, |own| own - 1);
            if left == 0 {
                counters.by_process.remove(&pid);
            } else {
                counters.by_process.insert(pid, left);
            }
        });
    }
}

/// A session's slot.
#[derive(Debug)]
pub struct Slot(Admission);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.0.change(|counters| counters.sessions -= 1);
    }
}

/// A token bucket: [`STRANGERS_PER_MINUTE`] at once, and as many again in a minute.
#[derive(Debug)]
struct Bucket {
    tokens: f64,
    filled: Instant,
}

impl Bucket {
    fn take(&mut self, now: Instant) -> bool {
        let most = f64::from(STRANGERS_PER_MINUTE);
        let elapsed = now.saturating_duration_since(self.filled);
        self.filled = now;
        self.tokens = (self.tokens + most * elapsed.as_secs_f64() / 60.0).min(most);
        let granted = self.tokens >= 1.0;
        if granted {
            self.tokens -= 1.0;
        }
        granted
    }
}

/// Lines about refusals: one at a time, with a count of those in between.
#[derive(Debug, Default)]
pub struct RefusalLog {
    last: Option<Instant>,
    held_back: u64,
}

impl RefusalLog {
    /// Counts a refusal. Gives the number of refusals a line now should speak of, or `None` if it is too early.
    pub fn note(&mut self, now: Instant, interval: Duration) -> Option<u64> {
        self.held_back += 1;
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < interval) {
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::SESSIONS_MAX_DEFAULT;

    const STRANGER: Caller = Caller::Stranger(7);

    #[test]
    fn strangers_have_a_quota_and_the_server_has_none() {
        let start = Instant::now();
        let admission = Admission::new(16, start);
        for _ in 0..STRANGERS_PER_MINUTE {
            assert!(admission.arrive(STRANGER, start).is_ok());
        }
        assert_eq!(admission.arrive(STRANGER, start).err(), Some(Refused::Rate));
        for _ in 0..1_000 {
            assert!(admission.arrive(Caller::Server, start).is_ok());
        }
        assert!(admission.arrive(STRANGER, start + Duration::from_secs(1)).is_ok());
    }

    #[test]
    fn strangers_share_the_places_and_give_them_back() {
        let start = Instant::now();
        let admission = Admission::new(16, start);
        let places: Vec<_> = (0..HANDSHAKES_MAX).map(|_| admission.arrive(STRANGER, start).unwrap()).collect();
        assert_eq!(admission.arrive(STRANGER, start).err(), Some(Refused::Crowded));
        assert!(admission.arrive(Caller::Server, start).is_ok());
        drop(places);
        assert!(admission.arrive(STRANGER, start).is_ok());
        assert!(admission.0.with(|counters| counters.by_process.is_empty()));
    }

    fn take_all(admission: &Admission, pid: u32, now: Instant) -> Vec<Handshake> {
        std::iter::from_fn(|| admission.arrive(Caller::Unknown(pid), now).ok()).collect()
    }

    /// A server that connected right after its start was refused, since strangers had used up the quota.
    #[test]
    fn who_may_be_the_server_is_not_refused_for_what_others_did() {
        let start = Instant::now();
        let admission = Admission::new(16, start);
        while admission.arrive(STRANGER, start).is_ok() {}
        let mut places = Vec::new();
        for pid in 1..=4 {
            places.extend(take_all(&admission, pid, start));
            assert!(admission.arrive(Caller::Unknown(99), start).is_ok());
            assert_eq!(admission.arrive(Caller::Unknown(pid), start).err(), Some(Refused::Crowded));
        }
        drop(places);
        assert!(admission.arrive(Caller::Unknown(3), start).is_ok());
    }

    /// A server that opened sixteen sessions before its main process was known got fifteen, or eight.
    #[test]
    fn a_server_not_known_yet_may_open_all_its_sessions_at_once() {
        let start = Instant::now();
        let admission = Admission::new(SESSIONS_MAX_DEFAULT, start);
        assert_eq!(take_all(&admission, 1, start).len(), SESSIONS_MAX_DEFAULT);
    }

    #[test]
    fn a_slot_comes_back_when_it_is_dropped() {
        let admission = Admission::new(1, Instant::now());
        let peer = Peer::for_tests();
        let slot = admission.reserve(&peer).unwrap();
        assert!(admission.reserve(&peer).is_none());
        drop(slot);
        assert!(admission.reserve(&peer).is_some());
    }

    #[test]
    fn a_burst_of_refusals_is_one_line_and_a_count() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut log = RefusalLog::default();
        assert_eq!(log.note(start, second), Some(1));
        for _ in 0..9 {
            assert_eq!(log.note(start, second), None);
        }
        assert_eq!(log.note(start + second, second), Some(10));
    }
}
