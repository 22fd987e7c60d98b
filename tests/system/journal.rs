//! What the journal of a host has of sessions and refusals (`docs/journal.md`), what `systemctl status` shows, and the
//! watchdog.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use opencode_pty::frame::message::ErrorCode;
use opencode_pty::journal::Event;
use serde_json::Value;
use support::markdown::{code_spans, table_rows};
use support::standin::{SHORT_RUNTIME, SUPERVISOR_PATH};

use crate::account::{GID, NAME, WORKSPACE};
use crate::fixture::{Fixture, RUNTIME, SOON, Session, wait_until};
use crate::outside::{DropIn, RestartAtEnd, SERVER, SUPERVISOR};

/// A record's fields, as `journalctl -o json` prints them.
type Record = BTreeMap<String, Value>;

/// The records that match.
fn records(fixture: &Fixture, matches: &str) -> Vec<Record> {
    let lines = fixture.root(&format!("journalctl --no-pager --all --boot -o json {matches}"));
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The supervisor's records of this event that match, in its own words and not in somebody's who only claims to be it.
fn of_event(fixture: &Fixture, event: Event, matches: &str) -> Vec<Record> {
    records(fixture, &format!("_SYSTEMD_UNIT={SUPERVISOR} MESSAGE_ID={} {matches}", event.id()))
}

/// The one record of an event about a unit, once it is there.
fn of_unit(fixture: &Fixture, event: Event, unit: &str) -> Record {
    wait_until(&format!("{event:?} of {unit}"), SOON, || {
        let mut found = of_event(fixture, event, &format!("OBJECT_SYSTEMD_UNIT={unit}"));
        match found.len() {
            1 => Ok(found.remove(0)),
            count => Err(format!("{count} records")),
        }
    })
}

fn text<'a>(record: &'a Record, field: &str) -> &'a str {
    record.get(field).and_then(Value::as_str).unwrap_or_else(|| panic!("no {field} in {record:#?}"))
}

/// Whether the end of a session took SIGKILL, as its record says: what obeys is gone before.
pub fn took_sigkill(fixture: &Fixture, unit: &str) -> bool {
    text(&of_unit(fixture, Event::SessionEnded, unit), "OPENCODE_PTY_KILLED") != "0"
}

fn number(record: &Record, field: &str) -> u64 {
    text(record, field).parse().unwrap()
}

/// What a record has besides what journald adds and what every record has.
fn fields(record: &Record) -> BTreeSet<String> {
    let common = ["MESSAGE", "MESSAGE_ID", "PRIORITY", "SYSLOG_IDENTIFIER"];
    for name in common {
        text(record, name);
    }
    record.keys().filter(|name| !name.starts_with('_') && !common.contains(&name.as_str())).cloned().collect()
}

/// The page's records by `MESSAGE_ID`: the fields each always has, and those it may have.
fn documented() -> BTreeMap<String, (BTreeSet<String>, BTreeSet<String>)> {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/journal.md")).unwrap();
    let rows = table_rows(&page, "record");
    let parse = |cells: &[String]| {
        let id = code_spans(&cells[1]).next().unwrap().to_owned();
        let all: BTreeSet<String> = code_spans(&cells[3]).map(str::to_owned).collect();
        let (may, always) = all.into_iter().partition(|name| cells[3].contains(&format!("[`{name}`]")));
        (id, (always, may))
    };
    rows.iter().map(|(_, cells)| parse(cells)).collect()
}

/// A session that waits to be ended, once these words of the shell have been carried out.
fn waiting(fixture: &Fixture, first: &str) -> Session {
    let mut session = fixture.start_sh(&format!("{first}; echo ready; while :; do sleep 0.1; done"));
    session.line("ready");
    session
}

/// Root of the host connects: a stranger.
fn knock(fixture: &Fixture) {
    let connect = format!("import socket; socket.socket(socket.AF_UNIX).connect('{SUPERVISOR_PATH}')");
    fixture.root(&format!("python3 -c \"{connect}\""));
}

