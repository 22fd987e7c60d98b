//! The threats of docs/threats.md, tried. Each test first shows the attack succeeding where the protection is not
//! (`outside.rs`), and then failing in a session.
//!
//! Attackers are small programs in Python, or in Perl where a system call has no other way to it; both are on any host.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::process::Stdio;

use opencode_pty::frame::message::{ErrorCode, Exit};
use opencode_pty::frame::words::encode_word;
use support::host::PASSWORD_CANARY;
use support::standin::Probed;

use crate::account::{GID, NAME, UID, WORKSPACE, filled};
use crate::fixture::{Fixture, PLACES, RUNTIME, SOON, Session, at_a_time, exited, side_by_side, wait_until};
use crate::flood::long;
use crate::outside::{DropIn, Naive, PROBE, RestartAtEnd, Running, SERVER, SUPERVISOR, outside, outside_command, text};

/// The ways of an attack that were told of with this word: attackers print `WAY: open` or `WAY: shut, REASON`.
fn lines_with<'a>(text: &'a str, word: &str) -> Vec<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(": "))
        .filter(|(_, told)| told.starts_with(word))
        .map(|(way, _)| way)
        .collect()
}

fn opened(text: &str) -> Vec<&str> {
    lines_with(text, "open")
}

/// Fails unless each way was tried and found shut.
fn assert_all_shut(text: &str, ways: usize) {
    assert_eq!((opened(text), lines_with(text, "shut").len()), (vec![], ways), "{text}");
}

/// The pid of the server's main process.
pub fn server_pid(fixture: &Fixture) -> String {
    fixture.standin.pid().to_string()
}

// ---- T1: the server's mounts ---------------------------------------------------------------------------------

/// Tries to reach the system bus from the working directory, by every way that does not begin in a mask.
const CLIMB: &str = r"
import os, socket, sys
bus = 'run/dbus/system_bus_socket'
starts = ['', '/proc/self/cwd/', '/proc/thread-self/cwd/', f'/proc/{os.getppid()}/cwd/']
starts += [f'/proc/self/fd/{number}/' for number in range(10)]
ways = [start + '../' * count + bus for start in starts for count in (1, 3, 4, 5, 6, 40)]
ways += ['/' + bus, '/var/' + bus, '/proc/self/root/' + bus, '/proc/1/root/' + bus]
ways += [f'/proc/{sys.argv[1]}/root/' + bus, f'/proc/{sys.argv[1]}/cwd/../../' + bus]
for way in ways:
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10)
        connection.connect(way)
        connection.sendall(b'\0AUTH EXTERNAL 31303030\r\n')
        print(f'{way}: ' + ('open' if connection.recv(99) else 'shut, no answer'))
    except OSError as error:
        print(f'{way}: shut, {error}')
";
const CLIMB_WAYS: usize = 14 * 6 + 6;

/// Runs a Python program as the account in a plain unit that masks the bus as a session's does, and gets the directory
/// as the session's does, too. The program finds it as descriptor 4: Python dislikes a directory as standard error.
fn outside_with(fixture: &Fixture, dir: &OwnedFd, program: &str, argument: &str) -> String {
    let masks = ["TemporaryFileSystem=/run:ro", "InaccessiblePaths=-/run/dbus/system_bus_socket"];
    let moved = "exec 4<&2 2>&1; exec python3 -c \"$0\" \"$1\"";
    let mut command = outside_command(fixture, &masks, &["/bin/sh", "-c", moved, program, argument]);
    text(&command.stderr(Stdio::from(dir.try_clone().unwrap())).output().unwrap())
}

#[test]
fn t01_a_session_can_not_climb_out_of_its_mounts() {
    let open_dir = |fixture: &Fixture| {
        let scratch = fixture.scratch();
        (fixture.standin.open(&scratch).unwrap(), scratch)
    };
    let climb = |fixture: &Fixture, dir: OwnedFd| {
        let transcript = fixture.run_in(dir, &["/usr/bin/python3", "-c", CLIMB, &server_pid(fixture)]);
        assert_eq!(transcript.exit, Some(exited(0)), "{transcript:?}");
        transcript.text().replace("\r\n", "\n")
    };
    {
        // Without the launcher's step 3: the directory brings the server's mounts with it.
        let naive = Naive::new();
        let (dir, _) = open_dir(&naive.fixture);
        let seen = climb(&naive.fixture, dir);
        let found = opened(&seen);
        assert!(found.contains(&"../../../../run/dbus/system_bus_socket"), "{seen}");
        assert!(found.contains(&"/proc/self/cwd/../../../../run/dbus/system_bus_socket"), "{seen}");
        assert!(!found.contains(&"/run/dbus/system_bus_socket"), "{seen}");
    }
    let fixture = Fixture::new();
    let (dir, scratch) = open_dir(&fixture);
    // The same of a plain unit with the same masks, which gets the directory as the session's unit does.
    let program = format!("import os\nos.fchdir(4)\nos.close(4)\n{CLIMB}");
    let seen = outside_with(&fixture, &dir, &program, &server_pid(&fixture));
    assert!(opened(&seen).contains(&"../../../../run/dbus/system_bus_socket"), "{seen}");

    assert_all_shut(&climb(&fixture, dir), CLIMB_WAYS);
    assert_eq!(scratch.matches('/').count(), 4, "four steps up is the root");
}

/// Names what of these processes lies on a mount that is not in their own namespace. Runs as root.
const FOREIGN_MOUNTS: &str = r"
import os, sys
for pid in sys.argv[1:]:
    own = {line.split()[0] for line in open(f'/proc/{pid}/mountinfo')}
    for name in ['cwd', 'root', 'exe'] + ['fd/' + number for number in os.listdir(f'/proc/{pid}/fd')]:
        path = f'/proc/{pid}/{name}'
        if name.startswith('fd/') and not os.readlink(path).startswith('/'):
            continue
        held = os.open(path, os.O_PATH)
        mount = [line.split()[1] for line in open(f'/proc/self/fdinfo/{held}') if line.startswith('mnt_id')]
        os.close(held)
        if mount[0] not in own:
            print(name)
        else:
            print('own ' + name)
";

/// What a running session's processes hold, each with `own` in front unless it lies on somebody else's mount.
fn held_by(fixture: &Fixture, session: &Session) -> String {
    let pids = fixture.pids(&session.unit);
    assert!(!pids.is_empty());
    let mut command = fixture.host.command("/usr/bin/python3");
    text(&command.args(["-c", FOREIGN_MOUNTS]).args(pids).output().unwrap())
}

