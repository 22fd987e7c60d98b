//! `opencode-pty list`: what it shows of a host's sessions, against what systemctl(1) shows of them.

use std::process::Output;

use serde_json::{Value, json};

use crate::fixture::{Fixture, RUNTIME, SOON, wait_until};
use crate::outside::{SUPERVISOR, text};

const PROGRAM: &str = "/usr/local/sbin/opencode-pty";

/// Runs it on the host.
fn list(fixture: &Fixture, words: &[&str]) -> Output {
    fixture.host.command(PROGRAM).arg("list").args(words).output().unwrap()
}

/// The same as somebody who is nobody there.
fn list_as_nobody(fixture: &Fixture, words: &[&str]) -> Output {
    let nobody = ["--reuid", "65534", "--regid", "65534", "--clear-groups", PROGRAM, "list"];
    fixture.host.command("setpriv").args(nobody).args(words).output().unwrap()
}

fn listed(fixture: &Fixture, words: &[&str]) -> Value {
    serde_json::from_str(&text(&list(fixture, words))).unwrap()
}

/// A unit's property as systemctl(1) shows it; what it calls "[not set]" or "infinity" is null.
fn shown(fixture: &Fixture, unit: &str, property: &str) -> Value {
    let value = fixture.property(unit, property);
    value.parse::<u64>().map_or(Value::Null, Value::from)
}

#[test]
fn a_list_without_sessions_says_so_and_is_no_failure() {
    let fixture = Fixture::new();
    assert_eq!(text(&list(&fixture, &[])), format!("no sessions; {SUPERVISOR} is active"));
    let empty = json!({"supervisor": {"unit": SUPERVISOR, "state": "active"}, "sessions": []});
    assert_eq!(listed(&fixture, &["--json"]), empty);
    let other = text(&list(&fixture, &["--unit", "no-such.service"]));
    assert_eq!(other, "no sessions; no-such.service is not-found");
}

#[test]
fn every_session_is_listed_with_what_the_manager_accounts_for_it() {
    let fixture = Fixture::new();
    let mut first = fixture.start_sh("echo ready; sleep 1000");
    first.line("ready");
    let second = fixture.start_for(3_600, &["sleep", "1000"]);
    // They rest, so the manager's numbers do not change under the comparison.
    wait_until("the numbers to be systemctl's", SOON, || {
        let found = listed(&fixture, &["--json"]);
        let sessions = found["sessions"].as_array().unwrap();
        let units: Vec<&str> = sessions.iter().map(|session| session["unit"].as_str().unwrap()).collect();
        assert_eq!(units, [&*first.unit, &*second.unit], "the oldest first");
        for (session, runtime) in sessions.iter().zip([RUNTIME, 3_600]) {
            let unit = session["unit"].as_str().unwrap();
            assert_eq!(session["state"], "active");
            for (name, property) in [
                ("pid", "MainPID"),
                ("tasks", "TasksCurrent"),
                ("memory_bytes", "MemoryCurrent"),
                ("cpu_nsec", "CPUUsageNSec"),
            ] {
                let shown = shown(&fixture, unit, property);
                if session[name] != shown {
                    return Err(format!("{name} {} instead of {shown}", session[name]));
                }
            }
            let (age, left) = (session["age_usec"].as_u64().unwrap(), session["runtime_left_usec"].as_u64().unwrap());
            assert_eq!(age + left, u64::from(runtime) * 1_000_000);
        }
        assert!(sessions[0]["age_usec"].as_u64() > sessions[1]["age_usec"].as_u64(), "{found}");
        Ok(())
    });
    let table = text(&list(&fixture, &[]));
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["UNIT", "STATE", "AGE", "PID", "TASKS", "MEMORY", "CPU", "LEFT"]);
    assert_eq!(lines[1][..2], [&*first.unit, "active"]);
    assert_eq!(lines[2][..2], [&*second.unit, "active"]);
    let accounted = shown(&fixture, &first.unit, "MemoryCurrent").is_number();
    assert_eq!(lines[1][5] != "-", accounted, "{table}");
    assert_eq!(table.lines().last(), Some(&*format!("2 sessions; {SUPERVISOR} is active")));
}

#[test]
fn only_units_with_a_sessions_name_that_are_bound_to_this_supervisor_alone_are_sessions() {
    let fixture = Fixture::new();
    let session = fixture.start(&["sleep", "1000"]);
    let id = |digit: &str| digit.repeat(32);
    // One for another supervisor, one bound to two, one that is no session by name.
    let names = ["1", "2", "3"].map(|digit| format!("opencode-pty-{}.service", id(digit)));
    let look_alike = format!("opencode-pty-{}.service", "A".repeat(32));
    let [other, double, unbound] = &names;
    let all = format!("{other} {double} {unbound} {look_alike}");
    fixture.root(&format!(
        "systemd-run --quiet --collect --unit={other} -p BindsTo=dbus.service sleep 1000
        systemd-run --quiet --collect --unit={double} -p BindsTo={SUPERVISOR} -p BindsTo=dbus.service sleep 1000
        systemd-run --quiet --collect --unit={unbound} sleep 1000
        systemd-run --quiet --collect --unit={look_alike} -p BindsTo={SUPERVISOR} sleep 1000"
    ));
    let units = |words: &[&str]| -> Vec<String> {
        let found = listed(&fixture, words);
        let sessions = found["sessions"].as_array().unwrap();
        sessions.iter().map(|session| session["unit"].as_str().unwrap().to_owned()).collect()
    };
    let (ours, theirs) = (units(&["--json"]), units(&["--json", "--unit", "dbus.service"]));
    fixture.root(&format!("systemctl stop {all}"));
    assert_eq!(ours, std::slice::from_ref(&session.unit));
    assert_eq!(theirs, std::slice::from_ref(other), "another supervisor's, when asked for it");
}

#[test]
fn who_is_nobody_on_the_host_sees_the_same_list() {
    let fixture = Fixture::new();
    let session = fixture.start(&["sleep", "1000"]);
    let found: Value = serde_json::from_str(&text(&list_as_nobody(&fixture, &["--json"]))).unwrap();
    assert_eq!(found["sessions"][0]["unit"], *session.unit);
    assert_eq!(found["sessions"][0]["pid"], shown(&fixture, &session.unit, "MainPID"));
}

#[test]
fn a_bus_that_is_not_there_and_wrong_words_are_one_clear_line() {
    let fixture = Fixture::new();
    let failed = list(&fixture, &["--bus", "unix:path=/nonexistent/bus"]);
    let said = String::from_utf8(failed.stderr).unwrap();
    assert_eq!((failed.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.starts_with("opencode-pty list: cannot reach the service manager: "), "{said}");
    assert!(failed.stdout.is_empty());
    for words in [&["--no-such-option"][..], &["a-word"], &["--unit"]] {
        let wrong = list(&fixture, words);
        assert_eq!(wrong.status.code(), Some(64), "{words:?}");
        assert!(wrong.stdout.is_empty() && !wrong.stderr.is_empty(), "{words:?}");
    }
    // A reader that has seen enough is no failure.
    let cut = fixture.root(&format!("{{ {PROGRAM} list; echo $? >&2; }} 2>&1 >/dev/full | tail -n 1"));
    assert_eq!(cut, "71", "a full disk is");
    let cut = fixture.root(&format!(
        "mkfifo /run/test-list; {{ exec 3</run/test-list; exec 3<&-; }} & \
        {{ sleep 0; exec 4>/run/test-list; wait; {PROGRAM} list >&4; echo $?; }}; rm /run/test-list"
    ));
    assert_eq!(cut, "0");
}
