//! The live checks: what is tried, as the server of the private supervisor.
//!
//! This runs as the main process of its own unit, as the account; that is what gets it sessions. Where something must be
//! shut to a session, it is first shown to be open outside of one, by a child of this process: an attack that fails
//! everywhere proves nothing.

use std::fs::{self, File};
use std::io::{self, BufRead as _, Write as _};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use smol::future::FutureExt as _;

use super::encode_finding;
use super::session::{Ended, Frame, SOON, Session, start_frame};
use crate::account::Account;
use crate::frame::message::{ErrorCode, Exit};
use crate::frame::words::encode_word;
use crate::frame::{self, Kind};
use crate::limits::{
    CGROUP_ROOT, SESSION_CPU_QUOTA_USEC, SESSION_MEMORY_HIGH_BYTES, SESSION_MEMORY_MAX_BYTES, SESSION_TASKS_MAX,
    SESSIONS_MAX_DEFAULT,
};
use crate::report::{Chain, ExitStatus, quoted};
use crate::selftest::ATTEMPT;
use crate::selftest::context::{Properties, run, value};
use crate::selftest::host::{SCOPES_ABI, landlock_abi};
use crate::selftest::report::Finding;
use crate::systemd::unit::UnitName;
use crate::systemd::{BusOptions, Manager, SYSTEM_BUS};

/// The first argument of this part of the program. For this program alone.
pub const AS_SERVER: &str = "--as-server";

/// How long a session may run, where the check is not about that.
const RUNTIME: u32 = 120;
/// A runtime that is soon over, in seconds. Chosen: the rest of a start is part of it, and on a busy machine takes most of one.
const SHORT_RUNTIME: u32 = 3;
/// Between two looks at something that sends no event to here.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Where sessions work: in the `/tmp` that is this unit's own and theirs.
const WORKSPACE: &str = "/tmp/work";
/// Bytes of the flood. Chosen: hundreds of times what all buffers on the way hold together.
const FLOOD_BYTES: usize = 32 << 20;
/// How many open ways a finding names.
const WAYS_SHOWN: usize = 6;
/// Most that the supervisor may have resident while a client does not read. Chosen: a quarter of its `MemoryMax=`.
const RESIDENT_KIB_MAX: u64 = 64 << 10;

/// What the checks need.
struct Stage {
    directory: PathBuf,
    socket: String,
    slice: String,
    supervisor: String,
    server: String,
    nap: String,
    account: Account,
    workspace: File,
    manager: Manager,
}

/// A check: what it found, or why it failed.
type Try = fn(&Stage) -> Result<Finding, String>;

/// All but `live-unit`, which asks the manager, and `live-clean`, which is made when this process is gone. In this order,
/// since the last one ends the supervisor.
const TRIES: &[(&str, Try)] = &[
    ("live-client", client),
    ("live-terminal", terminal),
    ("live-arguments", arguments),
    ("live-exit-codes", exit_codes),
    ("live-environment", environment),
    ("live-privileges", privileges),
    ("live-workspace", workspace),
    ("live-network", network),
    ("live-masks", masks),
    ("live-trace", trace),
    ("live-signal", signal),
    ("live-rlimits", rlimits),
    ("live-abstract", abstract_sockets),
    ("live-callers", callers),
    ("live-frames", frames),
    ("live-sessions-max", sessions_max),
    ("live-stop", stop),
    ("live-escapes", escapes),
    ("live-disconnect", disconnect),
    ("live-expiry", expiry),
    ("live-flood", flood),
    ("live-slow-reader", slow_reader),
    ("live-supervisor-killed", supervisor_killed),
];

/// Runs the checks that the last word names, and prints a line for each.
pub async fn main(words: &[&str]) -> ExitStatus {
    match serve(words).await {
        Ok(()) => ExitStatus::Success,
        Err(why) => {
            println!("{}", crate::selftest::report::one_line(&why));
            ExitStatus::System
        }
    }
}

