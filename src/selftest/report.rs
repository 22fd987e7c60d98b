//! What a check found, and how it is printed: a line each, or JSON.

use std::fmt::Write as _;

use super::checks::{Check, Stage};
use crate::report::{ExitStatus, json_string};

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// What it establishes is so.
    Passed,
    /// It is not.
    Failed,
    /// It makes no sense here.
    Skipped,
    /// It makes sense here and could not be made.
    NotRun,
}

impl Status {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Passed, Self::Failed, Self::Skipped, Self::NotRun];

    /// The word in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
            Self::NotRun => "not-run",
        }
    }

    /// The status with this word.
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.word() == word)
    }

    fn colour(self) -> &'static str {
        match self {
            Self::Passed => "\u{1b}[32m",
            Self::Failed => "\u{1b}[31m",
            Self::Skipped => "\u{1b}[33m",
            Self::NotRun => "\u{1b}[35m",
        }
    }
}

/// A status with its reason and, where something is to be done, what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How it came out.
    pub status: Status,
    /// Why.
    pub reason: String,
    /// What to do about it.
    pub remedy: Option<String>,
}

impl Finding {
    /// It is so.
    pub fn passed(reason: impl Into<String>) -> Self {
        Self { status: Status::Passed, reason: reason.into(), remedy: None }
    }

    /// It is not so.
    pub fn failed(reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { status: Status::Failed, reason: reason.into(), remedy: Some(remedy.into()) }
    }

    /// It makes no sense here.
    pub fn skipped(reason: impl Into<String>) -> Self {
        Self { status: Status::Skipped, reason: reason.into(), remedy: None }
    }

    /// It could not be found out.
    pub fn not_run(reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { status: Status::NotRun, reason: reason.into(), remedy: Some(remedy.into()) }
    }

    /// Passed with `reason`, unless there are problems.
    pub fn from_problems(problems: &[String], reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        if problems.is_empty() { Self::passed(reason) } else { Self::failed(problems.join("; "), remedy) }
    }
}

/// Everything that was found.
#[derive(Default)]
pub struct Report {
    findings: Vec<(&'static Check, Finding)>,
}

impl Report {
    /// Adds a check's finding.
    pub fn add(&mut self, check: &'static Check, finding: Finding) {
        self.findings.push((check, finding));
    }

    fn count(&self, status: Status) -> usize {
        self.findings.iter().filter(|(_, finding)| finding.status == status).count()
    }

    /// 1 if any failed; 2 if any that makes sense here was not made; 0 otherwise.
    pub fn exit_status(&self) -> ExitStatus {
        if self.count(Status::Failed) > 0 {
            ExitStatus::Failure
        } else if self.count(Status::NotRun) > 0 || self.findings.is_empty() {
            ExitStatus::Incomplete
        } else {
            ExitStatus::Success
        }
    }

    /// The last line.
    pub fn summary(&self) -> String {
        let [passed, failed, skipped, not_run] = Status::ALL.map(|status| self.count(status));
        format!("{passed} passed, {failed} failed, {skipped} skipped, {not_run} not run")
    }

    /// The whole report as JSON (docs/selftest.md).
    pub fn json(&self) -> String {
        let [passed, failed, skipped, not_run] = Status::ALL.map(|status| self.count(status));
        let checks: Vec<String> = self
            .findings
            .iter()
            .map(|(check, finding)| {
                let remedy = finding.remedy.as_deref().map_or("null".to_owned(), json_string);
                let (status, reason) = (finding.status.word(), json_string(&finding.reason));
                format!("{{{},\"status\":\"{status}\",\"reason\":{reason},\"remedy\":{remedy}}}", json_fields(check))
            })
            .collect();
        format!(
            "{{\"version\":{},\"checks\":[{}],\"passed\":{passed},\"failed\":{failed},\"skipped\":{skipped},\
             \"not_run\":{not_run},\"exit\":{}}}",
            json_string(env!("CARGO_PKG_VERSION")),
            checks.join(","),
            self.exit_status() as u8
        )
    }
}

/// The list of checks as JSON.
pub fn json_list(checks: &[Check]) -> String {
    let list: Vec<String> = checks.iter().map(|check| format!("{{{}}}", json_fields(check))).collect();
    format!("{{\"version\":{},\"checks\":[{}]}}", json_string(env!("CARGO_PKG_VERSION")), list.join(","))
}

fn json_fields(check: &Check) -> String {
    let numbers: Vec<String> = check.acceptance.iter().map(u8::to_string).collect();
    format!(
        "\"name\":{},\"group\":{},\"stage\":{},\"acceptance\":[{}],\"what\":{}",
        json_string(check.name),
        json_string(check.group),
        json_string(check.stage.word()),
        numbers.join(","),
        json_string(check.what)
    )
}

/// The list of checks, a line each, tab-separated.
pub fn text_list(checks: &[Check]) -> String {
    let mut list = String::new();
    for Check { name, group, stage, acceptance, what, .. } in checks {
        let numbers: Vec<String> = acceptance.iter().map(u8::to_string).collect();
        let _ = writeln!(list, "{name}\t{group}\t{}\t{}\t{what}", Stage::word(*stage), numbers.join(","));
    }
    list
}

/// One check's line.
pub fn line(check: &Check, finding: &Finding, colours: bool) -> String {
    let (on, off) = if colours { (finding.status.colour(), "\u{1b}[0m") } else { ("", "") };
    let mut line = format!("{on}{:<8}{off} {:<22} {}", finding.status.word(), check.name, one_line(&finding.reason));
    if let Some(remedy) = &finding.remedy {
        let _ = write!(line, " -- remedy: {}", one_line(remedy));
    }
    line
}

/// Text without line breaks and control characters: what a check saw may be anything.
pub fn one_line(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::checks::CHECKS;
    use super::*;

    fn report(findings: &[Finding]) -> Report {
        let mut report = Report::default();
        findings.iter().zip(CHECKS).for_each(|(finding, check)| report.add(check, finding.clone()));
        report
    }

    #[test]
    fn one_failure_outweighs_everything_and_what_was_not_made_outweighs_success() {
        let (passed, failed) = (Finding::passed("a"), Finding::failed("b", "c"));
        let (skipped, not_run) = (Finding::skipped("d"), Finding::not_run("e", "f"));
        for (findings, status) in [
            (vec![passed.clone(), skipped.clone()], ExitStatus::Success),
            (vec![passed.clone(), not_run.clone()], ExitStatus::Incomplete),
            (vec![not_run, failed, passed], ExitStatus::Failure),
            (vec![skipped], ExitStatus::Success),
            (vec![], ExitStatus::Incomplete),
        ] {
            assert_eq!(report(&findings).exit_status(), status, "{findings:?}");
        }
    }

    #[test]
    fn what_a_check_saw_breaks_neither_lines_nor_json() {
        let finding = Finding::failed("a\n\"b\\\u{1b}[31m\u{1}é", "c\td");
        let check = &CHECKS[0];
        assert_eq!(
            line(check, &finding, false),
            "failed   kernel                 a\\n\"b\\\\u{1b}[31m\\u{1}é -- remedy: c\\td"
        );
        let json = report(&[finding]).json();
        let whole: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(whole["checks"][0]["reason"], "a\n\"b\\\u{1b}[31m\u{1}é");
        assert_eq!((&whole["failed"], &whole["exit"]), (&1.into(), &1.into()));
    }

    #[test]
    fn only_the_word_is_coloured() {
        let line = line(&CHECKS[0], &Finding::passed("x"), true);
        assert!(line.starts_with("\u{1b}[32mpassed  \u{1b}[0m kernel"), "{line}");
    }
}
