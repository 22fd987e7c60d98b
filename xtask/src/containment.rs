//! `cargo xtask containment`: every attack on every kind of host, and `docs/containment.md` of what came of it.
//!
//! The page is made of logs, those of runs of its own or of a `cargo xtask test`: lines `containment` that the attacks
//! print (`tests/system/attacks.rs`), and what libtest says of each test. Nothing on it is written by hand but the text
//! around the tables.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use support::host::{self, Suite};

use crate::Failure;
use crate::args::Args;

const USAGE: &str = "\
Usage: cargo xtask containment [--logs DIRECTORY]

Runs the attacks and the tests of docs/threats.md on a container host of each suite, and writes docs/containment.md.

  --logs  makes the page of the logs that are there already (STAGE.log), target/test-logs say; that of a virtual machine,
          vm.log, is taken from there, too. Without: the logs are in target/containment
";

/// The columns: a log's name, and what it is on the page.
const COLUMNS: [(&str, &str); 4] =
    [("bookworm", "container 252"), ("backports", "container 254"), ("trixie", "container 257"), ("vm", "VM 257")];

/// The column with the wall of an older kernel is taken from this one's log.
const OLDER_WALL: &str = "trixie";

pub fn main(words: &[String]) -> Result<ExitCode, Failure> {
    let mut args = Args::new(words, USAGE)?;
    let kept = args.option("--logs")?.map(PathBuf::from);
    args.finish(0)?;
    let logs = kept.clone().unwrap_or_else(|| host::target().join("containment"));
    let mut failed = Vec::new();
    if kept.is_none() {
        fs::create_dir_all(&logs).map_err(|error| format!("cannot make {}: {error}", logs.display()))?;
        for suite in Suite::ALL {
            let _ = fs::remove_file(logs.join(format!("{suite}.log")));
            if let Err(Failure::Failed(why)) = crate::test::threats_on(suite, &logs) {
                failed.push(why);
            }
        }
    }
    let root = host::workspace();
    let read =
        |path: &Path| fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()));
    let threats = read(&root.join("docs/threats.md"))?;
    let runs =
        COLUMNS.map(|(log, _)| fs::read_to_string(logs.join(format!("{log}.log"))).ok().map(|log| Run::of(&log)));
    let page = page(&threats, &runs);
    let path = root.join("docs/containment.md");
    fs::write(&path, page).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    for ((log, column), run) in COLUMNS.iter().zip(&runs) {
        match run {
            Some(run) => println!("{column:<14} {}", run.summary()),
            None => println!("{column:<14} not run: no {log}.log in {}", logs.display()),
        }
    }
    println!("{}", path.display());
    if failed.is_empty() { Ok(ExitCode::SUCCESS) } else { Err(Failure::Failed(failed.join("; "))) }
}

/// A row of docs/threats.md: its number, and the tests that its last column names.
#[derive(Debug, PartialEq, Eq)]
pub struct Row {
    pub threat: String,
    found: String,
    pub tests: Vec<String>,
}

/// The rows of the table in docs/threats.md.
pub fn rows(page: &str) -> Vec<Row> {
    let row = |line: &str| {
        let cells: Vec<&str> = line.strip_prefix('|')?.strip_suffix('|')?.split(" | ").map(str::trim).collect();
        let [threat, found, .., tests] = cells.as_slice() else { return None };
        let number = threat.strip_prefix('T')?;
        if cells.len() < 4 || !number.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let tests = tests.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        Some(Row { threat: (*threat).to_owned(), found: (*found).to_owned(), tests })
    };
    page.lines().filter_map(row).collect()
}

/// What a log tells.
#[derive(Debug, Default)]
struct Run {
    /// Systemd, kernel, what holds a session.
    host: Option<[String; 3]>,
    attacks: Vec<Attack>,
    /// How each test ended, by the last part of its name.
    tests: BTreeMap<String, bool>,
}

