//! `opencode-pty selftest` on a real host: green where all is well, red with the cause where something was planted, and nothing
//! left of it.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::account::{GID, HOME, NAME, UID};
use crate::fixture::{Fixture, SOON, wait_until};
use crate::outside::{DropIn, SERVER, SUPERVISOR};

/// The program, as an operator calls it.
const PROGRAM: &str = "/usr/local/sbin/opencode-pty";
const LIBEXEC: &str = "/usr/local/libexec";
const MARKER: &str = "/etc/opencode/pty-supervisor-verified";
const VERIFIER: &str = "/usr/local/libexec/opencode-pty-verify-readiness";

/// A report, once it has been held to what docs/selftest.md says of it.
struct Report {
    whole: Value,
    code: i32,
}

impl Report {
    fn of(command: &mut Command) -> Self {
        let output = command.stdin(Stdio::null()).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let whole: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let report = Self { whole, code: output.status.code().unwrap() };
        report.assert_is_as_documented();
        report
    }

    fn assert_is_as_documented(&self) {
        let whole = self.whole.as_object().unwrap();
        let keys: Vec<&str> = whole.keys().map(String::as_str).collect();
        assert_eq!(keys, ["checks", "exit", "failed", "not_run", "passed", "skipped", "version"]);
        assert_eq!(whole["exit"], self.code);
        for (word, key) in [("passed", "passed"), ("failed", "failed"), ("skipped", "skipped"), ("not-run", "not_run")]
        {
            assert_eq!(whole[key], self.with(word).len(), "{key}");
        }
        let wanted = if whole["failed"] != 0 {
            1
        } else if whole["not_run"] != 0 {
            2
        } else {
            0
        };
        assert_eq!(self.code, wanted, "{}", self.whole);
        for check in self.checks() {
            let keys: Vec<&str> = check.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(keys, ["acceptance", "group", "name", "reason", "remedy", "stage", "status", "what"]);
            assert!(!check["reason"].as_str().unwrap().is_empty(), "{check}");
            let has_remedy = check["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty());
            assert_eq!(has_remedy, ["failed", "not-run"].contains(&check["status"].as_str().unwrap()), "{check}");
        }
    }

    fn checks(&self) -> &[Value] {
        self.whole["checks"].as_array().unwrap()
    }

    /// The names of the checks with this status.
    fn with(&self, status: &str) -> Vec<&str> {
        let with = |check: &&Value| check["status"] == status;
        self.checks().iter().filter(with).map(|check| check["name"].as_str().unwrap()).collect()
    }

    fn reason(&self, name: &str) -> &str {
        let check = self.checks().iter().find(|check| check["name"] == name);
        check.unwrap_or_else(|| panic!("no {name} in {}", self.whole))["reason"].as_str().unwrap()
    }

    /// Fails unless this check alone failed, and its reason says this.
    fn assert_red(&self, name: &str, cause: &str) {
        assert_eq!((self.with("failed"), self.code), (vec![name], 1), "{}", self.whole);
        assert!(self.reason(name).contains(cause), "{}", self.reason(name));
    }
}

/// The words of `selftest --json` for the host's account.
fn program_and_words() -> [&'static str; 5] {
    [PROGRAM, "selftest", "--json", "--account", &NAME]
}

/// It with these words more, as root of the host.
fn selftest(fixture: &Fixture, words: &[&str]) -> Report {
    let [program, own @ ..] = program_and_words();
    Report::of(fixture.host.command(program).args(own).args(words))
}

/// What a run of the live checks could leave, by every name it has.
fn left_of_live(fixture: &Fixture) -> String {
    fixture.root(
        "systemctl list-units --all --plain --no-legend '*selftest*'
        ls -d /run/*selftest* /usr/local/libexec/*selftest* /run/systemd/transient/*selftest* 2>/dev/null
        find /sys/fs/cgroup -type d -name '*selftest*' 2>/dev/null
        pgrep -fa '[o]pencode-pty selftest|[s]leep 86400' || true",
    )
}

#[test]
fn all_is_green_on_a_host_where_all_is_well_and_nothing_is_left() {
    let fixture = Fixture::new();
    let report = selftest(&fixture, &["--live"]);
    assert_eq!((report.with("failed"), report.with("not-run")), (vec![], vec![]), "{}", report.whole);
    assert_eq!(report.code, 0);
    // What this kind of host has not, and nothing else.
    let lacking = ["controllers", "ptrace-scope", "marker"];
    assert!(report.with("skipped").iter().all(|name| lacking.contains(name)), "{:?}", report.with("skipped"));
    assert_eq!(report.checks().iter().filter(|check| check["group"] == "live").count(), 26);
    assert_eq!(left_of_live(&fixture), "");
}

#[test]
fn the_list_of_checks_is_what_is_checked() {
    let fixture = Fixture::new();
    let list: Value = serde_json::from_str(&fixture.root(&format!("{PROGRAM} selftest --list-checks --json"))).unwrap();
    let name = |check: &Value| check["name"].as_str().unwrap().to_owned();
    let listed: Vec<String> = list["checks"].as_array().unwrap().iter().map(name).collect();
    let lines = fixture.root(&format!("{PROGRAM} selftest --list-checks"));
    assert_eq!(lines.lines().map(|line| line.split('\t').next().unwrap()).collect::<Vec<_>>(), listed);
    let looked_at: Vec<String> = selftest(&fixture, &[]).checks().iter().map(name).collect();
    let without_live: Vec<String> = listed.iter().filter(|name| !name.starts_with("live-")).cloned().collect();
    assert_eq!(looked_at, without_live);
}

#[test]
fn a_word_that_is_no_check_is_an_error_that_lists_them() {
    let fixture = Fixture::new();
    for words in ["--only kernel,nothing", "--only ''", "--only live-stop", "--nothing", "kernel"] {
        let said = fixture.root(&format!("{PROGRAM} selftest {words} 2>&1; echo code $?"));
        assert!(said.ends_with("code 64"), "{words}: {said}");
        assert!(!said.contains("passed"), "{words}: {said}");
    }
    let said = fixture.root(&format!("{PROGRAM} selftest --only nothing 2>&1 || true"));
    assert!(said.contains("'nothing'") && said.contains(" host ") && said.contains(" live-stop"), "{said}");
    assert_eq!(selftest(&fixture, &["--only", "shell,bus"]).with("passed"), ["bus", "shell"]);
}

#[test]
fn colours_are_for_terminals_that_want_them() {
    let fixture = Fixture::new();
    let program = format!("{PROGRAM} selftest --only shell");
    assert!(!fixture.root(&program).contains('\u{1b}'));
    let on_terminal = |command: &str| fixture.root(&format!("script -qec '{command}' /dev/null </dev/null"));
    assert!(on_terminal(&program).contains("\u{1b}[32mpassed"));
    assert!(!on_terminal(&format!("NO_COLOR=1 {program}")).contains('\u{1b}'));
}

#[test]
fn without_root_what_can_not_be_looked_at_is_said_and_is_no_success() {
    let fixture = Fixture::new();
    let as_eve = ["--reuid", "eve", "--regid", "eve", "--clear-groups"];
    let mut command = fixture.host.command("setpriv");
    let report = Report::of(command.args(as_eve).args(program_and_words()).arg("--live"));
    assert_eq!((report.with("failed"), report.code), (vec![], 2), "{}", report.whole);
    let not_run = report.with("not-run");
    assert!(not_run.contains(&"bus") && not_run.contains(&"live-stop") && not_run.contains(&"socket"), "{not_run:?}");
    assert!(report.reason("live-stop").contains("root"), "{}", report.reason("live-stop"));
    for name in ["kernel", "script", "files", "unit-supervisor", "landlock"] {
        assert!(report.with("passed").contains(&name), "{name}: {}", report.whole);
    }
    let as_eve = as_eve.join(" ");
    let said = fixture.root(&format!("setpriv {as_eve} {PROGRAM} selftest --account {NAME} --live || true"));
    assert!(said.contains("not-run  live-stop") && said.contains("remedy: run as root"), "{said}");
    assert_eq!(left_of_live(&fixture), "");
}

/// A planted change that is undone when dropped, whatever the test found.
struct Planted<'a> {
    fixture: &'a Fixture,
    undo: String,
}

impl<'a> Planted<'a> {
    fn new(fixture: &'a Fixture, plant: &str, undo: &str) -> Self {
        let planted = Self { fixture, undo: undo.to_owned() };
        fixture.root(plant);
        planted
    }
}

impl Drop for Planted<'_> {
    fn drop(&mut self) {
        let _ = self.fixture.host.sh(&self.undo);
    }
}

/// A marker that is right, with the verifier it is for; undone when dropped.
fn accepted(fixture: &Fixture) -> Planted<'_> {
    let revision = format!("revision=opencode-v2-pilot:git:{};pty-source:sha256:{}", "a1".repeat(20), "0f".repeat(32));
    Planted::new(
        fixture,
        &format!(
            "set -e; cp -p {VERIFIER} /root/verifier; mkdir -p /etc/opencode
            printf '%s\\n' '#!/bin/sh' \"expected='{revision}'\" 'exit 0' >{VERIFIER}
            {{ echo '{revision}'; cd {LIBEXEC}; for name in supervisor launcher client; do
                sha256sum {LIBEXEC}/opencode-pty-$name; done; }} >{MARKER}"
        ),
        &format!("cp -p /root/verifier {VERIFIER}; rm -rf /root/verifier /etc/opencode"),
    )
}

#[test]
fn a_marker_is_green_when_it_is_right_and_red_when_it_is_stale() {
    let fixture = Fixture::new();
    let _accepted = accepted(&fixture);
    let report = selftest(&fixture, &["--only", "marker"]);
    assert_eq!(report.with("passed"), ["marker"], "{}", report.whole);
    // Another build in its place.
    let program = format!("{LIBEXEC}/opencode-pty-supervisor");
    let stale = Planted::new(
        &fixture,
        &format!("cp -p {program} /root/program; cp {program} {program}.new; echo >>{program}.new; mv {program}.new {program};
            ln -f {program} {LIBEXEC}/opencode-pty-launcher; ln -f {program} {LIBEXEC}/opencode-pty-client"),
        &format!("cp -p /root/program {program}.new; mv {program}.new {program}; rm /root/program
            ln -f {program} {LIBEXEC}/opencode-pty-launcher; ln -f {program} {LIBEXEC}/opencode-pty-client"),
    );
    selftest(&fixture, &["--only", "host,files,marker"]).assert_red("marker", "the marker is stale");
    drop(stale);
    let (to_the_account, its_uid) = (format!("chown {NAME}"), format!("owned by uid {UID}"));
    for (plant, cause) in [
        ("chmod 0664", "mode 0664"),
        (&to_the_account, its_uid.as_str()),
        ("sed -i 's/$/\\r/'", "carriage returns"),
        ("sed -i 's/a1a1/b2b2/'", "another revision"),
        ("sed -i '$d'", "3 lines"),
    ] {
        let _planted = Planted::new(
            &fixture,
            &format!("cp -p {MARKER} /root/marker; {plant} {MARKER}"),
            &format!("cp -p /root/marker {MARKER}; rm /root/marker"),
        );
        selftest(&fixture, &["--only", "marker"]).assert_red("marker", cause);
    }
}

#[test]
fn a_binary_that_a_group_can_write_to_is_red() {
    let fixture = Fixture::new();
    let _planted = Planted::new(
        &fixture,
        &format!("chmod g+w {LIBEXEC}/opencode-pty-client"),
        &format!("chmod g-w {LIBEXEC}/opencode-pty-client"),
    );
    selftest(&fixture, &[]).assert_red("files", "opencode-pty-client has mode 0775, not 0755");
}

#[test]
fn a_second_inode_is_red() {
    let fixture = Fixture::new();
    let launcher = format!("{LIBEXEC}/opencode-pty-launcher");
    let _planted = Planted::new(
        &fixture,
        &format!("cp -p {launcher} {launcher}.new && mv {launcher}.new {launcher}"),
        &format!("ln -f {LIBEXEC}/opencode-pty-supervisor {launcher}"),
    );
    selftest(&fixture, &[]).assert_red("files", "second inode");
}

#[test]
fn a_directory_above_that_the_account_can_write_to_is_red() {
    let fixture = Fixture::new();
    let _planted = Planted::new(
        &fixture,
        &format!("chgrp {GID} /usr/local; chmod g+w /usr/local"),
        "chmod g-w /usr/local; chgrp root /usr/local",
    );
    selftest(&fixture, &[]).assert_red("files", "/usr/local has mode 0775");
}

#[test]
fn an_edited_unit_is_red_before_and_after_it_is_loaded() {
    let fixture = Fixture::new();
    let file = format!("/etc/systemd/system/{SUPERVISOR}");
    let _planted = Planted::new(
        &fixture,
        &format!("cp -p {file} /root/unit; sed -i '/^ProtectSystem=/d; s/^MemoryMax=.*/MemoryMax=8G/' {file}"),
        &format!("cp -p /root/unit {file}; rm /root/unit; systemctl daemon-reload"),
    );
    selftest(&fixture, &[]).assert_red("unit-supervisor", "its file has changed since it was loaded");
    fixture.root("systemctl daemon-reload");
    let report = selftest(&fixture, &[]);
    report.assert_red("unit-supervisor", "ProtectSystem is 'no', should be 'strict'");
    report.assert_red("unit-supervisor", "MemoryMax is '8589934592', should be '268435456'");
}

#[test]
fn other_limits_of_the_slice_are_red() {
    let fixture = Fixture::new();
    let _planted = DropIn::new(&fixture, "opencode-pty.slice", "[Slice]\nTasksMax=infinity\nCPUQuota=");
    let report = selftest(&fixture, &[]);
    report.assert_red("unit-slice", "TasksMax is '18446744073709551615', should be '512'");
    report.assert_red("unit-slice", "90-test.conf");
}

#[test]
fn a_mask_that_was_removed_is_red() {
    let fixture = Fixture::new();
    let _planted =
        DropIn::new(&fixture, SUPERVISOR, "[Service]\nInaccessiblePaths=\nInaccessiblePaths=-/run/user/1000");
    selftest(&fixture, &[]).assert_red("unit-masks", "the mask of /run/docker.sock is removed");
}

#[test]
fn a_socket_with_another_mode_is_red() {
    let fixture = Fixture::new();
    let socket = "/run/opencode-pty/supervisor.sock";
    let _planted = Planted::new(&fixture, &format!("chmod 0666 {socket}"), &format!("chmod 0660 {socket}"));
    selftest(&fixture, &[]).assert_red("socket", &format!("is 0:{GID} 0666, should be 0:{GID} 0660"));
}

#[test]
fn a_powerful_socket_that_sessions_can_reach_is_red() {
    let fixture = Fixture::new();
    let program = "import os, socket\nhere = socket.socket(socket.AF_UNIX)\nhere.bind('/srv/docker.sock')\nhere.listen()\n\
                   open('{ready}', 'w').write('ready')\nwhile True: here.accept()";
    fixture.remove_at_end("/srv/docker.sock");
    let _daemon = crate::outside::Running::python(&fixture, "root", program);
    selftest(&fixture, &[]).assert_red("masks", "a session can reach '/srv/docker.sock'");
}

#[test]
fn a_bus_policy_that_lets_the_account_be_the_manager_is_red() {
    let fixture = Fixture::new();
    let file = "/etc/dbus-1/system.d/test-planted.conf";
    let policy =
        format!("<busconfig><policy user=\"{NAME}\"><allow own=\"org.freedesktop.systemd1\"/></policy></busconfig>");
    // Reloaded by signal, which is what `systemctl reload` does on every suite.
    let reload = "busctl call org.freedesktop.DBus / org.freedesktop.DBus ReloadConfig";
    let _planted =
        Planted::new(&fixture, &format!("echo '{policy}' >{file}; {reload}"), &format!("rm -f {file}; {reload}"));
    selftest(&fixture, &[]).assert_red("bus", &format!("lets '{NAME}' own org.freedesktop.systemd1"));
}

#[test]
fn a_missing_script_is_red() {
    let fixture = Fixture::new();
    let _planted =
        Planted::new(&fixture, "mv /usr/bin/script /usr/bin/script.away", "mv /usr/bin/script.away /usr/bin/script");
    selftest(&fixture, &[]).assert_red("script", "/usr/bin/script: No such file");
}

#[test]
fn a_missing_landlock_is_red() {
    let fixture = Fixture::new();
    // As on a kernel without it: the calls are not there.
    let calls = "~landlock_create_ruleset landlock_add_rule landlock_restrict_self";
    let mut command = fixture.host.command("systemd-run");
    command.args(["--quiet", "--pipe", "--wait", "--collect"]).args([
        &format!("--property=SystemCallFilter={calls}"),
        "--property=SystemCallErrorNumber=ENOSYS",
        "--",
    ]);
    command.args(program_and_words());
    Report::of(&mut command).assert_red("landlock", "no Landlock");
}

#[test]
fn a_server_that_anybody_could_read_or_speak_for_is_red() {
    let fixture = Fixture::new();
    let file = format!("{HOME}/.opencode/env");
    let planted = Planted::new(&fixture, &format!("chmod 0640 {file}"), &format!("chmod 0600 {file}"));
    selftest(&fixture, &[]).assert_red("environment-files", "mode 0640");
    drop(planted);
    let _planted = DropIn::new(&fixture, SERVER, "[Service]\nNotifyAccess=all");
    let report = selftest(&fixture, &[]);
    assert_eq!(report.with("failed"), ["unit-server", "server"], "{}", report.whole);
    assert!(report.reason("server").contains("NotifyAccess is all"), "{}", report.whole);
}

#[test]
fn a_host_that_takes_the_protection_from_units_is_red_where_it_is_tried() {
    let fixture = Fixture::new();
    // By prefix: for sessions and for the private supervisor alike.
    let lines = "[Service]\nInaccessiblePaths=\nTemporaryFileSystem=\nBindReadOnlyPaths=\nSendSIGHUP=no";
    let _planted = DropIn::new(&fixture, "opencode-pty-.service", lines);
    let looked = selftest(&fixture, &[]);
    assert_eq!(looked.with("failed"), ["drop-ins", "unit-masks"], "{}", looked.whole);
    let only = "live-hardening,live-unit,live-masks,live-trace,live-stop,live-clean";
    let report = selftest(&fixture, &["--live", "--only", only]);
    assert_eq!(report.with("failed"), ["live-hardening", "live-unit", "live-masks"], "{}", report.whole);
    assert_eq!(report.with("passed"), ["live-trace", "live-stop", "live-clean"], "{}", report.whole);
    assert!(report.reason("live-hardening").contains("InaccessiblePaths lacks"), "{}", report.whole);
    assert!(report.reason("live-unit").contains("SendSIGHUP is 'no', should be 'yes'"), "{}", report.whole);
    assert!(report.reason("live-masks").contains("/run/dbus/system_bus_socket"), "{}", report.whole);
    assert_eq!(left_of_live(&fixture), "");
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let fixture = Fixture::new();
    // At once, in the middle of the start, and in the middle of sessions.
    for (signal, moment) in
        [("TERM", "true"), ("INT", "*selftest*supervisor*"), ("INT", "*selftest*server*"), ("TERM", SESSION)]
    {
        let mut command = fixture.host.command("/bin/bash");
        let script =
            format!("{PROGRAM} selftest --account {NAME} --live --json --only live & echo $! >/run/test-pid; wait $!");
        let mut run = command.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        fixture.remove_at_end("/run/test-pid");
        wait_until(&format!("{moment} to be there"), SOON, || {
            let pid = fixture.root("cat /run/test-pid 2>/dev/null || true");
            let there = match moment {
                "true" => pid.clone(),
                SESSION => {
                    fixture.root("find /sys/fs/cgroup/opencodepty* -name 'opencode-pty-*.service' 2>/dev/null || true")
                }
                pattern => fixture.root(&format!("systemctl list-units --plain --no-legend '{pattern}'")),
            };
            if there.is_empty() || pid.is_empty() { Err("nothing".to_owned()) } else { Ok(()) }
        });
        fixture.root(&format!("kill -{signal} $(cat /run/test-pid); : >/run/test-pid"));
        let output =
            run.wait().map(|status| (status, std::io::read_to_string(run.stdout.take().unwrap()).unwrap())).unwrap();
        let (status, said) = output;
        assert_eq!(left_of_live(&fixture), "", "{signal} at {moment}");
        if moment == "true" && said.is_empty() {
            // The signal came before there was anybody to catch it.
            continue;
        }
        let report: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
        assert_eq!((status.code(), &report["exit"]), (Some(2), &2.into()), "{report}");
        let last = report["checks"].as_array().unwrap().last().unwrap();
        assert_eq!((&last["name"], &last["status"]), (&"live-clean".into(), &"passed".into()), "{report}");
    }
}

/// Stands for a session of the private supervisor.
const SESSION: &str = "a session";
