//! Buffers that exist only while bytes are in them, so that an idle session has none.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use crate::limits::{DATA_BYTES_MAX, FRAME_HEADER_BYTES, INPUT_PENDING_BYTES_MAX};

/// Bytes of one buffer: a whole data frame, or all pending input.
const BUFFER_BYTES: usize = if FRAME_HEADER_BYTES + DATA_BYTES_MAX > INPUT_PENDING_BYTES_MAX {
    FRAME_HEADER_BYTES + DATA_BYTES_MAX
} else {
    INPUT_PENDING_BYTES_MAX
};
/// Buffers kept for the next who needs one. Chosen.
const SPARE_MAX: usize = 4;

thread_local! {
    static SPARE: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer; dropping it gives it back.
#[derive(Debug)]
pub struct Buffer(Box<[u8]>);

impl Buffer {
    /// A buffer with unspecified content.
    pub fn take() -> Self {
        let spare = SPARE.with_borrow_mut(Vec::pop);
        Self(spare.unwrap_or_else(|| vec![0; BUFFER_BYTES].into_boxed_slice()))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.0);
        SPARE.with_borrow_mut(|spare| {
            if spare.len() < SPARE_MAX {
                spare.push(bytes);
            }
        });
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Bytes on their way, first in, first out; at most [`INPUT_PENDING_BYTES_MAX`].
#[derive(Debug, Default)]
pub struct ByteQueue {
    buffer: Option<Buffer>,
    start: usize,
    end: usize,
}

impl ByteQueue {
    /// Bytes that still fit.
    pub fn space(&self) -> usize {
        INPUT_PENDING_BYTES_MAX - (self.end - self.start)
    }

    /// Whether nothing is on its way.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.as_ref().and_then(|buffer| buffer.get(self.start..self.end)).unwrap_or_default()
    }

    /// Adds bytes, which must fit.
    pub fn push(&mut self, bytes: &[u8]) {
        debug_assert!(bytes.len() <= self.space());
        let buffer = self.buffer.get_or_insert_with(Buffer::take);
        if self.end + bytes.len() > INPUT_PENDING_BYTES_MAX {
            buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let end = self.end + bytes.len();
        if let Some(place) = buffer.get_mut(self.end..end) {
            place.copy_from_slice(bytes);
            self.end = end;
        }
    }

    /// Takes `count` bytes away from the front.
    pub fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
        if self.is_empty() {
            *self = Self::default();
        }
    }

    /// Takes everything away.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_as_they_went_in_whatever_the_pieces() {
        let mut queue = ByteQueue::default();
        let (mut next_in, mut next_out) = (0_u8, 0_u8);
        let mut random = 1_u32;
        for _ in 0..10_000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let count = (random >> 8) as usize % 40_000;
            let mut piece = vec![0; count.min(queue.space())];
            for byte in &mut piece {
                *byte = next_in;
                next_in = next_in.wrapping_add(1);
            }
            queue.push(&piece);
            let take = ((random >> 4) as usize % 50_000).min(queue.bytes().len());
            for byte in &queue.bytes()[..take] {
                assert_eq!(*byte, next_out);
                next_out = next_out.wrapping_add(1);
            }
            queue.consume(take);
        }
    }

    #[test]
    fn an_empty_queue_has_no_buffer_and_a_full_one_no_space() {
        let mut queue = ByteQueue::default();
        queue.push(&vec![7; INPUT_PENDING_BYTES_MAX]);
        assert_eq!(queue.space(), 0);
        queue.consume(INPUT_PENDING_BYTES_MAX);
        assert!(queue.buffer.is_none());
        assert_eq!(queue.space(), INPUT_PENDING_BYTES_MAX);
    }
}