#[test]
fn a_session_has_one_record_at_its_start_and_one_at_its_end() {
    let fixture = Fixture::new();
    let server_invocation = fixture.property(SERVER, "InvocationID");
    let dir = fixture.scratch();
    let cwd = fixture.root(&format!("stat --format='%d %i' {dir}"));
    let directory = fixture.standin.open(&dir).unwrap();
    let words = ["/bin/sh", "-c", "read -r line; stty -echo; printf 1234567; exit 7"];
    let mut peer = fixture.standin.start_in(&directory, RUNTIME, &words).unwrap();
    let unit = peer.started(SOON).unwrap();
    let invocation = fixture.property(&unit, "InvocationID");
    wait_until("the status to say that there is a session", SOON, || {
        let status = fixture.root(&format!("systemctl status --no-pager {SUPERVISOR}"));
        if status.contains("Status: \"1/16 sessions\"") { Ok(()) } else { Err(status) }
    });

    let start = of_unit(&fixture, Event::SessionStarted, &unit);
    assert_eq!(text(&start, "OBJECT_SYSTEMD_INVOCATION_ID"), invocation);
    assert_eq!(number(&start, "OPENCODE_PTY_PEER_PID"), u64::from(fixture.standin.pid()));
    assert_eq!(text(&start, "OPENCODE_PTY_SERVER_INVOCATION_ID"), server_invocation);
    assert_eq!(number(&start, "OPENCODE_PTY_RUNTIME_SEC"), u64::from(RUNTIME));
    assert!(text(&start, "OPENCODE_PTY_ISOLATION").starts_with("groups=dropped landlock="), "{start:#?}");
    let found = format!("{} {}", text(&start, "OPENCODE_PTY_CWD_DEV"), text(&start, "OPENCODE_PTY_CWD_INO"));
    assert_eq!(found, cwd);
    assert!(text(&start, "MESSAGE").starts_with(&format!("{unit}: started for pid ")), "{start:#?}");

    peer.input(b"12345\n").unwrap();
    let transcript = peer.read_to_end(SOON).unwrap();
    let end = of_unit(&fixture, Event::SessionEnded, &unit);
    assert_eq!(text(&end, "OBJECT_SYSTEMD_INVOCATION_ID"), invocation);
    assert_eq!(number(&end, "OPENCODE_PTY_PEER_PID"), u64::from(fixture.standin.pid()));
    assert_eq!(text(&end, "OPENCODE_PTY_SERVER_INVOCATION_ID"), server_invocation);
    let exit = ["OPENCODE_PTY_RESULT", "OPENCODE_PTY_CODE", "OPENCODE_PTY_STATUS"].map(|field| text(&end, field));
    assert_eq!(exit, ["exit-code", "1", "7"]);
    assert_eq!(text(&end, "OPENCODE_PTY_ENDED_BY"), "itself");
    assert_eq!(number(&end, "OPENCODE_PTY_INPUT_BYTES"), 6);
    assert_eq!(number(&end, "OPENCODE_PTY_OUTPUT_BYTES"), transcript.output.len() as u64);
    assert_eq!(text(&end, "OPENCODE_PTY_KILLED"), "0");
    assert!(number(&end, "OPENCODE_PTY_CLEANUP_USEC") <= number(&end, "OPENCODE_PTY_RAN_USEC"), "{end:#?}");
    assert!(text(&end, "MESSAGE").starts_with(&format!("{unit}: ended by itself: exited 7 ")), "{end:#?}");

    // An operator who only has the unit's name finds both, among what PID 1 says of it.
    let about = records(&fixture, &format!("-u {unit}"));
    let ours = about.iter().filter(|record| record.get("_SYSTEMD_UNIT") == Some(&SUPERVISOR.into()));
    let ids: Vec<&str> = ours.map(|record| text(record, "MESSAGE_ID")).collect();
    assert_eq!(ids, [Event::SessionStarted.id(), Event::SessionEnded.id()]);
    wait_until("the status to say that no session is left", SOON, || {
        let status = fixture.property(SUPERVISOR, "StatusText");
        if status == "0/16 sessions" { Ok(()) } else { Err(status) }
    });
}

#[test]
fn the_end_record_says_who_ended_the_session_and_whether_it_took_sigkill() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let ended_by = |fixture: &Fixture, unit: &str| {
        let end = of_unit(fixture, Event::SessionEnded, unit);
        ["OPENCODE_PTY_ENDED_BY", "OPENCODE_PTY_KILLED", "OPENCODE_PTY_RESULT"]
            .map(|field| text(&end, field).to_owned())
    };

    let mut session = waiting(&fixture, "true");
    session.stop_and_read();
    assert_eq!(ended_by(&fixture, &session.unit), ["stop", "0", "stopped"]);

    let mut session = waiting(&fixture, "trap '' TERM HUP");
    session.stop_and_read();
    assert_eq!(ended_by(&fixture, &session.unit), ["stop", "1", "stopped"]);

    let session = waiting(&fixture, "true");
    let unit = session.unit.clone();
    drop(session);
    assert_eq!(ended_by(&fixture, &unit)[..2], ["disconnect", "0"]);

    let mut session = waiting(&fixture, "true");
    session.send_raw(b"not a frame!", &[]).unwrap();
    assert_eq!(session.read_to_end().error_code(), Some(ErrorCode::BadFrame));
    assert_eq!(ended_by(&fixture, &session.unit)[..2], ["violation", "0"]);

    let mut session = fixture.start_for(SHORT_RUNTIME, &["sleep", "1000"]);
    session.read_to_end();
    assert_eq!(ended_by(&fixture, &session.unit), ["runtime", "0", "timeout"]);

    // The manager's word is the same when it was somebody else's stop that took so long.
    let mut session = waiting(&fixture, "trap '' TERM HUP");
    fixture.root(&format!("systemctl stop {}", session.unit));
    session.read_to_end();
    assert_eq!(ended_by(&fixture, &session.unit), ["itself", "1", "timeout"]);

    let mut session = waiting(&fixture, "true");
    // Not `systemctl stop`, which stops the server first.
    fixture.root(&format!("kill -TERM {}", fixture.supervisor_pid()));
    session.read_to_end();
    assert_eq!(ended_by(&fixture, &session.unit)[..2], ["shutdown", "0"]);
    fixture.restart_what_ended();
}

