//! `opencode-loops`: the product's hot loops by themselves, for `valgrind --tool=callgrind`.
//!
//! The number of instructions does not depend on what else the machine does. `cargo xtask bench` runs each loop with two
//! counts and takes the difference, so that what comes before and after the loop does not count.

use std::hint::black_box;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::rc::Rc;

use opencode_pty::frame::message::{Start, Words};
use opencode_pty::frame::words::{decode_joined, encode_joined};
use opencode_pty::frame::{Header, Kind, encode};
use opencode_pty::limits::{DATA_BYTES_MAX, FRAME_HEADER_BYTES};
use opencode_pty::supervisor::foreign::Pool;
use opencode_pty::supervisor::inbound::{Inbound, Inbox};
use opencode_pty::supervisor::relay::{Outbound, feed};
use smol::Async;
use smol::future::{FutureExt, yield_now};

const USAGE: &str = "Usage: opencode-loops header|start|words|output|output-full|input COUNT";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, count] = args.as_slice() else {
        eprintln!("{USAGE}");
        return ExitCode::from(64);
    };
    let done = count.parse().map_err(io::Error::other).and_then(|count| run(name, count));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("opencode-loops: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(name: &str, count: usize) -> io::Result<()> {
    match name {
        "header" => {
            let bytes = Header::new(Kind::Output, 4_096).map_err(io::Error::other)?.encode();
            for _ in 0..count {
                let _ = black_box(Header::decode(black_box(&bytes)));
            }
        }
        "start" => {
            let payload = typical_start()?.encode();
            for _ in 0..count {
                let _ = black_box(Start::decode(black_box(&payload)));
            }
        }
        "words" => {
            let joined = encode_joined(typical_start()?.words());
            for _ in 0..count {
                let _ = black_box(decode_joined(black_box(&joined)));
            }
        }
        "output" => smol::block_on(output(count, 64))?,
        "output-full" => smol::block_on(output(count, DATA_BYTES_MAX))?,
        "input" => smol::block_on(input(count))?,
        _ => return Err(io::Error::other(USAGE)),
    }
    Ok(())
}

fn typical_start() -> io::Result<Start> {
    let words = ["/bin/bash", "-lc", "cargo test --workspace 2>&1 | tail -n 40"].map(str::to_owned).to_vec();
    let words = Words::new(words).map_err(io::Error::other)?;
    Start::new(1, 2, 3_600, words).map_err(io::Error::other)
}

/// A frame of output for each `bytes` that the terminal says: the supervisor's own relay, between two socketpairs.
async fn output(count: usize, bytes: usize) -> io::Result<()> {
    let (terminal, mut program) = UnixStream::pair()?;
    let (stream, mut client) = UnixStream::pair()?;
    client.set_nonblocking(true)?;
    let terminal = Async::new(terminal)?;
    let mut outbound = Outbound::new(Rc::new(Async::new(stream)?));
    let said = vec![b'x'; bytes];
    let mut read = vec![0; bytes + FRAME_HEADER_BYTES];
    let driver = async {
        for _ in 0..count {
            program.write_all(&said)?;
            take(&mut client, &mut read).await?;
        }
        Ok(())
    };
    outbound.forward(&terminal).or(driver).await
}

/// A frame of input of 16 bytes at a time, from the connection to the terminal.
async fn input(count: usize) -> io::Result<()> {
    let (terminal, mut program) = UnixStream::pair()?;
    let (stream, mut client) = UnixStream::pair()?;
    program.set_nonblocking(true)?;
    let terminal = Async::new(terminal)?;
    let inbox = Inbox::default();
    let mut inbound = Inbound::new(Rc::new(Async::new(stream)?), Pool::new());
    let typed = encode(Kind::Input, &[b'x'; 16]).map_err(io::Error::other)?;
    let mut read = [0; 16];
    let follow = async {
        inbound.follow(&inbox).await;
        Ok(())
    };
    let feed = async {
        feed(&inbox, &terminal).await;
        Ok(())
    };
    let driver = async {
        for _ in 0..count {
            client.write_all(&typed)?;
            take(&mut program, &mut read).await?;
        }
        Ok(())
    };
    follow.or(feed).or(driver).await
}

/// Reads until `place` is full, giving way in between.
async fn take(stream: &mut UnixStream, place: &mut [u8]) -> io::Result<()> {
    let mut have = 0;
    while have < place.len() {
        match stream.read(place.get_mut(have..).unwrap_or_default()) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => have += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => yield_now().await,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
