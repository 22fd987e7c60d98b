//! The numbers of `docs/performance.md`, put there by the run that found them.
//!
//! The page has a place for each table: between `<!-- bench: ID -->` and `<!-- /bench -->`, where ID is a figure's, `targets`
//! or `machine`. What is around them is written by hand.

use std::fmt::Write as _;
use std::fs;

use support::host;

use super::report::{Figure, Report};
use super::stats::readable;
use super::{as_json, picture, write};
use crate::Failure;

const BEGIN: &str = "<!-- bench: ";
const END: &str = "<!-- /bench -->";

/// Writes the page's tables, the picture and the data.
pub fn write_docs(report: &Report) -> Result<(), Failure> {
    let docs = host::workspace().join("docs");
    let folder = docs.join("performance");
    fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    write(&folder.join("bench.json"), &as_json(report)?)?;
    write(&folder.join("bench.svg"), &picture::draw(report))?;
    let page = docs.join("performance.md");
    let text = fs::read_to_string(&page).map_err(|error| format!("cannot read {}: {error}", page.display()))?;
    write(&page, &filled(&text, report)?)
}

/// The page with every table replaced.
fn filled(page: &str, report: &Report) -> Result<String, String> {
    let mut text = String::new();
    let mut rest = page;
    while let Some((before, behind)) = rest.split_once(BEGIN) {
        let (id, old) = behind.split_once(" -->\n").ok_or("docs/performance.md: a place without an end of its name")?;
        let (_, after) = old.split_once(END).ok_or_else(|| format!("docs/performance.md: '{id}' without {END}"))?;
        let table = table(id, report).ok_or_else(|| format!("docs/performance.md: no figure '{id}'"))?;
        let _ = write!(text, "{before}{BEGIN}{id} -->\n{table}{END}");
        rest = after;
    }
    text.push_str(rest);
    Ok(text)
}

fn table(id: &str, report: &Report) -> Option<String> {
    match id {
        "machine" => Some(format!("```text\n{} run · {}```\n", report.size, report.machine.text())),
        "targets" => {
            let mut text = "| target | wanted | found | |\n| --- | --- | --- | --- |\n".to_owned();
            for target in &report.targets {
                let sign = if target.at_most { "≤" } else { "≥" };
                let verdict = if target.holds() { "holds" } else { "**missed**" };
                let (limit, found) = (readable(target.limit), readable(target.found));
                let _ = writeln!(text, "| {} | {sign} {limit} | {found} | {verdict} |", target.what);
            }
            Some(text)
        }
        "instructions" if report.figure(id).is_none() => {
            Some("Not measured in this run: valgrind was not there.\n".to_owned())
        }
        id => report.figure(id).map(rows),
    }
}

fn rows(figure: &Figure) -> String {
    let unit = if figure.unit.is_empty() { String::new() } else { format!(", {}", figure.unit) };
    let compared = figure.rows.iter().any(|row| row.ratio.is_some());
    let (head, line) = if compared { (" ours ÷ this |", " --- |") } else { ("", "") };
    let mut text = format!("| {}{unit} | median | p10 – p90 |{head}\n| --- | --- | --- |{line}\n", figure.title);
    for row in &figure.rows {
        let summary = row.summary;
        let spread = if summary.samples > 1 {
            format!("{} – {}", readable(summary.p10), readable(summary.p90))
        } else {
            String::new()
        };
        let _ = write!(text, "| {} | {} | {spread} |", row.who, readable(summary.median));
        if compared {
            let _ = write!(text, " {} |", row.ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default());
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::report;

    #[test]
    fn a_table_is_replaced_and_what_is_around_it_stays() {
        let page = "above\n<!-- bench: a -->\nold\n<!-- /bench -->\nbetween\n<!-- bench: targets -->\n<!-- /bench -->\nbelow\n";
        let filled = filled(page, &report()).expect("every place has a figure");
        assert!(filled.starts_with("above\n<!-- bench: a -->\n| A thing, ms | median |"), "{filled}");
        assert!(filled.contains("| theirs | 10 | 9 – 12 | 0.90 |\n<!-- /bench -->\nbetween\n"), "{filled}");
        assert!(filled.contains("| small | ≥ 0.950 | 0.900 | **missed** |"), "{filled}");
        assert!(filled.ends_with("<!-- /bench -->\nbelow\n") && !filled.contains("\nold\n"), "{filled}");
        assert_eq!(super::filled(&filled, &report()).as_deref(), Ok(filled.as_str()));
    }

    #[test]
    fn a_place_for_a_figure_that_is_not_there_is_an_error() {
        for page in ["<!-- bench: b -->\n<!-- /bench -->", "<!-- bench: a -->\n", "<!-- bench: a"] {
            assert!(filled(page, &report()).is_err(), "{page}");
        }
    }
}
