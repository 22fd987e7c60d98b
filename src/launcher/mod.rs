//! Runs inside the session's unit, as the account, and becomes script(1). (SPEC 6.)
//!
//! Descriptors 0 and 1 are the session's socketpair. What would surprise is descriptor **2: the approved directory**,
//! as a unit has three descriptors to give and no more. Until step 4 nothing can be printed. The request comes
//! in a frame and not on the command line, because any local user can read a unit's command line and PID 1 expands
//! `$` there; and because a frame is read *once*: a unit that somebody restarts finds nothing to run.
//!
//! The order of the steps is the point of this file. Each says what would break if it moved. Awaits nothing: what is
//! given up and entered here belongs to one thread.

pub mod domain;

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;
use std::{error, fmt, io};

use crate::account::{self, Account};
use crate::frame::message::{ErrorCode, Start, encode_error};
use crate::frame::{self, DecodeError, Header, Kind, words};
use crate::limits::{
    ARGV_VARIABLE, FRAME_HEADER_BYTES, LAUNCHER_ANSWER_TIME, LAUNCHER_REQUEST_TIME, SCRIPT_PATH, SHELL_PATH,
};
use crate::report::{Chain, Doing, ExitStatus, SystemError, print_error};
use crate::sys::{directory, inherited, privileges, process};
use domain::{Abi, Isolation};

const HELP: &str = "\
opencode-pty-launcher: runs inside a session's unit, up to script(1)

Usage: opencode-pty-launcher

No arguments. Only the supervisor starts it, in a unit of its own, with the session's socketpair as descriptors 0
and 1 and the approved directory as descriptor 2. It reads one start frame from 0 within 5 seconds and answers on 1
with one `started` or one `error` frame; from then on the pair carries the terminal's bytes.

Exit codes:
  64   it was given arguments
  71   a step failed, as the `error` frame says; or it was not started by the supervisor
  otherwise the session's, as script(1) gives it
";

/// What script(1) runs: the shell, which executes this program again, which executes the command.
///
/// The inner shell is interactive so that it takes the terminal as a person's shell would.
const SCRIPT_COMMAND: &str = "/bin/sh -i -c 'exec /proc/self/fd/3 --exec'";
/// The number [`SCRIPT_COMMAND`] and `inner_exec::ARGV0` have in them.
const SELF_DESCRIPTOR: i32 = 3;
/// How often the directory's path is asked for again, if it moved meanwhile. Chosen.
const REOPEN_TRIES: usize = 3;

/// Runs the launcher; returns only if a step failed.
pub fn main(args: &[OsString]) -> ExitStatus {
    match args {
        [] => {}
        [word] if word == "--help" || word == "-h" => {
            print!("{HELP}");
            return ExitStatus::Success;
        }
        _ => {
            print_error("launcher", &Error::Arguments);
            return ExitStatus::Usage;
        }
    }
    if let Err(error) = check_handed_over() {
        // Somebody's shell: descriptor 2 is their terminal.
        print_error("launcher", &Error::NotHandedOver(error));
        return ExitStatus::System;
    }
    // 9. One frame. If it can't be sent, nobody is there who would want the session, or the reason.
    let (mut script, answered) = match prepare() {
        Ok((script, isolation)) => (script, answer(Kind::Started, isolation.to_string().as_bytes())),
        Err(error) => {
            let _ = answer(Kind::Error, &encode_error(error.code(), &Chain(&error).to_string()));
            return ExitStatus::System;
        }
    };
    if answered.is_err() {
        return ExitStatus::System;
    }
    // 10. The pair now carries the terminal's bytes, so a line about a failure is their first and last.
    print_error("launcher", &Error::Execute(script.exec()));
    ExitStatus::System
}

