//! The units as the manager has them and the kernel keeps them: the supervisor's hardening with nothing refused that it
//! needs, every property of a session, the slice's limits.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStderr, Stdio};

use opencode_pty::frame::message::{ErrorCode, Exit};
use support::host::workspace;
use support::peer::Frame;
use support::standin::{Probed, SHORT_RUNTIME};
use support::units::render;

use crate::account::{GID, HOME, WORKSPACE, filled};
use crate::fixture::{Fixture, RUNTIME, SOON, exited, wait_until};
use crate::outside::{DropIn, RestartAtEnd, SERVER, SUPERVISOR};

/// A unit's properties as `systemctl show` prints them.
fn show(fixture: &Fixture, unit: &str) -> BTreeMap<String, String> {
    let text = fixture.root(&format!("systemctl show --all {unit}"));
    text.lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// Fails unless each property has this value; all that differ are named together.
fn assert_properties(unit: &str, shown: &BTreeMap<String, String>, wanted: &[(&str, &str)]) {
    let other: Vec<String> = wanted
        .iter()
        .filter_map(|(name, value)| {
            // A list that is empty may not be shown at all.
            let found = shown.get(*name).map_or("", String::as_str);
            let value = filled(value);
            (found != value).then(|| format!("{name} is '{found}' instead of '{value}'"))
        })
        .collect();
    assert!(other.is_empty(), "{unit}: {other:#?}");
}

fn words(shown: &BTreeMap<String, String>, name: &str) -> BTreeSet<String> {
    shown.get(name).into_iter().flat_map(|value| value.split_whitespace()).map(str::to_owned).collect()
}

// ---- a session's unit ----------------------------------------------------------------------------------------------

/// SPEC 8, each property with the value that `systemctl show` gives.
const SESSION: [(&str, &str); 63] = [
    ("LoadState", "loaded"),
    ("ActiveState", "active"),
    ("Transient", "yes"),
    ("Description", "opencode-pty session"),
    ("Type", "exec"),
    ("Slice", "opencode-pty.slice"),
    ("User", "<name>"),
    ("Group", "<gid>"),
    ("SupplementaryGroups", ""),
    ("DynamicUser", "no"),
    // Its life.
    ("BindsTo", "opencode-pty-supervisor.service"),
    ("CollectMode", "inactive-or-failed"),
    ("Restart", "no"),
    ("RemainAfterExit", "no"),
    ("NotifyAccess", "none"),
    ("TimeoutStartUSec", "10s"),
    ("TimeoutStopUSec", "2s"),
    ("RuntimeMaxUSec", "2min"),
    ("KillMode", "control-group"),
    ("KillSignal", "15"),
    ("SendSIGHUP", "yes"),
    ("SendSIGKILL", "yes"),
    ("FinalKillSignal", "9"),
    ("OOMPolicy", "kill"),
    ("Delegate", "no"),
    // Nothing of a request.
    ("Environment", ""),
    ("EnvironmentFiles", ""),
    ("PassEnvironment", ""),
    ("WorkingDirectory", ""),
    ("IgnoreSIGPIPE", "no"),
    ("UMask", "0077"),
    // What it can't do.
    ("NoNewPrivileges", "yes"),
    ("AmbientCapabilities", "cap_setgid"),
    ("CapabilityBoundingSet", "cap_setgid"),
    ("RestrictSUIDSGID", "yes"),
    ("LockPersonality", "yes"),
    ("RestrictRealtime", "yes"),
    ("ProtectKernelTunables", "yes"),
    ("ProtectKernelModules", "yes"),
    ("ProtectKernelLogs", "yes"),
    ("ProtectControlGroups", "yes"),
    ("ProtectClock", "yes"),
    ("ProtectHostname", "yes"),
    ("ProtectProc", "invisible"),
    ("KeyringMode", "private"),
    // What it can't see.
    ("PrivateTmp", "yes"),
    ("JoinsNamespaceOf", "opencode-v2.service"),
    ("TemporaryFileSystem", "/run:ro,mode=0755,nosuid,nodev,noexec"),
    // What it keeps: the workspace and the network.
    ("PrivateNetwork", "no"),
    ("IPAddressDeny", ""),
    ("ProtectHome", "no"),
    ("ProtectSystem", "no"),
    ("ReadOnlyPaths", ""),
    // What it may use.
    ("CPUAccounting", "yes"),
    ("MemoryAccounting", "yes"),
    ("TasksAccounting", "yes"),
    ("IOAccounting", "yes"),
    ("TasksMax", "256"),
    ("MemoryHigh", "805306368"),
    ("MemoryMax", "1073741824"),
    ("CPUQuotaPerSecUSec", "4s"),
    ("IOWeight", "100"),
    ("DropInPaths", ""),
];

/// SPEC 8, hidden in a session.
const HIDDEN: [&str; 11] = [
    "-/run/dbus/system_bus_socket",
    "-/run/user/<uid>",
    "-/run/user/<uid>/bus",
    "-/run/docker.sock",
    "-/var/run/docker.sock",
    "-/run/containerd",
    "-/run/podman",
    "-/run/systemd/private",
    "-/var/lib/lxd",
    "-/var/snap/lxd",
    "-/run/opencode-pty",
];

#[test]
fn a_sessions_unit_has_every_property_it_should() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("echo ready; read line");
    session.line("ready");
    let shown = show(&fixture, &session.unit);

    assert_properties(&session.unit, &shown, &SESSION);
    assert!(words(&shown, "After").contains(SUPERVISOR), "{:?}", shown.get("After"));
    assert_eq!(shown["Id"], session.unit);
    assert_eq!(shown["ControlGroup"], format!("/opencode.slice/opencode-pty.slice/{}", session.unit));
    assert!(!shown["Refs"].is_empty(), "the supervisor holds a reference");
    let launcher = "/usr/local/libexec/opencode-pty-launcher";
    assert!(
        shown["ExecStart"].starts_with(&format!("{{ path={launcher} ; argv[]={launcher} ; ")),
        "{}",
        shown["ExecStart"]
    );

    let varlink = fixture.root("ls -d /run/systemd/io.systemd.* 2>/dev/null || true");
    let hidden: BTreeSet<String> =
        HIDDEN.iter().map(|path| filled(path)).chain(varlink.lines().map(|path| format!("-{path}"))).collect();
    assert_eq!(words(&shown, "InaccessiblePaths"), hidden);
    let back = ["/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager/resolv.conf", "/run/nscd"];
    // 252 shows the options of the mount, too.
    let binds: BTreeSet<String> =
        words(&shown, "BindReadOnlyPaths").iter().map(|bind| bind.trim_end_matches(":rbind").to_owned()).collect();
    assert_eq!(binds, back.iter().map(|path| format!("-{path}:{path}")).collect());
    session.stop_and_read();
}