#[test]
fn a_start_that_failed_and_a_refusal_have_records_with_the_code_that_was_told() {
    let fixture = Fixture::new();
    // A directory that is gone by the time the launcher looks for it.
    let dir = fixture.scratch();
    let directory = fixture.standin.open(&dir).unwrap();
    fixture.root(&format!("rmdir {dir}"));
    let transcript = fixture.standin.start_in(&directory, RUNTIME, &["true"]).unwrap().read_to_end(SOON).unwrap();
    assert_eq!(transcript.error_code(), Some(ErrorCode::BadCwd), "{transcript:?}");
    // Of this server: other tests have left records of others.
    let of_this = format!("OPENCODE_PTY_ERROR=bad-cwd OPENCODE_PTY_PEER_PID={}", fixture.standin.pid());
    let not_started = wait_until("the record of the start that failed", SOON, || {
        of_event(&fixture, Event::SessionNotStarted, &of_this).pop().ok_or_else(String::new)
    });
    assert!(text(&not_started, "OPENCODE_PTY_REASON").starts_with("bad-cwd: "), "{not_started:#?}");

    // Refusals share a record a second; strangers do not stop coming before theirs is there.
    let before = of_event(&fixture, Event::Refused, "").len();
    let refused = wait_until("the record of a stranger", SOON, || {
        knock(&fixture);
        let mut now = of_event(&fixture, Event::Refused, "");
        if now.len() > before { Ok(now.remove(now.len() - 1)) } else { Err("none".to_owned()) }
    });
    assert_eq!(text(&refused, "OPENCODE_PTY_PEER_UID"), "0");
    assert_ne!(number(&refused, "OPENCODE_PTY_PEER_PID"), 0);
    assert_eq!(text(&refused, "OPENCODE_PTY_REASON"), "not the account");
    assert!(number(&refused, "OPENCODE_PTY_REFUSALS") >= 1);
    assert_eq!(refused.get("OPENCODE_PTY_ERROR"), None, "a stranger is told nothing");
}

#[test]
fn every_record_of_the_supervisor_has_the_documented_fields_and_no_other() {
    let fixture = Fixture::new();
    // At least these are there then; the other tests of this run bring more.
    fixture.ask(&["true"]);
    let dir = fixture.scratch();
    let directory = fixture.standin.open(&dir).unwrap();
    fixture.root(&format!("rmdir {dir}"));
    fixture.standin.start_in(&directory, RUNTIME, &["true"]).unwrap().read_to_end(SOON).unwrap();
    let seen_by = |records: &[Record]| records.iter().map(|record| text(record, "MESSAGE_ID").to_owned()).collect();
    let (seen, all): (BTreeSet<String>, Vec<Record>) = wait_until("a record of each kind", SOON, || {
        knock(&fixture);
        let all = records(&fixture, &format!("_SYSTEMD_UNIT={SUPERVISOR} _TRANSPORT=journal"));
        let seen: BTreeSet<String> = seen_by(&all);
        let wanted =
            [Event::Serving, Event::SessionStarted, Event::SessionNotStarted, Event::SessionEnded, Event::Refused];
        match wanted.iter().find(|event| !seen.contains(event.id())) {
            None => Ok((seen, all)),
            Some(event) => Err(format!("no {event:?}")),
        }
    });
    let documented = documented();
    for record in &all {
        let (always, may) = &documented[text(record, "MESSAGE_ID")];
        let has = fields(record);
        assert!(always.is_subset(&has), "missing {:?} in {record:#?}", always - &has);
        let extra = &(&has - always) - may;
        assert!(extra.is_empty(), "not documented: {extra:?} in {record:#?}");
        assert_eq!(text(record, "SYSLOG_IDENTIFIER"), "opencode-pty-supervisor");
    }
    // Whatever it writes, it writes as a record: nothing comes by standard error while the journal is there.
    eprintln!("{} records of {} kinds", all.len(), seen.len());
}