#[test]
fn t01_nothing_that_a_sessions_processes_hold_lies_on_the_servers_mounts() {
    {
        let naive = Naive::new();
        let mut session = naive.fixture.start_sh("echo ready; read line");
        session.output_until(b"ready", SOON).unwrap();
        let held = held_by(&naive.fixture, &session);
        assert!(held.lines().any(|line| line == "cwd"), "{held}");
        session.stop_and_read();
    }
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("echo ready; read line");
    session.line("ready");
    let held = held_by(&fixture, &session);
    assert!(held.lines().filter(|line| *line == "own cwd").count() >= 2, "script(1) and the command: {held}");
    assert!(held.lines().all(|line| line.starts_with("own ")), "{held}");
    session.stop_and_read();
}

/// Exchanges a directory and a link to where the exchange puts it, as fast as it can: Linux' `renameat2`.
const SWAP: &str = r"my @names = ('real', 'link'); syscall(316, -100, $names[0], -100, $names[1], 2) while 1";

/// Does what a launcher would do that trusts a path: reads it, opens it, compares the inode. Counts where it got to.
const TRUST_A_PATH: &str = r"
import os
own = {line.split()[0] for line in open('/proc/self/mountinfo')}
inside = outside = failed = 0
for _ in range(20000):
    try:
        held = os.open(os.readlink('/proc/self/fd/4'), os.O_PATH | os.O_DIRECTORY)
    except OSError:
        failed += 1
        continue
    if os.path.samestat(os.fstat(held), os.fstat(4)):
        mount = [line.split()[1] for line in open(f'/proc/self/fdinfo/{held}') if line.startswith('mnt_id')]
        if mount[0] in own:
            inside += 1
        else:
            outside += 1
    os.close(held)
    if outside > 3:
        break
print(outside)
";

#[test]
fn t01_a_link_that_is_swapped_in_on_the_way_does_not_lead_into_the_servers_mounts() {
    let fixture = Fixture::new();
    let scratch = fixture.scratch();
    let way = format!("/proc/{}/root{scratch}/link", server_pid(&fixture));
    fixture.root(&format!("cd {scratch} && install -d -o {NAME} real real/inner && ln -s {way} link"));
    let dir = fixture.standin.open(format!("{scratch}/real/inner")).unwrap();
    let program = format!("cd {scratch} && exec perl -e \"{}\"", SWAP.replace('$', "\\$"));
    let _swapping = Running::start(&fixture, "test-swap", &[&format!("User={NAME}")], &["/bin/sh", "-c", &program]);

    let got_out = outside_with(&fixture, &dir, TRUST_A_PATH, "");
    assert!(got_out.parse::<u32>().unwrap() > 0, "who trusts the path never got out, so this test tries nothing");

    let up = "../".repeat(20);
    let script = format!("[ -e {up}run/systemd/notify ] && echo out || echo in");
    let transcripts = at_a_time(4, 40, |_| {
        let mut peer = fixture.standin.start_in(&dir, RUNTIME, &["/bin/sh", "-c", &script]).unwrap();
        peer.read_to_end(SOON).unwrap()
    });
    for transcript in &transcripts {
        match transcript.error_code() {
            Some(code) => assert_eq!(code, ErrorCode::BadCwd, "{transcript:?}"),
            None => assert_eq!(transcript.text(), "in\r\n", "{transcript:?}"),
        }
    }
}

// ---- T2, T19: the server's process -----------------------------------------------------------------------------

/// Tries to look into a process and to take from it. Arguments: its pid, an address in its memory.
const TRACE: &str = r#"
$| = 1;
my ($pid, $address) = ($ARGV[0] + 0, hex $ARGV[1]);
my ($room, $length) = ("\0" x 64, 64);
sub told { my ($way, $done) = @_; my $why = "$!"; print "$way: ", ($done ? "open" : "shut, $why"), "\n"; }
sub begins { my ($path) = @_; open(my $file, "<:raw", $path) or return 0; sysread($file, my $bytes, 64) }
for my $name (qw(environ auxv maps smaps smaps_rollup pagemap io personality syscall fdinfo/0 task/PID/environ)) {
    told($name, begins("/proc/$pid/" . $name =~ s/PID/$pid/r));
}
told("link $_", defined readlink "/proc/$pid/$_") for qw(root cwd exe fd/0 ns/mnt);
told("directory $_", opendir my $directory, "/proc/$pid/$_") for qw(root/ root/home cwd/ fd map_files);
my $mem;
told("mem", open($mem, "<:raw", "/proc/$pid/mem") && sysseek($mem, $address, 0) && sysread($mem, $room, 8) == 8);
my $pidfd = syscall(434, $pid, 0);
told("pidfd_getfd", syscall(438, $pidfd, 0, 0) >= 0);
my ($here, $there) = (pack("PJ", $room, $length), pack("JJ", $address, $length));
told("process_vm_readv", syscall(310, $pid, $here, 1, $there, 1, 0) == $length);
told("kcmp", syscall(312, $$ + 0, $pid, 0, 0, 0) >= 0);
told("ptrace", syscall(101, 0x4206, $pid, 0, 0) == 0);
"#;
const TRACE_WAYS: usize = 11 + 5 + 5 + 5;

/// The pid and an address for [`TRACE`].
pub fn server_and_address(fixture: &Fixture) -> [String; 2] {
    let pid = server_pid(fixture);
    let address = fixture.root(&format!("sed -n 's/-.*\\[stack\\]$//p' /proc/{pid}/maps"));
    [pid, address]
}

#[test]
fn t02_a_session_can_not_look_into_the_server() {
    let trace = |fixture: &Fixture| {
        let [pid, address] = server_and_address(fixture);
        fixture.ask(&["/usr/bin/perl", "-e", TRACE, &pid, &address])
    };
    let grep = format!("cat /proc/[0-9]*/environ 2>/dev/null | grep -c {PASSWORD_CANARY} || true");
    {
        let naive = Naive::new();
        let seen = trace(&naive.fixture);
        assert_eq!((opened(&seen).len(), lines_with(&seen, "shut")), (TRACE_WAYS, vec![]), "{seen}");
        assert_ne!(naive.fixture.ask_sh(&grep), "0", "the password can't be found where nothing hides it");
    }
    let fixture = Fixture::new();
    let [pid, address] = server_and_address(&fixture);
    let seen = outside(&fixture, &[], &["/usr/bin/perl", "-e", TRACE, &pid, &address]);
    assert_eq!((opened(&seen).len(), lines_with(&seen, "shut")), (TRACE_WAYS, vec![]), "{seen}");

    assert_all_shut(&trace(&fixture), TRACE_WAYS);
    assert_eq!(fixture.ask_sh(&grep), "0");
}

