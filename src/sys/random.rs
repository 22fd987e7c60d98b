//! Random bits from the kernel.
//!
//! By the system call itself: the `getrandom` crate looks the C library's function up at run time, and where the binary
//! is static it finds none and keeps `/dev/urandom` open instead, which fails when descriptors run out.

use std::io;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// 128 random bits.
pub fn bits_128() -> io::Result<[u8; 16]> {
    let mut bits = [0; 16];
    loop {
        match getrandom(&mut bits, GetRandomFlags::empty()) {
            // A request of up to 256 bytes is never cut short (getrandom(2)).
            Ok(16) => return Ok(bits),
            Err(Errno::INTR) => {}
            Ok(_) => return Err(Errno::IO.into()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_others_each_time() {
        assert_ne!(bits_128().unwrap(), bits_128().unwrap());
    }
}
