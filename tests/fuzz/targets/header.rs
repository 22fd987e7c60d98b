//! The twelve bytes of a frame's header. `support::decoders` says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    support::decoders::header(bytes);
});