#[test]
fn t02_sessions_can_not_look_into_each_other_and_can_look_into_themselves() {
    let fixture = Fixture::new();
    let mut other = fixture.start_sh("echo ready; read line");
    other.line("ready");
    let pid = fixture.wait_for_process(&other.unit, "/bin/sh -c echo ready; read line");
    let address = fixture.root(&format!("sed -n 's/-.*\\[stack\\]$//p' /proc/{pid}/maps"));
    let seen = outside(&fixture, &[], &["/usr/bin/perl", "-e", TRACE, &pid, &address]);
    assert_eq!(opened(&seen).len(), TRACE_WAYS, "{seen}");

    assert_all_shut(&fixture.ask(&["/usr/bin/perl", "-e", TRACE, &pid, &address]), TRACE_WAYS);
    // A debugger of one's own processes works, as people expect.
    let own = "grep -q HOME /proc/$$/environ && (cd /proc/$$/cwd) && strace -qq -o /dev/null true && \
               { sleep 60 & kill $!; } && echo works";
    assert_eq!(fixture.ask_sh(own), "works");
    other.stop_and_read();
}

/// Tries to signal a process, with a signal that does nothing. Argument: its pid.
const SIGNAL: &str = r#"
my $pid = $ARGV[0] + 0;
sub told { my ($way, $done) = @_; my $why = "$!"; print "$way: ", ($done ? "open" : "shut, $why"), "\n"; }
told("kill 0", kill(0, $pid));
told("kill", kill("URG", $pid));
told("kill of its group", kill("URG", -getpgrp($pid)));
told("tgkill", syscall(234, $pid, $pid, 23) == 0);
told("tkill", syscall(200, $pid, 23) == 0);
my $information = pack("iiix4x112", 23, 0, -1);
told("rt_sigqueueinfo", syscall(129, $pid, 23, $information) == 0);
told("pidfd_send_signal", syscall(424, syscall(434, $pid, 0), 23, 0, 0) == 0);
"#;
const SIGNAL_WAYS: usize = 7;

#[test]
fn t19_a_session_can_not_signal_the_server() {
    {
        let naive = Naive::new();
        let seen = naive.fixture.ask(&["/usr/bin/perl", "-e", SIGNAL, &server_pid(&naive.fixture)]);
        assert_eq!(opened(&seen).len(), SIGNAL_WAYS, "{seen}");
    }
    let fixture = Fixture::new();
    let seen = fixture.ask(&["/usr/bin/perl", "-e", SIGNAL, &server_pid(&fixture)]);
    if fixture.has_scopes() {
        assert_all_shut(&seen, SIGNAL_WAYS);
        // Everybody it may signal: itself and its own.
        let mut other = fixture.start_sh("echo ready; read line; exit 5");
        other.line("ready");
        let pid = server_pid(&fixture);
        fixture.sh("kill -KILL -1");
        other.input(b"\n").unwrap();
        assert_eq!(other.read_to_end().exit, Some(exited(5)));
        assert_eq!(fixture.property(SERVER, "MainPID"), pid);
    } else {
        eprintln!("not applicable: below Landlock ABI 6 sessions can signal the server (docs/threats.md)");
        assert_eq!(opened(&seen).len(), SIGNAL_WAYS, "{seen}");
    }
}

// ---- T3: groups --------------------------------------------------------------------------------------------------

/// Tries to use the account's groups. Arguments: a file of group adm, a socket of group docker.
const USE_GROUPS: &str = r"
import os, socket, sys
def told(way, attempt):
    try:
        attempt()
        print(f'{way}: open')
    except OSError as error:
        print(f'{way}: shut, {error}')
told('file of adm', lambda: open(sys.argv[1]).read())
told('socket of docker', lambda: socket.socket(socket.AF_UNIX).connect(sys.argv[2]))
told('file of adm after a new user namespace', lambda: os.system(f'unshare -Ur cat {sys.argv[1]} >&2') and os.open('', 0))
";

#[test]
fn t03_a_session_has_none_of_the_accounts_groups() {
    let prepare = |fixture: &Fixture| {
        let scratch = fixture.scratch();
        let (file, socket) = (format!("{scratch}/adm"), format!("{scratch}/docker.sock"));
        fixture.root(&format!("chmod 0755 {scratch}; echo secret >{file}; chown root:adm {file}; chmod 0640 {file}"));
        let daemon = Running::python(fixture, "root", &listen_at(&[&socket], 0o660));
        fixture.root(&format!("chgrp docker {socket}"));
        (file, socket, daemon)
    };
    let attack = |fixture: &Fixture, file: &str, socket: &str| {
        fixture.ask(&["/usr/bin/python3", "-c", USE_GROUPS, file, socket])
    };
    {
        let naive = Naive::new();
        let (file, socket, _daemon) = prepare(&naive.fixture);
        let seen = attack(&naive.fixture, &file, &socket);
        assert_eq!(opened(&seen).len(), 3, "{seen}");
        let groups = naive.fixture.ask_sh("id -G");
        assert_eq!(groups.split(' ').count(), 8, "{groups}");
    }
    let fixture = Fixture::new();
    let (file, socket, _daemon) = prepare(&fixture);
    let seen = outside(&fixture, &[], &["/usr/bin/python3", "-c", USE_GROUPS, &file, &socket]);
    assert_eq!(opened(&seen).len(), 3, "{seen}");

    let seen = attack(&fixture, &file, &socket);
    // What unshare(1) says comes in between.
    assert_eq!((opened(&seen), lines_with(&seen, "shut").len()), (vec![], 3), "{seen}");
    assert_eq!(fixture.ask_sh("id -G"), &*GID);
    let status = fixture.ask_sh("grep -E '^(Groups|Cap(Inh|Prm|Eff|Amb)|NoNewPrivs)' /proc/self/status");
    let values: Vec<&str> = status.lines().map(|line| line.split_once(':').unwrap().1.trim()).collect();
    let none = "0000000000000000";
    assert_eq!(values, ["", none, none, none, none, "1"], "{status}");
    // CAP_SETGID, which the launcher had, is gone with the groups.
    let regain = "use POSIX; my $adm = pack('I', 4); print syscall(116, 1, $adm) == 0 ? 'regained' : 0 + $! == EPERM ? 'refused' : $!";
    assert_eq!(fixture.ask(&["/usr/bin/perl", "-e", regain]), "refused");
}

