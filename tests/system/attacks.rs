//! The containment of a session, attack by attack: a table of what is tried, and what must come of it.
//!
//! The attacker (`support::attacker`) runs a group of attacks in a session, and again where the protection is not: as the
//! account in a plain unit, as root, as a child of the server. There each must succeed, or its failure in a session would
//! say nothing. Each outcome is printed, a line each; `cargo xtask containment` makes `docs/containment.md` of them. What has a story rather than an outcome is in `threats.rs`.

use std::process::Stdio;

use support::attacker::{Outcome, parse};
use support::host::PASSWORD_CANARY;

use crate::account::{GID, HOME, NAME, UID, WORKSPACE};
use crate::fixture::{Fixture, SOON, wait_until};
use crate::outside::{Naive, PROBE, Running, text};
use crate::threats::{daemons, listen_at, server_and_address, server_pid};

/// What must come of an attack in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// It gets nowhere.
    Held,
    /// It gets nowhere from Landlock ABI 6 on, and through below.
    HeldByScopes,
    /// It gets through: docs/threats.md says so.
    Possible,
    /// It gets through from Landlock ABI 6 on, and is meant to; the older domain is in its way.
    PossibleWithScopes,
}

use Wanted::{Held, HeldByScopes, Possible, PossibleWithScopes};

impl Wanted {
    /// Whether the attack must be held, with the domain of an ABI that has scopes or without.
    fn is_held(self, scopes: bool) -> bool {
        match self {
            Held => true,
            HeldByScopes => scopes,
            Possible => false,
            PossibleWithScopes => !scopes,
        }
    }
}

/// Where an attack must succeed: who runs it outside any session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Control {
    /// The account, in a plain unit.
    Account,
    /// The account, in a plain unit that gives what an attack needs besides.
    AccountWith(&'static [&'static str]),
    /// Root, in a plain unit with these properties.
    Root(&'static [&'static str]),
    /// A child of the server.
    Child,
}

use Control::{Account, AccountWith, Child, Root};

/// An attack, the threat it belongs to, what must come of it, and where it must succeed.
type Row = (&'static str, &'static str, Wanted, Control);