#[test]
fn a_requests_runtime_is_the_one_thing_of_it_in_the_unit() {
    let fixture = Fixture::new();
    for (seconds, shown) in [(0, "1h"), (59, "59s"), (61, "1min 1s"), (3_600, "1h")] {
        let mut session = fixture.start_for(seconds, &["sleep", "600"]);
        assert_eq!(show(&fixture, &session.unit)["RuntimeMaxUSec"], shown, "{seconds}");
        session.stop_and_read();
    }
}

#[test]
fn what_a_sessions_limits_are_about_is_counted_as_far_as_the_host_can() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo ready; read line");
    session.line("ready");
    let shown = show(&fixture, &session.unit);
    assert!(shown["CPUUsageNSec"].parse::<u64>().unwrap() > 1_000_000, "{}", shown["CPUUsageNSec"]);
    // The container host has no controllers of its own; the VM host has all.
    let controllers = fixture.root("cat /sys/fs/cgroup/cgroup.controllers");
    for (controller, property) in [("memory", "MemoryCurrent"), ("pids", "TasksCurrent"), ("io", "IOReadBytes")] {
        let counted = shown[property].parse::<u64>().is_ok_and(|count| count < u64::MAX);
        if controllers.split(' ').any(|known| known == controller) {
            assert!(counted, "{property}={}", shown[property]);
        } else {
            eprintln!("not applicable: {property}, as this host has no {controller} controller");
        }
    }
    session.stop_and_read();
}

#[test]
fn the_slice_limits_what_all_sessions_use_together() {
    let fixture = Fixture::new();
    // It is there as long as somebody is in it.
    let mut session = fixture.start(&["cat"]);
    assert_properties(
        "opencode-pty.slice",
        &show(&fixture, "opencode-pty.slice"),
        &[
            ("LoadState", "loaded"),
            ("ActiveState", "active"),
            ("FragmentPath", "/etc/systemd/system/opencode-pty.slice"),
            ("DropInPaths", ""),
            ("ControlGroup", "/opencode.slice/opencode-pty.slice"),
            ("CPUAccounting", "yes"),
            ("MemoryAccounting", "yes"),
            ("TasksAccounting", "yes"),
            ("IOAccounting", "yes"),
            ("CPUQuotaPerSecUSec", "8s"),
            ("IOWeight", "100"),
            ("MemoryHigh", "1610612736"),
            ("MemoryMax", "2147483648"),
            ("TasksMax", "512"),
        ],
    );
    session.stop_and_read();
}