/// A line of an attack.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Attack {
    /// Whose kernel's wall it was, if not the running one's.
    wall: String,
    threat: String,
    name: String,
    outcome: String,
    detail: String,
    /// Where it must succeed, and does if the test passed.
    control: String,
}

impl Run {
    fn of(log: &str) -> Self {
        let mut run = Self::default();
        let mut current: Option<String> = None;
        for line in log.lines() {
            // What a test prints may follow its name, and the verdict may come lines later (`--nocapture`).
            let mut rest = line;
            if let Some((name, after)) = line.strip_prefix("test ").and_then(|line| line.split_once(" ... ")) {
                current = name.rsplit("::").next().map(str::to_owned);
                rest = after;
            }
            if let Some(test) = current.as_ref().filter(|_| rest == "ok" || rest == "FAILED") {
                run.tests.insert(test.clone(), rest == "ok");
                current = None;
            }
            let fields: Vec<&str> = rest.split('\t').collect();
            match fields.as_slice() {
                ["containment", wall, threat, name, outcome, detail, control] => {
                    let [wall, threat, name, outcome, detail, control] =
                        [wall, threat, name, outcome, detail, control].map(|field| (*field).to_owned());
                    run.attacks.push(Attack { wall, threat, name, outcome, detail, control });
                }
                ["containment-host", systemd, kernel, isolation] => {
                    run.host = Some([systemd, kernel, isolation].map(|field| (*field).to_owned()));
                }
                _ => {}
            }
        }
        run
    }

    fn attack(&self, wall: &str, name: &str) -> Option<&Attack> {
        self.attacks.iter().find(|attack| attack.wall == wall && attack.name == name)
    }

    fn summary(&self) -> String {
        let count = |outcome: &str| {
            self.attacks.iter().filter(|attack| attack.wall.is_empty() && attack.outcome == outcome).count()
        };
        let passed = self.tests.values().filter(|passed| **passed).count();
        format!(
            "{} attacks held, {} possible, {} not applicable; {} of {} tests passed",
            count("held"),
            count("succeeded"),
            count("not-applicable"),
            passed,
            self.tests.len()
        )
    }
}

const INTRODUCTION: &str = "\
# Containment

What came of each attack when it was run. `cargo xtask containment` wrote this page from the logs of the run; `cargo xtask test`
runs the same tests, and fails if an outcome is another one than is wanted. [threats.md](threats.md) says what each row is
about, and why what is possible stays possible.

The attacker is one program (`support::attacker`) that runs inside a session. Each attack also runs where the protection is not,
as the last column says, and must succeed there; otherwise the test fails. *Held* is followed by what the attacker saw on the
last host of the row. **Possible** means that it got through, and is meant to be listed here.
";

