//! The readiness marker (docs/install.md): by the same rules as the verifier, and judged on its own.
//!
//! The verifier is the one that decides; it is a script, so that the file it judges does not judge itself. What is
//! here finds out early, and says which rule is broken.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hmac_sha256::Hash;

use super::context::Context;
use super::files::{LIBEXEC, NAMES, Rule, VERIFIER, anything_installed, judge, judge_parents};
use super::report::Finding;
use crate::report::quoted;

/// The marker.
const MARKER: &str = "/etc/opencode/pty-supervisor-verified";
/// Longest marker that is read. Chosen: a right one has under 700 bytes.
const MARKER_BYTES_MAX: u64 = 4_096;
/// Bytes read at a time.
const READ_BYTES: usize = 64 << 10;

/// A file's SHA-256, in lower-case hex.
pub fn hash_of(path: &Path) -> Result<String, String> {
    let failed = |error| format!("cannot read {}: {error}", path.display());
    let (mut file, mut hash, mut buffer) = (File::open(path).map_err(failed)?, Hash::new(), vec![0; READ_BYTES]);
    loop {
        match file.read(&mut buffer).map_err(failed)? {
            0 => return Ok(hex(&hash.finalize())),
            count => hash.update(buffer.get(..count).unwrap_or_default()),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from_digit(digit.into(), 16).unwrap_or('0')).collect()
}

pub fn marker(context: &Context) -> Finding {
    let remedy = "do not repair it by hand: go through docs/root-acceptance.md again; the marker comes last";
    if !anything_installed(context) {
        return Finding::skipped("nothing is installed");
    }
    let Some(mut problems) = judge(MARKER.as_ref(), &Rule { mode: Some(0o644), directory: false }) else {
        return Finding::skipped(format!(
            "there is no {MARKER}: root acceptance is not complete, the server won't start"
        ));
    };
    problems.extend(judge_parents(MARKER.as_ref()));
    if !problems.is_empty() {
        return Finding::failed(problems.join("; "), remedy);
    }
    let revision = match fs::read_to_string(VERIFIER).map(|text| rendered_revision(&text)) {
        Ok(Some(revision)) => Some(revision),
        Ok(None) => None,
        Err(error) => return Finding::failed(format!("cannot read {VERIFIER}: {error}"), "install the verifier"),
    };
    let hash = match hash_of(&Path::new(LIBEXEC).join(NAMES[0])) {
        Ok(hash) => hash,
        Err(why) => return Finding::failed(why, remedy),
    };
    let inodes: Vec<_> = NAMES
        .iter()
        .map(|name| fs::symlink_metadata(Path::new(LIBEXEC).join(name)).map(|found| (found.dev(), found.ino())).ok())
        .collect();
    let one_file = inodes.windows(2).all(|pair| pair.first() == pair.last());
    if !one_file {
        return Finding::failed("supervisor, launcher and client are not three names of one file", remedy);
    }
    let text = match fs::metadata(MARKER).map(|found| found.len()) {
        Ok(len) if len <= MARKER_BYTES_MAX => {
            fs::read(MARKER).map_err(|error| format!("cannot read {MARKER}: {error}"))
        }
        Ok(len) => Err(format!("{MARKER} has {len} bytes")),
        Err(error) => Err(format!("cannot examine {MARKER}: {error}")),
    };
    match text.and_then(|text| judge_text(&text, revision.as_deref(), &hash)) {
        Ok(()) if revision.is_none() => {
            Finding::failed(format!("{VERIFIER} was not rendered for a revision"), "install the verifier of this build")
        }
        Ok(()) => Finding::passed(format!("it is for what is installed, sha256 {hash}")),
        Err(why) => Finding::failed(why, remedy),
    }
}

/// What is wrong with a marker's text, which must be these four lines to the byte.
fn judge_text(text: &[u8], revision: Option<&str>, hash: &str) -> Result<(), String> {
    let text = str::from_utf8(text).map_err(|_| "the marker is not text".to_owned())?;
    if text.contains('\r') {
        return Err("the marker has carriage returns".to_owned());
    }
    let lines = text.strip_suffix('\n').ok_or("the marker's last line does not end")?;
    let lines: Vec<&str> = lines.split('\n').collect();
    let Some((first, records)) = lines.split_first().filter(|(_, records)| records.len() == NAMES.len()) else {
        return Err(format!("the marker has {} lines and not 4", lines.len()));
    };
    if !is_revision_line(first) {
        return Err(format!("the marker's first line is no revision: {}", quoted(first)));
    }
    if revision.is_some_and(|revision| revision != *first) {
        return Err(format!("the marker is for another revision than the verifier: {}", quoted(first)));
    }
    for (record, name) in records.iter().zip(NAMES) {
        let Some((found, path)) = record.split_once("  ") else {
            return Err(format!("the marker has no sha256sum record for {name}: {}", quoted(record)));
        };
        if path != format!("{LIBEXEC}/{name}") || !is_hex(found, 64) {
            return Err(format!("the marker has something else where {name} belongs: {}", quoted(record)));
        }
        if found != hash {
            return Err(format!("the marker is stale: {name} has sha256 {hash}, and {found} was accepted"));
        }
    }
    Ok(())
}

/// `revision=opencode-v2-pilot:git:<40 hex>;pty-source:sha256:<64 hex>`.
fn is_revision_line(line: &str) -> bool {
    let parts =
        line.strip_prefix("revision=opencode-v2-pilot:git:").and_then(|rest| rest.split_once(";pty-source:sha256:"));
    parts.is_some_and(|(commit, source)| is_hex(commit, 40) && is_hex(source, 64))
}

fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// The revision line a verifier was rendered with.
fn rendered_revision(verifier: &str) -> Option<String> {
    let line = verifier.lines().find_map(|line| line.strip_prefix("expected='")?.strip_suffix('\''))?;
    is_revision_line(line).then(|| line.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn revision() -> String {
        format!("revision=opencode-v2-pilot:git:{};pty-source:sha256:{}", "a1".repeat(20), "0f".repeat(32))
    }

    fn right(hash: &str) -> String {
        let records: Vec<String> = NAMES.iter().map(|name| format!("{hash}  {LIBEXEC}/{name}\n")).collect();
        format!("{}\n{}", revision(), records.concat())
    }

    #[test]
    fn the_marker_is_these_four_lines_and_nothing_else() {
        let (hash, other) = ("ab".repeat(32), "cd".repeat(32));
        let right = right(&hash);
        let judged = |text: &str| judge_text(text.as_bytes(), Some(&revision()), &hash);
        assert_eq!(judged(&right), Ok(()));
        let lines: Vec<&str> = right.lines().collect();
        for (wrong, why) in [
            (String::new(), "does not end"),
            (right.trim_end().to_owned(), "does not end"),
            (right.replace('\n', "\r\n"), "carriage returns"),
            (format!("{right}\n"), "5 lines"),
            (format!("{right}{}\n", lines[3]), "5 lines"),
            (lines[..3].join("\n") + "\n", "3 lines"),
            ([lines[0], lines[2], lines[1], lines[3]].join("\n") + "\n", "something else"),
            (right.replace("a1a1", "b2b2"), "another revision"),
            (right.replace("a1a1", "A1A1"), "no revision"),
            (right.replace("pilot", "main"), "no revision"),
            (right.replace(&hash, &other), "stale"),
            (right.replace("  /", " /"), "no sha256sum record"),
            (right.replace("  /", "  *"), "something else"),
            (right.replace(&hash, &hash.to_uppercase()), "something else"),
        ] {
            assert!(judged(&wrong).is_err_and(|said| said.contains(why)), "{wrong}: {:?}", judged(&wrong));
        }
        assert!(judge_text(b"\xff\n", None, &hash).is_err());
    }

    #[test]
    fn a_hash_is_what_sha256sum_says() {
        let path = std::env::temp_dir().join(format!("opencode-pty-hash-{}", std::process::id()));
        fs::write(&path, "abc").unwrap();
        let hash = hash_of(&path);
        fs::remove_file(&path).unwrap();
        assert_eq!(hash.unwrap(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn only_a_rendered_verifier_has_a_revision() {
        let verifier = format!("#!/bin/sh\nexpected='{}'\n", revision());
        assert_eq!(rendered_revision(&verifier), Some(revision()));
        assert_eq!(rendered_revision("expected='@REVISION@'\n"), None);
    }
}
