//! What goes through the port between a VM and the machine outside: kind (a byte), length (u32, big-endian), payload.
//!
//! Zeros between frames mean nothing. Who comes first sends [`FILLING`]: if the one before was cut off in a frame, that ends it.

use std::io::{self, Read, Write};

/// Longest payload. Chosen: what one read of a pipe gives.
pub(super) const PAYLOAD_BYTES_MAX: usize = 64 << 10;

/// How many zeros end whatever frame has begun.
const FILLING: usize = PAYLOAD_BYTES_MAX + 5;

/// A piece of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// To the agent: are you there? The payload comes back.
    Ping,
    /// The payload of a ping.
    Pong,
    /// To the agent: run these words, each ended by NUL.
    Run,
    /// To the agent: bytes for the command's standard input; none: its end.
    Input,
    /// Bytes of its standard output.
    Output,
    /// Bytes of its standard error.
    Complaint,
    /// It ended; its wait status, an i32.
    Ended,
}

impl Kind {
    const ALL: [(Self, u8); 7] = [
        (Self::Ping, b'?'),
        (Self::Pong, b'!'),
        (Self::Run, b'x'),
        (Self::Input, b'i'),
        (Self::Output, b'o'),
        (Self::Complaint, b'e'),
        (Self::Ended, b'z'),
    ];

    fn byte(self) -> u8 {
        Self::ALL.into_iter().find(|(kind, _)| *kind == self).map_or(0, |(_, byte)| byte)
    }
}

/// A frame as bytes.
pub(super) fn encode(kind: Kind, payload: &[u8]) -> io::Result<Vec<u8>> {
    if payload.len() > PAYLOAD_BYTES_MAX {
        return Err(io::Error::other("too long a payload"));
    }
    let mut bytes = vec![kind.byte()];
    bytes.extend_from_slice(&u32::try_from(payload.len()).map_err(io::Error::other)?.to_be_bytes());
    bytes.extend_from_slice(payload);
    Ok(bytes)
}

/// Writes a frame in one piece.
pub(super) fn write(mut to: impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    to.write_all(&encode(kind, payload)?)
}

/// Writes what a conversation begins with, in one piece: whatever the one before has left is over.
pub(super) fn open(mut to: impl Write, nonce: &[u8]) -> io::Result<()> {
    let mut bytes = vec![0; FILLING];
    bytes.extend_from_slice(&encode(Kind::Ping, nonce)?);
    to.write_all(&bytes)
}

/// Reads a frame; `UnexpectedEof` when the other side has gone. After another error the next call goes on behind it.
pub(super) fn read(mut from: impl Read) -> io::Result<(Kind, Vec<u8>)> {
    let mut byte = [0];
    while byte == [0] {
        from.read_exact(&mut byte)?;
    }
    let known = Kind::ALL.into_iter().find(|(_, known)| [*known] == byte);
    let (kind, _) = known.ok_or_else(|| io::Error::other(format!("not a frame: it begins with {byte:?}")))?;
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_be_bytes(len) as usize;
    if len > PAYLOAD_BYTES_MAX {
        return Err(io::Error::other(format!("a frame of {len} bytes")));
    }
    let mut payload = vec![0; len];
    from.read_exact(&mut payload)?;
    Ok((kind, payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_comes_through() {
        for (kind, _) in Kind::ALL {
            let bytes = encode(kind, b"payload").expect("it is short");
            assert_eq!(read(bytes.as_slice()).expect("it is whole"), (kind, b"payload".to_vec()));
        }
    }

    /// A VM was never heard of again: what it had been sent ended in the middle of a frame, and swallowed every ping after it.
    #[test]
    fn a_conversation_begins_whatever_the_one_before_was_cut_off_in() {
        let cut = encode(Kind::Input, &vec![b'?'; PAYLOAD_BYTES_MAX]).expect("it is short");
        for sent in [0, 1, 3, 5, 6, 1_000, cut.len() - 1, cut.len()] {
            let mut bytes = cut[..sent].to_vec();
            open(&mut bytes, b"nonce").expect("memory takes it");
            let mut from = bytes.as_slice();
            let seen = std::iter::from_fn(|| match read(&mut from) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
                frame => Some(frame),
            });
            assert_eq!(seen.last().and_then(Result::ok), Some((Kind::Ping, b"nonce".to_vec())), "{sent} bytes sent");
        }
    }

    #[test]
    fn what_is_not_a_frame_is_refused_before_it_is_read() {
        assert!(read([b'q', 0, 0, 0, 0].as_slice()).is_err());
        assert!(read([b'o', 255, 0, 0, 0].as_slice()).is_err());
        assert!(read([b'o', 0, 0, 0, 9, 1].as_slice()).is_err());
        assert!(encode(Kind::Output, &vec![0; PAYLOAD_BYTES_MAX + 1]).is_err());
    }
}