// ---- the supervisor's unit -----------------------------------------------------------------------------------------

/// SPEC 9, each line of the unit with the value that `systemctl show` gives.
const HARDENING: [(&str, &str); 63] = [
    ("FragmentPath", "/etc/systemd/system/opencode-pty-supervisor.service"),
    ("DropInPaths", ""),
    ("NeedDaemonReload", "no"),
    ("Type", "notify"),
    ("User", "root"),
    ("Group", "<name>"),
    ("SupplementaryGroups", ""),
    ("RuntimeDirectory", "opencode-pty"),
    ("RuntimeDirectoryMode", "0750"),
    ("UMask", "0077"),
    ("KillMode", "control-group"),
    ("KillSignal", "15"),
    ("SendSIGKILL", "yes"),
    ("FinalKillSignal", "9"),
    ("TimeoutStopUSec", "20s"),
    ("OOMPolicy", "kill"),
    ("Delegate", "no"),
    ("WatchdogUSec", "1min"),
    ("Restart", "on-failure"),
    ("RestartUSec", "250ms"),
    ("StartLimitIntervalUSec", "0"),
    ("Nice", "-10"),
    ("CPUWeight", "1000"),
    ("OOMScoreAdjust", "-900"),
    ("LimitNOFILE", "1024"),
    ("LimitNOFILESoft", "1024"),
    ("NoNewPrivileges", "yes"),
    ("CapabilityBoundingSet", ""),
    ("AmbientCapabilities", ""),
    ("RestrictAddressFamilies", "AF_UNIX"),
    ("PrivateTmp", "yes"),
    ("PrivateDevices", "yes"),
    ("PrivateMounts", "yes"),
    ("PrivateNetwork", "yes"),
    ("ProtectSystem", "strict"),
    ("ProtectHome", "yes"),
    ("ProtectKernelTunables", "yes"),
    ("ProtectKernelModules", "yes"),
    ("ProtectKernelLogs", "yes"),
    ("ProtectControlGroups", "yes"),
    ("ProtectClock", "yes"),
    ("ProtectHostname", "yes"),
    ("ProtectProc", "invisible"),
    ("ProcSubset", "pid"),
    ("RestrictNamespaces", "yes"),
    ("RestrictSUIDSGID", "yes"),
    ("LockPersonality", "yes"),
    ("MemoryDenyWriteExecute", "yes"),
    ("RestrictRealtime", "yes"),
    ("DevicePolicy", "closed"),
    ("SystemCallArchitectures", "native"),
    ("IPAddressAllow", ""),
    ("ReadWritePaths", ""),
    ("CPUAccounting", "yes"),
    ("MemoryAccounting", "yes"),
    ("TasksAccounting", "yes"),
    ("IOAccounting", "yes"),
    ("MemoryHigh", "201326592"),
    ("MemoryMax", "268435456"),
    ("TasksMax", "64"),
    ("ActiveState", "active"),
    ("SubState", "running"),
    ("Result", "success"),
];

/// One system call of each group that the supervisor's filter names, in the groups' order.
const FILTERED: [&str; 11] = [
    "clock_settime",
    "modify_ldt",
    "ptrace",
    "init_module",
    "mount",
    "uselib",
    "setuid",
    "ioperm",
    "reboot",
    "setpriority",
    "swapon",
];

#[test]
fn the_supervisors_unit_has_all_of_its_hardening() {
    let fixture = Fixture::new();
    let shown = show(&fixture, SUPERVISOR);

    assert_properties(SUPERVISOR, &shown, &HARDENING);
    assert_eq!(shown.get("RestartMode").map_or("normal", String::as_str), "normal");
    let filter = &shown["SystemCallFilter"];
    assert!(filter.starts_with('~'), "{filter}");
    let filtered = words(&shown, "SystemCallFilter");
    assert!(FILTERED.iter().all(|call| filtered.contains(*call)), "{filter}");
    assert_eq!(words(&shown, "IPAddressDeny"), ["0.0.0.0/0", "::/0"].map(str::to_owned).into());
    let hidden = words(&shown, "InaccessiblePaths");
    for path in ["/run/docker.sock", "/var/run/docker.sock", "/run/user/<uid>"] {
        assert!(hidden.contains(&filled(&format!("-{path}"))), "{hidden:?}");
    }
    for unit in [SUPERVISOR, "opencode-pty.slice", SERVER] {
        let shipped = fs::read_to_string(workspace().join("units").join(unit)).unwrap();
        let shipped = render(&shipped, fixture.host.account());
        let installed = fs::read_to_string(fixture.host.path(format!("/etc/systemd/system/{unit}"))).unwrap();
        assert_eq!(installed, shipped, "{unit} is not what this tree ships");
    }
}

