//! A client's whole say: bytes in any pieces, with any descriptors. `support::connection_model` says what must come of it.
#![no_main]

use support::connection_model::{Scenario, check};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    check(Scenario::from_bytes(bytes));
});
