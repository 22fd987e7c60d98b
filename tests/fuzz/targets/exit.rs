//! An exit frame's payload. `support::decoders` says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    support::decoders::exit(bytes);
});
