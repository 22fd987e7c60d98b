//! The attacker: tries to get out of a session by every way we know, and says what came of each.
//!
//! `opencode-standin attack GROUP ARGS…` tries one group of attacks, one after the other, and prints a line for each,
//! `NAME: held: WHY`, `NAME: succeeded: WHAT`, or `NAME: not-applicable: WHY`. It knows nothing of where it runs: the same
//! program with the same arguments runs in a session, where it should get nowhere, and where the protection is not, where
//! it must get through; otherwise its failure in a session would say nothing. No attack does harm where it succeeds:
//! limits are set to what they are, signals are ones that are ignored.
//!
//! System calls that neither std nor rustix has a safe function for are made in Perl, which every Debian host has.

mod elsewhere;
mod privileges;
mod processes;
mod sockets;

use std::fmt;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use opencode_pty::launcher::domain::{self, Abi};
use opencode_pty::sys::privileges::{drop_capabilities, forbid_new_privileges};

/// The name by which the stand-in's program knows that it is to attack.
pub const COMMAND: &str = "attack";

/// The name by which it enters the wall of a Landlock ABI first.
pub const BEHIND: &str = "behind";

/// What came of an attack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It did not get through; the error, or what was seen.
    Held(String),
    /// It did; what it got.
    Succeeded(String),
    /// It can't be tried here; why.
    NotApplicable(String),
}

impl Outcome {
    /// The outcome's word.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Held(_) => "held",
            Self::Succeeded(_) => "succeeded",
            Self::NotApplicable(_) => "not-applicable",
        }
    }

    /// What was seen.
    pub fn detail(&self) -> &str {
        match self {
            Self::Held(detail) | Self::Succeeded(detail) | Self::NotApplicable(detail) => detail,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.word(), self.detail())
    }
}

/// An attack's result on its way to an [`Outcome`]: what it got, or why it got nothing.
type Attempt = Result<String, Refusal>;

/// Why an attack got nothing.
#[derive(Debug)]
struct Refusal(String);

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<rustix::io::Errno> for Refusal {
    fn from(error: rustix::io::Errno) -> Self {
        io::Error::from(error).into()
    }
}

/// One attack with its name.
type Told = (String, Outcome);

fn told(name: impl Into<String>, attempt: Attempt) -> Told {
    let one_line = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let outcome = match attempt {
        Ok(got) if got.trim().is_empty() => Outcome::Succeeded("done".to_owned()),
        Ok(got) => Outcome::Succeeded(one_line(got)),
        Err(Refusal(why)) => Outcome::Held(one_line(why)),
    };
    (name.into(), outcome)
}

/// Reads a line that an attacker printed.
pub fn parse(line: &str) -> Option<(&str, Outcome)> {
    let (name, rest) = line.split_once(": ")?;
    let (word, detail) = rest.split_once(": ")?;
    let detail = detail.to_owned();
    let outcome = match word {
        "held" => Outcome::Held(detail),
        "succeeded" => Outcome::Succeeded(detail),
        "not-applicable" => Outcome::NotApplicable(detail),
        _ => return None,
    };
    Some((name, outcome))
}

/// Tries a group of attacks and prints what came of each. An error: there is no such group, or it needs other words.
pub fn attack(words: &[&str]) -> io::Result<()> {
    let done = match words {
        ["sockets", pid, paths @ ..] => sockets::attack(pid, paths),
        ["server", pid, address, canary] => processes::look_into(pid, address, canary)?,
        ["signals", pid] => processes::signal(pid)?,
        ["limits", pid] => processes::limit(pid)?,
        ["privileges", adm, docker, setuid, setgid, capable] => {
            privileges::gain(adm, docker, [setuid, setgid, capable])
        }
        ["namespaces", pid, adm] => privileges::namespaces(pid, adm),
        ["files", paths @ ..] => privileges::files(paths),
        ["keys", shared, serial] => privileges::keys(shared, serial),
        ["terminals", other] => privileges::terminals(other),
        ["cgroups", slice] => elsewhere::cgroups(slice),
        ["work", directory] => elsewhere::work(directory)?,
        ["daemons", mark] => elsewhere::daemons(mark)?,
        _ => return Err(io::Error::other(format!("no attack '{}'", words.join(" ")))),
    };
    for (name, outcome) in done {
        println!("{name}: {outcome}");
    }
    Ok(())
}

/// Goes behind the wall that a kernel with this Landlock ABI would get (`none`: no Landlock), and executes the rest there.
///
/// For hosts whose kernel is newer. What runs this has the rest of a session already: its unit, and a launcher that left
/// the wall out.
pub fn behind(abi: &str, words: &[&str]) -> io::Result<()> {
    let abi = match abi {
        "none" => None,
        number => Some(number.parse().map_err(io::Error::other)?),
    };
    drop_capabilities()?;
    forbid_new_privileges()?;
    domain::enter(Abi::new(abi)).map_err(io::Error::other)?;
    let (program, rest) = words.split_first().ok_or_else(|| io::Error::other("nothing to execute"))?;
    Err(Command::new(program).args(rest).exec())
}

/// Runs a program without input. What it printed if it succeeded, the end of its complaint if not.
fn run(program: &str, args: &[&str]) -> Attempt {
    let output = Command::new(program).args(args).stdin(Stdio::null()).output()?;
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() {
        return Ok(stdout.into_owned());
    }
    let complaint = stderr.lines().chain(stdout.lines()).rfind(|line| !line.trim().is_empty());
    Err(Refusal(complaint.map_or_else(|| output.status.to_string(), str::to_owned)))
}

/// The same with a shell's script, whose `$1`, `$2`, … are `args`.
fn sh(script: &str, args: &[&str]) -> Attempt {
    run("/bin/sh", &[&["-c", script, "sh"], args].concat())
}

/// The same with a Perl program (whose system calls take no literal strings), which fails by `die "$!\n"`.
fn perl(program: &str, args: &[&str]) -> Attempt {
    run("/usr/bin/perl", &[&["-e", program], args].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_attacker_prints_can_be_read_again() {
        for attempt in [Ok("a: b".to_owned()), Err(Refusal("Permission denied (os error 13)".to_owned()))] {
            let (name, outcome) = told("a name, of several words", attempt);
            assert_eq!(parse(&format!("{name}: {outcome}")), Some((name.as_str(), outcome)));
        }
        assert_eq!(parse("nothing of an attack"), None);
    }

    #[test]
    fn an_attack_on_nobody_in_particular_fails_and_one_that_nobody_prevents_does_not() {
        let own = std::process::id().to_string();
        assert!(processes::limit(&own).unwrap().iter().all(|(_, outcome)| matches!(outcome, Outcome::Succeeded(_))));
        let nobody = i32::MAX.to_string();
        assert!(processes::limit(&nobody).unwrap().iter().all(|(_, outcome)| matches!(outcome, Outcome::Held(_))));
        assert!(attack(&["sokets"]).is_err());
    }
}
