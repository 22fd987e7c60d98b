//! The inside: runs commands for the machine outside, one after the other.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt as _, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

use super::wire::{self, Kind, PAYLOAD_BYTES_MAX};

/// Between two looks whether somebody has come: the port has no event for it that outlives a hang-up.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Serves a port until the process is killed.
///
/// # Errors
/// The port cannot be opened.
pub fn serve(name: &str) -> io::Result<()> {
    let path = Path::new("/dev/virtio-ports").join(name);
    loop {
        let port = OpenOptions::new().read(true).write(true).open(&path)?;
        if let Err(error) = attend(port)
            && error.kind() != io::ErrorKind::UnexpectedEof
        {
            eprintln!("opencode-vm-agent: {error}");
        }
        thread::sleep(LOOK_AGAIN);
    }
}

/// The command that runs, and its standard input while that is open.
struct Running {
    group: Pid,
    input: Option<ChildStdin>,
}

/// From one connection to its end. What runs then is killed, with its process group.
fn attend(mut port: File) -> io::Result<()> {
    let out = Arc::new(Mutex::new(port.try_clone()?));
    let mut running = None;
    let ended = loop {
        match wire::read(&mut port) {
            Ok((kind, payload)) => {
                if let Err(error) = carry_out(kind, &payload, &out, &mut running) {
                    break error;
                }
            }
            Err(error) => break error,
        }
    };
    if let Some(Running { group, .. }) = running {
        // It may have ended.
        let _ = kill_process_group(group, Signal::KILL);
    }
    Err(ended)
}

fn carry_out(kind: Kind, payload: &[u8], out: &Arc<Mutex<File>>, running: &mut Option<Running>) -> io::Result<()> {
    match kind {
        Kind::Ping => say(out, Kind::Pong, payload),
        Kind::Run => match start(payload) {
            Ok(mut child) => {
                let input = child.stdin.take();
                *running = Some(Running { group: Pid::from_child(&child), input });
                let out = Arc::clone(out);
                thread::spawn(move || follow(child, &out));
                Ok(())
            }
            Err(error) => {
                say(out, Kind::Complaint, format!("opencode-vm-agent: {error}\n").as_bytes())?;
                say(out, Kind::Ended, &(127_i32 << 8).to_be_bytes())
            }
        },
        Kind::Input => {
            if let Some(running) = running {
                // A command that has closed its input or has ended does not want it.
                let wanted = running.input.as_mut().is_some_and(|input| input.write_all(payload).is_ok());
                if payload.is_empty() || !wanted {
                    running.input = None;
                }
            }
            Ok(())
        }
        other => Err(io::Error::other(format!("{other:?} is not for an agent"))),
    }
}

fn start(words: &[u8]) -> io::Result<Child> {
    let words = std::str::from_utf8(words).map_err(io::Error::other)?;
    let mut words = words.split_terminator('\0');
    let program = words.next().ok_or_else(|| io::Error::other("no command"))?;
    Command::new(program)
        .args(words)
        .current_dir("/")
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/root")
        .env("USER", "root")
        .env("LOGNAME", "root")
        .env("LANG", "C.UTF-8")
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| io::Error::new(error.kind(), format!("cannot run '{program}': {error}")))
}

/// Passes on what a command prints until it has closed its outputs and ended.
fn follow(mut child: Child, out: &Arc<Mutex<File>>) {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let ended: io::Result<ExitStatus> = thread::scope(|scope| {
        scope.spawn(|| pass_on(stdout, out, Kind::Output));
        pass_on(stderr, out, Kind::Complaint);
        child.wait()
    });
    let status: i32 = ended.map_or(-1, ExitStatusExt::into_raw);
    // Whoever asked may have gone.
    let _ = say(out, Kind::Ended, &status.to_be_bytes());
}

fn pass_on(from: Option<impl Read>, out: &Mutex<File>, kind: Kind) {
    let Some(mut from) = from else { return };
    let mut buffer = vec![0; PAYLOAD_BYTES_MAX];
    // To the end even if nobody listens, so that the command does not hang.
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        let _ = say(out, kind, buffer.get(..len).unwrap_or_default());
    }
}

fn say(out: &Mutex<File>, kind: Kind, payload: &[u8]) -> io::Result<()> {
    wire::write(&*out.lock().unwrap_or_else(PoisonError::into_inner), kind, payload)
}