#[test]
fn nothing_of_a_sessions_words_bytes_or_directory_is_in_any_field_of_any_record() {
    let fixture = Fixture::new();
    let planted = format!("planted{:016x}", std::process::id());
    let dir = format!("{WORKSPACE}/{planted}-directory");
    fixture.remove_at_end(&dir);
    fixture.root(&format!("install -d -o {NAME} -g {GID} {dir}"));
    let script = "echo \"$1 output\"; read -r line; exit 3";
    let words = ["/bin/sh", "-c", script, "sh", &format!("{planted}-argument")];
    let directory = fixture.standin.open(&dir).unwrap();
    let mut peer = fixture.standin.start_in(&directory, RUNTIME, &words).unwrap();
    let unit = peer.started(SOON).unwrap();
    peer.output_until(b"output\r\n", SOON).unwrap();
    peer.input(format!("{planted}-input\n").as_bytes()).unwrap();
    peer.read_to_end(SOON).unwrap();
    // A command that can't be executed, a directory that is no more: what fails is told no more loudly.
    fixture.run_in(&directory, &[&format!("/nonexistent/{planted}")]);
    fixture.root(&format!("rmdir {dir}"));
    fixture.run_in(&directory, &[&planted]);
    of_unit(&fixture, Event::SessionEnded, &unit);
    wait_until("the record of the start that failed", SOON, || {
        let found = of_event(&fixture, Event::SessionNotStarted, "");
        if found.is_empty() { Err(String::new()) } else { Ok(()) }
    });

    let ours = fixture.root(&format!("journalctl --no-pager --all --boot -o json _SYSTEMD_UNIT={SUPERVISOR}"));
    assert!(ours.contains(&unit), "the journal does name the session");
    assert!(!ours.contains("planted"), "{ours}");
    let about = fixture.root(&format!("journalctl --no-pager --all --boot -o json -u {unit}"));
    assert!(!about.contains("planted"), "{about}");
    // Nor in what anybody else wrote; scripts of this test run without the journal's knowledge.
    let all = fixture.root("journalctl --no-pager --all --boot -o json");
    assert!(!all.contains(&planted));
}

// ---- the watchdog ------------------------------------------------------------------------------------------------------

#[test]
fn the_watchdog_is_fed_while_the_loop_turns_and_a_supervisor_that_hangs_is_replaced() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.property(SUPERVISOR, "WatchdogUSec"), "1min");
    let _restart = RestartAtEnd::new(&fixture);
    let _drop_in = DropIn::new(&fixture, SUPERVISOR, "[Service]\nWatchdogSec=10");
    fixture.restart_supervisor();
    let (pid, restarts) = (fixture.supervisor_pid(), fixture.property(SUPERVISOR, "NRestarts"));

    // An idle one feeds it, again and again: three times is longer than the watchdog would have waited for one.
    let mut last = fixture.property(SUPERVISOR, "WatchdogTimestampMonotonic");
    for _ in 0..3 {
        last = wait_until("the watchdog to be fed", SOON, || {
            let now = fixture.property(SUPERVISOR, "WatchdogTimestampMonotonic");
            if now == last { Err(now) } else { Ok(now) }
        });
    }
    assert_eq!(fixture.supervisor_pid(), pid);

    // One that hangs is ended by the manager, its session with it, and another one takes its place.
    let mut session = waiting(&fixture, "true");
    fixture.root(&format!("kill -STOP {pid}"));
    session.peer.read_until_closed(SOON).unwrap();
    fixture.wait_until_gone(&session.unit, SOON);
    let successor = wait_until("another supervisor", SOON, || {
        let now = fixture.supervisor_pid();
        let state = fixture.property(SUPERVISOR, "ActiveState");
        if now != pid && now != "0" && state == "active" { Ok(now) } else { Err(format!("{now} {state}")) }
    });
    assert_ne!(successor, pid);
    assert_ne!(fixture.property(SUPERVISOR, "NRestarts"), restarts);
    wait_until("the manager to say why", SOON, || {
        let said = records(&fixture, &format!("-u {SUPERVISOR} _PID=1"));
        let watchdog = said.iter().any(|record| text(record, "MESSAGE").contains("Failed with result 'watchdog'"));
        if watchdog { Ok(()) } else { Err(format!("{} records", said.len())) }
    });
    // `Requires=` took the server along; it comes back by its own `Restart=`.
    fixture.restart_what_ended();
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}
