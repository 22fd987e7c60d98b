//! Holds `src/` to the table in `docs/architecture.md`: who may import whom, and who may name which package.
//!
//! Beside the table it enforces the few rules that are not to be changed by editing it: zbus in `systemd` alone, rustix in
//! `sys` and `account` alone, roles apart from each other, `unsafe` only in the files of `src/sys/` that the page names next to
//! the word, and modules that do no I/O.

use std::collections::BTreeSet;
use std::path::Path;

use super::rust::{paths, tokens, without_tests};
use super::{code_spans, files, read, table_rows};

/// The page with the table.
const PAGE: &str = "docs/architecture.md";

/// Never import each other.
const ROLES: [&str; 6] = ["supervisor", "client", "launcher", "inner_exec", "selftest", "list"];

/// Packages that only these modules may ever name.
const RESERVED: [(&str, &[&str]); 2] = [("zbus", &["systemd"]), ("rustix", &["sys", "account"])];

/// Modules that tables and random loops drive: no I/O, no clock, no environment.
const PURE: [&str; 3] = ["frame", "supervisor::admission", "systemd::unit"];

/// What a pure module does not name.
const IMPURE: [&str; 9] = [
    "std::fs",
    "std::net",
    "std::env",
    "std::process",
    "std::thread",
    "Instant::now",
    "SystemTime::now",
    "std::os",
    "std::io",
];

pub fn check(root: &Path) -> Vec<String> {
    let loaded = read(&root.join(PAGE)).and_then(|page| Ok((page, read(&root.join("Cargo.toml"))?)));
    let (page, manifest) = match loaded {
        Ok(loaded) => loaded,
        Err(fault) => return vec![fault],
    };
    let source = root.join("src");
    let mut modules = Vec::new();
    let mut faults = Vec::new();
    for file in files(&source, "rs") {
        let name = file.strip_prefix(&source).unwrap_or(&file).to_string_lossy().into_owned();
        match read(&file) {
            Ok(text) => modules.push((name, text)),
            Err(fault) => faults.push(fault),
        }
    }
    if modules.is_empty() {
        faults.push("src/ has no module".to_owned());
    }
    faults.extend(judge(&page, &manifest, &modules));
    faults
}

/// Judges files (their names below `src/`, their texts) by the page. Does no I/O.
fn judge(page: &str, manifest: &str, modules: &[(String, String)]) -> Vec<String> {
    let mut faults = Vec::new();
    let rows = rows(page);
    if rows.is_empty() {
        return vec![format!("{PAGE}: no table with the column 'may import'")];
    }
    faults.extend(judge_table(&rows));
    let packages = packages(manifest);
    let unsafe_files = unsafe_files(page);
    for (file, text) in modules {
        let tokens = tokens(text);
        if tokens.iter().any(|token| token == "unsafe" || token == "unsafe_code")
            && !unsafe_files.contains(file.as_str())
        {
            faults.push(format!("src/{file}: unsafe, but {PAGE} does not name the file as one that has any"));
        }
        if file == "main.rs" || file == "lib.rs" {
            continue;
        }
        let module = module_path(file);
        let paths = resolve(&module, &paths(&without_tests(&tokens)));
        let Some(row) = row_of(&rows, &module) else {
            faults.push(format!("src/{file}: {PAGE} has no row for '{}'", module.join("::")));
            continue;
        };
        let mut seen = BTreeSet::new();
        for path in paths {
            let fault = judge_path(row, &module, &packages, &path);
            if let Some(fault) = fault.filter(|fault| seen.insert(fault.clone())) {
                faults.push(format!("src/{file}: {fault}"));
            }
        }
    }
    faults
}

/// A row of the table. A row for several modules becomes several.
#[derive(Debug)]
struct Row {
    line: usize,
    module: Vec<String>,
    imports: Vec<Vec<String>>,
    packages: Vec<String>,
}

fn rows(page: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    for (line, cells) in table_rows(page, "may import") {
        let [modules, imports, packages] = cells.as_slice() else { continue };
        let imports = without_brackets(imports);
        let mut allowed: Vec<Vec<String>> = code_spans(&imports).map(segments).collect();
        if imports.contains("the roles") {
            allowed.extend(ROLES.map(segments));
        }
        let packages = without_brackets(packages);
        let packages: Vec<String> = packages
            .split(',')
            .map(|package| package.trim_matches([' ', '`']).replace('-', "_"))
            .filter(|package| !matches!(package.as_str(), "" | "–" | "—" | "_"))
            .collect();
        for module in code_spans(&without_brackets(modules)) {
            rows.push(Row { line, module: segments(module), imports: allowed.clone(), packages: packages.clone() });
        }
    }
    rows
}