/// The whole page.
fn page(threats: &str, runs: &[Option<Run>; 4]) -> String {
    let mut page = format!(
        "{INTRODUCTION}\n## The hosts\n\n| host | systemd | kernel | what holds a session |\n| --- | --- | --- | --- |\n"
    );
    for ((_, column), run) in COLUMNS.iter().zip(runs) {
        let [systemd, kernel, isolation] = match run {
            Some(Run { host: Some(host), .. }) => host.clone(),
            _ => ["not run".to_owned(), "–".to_owned(), "–".to_owned()],
        };
        let _ = writeln!(page, "| {column} | {systemd} | {kernel} | `{isolation}` |");
    }

    page.push_str("\n## Attack by attack\n\nThe column *ABI 4* is the wall that a session gets on the reference target's kernel, Linux 6.8, tried on the newer one.\n\n");
    let headings: Vec<&str> = COLUMNS.iter().map(|(_, column)| *column).collect();
    let _ = writeln!(page, "| threat | attack | {} | ABI 4 | seen | succeeds as |", headings.join(" | "));
    let _ = writeln!(page, "{}", "| --- ".repeat(6 + COLUMNS.len() - 1) + "|");
    let mut names: Vec<&Attack> = Vec::new();
    for attack in runs.iter().flatten().flat_map(|run| &run.attacks).filter(|attack| attack.wall.is_empty()) {
        if !names.iter().any(|known| known.name == attack.name) {
            names.push(attack);
        }
    }
    for first in names {
        let found: Vec<Option<&Attack>> =
            runs.iter().map(|run| run.as_ref().and_then(|run| run.attack("", &first.name))).collect();
        let cells: Vec<&str> =
            found.iter().map(|attack| attack.map_or("not run", |attack| word(&attack.outcome))).collect();
        let older = COLUMNS.iter().zip(runs).find(|((log, _), _)| *log == OLDER_WALL).and_then(|(_, run)| run.as_ref());
        let older = older
            .and_then(|run| run.attacks.iter().find(|attack| !attack.wall.is_empty() && attack.name == first.name));
        let detail = found.iter().flatten().last().map_or("", |attack| attack.detail.as_str());
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} |",
            first.threat,
            first.name,
            cells.join(" | "),
            older.map_or("–", |attack| word(&attack.outcome)),
            detail.replace('|', "\\|"),
            first.control
        );
    }

    page.push_str(
        "\n## Threat by threat\n\nHow many of the tests that [threats.md](threats.md) names passed there. Those that no column counts run against \
         the fake manager or without any host, in other stages of `cargo xtask test`.\n\n",
    );
    let _ = writeln!(page, "| | found | {} |", headings.join(" | "));
    let _ = writeln!(page, "{}", "| --- ".repeat(2 + COLUMNS.len()) + "|");
    for row in rows(threats) {
        let cells: Vec<String> = runs.iter().map(|run| verdict(run.as_ref(), &row.tests)).collect();
        let _ = writeln!(page, "| {} | {} | {} |", row.threat, row.found, cells.join(" | "));
    }
    page
}

fn word(outcome: &str) -> &str {
    if outcome == "succeeded" { "**possible**" } else { outcome }
}

/// How a row's tests ended in a run.
fn verdict(run: Option<&Run>, tests: &[String]) -> String {
    let Some(run) = run else { return "not run".to_owned() };
    let ends: Vec<bool> = tests.iter().filter_map(|test| run.tests.get(test)).copied().collect();
    let passed = ends.iter().filter(|passed| **passed).count();
    match (passed, ends.len()) {
        (_, 0) => "–".to_owned(),
        (passed, all) if passed == all => format!("{passed} passed"),
        (passed, all) => format!("**{} of {all} failed**", all - passed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
test attacks::a ... ok
test threats::t01_b ... FAILED
test hardening::c ... containment-host\tsystemd 257\t6.18\tgroups=dropped
containment\t\tT1\tsockets, directly\theld\tnone of 3\tthe account
containment\t4\tT1\tsockets, directly\tsucceeded\tall 3\tthe account
ok
";

    #[test]
    fn a_log_tells_tests_attacks_and_host_however_they_are_printed() {
        let run = Run::of(LOG);
        let tests: Vec<(&str, bool)> = run.tests.iter().map(|(name, passed)| (name.as_str(), *passed)).collect();
        assert_eq!(tests, [("a", true), ("c", true), ("t01_b", false)]);
        assert_eq!(run.attacks.len(), 2);
        assert_eq!(run.attack("4", "sockets, directly").map(|attack| attack.outcome.as_str()), Some("succeeded"));
        assert_eq!(run.host.as_ref().map(|host| host[1].as_str()), Some("6.18"));
    }

    #[test]
    fn the_page_says_what_was_not_run_and_what_failed() {
        let threats = "| | found | answer | test |\n| T1 | a `way` | none | `t01_b`, `a` |\n| T9 | other | x | `z` |\n";
        let page = page(threats, &[None, None, Some(Run::of(LOG)), None]);
        assert!(page.contains("| T1 | sockets, directly | not run | not run | held | not run | **possible** | none of 3 | the account |"), "{page}");
        assert!(page.contains("| T1 | a `way` | not run | not run | **1 of 2 failed** | not run |"), "{page}");
        assert!(page.contains("| T9 | other | not run | not run | – | not run |"), "{page}");
    }
}
