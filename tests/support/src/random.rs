//! Random numbers that are the same on every run, from a seed a test can print.

/// A generator. The numbers are SplitMix64's: fine for choosing inputs, and for nothing else.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator for this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The seed in `OPENCODE_PTY_SEED`, or else `default`.
    pub fn seed(default: u64) -> u64 {
        std::env::var("OPENCODE_PTY_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(default)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        number ^ number >> 31
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.number() % limit as u64).expect("it is below a usize")
    }

    /// True once in `times`.
    pub fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// A byte.
    pub fn byte(&mut self) -> u8 {
        self.number().to_be_bytes()[0]
    }

    /// Any bytes, fewer than `limit`.
    pub fn bytes(&mut self, limit: usize) -> Vec<u8> {
        (0..self.below(limit)).map(|_| self.byte()).collect()
    }

    /// One of these.
    pub fn choose<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        let at = self.below(from.len());
        from.get(at).expect("below gives less than the length")
    }

    /// A few small changes: bits, interesting bytes and numbers, bytes more and fewer, parts cut off, doubled or moved.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(3) {
            if bytes.is_empty() {
                bytes.push(self.byte());
                continue;
            }
            let at = self.below(bytes.len());
            match self.below(9) {
                0 => self.overwrite(bytes, at, |random, old| vec![old ^ 1 << random.below(8)]),
                1 => self.overwrite(bytes, at, |random, _| vec![*random.choose(b"\0\x01\n:\x7f\x80\xff")]),
                2 => self.overwrite(bytes, at, |random, old| vec![old.wrapping_add(*random.choose(&[1, 0xff]))]),
                3 => self.overwrite(bytes, at, |random, _| {
                    let edge =
                        *random.choose(&[0, 1, 128, 129, 255, 256, 4_096, 4_097, 16_384, 16_385, 32_768, 32_769]);
                    u16::to_be_bytes(edge).to_vec()
                }),
                4 => self.overwrite(bytes, at, |random, _| {
                    let edge = *random.choose(&[0, 1, 25, 3_600, 3_601, 71_680, 71_681, u32::MAX]);
                    u32::to_be_bytes(edge).to_vec()
                }),
                5 => bytes.insert(at, self.byte()),
                6 => drop(bytes.remove(at)),
                7 => bytes.truncate(at),
                _ => {
                    let tail = bytes.split_off(at);
                    bytes.extend_from_slice(&tail);
                    bytes.extend(tail);
                }
            }
        }
    }

    fn overwrite(&mut self, bytes: &mut [u8], at: usize, new: impl FnOnce(&mut Self, u8) -> Vec<u8>) {
        let places = bytes.get_mut(at..).unwrap_or_default();
        let old = places.first().copied().unwrap_or_default();
        for (place, byte) in places.iter_mut().zip(new(self, old)) {
            *place = byte;
        }
    }
}