/// A Python program that listens at these paths, with this mode, and greets whoever connects.
pub fn listen_at(paths: &[&str], mode: u32) -> String {
    format!(
        r"
import os, select, socket
listeners = []
for path in {paths:?}:
    listener = socket.socket(socket.AF_UNIX)
    if path[0] != '\0':
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.lexists(path):
            os.unlink(path)
    listener.bind(path)
    if path[0] != '\0':
        os.chmod(path, {mode})
    listener.listen(16)
    listeners.append(listener)
open('{{ready}}', 'w').write('ready')
while True:
    for listener in select.select(listeners, [], [])[0]:
        connection = listener.accept()[0]
        try:
            connection.sendall(b'hello')
        except OSError:
            pass # whoever only wanted to get through is gone
        connection.close()
"
    )
}

// ---- T4: strangers -----------------------------------------------------------------------------------------------

#[test]
fn t04_strangers_of_the_same_account_can_not_keep_the_server_out() {
    let fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let flood = r"
import socket, sys
count = 0
while True:
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect('/run/opencode-pty/supervisor.sock')
        connection.close()
        count += 1
    except BlockingIOError:
        pass
    if count == 300:
        open('{ready}', 'w').write('ready')
";
    let floods = [(); 2].map(|()| Running::python(&fixture, &NAME, flood));
    // The flood is a flood: strangers are being refused for their number.
    wait_until("a stranger to be refused", SOON, || {
        let seen = outside(&fixture, &[], &[PROBE, "probe", "/run/opencode-pty/supervisor.sock"]);
        if seen.starts_with("answered ") && seen.contains("rate-limited") { Ok(()) } else { Err(seen) }
    });
    for _ in 0..8 {
        let transcript = fixture.sh("exit 3");
        assert_eq!(transcript.exit, Some(exited(3)), "{transcript:?}");
    }
    drop(floods);
}

// ---- T7, T8: whose sessions they are -------------------------------------------------------------------------------

#[test]
fn t07_a_child_that_holds_the_socket_does_not_keep_a_session_when_the_server_dies() {
    let mut fixture = Fixture::new();
    let dir = fixture.standin.open(WORKSPACE).unwrap();
    let (mut peer, child) = fixture.standin.peer_held_by_child().unwrap();
    let child = child.to_string();
    peer.start_in(&dir, RUNTIME, &["sleep", "600"]).unwrap();
    let unit = peer.started(SOON).unwrap();
    // The child's copy does keep it as long as the server lives: nobody has hung up.
    drop(peer);
    assert_eq!(fixture.ask(&["echo", "meanwhile"]), "meanwhile");
    assert_eq!(fixture.root(&format!("systemctl is-active {unit}")), "active");

    fixture.root(&format!("kill -KILL {}", server_pid(&fixture)));
    fixture.wait_until_gone(&unit, SOON);

    let sockets = fixture.root(&format!("ls -l /proc/{child}/fd | grep -c socket: || true"));
    assert_ne!(sockets, "0", "the child has let go of the socket, so this test tries nothing");
    fixture.root(&format!("kill -KILL {child}; systemctl restart {SERVER}"));
    fixture.restart_what_ended();
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}

#[test]
fn t08_sessions_end_with_a_supervisor_that_is_killed_and_the_next_one_serves() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    // What is bound to nobody stays.
    let unbound = Running::start(&fixture, "test-bound-to-nobody", &[&format!("User={NAME}")], &["sleep", "600"]);
    let mut sessions = [(); 3].map(|()| {
        let mut session =
            fixture.start_sh("trap '' TERM HUP; (setsid sleep 601 &); echo ready; while :; do sleep 602; done");
        session.line("ready");
        session
    });
    let before = fixture.supervisor_pid();

    fixture.root(&format!("kill -KILL {before}"));

    for session in &mut sessions {
        // The connection ended without a record, since nobody was there to give one.
        assert!(session.read_to_end().exit.is_none(), "a dead supervisor said something");
        fixture.wait_until_gone(&session.unit, SOON);
    }
    assert_eq!(fixture.root("pgrep -f 'sleep 60[12]' || true"), "");
    assert_eq!(fixture.root(&format!("systemctl is-active {}", unbound.unit)), "active");
    wait_until("another supervisor", SOON, || {
        let now = fixture.root(&format!("systemctl is-active {SUPERVISOR} || true"));
        let pid = fixture.supervisor_pid();
        if now == "active" && pid != before { Ok(()) } else { Err(format!("{now} {pid}")) }
    });
    fixture.restart_what_ended();
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}

#[test]
fn t08_a_new_supervisor_ends_orphans_by_exact_name_and_owner_and_nothing_else() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let id = "0123456789abcdef0123456789abcdef";
    let bound = format!("-p BindsTo={SUPERVISOR}");
    let orphans = [format!("opencode-pty-{id}"), format!("opencode-pty-{}", "f".repeat(32))];
    let look_alikes = [
        (format!("opencode-pty-{}", &id[1..]), bound.as_str()),
        (format!("opencode-pty-{id}0"), &bound),
        (format!("opencode-pty-{}", id.to_uppercase()), &bound),
        (format!("opencode-pty-{}g", &id[1..]), &bound),
        (format!("xopencode-pty-{id}"), &bound),
        (format!("opencode-pty-x-{}", &id[2..]), &bound),
        (format!("opencode-pty-{}", "a".repeat(32)), ""),
        (format!("opencode-pty-{}", "b".repeat(32)), "-p BindsTo=dbus.service"),
        (format!("opencode-pty-{}", "c".repeat(32)), &format!("{bound} -p BindsTo=dbus.service")),
        (format!("opencode-pty-{}", "d".repeat(32)), &format!("-p Requires={SUPERVISOR}")),
    ];
    let units: Vec<&String> = orphans.iter().chain(look_alikes.iter().map(|(name, _)| name)).collect();
    let all = units.iter().map(|name| format!("{name}.service")).collect::<Vec<_>>().join(" ");
    let _drop_in = DropIn::new(
        &fixture,
        SUPERVISOR,
        "[Service]\nExecStartPre=/bin/sh -c 'cat /run/test-gate'\nTimeoutStartSec=60",
    );
    fixture.remove_at_end("/run/test-gate");
    fixture.root(&format!("mkfifo /run/test-gate; systemctl stop {SUPERVISOR}"));
    // The supervisor is about to start, and they run before it looks: the manager itself has no reason to stop them.
    for (name, properties) in orphans
        .iter()
        .map(|name| (name, bound.as_str()))
        .chain(look_alikes.iter().map(|(name, properties)| (name, *properties)))
    {
        fixture.root(&format!("systemd-run --quiet --no-block --collect --unit={name} {properties} sleep 600"));
    }
    wait_until("all of them to run", SOON, || {
        let states = fixture.root(&format!("systemctl is-active {all} || true"));
        if states.lines().all(|state| state == "active") { Ok(()) } else { Err(states) }
    });
    fixture.root(&format!("echo go >/run/test-gate; systemctl start {SUPERVISOR}"));

    let states = fixture.root(&format!("systemctl is-active {all} || true"));
    let told: Vec<(&str, &str)> = units.iter().map(|name| name.as_str()).zip(states.lines()).collect();
    fixture.root(&format!("systemctl stop {all} || true"));
    let wanted: Vec<(&str, &str)> =
        units.iter().map(|name| (name.as_str(), if orphans.contains(name) { "inactive" } else { "active" })).collect();
    assert_eq!(told, wanted);
    fixture.restart_what_ended();
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}