#[test]
fn the_kernel_holds_the_supervisor_to_it() {
    let fixture = Fixture::new();
    let pid = fixture.supervisor_pid();
    let status = fixture.root(&format!("cat /proc/{pid}/status"));
    let value = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(&format!("{name}:"))).map(str::trim).unwrap_or_default()
    };
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(value(set), "0000000000000000", "{set}");
    }
    assert_eq!((value("NoNewPrivs"), value("Seccomp")), ("1", "2"));
    assert_eq!((value("Uid"), value("Gid")), ("0\t0\t0\t0", &*[&*GID; 4].join("\t")));
    // Of groups it has the one of its socket alone.
    assert!(["", &*GID].contains(&value("Groups")), "{}", value("Groups"));
    let umask = u32::from_str_radix(value("Umask"), 8).unwrap();
    assert_eq!(umask & 0o077, 0o077, "{umask:o}");
    assert!(value("Threads").parse::<u32>().unwrap() <= 8, "{}", value("Threads"));
    assert_eq!(fixture.root(&format!("cut -d ' ' -f 19 /proc/{pid}/stat")), "-10");
    let limits = fixture.root(&format!("grep '^Max open files' /proc/{pid}/limits"));
    assert_eq!(limits.split_whitespace().nth(3), Some("1024"), "{limits}");
    let score = fixture.root(&format!("cat /proc/{pid}/oom_score_adj"));
    if score != "-900" {
        eprintln!("not applicable: this host's manager may not lower oom_score_adj, so it is {score}");
    }

    // Namespaces of its own, and what it sees there.
    for namespace in ["mnt", "net", "uts"] {
        let links = fixture.root(&format!("readlink /proc/1/ns/{namespace} /proc/{pid}/ns/{namespace}"));
        let (manager, own) = links.split_once('\n').unwrap();
        assert_ne!(manager, own);
    }
    let inside = format!("nsenter --mount --net --target {pid} --");
    let seen = |script: &str| fixture.root(&format!("{inside} /bin/sh -c '{script}' 2>&1; true"));
    assert_eq!(seen("ls -A /home /root /run/user"), "/home:\n\n/root:\n\n/run/user:");
    for place in ["/usr", "/etc", "/var/lib", "/boot"] {
        assert!(seen(&format!("touch {place}/test")).ends_with("Read-only file system"), "{place}");
    }
    assert!(seen("echo 0 >/sys/fs/cgroup/cgroup.max.depth").ends_with("Read-only file system"));
    assert_eq!(seen("ls /dev | grep -E \"^(sd|vd|kmsg|mem|fuse|loop)\""), "");
    assert_eq!(seen("ls /tmp"), "");
    assert_eq!(seen("ls /sys/class/net"), "lo");
}

#[test]
fn shipped_units_are_accepted_by_systemd_analyze() {
    let fixture = Fixture::new();
    // The server's with the stand-in's drop-in, as its real program is not on a test host.
    let output = fixture
        .host
        .sh(&format!(
            "cd /etc/systemd/system && systemd-analyze verify --man=no {SUPERVISOR} opencode-pty.slice {SERVER}"
        ))
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("opencode")).collect();
    assert!(output.status.success(), "{said}");
    assert_eq!(ours, Vec::<&str>::new(), "{said}");
}

// ---- exposure ----------------------------------------------------------------------------------------------------------

/// What `systemd-analyze security` says of a unit: each finding against it, and the sum.
fn exposure(fixture: &Fixture, unit: &str) -> (BTreeSet<String>, f32) {
    let text = fixture.root(&format!("systemd-analyze security --no-pager {unit}"));
    let findings = text.lines().filter_map(|line| line.trim().strip_prefix('✗')?.split_whitespace().next());
    let overall = text.lines().find_map(|line| line.split_once("Overall exposure level")?.1.split_once(": "));
    let overall = overall.and_then(|(_, level)| level.split(' ').next()?.parse().ok());
    (findings.map(str::to_owned).collect(), overall.unwrap_or_else(|| panic!("{text}")))
}

