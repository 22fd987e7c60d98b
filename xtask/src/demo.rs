//! `cargo xtask demo`: one session from end to end, joined to the newcomer's own terminal.

pub mod terminal;

use std::io::{IsTerminal as _, Read as _, Write as _};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use opencode_pty::frame::message::{CLD_EXITED, Exit};
use support::host::{self, BootOptions, Host, Suite, WORKSPACE};
use support::peer::{Frame, Peer, Sender};
use support::standin::{CONTROL_PATH, Standin};

use self::terminal::Terminal;
use crate::Failure;
use crate::args::Args;

const USAGE: &str = "\
Usage: cargo xtask demo [--suite bookworm|trixie] [-- COMMAND ARGS…]

Boots a throw-away host, starts the supervisor and a stand-in for the server there, opens one session that runs COMMAND,
and joins it to this terminal. Afterwards the exit record is printed in one line. Nothing is left behind.

Without COMMAND: an interactive shell if standard input is a terminal, otherwise a short tour.
Exit code: the command's; 128 + n if signal n ended it; 1 if there was no session.
";

/// The longest a demo's session may last, seconds.
const RUNTIME: u32 = 3_600;

/// How long the session may say nothing at all: as long as it may last.
const PATIENCE: Duration = Duration::from_mins(61);

/// How long the stand-in has to listen. Chosen.
const STANDIN_START_MAX: Duration = Duration::from_secs(10);

/// What a terminal's driver takes for the end of input.
const END_OF_INPUT: u8 = 4;

/// How often the end of input is typed again. Chosen: a person would wait as long.
const END_AGAIN: Duration = Duration::from_secs(1);

/// How the tour names the child that tries to get away.
const DETACHED: &str = "detached child: pid ";

/// What the tour shows of a session, from inside.
const TOUR: &str = r#"
show() { echo; echo "\$ $*"; "$@"; }
show tty
show id
show pwd
show cat /proc/self/cgroup
show stty -a | head -n 3
echo
setsid sleep 1000 &
child=$!
while [ "$(ps -o sid= -p $child | tr -d ' ')" != $child ]; do sleep 0.01; done
echo "detached child: pid $child, in a session of its own and without a terminal:"
ps -o pid,ppid,sid,tty,args -p $child
"#;

pub fn main(words: &[String]) -> Result<ExitCode, Failure> {
    let (options, command) = match words.iter().position(|word| word == "--") {
        Some(dashes) => (words.get(..dashes).unwrap_or_default(), words.get(dashes + 1..).unwrap_or_default()),
        None => (words, [].as_slice()),
    };
    let mut args = Args::new(options, USAGE)?;
    let suite: Suite = match args.option("--suite")? {
        Some(name) => name.parse().map_err(Failure::Usage)?,
        None => Suite::Trixie,
    };
    args.finish(0)?;

    let tour = command.is_empty() && !std::io::stdin().is_terminal();
    let command: Vec<&str> = match command {
        [] if tour => vec!["/bin/sh", "-c", TOUR],
        [] => vec!["/bin/bash", "-i"],
        words => words.iter().map(String::as_str).collect(),
    };
    let started = Instant::now();
    let terminal = Terminal::take()?;
    let host = boot(suite)?;
    let standin = Standin::connect_within(host.path(CONTROL_PATH), STANDIN_START_MAX)
        .map_err(|error| format!("cannot reach the stand-in: {error}"))?;
    let mut peer =
        standin.start(WORKSPACE, RUNTIME, &command).map_err(|error| format!("cannot start a session: {error}"))?;

    let session = Session::join(&mut peer, &terminal, started)?;
    println!("exit: {} · unit {}", session.exit, session.unit);
    if tour {
        show_that_it_is_gone(&host, &session)?;
    }
    host.down()?;
    println!("host: gone, and everything with it");
    Ok(ExitCode::from(if tour { 0 } else { shell_code(&session.exit) }))
}

/// A host with the product on it, told in a line each.
fn boot(suite: Suite) -> Result<Host, Failure> {
    let say = |line: &str| eprintln!("demo: {line}");
    say("building the product and the stand-in server, if they have changed; the first time takes a few minutes");
    let product = host::build_product()?;
    let standin = host::build_standin()?;
    let name = format!("demo-{}", std::process::id());
    let host = Host::boot(&BootOptions { name, suite, ephemeral: true }, &mut |line| say(line))?;
    host::install(&host, &product)?;
    host::install_standin(&host, &standin)?;
    host::start(&host)?;
    let version = host.sh_ok("systemctl --version | head -n 1")?;
    say(&format!("{host} is up with {version}"));
    Ok(host)
}

