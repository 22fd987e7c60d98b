//! The operator's pages, held against the program: man pages against each role's help, `docs/operations.md` against error
//! codes and records. Whether the man pages are well formed, and what the completions offer: `tests/manuals.rs`.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use opencode_pty::frame::message::ErrorCode;
use opencode_pty::journal::Event;
use support::markdown::{code_spans, table_rows};
use support::usage;

const PROGRAM: &str = env!("CARGO_BIN_EXE_opencode-pty");

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn page(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap()
}

fn man(name: &str) -> String {
    page(&format!("docs/man/{name}"))
}

/// What a role prints for `--help`.
fn help(role: &str) -> String {
    let output = Command::new(PROGRAM).args([role, "--help"]).output().unwrap();
    assert!(output.status.success(), "{role}");
    String::from_utf8(output.stdout).unwrap()
}

/// A role, its page, and the heading below which the page speaks of that role alone.
const ROLES: [(&str, &str, &str); 5] = [
    ("supervisor", "opencode-pty-supervisor.8", ".Sh DESCRIPTION"),
    ("client", "opencode-pty-client.1", ".Sh DESCRIPTION"),
    ("launcher", "opencode-pty-launcher.8", ".Sh DESCRIPTION"),
    ("list", "opencode-pty.1", ".Ss list"),
    ("selftest", "opencode-pty.1", ".Ss selftest"),
];

/// The lines from a heading to the next.
fn section<'a>(page: &'a str, heading: &str) -> Vec<&'a str> {
    let mut lines = page.lines().skip_while(|line| *line != heading);
    assert_eq!(lines.next(), Some(heading));
    lines.take_while(|line| !line.starts_with(".Sh ") && !line.starts_with(".Ss ")).collect()
}

/// The options of a list in mdoc(7).
fn options_of(lines: &[&str]) -> BTreeSet<String> {
    let items = lines.iter().filter_map(|line| line.strip_prefix(".It Fl -"));
    items.map(|item| format!("--{}", item.split(' ').next().unwrap())).collect()
}

/// The exit codes of a list in mdoc(7).
fn codes_of(lines: &[&str]) -> BTreeSet<String> {
    let items = lines.iter().filter_map(|line| line.strip_prefix(".It "));
    items.filter(|item| item.parse::<u8>().is_ok()).map(str::to_owned).collect()
}

#[test]
fn every_option_of_a_roles_help_is_on_its_page_and_the_other_way_round() {
    for (role, name, heading) in ROLES {
        let page = man(name);
        assert_eq!(options_of(&section(&page, heading)), usage::options(&help(role)), "{role} in {name}");
    }
}

#[test]
fn every_option_with_its_value_is_in_the_synopsis() {
    for (role, name, _) in ROLES {
        let page = man(name);
        let synopsis = section(&page, ".Sh SYNOPSIS");
        let of_role: Vec<&str> = if name == "opencode-pty.1" {
            let rest = synopsis.iter().skip_while(|line| **line != format!(".Cm {role}")).skip(1);
            rest.take_while(|line| line.starts_with(".Op")).copied().collect()
        } else {
            synopsis
        };
        let help = help(role);
        // argh's own line: `Usage: NAME [--json] [--unit <unit>]`.
        let line = help.lines().find(|line| line.starts_with("Usage: ")).unwrap();
        let wanted: BTreeSet<String> = line
            .split('[')
            .filter_map(|part| part.trim_end().strip_suffix(']')?.strip_prefix("--"))
            .map(|option| match option.split_once(' ') {
                Some((option, value)) => format!(".Op Fl -{option} Ar {}", value.trim_matches(['<', '>'])),
                None => format!(".Op Fl -{option}"),
            })
            .collect();
        let found: BTreeSet<String> =
            of_role.iter().filter(|line| line.starts_with(".Op Fl")).map(|line| (*line).to_owned()).collect();
        assert_eq!(found, wanted, "{role} in {name}");
    }
}

#[test]
fn every_default_of_a_roles_help_is_on_its_page() {
    let mut seen = 0;
    for (role, name, heading) in ROLES {
        let page = man(name);
        let words: BTreeSet<&str> = section(&page, heading).iter().flat_map(|line| line.split(' ')).collect();
        let help = help(role).split_whitespace().collect::<Vec<_>>().join(" ");
        for default in help.split("(default ").skip(1).map(|rest| rest.split(')').next().unwrap()) {
            seen += 1;
            let stated = default.split(' ').filter(|word| word.contains(['/', '.']) || !default.contains(' '));
            for word in stated {
                let found = [word.to_owned(), format!("{word}."), format!("{word};")];
                assert!(found.iter().any(|word| words.contains(&**word)), "{role}: '{word}' is not in {name}");
            }
        }
    }
    assert!(seen >= 10, "{seen} defaults");
}

#[test]
fn every_exit_code_of_a_roles_help_is_on_its_page_and_the_other_way_round() {
    for (role, name, _) in ROLES {
        let page = man(name);
        let mut lines = section(&page, ".Sh EXIT STATUS");
        if name == "opencode-pty.1" {
            let start = lines.iter().position(|line| **line == format!(".Cm {role} :")).unwrap() + 1;
            let rest = lines.split_off(start);
            lines = rest.into_iter().take_while(|line| *line != "Of").collect();
        }
        let help = help(role);
        let codes = help.split_once("Exit codes:").unwrap().1.split([';', '\n']).map(str::trim);
        let of_help: BTreeSet<String> = codes
            .filter_map(|clause| clause.split(' ').next().filter(|word| word.parse::<u8>().is_ok()))
            .map(str::to_owned)
            .collect();
        assert!(of_help.len() >= 2, "{role}: {of_help:?}");
        assert_eq!(codes_of(&lines), of_help, "{role} in {name}");
    }
}