/// What docs/threats.md says of it: the findings that it gives reasons for, and the most that the sum may be.
fn recorded_exposure(unit: &str) -> (BTreeSet<String>, f32) {
    // Built in: a virtual machine has the test and not this tree.
    let page = include_str!("../../docs/threats.md");
    let (_, section) = page.split_once(&format!("### Exposure of {unit}: ")).unwrap();
    let section = section.split("\n#").next().unwrap();
    let (level, table) = section.split_once('\n').unwrap();
    let names = table.lines().filter_map(|line| line.strip_prefix("| `")).flat_map(|line| {
        // A row may be about several: each in its own quotes, in the first cell.
        let cell = line.split(" | ").next().unwrap().replace("\\|", "|");
        cell.split('`').step_by(2).map(str::to_owned).collect::<Vec<_>>()
    });
    (names.collect(), level.trim().parse().unwrap())
}

#[test]
fn what_the_manager_counts_against_the_units_is_on_the_page_with_a_reason() {
    const SUPERVISOR_MAX: f32 = 1.5;
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("echo ready; read line");
    session.line("ready");
    for (unit, title) in [(SUPERVISOR, "the supervisor"), (&*session.unit, "a session")] {
        let (findings, overall) = exposure(&fixture, unit);
        let (explained, recorded) = recorded_exposure(title);
        println!("{title}: {overall} {findings:?}");
        let unexplained: Vec<&String> = findings.difference(&explained).collect();
        assert!(unexplained.is_empty(), "{title}: {unexplained:?}");
        assert!(overall <= recorded, "{title}: {overall}, and the page says {recorded}");
        assert!(unit != SUPERVISOR || overall <= SUPERVISOR_MAX, "{overall}");
    }
    session.stop_and_read();
}

// ---- nothing refused -------------------------------------------------------------------------------------------------

/// All that a supervisor does in its life, short of starting and ending it: sessions with every end, wrong frames,
/// strangers, and a manager and a bus that come and go.
fn lead_a_full_life(fixture: &Fixture) {
    assert_eq!(fixture.sh("echo hello; exit 7").exit, Some(exited(7)));
    let mut session = fixture.start(&["cat"]);
    session.input(b"typed\n").unwrap();
    session.output_until(b"typed", SOON).unwrap();
    assert!(session.stop_and_read().stopped);
    let session = fixture.start(&["cat"]);
    let unit = session.unit.clone();
    drop(session);
    fixture.wait_until_gone(&unit, SOON);
    let mut session = fixture.start_for(SHORT_RUNTIME, &["sleep", "600"]);
    assert_eq!(session.read_to_end().exit.unwrap().result(), "timeout");
    fixture.wait_until_gone(&session.unit, SOON);

    let mut peer = fixture.standin.peer().unwrap();
    peer.send_raw(b"GET / HTTP/1.1\r\n\r\n", &[]).unwrap();
    assert_eq!(peer.read_to_end(SOON).unwrap().error_code(), Some(ErrorCode::BadFrame));
    let dir = fixture.standin.open(HOME).unwrap();
    let mut peer = fixture.standin.peer().unwrap();
    let start = support::peer::start_for(fixture.standin.open(WORKSPACE).unwrap(), RUNTIME, &["true"]).unwrap();
    peer.send_start(&start, &dir).unwrap();
    assert_eq!(peer.read_to_end(SOON).unwrap().error_code(), Some(ErrorCode::BadCwd));
    assert_eq!(fixture.standin.probe_from_child().unwrap(), Probed::Closed);

    for disturbance in ["systemctl daemon-reload", "systemctl daemon-reexec", "systemctl restart dbus.service"] {
        let mut session = fixture.start_sh("echo ready; read line; exit 9");
        session.line("ready");
        fixture.root(disturbance);
        session.input(b"\n").unwrap();
        let exit = session.read_to_end().exit.unwrap();
        assert!(exit == exited(9) || exit == Exit::lost(), "{disturbance}: {exit}");
        fixture.wait_until_gone(&session.unit, SOON);
        assert_eq!(fixture.ask(&["echo", "again"]), "again", "{disturbance}");
    }
    fixture.restart_logind();
}

