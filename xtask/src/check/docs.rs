//! Holds README.md and `docs/` to the tree: links, paths in backticks, and the tests that `docs/threats.md` names.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::rust::tokens;
use super::{code_spans, files, read, table_rows};

/// Where a path in backticks that is meant to be in this repository starts.
const TOP: [&str; 7] = ["src", "docs", "tests", "units", "xtask", ".ci", ".cargo"];

/// The table whose rows name tests.
const THREATS: &str = "docs/threats.md";

pub fn check(root: &Path) -> Vec<String> {
    let mut faults = Vec::new();
    let mut pages = files(&root.join("docs"), "md");
    pages.insert(0, root.join("README.md"));
    for page in pages {
        let name = page.strip_prefix(root).unwrap_or(&page).to_string_lossy().into_owned();
        match read(&page) {
            Ok(text) => faults.extend(judge_page(root, &name, &text)),
            Err(fault) => faults.push(fault),
        }
    }
    match read(&root.join(THREATS)) {
        Ok(text) => faults.extend(judge_threats(&text, &functions(root))),
        Err(fault) => faults.push(fault),
    }
    faults
}

fn judge_page(root: &Path, name: &str, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let here = root.join(name).parent().map_or_else(|| root.to_owned(), Path::to_owned);
    for (number, line) in prose(text) {
        for target in links(line) {
            if let Some(reason) = broken_link(&here, &root.join(name), target) {
                faults.push(format!("{name}:{number}: {reason}"));
            }
        }
        for span in code_spans(line) {
            if let Some(path) = repository_path(span)
                && ![root.join(path), here.join(path), root.join("src").join(path)].iter().any(|path| path.exists())
            {
                faults.push(format!("{name}:{number}: there is no '{path}'"));
            }
        }
    }
    faults
}

/// The lines outside code blocks, numbered from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_block = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        in_block ^= fence;
        !in_block && !fence
    })
}

/// The targets of `[text](target)` on a line.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target.trim()))
}

fn broken_link(here: &Path, page: &Path, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let path = if path.is_empty() { page.to_owned() } else { here.join(path) };
    if !path.exists() {
        return Some(format!("the link '{target}' leads nowhere"));
    }
    let anchor = anchor?;
    let text = read(&path).ok()?;
    let found = prose(&text).any(|(_, line)| line.starts_with('#') && slug(line) == anchor);
    (!found).then(|| format!("the link '{target}' leads to no heading"))
}

/// The anchor of a heading.
fn slug(heading: &str) -> String {
    let kept = |letter: &char| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_');
    heading.trim_start_matches('#').trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
}

/// The path of a file in this repository that a code span names, if that is what it does.
fn repository_path(span: &str) -> Option<&str> {
    let path = span.split("::").next().unwrap_or(span).trim_end_matches('/');
    let plain = path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_./-".contains(&byte));
    if !plain || path.starts_with('/') || path.contains("...") {
        return None;
    }
    let (first, _) = path.split_once('/')?;
    let source = Path::new(path).extension().is_some_and(|extension| extension == "rs" || extension == "md");
    (TOP.contains(&first) || source).then_some(path)
}

/// Each row of the table must name tests that exist, or say why there is none.
fn judge_threats(text: &str, functions: &BTreeSet<(PathBuf, String)>) -> Vec<String> {
    let mut faults = Vec::new();
    let header = text.lines().find(|line| line.starts_with('|') && line.to_lowercase().contains("test"));
    let column = header.and_then(|line| super::cells(line).iter().position(|cell| cell.eq_ignore_ascii_case("test")));
    let Some(column) = column else { return vec![format!("{THREATS}: no table with the column 'Test'")] };
    for (number, cells) in table_rows(text, "test") {
        let cell = cells.get(column).map_or("", String::as_str);
        if cell.is_empty() {
            faults.push(format!("{THREATS}:{number}: a row without a test, and without a word about it"));
        }
        for span in code_spans(cell).filter(|span| is_test(span)) {
            let (path, name) = span.rsplit_once("::").unwrap_or(("", span));
            let file = Some(path).filter(|path| path.contains('/')).map(|path| path.split("::").next().unwrap_or(path));
            let found = functions.iter().any(|(known, function)| {
                function == name && file.is_none_or(|file| file.contains("...") || known == Path::new(file))
            });
            if !found {
                faults.push(format!("{THREATS}:{number}: there is no test '{span}'"));
            }
        }
    }
    faults
}

/// A test's name has words in it, or a path before it; anything else in backticks is about something else.
fn is_test(span: &str) -> bool {
    let (path, name) = span.rsplit_once("::").unwrap_or(("", span));
    let letters = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    name.bytes().all(letters) && (name.contains('_') || path.contains('/'))
}

/// Every function in the tests, the program and these commands, with the file it is in.
pub fn functions(root: &Path) -> BTreeSet<(PathBuf, String)> {
    let mut found = BTreeSet::new();
    for file in ["tests", "src", "xtask"].iter().flat_map(|dir| files(&root.join(dir), "rs")) {
        let name = file.strip_prefix(root).unwrap_or(&file).to_owned();
        let tokens = tokens(&read(&file).unwrap_or_default());
        let names = tokens.windows(2).filter_map(|pair| match pair {
            [keyword, name] if keyword == "fn" => Some(name.clone()),
            _ => None,
        });
        found.extend(names.map(|function| (name.clone(), function)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository() -> PathBuf {
        support::host::workspace()
    }

    fn faults(text: &str) -> Vec<String> {
        judge_page(&repository(), "docs/page.md", text)
    }

    #[test]
    fn a_link_must_lead_somewhere() {
        assert_eq!(
            faults("[a](../Cargo.toml) [b](https://x.invalid/y) [c](#here)").len(),
            1,
            "the page does not exist"
        );
        assert_eq!(faults("[a](../Cargo.tml)").len(), 1);
        assert_eq!(faults("[a](../xtask) and\n```\n[b](nowhere)\n```\n"), [] as [&str; 0]);
    }

    #[test]
    fn a_path_in_backticks_must_exist() {
        assert_eq!(
            faults("`src/main.rs`, `/usr/nothing.rs`, `a/b`, `tests/*/x`, `xtask/src/check/docs.rs::x`"),
            [] as [&str; 0]
        );
        assert_eq!(faults("`src/nothing.rs` and `tests/nothing/`, `sys/nothing.rs`").len(), 3);
    }

    #[test]
    fn an_anchor_is_its_heading_in_small_letters() {
        assert_eq!(slug("## What it *is*, in short"), "what-it-is-in-short");
    }

    #[test]
    fn a_threat_names_a_test_that_exists() {
        let functions = BTreeSet::from([(PathBuf::from("tests/system/a.rs"), "it_is_refused".to_owned())]);
        let judge = |cell: &str| {
            judge_threats(&format!("| | answer | Test |\n|---|---|---|\n| T1 | x | {cell} |\n"), &functions)
        };
        for sound in [
            "`it_is_refused`",
            "`tests/system/a.rs::it_is_refused`",
            "`tests/system/...::it_is_refused`",
            "none: open",
            "see `selftest`",
        ] {
            assert_eq!(judge(sound), [] as [&str; 0], "{sound}");
        }
        for unsound in ["", "`it_is_not`", "`tests/system/b.rs::it_is_refused`", "`tests/system/a.rs::other`"] {
            assert_eq!(judge(unsound).len(), 1, "{unsound}");
        }
        assert_eq!(judge_threats("no table", &functions).len(), 1);
    }
}