/// What the table itself may not say.
fn judge_table(rows: &[Row]) -> Vec<String> {
    let mut faults = Vec::new();
    for row in rows {
        let name = row.module.join("::");
        for import in &row.imports {
            let top = import.first().map_or("", String::as_str);
            let known = rows.iter().find(|other| other.module == *import || other.module == [top]);
            match known {
                // "the roles" also stands for those that are not written yet.
                None if ROLES.contains(&top) => {}
                None => faults.push(format!(
                    "{PAGE}:{}: '{name}' may import '{}', which has no row",
                    row.line,
                    import.join("::")
                )),
                Some(other) if other.line <= row.line && other.module.first() != row.module.first() => {
                    faults.push(format!("{PAGE}:{}: '{name}' may import '{top}', whose row is not below", row.line));
                }
                Some(_) => {}
            }
            let from_role = row.module.first().is_some_and(|top| ROLES.contains(&top.as_str()));
            if from_role && ROLES.contains(&top) && row.module.first().is_some_and(|own| own != top) {
                faults.push(format!("{PAGE}:{}: the role '{name}' may not import the role '{top}'", row.line));
            }
        }
        for (package, owners) in RESERVED {
            let owner = row.module.first().is_some_and(|top| owners.contains(&top.as_str()));
            if !owner && row.packages.iter().any(|named| named == package) {
                faults.push(format!(
                    "{PAGE}:{}: '{name}' may not name {package}; only {} may",
                    row.line,
                    owners.join(" and ")
                ));
            }
        }
    }
    faults
}

/// Judges one path that a module names.
fn judge_path(row: &Row, module: &[String], packages: &[String], path: &[String]) -> Option<String> {
    let (first, rest) = path.split_first()?;
    let shown = path.join("::");
    let own = |prefix: &[String]| module.first() == prefix.first();
    if first == "crate" {
        let imported = rest.first()?;
        // `crate::Name` at the root: nothing is defined there.
        let allowed = own(rest) || row.imports.iter().any(|import| rest.starts_with(import));
        return (!allowed).then(|| format!("'{}' may not import {imported} ({shown})", row.module.join("::")));
    }
    if packages.contains(first) && !row.packages.contains(first) {
        return Some(format!("'{}' may not name the package {first} ({shown})", row.module.join("::")));
    }
    let pure = PURE.iter().any(|pure| module.starts_with(&segments(pure)));
    let impure = IMPURE.iter().any(|impure| path.windows(2).any(|pair| pair == segments(impure)));
    // A descriptor's type does nothing by itself.
    if pure && impure && !path.starts_with(&segments("std::os::fd")) {
        return Some(format!("does no I/O and reads no clock, so it may not name {shown}"));
    }
    None
}

/// Turns leading `super` and `self` into `crate::…`.
fn resolve(module: &[String], paths: &[Vec<String>]) -> Vec<Vec<String>> {
    let absolute = |path: &Vec<String>| {
        let ups = path.iter().take_while(|name| *name == "super").count();
        let own = path.first().is_some_and(|name| name == "self" || name == "super");
        if !own {
            return path.clone();
        }
        let kept = module.len().saturating_sub(ups);
        let rest = path.iter().skip(ups.max(1)).cloned();
        std::iter::once("crate".to_owned()).chain(module.iter().take(kept).cloned()).chain(rest).collect()
    };
    paths.iter().map(absolute).collect()
}

/// The row with the longest name that the module is or lies in.
fn row_of<'rows>(rows: &'rows [Row], module: &[String]) -> Option<&'rows Row> {
    rows.iter().filter(|row| module.starts_with(&row.module)).max_by_key(|row| row.module.len())
}

/// `supervisor/mod.rs` is `supervisor`, `frame/words.rs` is `frame::words`.
fn module_path(file: &str) -> Vec<String> {
    let name = file.strip_suffix(".rs").unwrap_or(file);
    let name = name.strip_suffix("/mod").unwrap_or(name);
    name.split('/').map(str::to_owned).collect()
}

fn segments(path: &str) -> Vec<String> {
    path.split("::").map(str::to_owned).collect()
}

fn without_brackets(cell: &str) -> String {
    let mut depth = 0_usize;
    let outside = |letter: &char| {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && *letter != ')'
    };
    cell.chars().filter(outside).collect()
}

/// The names under `[dependencies]`, as paths spell them.
fn packages(manifest: &str) -> Vec<String> {
    manifest
        .lines()
        .skip_while(|line| line.trim() != "[dependencies]")
        .skip(1)
        .take_while(|line| !line.trim_start().starts_with('['))
        .filter_map(|line| line.split_once('='))
        .map(|(name, _)| name.trim().replace('-', "_"))
        .filter(|name| !name.starts_with('#'))
        .collect()
}