#[test]
fn every_role_of_the_usage_is_on_the_first_page_and_has_its_own_words_there() {
    let page = man("opencode-pty.1");
    let items = section(&page, ".Sh DESCRIPTION").into_iter().filter_map(|line| line.strip_prefix(".It "));
    let listed: BTreeSet<String> = items
        .flat_map(|item| item.split(" , ").collect::<Vec<_>>())
        .map(|word| word.replace("Cm ", "").replace("Fl -", "--"))
        .collect();
    let usage = Command::new(PROGRAM).arg("--help").output().unwrap();
    assert_eq!(listed, usage::roles(&String::from_utf8(usage.stdout).unwrap()));
}

#[test]
fn every_page_has_the_sections_a_reader_looks_for_and_refers_to_pages_that_exist() {
    let pages: Vec<String> = fs::read_dir(root().join("docs/man"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(pages.len(), 5, "{pages:?}");
    for name in &pages {
        let text = man(name);
        let (title, number) = name.rsplit_once('.').unwrap();
        assert!(text.contains(&format!(".Dt {} {number}\n", title.to_uppercase())), "{name}");
        assert!(text.contains(&format!(".Nm {title}\n")), "{name}");
        let program = ["SYNOPSIS", "EXIT STATUS"];
        let wanted = ["NAME", "DESCRIPTION", "FILES", "EXAMPLES", "SEE ALSO"];
        for heading in wanted.iter().chain(program.iter().filter(|_| number != "7")) {
            assert!(text.contains(&format!("\n.Sh {heading}\n")), "{name} has no {heading}");
        }
        for reference in text.lines().filter_map(|line| line.strip_prefix(".Xr opencode-pty")) {
            let mut words = reference.split(' ');
            let file = format!("opencode-pty{}.{}", words.next().unwrap(), words.next().unwrap());
            assert!(pages.contains(&file) && file != *name, "{name} refers to {file}");
        }
    }
}

#[test]
fn the_protocols_page_has_every_error_code_and_no_other() {
    let page = man("opencode-pty-protocol.7");
    let items = section(&page, ".Ss Error codes").into_iter().filter_map(|line| line.strip_prefix(".It Cm "));
    let words: BTreeSet<&str> = items.collect();
    assert_eq!(words, ErrorCode::ALL.map(ErrorCode::word).into_iter().collect());
}

// ---- docs/operations.md ------------------------------------------------------------------------------------------------

/// The first code span of a cell, where it is alone there.
fn code(cell: &str) -> Option<String> {
    let span = code_spans(cell).next()?;
    (cell == format!("`{span}`")).then(|| span.to_owned())
}

#[test]
fn operations_has_a_row_for_every_record_and_for_every_error_code() {
    let page = page("docs/operations.md");
    let records: BTreeSet<String> =
        table_rows(&page, "record").iter().filter_map(|(_, cells)| code(&cells[1])).collect();
    assert_eq!(records, Event::ALL.map(|event| event.id().to_owned()).into_iter().collect());
    let codes: BTreeSet<String> = table_rows(&page, "code").iter().filter_map(|(_, cells)| code(&cells[0])).collect();
    assert_eq!(codes, ErrorCode::ALL.map(|code| code.word().to_owned()).into_iter().collect());
    for (line, cells) in table_rows(&page, "record").into_iter().chain(table_rows(&page, "code")) {
        assert!(cells.iter().all(|cell| !cell.is_empty()), "docs/operations.md:{line}");
    }
}

#[test]
fn operations_and_journal_call_the_records_by_the_same_names() {
    let names = |page: &str| -> BTreeSet<(String, Option<String>)> {
        let rows = table_rows(page, "record");
        rows.iter().map(|(_, cells)| (cells[0].clone(), code(&cells[1]))).collect()
    };
    assert_eq!(names(&page("docs/operations.md")), names(&page("docs/journal.md")));
}

/// The sentences a supervisor can end with, as `Display` has them; `{` begins what differs.
#[test]
fn operations_knows_every_sentence_the_supervisor_can_end_with() {
    let source = page("src/supervisor/mod.rs");
    let display = source.split_once("impl fmt::Display for Error {").unwrap().1.split_once("\nimpl ").unwrap().0;
    let known: Vec<String> = table_rows(&page("docs/operations.md"), "the supervisor ends with")
        .into_iter()
        .map(|(_, cells)| cells[0].clone())
        .collect();
    let sentences: Vec<&str> = display.split('"').skip(1).step_by(2).filter(|text| text.contains(' ')).collect();
    assert!(sentences.len() >= 6, "{sentences:?}");
    // A usage error has its own words, and a system call's failure those of the call.
    for sentence in sentences.iter().filter(|text| !text.starts_with("--max-sessions")) {
        let fixed = sentence.split('{').next().unwrap().trim_end_matches([' ', ':']);
        assert!(known.iter().any(|cell| cell.starts_with(fixed)), "'{sentence}' is not in docs/operations.md");
    }
}

#[test]
fn security_names_a_private_channel_and_makes_no_address_up() {
    let page = page("SECURITY.md");
    assert!(page.contains("private channel") && page.contains("Contact:"));
    let links = page.split_whitespace().filter(|word| word.contains('@') || word.contains("://"));
    assert_eq!(links.collect::<Vec<_>>(), Vec::<&str>::new());
}