/// Ends the supervisor with a session running; its unit must have ended well.
fn end_it(fixture: &Fixture) {
    let mut session = fixture.start(&["cat"]);
    fixture.root(&format!("kill -TERM {}", fixture.supervisor_pid()));
    loop {
        match session.next_frame(SOON).unwrap() {
            Frame::Exit(_) => break,
            Frame::Output(_) => {}
            other => panic!("{other:?}"),
        }
    }
    wait_until("the supervisor to be gone", SOON, || {
        let state = fixture.property(SUPERVISOR, "ActiveState");
        if state == "inactive" || state == "failed" { Ok(()) } else { Err(state) }
    });
    let shown = show(fixture, SUPERVISOR);
    let outcome =
        ["ActiveState", "Result", "ExecMainCode", "ExecMainStatus", "NRestarts"].map(|name| shown[name].clone());
    assert_eq!(outcome, ["inactive", "success", "1", "0", "0"]);
}

#[test]
fn the_supervisor_makes_no_system_call_that_its_filter_refuses() {
    let mut fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    // From here on a refusal is not an error number that somebody may overlook.
    let _drop_in = DropIn::new(&fixture, SUPERVISOR, "[Service]\nSystemCallErrorNumber=kill");
    fixture.restart_supervisor();
    // That would be seen: the same filter, and a call in it.
    let control = fixture.root(
        "systemd-run --quiet --wait --collect -p SystemCallFilter=~@resources -p SystemCallErrorNumber=kill nice true; echo $?",
    );
    assert_ne!(control, "0");

    lead_a_full_life(&fixture);
    end_it(&fixture);
}

/// strace(1) on the running supervisor, into a file.
struct Trace {
    strace: Child,
    /// It tells of each new thread: without a reader it would die of that.
    _messages: BufReader<ChildStderr>,
    file: &'static str,
}

impl Trace {
    fn new(fixture: &Fixture) -> Self {
        let file = "/run/test-trace";
        fixture.remove_at_end(file);
        let pid = fixture.supervisor_pid();
        let mut command = fixture.host.command("strace");
        command.args(["-f", "-o", file, "-p", &pid]).stdin(Stdio::null()).stderr(Stdio::piped());
        let mut strace = command.spawn().unwrap();
        let mut messages = BufReader::new(strace.stderr.take().unwrap());
        let mut said = String::new();
        messages.read_line(&mut said).unwrap();
        assert!(said.contains("attached"), "{said}");
        Self { strace, _messages: messages, file }
    }

    /// What was refused, `CALL ERROR` with an example, once the traced process has ended.
    fn refusals(mut self, fixture: &Fixture) -> BTreeMap<String, String> {
        self.strace.wait().unwrap();
        let text = fs::read_to_string(fixture.host.path(self.file)).unwrap();
        assert!(text.lines().count() > 1_000, "a trace of {} lines", text.lines().count());
        let mut refusals = BTreeMap::new();
        for line in text.lines() {
            let Some((call, error)) = line.split_once(" = -1 ") else { continue };
            let error = error.split(' ').next().unwrap();
            if ORDINARY.contains(&error) {
                continue;
            }
            // `PID call(…` or `PID <... call resumed>…`.
            let call = call.split_once(' ').unwrap().1.trim_start().trim_start_matches("<... ");
            let call: String = call.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
            refusals.entry(format!("{call} {error}")).or_insert_with(|| line.to_owned());
        }
        refusals
    }
}

/// Errors that say "not yet", "no more" or "not there", and refuse nothing.
const ORDINARY: [&str; 9] =
    ["EAGAIN", "EINPROGRESS", "EINTR", "ETIMEDOUT", "ENOENT", "ECONNRESET", "ECONNREFUSED", "ENOTCONN", "EPIPE"];

/// What is refused and meant to be.
const REFUSED: [&str; 1] = [
    // `RestrictNamespaces=` can't look into its argument and so makes it a call that this kernel does not have; the C
    // library then starts its threads with clone.
    "clone3 ENOSYS",
];

#[test]
fn nothing_that_the_supervisor_tries_is_refused_to_it() {
    let fixture = Fixture::new();
    let _restart = RestartAtEnd::new(&fixture);
    let trace = Trace::new(&fixture);

    lead_a_full_life(&fixture);
    end_it(&fixture);

    let mut refusals = trace.refusals(&fixture);
    refusals.retain(|refusal, _| !REFUSED.contains(&refusal.as_str()));
    assert!(refusals.is_empty(), "{refusals:#?}");
}
