//! Frames: what travels on the supervisor's socket and on the hand-over to the launcher.
//!
//! ```text
//!  0      1      2      3      4      5      6      7      8      9      10     11
//! +------+------+------+------+------+------+------+------+------+------+------+------+---------
//! | 'O'  | 'P'  | 'T'  | 'Y'  |  1   | kind |  0   |  0   |   payload length, u32     | payload
//! +------+------+------+------+------+------+------+------+------+------+------+------+---------
//! ```
//!
//! All integers are unsigned and big-endian. Decoders are pure: they take bytes and give a value or an error
//! that carries what was wrong. Rules of evolution: kinds and error codes are never given another meaning and
//! never reused; anything unknown is refused; a change of layout is a new version, which an old reader refuses.
//! `docs/protocol.md` changes with this file, and a test decodes the examples on that page.

pub mod message;
pub mod words;

use std::fmt;

use crate::limits::{DATA_BYTES_MAX, ERROR_BYTES_MAX, FRAME_HEADER_BYTES, FRAME_PAYLOAD_BYTES_MAX};

/// The first four bytes of every frame.
pub const MAGIC: [u8; 4] = *b"OPTY";
/// The protocol's version, byte 4.
pub const VERSION: u8 = 1;

/// What a frame is: byte 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// To the supervisor: what to run and where. First, exactly once, with one descriptor.
    Start = 1,
    /// To the supervisor: bytes typed.
    Input = 2,
    /// To the client: bytes shown.
    Output = 3,
    /// To the client: how the session ended.
    Exit = 4,
    /// To the client: why there is no session, or none any more.
    Error = 5,
    /// To the client: the unit's name; from the launcher: the isolation in force.
    Started = 6,
    /// To the supervisor: stop the unit and wait for it.
    Stop = 7,
    /// To the client: the stop that was asked for is complete.
    Stopped = 8,
}

impl Kind {
    /// The kind with this number, if there is one.
    pub fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Start,
            2 => Self::Input,
            3 => Self::Output,
            4 => Self::Exit,
            5 => Self::Error,
            6 => Self::Started,
            7 => Self::Stop,
            8 => Self::Stopped,
            _ => return None,
        })
    }

    /// The shortest and longest payload a frame of this kind may have, bytes.
    fn payload_bounds(self) -> (usize, usize) {
        match self {
            Self::Start => (message::START_FIXED_BYTES + 1, FRAME_PAYLOAD_BYTES_MAX),
            Self::Input | Self::Output => (1, DATA_BYTES_MAX),
            Self::Exit => (message::EXIT_FIXED_BYTES, FRAME_PAYLOAD_BYTES_MAX),
            Self::Error => (1, ERROR_BYTES_MAX),
            Self::Started => (1, 256),
            Self::Stop | Self::Stopped => (0, 0),
        }
    }
}

/// A frame's first twelve bytes, decoded: its kind, and a payload length within that kind's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    kind: Kind,
    len: usize,
}

impl Header {
    /// The header of a frame whose payload has `len` bytes, or an error if this kind can't have that many.
    pub fn new(kind: Kind, len: usize) -> Result<Self, DecodeError> {
        let (min, max) = kind.payload_bounds();
        if len < min {
            return Err(DecodeError::PayloadTooShort { kind, len });
        }
        if len > max {
            return Err(DecodeError::PayloadTooLong { len });
        }
        Ok(Self { kind, len })
    }

    /// Decodes twelve bytes. The length is compared with the kind's limit here, before anyone allocates for it.
    pub fn decode(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<Self, DecodeError> {
        let [m0, m1, m2, m3, version, number, r0, r1, l0, l1, l2, l3] = *bytes;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(DecodeError::Magic { found: [m0, m1, m2, m3] });
        }
        if version != VERSION {
            return Err(DecodeError::Version { found: version });
        }
        if [r0, r1] != [0, 0] {
            return Err(DecodeError::Reserved { found: [r0, r1] });
        }
        let kind = Kind::from_number(number).ok_or(DecodeError::UnknownKind { number })?;
        let len = u32::from_be_bytes([l0, l1, l2, l3]);
        Self::new(kind, usize::try_from(len).unwrap_or(usize::MAX))
    }

    /// The twelve bytes.
    pub fn encode(self) -> [u8; FRAME_HEADER_BYTES] {
        let [m0, m1, m2, m3] = MAGIC;
        let len = u32::try_from(self.len).expect("a header's length is within its kind's bounds");
        let [l0, l1, l2, l3] = len.to_be_bytes();
        [m0, m1, m2, m3, VERSION, self.kind as u8, 0, 0, l0, l1, l2, l3]
    }

    /// What the frame is.
    pub fn kind(self) -> Kind {
        self.kind
    }

    /// Bytes of payload that follow.
    pub fn payload_len(self) -> usize {
        self.len
    }
}

/// A whole frame: header and payload in one buffer.
pub fn encode(kind: Kind, payload: &[u8]) -> Result<Vec<u8>, DecodeError> {
    let header = Header::new(kind, payload.len())?;
    let mut frame = Vec::with_capacity(FRAME_HEADER_BYTES + payload.len());
    frame.extend_from_slice(&header.encode());
    frame.extend_from_slice(payload);
    Ok(frame)
}