async fn serve(words: &[&str]) -> Result<(), String> {
    let &[directory, socket, slice, supervisor, server, nap, names] = words else {
        return Err("only `selftest --live` starts this".to_owned());
    };
    let account = Account::of_this_process().map_err(|error| Chain(&error).to_string())?;
    let bus = BusOptions { address: SYSTEM_BUS.to_owned(), manager_pid: 1 };
    let (manager, keep) =
        Box::pin(Manager::connect(bus)).await.map_err(|error| format!("the server: {}", Chain(&error)))?;
    let prepared = fs::create_dir(WORKSPACE).and_then(|()| File::open(WORKSPACE));
    let stage = Stage {
        directory: directory.into(),
        socket: socket.to_owned(),
        slice: slice.to_owned(),
        supervisor: supervisor.to_owned(),
        server: server.to_owned(),
        nap: nap.to_owned(),
        account,
        workspace: prepared.map_err(|error| format!("cannot make {WORKSPACE}: {error}"))?,
        manager,
    };
    let names: Vec<&str> = names.split(',').collect();
    let work = async {
        if names.contains(&"live-unit") {
            tell("live-unit", unit(&stage).await);
        }
        for (name, attempt) in TRIES.iter().filter(|(name, _)| names.contains(name)) {
            tell(name, attempt(&stage));
        }
    };
    work.or(keep).await;
    Ok(())
}

fn tell(name: &str, found: Result<Finding, String>) {
    let remedy = "do not use this host until it is explained; `journalctl` of this time has the supervisor's side";
    let finding = found.unwrap_or_else(|why| Finding::failed(why, remedy));
    println!("{}", encode_finding(name, &finding));
}

/// Asks whoever started all this for something that takes root; gives the answer.
fn ask(what: &str) -> Result<String, String> {
    println!("ask\t{what}");
    let mut answer = String::new();
    let asked = io::stdout().flush().and_then(|()| io::stdin().lock().read_line(&mut answer));
    asked.map_err(|error| format!("no answer to {what}: {error}"))?;
    Ok(answer.trim_end().to_owned())
}

// ---- what the checks are made of ---------------------------------------------------------------------------

impl Stage {
    fn start_for(&self, runtime: u32, words: &[&str]) -> Result<Session, String> {
        Session::start(&self.socket, &self.workspace, runtime, words)
    }

    fn start(&self, words: &[&str]) -> Result<Session, String> {
        self.start_for(RUNTIME, words)
    }

    fn start_sh(&self, script: &str) -> Result<Session, String> {
        self.start(&["/bin/sh", "-c", script])
    }

    /// A whole session.
    fn run(&self, words: &[&str]) -> Result<Ended, String> {
        let ended = self.start(words)?.finish()?;
        match &ended.unit {
            Some(unit) => self.gone(unit)?,
            None => return Err(format!("{} did not start: {}", quoted(&words.join(" ")), ended.how())),
        }
        Ok(ended)
    }

    /// The output of a session that must succeed, without the last line end.
    fn ask(&self, words: &[&str]) -> Result<String, String> {
        let ended = self.run(words)?;
        let text = ended.text();
        if ended.exit == Exit::new(1, 0, "success").ok() {
            Ok(text.trim_end_matches('\n').to_owned())
        } else {
            Err(format!("{} ended with {} after {}", quoted(&words.join(" ")), ended.how(), quoted(&text)))
        }
    }

    fn ask_sh(&self, script: &str) -> Result<String, String> {
        self.ask(&["/bin/sh", "-c", script])
    }

    /// What an attempt of this very program says, inside a session.
    fn inside(&self, words: &[&str]) -> Result<String, String> {
        let program = self.directory.join("opencode-pty").display().to_string();
        let mut all = vec![program.as_str(), "selftest", ATTEMPT];
        all.extend(words);
        self.ask(&all)
    }

    /// The same in a child of this process, outside sessions.
    fn outside(&self, words: &[&str]) -> Result<String, String> {
        let mut command = Command::new(self.directory.join("opencode-pty"));
        run(command.args(["selftest", ATTEMPT]).args(words)).map(|ran| ran.said)
    }

    /// Fails unless the unit's cgroup is gone, now.
    fn gone(&self, unit: &str) -> Result<(), String> {
        let cgroup = Path::new(CGROUP_ROOT).join(&self.slice).join(unit);
        if cgroup.exists() { Err(format!("{} is still there after the end", cgroup.display())) } else { Ok(()) }
    }