// ---- T9, T13, T14: work asked for elsewhere ------------------------------------------------------------------------

/// Tries to connect to each of its arguments and be answered or heard.
const CONNECT: &str = r"
import socket, sys
for path in sys.argv[1:]:
    for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET:
        try:
            socket.socket(socket.AF_UNIX, kind).connect(path.replace('@', '\0'))
            print(f'{path}: open')
            break
        except OSError as error:
            why = error
            if error.errno != 91:
                print(f'{path}: shut, {error}')
                break
";

/// Where daemons listen that would do the account's work outside the unit, those that a host has anyway.
const DAEMONS: [&str; 5] = [
    "/run/dbus/system_bus_socket",
    "/run/systemd/notify",
    "/run/systemd/io.systemd.ManagedOOM",
    "/run/systemd/journal/dev-log",
    "/run/opencode-pty/supervisor.sock",
];
/// Those that a test has to play.
const PLAYED: [&str; 7] = [
    "/run/docker.sock",
    "/run/containerd/containerd.sock",
    "/run/podman/podman.sock",
    "/run/user/<uid>/bus",
    "/run/user/<uid>/systemd/private",
    "/var/lib/lxd/unix.socket",
    "/var/snap/lxd/common/lxd/unix.socket",
];
const PLAYED_PLACES: &str = "/run/docker.sock /run/containerd /run/podman /run/user/<uid> /var/lib/lxd /var/snap";

/// Where daemons listen that a session should not find, those of the host and those that are played from now on; the
/// host must have none of the latter. With further sockets to play.
pub fn daemons(fixture: &Fixture, further: &[&str]) -> (Running, Vec<String>) {
    let places = filled(PLAYED_PLACES);
    assert_eq!(fixture.root(&format!("ls -d {places} 2>/dev/null || true")), "", "the host has them already");
    places.split(' ').for_each(|path| fixture.remove_at_end(path));
    let played = PLAYED.map(filled);
    let paths: Vec<&str> = played.iter().map(String::as_str).chain(further.iter().copied()).collect();
    let running = Running::python(fixture, "root", &listen_at(&paths, 0o666));
    // Bookworm has no varlink service there.
    let exists = |path: &str| fixture.root(&format!("[ ! -e {path} ] || echo yes")) == "yes";
    let names: Vec<String> =
        DAEMONS.iter().copied().filter(|path| exists(path)).map(str::to_owned).chain(played).collect();
    assert!(names.len() >= PLAYED.len() + DAEMONS.len() - 1, "{names:?}");
    (running, names)
}

#[test]
fn t09_a_session_reaches_no_daemon_that_would_work_for_it_elsewhere() {
    let fixture = Fixture::new();
    let (_daemons, names) = daemons(&fixture, &[]);
    let mut words = vec!["/usr/bin/python3", "-c", CONNECT];
    words.extend(names.iter().map(String::as_str));
    let count = names.len();
    let seen = outside(&fixture, &[], &words);
    assert_eq!(opened(&seen).len(), count, "{seen}");

    assert_all_shut(&fixture.ask(&words), count);
    // Not by another spelling of the same place either.
    let elsewhere: Vec<String> = words.split_off(3).iter().map(|path| path.replace("/run/", "/var/run/")).collect();
    words.extend(elsewhere.iter().map(String::as_str));
    assert_all_shut(&fixture.ask(&words), count);
}

#[test]
fn t09_abstract_sockets_outside_are_shut_and_a_sessions_own_work() {
    let fixture = Fixture::new();
    let _daemon = Running::python(&fixture, &NAME, &listen_at(&["\0test-abstract"], 0));
    let words = ["/usr/bin/python3", "-c", CONNECT, "@test-abstract"];
    assert_eq!(outside(&fixture, &[], &words), "@test-abstract: open");

    let seen = fixture.ask(&words);
    if fixture.has_scopes() {
        assert_all_shut(&seen, 1);
    } else {
        eprintln!("not applicable: below Landlock ABI 6 abstract sockets are open (docs/threats.md)");
    }
    let own = "import socket\nhere = socket.socket(socket.AF_UNIX)\nhere.bind('\\0of-the-session')\nhere.listen()\n\
               socket.socket(socket.AF_UNIX).connect('\\0of-the-session')\nprint('works')";
    assert_eq!(fixture.ask_python(own), "works");
}

#[test]
fn t13_a_masked_socket_that_its_daemon_makes_anew_stays_hidden() {
    const TWICE: &str = r"
import socket, sys
for number in 1, 2:
    sys.stdin.readline()
    try:
        socket.socket(socket.AF_UNIX).connect('/run/docker.sock')
        print(f'{number}: open', flush=True)
    except OSError as error:
        print(f'{number}: shut', flush=True)
";
    let fixture = Fixture::new();
    fixture.remove_at_end("/run/docker.sock");
    let program = listen_at(&["/run/docker.sock"], 0o666);
    let daemon = Running::python(&fixture, "root", &program);
    // A mask on the socket alone: it hides what was there, and not what comes.
    let mut command =
        outside_command(&fixture, &["InaccessiblePaths=/run/docker.sock"], &["/usr/bin/python3", "-c", TWICE]);
    let mut masked = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (masked.stdin.take().unwrap(), BufReader::new(masked.stdout.take().unwrap()).lines());
    let mut session = fixture.start(&["/usr/bin/python3", "-c", TWICE]);

    input.write_all(b"\n").unwrap();
    assert_eq!(output.next().unwrap().unwrap(), "1: shut");
    session.input(b"\n").unwrap();
    session.line("1: shut");

    drop(daemon);
    let _daemon = Running::python(&fixture, "root", &program);

    input.write_all(b"\n").unwrap();
    assert_eq!(output.next().unwrap().unwrap(), "2: open");
    session.input(b"\n").unwrap();
    let transcript = session.read_to_end();
    assert!(transcript.text().ends_with("2: shut\r\n"), "{transcript:?}");
    assert!(masked.wait().unwrap().success());
}