/// The words that have the stand-in's program attack.
fn words<'a>(group: &'a [&'a str]) -> Vec<&'a str> {
    [&[PROBE, "attack"], group].concat()
}

/// The lines that an attacker printed.
fn outcomes(text: &str) -> Vec<(String, Outcome)> {
    let text = text.replace('\r', "");
    let read: Vec<_> = text.lines().filter_map(parse).map(|(name, outcome)| (name.to_owned(), outcome)).collect();
    assert_eq!(read.len(), text.lines().count(), "an attacker said something else: {text}");
    read
}

/// What comes of a group of attacks outside any session.
fn control(fixture: &Fixture, control: Control, group: &[&str]) -> Vec<(String, Outcome)> {
    let (user, properties): (&str, &[&str]) = match control {
        Account => (&NAME, &[]),
        AccountWith(properties) => (&NAME, properties),
        Root(properties) => ("root", properties),
        Child => {
            let finished = fixture.standin.spawn(&words(group)).unwrap();
            assert!(finished.status.success(), "{}", finished.complaint());
            return outcomes(&finished.text());
        }
    };
    let mut command = fixture.host.command("systemd-run");
    command.args(["--quiet", "--pipe", "--wait", "--collect", &format!("--property=User={user}")]);
    command.args(properties.iter().map(|property| format!("--property={property}")));
    outcomes(&text(&command.arg("--").args(words(group)).stdin(Stdio::null()).output().unwrap()))
}

/// Fails unless `seen` in a session is what the rows want and each attack succeeds in its control. Writes all of it down.
fn judge(fixture: &Fixture, rows: &[Row], group: &[&str], seen: &[(String, Outcome)]) {
    let mut controls: Vec<(Control, Vec<(String, Outcome)>)> = Vec::new();
    for (.., kind) in rows {
        if !controls.iter().any(|(known, _)| known == kind) {
            controls.push((*kind, control(fixture, *kind, group)));
        }
    }
    let controlled = |name: &str, kind: Control| {
        let (_, outcomes) = controls.iter().find(|(known, _)| *known == kind).unwrap();
        outcomes.iter().find(|(known, _)| known == name).map(|(_, outcome)| outcome.clone())
    };
    write_down_host(fixture);
    compare("", fixture.has_scopes(), rows, seen, controlled);
}

/// Holds outcomes against the rows. `kernel`: whose domain it was, if not the running kernel's own.
fn compare(
    kernel: &str,
    scopes: bool,
    rows: &[Row],
    seen: &[(String, Outcome)],
    controlled: impl Fn(&str, Control) -> Option<Outcome>,
) {
    let names: Vec<&str> = seen.iter().map(|(name, _)| name.as_str()).collect();
    let known: Vec<&str> = rows.iter().map(|(name, ..)| *name).collect();
    assert_eq!(names, known, "the attacker tries what the table doesn't know, or the other way round");
    let mut wrong = Vec::new();
    for ((name, outcome), (_, threat, wanted, kind)) in seen.iter().zip(rows) {
        let control = controlled(name, *kind);
        write_down(kernel, threat, name, outcome, *kind);
        // Partly through is no proof that every part can be tried.
        let through = |outcome: &Outcome| matches!(outcome, Outcome::Succeeded(detail) if !detail.contains(" of "));
        match (outcome, &control) {
            (Outcome::NotApplicable(why), Some(Outcome::NotApplicable(_))) => {
                eprintln!("not applicable: {name}: {why}");
            }
            (_, Some(control)) if !through(control) => {
                wrong.push(format!("{name}, in its control ({kind:?}): {control}"));
            }
            (_, None) => wrong.push(format!("{name} was not tried in its control")),
            (Outcome::Held(_), _) if wanted.is_held(scopes) => {}
            (Outcome::Succeeded(_), _) if !wanted.is_held(scopes) => {}
            _ => wrong.push(format!("{name}: {outcome} ({wanted:?} was wanted)")),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A line for docs/containment.md: whose kernel's domain, threat, attack, outcome, detail, and who must succeed.
fn write_down(kernel: &str, threat: &str, name: &str, outcome: &Outcome, kind: Control) {
    let who = match kind {
        Account => "the account".to_owned(),
        AccountWith(properties) => format!("the account, with {}", properties.join(" ")),
        Root(&[]) => "root".to_owned(),
        Root(properties) => format!("root, with {}", properties.join(" ")),
        Child => "a child of the server".to_owned(),
    };
    println!("{}", ["containment", kernel, threat, name, outcome.word(), outcome.detail(), &who].join("\t"));
}

/// What ran this, for docs/containment.md.
fn write_down_host(fixture: &Fixture) {
    let systemd = fixture.root("systemctl --version | head -n 1");
    let isolation = fixture.isolation();
    println!("{}", ["containment-host", &systemd, &fixture.root("uname -r"), &isolation].join("\t"));
}

/// What comes of a group of attacks in a session.
fn in_a_session(fixture: &Fixture, group: &[&str]) -> Vec<(String, Outcome)> {
    outcomes(&fixture.ask(&words(group)))
}

// ---- T1, T9, T10, T14: sockets ---------------------------------------------------------------------------------------

const SOCKETS: [Row; 9] = [
    ("sockets, directly", "T9 T10 T14", Held, Account),
    ("sockets, by /var/run", "T9", Held, Account),
    ("sockets, up from the working directory", "T1", Held, Account),
    ("sockets, up from every descriptor and the working directory by /proc/self", "T1", Held, Account),
    ("sockets, by /proc/PID/root of every visible process", "T1 T2", Held, Account),
    ("sockets, up from /proc/PID/cwd of every visible process", "T1 T2", Held, Account),
    ("an abstract socket outside", "T9", HeldByScopes, Account),
    ("a socket in the /tmp that is the server's, too", "T14", Possible, Child),
    ("a service on the loopback address", "T9", Possible, Account),
];

/// Where what a session may reach listens: in the server's `/tmp`, on the loopback address.
const NEIGHBOUR: &str = "/tmp/test-neighbour";
const PORT: u16 = 47_113;

/// Daemons that a session should not find, an abstract one, and two that it may; the attacker's words for them.
fn tempting_daemons(fixture: &Fixture) -> ([Running; 2], Vec<String>) {
    let (running, names) = daemons(fixture, &["\0test-attack"]);
    // As it is on a real host: for its group alone, which the account has and a session has not.
    fixture.root("chgrp docker /run/docker.sock && chmod 0660 /run/docker.sock");
    let listen = format!(
        "import os, socket, signal\n\
         here, there = socket.socket(socket.AF_UNIX), socket.socket()\n\
         there.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n\
         here.bind('{NEIGHBOUR}.new'); here.listen(99); there.bind(('127.0.0.1', {PORT})); there.listen(99)\n\
         os.rename('{NEIGHBOUR}.new', '{NEIGHBOUR}'); signal.pause()"
    );
    let user = format!("User={NAME}");
    let properties = [user.as_str(), "PrivateTmp=yes", "JoinsNamespaceOf=opencode-v2.service"];
    let stop = format!("ExecStopPost=/bin/rm -f {NEIGHBOUR}");
    let properties = [&properties[..], &[&stop]].concat();
    let neighbour = Running::start(fixture, "test-neighbour", &properties, &["/usr/bin/python3", "-c", &listen]);
    let there = format!("/proc/{}/root{NEIGHBOUR}", server_pid(fixture));
    wait_until("the neighbour to listen", SOON, || {
        let found = fixture.root(&format!("ls {there} 2>&1 || true"));
        if found == there { Ok(()) } else { Err(found) }
    });
    let mut words: Vec<String> = names.iter().map(|path| format!("hidden:{path}")).collect();
    words.extend(["abstract:test-attack".to_owned(), format!("shared:{NEIGHBOUR}"), format!("loopback:{PORT}")]);
    ([running, neighbour], words)
}

#[test]
fn a_session_reaches_no_socket_of_the_hosts_daemons_by_any_detour() {
    let fixture = Fixture::new();
    let (_running, names) = tempting_daemons(&fixture);
    let pid = server_pid(&fixture);
    let group: Vec<&str> = ["sockets", &pid].into_iter().chain(names.iter().map(String::as_str)).collect();

    let seen = in_a_session(&fixture, &group);

    judge(&fixture, &SOCKETS, &group, &seen);
}

// ---- T2, T19, T22: the server's process --------------------------------------------------------------------------------

const SERVER: [Row; 31] = [
    ("server, /proc/PID/environ", "T2", Held, Account),
    ("server, /proc/PID/auxv", "T2", Held, Account),
    ("server, /proc/PID/maps", "T2", Held, Account),
    ("server, /proc/PID/smaps", "T2", Held, Account),
    ("server, /proc/PID/smaps_rollup", "T2", Held, Account),
    ("server, /proc/PID/numa_maps", "T2", Held, Account),
    ("server, /proc/PID/pagemap", "T2", Held, Account),
    ("server, /proc/PID/io", "T2", Held, Account),
    ("server, /proc/PID/syscall", "T2", Held, Account),
    ("server, /proc/PID/personality", "T2", Held, Account),
    ("server, /proc/PID/fdinfo/0", "T2", Held, Account),
    ("server, /proc/PID/task/PID/environ", "T2", Held, Account),
    ("server, link /proc/PID/root", "T2", Held, Account),
    ("server, link /proc/PID/cwd", "T2", Held, Account),
    ("server, link /proc/PID/exe", "T2", Held, Account),
    ("server, link /proc/PID/fd/0", "T2", Held, Account),
    ("server, link /proc/PID/ns/mnt", "T2", Held, Account),
    ("server, directory /proc/PID/root/", "T2", Held, Account),
    ("server, directory /proc/PID/root/home", "T2", Held, Account),
    ("server, directory /proc/PID/cwd/", "T2", Held, Account),
    ("server, directory /proc/PID/fd", "T2", Held, Account),
    ("server, directory /proc/PID/map_files", "T2", Held, Account),
    ("server, its memory read through /proc/PID/mem", "T2", Held, Account),
    ("server, its memory written through /proc/PID/mem", "T2", Held, Account),
    ("server, pidfd_getfd", "T2", Held, Account),
    ("server, process_vm_readv", "T2", Held, Account),
    ("server, process_vm_writev", "T2", Held, Account),
    ("server, kcmp", "T2", Held, Account),
    ("server, ptrace, seized", "T2", Held, Account),
    ("server, ptrace, attached", "T2", Held, Account),
    ("a secret in any process's environment", "T2", Held, Account),
];

const SIGNALS: [Row; 8] = [
    ("signal, asked whether it could", "T19", HeldByScopes, Account),
    ("signal, kill", "T19", HeldByScopes, Account),
    ("signal, kill of its process group", "T19", HeldByScopes, Account),
    ("signal, pidfd_send_signal", "T19", HeldByScopes, Account),
    ("signal, tgkill", "T19", HeldByScopes, Account),
    ("signal, tkill", "T19", HeldByScopes, Account),
    ("signal, rt_sigqueueinfo", "T19", HeldByScopes, Account),
    ("signal, rt_tgsigqueueinfo", "T19", HeldByScopes, Account),
];

const LIMITS: [Row; 7] = [
    ("limits, prlimit of descriptors", "T22", Held, Account),
    ("limits, prlimit of CPU time", "T22", Held, Account),
    ("limits, nice value", "T22", Possible, Account),
    ("limits, CPU affinity", "T22", Possible, Account),
    ("limits, scheduling policy", "T22", Possible, Account),
    ("limits, I/O priority", "T22", Possible, Account),
    ("limits, who is killed first when memory is short", "T22", Held, Account),
];

#[test]
fn a_session_takes_nothing_from_the_servers_process() {
    let fixture = Fixture::new();
    let [pid, address] = server_and_address(&fixture);
    let group = ["server", &pid, &address, PASSWORD_CANARY];

    let seen = in_a_session(&fixture, &group);

    judge(&fixture, &SERVER, &group, &seen);
}

#[test]
fn a_session_signals_the_server_where_the_kernel_has_no_scopes_alone() {
    let fixture = Fixture::new();
    let pid = server_pid(&fixture);
    let group = ["signals", pid.as_str()];

    let seen = in_a_session(&fixture, &group);

    judge(&fixture, &SIGNALS, &group, &seen);
}

#[test]
fn a_session_changes_of_the_servers_limits_what_the_page_says() {
    let fixture = Fixture::new();
    let pid = server_pid(&fixture);
    let group = ["limits", pid.as_str()];

    let seen = in_a_session(&fixture, &group);

    judge(&fixture, &LIMITS, &group, &seen);
}

// ---- T3: privileges ----------------------------------------------------------------------------------------------------

const PRIVILEGES: [Row; 9] = [
    ("privileges, a file of group adm", "T3", Held, Account),
    ("privileges, a socket of group docker", "T3 T9", Held, Account),
    ("privileges, setgroups", "T3", Held, AccountWith(&["AmbientCapabilities=CAP_SETGID"])),
    ("privileges, sudo", "T3", Held, Account),
    ("privileges, su", "T3", Held, Account),
    ("privileges, a set-user-ID program of root", "T3", Held, Account),
    ("privileges, a set-group-ID program", "T3", Held, Account),
    ("privileges, a program with file capabilities", "T3", Held, Account),
    ("privileges, making a set-user-ID program", "T3", Held, Account),
];

/// What would let the account become root, undone when dropped: it needs no password for sudo(8) and su(1).
struct Trusting<'a>(&'a Fixture);

impl<'a> Trusting<'a> {
    fn new(fixture: &'a Fixture) -> Self {
        fixture.root(&format!(
            "cp -p /etc/pam.d/su /etc/pam.d/su.test-kept
            sed -i '1i auth sufficient pam_permit.so' /etc/pam.d/su
            echo '{NAME} ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/test-attack"
        ));
        Self(fixture)
    }
}

impl Drop for Trusting<'_> {
    fn drop(&mut self) {
        let _ = self.0.host.sh("mv /etc/pam.d/su.test-kept /etc/pam.d/su; rm -f /etc/sudoers.d/test-attack");
    }
}

/// A file of group adm in a new directory, and what [`PRIVILEGES`] needs besides: its directory.
fn temptations(fixture: &Fixture) -> String {
    let scratch = fixture.scratch();
    fixture.root(&format!(
        "set -e; cd {scratch}; chmod 0755 .
        echo secret >adm; chown root:adm adm; chmod 0640 adm
        cp /usr/bin/id setuid; chmod 4755 setuid
        cp /usr/bin/id setgid; chgrp adm setgid; chmod 2755 setgid
        cp /usr/bin/setpriv capable; chmod 0755 capable"
    ));
    // `VFS_CAP_REVISION_2` with the effective bit, and CAP_SETUID (7) permitted: what setcap(8) would write.
    let attribute = "import os, struct, sys\n\
                     os.setxattr(sys.argv[1], 'security.capability', struct.pack('<5I', 0x02000001, 1 << 7, 0, 0, 0))";
    let mut command = fixture.host.command("/usr/bin/python3");
    text(&command.args(["-c", attribute, &format!("{scratch}/capable")]).output().unwrap());
    scratch
}

#[test]
fn a_session_gains_no_privilege() {
    let fixture = Fixture::new();
    let scratch = temptations(&fixture);
    let _trusting = Trusting::new(&fixture);
    let socket = format!("{scratch}/docker.sock");
    let _daemon = Running::python(&fixture, "root", &listen_at(&[&socket], 0o660));
    fixture.root(&format!("chgrp docker {socket}"));
    let [adm, setuid, setgid, capable] = ["adm", "setuid", "setgid", "capable"].map(|name| format!("{scratch}/{name}"));
    let group = ["privileges", &adm, &socket, &setuid, &setgid, &capable];

    let seen = in_a_session(&fixture, &group);

    judge(&fixture, &PRIVILEGES, &group, &seen);
}

// ---- T1, T2: namespaces ------------------------------------------------------------------------------------------------

const NAMESPACES: [Row; 6] = [
    ("namespaces, a user namespace", "–", Possible, Account),
    ("namespaces, a mount in a user namespace", "–", PossibleWithScopes, Account),
    ("namespaces, a file of group adm in a user namespace", "T3", Held, Account),
    ("namespaces, the mask taken off in a user namespace", "T9", Held, Root(&["TemporaryFileSystem=/run:ro"])),
    ("namespaces, the server's mount namespace joined", "T1", Held, Root(&[])),
    ("namespaces, root directory changed to the server's", "T1", Held, Root(&[])),
];

#[test]
fn namespaces_lead_a_session_nowhere() {
    let fixture = Fixture::new();
    let (scratch, pid) = (temptations(&fixture), server_pid(&fixture));
    let adm = format!("{scratch}/adm");
    let group = ["namespaces", pid.as_str(), &adm];

    let seen = in_a_session(&fixture, &group);

    judge(&fixture, &NAMESPACES, &group, &seen);
}

// ---- T12, T23: files ---------------------------------------------------------------------------------------------------

#[test]
fn files_of_roots_are_shut_and_the_accounts_are_open() {
    const ROWS: [Row; 3] = [
        ("files, /etc/shadow", "T3", Held, Root(&[])),
        ("files, the server's server.env where it is root's", "T23", Held, Root(&[])),
        ("files, a private one of the account's", "T23", Possible, Account),
    ];
    let fixture = Fixture::new();
    let (environment, own) =
        (format!("{HOME}/.local/share/opencode-v2-pilot/server.env"), format!("{WORKSPACE}/test-own"));
    fixture.remove_at_end(&own);
    fixture.write(&own, 0o600, "the account's\n");
    let files = ROWS.map(|(name, ..)| name.trim_start_matches("files, "));
    let words: Vec<String> =
        files.iter().zip(["/etc/shadow", &environment, &own]).map(|(name, path)| format!("{name}={path}")).collect();
    let group: Vec<&str> = ["files"].into_iter().chain(words.iter().map(String::as_str)).collect();

    let seen = in_a_session(&fixture, &group);

    judge(&fixture, &ROWS, &group, &seen);
}

// ---- Keys and terminals --------------------------------------------------------------------------------------------------

const KEYS: [Row; 3] = [
    ("keys, searched for from the session's keyring", "–", Held, AccountWith(&["KeyringMode=shared"])),
    ("keys, the server's by number", "–", Held, Child),
    ("keys, the account's user keyring linked", "–", Possible, Account),
];

/// Adds a key to a keyring: `-3` of the session, `-4` of the user. Prints its number.
const ADD_KEY: &str =
    "my ($kind, $secret) = ('user', 'secret'); print syscall(248, $kind, $ARGV[0], $secret, 6, $ARGV[1] + 0)";

#[test]
fn a_session_has_a_keyring_of_its_own() {
    let fixture = Fixture::new();
    let name = format!("opencode-pty-test-{}", std::process::id());
    let added = fixture.standin.spawn(&["/usr/bin/perl", "-e", ADD_KEY, &name, "-4"]).unwrap().text();
    let serial = fixture.standin.spawn(&["/usr/bin/perl", "-e", ADD_KEY, &format!("{name}-own"), "-3"]).unwrap().text();
    assert!(added.parse::<i32>().is_ok_and(|key| key > 0), "{added}");
    let group = ["keys", &name, &serial];

    let seen = in_a_session(&fixture, &group);

    judge(&fixture, &KEYS, &group, &seen);
    // KEYCTL_UNLINK: the user's keyring outlives the host, whose kernel is the machine's.
    let unlink = "syscall(250, 9, $ARGV[0] + 0, -4) == 0 or die qq($!\\n)";
    assert!(fixture.standin.spawn(&["/usr/bin/perl", "-e", unlink, &added]).unwrap().status.success());
}

const TERMINALS: [Row; 3] = [
    ("terminals, typing into another session's", "–", Held, Root(&[])),
    ("terminals, taking another session's over", "–", Held, Root(&[])),
    ("terminals, writing on another session's", "–", Possible, Account),
];

#[test]
fn a_session_does_not_type_into_anothers_terminal() {
    let fixture = Fixture::new();
    let mut other = fixture.start_sh("tty; stty -echo; echo ready; exec sleep 600");
    let said = other.line("ready");
    let terminal = said.lines().find(|line| line.starts_with("/dev/pts/")).unwrap().to_owned();
    let group = ["terminals", &terminal];

    let seen = in_a_session(&fixture, &group);

    judge(&fixture, &TERMINALS, &group, &seen);
    other.stop_and_read();
}

// ---- T9, T14: work elsewhere -----------------------------------------------------------------------------------------------

const WORK: [Row; 7] = [
    ("work, at", "T14", Held, Account),
    ("work, crontab", "T14", Held, Account),
    ("work, a tmux server", "T14", Held, Account),
    ("work, systemd-run --user", "T14", Held, Account),
    ("work, systemd-run", "T14", Held, Root(&[])),
    ("work, a manager asked by busctl", "T9", Held, Account),
    ("work, another session's unit stopped", "T9", Held, Root(&[])),
];

/// The account's own manager, at(1)'s daemon and a tmux server in the host's /tmp, ended when dropped.
struct Willing<'a>(&'a Fixture);

impl<'a> Willing<'a> {
    fn new(fixture: &'a Fixture) -> Self {
        let willing = Self(fixture);
        // Where no PAM module sets it, the manager has to be told its directory. A login shell that lets nobody in is no
        // shell for tmux.
        fixture.root(&format!(
            "set -e
            mkdir -p /run/systemd/system/user@{UID}.service.d
            printf '[Service]\\nEnvironment=XDG_RUNTIME_DIR=/run/user/{UID}\\n' \\
                >/run/systemd/system/user@{UID}.service.d/90-test.conf
            install -d -o {NAME} -g {GID} -m 0700 /run/user/{UID}
            systemctl daemon-reload
            systemctl start atd.service user@{UID}.service
            systemd-run --quiet --collect --unit=test-tmux --service-type=forking -p User={NAME} -p Environment=SHELL=/bin/sh \\
                tmux new-session -d 'sleep 600'"
        ));
        willing
    }
}

impl Drop for Willing<'_> {
    fn drop(&mut self) {
        let _ = self.0.host.sh(&format!(
            "systemctl stop test-tmux.service user@{UID}.service user-runtime-dir@{UID}.service atd.service
            rm -rf /run/systemd/system/user@{UID}.service.d /run/user/{UID} /tmp/tmux-{UID}
            systemctl daemon-reload; systemctl reset-failed"
        ));
    }
}

