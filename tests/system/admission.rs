//! Who may ask for a session: the main process of `opencode-v2.service`, in the state it should be in, and nobody else.
//!
//! A stranger is closed without a word. Each of these tests sends a whole start, so that what is refused is the caller
//! and not the silence; what the start would have run leaves a file.

use std::process::Stdio;
use std::time::{Duration, Instant};

use opencode_pty::frame::message::ErrorCode;
use opencode_pty::limits::HANDSHAKE_TIME;
use support::peer::{Peer, PeerError, Transcript};
use support::standin::Probed;

use crate::account::{GID, NAME, WORKSPACE};
use crate::fixture::{Fixture, RUNTIME, SOON, exited, wait_until};
use crate::outside::{DropIn, PROBE, RestartAtEnd, Running, SERVER, SUPERVISOR, outside, text};

const SOCKET: &str = "/run/opencode-pty/supervisor.sock";
/// The longest a stranger may be kept: the five seconds of the handshake (SPEC 3), and what a loaded machine adds.
const BOUNDED: Duration = Duration::from_secs(7);

/// A directory in which a start of a stranger would leave a file; fails at the end if there is one.
struct Bait<'a> {
    fixture: &'a Fixture,
    directory: String,
    /// A program that asks for the bait and prints what the supervisor did, one line.
    probe: String,
}

impl<'a> Bait<'a> {
    fn new(fixture: &'a Fixture) -> Self {
        let (directory, tools) = (fixture.scratch(), fixture.scratch());
        fixture.root(&format!("chmod 0777 {directory} && chmod 0755 {tools}"));
        let probe = format!("{tools}/probe");
        let script = format!("#!/bin/sh\nexec {PROBE} probe {SOCKET} /bin/sh -c 'touch {directory}/taken'\n");
        fixture.write(&probe, 0o755, &script);
        Self { fixture, directory, probe }
    }

    /// Runs a script as root of the host, which probes; gives the probe's line.
    fn by_script(&self, script: &str) -> String {
        let begun = Instant::now();
        let output = self.fixture.host.command("/bin/sh").args(["-c", script]).stdin(Stdio::null()).output().unwrap();
        let seen = text(&output);
        assert!(begun.elapsed() < BOUNDED, "'{script}' took {:?}: {seen}", begun.elapsed());
        seen
    }
}

impl Drop for Bait<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.fixture.root(&format!("ls {}", self.directory)), "", "a stranger's command ran");
            assert_eq!(self.fixture.left_of_sessions(), "", "a stranger has a session");
        }
    }
}

/// A start by the server, on a connection that it made; what comes of it.
fn start_on(fixture: &Fixture, mut peer: Peer) -> Transcript {
    let dir = fixture.standin.open(WORKSPACE).unwrap();
    // The refusal may come before the start is out.
    match peer.start_in(&dir, RUNTIME, &["/bin/echo", "hello"]) {
        Ok(()) | Err(PeerError::System { .. }) => {}
        Err(other) => panic!("{other}"),
    }
    peer.read_to_end(SOON).unwrap()
}

#[test]
fn the_servers_main_process_passes_whichever_of_its_threads_connects() {
    let fixture = Fixture::new();
    // The stand-in serves each request on a thread of its own, so it is never the first thread that connects.
    let transcript = start_on(&fixture, fixture.standin.peer().unwrap());
    assert_eq!((transcript.text().as_str(), transcript.exit), ("hello\r\n", Some(exited(0))));
    let main = fixture.property(SERVER, "MainPID");
    assert_eq!(main, fixture.standin.pid().to_string());
}

// ---- strangers ---------------------------------------------------------------------------------------------------

#[test]
fn a_child_and_a_grandchild_of_the_server_are_closed_without_a_word() {
    let fixture = Fixture::new();
    let bait = Bait::new(&fixture);
    assert_eq!(fixture.standin.probe_from_child().unwrap(), Probed::Closed);
    let probe = &bait.probe;
    for script in [
        format!("exec {probe}"),
        format!("{probe}; true"),
        format!("sh -c 'sh -c \"{probe}; true\"; true'; true"),
        format!("setsid {probe}"),
        // Its parent is gone: the group is all that it has of the server.
        format!("(setsid sh -c 'while kill -0 '$$'; do sleep 0.01; done; {probe}' & ) 2>/dev/null"),
    ] {
        let begun = Instant::now();
        let finished = fixture.standin.spawn(&["/bin/sh", "-c", &script]).unwrap();
        assert_eq!(finished.text(), "closed\n", "{script}: {}", finished.complaint());
        assert!(begun.elapsed() < BOUNDED, "{script} took {:?}", begun.elapsed());
    }
}

