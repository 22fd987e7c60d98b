//! What a run found: figures with rows, targets with verdicts, the machine; and how it reads on a terminal.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::stats::{Summary, readable};

/// Everything one run found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub machine: Machine,
    /// `full`, `quick` or `smoke`.
    pub size: String,
    pub figures: Vec<Figure>,
    pub targets: Vec<Target>,
    /// What was left out, and why.
    pub skipped: Vec<String>,
}

/// What it ran on.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    pub date: String,
    pub revision: String,
    pub processor: String,
    pub processors: usize,
    pub memory_gib: f64,
    pub kernel: String,
    pub systemd: String,
    pub script: String,
    pub load_before: String,
    pub load_after: String,
}

/// One figure: what was measured, and of whom.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figure {
    pub id: String,
    pub title: String,
    pub unit: String,
    pub rows: Vec<Row>,
}

/// One line of a figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    pub who: String,
    pub summary: Summary,
    /// Ours divided by this, where the two can be compared.
    pub ratio: Option<f64>,
}

/// What SPEC 14 asks for, and what there is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Target {
    pub what: String,
    pub found: f64,
    pub limit: f64,
    pub at_most: bool,
}

impl Target {
    pub fn holds(&self) -> bool {
        if self.at_most { self.found <= self.limit } else { self.found >= self.limit }
    }
}

impl Figure {
    pub fn new(id: &str, title: &str, unit: &str) -> Self {
        Self { id: id.to_owned(), title: title.to_owned(), unit: unit.to_owned(), rows: Vec::new() }
    }

    /// Adds a line that stands for itself.
    pub fn row(&mut self, who: &str, summary: Summary) -> &mut Self {
        self.rows.push(Row { who: who.to_owned(), summary, ratio: None });
        self
    }

    /// Adds a line of somebody else, to be compared with the first one, ours.
    pub fn against(&mut self, who: &str, summary: Summary) -> &mut Self {
        let ours = self.rows.first().map(|row| row.summary.median);
        let ratio = ours.map(|ours| ours / summary.median).filter(|ratio| ratio.is_finite());
        self.rows.push(Row { who: who.to_owned(), summary, ratio });
        self
    }
}

impl Report {
    /// The figure of this name.
    pub fn figure(&self, id: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.id == id)
    }

    /// What every run must have found and this one has not.
    pub fn missing(&self, wanted: &[&str]) -> Vec<String> {
        let measured = |id: &str| self.figure(id).is_some_and(|figure| !figure.rows.is_empty());
        wanted.iter().filter(|id| !measured(id)).map(|id| (*id).to_owned()).collect()
    }

    /// The whole report as text: on a terminal, and in `docs/performance.md`.
    pub fn table(&self) -> String {
        let mut text = String::new();
        for figure in &self.figures {
            let name = format!("{}, {}", figure.title, figure.unit);
            let _ = writeln!(text, "{name:<72} {:>10}  {:>17}  {:>11}", "median", "p10 – p90", "ours ÷ this");
            for row in &figure.rows {
                let Summary { samples, median, p10, p90 } = row.summary;
                let spread =
                    if samples > 1 { format!("{} – {}", readable(p10), readable(p90)) } else { String::new() };
                let ratio = row.ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default();
                let line = format!("  {:<70} {:>10}  {spread:>17}  {ratio:>11}", row.who, readable(median));
                let _ = writeln!(text, "{}", line.trim_end());
            }
            text.push('\n');
        }
        let _ = writeln!(text, "{:<72} {:>10}  {:>17}", "Targets", "found", "wanted");
        for target in &self.targets {
            let limit = format!("{} {}", if target.at_most { "≤" } else { "≥" }, readable(target.limit));
            let verdict = if target.holds() { "holds" } else { "MISSED" };
            let _ = writeln!(text, "  {:<70} {:>10}  {limit:>17}  {verdict:>11}", target.what, readable(target.found));
        }
        for reason in &self.skipped {
            let _ = writeln!(text, "\nNOT MEASURED: {reason}");
        }
        let _ = write!(text, "\n{}", self.machine.text());
        text
    }
}

impl Machine {
    /// Where and when, in a few lines.
    pub fn text(&self) -> String {
        format!(
            "{} · revision {}\n{} × {} · {:.0} GiB · Linux {}\n{} · {}\nload before {} · after {}\n",
            self.date,
            self.revision,
            self.processors,
            self.processor,
            self.memory_gib,
            self.kernel,
            self.systemd,
            self.script,
            self.load_before,
            self.load_after,
        )
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn report() -> Report {
        let mut figure = Figure::new("a", "A thing", "ms");
        figure.row("ours", Summary { samples: 3, median: 9.0, p10: 8.5, p90: 10.0 });
        figure.against("theirs", Summary { samples: 3, median: 10.0, p10: 9.0, p90: 12.0 });
        Report {
            machine: Machine::default(),
            size: "quick".to_owned(),
            figures: vec![figure],
            targets: vec![
                Target { what: "fast".to_owned(), found: 0.9, limit: 0.9, at_most: true },
                Target { what: "small".to_owned(), found: 0.9, limit: 0.95, at_most: false },
            ],
            skipped: vec!["b: no tool".to_owned()],
        }
    }

    #[test]
    fn a_line_is_compared_with_ours_and_a_miss_is_said_aloud() {
        let text = report().table();
        let line = |who: &str| text.lines().find(|line| line.trim_start().starts_with(who)).unwrap_or_default();
        assert!(line("theirs").ends_with("0.90"), "{text}");
        assert!(line("ours").ends_with("8.50 – 10"), "{text}");
        assert!(line("fast").ends_with("holds"), "{text}");
        assert!(line("small").ends_with("MISSED"), "{text}");
        assert!(text.contains("NOT MEASURED: b: no tool"), "{text}");
    }

    #[test]
    fn what_was_not_measured_is_missing() {
        let mut report = report();
        report.figures.push(Figure::new("empty", "", ""));
        assert_eq!(report.missing(&["a", "empty", "b"]), ["empty", "b"]);
    }

    #[test]
    fn a_report_survives_its_file() {
        let json = serde_json::to_string(&report()).expect("it is plain data");
        let again: Report = serde_json::from_str(&json).expect("it was written like this");
        assert_eq!(again.table(), report().table());
    }
}