    /// A session with processes that do all they can to outlive it; returns when they run.
    fn start_stubborn(&self) -> Result<(Session, String), String> {
        let nap = &self.nap;
        let script = format!(
            "trap '' TERM HUP INT
            setsid sh -c \"trap '' TERM HUP INT; exec sleep {nap}\" &
            ( ( setsid sleep {nap} & ) & )
            ( trap '' HUP; exec sleep {nap} ) &
            ( cd /; exec setsid setsid sleep {nap} ) </dev/null >/dev/null 2>&1 &
            while :; do sleep {nap}; done"
        );
        let session = self.start_sh(&script)?;
        let unit = session.started()?;
        wait_until("five stubborn processes", || naps(nap) >= 5)?;
        Ok((session, unit))
    }

    /// Fails unless the unit's cgroup and every nap are gone, soon.
    fn nothing_left(&self, unit: &str) -> Result<(), String> {
        wait_until("the cgroup and its processes to go", || self.gone(unit).is_ok() && naps(&self.nap) == 0)
            .map_err(|why| format!("{why}; {} processes are left", naps(&self.nap)))
    }
}

fn wait_until(what: &str, mut so: impl FnMut() -> bool) -> Result<(), String> {
    let deadline = Instant::now() + SOON;
    while !so() {
        if Instant::now() > deadline {
            return Err(format!("waited {} s for {what}", SOON.as_secs()));
        }
        thread::sleep(LOOK_AGAIN);
    }
    Ok(())
}

/// How many processes sleep for exactly this long.
pub fn naps(nap: &str) -> usize {
    let wanted = format!("sleep\0{nap}\0");
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter(|process| fs::read(process.path().join("cmdline")).is_ok_and(|line| line == wanted.as_bytes()))
        .count()
}

/// The ways that an attempt found open.
fn open_ways(said: &str) -> Vec<&str> {
    said.lines().filter_map(|line| line.strip_suffix(": open")).collect()
}

/// Passes if everything was shut inside; nothing can be said if nothing was open outside.
fn shut(outside: &str, inside: &str, reason: &str) -> Finding {
    let (out, opened) = (open_ways(outside), open_ways(inside));
    if !opened.is_empty() {
        let some = opened.iter().take(WAYS_SHOWN).copied().collect::<Vec<_>>().join(" ");
        return Finding::failed(
            format!("{} ways are open to a session: {some}", opened.len()),
            "see docs/threats.md; do not use this host until it is explained",
        );
    }
    let tried = inside.lines().filter(|line| line.contains(": shut")).count();
    if out.is_empty() || tried == 0 {
        let why = format!("nothing was open outside a session either ({})", quoted(outside));
        return Finding::not_run(why, "find out what shuts it; nothing is shown here");
    }
    Finding::passed(format!("{reason}: {tried} ways shut; {} of them open outside sessions", out.len()))
}

fn expect(what: &str, found: &str, wanted: &str) -> Result<(), String> {
    if found == wanted { Ok(()) } else { Err(format!("{what} is {}, should be {}", quoted(found), quoted(wanted))) }
}

// ---- what a session is ---------------------------------------------------------------------------------------

async fn unit(stage: &Stage) -> Result<Finding, String> {
    let session = stage.start(&["sleep", &stage.nap])?;
    let unit = session.started()?;
    if UnitName::parse(&unit).is_none() {
        return Err(format!("the unit is called {}", quoted(&unit)));
    }
    let found = stage.manager.properties(&unit).await.map_err(|error| Chain(&error).to_string())?;
    let sessions = stage.manager.sessions_of(&stage.supervisor).await.map_err(|error| Chain(&error).to_string())?;
    let problems = judge_unit(stage, &found);
    drop(session);
    stage.nothing_left(&unit)?;
    if sessions.len() != 1 {
        return Err(format!("one session has {} units", sessions.len()));
    }
    Ok(Finding::from_problems(&problems, format!("{unit} has what it must have"), "run the supervisor of this version"))
}