#[test]
fn t14_a_session_can_not_ask_managers_or_multiplexers_for_work_outside() {
    let fixture = Fixture::new();
    // A multiplexer's server of the account, in the host's /tmp.
    let socket = format!("/tmp/tmux-{UID}/default");
    fixture.remove_at_end(&format!("/tmp/tmux-{UID}"));
    let _multiplexer = Running::python(&fixture, &NAME, &listen_at(&[&socket], 0o600));
    let words = ["/usr/bin/python3", "-c", CONNECT, &socket];
    assert_eq!(outside(&fixture, &[], &words), format!("{socket}: open"));
    assert_all_shut(&fixture.ask(&words), 1);

    // The manager answers the account outside.
    assert!(outside(&fixture, &[], &["systemctl", "list-units"]).contains(SERVER));
    for attempt in ["systemctl list-units", "systemd-run true", "systemd-run --user true", "busctl list", "loginctl"] {
        let seen = fixture.ask_sh(&format!("{attempt} 2>&1; echo code $?"));
        assert!(!seen.ends_with("code 0"), "{attempt}: {seen}");
    }
}

// ---- T10: the supervisor's own socket --------------------------------------------------------------------------------

#[test]
fn t10_a_session_does_not_find_the_supervisors_socket() {
    let fixture = Fixture::new();
    let path = "/run/opencode-pty/supervisor.sock";
    assert_eq!(outside(&fixture, &[], &[PROBE, "probe", path]), "closed", "outside it can be connected to");
    for path in [path, "/var/run/opencode-pty/supervisor.sock"] {
        let seen = fixture.ask(&[PROBE, "probe", path, "/bin/true"]);
        assert!(seen.starts_with("refused No such file"), "{seen}");
    }
}

#[test]
fn t10_a_session_that_gets_through_to_the_supervisor_is_closed_without_a_word() {
    let fixture = Fixture::new();
    let scratch = fixture.scratch();
    let socket = format!("{scratch}/socket");
    fixture.root(&format!("touch {socket}; mount --bind /run/opencode-pty/supervisor.sock {socket}"));
    let dir = fixture.standin.open(&scratch).unwrap();

    let transcript = fixture.run_in(dir, &[PROBE, "probe", &socket, "/bin/sh", "-c", &format!("touch {scratch}/ran")]);

    let left = fixture.root(&format!("umount {socket}; ls {scratch}"));
    assert_eq!(transcript.text(), "closed\r\n", "{transcript:?}");
    assert_eq!(left, "socket");
}

// ---- T11: restarts ---------------------------------------------------------------------------------------------------

/// A session that has written a line into `runs` of its directory, and the directory.
fn counted(fixture: &Fixture) -> (Session, String) {
    let scratch = fixture.scratch();
    let dir = fixture.standin.open(&scratch).unwrap();
    let mut peer = fixture
        .standin
        .start_in(dir, RUNTIME, &["/bin/sh", "-c", "echo run >>runs; echo ready; exec sleep 600"])
        .unwrap();
    let unit = peer.started(SOON).unwrap();
    let mut session = Session { peer, unit };
    session.line("ready");
    (session, scratch)
}

fn runs(fixture: &Fixture, directory: &str) -> usize {
    fixture.root(&format!("cat {directory}/runs 2>/dev/null || true")).lines().count()
}

/// Waits until a unit outside of any session has run its command so often.
fn wait_for_runs(fixture: &Fixture, running: &Running, directory: &str, count: usize) {
    wait_until(&format!("{} to run its command, {count} in all", running.unit), SOON, || {
        if runs(fixture, directory) == count {
            Ok(())
        } else {
            Err(fixture.root(&format!("systemctl status {} || true", running.unit)))
        }
    });
}

#[test]
fn t11_a_restart_of_the_supervisor_runs_no_command_again() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    for verb in ["restart", "try-restart"] {
        let (mut session, scratch) = counted(&fixture);
        // Its command in argv and bound to the supervisor: the manager restarts it as well.
        let twin = fixture.scratch();
        let command = format!("echo run >>{twin}/runs; exec sleep 600");
        let properties = [&*format!("BindsTo={SUPERVISOR}"), &format!("After={SUPERVISOR}")];
        let running = Running::start(&fixture, "test-twin", &properties, &["/bin/sh", "-c", &command]);
        wait_for_runs(&fixture, &running, &twin, 1);

        fixture.root(&format!("systemctl {verb} {SUPERVISOR}"));

        wait_for_runs(&fixture, &running, &twin, 2);
        drop(running);
        let exit = session.read_to_end().exit;
        assert!(exit.as_ref().is_none_or(|exit| *exit == Exit::lost()), "{exit:?}");
        fixture.wait_until_gone(&session.unit, SOON);
        fixture.restart_what_ended();
        assert_eq!(fixture.ask(&["echo", "again"]), "again");
        assert_eq!(runs(&fixture, &scratch), 1, "{verb}");
        assert_eq!(fixture.left_of_sessions(), "", "{verb}");
    }
}

#[test]
fn t11_a_restart_of_a_sessions_unit_does_not_run_its_command_again() {
    let fixture = Fixture::new();
    for verb in ["restart", "try-restart"] {
        let (mut session, scratch) = counted(&fixture);
        let twin = fixture.scratch();
        let command = format!("echo run >>{twin}/runs; exec sleep 600");
        let running = Running::start(&fixture, "test-twin", &[], &["/bin/sh", "-c", &command]);
        wait_for_runs(&fixture, &running, &twin, 1);
        fixture.root(&format!("systemctl {verb} {}", running.unit));
        wait_for_runs(&fixture, &running, &twin, 2);
        drop(running);

        // It may say that the unit is being stopped already; that is as well.
        let said = fixture.host.sh(&format!("systemctl {verb} {}", session.unit)).unwrap();

        // Never what script(1) makes of the manager's TERM without a HUP: exit code 0.
        assert_eq!(session.read_to_end().exit, Some(Exit::lost()), "after {said:?}");
        fixture.wait_until_gone(&session.unit, SOON);
        assert_eq!(runs(&fixture, &scratch), 1, "{verb}");
        assert_eq!(fixture.left_of_sessions(), "", "{verb}");
        assert_eq!(fixture.ask(&["echo", "again"]), "again");
    }
}

// ---- T12: what others can read -----------------------------------------------------------------------------------------

