//! Runs one command of a stage with its output in a log, and counts the tests it reports.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::ops::AddAssign;
use std::path::Path;
use std::process::{Command, Stdio};

/// After this long a command is ended, so that a test that hangs does not take the run with it.
const SECONDS_MAX: u32 = 2_400;

/// How many tests did what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

impl Counts {
    /// The sum of all `test result:` lines of libtest.
    fn of(output: &str) -> Self {
        let mut sum = Self::default();
        for line in output.lines().filter(|line| line.starts_with("test result: ")) {
            let count = |word: &str| {
                let part = line.split(['.', ';']).map(str::trim).find_map(|part| part.strip_suffix(word));
                part.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
            };
            sum += Self { passed: count("passed"), failed: count("failed"), skipped: count("ignored") };
        }
        sum
    }
}

/// What became of a stage, or of one command of it.
#[derive(Debug, Default)]
pub struct Ran {
    pub counts: Counts,
    /// Why it failed, if it did.
    pub fault: Option<String>,
    /// The command's exit code, if it was run and exited.
    pub code: Option<i32>,
}

impl Ran {
    /// It could not be run.
    pub fn fault(fault: String) -> Self {
        Self { fault: Some(fault), ..Self::default() }
    }

    /// Another command of the same stage.
    pub fn add(&mut self, other: Self) {
        self.counts += other.counts;
        self.fault = self.fault.take().or(other.fault);
    }

    /// A stage that is there to run tests and ran none has failed.
    pub fn with_tests(mut self) -> Self {
        if self.counts.passed + self.counts.failed == 0 && self.fault.is_none() {
            self.fault = Some("it ran no test".to_owned());
        }
        self
    }
}

/// Runs a command without input; what it prints is appended to the log.
///
/// It ends with us and, after [`SECONDS_MAX`], by itself, with all it has started.
pub fn logged(command: &mut Command, log: &Path) -> Ran {
    let before = fs::metadata(log).map_or(0, |metadata| metadata.len());
    let status = OpenOptions::new().create(true).append(true).open(log).and_then(|file| {
        let mut bounded = Command::new("setpriv");
        bounded.args(["--pdeathsig", "TERM", "timeout", "--kill-after=10", &SECONDS_MAX.to_string()]);
        bounded.arg(command.get_program()).args(command.get_args());
        // A failed assertion says where it is; thirty lines of libtest above it help nobody.
        bounded.env("RUST_BACKTRACE", "0");
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => bounded.env(name, value),
                None => bounded.env_remove(name),
            };
        }
        if let Some(directory) = command.get_current_dir() {
            bounded.current_dir(directory);
        }
        bounded.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).status()
    });
    let text = fs::read(log).unwrap_or_default();
    let start = usize::try_from(before).unwrap_or(usize::MAX).min(text.len());
    let counts = Counts::of(&String::from_utf8_lossy(text.get(start..).unwrap_or_default()));
    match status {
        Ok(status) if status.success() => Ran { counts, fault: None, code: status.code() },
        Ok(status) => {
            let fault = match status.code() {
                Some(124) => format!("ended after {SECONDS_MAX} s"),
                _ => format!("{} ended with {status}", command.get_program().display()),
            };
            Ran { counts, fault: Some(fault), code: status.code() }
        }
        Err(error) => Ran::fault(format!("cannot run {}: {error}", command.get_program().display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
test a ... ok
test result: ok. 17 passed; 1 failed; 2 ignored; 0 measured; 4 filtered out; finished in 0.11s
   test result: ok. 100 passed; in a test's own output
test result: FAILED. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s
";

    #[test]
    fn results_of_all_binaries_are_added_up() {
        assert_eq!(Counts::of(OUTPUT), Counts { passed: 20, failed: 1, skipped: 2 });
        assert_eq!(Counts::of(OUTPUT).to_string(), "20 passed, 1 failed, 2 skipped");
    }

    #[test]
    fn a_stage_without_tests_has_failed() {
        assert!(Ran::default().with_tests().fault.is_some());
        let counts = Counts { passed: 1, ..Counts::default() };
        assert!(Ran { counts, ..Ran::default() }.with_tests().fault.is_none());
    }

    #[test]
    fn what_a_command_prints_is_in_the_log_and_its_code_is_kept() {
        let log = std::env::temp_dir().join(format!("xtask-run-{}", std::process::id()));
        let ran = logged(Command::new("sh").args(["-c", "echo 'test result: ok. 2 passed; 0 failed'; exit 3"]), &log);
        let again = logged(&mut Command::new("true"), &log);
        fs::remove_file(&log).expect("the log was written");
        assert_eq!((ran.code, ran.counts.passed, ran.fault.is_some()), (Some(3), 2, true));
        assert_eq!((again.code, again.counts.passed, again.fault.is_some()), (Some(0), 0, false));
    }
}