/// What is known of a session when it is over.
struct Session {
    unit: String,
    exit: Exit,
    /// The last of its output.
    output: Vec<u8>,
}

impl Session {
    /// Joins a session to standard input and output until it is over.
    fn join(peer: &mut Peer, terminal: &Terminal, started: Instant) -> Result<Self, Failure> {
        let lost = |error| Failure::Failed(format!("the connection broke: {error}"));
        let (mut unit, mut output) = (String::new(), Vec::new());
        let mut raw = None;
        loop {
            match peer.next_frame(PATIENCE).map_err(lost)? {
                Frame::Started(name) => {
                    eprintln!("demo: session {name}, {:.1} s after the start", started.elapsed().as_secs_f32());
                    unit = name;
                    raw = Some(terminal.raw()?);
                    let sender = peer.sender();
                    let is_terminal = terminal.is_some();
                    // It ends with the process: nothing can interrupt a read of a terminal.
                    thread::spawn(move || forward_input(&sender, is_terminal));
                }
                Frame::Output(bytes) => {
                    let mut stdout = std::io::stdout().lock();
                    let written = stdout.write_all(&bytes).and_then(|()| stdout.flush());
                    written.map_err(|error| format!("cannot write to standard output: {error}"))?;
                    output.extend_from_slice(&bytes);
                    output.drain(..output.len().saturating_sub(64 << 10));
                }
                Frame::Exit(exit) => {
                    drop(raw);
                    return Ok(Self { unit, exit, output });
                }
                Frame::Error(code, message) => {
                    drop(raw);
                    return Err(Failure::Failed(format!("the supervisor answered '{code}: {message}'")));
                }
                Frame::Stopped | Frame::Closed => {
                    drop(raw);
                    return Err(Failure::Failed("the connection ended without an exit record".to_owned()));
                }
            }
        }
    }
}

/// Types what comes on standard input. Its end is no disconnect: a terminal's end of input is typed instead.
fn forward_input(sender: &Sender, is_terminal: bool) {
    let mut stdin = std::io::stdin().lock();
    let mut buffer = [0; 4096];
    let mut last = b'\n';
    loop {
        let typed = match stdin.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(len) => buffer.get(..len).unwrap_or_default(),
        };
        if sender.input(typed).is_err() {
            return;
        }
        last = typed.last().copied().unwrap_or(last);
    }
    if is_terminal {
        return;
    }
    // In the middle of a line the first one only ends the line.
    let mut ends: &[u8] = if last == b'\n' { &[END_OF_INPUT] } else { &[END_OF_INPUT, END_OF_INPUT] };
    // Each program that reads takes one, so the end has to stay there for the next.
    while sender.input(ends).is_ok() {
        ends = &[END_OF_INPUT];
        thread::sleep(END_AGAIN);
    }
}

/// Looks from outside, as root of the host, for the child that the tour left behind.
fn show_that_it_is_gone(host: &Host, session: &Session) -> Result<(), Failure> {
    let output = String::from_utf8_lossy(&session.output);
    let not_a_digit = |letter: char| !letter.is_ascii_digit();
    let pid = output.split(DETACHED).nth(1).and_then(|rest| rest.split(not_a_digit).next()?.parse::<u32>().ok());
    let pid = pid.ok_or_else(|| "the tour did not show a detached child".to_owned())?;
    if host.path(format!("/proc/{pid}")).exists() {
        return Err(Failure::Failed(format!("the detached child {pid} is still there")));
    }
    let cgroups = host.sh_ok(&format!("find /sys/fs/cgroup -name '{}'", session.unit))?;
    if !cgroups.is_empty() {
        return Err(Failure::Failed(format!("the session's cgroup is still there: {cgroups}")));
    }
    println!("seen from outside: the detached child, pid {pid}, is gone, and so is the session's cgroup");
    Ok(())
}

/// What a shell would say of it.
fn shell_code(exit: &Exit) -> u8 {
    let status = u8::try_from(exit.status()).unwrap_or(u8::MAX);
    match exit.code() {
        CLD_EXITED => status,
        0 => 1,
        _ => status.saturating_add(128),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_ends_the_demo_with_the_code_a_shell_would_give() {
        for (code, status, result, expected) in [
            (1, 0, "success", 0),
            (1, 7, "exit-code", 7),
            (2, 15, "stopped", 143),
            (3, 11, "core-dump", 139),
            (0, 0, "lost", 1),
        ] {
            assert_eq!(shell_code(&Exit::new(code, status, result).expect("it is valid")), expected);
        }
    }
}
