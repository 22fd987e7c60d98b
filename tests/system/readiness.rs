//! The readiness verifier as systemd runs it: `ExecCondition=` of the server's unit, as the account and in the unit's sandbox.
//!
//! `tests/readiness.rs` has every way in which a marker can be wrong.

use std::fs;

use support::host::workspace;
use support::readiness::{MARKER_PATH, TEMPLATE_PATH, VERIFIER_PATH, marker, render, revision_line};

use crate::fixture::Fixture;

/// Puts the real verifier where the test host has its own, for as long as it lives.
struct Accepted<'a> {
    fixture: &'a Fixture,
    revision: String,
}

impl<'a> Accepted<'a> {
    fn new(fixture: &'a Fixture) -> Self {
        let revision = revision_line(&"7".repeat(40), &"e".repeat(64));
        let template = fs::read_to_string(workspace().join(TEMPLATE_PATH)).unwrap();
        fixture.root(&format!("cp -p {VERIFIER_PATH} {VERIFIER_PATH}.of-test-host; mkdir -p /etc/opencode"));
        fs::write(fixture.host.path(VERIFIER_PATH), render(&template, &revision).unwrap()).unwrap();
        Self { fixture, revision }
    }

    fn write_marker(&self, revision: &str) {
        let hash = self.fixture.root("sha256sum </usr/local/libexec/opencode-pty-supervisor | cut -d' ' -f1");
        fs::write(self.fixture.host.path(MARKER_PATH), marker(revision, &hash)).unwrap();
        self.fixture.root(&format!("chmod 0644 {MARKER_PATH}"));
    }
}

impl Drop for Accepted<'_> {
    fn drop(&mut self) {
        let _ = self.fixture.host.sh(&format!(
            "mv -f {VERIFIER_PATH}.of-test-host {VERIFIER_PATH}; rm -rf /etc/opencode; systemctl start opencode-v2.service"
        ));
    }
}

/// Stops and starts the server; its state, and what its journal says since.
///
/// A condition that does not hold is no failure of the job, and PID 1 forgets the unit together with the result.
fn started(fixture: &Fixture) -> (String, String) {
    let said = fixture.root(
        "cursor=$(journalctl --lines=0 --show-cursor --quiet | sed -n 's/^-- cursor: //p')
        systemctl stop opencode-v2.service; systemctl start opencode-v2.service; systemctl is-active opencode-v2.service || true
        journalctl --sync; journalctl --after-cursor=\"$cursor\" --unit=opencode-v2.service --output=cat --no-pager",
    );
    said.split_once('\n').map(|(state, journal)| (state.to_owned(), journal.to_owned())).unwrap()
}

/// Fails unless a start now is refused by the verifier, for this reason.
fn assert_refused(fixture: &Fixture, reason: &str) {
    let (state, journal) = started(fixture);
    assert_eq!(state, "inactive", "{journal}");
    for text in ["Skipped due to 'exec-condition'", reason] {
        assert!(journal.contains(text), "'{text}' is not in: {journal}");
    }
}

#[test]
fn the_server_starts_with_the_marker_of_what_is_installed_and_with_no_other() {
    let mut fixture = Fixture::new();
    {
        let accepted = Accepted::new(&fixture);
        assert_refused(&fixture, "not ready: there is no readable marker");

        accepted.write_marker(&revision_line(&"8".repeat(40), &"e".repeat(64)));
        assert_refused(&fixture, "not ready: the marker is for another revision");

        accepted.write_marker(&accepted.revision);
        assert_eq!(started(&fixture).0, "active");

        // A marker that is taken away ends nothing that runs, and keeps it from starting again.
        fixture.root(&format!("rm {MARKER_PATH}"));
        assert_eq!(fixture.root("systemctl is-active opencode-v2.service"), "active");
        assert_refused(&fixture, "not ready: there is no readable marker");
    }
    fixture.restart_what_ended();
    assert_eq!(fixture.ask(&["echo", "ready"]), "ready");
}
