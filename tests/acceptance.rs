//! `docs/root-acceptance.md`, held against what `opencode-pty selftest` checks: each of the 16 names exactly the checks that
//! say they serve it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use support::markdown::code_spans;

/// The names that the page gives each of its numbered checks.
fn on_the_page() -> BTreeMap<u64, BTreeSet<String>> {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/root-acceptance.md")).unwrap();
    let sections = page.split("\n### ").skip(1).map(|section| {
        let number = section.split('.').next().unwrap().parse().unwrap();
        let item = section.split("\n- **selftest**: ").nth(1).unwrap().split("\n- **").next().unwrap();
        (number, code_spans(item).map(str::to_owned).collect())
    });
    sections.collect()
}

#[test]
fn every_check_of_root_acceptance_names_the_selftest_checks_that_serve_it_and_no_others() {
    let output = Command::new(env!("CARGO_BIN_EXE_opencode-pty"))
        .args(["selftest", "--list-checks", "--json"])
        .output()
        .unwrap();
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut serving: BTreeMap<u64, BTreeSet<String>> = (1..=16).map(|number| (number, BTreeSet::new())).collect();
    for check in list["checks"].as_array().unwrap() {
        for number in check["acceptance"].as_array().unwrap() {
            let names = serving.get_mut(&number.as_u64().unwrap()).unwrap();
            names.insert(check["name"].as_str().unwrap().to_owned());
        }
    }
    assert_eq!(on_the_page(), serving);
}

#[test]
fn each_of_the_16_checks_has_a_stage_a_command_a_limit_and_a_signature() {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/root-acceptance.md")).unwrap();
    let sections: Vec<&str> =
        page.split("\n### ").skip(1).map(|section| section.split("\n## ").next().unwrap()).collect();
    assert_eq!(sections.len(), 16);
    for (section, number) in sections.iter().zip(1..) {
        assert!(section.starts_with(&format!("{number}. ")), "{section}");
        let items: Vec<(&str, &str)> =
            section.split("\n- **").skip(1).map(|item| item.split_once("**: ").unwrap()).collect();
        let names: Vec<&str> = items.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["stage", "command", "selftest", "cannot show", "signs"], "check {number}");
        assert!(items.iter().all(|(_, text)| text.trim().len() > 3), "{section}");
        let stages = ["build tree", "disposable VM", "target, before install", "target, installed"];
        assert!(stages.iter().any(|stage| items[0].1.starts_with(stage)), "{section}");
    }
}