/// Steps 1 to 8: all that has to be true before `started` is said.
fn prepare() -> Result<(Command, Isolation), Error> {
    // 1. Once: what was read is gone, and a restarted unit has nothing to run.
    let start = receive_start()?;

    // 2. Before the directory, so that one which only a dropped group could reach is refused now.
    privileges::drop_groups().doing("drop the supplementary groups")?;

    // 3. While descriptor 2 still is the directory.
    move_into_directory(&start)?;

    // 4. Nothing from outside stays open, and no capability outlives its one use. The session's own mounts are
    //    reached by the working directory alone from here on.
    process::join_stderr_to_stdout().doing("make standard error a duplicate of standard output")?;
    inherited::close_from(3).doing("close inherited descriptors")?;
    privileges::drop_capabilities().doing("drop the capabilities")?;
    privileges::forbid_new_privileges().doing("forbid new privileges")?;

    // 5. After step 3, whose way through /proc could otherwise be shut; after no_new_privs, which both walls need.
    let isolation = domain::enter(Abi::of_this_kernel()?)?;

    // 6. The environment, for the moment of execution: this process' own is never passed on.
    let account = Account::of_this_process()?;
    let script = script_command(&account, &start);

    // 7. Ignored signals and the mask survive execve, so a session would inherit what its unit had. Then, for the
    //    shells between script(1) and the command alone: one of them stays in the terminal's foreground process
    //    group, and a ^C that the command handles would end it, and with it the command's exit code. Inner-exec
    //    sets both signals to default again.
    inherited::reset_signals().doing("reset the signals")?;
    inherited::ignore_keyboard_signals().doing("ignore the keyboard's signals")?;

    // 8. Last, so that `started` is the truth. Descriptor 3 stays open across script(1), for inner-exec.
    keep_own_program_open()?;
    process::check_executable(Path::new(SCRIPT_PATH)).doing("execute script(1)")?;
    process::check_executable(Path::new(SHELL_PATH)).doing("execute the shell")?;
    process::check_new_terminal().doing("open a new terminal")?;
    Ok((script, isolation))
}

/// Fails unless 0 and 1 are one connected Unix stream socket: nothing else is answered to.
fn check_handed_over() -> io::Result<()> {
    process::check_connected_stream(io::stdin())?;
    if directory::identify(io::stdin())? == directory::identify(io::stdout())? {
        Ok(())
    } else {
        Err(io::Error::other("standard input and output differ"))
    }
}

/// Step 1: exactly one `start` frame, and not a byte of what follows it.
fn receive_start() -> Result<Start, Error> {
    let deadline = Instant::now() + LAUNCHER_REQUEST_TIME;
    let mut header = [0; FRAME_HEADER_BYTES];
    process::receive_exact(io::stdin(), &mut header, deadline).map_err(Error::Receive)?;
    let header = Header::decode(&header)?;
    if header.kind() != Kind::Start {
        return Err(DecodeError::UnexpectedKind { kind: header.kind() }.into());
    }
    // The header's length is within the kind's bounds, so this allocates 70 KiB at most.
    let mut payload = vec![0; header.payload_len()];
    process::receive_exact(io::stdin(), &mut payload, deadline).map_err(Error::Receive)?;
    Ok(Start::decode(&payload)?)
}

/// Step 3: the working directory becomes the approved one, *through this namespace's own mounts*.
///
/// Descriptor 2 came from the server and has the server's mount with it: `..` from there would climb out past
/// everything that is hidden from sessions (threat T1). So only its path is taken, and what is found there has to be
/// the same directory. If nothing is, the session fails; it never stays in the server's mounts.
fn move_into_directory(start: &Start) -> Result<(), Error> {
    let approved = directory::Identity { dev: start.dev(), ino: start.ino(), is_directory: true };
    if directory::identify(io::stderr()).map_err(bad_cwd("cannot be looked at"))? != approved {
        return Err(Error::NotApproved);
    }
    let mut tries = 0;
    let own = loop {
        tries += 1;
        match reopen(approved) {
            Err(_) if tries < REOPEN_TRIES => {}
            result => break result?,
        }
    };
    directory::enter(&own).map_err(bad_cwd("cannot be searched"))
}