#[test]
fn nobody_works_for_a_session_outside_of_it() {
    let fixture = Fixture::new();
    let _willing = Willing::new(&fixture);
    let scratch = fixture.scratch();
    let group = ["work", scratch.as_str()];

    let seen = in_a_session(&fixture, &group);

    judge(&fixture, &WORK, &group, &seen);
}

// ---- T7, T20: what is left behind, and where it runs -------------------------------------------------------------------------

const WAYS: [&str; 8] =
    ["setsid", "double-fork", "daemon", "deaf", "stopped", "running-away", "own-group", "namespace"];

const LEFT_BEHIND: [Row; 8] = [
    ("daemons, setsid", "T8", Held, Child),
    ("daemons, double-fork", "T8", Held, Child),
    ("daemons, daemon", "T8", Held, Child),
    ("daemons, deaf", "T8", Held, Child),
    ("daemons, stopped", "T8", Held, Child),
    ("daemons, running-away", "T8", Held, Child),
    ("daemons, own-group", "T8", Held, Child),
    ("daemons, namespace", "T8", Held, Child),
];

/// Which of the daemons with a mark are there: `succeeded` for those that are.
fn left_behind(fixture: &Fixture, mark: &str) -> Vec<(String, Outcome)> {
    // One that runs away may be missed by a look, and not by many. The bracket: so that the script doesn't find itself.
    let found = fixture.root(&format!(
        "for way in {}; do
            for look in $(seq 10); do pgrep --full -- \"[-]e .*{mark}-$way-\" >/dev/null && echo $way && break; done
        done; true",
        WAYS.join(" ")
    ));
    let outcome = |way: &&str| {
        if found.lines().any(|line| line == *way) {
            Outcome::Succeeded("still there".to_owned())
        } else {
            Outcome::Held("gone with the session".to_owned())
        }
    };
    WAYS.iter().map(|way| (format!("daemons, {way}"), outcome(way))).collect()
}