#[test]
fn a_process_that_was_moved_into_the_servers_control_group_is_closed_without_a_word() {
    let fixture = Fixture::new();
    let bait = Bait::new(&fixture);
    let group = fixture.property(SERVER, "ControlGroup");
    let seen = bait.by_script(&format!(
        "echo $$ >/sys/fs/cgroup{group}/cgroup.procs && grep ^0:: /proc/self/cgroup &&
        exec setpriv --reuid {NAME} --regid {GID} --init-groups -- {}",
        bait.probe
    ));
    assert_eq!(seen, format!("0::{group}\nclosed"));
}

#[test]
fn the_account_elsewhere_is_closed_without_a_word() {
    let fixture = Fixture::new();
    let bait = Bait::new(&fixture);
    let begun = Instant::now();
    assert_eq!(outside(&fixture, &[], &["/bin/sh", "-c", &bait.probe]), "closed");
    assert!(begun.elapsed() < BOUNDED);
    // Nor with everything of the server's that an operator could give another unit.
    let like = [&*format!("JoinsNamespaceOf={SERVER}"), "PrivateTmp=yes", "NoNewPrivileges=yes", "Slice=system.slice"];
    assert_eq!(outside(&fixture, &like, &["/bin/sh", "-c", &bait.probe]), "closed");
    // In no unit at all, as an ssh login without a session would be.
    let seen = bait.by_script(&format!("exec setpriv --reuid {NAME} --regid {GID} --init-groups -- {}", bait.probe));
    assert_eq!(seen, "closed");
}

#[test]
fn root_is_closed_without_a_word() {
    let fixture = Fixture::new();
    let bait = Bait::new(&fixture);
    assert_eq!(bait.by_script(&bait.probe), "closed");
    // Root is the supervisor's own user, and still a stranger to it where the server is.
    let group = fixture.property(SERVER, "ControlGroup");
    let seen = bait.by_script(&format!("echo $$ >/sys/fs/cgroup{group}/cgroup.procs; exec {}", bait.probe));
    assert_eq!(seen, "closed");
    // One half of the account is not the account.
    let as_user = |options: &str| bait.by_script(&format!("exec setpriv {options} -- {}", bait.probe));
    assert_eq!(as_user(&format!("--reuid root --regid {GID} --clear-groups")), "closed");
    assert_eq!(as_user(&format!("--reuid {NAME} --regid root --groups {GID}")), "closed");
}

#[test]
fn others_do_not_even_reach_the_socket() {
    let fixture = Fixture::new();
    let bait = Bait::new(&fixture);
    let as_user = |options: &str| bait.by_script(&format!("exec setpriv {options} -- {}", bait.probe));
    let seen = as_user("--reuid eve --regid eve --clear-groups");
    assert!(seen.starts_with("refused Permission denied"), "{seen}");
    // Whom somebody has put into the account's group reaches it, and is nobody there.
    assert_eq!(as_user(&format!("--reuid eve --regid eve --groups {GID}")), "closed");
    assert_eq!(as_user(&format!("--reuid eve --regid {GID} --clear-groups")), "closed");
}

#[test]
fn the_socket_is_roots_for_the_account_and_its_directory_is_closed_to_others() {
    let fixture = Fixture::new();
    let seen = fixture
        .root("stat -c '%F %U %G %a' /run/opencode-pty /run/opencode-pty/supervisor.sock; ls -A /run/opencode-pty");
    assert_eq!(seen, format!("directory root {NAME} 750\nsocket root {NAME} 660\nsupervisor.sock"));
}

// ---- the server, at the wrong time ---------------------------------------------------------------------------------