/// The approved directory, opened by its present path; an error if that leads elsewhere or nowhere.
fn reopen(approved: directory::Identity) -> Result<OwnedFd, Error> {
    let path = directory::present_path(io::stderr()).map_err(bad_cwd("has no path"))?;
    // Of a directory on a mount that no path leads to, the kernel gives a path that doesn't begin at a root. A
    // deleted one gets " (deleted)" behind its name: nothing is there, or something else.
    if !path.is_absolute() {
        return Err(bad_cwd("has no path")(io::ErrorKind::NotFound.into()));
    }
    let own = directory::open_in_own_mounts(&path).map_err(bad_cwd("is not there in the session's own mounts"))?;
    let found = directory::identify(&own).map_err(bad_cwd("cannot be looked at"))?;
    if found == approved { Ok(own) } else { Err(Error::Elsewhere) }
}

/// Steps 6 and 10: script(1) with nothing in its environment but the seven variables and the words.
fn script_command(account: &Account, start: &Start) -> Command {
    let mut script = Command::new(SCRIPT_PATH);
    script.arg0("script").args(["-q", "-e", "-f", "-c", SCRIPT_COMMAND, "/dev/null"]);
    script.env_clear().envs(account.environment()).env(ARGV_VARIABLE, words::encode_joined(start.words()));
    script
}

/// Step 8: this very file as descriptor 3, open across execve. Its path may not exist in the session's mounts.
fn keep_own_program_open() -> Result<(), SystemError> {
    let program = File::open("/proc/self/exe").doing("open this program")?;
    let kept = process::keep_as(program.into(), SELF_DESCRIPTOR).doing("make this program descriptor 3")?;
    // Not ours to close any more.
    let _ = kept.into_raw_fd();
    Ok(())
}

/// Sends one frame on descriptor 1.
fn answer(kind: Kind, payload: &[u8]) -> Result<(), Error> {
    let frame = frame::encode(kind, payload)?;
    let deadline = Instant::now() + LAUNCHER_ANSWER_TIME;
    process::send_all(io::stdout(), &frame, None, deadline).doing("send the answer")?;
    Ok(())
}