/// Waits until all of them are; what was seen then.
fn all_are_there(fixture: &Fixture, mark: &str) -> Vec<(String, Outcome)> {
    wait_until("all daemons to be there", SOON, || {
        let seen = left_behind(fixture, mark);
        let all = seen.iter().all(|(_, outcome)| matches!(outcome, Outcome::Succeeded(_)));
        if all { Ok(seen) } else { Err(format!("{seen:?}")) }
    })
}

#[test]
fn nothing_that_a_session_leaves_behind_outlives_it() {
    let fixture = Fixture::new();
    let (mark, other) = (format!("mark-{}", std::process::id()), format!("other-{}", std::process::id()));
    // Children of the server do outlive what started them.
    let finished = fixture.standin.spawn(&words(&["daemons", &other])).unwrap();
    assert!(finished.status.success(), "{}", finished.complaint());
    let outside = all_are_there(&fixture, &other);

    let script = format!("{PROBE} attack daemons {mark} && echo ready && read line");
    let mut session = fixture.start_sh(&script);
    session.line("ready");
    all_are_there(&fixture, &mark);
    session.input(b"\n").unwrap();
    session.read_to_end();
    fixture.assert_gone(&session.unit);

    let seen = left_behind(&fixture, &mark);
    compare("", fixture.has_scopes(), &LEFT_BEHIND, &seen, |name, _| {
        outside.iter().find(|(known, _)| known == name).map(|(_, outcome)| outcome.clone())
    });
    wait_until("the server's daemons to be gone", SOON, || {
        // One that runs away is not hit by the first shot.
        let left = fixture
            .root(&format!("pkill -KILL --full -- '[-]e .*{other}-'; pgrep --full -- '[-]e .*{other}-' || true"));
        if left.is_empty() { Ok(()) } else { Err(left) }
    });
}