/// Why bytes are not a frame, or a payload not what its kind says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// The first four bytes are not [`MAGIC`].
    Magic {
        /// What stood there.
        found: [u8; 4],
    },
    /// A version this program does not speak.
    Version {
        /// What stood there.
        found: u8,
    },
    /// The reserved bytes are not zero.
    Reserved {
        /// What stood there.
        found: [u8; 2],
    },
    /// A kind this version does not have.
    UnknownKind {
        /// Its number.
        number: u8,
    },
    /// A kind that does not travel in this direction, or not now.
    UnexpectedKind {
        /// The kind.
        kind: Kind,
    },
    /// A payload shorter than its kind's shortest.
    PayloadTooShort {
        /// The kind.
        kind: Kind,
        /// Its length, bytes.
        len: usize,
    },
    /// A payload longer than its kind's longest.
    PayloadTooLong {
        /// Its length, bytes.
        len: usize,
    },
    /// The parts of a payload do not add up to the whole.
    Length {
        /// Bytes the parts ask for.
        want: usize,
        /// Bytes there are.
        have: usize,
    },
    /// A part is empty or longer than it may be.
    PartLength {
        /// Which part.
        part: &'static str,
        /// Its length, bytes (or its number, for a count).
        len: usize,
    },
    /// A part is not UTF-8, or has a NUL byte.
    Text {
        /// Which part.
        part: &'static str,
    },
    /// A runtime above the limit.
    Runtime {
        /// What was asked for, seconds.
        seconds: u32,
    },
    /// A number without a meaning.
    Number {
        /// Which part.
        part: &'static str,
        /// What stood there.
        number: u32,
    },
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic { found } => write!(f, "not a frame: it begins with '{}'", found.escape_ascii()),
            Self::Version { found } => write!(f, "protocol version {found} instead of {VERSION}"),
            Self::Reserved { found: [a, b] } => write!(f, "reserved bytes {a} {b} instead of 0 0"),
            Self::UnknownKind { number } => write!(f, "unknown frame type {number}"),
            Self::UnexpectedKind { kind } => write!(f, "frame type {} is not expected here", *kind as u8),
            Self::PayloadTooShort { kind, len } => {
                write!(f, "a payload of {len} bytes is too short for frame type {}", *kind as u8)
            }
            Self::PayloadTooLong { len } => write!(f, "a payload of {len} bytes is over the limit"),
            Self::Length { want, have } => write!(f, "the parts need {want} bytes, the payload has {have}"),
            Self::PartLength { part, len } => write!(f, "{part}: {len} is not within its limits"),
            Self::Text { part } => write!(f, "{part}: not UTF-8, or a NUL byte in it"),
            Self::Runtime { seconds } => write!(f, "a runtime of {seconds} s is over the limit"),
            Self::Number { part, number } => write!(f, "{part}: {number} has no meaning"),
        }
    }
}

impl std::error::Error for DecodeError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: u8, len: u32) -> [u8; 12] {
        let [a, b, c, d] = len.to_be_bytes();
        [b'O', b'P', b'T', b'Y', 1, kind, 0, 0, a, b, c, d]
    }

    #[test]
    fn every_header_that_can_be_made_comes_back_as_it_was() {
        for number in 1..=8 {
            let kind = Kind::from_number(number).unwrap();
            assert_eq!(kind as u8, number);
            let (min, max) = kind.payload_bounds();
            for len in [min, max] {
                let made = Header::new(kind, len).unwrap();
                assert_eq!(Header::decode(&made.encode()), Ok(made));
            }
        }
    }

    #[test]
    fn a_payload_over_the_limit_is_refused_before_it_is_read() {
        for (kind, len) in
            [(1, 71_681), (2, 32_769), (3, 32_769), (4, 71_681), (5, 32_769), (7, 1), (8, 1), (2, u32::MAX)]
        {
            let decoded = Header::decode(&header(kind, len));
            assert_eq!(decoded, Err(DecodeError::PayloadTooLong { len: len as usize }), "kind {kind}");
        }
    }

    #[test]
    fn an_empty_input_is_refused() {
        let decoded = Header::decode(&header(2, 0));
        assert_eq!(decoded, Err(DecodeError::PayloadTooShort { kind: Kind::Input, len: 0 }));
    }

    #[test]
    fn each_wrong_byte_of_a_header_is_named() {
        let good = header(2, 1);
        for (at, value, want) in [
            (0, b'o', DecodeError::Magic { found: *b"oPTY" }),
            (3, b'y', DecodeError::Magic { found: *b"OPTy" }),
            (4, 2, DecodeError::Version { found: 2 }),
            (5, 0, DecodeError::UnknownKind { number: 0 }),
            (5, 9, DecodeError::UnknownKind { number: 9 }),
            (6, 1, DecodeError::Reserved { found: [1, 0] }),
            (7, 255, DecodeError::Reserved { found: [0, 255] }),
        ] {
            let mut bytes = good;
            bytes[at] = value;
            assert_eq!(Header::decode(&bytes), Err(want));
        }
    }
}
