//! What `docs/operations.md` tells an operator to do, done.

use std::fs;
use std::path::Path;

use crate::fixture::{Fixture, SOON, wait_until};
use crate::outside::{RestartAtEnd, SERVER, SUPERVISOR};

/// The commands of the page's code block with this name.
fn commands(name: &str) -> String {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operations.md")).unwrap();
    let (_, rest) = page.split_once(&format!("```sh {name}\n")).unwrap();
    rest.split_once("```").unwrap().0.to_owned()
}

/// Whether the supervisor is one of these units; systemd shows a dependency's in no order of its own, and among them what it has
/// added by itself, such as `tmp.mount`.
fn names_supervisor(units: &str) -> bool {
    units.split_whitespace().any(|unit| unit == SUPERVISOR)
}

fn server_pid(fixture: &Fixture) -> String {
    fixture.property(SERVER, "MainPID")
}

/// Kills the supervisor and waits until its successor serves; gives the server's pid then, if it is back or still there.
fn crash(fixture: &Fixture) -> String {
    let before = fixture.supervisor_pid();
    fixture.root(&format!("kill -KILL {before}"));
    wait_until("another supervisor and a server", SOON, || {
        // First: what is said of the state afterwards is then of these, or of later ones.
        let (now, server) = (fixture.supervisor_pid(), server_pid(fixture));
        let state = fixture.root(&format!("systemctl is-active {SUPERVISOR} {SERVER} | tr '\\n' ' '; systemctl list-jobs --no-legend | grep -c opencode || true"));
        let ready = state == "active active 0" && now != before && now != "0" && server != "0";
        if ready { Ok(server) } else { Err(format!("{state} {now} {server}")) }
    })
}

#[test]
fn the_server_restarts_with_the_supervisor_unless_the_operator_takes_wants() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let server = server_pid(&fixture);
    assert_ne!(crash(&fixture), server, "with Requires= the server is restarted");
    fixture.restart_what_ended();

    // A drop-in can't take a dependency away, which is why the page changes the file.
    let unit = format!("/etc/systemd/system/{SERVER}");
    fixture.root(&format!("cp -p {unit} /run/test-{SERVER}"));
    fixture.root(&commands("wants"));
    let (requires, wants) = (fixture.property(SERVER, "Requires"), fixture.property(SERVER, "Wants"));
    let (server, still) = (server_pid(&fixture), crash(&fixture));
    let again = fixture.ask(&["echo", "again"]);
    fixture.root(&format!("mv /run/test-{SERVER} {unit}; systemctl daemon-reload"));
    assert!(!names_supervisor(&requires), "{requires}");
    assert!(names_supervisor(&wants), "{wants}");
    assert_eq!(still, server, "with Wants= it stays");
    assert_eq!(again, "again", "and has sessions of the new supervisor");
    let requires = fixture.property(SERVER, "Requires");
    assert!(names_supervisor(&requires), "as it was: {requires}");
}
