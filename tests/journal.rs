//! `docs/journal.md`, held against what the source can write. What a host's journal really has: `tests/system/journal.rs`.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use opencode_pty::journal::{Event, Field};
use support::markdown::{code_spans, table_rows};

fn page() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/journal.md")).unwrap()
}

/// The first code span of a cell.
fn code(cell: &str) -> String {
    code_spans(cell).next().unwrap_or_else(|| panic!("no code in '{cell}'")).to_owned()
}

#[test]
fn every_event_has_its_row_with_its_priority_and_no_row_is_made_up() {
    let rows = table_rows(&page(), "record");
    let documented: BTreeSet<(String, String)> =
        rows.iter().map(|(_, cells)| (code(&cells[1]), cells[2].clone())).collect();
    let known = Event::ALL.map(|event| (event.id().to_owned(), event.priority().to_string()));
    assert_eq!(documented, known.into_iter().collect());
    assert_eq!(rows.len(), Event::ALL.len());
}

#[test]
fn every_field_has_its_row_and_is_in_a_record() {
    let fields: BTreeSet<String> = table_rows(&page(), "field").iter().map(|(_, cells)| code(&cells[0])).collect();
    let known: BTreeSet<String> = Field::ALL.map(|field| field.name().to_owned()).into_iter().collect();
    assert_eq!(fields, known);
    let records = table_rows(&page(), "record");
    let used: BTreeSet<String> =
        records.iter().flat_map(|(_, cells)| code_spans(&cells[3]).map(str::to_owned).collect::<Vec<_>>()).collect();
    assert_eq!(used, known);
}

#[test]
fn the_commands_on_the_page_name_events_and_fields_that_exist() {
    let page = page();
    let ids: BTreeSet<&str> = Event::ALL.map(Event::id).into_iter().collect();
    let names: BTreeSet<&str> = Field::ALL.map(Field::name).into_iter().collect();
    let is_word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words: Vec<&str> = page.split(|letter: char| !is_word(letter)).collect();
    let strangers: Vec<&&str> = words
        .iter()
        .filter(|word| {
            let id = word.len() == 32 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
            (id && !ids.contains(**word) && **word != "0123456789abcdef0123456789abcdef")
                || (word.starts_with("OPENCODE_PTY_") && !names.contains(**word))
        })
        .collect();
    assert!(strangers.is_empty(), "{strangers:?}");
    assert!(words.iter().filter(|word| ids.contains(**word)).count() > Event::ALL.len(), "no command names an event");
}