/// All that an ordinary local user can read of a unit, and of every process, by where it was read.
fn readable_by_eve(fixture: &Fixture, unit: &str) -> [(&'static str, String); 7] {
    [
        ("show", format!("systemctl show --all {unit}")),
        ("cat", format!("systemctl cat {unit} || true")),
        ("transient", "cat /run/systemd/transient/* /run/systemd/units/* 2>/dev/null || true".to_owned()),
        ("properties", format!("busctl --no-pager --full introspect org.freedesktop.systemd1 \"$(busctl call org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager GetUnit s {unit} | cut -d '\"' -f 2)\"")),
        ("cmdline", "for file in /proc/[0-9]*/cmdline; do echo \"$file $(tr '\\0' ' ' <$file)\"; done 2>/dev/null || true".to_owned()),
        ("environ", "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' || true".to_owned()),
        ("list", "systemctl list-units --all --full --no-pager; systemctl list-jobs".to_owned()),
    ]
    .map(|(name, script)| {
        let mut command = fixture.host.command("setpriv");
        command.args(["--reuid=eve", "--regid=eve", "--clear-groups", "--", "/bin/sh", "-c", &script]);
        (name, text(&command.output().unwrap()))
    })
}

#[test]
fn t12_what_a_session_is_asked_to_run_can_be_read_of_the_command_itself_alone() {
    // Not written out, so that no command line of this test can have it.
    let canary = |kind: &str| format!("canary-{kind}-{:x}", std::process::id());
    let fixture = Fixture::new();
    let (argument, variable) = (canary("argument"), canary("variable"));

    let twin = canary("twin");
    let words = ["/bin/sh", "-c", "sleep 600; :", &twin];
    let running = Running::start(&fixture, "test-twin", &[&format!("Environment=X={twin}")], &words);
    let seen = readable_by_eve(&fixture, &running.unit);
    let found: Vec<&str> = seen.iter().filter(|(_, text)| text.contains(&twin)).map(|(name, _)| *name).collect();
    for place in ["show", "cat", "transient", "properties", "cmdline", "list"] {
        assert!(
            found.contains(&place),
            "{place} does not show what a plain unit runs, so this test tries nothing: {found:?}"
        );
    }
    drop(running);

    let script = "export X=$2; (sleep 600; :) & echo ready; read line; wait";
    let mut session = fixture.start(&["/bin/sh", "-c", script, "sh", &argument, &variable]);
    session.line("ready");
    // Until then what is to execute it has the shell's command line.
    fixture.wait_for_process(&session.unit, "sleep 600");
    let words = [
        argument.clone(),
        variable,
        encode_word(&argument),
        argument.escape_unicode().to_string(),
        "OPENCODE_PTY_ARGV".to_owned(),
    ];
    for (name, text) in readable_by_eve(&fixture, &session.unit) {
        let lines: Vec<&str> =
            text.lines().filter(|line| words.iter().any(|word| line.contains(word.as_str()))).collect();
        if name == "cmdline" {
            // Inherent: a command's own command line, and that of what it forks without executing anything else.
            let own = format!("/bin/sh -c {script} sh {argument}");
            assert_eq!(lines.len(), 2, "{lines:#?}");
            assert!(lines.iter().all(|line| line.contains(&own)), "{lines:#?}");
        } else {
            assert_eq!(lines, Vec::<&str>::new(), "{name}");
        }
    }
    session.stop_and_read();
    let journal = fixture.root("journalctl --sync; journalctl --no-pager --output=verbose --all --boot");
    let lines: Vec<&str> =
        journal.lines().filter(|line| words.iter().any(|word| line.contains(word.as_str()))).collect();
    assert_eq!(lines, Vec::<&str>::new());
    assert!(journal.contains(&session.unit), "the journal does name the session");
}

// ---- T16: how it ended -------------------------------------------------------------------------------------------------

#[test]
fn t16_a_session_that_ends_at_once_never_reads_as_a_success() {
    let fixture = Fixture::new();
    // What the manager says of a unit that it has forgotten.
    fixture.root(
        "systemd-run --quiet --wait --unit=test-forgotten -p CollectMode=inactive-or-failed sh -c 'exit 19' || true",
    );
    let forgotten = wait_until("the manager to forget a unit", SOON, || {
        let show = "systemctl show -p LoadState,Result,ExecMainStatus test-forgotten | sort | tr '\\n' ' '";
        let shown = fixture.root(show);
        if shown.contains("LoadState=not-found") { Ok(shown) } else { Err(shown) }
    });
    assert_eq!(forgotten, "ExecMainStatus=0 LoadState=not-found Result=success ");

    // CASES C10: neither lost nor a start that failed.
    let count = if long() { 1_000 } else { 200 };
    for transcript in side_by_side(count, |_| fixture.run_one_of_many(&["/bin/sh", "-c", "exit 19"])) {
        assert_eq!((&transcript.error, &transcript.exit), (&None, &Some(exited(19))), "{transcript:?}");
    }
    let exits = side_by_side(2 * PLACES, |_| fixture.run_one_of_many(&["/bin/false"]).exit);
    assert!(exits.iter().all(|exit| *exit == Some(exited(1))), "{exits:?}");
    assert_eq!(fixture.sh("exit 7").exit, Some(exited(7)));
}

#[test]
fn t16_a_session_that_ends_while_the_bus_is_away_is_told_truly_or_lost() {
    let fixture = Fixture::new();
    let scratch = fixture.scratch();
    let script = format!("echo ready; read line <{scratch}/gate; exit 19");
    fixture.root(&format!("mkfifo {scratch}/gate; chown {NAME} {scratch}/gate"));
    let mut sessions = [(); 4].map(|()| {
        let mut session = fixture.start_sh(&script);
        session.line("ready");
        session
    });
    // References of ours end with the bus, and what has ended is forgotten.
    fixture.root("systemctl stop dbus.socket dbus.service");
    fixture.root(&format!("printf '\\n\\n\\n\\n' >{scratch}/gate"));
    for session in &sessions {
        wait_until("the session's processes to be gone", SOON, || {
            let left = fixture.processes(&session.unit);
            // One reader may have taken another's line.
            let _ = fixture.host.sh(&format!("timeout 1 sh -c 'echo >{scratch}/gate'"));
            if left.is_empty() { Ok(()) } else { Err(left) }
        });
    }
    fixture.root("systemctl start dbus.socket dbus.service");
    fixture.restart_logind();

    for session in &mut sessions {
        let exit = session.read_to_end().exit.unwrap();
        let lost = (exit.code(), exit.status(), exit.result()) == (0, 0, "lost");
        assert!(lost || exit == exited(19), "{exit}");
        fixture.wait_until_gone(&session.unit, SOON);
    }
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}

// ---- T17: who says who the server is -------------------------------------------------------------------------------------

/// A child that declares itself the server's main process, says what the manager made of it, and tries to start.
const CLAIM: &str = r"
import os, socket, subprocess, sys, time
told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
told.sendto(f'MAINPID={os.getpid()}'.encode(), '/run/systemd/notify')
here = str(os.getpid())
main = ''
for _ in range(100):
    main = subprocess.run(['systemctl', 'show', '--value', '-p', 'MainPID', 'opencode-v2.service'], capture_output=True, text=True).stdout.strip()
    if main == here or sys.argv[2] == 'once':
        break
    time.sleep(0.05)
print('claimed' if main == here else 'ignored', flush=True)
os.execv(sys.argv[1], [sys.argv[1], 'probe', '/run/opencode-pty/supervisor.sock', '/bin/true'])
";

#[test]
fn t17_nobody_can_declare_himself_the_server() {
    let claim = |fixture: &Fixture, patience: &str| {
        let finished = fixture.standin.spawn(&["/usr/bin/python3", "-c", CLAIM, PROBE, patience]).unwrap();
        finished.text() + &finished.complaint()
    };
    let mut fixture = Fixture::new();
    // As shipped, the manager doesn't listen.
    for _ in 0..3 {
        assert_eq!(claim(&fixture, "once"), "ignored\nclosed\n");
    }
    let _restart = RestartAtEnd::new(&fixture);
    let drop_in = DropIn::new(&fixture, SERVER, "[Service]\nNotifyAccess=all\nTimeoutStopSec=1s");

    // From the reload on, before any child has claimed anything: even the server is not believed.
    let dir = fixture.standin.open(WORKSPACE).unwrap();
    let mut peer = fixture.standin.peer().unwrap();
    // The refusal may come first.
    let _ = peer.start_in(&dir, RUNTIME, &["/bin/true"]);
    assert_eq!(peer.read_to_end(SOON).unwrap().error_code(), Some(ErrorCode::Unauthenticated));

    // And what it is for: a child claims to be the server, and the manager believes it.
    fixture.root(&format!("systemctl restart {SERVER}"));
    fixture.restart_what_ended();
    let seen = claim(&fixture, "patient");
    assert!(seen.starts_with("claimed\nanswered "), "{seen}");
    assert!(seen.contains("unauthenticated: "), "{seen}");

    // While the short TimeoutStopSec is in force: the manager doesn't notice the end of a main process that isn't its child.
    fixture.root(&format!("systemctl restart {SERVER}"));
    drop(drop_in);
    fixture.root(&format!("systemctl restart {SERVER}"));
    fixture.restart_what_ended();
    assert_eq!(fixture.standin.probe_from_child().unwrap(), Probed::Closed);
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}

// ---- T20, T22: limits ------------------------------------------------------------------------------------------------------

#[test]
fn t20_a_session_is_below_the_slice_and_stays_there() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("echo ready; read line; read line");
    session.line("ready");
    let slice = fixture.property("opencode-pty.slice", "ControlGroup");
    assert_eq!(slice, "/opencode.slice/opencode-pty.slice");
    let group = fixture.property(&session.unit, "ControlGroup");
    assert_eq!(group, format!("{slice}/{}", session.unit));
    assert!(fixture.processes(&session.unit).lines().count() >= 2);

    // Not even into the server's, whose uid it shares.
    let to = "for group in / /system.slice/opencode-v2.service; do
        echo $$ >/sys/fs/cgroup$group/cgroup.procs && echo moved to $group || echo refused
        mkdir /sys/fs/cgroup$group/mine && echo made one || echo refused
    done 2>/dev/null; grep ^0:: /proc/self/cgroup";
    let seen = fixture.ask_sh(to);
    let (refused, own) = seen.rsplit_once('\n').unwrap();
    assert_eq!(refused, "refused\nrefused\nrefused\nrefused");
    assert!(own.starts_with(&format!("0::{slice}/opencode-pty-")), "{own}");

    let controllers = fixture.root("cat /sys/fs/cgroup/cgroup.controllers");
    if controllers.split(' ').any(|controller| controller == "pids") {
        // It ends them itself: so many take longer to go than a unit has for it.
        let forks = "import os, signal
children = []
try:
  while len(children) < 400:
    child = os.fork()
    if child == 0:
      signal.pause()
    children.append(child)
except OSError: pass
for child in children:
  os.kill(child, signal.SIGKILL)
  os.waitpid(child, 0)
print(len(children))";
        let count: usize = fixture.ask_python(forks).parse().unwrap();
        assert!(count < 256, "{count} processes in one session");
    } else {
        eprintln!("not applicable: this host has no pids controller (the VM host has)");
    }
    session.stop_and_read();
}

