//! The inside: runs commands for the machine outside, one after the other.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::os::unix::process::{CommandExt as _, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::wire::{self, Kind, PAYLOAD_BYTES_MAX};

/// Between two looks whether somebody has come: the port has no event for it that outlives a hang-up.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// How long nobody must be there before what runs for them is ended. Chosen: who comes and goes is told by messages of their
/// own, which the kernel takes note of when it has time, after bytes that were sent later; the end of the one before may be
/// seen in the middle of the next one's words.
const GONE: Duration = Duration::from_secs(5);

/// Serves a port until the process is killed.
///
/// The port stays open: the kernel drops what arrives while it is closed. A ping begins a conversation and ends the one before.
///
/// # Errors
/// The port cannot be opened.
pub fn serve(name: &str) -> io::Result<()> {
    let port = OpenOptions::new().read(true).write(true).open(port_of(name)?)?;
    let mut incoming = BufReader::new(Patient(port.try_clone()?));
    let mut conversation = Conversation::default();
    loop {
        let carried_out = wire::read(&mut incoming).and_then(|(kind, payload)| {
            if kind == Kind::Ping {
                conversation.end();
                conversation = Conversation::on(port.try_clone()?);
            }
            conversation.carry_out(kind, &payload)
        });
        match carried_out {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => conversation.end(),
            Err(error) => eprintln!("opencode-vm-agent: {error}"),
        }
    }
}

/// The device of a port, by the name that QEMU was told.
fn port_of(name: &str) -> io::Result<PathBuf> {
    for port in fs::read_dir("/sys/class/virtio-ports")? {
        let port = port?;
        if fs::read_to_string(port.path().join("name"))?.trim_end() == name {
            return Ok(Path::new("/dev").join(port.file_name()));
        }
    }
    Err(io::Error::new(ErrorKind::NotFound, format!("the machine has no port '{name}'")))
}

/// A port that ends only when nobody has been there for [`GONE`].
struct Patient(File);

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let begun = Instant::now();
        loop {
            match self.0.read(buffer) {
                Ok(0) if begun.elapsed() < GONE => thread::sleep(LOOK_AGAIN),
                other => return other,
            }
        }
    }
}

/// Where a conversation's answers go; `None` when it has ended, so that what its commands still say reaches nobody else.
type Out = Arc<Mutex<Option<File>>>;

/// From a ping to the next.
#[derive(Default)]
struct Conversation {
    out: Out,
    running: Option<Running>,
}

/// The command that runs, and its standard input while that is open.
struct Running {
    group: Pid,
    input: Option<ChildStdin>,
}

impl Conversation {
    fn on(port: File) -> Self {
        Self { out: Arc::new(Mutex::new(Some(port))), running: None }
    }

    /// Kills what runs, with its process group.
    fn end(&mut self) {
        if let Some(Running { group, .. }) = self.running.take() {
            // It may have ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
        // Somebody may be writing: that goes to whoever is there now, who has it before the answer to the ping.
        *self.out.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn carry_out(&mut self, kind: Kind, payload: &[u8]) -> io::Result<()> {
        match kind {
            Kind::Ping => say(&self.out, Kind::Pong, payload),
            Kind::Run => match start(payload) {
                Ok(mut child) => {
                    let input = child.stdin.take();
                    self.running = Some(Running { group: Pid::from_child(&child), input });
                    let out = Arc::clone(&self.out);
                    thread::spawn(move || follow(child, &out));
                    Ok(())
                }
                Err(error) => {
                    say(&self.out, Kind::Complaint, format!("opencode-vm-agent: {error}\n").as_bytes())?;
                    say(&self.out, Kind::Ended, &(127_i32 << 8).to_be_bytes())
                }
            },
            Kind::Input => {
                if let Some(running) = &mut self.running {
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
fn follow(mut child: Child, out: &Out) {
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

fn pass_on(from: Option<impl Read>, out: &Out, kind: Kind) {
    let Some(mut from) = from else { return };
    let mut buffer = vec![0; PAYLOAD_BYTES_MAX];
    // To the end even if nobody listens, so that the command does not hang.
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        let _ = say(out, kind, buffer.get(..len).unwrap_or_default());
    }
}

fn say(out: &Out, kind: Kind, payload: &[u8]) -> io::Result<()> {
    match &*out.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(port) => wire::write(port, kind, payload),
        None => Err(ErrorKind::NotConnected.into()),
    }
}