/// Independent of what the supervisor asks for: the properties by which a session is held.
fn judge_unit(stage: &Stage, found: &Properties) -> Vec<String> {
    let launcher = stage.directory.join("opencode-pty-launcher").display().to_string();
    let gid = stage.account.gid().to_string();
    let numbers = [SESSION_TASKS_MAX, SESSION_MEMORY_HIGH_BYTES, SESSION_MEMORY_MAX_BYTES, SESSION_CPU_QUOTA_USEC];
    let [tasks, high, max, quota] = numbers.map(|number| number.to_string());
    let wanted = [
        ("Type", "exec"),
        ("ActiveState", "active"),
        ("User", stage.account.name()),
        ("Group", &gid),
        ("Slice", &stage.slice),
        ("BindsTo", &stage.supervisor),
        ("JoinsNamespaceOf", &stage.server),
        ("NoNewPrivileges", "yes"),
        ("PrivateTmp", "yes"),
        ("KillMode", "control-group"),
        ("KillSignal", "15"),
        ("FinalKillSignal", "9"),
        ("SendSIGHUP", "yes"),
        ("SendSIGKILL", "yes"),
        ("TimeoutStopUSec", "2000000"),
        ("RuntimeMaxUSec", "120000000"),
        ("OOMPolicy", "kill"),
        ("Delegate", "no"),
        ("CollectMode", "inactive-or-failed"),
        ("UMask", "63"),
        ("IgnoreSIGPIPE", "no"),
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
        ("CapabilityBoundingSet", "64"),
        ("TasksMax", &tasks),
        ("MemoryHigh", &high),
        ("MemoryMax", &max),
        ("CPUQuotaPerSecUSec", &quota),
        ("IOWeight", "100"),
    ];
    let mut problems: Vec<String> = wanted
        .iter()
        .filter(|(name, wanted)| value(found, name) != *wanted)
        .map(|(name, wanted)| format!("{name} is {}, should be {}", quoted(value(found, name)), quoted(wanted)))
        .collect();
    let has = |name: &str, word: &str| found.get(name).is_some_and(|words| words.iter().any(|known| known == word));
    for path in
        ["/run/dbus/system_bus_socket", "/run/docker.sock", "/run/systemd/private", "/var/lib/lxd", "/run/opencode-pty"]
    {
        if !has("InaccessiblePaths", &format!("-{path}")) {
            problems.push(format!("{path} is not masked"));
        }
    }
    if !found.get("TemporaryFileSystem").is_some_and(|words| words.iter().any(|word| word.starts_with("/run ro"))) {
        problems.push("/run is not replaced".to_owned());
    }
    if !value(found, "ExecStart").starts_with(&format!("{launcher} {launcher} no ")) {
        problems.push(format!("ExecStart is {}", quoted(value(found, "ExecStart"))));
    }
    if found.get("Environment").is_some_and(|words| !words.is_empty()) {
        problems.push("its Environment= says something of the request".to_owned());
    }
    problems
}

fn client(stage: &Stage) -> Result<Finding, String> {
    let session = Session::connect(&stage.socket)?;
    let failed = |error: io::Error| format!("cannot start the client: {error}");
    let socket = session.socket().try_clone().map_err(failed)?;
    let dir = stage.workspace.try_clone().map_err(failed)?;
    let words = ["/bin/sh", "-c", "pwd; exit 5"].map(encode_word);
    // The shell gives the two descriptors the numbers that the client wants.
    let status = Command::new("/bin/sh")
        .args(["-c", "exec 3<&0 4<&1 </dev/null >&2; exec \"$@\"", "sh"])
        .arg(stage.directory.join("opencode-pty-client"))
        .arg(RUNTIME.to_string())
        .args(&words)
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(socket)))
        .stdout(Stdio::from(dir))
        .stderr(Stdio::null())
        .status()
        .map_err(failed)?;
    if !status.success() {
        return Err(format!("the client ended with {status}"));
    }
    let ended = session.finish()?;
    expect("the record", &ended.how(), "exited 5 (result exit-code)")?;
    expect("the working directory", &ended.text(), &format!("{WORKSPACE}\n"))?;
    Ok(Finding::passed("it sent the frame with the directory, and the session was the caller's"))
}

fn terminal(stage: &Stage) -> Result<Finding, String> {
    let said = stage
        .ask_sh("tty; stty size; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo three; echo out; echo err >&2; echo out")?;
    let lines: Vec<&str> = said.lines().collect();
    match lines.as_slice() {
        [tty, rest @ ..] if tty.starts_with("/dev/pts/") => {
            expect("what it said", &rest.join(" "), "24 80 three out err out")?;
            Ok(Finding::passed(format!("{tty}, 80 x 24, both outputs in order")))
        }
        _ => Err(format!("it said {}", quoted(&said))),
    }
}