/// Files of `src/sys/` that a paragraph of the page names together with the word `unsafe`.
fn unsafe_files(page: &str) -> BTreeSet<&str> {
    page.split("\n\n")
        .filter(|paragraph| paragraph.contains("unsafe"))
        .flat_map(code_spans)
        .map(|span| span.strip_prefix("src/").unwrap_or(span))
        .filter(|span| {
            span.starts_with("sys/") && Path::new(span).extension().is_some_and(|extension| extension == "rs")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_TEXT: &str = "\
| module | may import | crates |
| --- | --- | --- |
| `role` | the roles | smol |
| `supervisor` | `systemd`, `frame`, `sys`, `limits` (and `account` one day) | smol, async-io |
| `client` | `frame`, `limits` | – |
| `systemd` | `limits` | zbus |
| `frame` | `limits` | – |
| `sys` | `limits` | rustix |
| `limits` | – | – |

Calls into libc are `unsafe`; they are in `src/sys/peer.rs` alone.
";
    const MANIFEST: &str =
        "[dependencies]\nsmol = \"2\"\nasync-io = \"2\"\nzbus = \"5\"\nrustix = { version = \"1\" }\n[x]\n";

    fn faults(file: &str, text: &str) -> Vec<String> {
        judge(PAGE_TEXT, MANIFEST, &[(file.to_owned(), text.to_owned())])
    }

    #[test]
    fn arrows_that_point_down_are_allowed() {
        let text = "use crate::systemd::Manager; use crate::{frame::Header, limits}; use self::peer::Peer; use async_io::Async;";
        assert_eq!(faults("supervisor/mod.rs", text), [] as [&str; 0]);
        assert_eq!(faults("supervisor/peer.rs", "use super::super::limits; use self::x::y;"), [] as [&str; 0]);
        assert_eq!(faults("role.rs", "use crate::{client, supervisor};"), [] as [&str; 0]);
        assert_eq!(faults("client.rs", "#[cfg(test)] mod tests { use crate::systemd::X; }"), [] as [&str; 0]);
    }

    #[test]
    fn every_other_arrow_is_a_fault() {
        for (file, text) in [
            ("frame/mod.rs", "use crate::systemd::Manager;"),
            ("frame/words.rs", "fn f() { crate::sys::peer(); }"),
            ("frame/words.rs", "use super::super::sys;"),
            ("client.rs", "use crate::{limits, supervisor::peer};"),
            ("supervisor/mod.rs", "use crate::client;"),
            ("supervisor/mod.rs", "use crate::account::Account;"),
        ] {
            assert_eq!(faults(file, text).len(), 1, "{file}: {text}: {:?}", faults(file, text));
        }
    }

    #[test]
    fn packages_are_named_only_where_the_table_says() {
        for (file, text) in [
            ("supervisor/mod.rs", "use zbus::Connection;"),
            ("supervisor/mod.rs", "use zbus;"),
            ("client.rs", "fn f() { rustix::fs::open(); }"),
            ("client.rs", "use ::async_io::Async;"),
        ] {
            assert_eq!(faults(file, text).len(), 1, "{file}: {text}");
        }
        assert_eq!(faults("systemd/mod.rs", "use zbus::Connection; mod rustix_like {}"), [] as [&str; 0]);
    }

    #[test]
    fn a_module_without_a_row_is_a_fault() {
        assert_eq!(faults("util.rs", "").len(), 1);
        assert!(judge("no table", MANIFEST, &[]).len() == 1);
    }

    #[test]
    fn unsafe_stays_in_the_files_that_the_page_names() {
        assert_eq!(faults("sys/peer.rs", "#![allow(unsafe_code)] fn f() { unsafe {} }"), [] as [&str; 0]);
        assert_eq!(faults("sys/exec.rs", "fn f() { unsafe {} }").len(), 1);
        assert_eq!(faults("main.rs", "#![allow(unsafe_code)]").len(), 1);
        assert_eq!(faults("client.rs", "// unsafe only in a comment"), [] as [&str; 0]);
    }

    #[test]
    fn pure_modules_name_no_clock_and_no_file() {
        assert_eq!(faults("frame/mod.rs", "use std::fs::File;").len(), 1);
        assert_eq!(faults("supervisor/admission.rs", "fn f() { let now = Instant::now(); }").len(), 1);
        assert_eq!(faults("supervisor/admission.rs", "use std::time::Instant;"), [] as [&str; 0]);
        assert_eq!(faults("supervisor/mod.rs", "use std::fs::File;"), [] as [&str; 0]);
    }

    #[test]
    fn the_table_cannot_be_edited_into_breaking_its_own_rules() {
        let with = |old: &str, new: &str| judge(&PAGE_TEXT.replace(old, new), MANIFEST, &[]);
        assert_eq!(with("| `limits` | – | – |", "| `limits` | `sys` | – |").len(), 1, "an arrow upwards");
        assert_eq!(with("smol, async-io", "smol, zbus").len(), 1, "a reserved package");
        assert_eq!(with("| `client` | `frame`", "| `client` | `supervisor`").len(), 2, "upwards, and role to role");
        assert_eq!(with("| `client` | `frame`", "| `client` | `frames`").len(), 1, "no such row");
        assert_eq!(with("", ""), [] as [&str; 0]);
    }
}