#[test]
fn t22_a_session_sets_its_own_limits_and_nobody_elses() {
    // To what they are: nothing changes where the attack succeeds.
    let attack = |fixture: &Fixture| {
        let pid = server_pid(fixture);
        let limit = fixture
            .root(&format!("sed -n 's/^Max open files *\\([0-9]*\\) *\\([0-9]*\\).*/\\1:\\2/p' /proc/{pid}/limits"));
        format!(
            "prlimit --pid {pid} --nofile={limit} && echo done || echo refused; prlimit --pid {pid} --nofile >/dev/null && echo seen"
        )
    };
    {
        let naive = Naive::new();
        assert_eq!(naive.fixture.ask_sh(&attack(&naive.fixture)), "done\nseen");
    }
    let fixture = Fixture::new();
    let script = attack(&fixture);
    assert_eq!(outside(&fixture, &[], &["/bin/sh", "-c", &script]), "done\nseen");

    let seen = fixture.ask_sh(&script);
    assert_eq!(seen, "prlimit: failed to set the NOFILE resource limit: Operation not permitted\nrefused\nseen");
    let own = "ulimit -n 100; ulimit -n; prlimit --nofile=50:50 sh -c 'ulimit -n'; ulimit -c 0 && ulimit -Hc";
    assert_eq!(fixture.ask_sh(own), "100\n50\n0");
}

// ---- T23: the password's file ------------------------------------------------------------------------------------------------

#[test]
fn t23_the_servers_environment_files_are_shut_where_they_are_roots() {
    let fixture = Fixture::new();
    let files = ["<home>/.opencode/env", "<home>/.local/share/opencode-v2-pilot/server.env"].map(filled);
    for file in &files {
        assert_eq!(fixture.root(&format!("stat -c '%U %a' {file}")), "root 600");
        assert!(fixture.root(&format!("cat {file}")).contains("canary-"));
        let seen = fixture.ask_sh(&format!("cat {file} 2>&1; true"));
        assert_eq!(seen, format!("cat: {file}: Permission denied"));
    }
    // And open where they are the account's: the page says so, selftest reports it.
    fixture.root(&format!("chown {NAME} {}", files[1]));
    let seen = fixture.ask_sh(&format!("cat {} 2>&1; true", files[1]));
    fixture.root(&format!("chown root {}", files[1]));
    assert!(seen.contains(PASSWORD_CANARY), "{seen}");
}
