//! A run as one picture: bars, ours first, in an SVG that needs nothing else.

use std::fmt::Write as _;

use super::report::{Figure, Report};
use super::stats::readable;

/// What is drawn, in this order; the tables have the rest.
const DRAWN: [&str; 14] = [
    "echo-first",
    "echo-exit",
    "bash-prompt",
    "bash-exit",
    "steps",
    "flow-zeros-1",
    "flow-base64-1",
    "flow-seq-1",
    "flow-base64-16",
    "trip",
    "memory-resident",
    "growth-start",
    "growth-flow",
    "cpu",
];

const WIDTH: f64 = 960.0;
const LABELS: f64 = 340.0;
const BARS: f64 = 460.0;
const LINE: f64 = 22.0;
const TITLE: f64 = 34.0;

pub fn draw(report: &Report) -> String {
    let figures: Vec<&Figure> = DRAWN.iter().filter_map(|id| report.figure(id)).collect();
    let mut body = String::new();
    let mut y = 40.0;
    for figure in figures {
        y = draw_figure(&mut body, figure, y);
    }
    for line in report.machine.text().lines() {
        y += LINE * 0.8;
        let _ = writeln!(body, r#"<text class="small" x="16" y="{y}">{}</text>"#, escaped(line));
    }
    let height = y + 20.0;
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">
<title>opencode-pty beside what a user would pick instead</title>
<style>
text {{ font: 13px sans-serif; fill: #222 }}
.head {{ font-weight: bold; font-size: 14px }}
.small {{ font-size: 11px; fill: #666 }}
.ours {{ fill: #1f6feb }}
.other {{ fill: #9aa4b2 }}
.spread {{ stroke: #222; stroke-width: 1.5 }}
</style>
<rect width="100%" height="100%" fill="#fff"/>
<text class="head" x="16" y="26">opencode-pty beside what a user would pick instead: median, and p10 to p90 as a line</text>
{body}</svg>
"##
    )
}

/// Draws one figure from `y` on; gives where it ends.
fn draw_figure(body: &mut String, figure: &Figure, mut y: f64) -> f64 {
    let unit = if figure.unit.is_empty() { String::new() } else { format!(", {}", figure.unit) };
    y += TITLE;
    let _ =
        writeln!(body, r#"<text class="head" x="16" y="{y}">{}</text>"#, escaped(&format!("{}{unit}", figure.title)));
    let most = figure.rows.iter().map(|row| row.summary.p90.max(row.summary.median)).fold(f64::MIN_POSITIVE, f64::max);
    let compared = figure.rows.iter().any(|row| row.ratio.is_some());
    for (index, row) in figure.rows.iter().enumerate() {
        y += LINE;
        let at = |value: f64| LABELS + value.max(0.0) / most * BARS;
        let class = if !compared || index == 0 { "ours" } else { "other" };
        let (top, middle, end) = (y - 12.0, y - 5.0, at(row.summary.median));
        let _ = writeln!(body, r#"<text x="24" y="{y}">{}</text>"#, escaped(&row.who));
        let _ = writeln!(
            body,
            r#"<rect class="{class}" x="{LABELS}" y="{top}" width="{:.1}" height="14"/>"#,
            (end - LABELS).max(1.0)
        );
        if row.summary.samples > 1 {
            let (from, to) = (at(row.summary.p10), at(row.summary.p90));
            let _ = writeln!(body, r#"<line class="spread" x1="{from:.1}" y1="{middle}" x2="{to:.1}" y2="{middle}"/>"#);
        }
        let ratio = row.ratio.map(|ratio| format!("  (ours ÷ this: {ratio:.2})")).unwrap_or_default();
        let beside = end.max(at(row.summary.p90)) + 8.0;
        let _ = writeln!(body, r#"<text x="{beside:.1}" y="{y}">{}{ratio}</text>"#, readable(row.summary.median));
    }
    y
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::report;

    #[test]
    fn a_bar_is_as_long_as_its_number_is_large() {
        let mut report = report();
        report.figures.iter_mut().for_each(|figure| figure.id = "echo-first".to_owned());
        let picture = draw(&report);
        let widths: Vec<f64> = picture
            .split("<rect class=")
            .skip(1)
            .filter_map(|bar| bar.split_once("width=\"")?.1.split_once('"')?.0.parse().ok())
            .collect();
        // 9 and 10 of 12.
        assert_eq!(widths, [345.0, 383.3]);
    }

    #[test]
    fn what_is_drawn_can_not_end_an_element() {
        assert_eq!(escaped("a<b>&c"), "a&lt;b&gt;&amp;c");
    }
}