/// Why there is no session. Says which step failed and never an argument or a path: it travels to the supervisor.
#[derive(Debug)]
enum Error {
    /// It takes none.
    Arguments,
    /// Descriptors 0 and 1 are not a session's socketpair.
    NotHandedOver(io::Error),
    /// No complete frame came.
    Receive(io::Error),
    /// What came is no start frame.
    Frame(DecodeError),
    /// The approved directory can't be reached here.
    Directory { what: &'static str, source: io::Error },
    /// Descriptor 2 is another directory than the frame says, or none.
    NotApproved,
    /// The approved directory's path leads to another one here.
    Elsewhere,
    /// Whose environment this should be is not known.
    Account(account::Error),
    /// The wall does not stand.
    Domain(domain::Error),
    /// Another step failed.
    System(SystemError),
    /// script(1) can't be executed after all.
    Execute(io::Error),
}

fn bad_cwd(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Directory { what, source }
}

impl Error {
    /// The word the `error` frame begins with.
    fn code(&self) -> ErrorCode {
        match self {
            Self::Receive(_) | Self::Frame(_) => ErrorCode::BadStart,
            Self::Directory { .. } | Self::NotApproved | Self::Elsewhere => ErrorCode::BadCwd,
            Self::Arguments
            | Self::NotHandedOver(_)
            | Self::Account(_)
            | Self::Domain(_)
            | Self::System(_)
            | Self::Execute(_) => ErrorCode::StartFailed,
        }
    }
}

impl From<DecodeError> for Error {
    fn from(error: DecodeError) -> Self {
        Self::Frame(error)
    }
}

impl From<account::Error> for Error {
    fn from(error: account::Error) -> Self {
        Self::Account(error)
    }
}

impl From<domain::Error> for Error {
    fn from(error: domain::Error) -> Self {
        Self::Domain(error)
    }
}

impl From<SystemError> for Error {
    fn from(error: SystemError) -> Self {
        Self::System(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Arguments => f.write_str("takes no arguments (see --help)"),
            Self::NotHandedOver(_) => {
                f.write_str("only the supervisor starts this: descriptors 0 and 1 are not a session's socketpair")
            }
            Self::Receive(_) => f.write_str("no complete start frame came"),
            Self::Frame(_) => f.write_str("what came is no start frame"),
            Self::Directory { what, .. } => write!(f, "the directory {what}"),
            Self::NotApproved => f.write_str("descriptor 2 is not the directory of the start frame"),
            Self::Elsewhere => f.write_str("the directory's path leads to another one in the session's own mounts"),
            Self::Account(_) => f.write_str("cannot tell the account"),
            Self::Domain(_) => f.write_str("cannot hold the session apart"),
            Self::System(error) => error.fmt(f),
            Self::Execute(_) => write!(f, "cannot execute {SCRIPT_PATH}"),
        }
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Arguments | Self::NotApproved | Self::Elsewhere => None,
            Self::NotHandedOver(source)
            | Self::Receive(source)
            | Self::Directory { source, .. }
            | Self::Execute(source) => Some(source),
            Self::Frame(source) => Some(source),
            Self::Account(source) => Some(source),
            Self::Domain(source) => Some(source),
            // Shown as this error itself, so its source is ours.
            Self::System(error) => error.source(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::message::Words;
    use crate::inner_exec;
    use std::ffi::OsStr;

    #[test]
    fn script_gets_the_fixed_command_line_and_eight_variables() {
        let account = account::parse_line("byk:x:1000:1000::/home/byk:/bin/bash").unwrap();
        let words = Words::new(vec!["echo".into(), "$HOME; `id`".into()]).unwrap();
        let script = script_command(&account, &Start::new(1, 2, 3, words).unwrap());

        assert_eq!(script.get_program(), "/usr/bin/script");
        let args: Vec<&OsStr> = script.get_args().collect();
        assert_eq!(args, ["-q", "-e", "-f", "-c", "/bin/sh -i -c 'exec /proc/self/fd/3 --exec'", "/dev/null"]);
        let names: Vec<&OsStr> = script.get_envs().map(|(name, _)| name).collect();
        assert_eq!(names, ["HOME", "LANG", "LOGNAME", "OPENCODE_PTY_ARGV", "PATH", "SHELL", "TERM", "USER"]);
    }

    #[test]
    fn the_shell_executes_what_inner_exec_is_recognised_by() {
        let words = format!("exec {} {}", inner_exec::ARGV0, inner_exec::FLAG);
        assert_eq!(SCRIPT_COMMAND, format!("{SHELL_PATH} -i -c '{words}'"));
        assert!(inner_exec::ARGV0.ends_with(&format!("/{SELF_DESCRIPTOR}")));
    }

    #[test]
    fn an_answer_names_the_step_and_its_reason() {
        let eperm = || io::Error::from_raw_os_error(1);
        let groups: Result<(), _> = Err(eperm());
        for (error, want) in [
            (
                Error::from(groups.doing("drop the supplementary groups").unwrap_err()),
                "start-failed: cannot drop the supplementary groups: Operation not permitted (os error 1)",
            ),
            (
                bad_cwd("cannot be searched")(eperm()),
                "bad-cwd: the directory cannot be searched: Operation not permitted (os error 1)",
            ),
            (Error::NotApproved, "bad-cwd: descriptor 2 is not the directory of the start frame"),
            (
                Error::Receive(io::ErrorKind::UnexpectedEof.into()),
                "bad-start: no complete start frame came: unexpected end of file",
            ),
        ] {
            assert_eq!(encode_error(error.code(), &Chain(&error).to_string()), want.as_bytes());
        }
    }
}