/// What may come of a start that is refused after its caller was the server, or that of a process that has gone.
fn assert_refused(transcript: &Transcript, what: &str) {
    let code = transcript.error_code();
    assert!(matches!(code, None | Some(ErrorCode::Unauthenticated)), "{what}: {transcript:?}");
    assert_no_session(transcript, what);
}

fn assert_no_session(transcript: &Transcript, what: &str) {
    assert!(transcript.unit.is_none() && transcript.exit.is_none(), "{what}: {transcript:?}");
}

#[test]
fn a_connection_from_before_a_restart_of_the_server_is_no_good_after_it() {
    let mut fixture = Fixture::new();
    // Outside the server's group a child of it survives the restart.
    let elsewhere = "/sys/fs/cgroup/test-elsewhere";
    // A connection has five seconds for its handshake, and on a slow machine all of this may take that long.
    let (mut tries, mut in_time) = (0, 0);
    let restarts = ["systemctl restart opencode-v2.service", "kill -KILL $MAIN; systemctl restart opencode-v2.service"];
    while let Some(restart) = restarts.get(in_time) {
        tries += 1;
        assert!(tries <= 10, "each start came after the handshake's time, so this test tries nothing");
        let (before, connected) = (fixture.standin.pid(), Instant::now());
        let early = fixture.standin.peer().unwrap();
        let (held, child) = fixture.standin.peer_held_by_child().unwrap();
        fixture.root(&format!("mkdir -p {elsewhere} && echo {child} >{elsewhere}/cgroup.procs"));
        // Both are known as the server's by now: it has been served since.
        assert_eq!(fixture.ask(&["echo", "meanwhile"]), "meanwhile");

        fixture.root(&format!("MAIN={before}; {restart}"));
        fixture.restart_what_ended();
        assert_ne!(fixture.standin.pid(), before);

        let (early, held) = (start_on(&fixture, early), start_on(&fixture, held));
        let was_in_time = connected.elapsed() < HANDSHAKE_TIME;
        let alive = fixture.is_alive(&child.to_string());
        fixture.root(&format!("kill -KILL {child}; while ! rmdir {elsewhere} 2>/dev/null; do sleep 0.01; done"));
        assert!(alive, "nobody held the connection, so this test tries nothing");
        for (transcript, what) in [(&early, "one that nobody else holds"), (&held, "one that a child holds")] {
            assert_no_session(transcript, what);
            if was_in_time {
                assert_refused(transcript, what);
            }
        }
        in_time += usize::from(was_in_time);
        assert_eq!(fixture.left_of_sessions(), "");
        assert_eq!(fixture.ask(&["echo", "again"]), "again");
    }
}

/// A drop-in that keeps the server's unit in a step of its life until a line is written to the gate.
struct Gate<'a> {
    fixture: &'a Fixture,
    _drop_in: DropIn,
}

const GATE: &str = "/run/test-gate";

impl<'a> Gate<'a> {
    fn new(fixture: &'a Fixture, step: &str) -> Self {
        fixture.root(&format!("rm -f {GATE}; mkfifo {GATE}"));
        fixture.remove_at_end(GATE);
        let lines = format!("[Service]\n{step}=+/bin/sh -c 'cat {GATE}'\nTimeoutStartSec=60\nTimeoutStopSec=60");
        Self { fixture, _drop_in: DropIn::new(fixture, SERVER, &lines) }
    }

    /// Waits until the unit is in this state.
    fn wait_for(&self, state: &str) {
        wait_until(&format!("the server's unit to be {state}"), SOON, || {
            let now =
                self.fixture.root(&format!("systemctl show -p ActiveState,SubState --value {SERVER} | tr '\\n' ' '"));
            if now.trim_end() == state { Ok(()) } else { Err(now) }
        });
    }

    fn open(&self) {
        self.fixture.root(&format!("timeout 30 sh -c 'echo go >{GATE}'"));
    }
}

