//! What goes through the port between a VM and the machine outside: kind (a byte), length (u32, big-endian), payload.

use std::io::{self, Read, Write};

/// Longest payload. Chosen: what one read of a pipe gives.
pub(super) const PAYLOAD_BYTES_MAX: usize = 64 << 10;

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

/// Reads a frame; `UnexpectedEof` when the other side has gone.
pub(super) fn read(mut from: impl Read) -> io::Result<(Kind, Vec<u8>)> {
    let mut head = [0; 5];
    from.read_exact(&mut head)?;
    let [byte, a, b, c, d] = head;
    let known = Kind::ALL.into_iter().find(|(_, known)| *known == byte);
    let (kind, _) = known.ok_or_else(|| io::Error::other(format!("not a frame: it begins with {head:?}")))?;
    let len = u32::from_be_bytes([a, b, c, d]) as usize;
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

    #[test]
    fn what_is_not_a_frame_is_refused_before_it_is_read() {
        assert!(read([b'q', 0, 0, 0, 0].as_slice()).is_err());
        assert!(read([b'o', 255, 0, 0, 0].as_slice()).is_err());
        assert!(read([b'o', 0, 0, 0, 9, 1].as_slice()).is_err());
        assert!(encode(Kind::Output, &vec![0; PAYLOAD_BYTES_MAX + 1]).is_err());
    }
}