fn arguments(stage: &Stage) -> Result<Finding, String> {
    const ARGUMENTS: [&str; 9] =
        ["", "a b", "'\"", "$HOME `id` $(id) ; & |", "x\ny", "\u{e9}\u{1f600}", "\\", "* ?", "--"];
    let mut words = vec!["printf", "<%s>"];
    words.extend(ARGUMENTS);
    let wanted = format!("<{}>", ARGUMENTS.join("><"));
    expect("what arrived", &stage.ask(&words)?, &wanted)?;
    Ok(Finding::passed(format!("{} arguments arrived as they were sent", ARGUMENTS.len())))
}

fn exit_codes(stage: &Stage) -> Result<Finding, String> {
    let cases = [
        ("exit 0", 0),
        ("exit 1", 1),
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -KILL $$", 137),
        ("kill -TERM $$", 143),
        ("exec /nonexistent", 127),
        ("exec /etc", 126),
    ];
    for (script, status) in cases {
        let word = if status == 0 { "success" } else { "exit-code" };
        let how = stage.run(&["/bin/sh", "-c", script])?.how();
        expect(script, &how, &format!("exited {status} (result {word})"))?;
    }
    Ok(Finding::passed(format!("{} commands ended as they should", cases.len())))
}

fn environment(stage: &Stage) -> Result<Finding, String> {
    let said = stage.ask(&["env"])?;
    let mut found: Vec<&str> = said.lines().collect();
    found.sort_unstable();
    let wanted = stage.account.environment().map(|(name, value)| format!("{name}={value}"));
    expect("the environment", &found.join(" "), &wanted.join(" "))?;
    Ok(Finding::passed("exactly HOME LANG LOGNAME PATH SHELL TERM USER"))
}

fn privileges(stage: &Stage) -> Result<Finding, String> {
    let status = stage.ask_sh("cat /proc/self/status")?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map_or_else(String::new, |text| text.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let (uid, gid) = (stage.account.uid().to_string(), stage.account.gid().to_string());
    expect("Uid", &field("Uid"), &[uid.as_str(); 4].join(" "))?;
    expect("Gid", &field("Gid"), &[gid.as_str(); 4].join(" "))?;
    expect("Groups", &field("Groups"), "")?;
    for name in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        expect(name, &field(name), "0000000000000000")?;
    }
    expect("NoNewPrivs", &field("NoNewPrivs"), "1")?;
    let own = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let groups =
        own.lines().find_map(|line| line.strip_prefix("Groups:")).map_or(0, |groups| groups.split_whitespace().count());
    Ok(Finding::passed(format!("uid {uid}, gid {gid}, none of the server's {groups} groups, no capability")))
}

fn workspace(stage: &Stage) -> Result<Finding, String> {
    let failed = |error: io::Error| format!("{WORKSPACE}: {error}");
    fs::write(Path::new(WORKSPACE).join("from-server"), "one\n").map_err(failed)?;
    let said = stage.ask_sh("pwd; cat from-server; echo two >from-session")?;
    expect("what it said", &said, &format!("{WORKSPACE}\none"))?;
    let found = fs::read_to_string(Path::new(WORKSPACE).join("from-session")).map_err(failed)?;
    expect("what it wrote", &found, "two\n")?;
    Ok(Finding::passed("a session reads and writes the server's directory"))
}

fn network(stage: &Stage) -> Result<Finding, String> {
    let listeners: Vec<TcpListener> =
        ["127.0.0.1:0", "[::1]:0"].iter().filter_map(|address| TcpListener::bind(address).ok()).collect();
    let addresses: Vec<String> =
        listeners.iter().filter_map(|listener| listener.local_addr().ok()).map(|address| address.to_string()).collect();
    if addresses.is_empty() {
        return Ok(Finding::skipped("this host has no loopback network"));
    }
    let mut words = vec!["tcp"];
    words.extend(addresses.iter().map(String::as_str));
    let said = stage.inside(&words)?;
    let open = open_ways(&said);
    if open.len() != addresses.len() {
        return Err(format!("a session can not connect: {}", quoted(&said)));
    }
    let note = if addresses.len() < 2 { "; this host lacks the other family" } else { "" };
    Ok(Finding::passed(format!("a session connected to {}{note}", open.join(" and "))))
}