#[test]
fn the_server_is_refused_while_its_unit_is_being_stopped() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let gate = Gate::new(&fixture, "ExecStop");
    let (connected, early) = (Instant::now(), fixture.standin.peer().unwrap());
    fixture.root(&format!("systemctl --no-block stop {SERVER}"));
    gate.wait_for("deactivating stop");

    // One whose caller was found good before is looked at again before anything is started. Its five seconds go on meanwhile.
    let early = start_on(&fixture, early);
    let late = connected.elapsed() >= HANDSHAKE_TIME && early.error_code() == Some(ErrorCode::Timeout);
    assert!(late || early.error_code() == Some(ErrorCode::Unauthenticated), "{early:?}");
    assert_no_session(&early, "one from before");
    // It is the main process, it lives, and it is told why not.
    let late = start_on(&fixture, fixture.standin.peer().unwrap());
    assert_eq!(late.error_code(), Some(ErrorCode::Unauthenticated), "{late:?}");
    assert_eq!(fixture.left_of_sessions(), "");

    gate.open();
    gate.wait_for("inactive dead");
    drop(gate);
    fixture.restart_what_ended();
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}

#[test]
fn the_server_is_refused_before_its_unit_is_up() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let gate = Gate::new(&fixture, "ExecStartPost");
    fixture.root(&format!("systemctl stop {SERVER}; systemctl --no-block start {SERVER}"));
    gate.wait_for("activating start-post");
    let standin =
        support::standin::Standin::connect_within(fixture.host.path(support::standin::CONTROL_PATH), SOON).unwrap();

    let early = start_on(&fixture, standin.peer().unwrap());
    assert_eq!(early.error_code(), Some(ErrorCode::Unauthenticated), "{early:?}");

    gate.open();
    gate.wait_for("active running");
    let transcript = start_on(&fixture, standin.peer().unwrap());
    assert_eq!(transcript.exit, Some(exited(0)), "{transcript:?}");
    drop(gate);
    fixture.restart_what_ended();
}

#[test]
fn a_server_in_another_control_group_than_agreed_is_refused() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let drop_in = DropIn::new(&fixture, SERVER, "[Service]\nSlice=user.slice");
    fixture.root(&format!("systemctl restart {SERVER}"));
    fixture.restart_what_ended();
    let transcript = start_on(&fixture, fixture.standin.peer().unwrap());
    assert_eq!(transcript.error_code(), Some(ErrorCode::Unauthenticated), "{transcript:?}");
    drop(drop_in);
    fixture.root(&format!("systemctl restart {SERVER}"));
    fixture.restart_what_ended();
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}

#[test]
fn a_process_that_connects_and_dies_leaves_nobody_a_way_in() {
    let fixture = Fixture::new();
    let bait = Bait::new(&fixture);
    // The connection lives on in a child of it, whose pid nobody asks about.
    let program = format!(
        r"
import os, socket, struct, time
connection = socket.socket(socket.AF_UNIX)
connection.connect('{SOCKET}')
connector = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == connector:
    time.sleep(0.01)
connection.settimeout(10)
try:
    print('closed' if connection.recv(99) == b'' else 'answered')
except ConnectionResetError:
    print('closed')
"
    );
    let finished = fixture.standin.spawn(&["/usr/bin/python3", "-c", &program]).unwrap();
    assert_eq!(finished.text(), "closed\n", "{}", finished.complaint());
    drop(bait);
}

#[test]
fn strangers_leave_nothing_behind_in_the_supervisor() {
    let fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let before = fixture.idle_descriptors();
    // Some who say nothing and some who say much, who hold on and who hang up.
    let program = format!(
        r"
import os, socket
held = []
for number in range(60):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect('{SOCKET}')
    try:
        if number % 2:
            socket.send_fds(connection, [b'OPTY\x01\x01\0\0\0\0\0\x19' + bytes(number)], [0] * (number % 7))
        if number % 3:
            held.append(connection)
        else:
            connection.close()
    except OSError:
        pass
for connection in held:
    connection.settimeout(10)
    try:
        while connection.recv(999):
            pass
    except ConnectionResetError:
        pass
open('{{ready}}', 'w').write('ready')
import time
time.sleep(600)
"
    );
    let _stranger = Running::python(&fixture, &NAME, &program);
    fixture.wait_for_descriptors(before, "the strangers");
    let journal = fixture.root(&format!("journalctl --no-pager -o cat -u {SUPERVISOR} | grep -c refused"));
    assert_ne!(journal, "0");
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}
