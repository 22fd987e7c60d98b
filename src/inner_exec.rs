//! Runs inside the session's terminal and becomes the command. (SPEC 6.)
//!
//! script(1) runs a shell, the shell executes this program again, through descriptor 3, and this program executes
//! the command: so the words never pass through a shell's own parsing. It trusts its environment for nothing but
//! the words, and those are decoded as if a stranger had sent them.
//!
//! An executable file that is neither a binary nor begins with `#!` is given to `/bin/sh`, as execvp(3) and every
//! shell do.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, error, fmt, io};

use crate::account::{self, Account};
use crate::frame::{DecodeError, words};
use crate::limits::{ARGV_VARIABLE, SESSION_PATH, TERMINAL_SIZE_DEFAULT};
use crate::report::{Chain, Doing, ExitStatus, SystemError, quoted};
use crate::sys::{inherited, process};

/// The `argv[0]` the launcher has the shell execute: this program, whatever its path.
pub const ARGV0: &str = "/proc/self/fd/3";
/// The one argument.
pub const FLAG: &str = "--exec";

/// Becomes the command; returns only if that failed.
pub fn main() -> ExitStatus {
    let error = become_command();
    // On the session's terminal, for whoever looks at it: "opencode-pty: 'npn': command not found".
    eprintln!("opencode-pty: {}", Chain(&error));
    error.exit_status()
}

/// Inner-exec's story.
fn become_command() -> Error {
    match prepare() {
        Ok((command, mut process)) => Error::Execute { command, source: process.exec() },
        Err(error) => error,
    }
}

fn prepare() -> Result<(String, Command), Error> {
    let joined = env::var(ARGV_VARIABLE).map_err(|_| Error::NoWords)?;
    let words = words::decode_joined(&joined).map_err(Error::Words)?;
    let account = Account::of_this_process().map_err(Error::Account)?;

    // script(1) copies the size of its own terminal, and here it has none: the new one says 0 × 0, and programs
    // that divide by it break. Not a terminal, or one that refuses: then it stays as it is.
    let _ = process::give_size_if_unknown(io::stdin(), TERMINAL_SIZE_DEFAULT);
    // Descriptor 3 is this program's file, no business of the command's.
    inherited::close_from(3).doing("close inherited descriptors")?;
    // An interactive shell ignores some signals and restores them before it executes us; ours would stay ignored.
    inherited::reset_signals().doing("reset the signals")?;

    let command = words.command().to_owned();
    let path = locate(&command, SESSION_PATH).ok_or_else(|| Error::NotFound { command: command.clone() })?;
    let mut process = Command::new(path);
    process.arg0(&command).args(words.as_slice().iter().skip(1)).env_clear().envs(account.environment());
    Ok((command, process))
}

/// The file to execute: the command itself if it has a slash, else the first executable file of that name in
/// `search_path`. Never the working directory: a file of the workspace must not stand in for `npm`.
fn locate(command: &str, search_path: &str) -> Option<PathBuf> {
    if command.contains('/') {
        return Some(PathBuf::from(command));
    }
    let mut candidates = search_path.split(':').map(|directory| Path::new(directory).join(command));
    candidates.find(|path| path.is_absolute() && process::check_executable(path).is_ok())
}

/// Why the command does not run.
#[derive(Debug)]
enum Error {
    /// The launcher's variable is missing, or no text.
    NoWords,
    /// The launcher's variable holds something else than words.
    Words(DecodeError),
    /// Whose environment this should be is not known.
    Account(account::Error),
    /// The system refused before the command came into play.
    System(SystemError),
    /// Nothing of that name in the fixed path.
    NotFound { command: String },
    /// The kernel won't execute it.
    Execute { command: String, source: io::Error },
}

impl Error {
    fn exit_status(&self) -> ExitStatus {
        match self {
            Self::NoWords | Self::Words(_) => ExitStatus::Usage,
            Self::Account(_) | Self::System(_) => ExitStatus::System,
            Self::NotFound { .. } => ExitStatus::NotFound,
            Self::Execute { source, .. } if source.kind() == io::ErrorKind::NotFound => ExitStatus::NotFound,
            Self::Execute { .. } => ExitStatus::NotExecutable,
        }
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
            Self::NoWords => write!(f, "{ARGV_VARIABLE} is missing: only the launcher starts this"),
            Self::Words(_) => write!(f, "{ARGV_VARIABLE} holds no words"),
            Self::Account(_) => f.write_str("cannot tell the account"),
            Self::System(error) => error.fmt(f),
            Self::NotFound { command } => write!(f, "{}: command not found", quoted(command)),
            Self::Execute { command, .. } => f.write_str(&quoted(command)),
        }
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::NoWords | Self::NotFound { .. } => None,
            Self::Words(source) => Some(source),
            Self::Account(source) => Some(source),
            // Shown as this error itself, so its source is ours.
            Self::System(error) => error.source(),
            Self::Execute { source, .. } => Some(source),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_command_with_a_slash_is_taken_as_it_is() {
        for command in ["/bin/echo", "./x", "x/y", "/", "../x"] {
            assert_eq!(locate(command, SESSION_PATH), Some(PathBuf::from(command)));
        }
    }

    #[test]
    fn a_command_without_one_is_the_first_executable_file_in_the_path() {
        let root = env::temp_dir().join(format!("opencode-pty-path-{}", std::process::id()));
        let directories = ["a", "b", "c", "d"].map(|name| root.join(name));
        for (directory, mode) in directories.iter().zip([None, Some(0o644), Some(0o755), Some(0o755)]) {
            fs::create_dir_all(directory).unwrap();
            match mode {
                None => fs::create_dir(directory.join("tool")).unwrap(),
                Some(mode) => {
                    fs::write(directory.join("tool"), "").unwrap();
                    fs::set_permissions(directory.join("tool"), Permissions::from_mode(mode)).unwrap();
                }
            }
        }
        let search_path = directories.each_ref().map(|directory| directory.to_str().unwrap()).join(":");

        let found = locate("tool", &search_path);

        assert_eq!(found, Some(directories[2].join("tool")), "a directory and a plain file come first");
        assert_eq!(locate("toolx", &search_path), None);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn the_working_directory_is_never_searched() {
        // Tests run in the package's root, where these are.
        assert_eq!(locate("Cargo.toml", ""), None);
        assert_eq!(locate("sh", "bin:.::"), None);
        for command in [".", "..", "", "-"] {
            assert_eq!(locate(command, SESSION_PATH), None, "'{command}'");
        }
    }

    #[test]
    fn exit_codes_are_a_shells() {
        let execute = |code| Error::Execute { command: "x".into(), source: io::Error::from_raw_os_error(code) };
        for (error, status, line) in [
            (Error::NotFound { command: "x".into() }, ExitStatus::NotFound, "'x': command not found"),
            (execute(2), ExitStatus::NotFound, "'x': No such file or directory (os error 2)"),
            (execute(13), ExitStatus::NotExecutable, "'x': Permission denied (os error 13)"),
            (execute(8), ExitStatus::NotExecutable, "'x': Exec format error (os error 8)"),
            (execute(7), ExitStatus::NotExecutable, "'x': Argument list too long (os error 7)"),
            (Error::NoWords, ExitStatus::Usage, "OPENCODE_PTY_ARGV is missing: only the launcher starts this"),
        ] {
            assert_eq!(Chain(&error).to_string(), line);
            assert_eq!(error.exit_status(), status, "{line}");
        }
    }
}