const CGROUPS: [Row; 8] = [
    ("cgroups, moving into the server's", "T20", Held, Root(&[])),
    ("cgroups, moving into another below the slice", "T20", Held, Root(&[])),
    ("cgroups, moving into the root", "T20", Held, Root(&[])),
    ("cgroups, making one below its own", "T20", Held, Root(&[])),
    ("cgroups, its own limits", "T20", Held, Root(&[])),
    ("cgroups, the server's frozen", "T20", Held, Root(&[])),
    ("cgroups, the server's killed", "T20", Held, Root(&[])),
    ("cgroups, a mount of its own", "T20", Held, Root(&[])),
];

#[test]
fn a_session_stays_in_its_cgroup() {
    let fixture = Fixture::new();
    let group = ["cgroups", "/opencode.slice/opencode-pty.slice"];

    let seen = in_a_session(&fixture, &group);

    judge(&fixture, &CGROUPS, &group, &seen);
}

// ---- An older kernel's wall --------------------------------------------------------------------------------------------------

/// The domain of the reference target's kernel, Linux 6.8.
const OLDER_ABI: &str = "4";

#[test]
fn the_wall_of_an_older_kernel_holds_all_but_signals_and_abstract_sockets() {
    {
        let fixture = Fixture::new();
        fixture.ask(&["true"]);
        if !fixture.has_scopes() {
            eprintln!("not applicable: this kernel's own domain is the older one");
            return;
        }
    }
    let naive = Naive::new();
    let fixture = &naive.fixture;
    let [pid, address] = server_and_address(fixture);
    let (_running, names) = tempting_daemons(fixture);
    let scratch = temptations(fixture);
    let sockets: Vec<&str> = ["sockets", &pid].into_iter().chain(names.iter().map(String::as_str)).collect();
    let adm = format!("{scratch}/adm");
    let groups: [(&[Row], &[&str]); 5] = [
        (&SOCKETS, &sockets),
        (&SERVER, &["server", &pid, &address, PASSWORD_CANARY]),
        (&SIGNALS, &["signals", &pid]),
        (&LIMITS, &["limits", &pid]),
        (&NAMESPACES, &["namespaces", &pid, &adm]),
    ];
    for (rows, group) in groups {
        // Neither groups nor directory are this wall's: the launcher that is left out has them.
        let of_the_wall = |name: &str| !name.contains("working directory") && !name.contains("group adm");
        let rows: Vec<Row> = rows.iter().copied().filter(|(name, ..)| of_the_wall(name)).collect();
        let behind = [&[PROBE, "behind", OLDER_ABI], &words(group)[..]].concat();
        let mut seen = outcomes(&fixture.ask(&behind));
        seen.retain(|(name, _)| of_the_wall(name));
        // Without any wall, in the same unit: what the wall holds gets through.
        let open = outcomes(&fixture.ask(&words(group)));
        compare(OLDER_ABI, false, &rows, &seen, |name, _| {
            let held_by_the_unit =
                ["sockets, directly", "sockets, by /var/run", "mask", "joined", "root directory", "making"];
            if held_by_the_unit.iter().any(|word| name.contains(word)) {
                return Some(Outcome::Succeeded("tried where the unit's properties are not".to_owned()));
            }
            open.iter().find(|(known, _)| known == name).map(|(_, outcome)| outcome.clone())
        });
    }
}
