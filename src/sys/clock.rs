//! The clock that systemd's monotonic timestamps are of.

use rustix::time::{ClockId, clock_gettime};

/// CLOCK_MONOTONIC, microseconds.
pub fn monotonic_usec() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let part = |number: i64| u64::try_from(number).unwrap_or_default();
    part(now.tv_sec) * 1_000_000 + part(now.tv_nsec) / 1_000
}