// ---- what it is kept from --------------------------------------------------------------------------------------

fn masks(stage: &Stage) -> Result<Finding, String> {
    let places = [
        "/run/dbus/system_bus_socket",
        "/run/systemd/private",
        "/run/systemd/notify",
        "/run/systemd/journal/dev-log",
        "/run/docker.sock",
        "/run/containerd/containerd.sock",
        "/run/podman/podman.sock",
        "/var/lib/lxd/unix.socket",
        "/run/opencode-pty/supervisor.sock",
        &stage.socket,
    ];
    let existing: Vec<&str> = places.into_iter().filter(|path| Path::new(path).exists()).collect();
    let mut words = vec!["connect".to_owned()];
    words.extend(existing.iter().map(|path| (*path).to_owned()));
    let outside = stage.outside(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
    let server = std::process::id();
    for path in &existing {
        let up = "../".repeat(12);
        words.push(format!("{up}{}", path.trim_start_matches('/')));
        words.push(format!("/proc/self/cwd/{up}{}", path.trim_start_matches('/')));
        words.push(path.replacen("/run/", "/var/run/", 1));
        words.extend(["self", "1", &server.to_string()].map(|process| format!("/proc/{process}/root{path}")));
    }
    let inside = stage.inside(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
    Ok(shut(&outside, &inside, "directly, through .. and through /proc/PID/root"))
}

fn trace(stage: &Stage) -> Result<Finding, String> {
    let words = ["trace", &std::process::id().to_string()];
    Ok(shut(&stage.outside(&words)?, &stage.inside(&words)?, "the server's /proc and descriptors"))
}

fn signal(stage: &Stage) -> Result<Finding, String> {
    let words = ["signal", &std::process::id().to_string()];
    let (outside, inside) = (stage.outside(&words)?, stage.inside(&words)?);
    Ok(scoped(shut(&outside, &inside, "the server"), "signals to the server: see the check 'inspector'"))
}

fn rlimits(stage: &Stage) -> Result<Finding, String> {
    let words = ["rlimit", &std::process::id().to_string()];
    Ok(shut(&stage.outside(&words)?, &stage.inside(&words)?, "prlimit of the server"))
}

fn abstract_sockets(stage: &Stage) -> Result<Finding, String> {
    let name = format!("selftest-{}", stage.nap);
    let address = SocketAddr::from_abstract_name(&name).map_err(|error| error.to_string())?;
    let _listener = UnixListener::bind_addr(&address).map_err(|error| format!("cannot listen: {error}"))?;
    let words = ["connect", &format!("@{name}")];
    let (outside, inside) = (stage.outside(&words)?, stage.inside(&words)?);
    Ok(scoped(shut(&outside, &inside, "an abstract socket of the server"), "abstract sockets"))
}

/// Below ABI 6 these are known to be open, which is no finding of this run.
fn scoped(finding: Finding, what: &str) -> Finding {
    match landlock_abi() {
        Ok(Some(abi)) if abi >= SCOPES_ABI => finding,
        Ok(found) => Finding::skipped(format!(
            "not held here: {what} (Landlock ABI {}, held from {SCOPES_ABI} on)",
            found.map_or("none".to_owned(), |abi| abi.to_string())
        )),
        Err(why) => Finding::not_run(why, "see the check 'landlock'"),
    }
}

// ---- the door ----------------------------------------------------------------------------------------------------

fn callers(stage: &Stage) -> Result<Finding, String> {
    expect("what a child of the server was told", &stage.outside(&["call", &stage.socket])?, "call: closed")?;
    let problems = ask("strangers")?;
    if !problems.is_empty() {
        return Err(problems);
    }
    Ok(Finding::passed(
        "a child of the server, another process of the account and root are closed without a word; nobody can't connect",
    ))
}

fn frames(stage: &Stage) -> Result<Finding, String> {
    let start = start_frame(&stage.workspace, RUNTIME, &["true"])?;
    let changed = |at: usize, bytes: &[u8]| {
        let mut frame = start.clone();
        frame.iter_mut().skip(at).zip(bytes).for_each(|(byte, other)| *byte = *other);
        frame
    };
    let file = File::open("/etc/passwd").map_err(|error| error.to_string())?;
    let input = frame::encode(Kind::Input, b"ls\n").map_err(|error| error.to_string())?;
    let dir = Some(&stage.workspace);
    let cases = [
        ("another magic", changed(0, b"GET "), dir, ErrorCode::BadFrame),
        ("version 2", changed(4, &[2]), dir, ErrorCode::BadFrame),
        ("type 9", changed(5, &[9]), dir, ErrorCode::BadFrame),
        ("a reserved byte", changed(6, &[1]), dir, ErrorCode::BadFrame),
        ("the longest length there is", changed(8, &[0xff; 4]), dir, ErrorCode::BadFrame),
        ("input first", input, None, ErrorCode::BadFrame),
        ("output from the client", changed(5, &[3]), dir, ErrorCode::BadFrame),
        ("NUL in the command", changed(12 + 24, b"\0"), dir, ErrorCode::BadStart),
        ("a command that is not UTF-8", changed(12 + 24, b"\xff"), dir, ErrorCode::BadStart),
        ("a runtime over the limit", changed(12 + 16, &[0xff; 4]), dir, ErrorCode::BadStart),
        ("no descriptor", start.clone(), None, ErrorCode::BadStart),
        ("a file for a directory", start.clone(), Some(&file), ErrorCode::BadCwd),
        ("another inode", changed(12 + 8, &[0xff; 8]), dir, ErrorCode::BadCwd),
    ];
    for (what, bytes, descriptor, code) in &cases {
        let session = Session::connect(&stage.socket)?;
        // It may hang up before all is sent.
        let _ = session.send(bytes, *descriptor);
        match session.next()? {
            Frame::Error(found, _) if found == *code => {}
            other => return Err(format!("to {what} it said {other:?} and not {code}")),
        }
    }
    expect("a session after that", &stage.ask(&["echo", "fine"])?, "fine")?;
    Ok(Finding::passed(format!("{} ways to be wrong, each refused with its code", cases.len())))
}

fn sessions_max(stage: &Stage) -> Result<Finding, String> {
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS_MAX_DEFAULT {
        let session = stage.start(&["sleep", &stage.nap])?;
        let unit = session.started()?;
        sessions.push((session, unit));
    }
    let more = stage.start(&["true"])?.finish()?;
    if more.error.as_ref().map(|(code, _)| *code) != Some(ErrorCode::Busy) {
        return Err(format!("one more ended with {}", more.how()));
    }
    let units: Vec<String> = sessions.into_iter().map(|(_session, unit)| unit).collect();
    for unit in &units {
        stage.nothing_left(unit)?;
    }
    // A place is free once the supervisor has seen what we have seen.
    let mut after = String::new();
    wait_until("a place", || {
        after = stage.ask(&["echo", "fine"]).unwrap_or_else(|why| why);
        after == "fine"
    })
    .map_err(|why| format!("{why}; a session after that: {}", quoted(&after)))?;
    Ok(Finding::passed(format!(
        "{SESSIONS_MAX_DEFAULT} ran, one more was refused as busy, and there was a place again"
    )))
}

// ---- the end -------------------------------------------------------------------------------------------------------

fn stop(stage: &Stage) -> Result<Finding, String> {
    let mut session = stage.start(&["sleep", &stage.nap])?;
    let unit = session.started()?;
    let asked = Instant::now();
    session.stop()?;
    let ended = session.finish()?;
    let time = asked.elapsed();
    expect("the record", &ended.how(), "killed by signal 15 (result stopped)")?;
    if !ended.stopped {
        return Err("`stopped` did not come".to_owned());
    }
    stage.gone(&unit)?;
    Ok(Finding::passed(format!("recorded as stopped after {} ms, with the cgroup gone", time.as_millis())))
}

fn escapes(stage: &Stage) -> Result<Finding, String> {
    let (mut session, unit) = stage.start_stubborn()?;
    let asked = Instant::now();
    session.stop()?;
    let ended = session.finish()?;
    expect("the record", &ended.how(), "killed by signal 15 (result stopped)")?;
    stage.gone(&unit)?;
    let left = naps(&stage.nap);
    if left > 0 {
        return Err(format!("{left} processes outlived their session"));
    }
    let time = asked.elapsed();
    Ok(Finding::passed(format!("setsid, double fork, TERM- and HUP-immune: all gone after {} ms", time.as_millis())))
}

fn disconnect(stage: &Stage) -> Result<Finding, String> {
    let (session, unit) = stage.start_stubborn()?;
    drop(session);
    stage.nothing_left(&unit)?;
    Ok(Finding::passed("the unit with its stubborn processes went with the connection"))
}

fn expiry(stage: &Stage) -> Result<Finding, String> {
    let nap = &stage.nap;
    // TERM is not enough for it either.
    let script = format!("trap '' TERM HUP; setsid sleep {nap} & while :; do sleep {nap}; done");
    let ended = stage.start_for(SHORT_RUNTIME, &["/bin/sh", "-c", &script])?.finish()?;
    if ended.exit.as_ref().is_none_or(|exit| exit.result() != "timeout") {
        return Err(format!("a session of {SHORT_RUNTIME} s ended with: {}", ended.how()));
    }
    stage.nothing_left(&ended.unit.unwrap_or_default())?;
    Ok(Finding::passed(format!("a session of {SHORT_RUNTIME} s was ended, with what ignores TERM")))
}

fn flood(stage: &Stage) -> Result<Finding, String> {
    let script = format!("head -c {FLOOD_BYTES} /dev/zero | tr '\\0' x");
    let ended = stage.run(&["/bin/sh", "-c", &script])?;
    let (count, others) = (ended.output.len(), ended.output.iter().filter(|byte| **byte != b'x').count());
    if count != FLOOD_BYTES || others > 0 {
        return Err(format!("of {FLOOD_BYTES} bytes {count} arrived, {others} of them changed"));
    }
    Ok(Finding::passed(format!("{} MiB arrived whole", FLOOD_BYTES >> 20)))
}

fn slow_reader(stage: &Stage) -> Result<Finding, String> {
    let mut stalled = stage.start(&["yes"])?;
    let unit = stalled.started()?;
    for _ in 0..3 {
        expect("a session beside it", &stage.ask(&["echo", "fine"])?, "fine")?;
    }
    let status = format!("/proc/{}/status", stalled.supervisor_pid()?);
    let status = fs::read_to_string(&status).map_err(|error| format!("{status}: {error}"))?;
    let resident =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
    let resident: u64 = resident.ok_or("the supervisor's memory can't be read")?;
    if resident > RESIDENT_KIB_MAX {
        return Err(format!("the supervisor holds {resident} KiB for a client that does not read"));
    }
    stalled.stop()?;
    let ended = stalled.finish()?;
    expect("its record", &ended.how(), "killed by signal 15 (result stopped)")?;
    stage.gone(&unit)?;
    Ok(Finding::passed(format!("others ran on, the supervisor stayed at {resident} KiB, and it could be stopped")))
}

fn supervisor_killed(stage: &Stage) -> Result<Finding, String> {
    let (session, unit) = stage.start_stubborn()?;
    let problem = ask("kill-supervisor")?;
    if !problem.is_empty() {
        return Err(format!("the supervisor could not be killed: {problem}"));
    }
    let ended = session.finish()?;
    if ended.exit.is_some() || ended.error.is_some() {
        return Err(format!("a dead supervisor said {}", ended.how()));
    }
    stage.nothing_left(&unit)?;
    Ok(Finding::passed("its session and all its processes went with it"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selftest::report::Status;

    #[test]
    fn what_is_open_inside_fails_and_what_is_open_nowhere_shows_nothing() {
        let (open, closed) = ("environ: open\nmem: shut, EACCES\n", "environ: shut, EACCES\nmem: shut, EACCES\n");
        for (outside, inside, status) in [
            (open, closed, Status::Passed),
            (open, open, Status::Failed),
            (closed, open, Status::Failed),
            (closed, closed, Status::NotRun),
            (open, "", Status::NotRun),
            (open, "sh: not found\n", Status::NotRun),
        ] {
            assert_eq!(shut(outside, inside, "x").status, status, "{outside} {inside}");
        }
    }

    #[test]
    fn naps_are_counted_by_their_whole_command_line() {
        let nap = format!("86400.{}", std::process::id());
        assert_eq!(naps(&nap), 0);
        let mut child = Command::new("sleep").arg(&nap).spawn().unwrap();
        let found = wait_until("the nap", || naps(&nap) == 1);
        let others = naps(nap.get(..nap.len() - 1).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((found, others, naps(&nap)), (Ok(()), 0, 0));
    }
}
