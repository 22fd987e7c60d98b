//! Scenario × runtime: what passed, how often.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use super::runtimes::Runtime;
use crate::test::Counts;

/// The lines of docs/plugin.md between which the table is.
const BEGIN: &str = "<!-- table of cargo xtask node-test: begin -->";
const END: &str = "<!-- table of cargo xtask node-test: end -->";

/// What became of one scenario in one run.
pub enum Outcome {
    Passed,
    Failed(String),
    Skipped(String),
}

/// The whole table.
pub struct Table {
    /// Name and title of each runtime.
    runtimes: Vec<(&'static str, String)>,
    /// The scenarios in the order in which they first came.
    rows: Vec<(String, BTreeMap<&'static str, Counts>)>,
    /// Runtime and scenario of what failed, and why.
    failures: Vec<(String, String)>,
}

impl Table {
    pub fn new(runtimes: &[Runtime]) -> Self {
        Self {
            runtimes: runtimes.iter().map(|runtime| (runtime.name, runtime.title.clone())).collect(),
            rows: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// Adds an outcome; one that isn't a success is shown at once.
    pub fn add(&mut self, scenario: &str, runtime: &Runtime, outcome: Outcome) {
        if !self.rows.iter().any(|(name, _)| name == scenario) {
            self.rows.push((scenario.to_owned(), BTreeMap::new()));
        }
        let row = self.rows.iter_mut().find(|(name, _)| name == scenario);
        let Some((_, cells)) = row else { return };
        let cell = cells.entry(runtime.name).or_default();
        match outcome {
            Outcome::Passed => cell.passed += 1,
            Outcome::Failed(why) => {
                cell.failed += 1;
                let name = format!("{}: {scenario}", runtime.title);
                println!("FAILED  {name}\n        {}", why.replace('\n', "\n        "));
                self.failures.push((name, why));
            }
            Outcome::Skipped(why) => {
                cell.skipped += 1;
                println!("skipped {}: {scenario}: {why}", runtime.title);
            }
        }
    }

    /// Adds what is in another one.
    pub fn append(&mut self, other: Self) {
        self.failures.extend(other.failures);
        for (scenario, cells) in other.rows {
            match self.rows.iter_mut().find(|(name, _)| *name == scenario) {
                Some((_, known)) => {
                    for (runtime, cell) in cells {
                        *known.entry(runtime).or_default() += cell;
                    }
                }
                None => self.rows.push((scenario, cells)),
            }
        }
    }

    /// All outcomes.
    pub fn counts(&self) -> Counts {
        let mut sum = Counts::default();
        for cell in self.rows.iter().flat_map(|(_, cells)| cells.values()) {
            sum += *cell;
        }
        sum
    }

    /// What failed, as libtest says it: once with the reasons, then a line each. Nothing if nothing did.
    pub fn failures(&self) -> String {
        if self.failures.is_empty() {
            return String::new();
        }
        let mut text = String::from("\nfailures:\n");
        for (name, why) in &self.failures {
            let _ = write!(text, "\n---- {name}\n{}\n", why.trim_end());
        }
        text.push_str("\nfailures:\n");
        for (name, why) in &self.failures {
            let _ = writeln!(text, "    {name}: {}", why.lines().next().unwrap_or_default());
        }
        text
    }

    /// As a document has it.
    pub fn markdown(&self) -> String {
        let mut text = String::from("| scenario |");
        for (_, title) in &self.runtimes {
            let _ = write!(text, " {title} |");
        }
        text.push_str("\n| --- |");
        text.push_str(&" --- |".repeat(self.runtimes.len()));
        text.push('\n');
        for (name, cells) in &self.rows {
            let _ = write!(text, "| {} |", name.replace('|', "\\|"));
            for (runtime, _) in &self.runtimes {
                let _ = write!(text, " {} |", cells.get(runtime).map_or_else(|| "–".to_owned(), cell));
            }
            text.push('\n');
        }
        text
    }
}

/// What a cell of the document says.
fn cell(counts: &Counts) -> String {
    match (counts.passed, counts.passed + counts.failed) {
        (_, 0) => "skipped".to_owned(),
        (1, 1) => "ok".to_owned(),
        (passed, all) => format!("{passed}/{all}"),
    }
}

/// Puts the table into a document, between the two lines that are there for it.
pub fn write_into(file: &Path, table: &str) -> Result<(), String> {
    let text = fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    let new = replaced(&text, table).ok_or_else(|| format!("{} has no lines '{BEGIN}' and '{END}'", file.display()))?;
    fs::write(file, new).map_err(|error| format!("cannot write {}: {error}", file.display()))
}

fn replaced(text: &str, table: &str) -> Option<String> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_lines_is_replaced() {
        let text = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let new = replaced(&text, "| new |\n").expect("the lines are there");
        assert_eq!(new, format!("a\n{BEGIN}\n\n| new |\n\n{END}\nb\n"));
        assert_eq!(replaced(&new, "| new |\n").as_deref(), Some(new.as_str()));
        assert!(replaced("a", "b").is_none());
    }

    #[test]
    fn what_failed_is_said_with_its_reason_and_then_in_a_line() {
        let mut table = Table::new(&[]);
        assert_eq!(table.failures(), "");
        table.failures.push(("bun: a scenario".to_owned(), "waited\nfor it\n".to_owned()));
        assert_eq!(
            table.failures(),
            "\nfailures:\n\n---- bun: a scenario\nwaited\nfor it\n\nfailures:\n    bun: a scenario: waited\n"
        );
    }

    #[test]
    fn a_cell_says_how_often() {
        let cell = |passed, failed, skipped| cell(&Counts { passed, failed, skipped });
        assert_eq!(
            [cell(1, 0, 0), cell(10, 0, 0), cell(9, 1, 0), cell(0, 1, 0), cell(0, 0, 3)].join(" "),
            "ok 10/10 9/10 0/1 skipped"
        );
    }
}
