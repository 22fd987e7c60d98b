//! One test's world: a bus, a fake manager, the built supervisor, and a stand-in server as its peer.

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use support::fake_manager::{Bus, FakeManager, Server};
use support::peer::Peer;
use support::programs;
use support::standin::Standin;

/// Longer than anything here takes; only a failing test waits this long.
pub const LONG: Duration = Duration::from_mins(1);
/// For what is to happen at once, on a loaded machine; below every wait of the product's own.
pub const SOON: Duration = Duration::from_secs(3);
/// How long to watch for something that must not happen. A test can't wait for an event that does not come.
pub const WHILE: Duration = Duration::from_millis(300);
/// The account that everything but the supervisor runs as: on every Debian, with a group of its own.
pub const ACCOUNT: &str = "nobody";
/// Its uid and gid.
pub const ACCOUNT_ID: u32 = 65_534;
/// The server's unit in these tests.
pub const SERVER_UNIT: &str = "opencode-it.service";
/// The supervisor's own unit.
pub const SUPERVISOR_UNIT: &str = "opencode-pty-it.service";

/// The launcher that session units run. Nothing here does.
const LAUNCHER: &str = "/usr/local/libexec/opencode-pty-launcher";
const PRODUCT: &str = env!("CARGO_BIN_EXE_opencode-pty");

/// What differs from an ordinary scene.
pub struct Setting {
    /// `--max-sessions`.
    pub sessions_max: usize,
    /// `--manager-pid`, if not the fake's.
    pub manager_pid: u32,
    /// The process in front of the supervisor, to change its limits, say.
    pub wrapper: Vec<&'static str>,
    /// Options with another value than usual.
    pub options: Vec<(&'static str, &'static str)>,
    /// What happens after the manager is there and before the supervisor is started.
    pub before: Box<dyn FnOnce(&Scene)>,
}

impl Default for Setting {
    fn default() -> Self {
        Self {
            sessions_max: 16,
            manager_pid: std::process::id(),
            wrapper: vec![],
            options: vec![],
            before: Box::new(|_| {}),
        }
    }
}

/// One test's world; all of it goes when it is dropped.
pub struct Scene {
    /// The manager.
    pub fake: FakeManager,
    /// The bus.
    pub bus: Bus,
    /// The server.
    pub standin: Standin,
    server: Child,
    supervisor: Option<Supervisor>,
    idle_descriptors: usize,
    place: Place,
}

impl Scene {
    /// An ordinary scene with a supervisor that is ready.
    pub fn set() -> Self {
        Self::with(Setting::default())
    }

    /// One with at most so many sessions.
    pub fn with_sessions_max(sessions_max: usize) -> Self {
        Self::with(Setting { sessions_max, ..Setting::default() })
    }

    /// One with these differences; waits until the supervisor says that it is ready.
    pub fn with(setting: Setting) -> Self {
        let mut scene = Self::without_waiting(setting);
        let ready = scene.supervisor().wait_for_notice("READY=1");
        assert!(ready, "the supervisor ended before it was ready:\n{}", scene.supervisor().log());
        scene
            .fake
            .wait("the server's unit to be read", |state| (state.called("GetAll", SERVER_UNIT) > 0).then_some(()));
        // It looks again when it has taken in the first answer. From here on it knows the server's main process, and has all that
        // it needs to wait for sessions; who connected before would make it look a second time, some while later.
        scene.look_at_the_server_again();
        scene.idle_descriptors = scene.descriptors();
        scene
    }

    /// Has the supervisor look at the server's unit, as it is now, and waits until it has asked.
    pub fn look_at_the_server_again(&self) {
        let looks = self.fake.with(|state| state.called("GetAll", SERVER_UNIT));
        self.fake.announce_server();
        self.fake.wait("the server's unit to be read again", |state| {
            (state.called("GetAll", SERVER_UNIT) > looks).then_some(())
        });
    }

    /// The same without waiting.
    pub fn without_waiting(setting: Setting) -> Self {
        build_standin();
        let place = Place::new();
        let bus = Bus::start(&place.0).unwrap();
        let (server, standin) = place.start_standin();
        let fake = FakeManager::start(&bus.address(), Server::new(SERVER_UNIT, server.id())).unwrap();
        let mut scene = Self { fake, bus, standin, server, supervisor: None, idle_descriptors: 0, place };
        let supervisor = scene.supervisor_command(&setting);
        (setting.before)(&scene);
        scene.supervisor = Some(Supervisor::start(supervisor, &scene.path("notify.sock")));
        scene
    }

    /// The command that runs the supervisor here.
    fn supervisor_command(&self, setting: &Setting) -> Command {
        let mut words: Vec<String> = setting.wrapper.iter().map(|word| (*word).to_owned()).collect();
        words.extend([PRODUCT, "supervisor"].map(str::to_owned));
        for (option, value) in [
            ("--account", ACCOUNT.to_owned()),
            ("--server-unit", SERVER_UNIT.to_owned()),
            ("--server-cgroup", format!("/system.slice/{SERVER_UNIT}")),
            ("--unit", SUPERVISOR_UNIT.to_owned()),
            ("--socket", self.socket().display().to_string()),
            ("--launcher", LAUNCHER.to_owned()),
            ("--max-sessions", setting.sessions_max.to_string()),
            ("--bus", self.bus.address()),
            ("--manager-pid", setting.manager_pid.to_string()),
        ] {
            let other = setting.options.iter().find(|(name, _)| *name == option);
            words.extend([option.to_owned(), other.map_or(value, |(_, other)| (*other).to_owned())]);
        }
        let (program, args) = words.split_first().unwrap();
        let mut command = Command::new(program);
        command.args(args);
        command
    }

    /// The supervisor.
    pub fn supervisor(&mut self) -> &mut Supervisor {
        self.supervisor.as_mut().unwrap()
    }

    /// How many descriptors the supervisor has open.
    fn descriptors(&self) -> usize {
        let pid = self.supervisor.as_ref().unwrap().process.id();
        fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
    }

    /// Waits until the supervisor has no descriptor open that it had not when it began.
    pub fn assert_idle(&self, after: &str) {
        self.assert_idle_but_for(0, after);
    }

    /// The same but for those that sessions hold: a connection, a pidfd and a terminal each.
    pub fn assert_idle_but_for(&self, sessions: usize, after: &str) {
        let deadline = Instant::now() + LONG;
        let wanted = self.idle_descriptors + 3 * sessions;
        loop {
            let now = self.descriptors();
            if now == wanted {
                return;
            }
            assert!(Instant::now() < deadline, "{wanted} descriptors expected, {now} there after {after}");
            // Closing happens behind an answer, in another process: there is no event to wait for.
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The supervisor's socket.
    pub fn socket(&self) -> PathBuf {
        self.path("supervisor.sock")
    }

    /// A path in the test's own directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.place.0.join(name)
    }

    /// The directory sessions are started in.
    pub fn directory(&self) -> OwnedFd {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(self.path("work"), flags, Mode::empty()).unwrap()
    }

    /// A connection of the server.
    pub fn peer(&self) -> Peer {
        self.standin.peer().unwrap()
    }

    /// A connection of the server with its start frame sent.
    pub fn asked(&self) -> Peer {
        let peer = self.peer();
        peer.start_in(self.directory(), 60, &["/bin/true"]).unwrap();
        peer
    }

    /// A running session and its unit.
    pub fn session(&self) -> (Peer, String) {
        let mut peer = self.asked();
        let unit = peer.started(LONG).unwrap();
        (peer, unit)
    }

    /// Runs a session to its end, to see that one can.
    pub fn check_that_a_session_works(&self) {
        let (mut peer, _) = self.session();
        peer.input(b"still there?").unwrap();
        peer.output_until(b"still there?", LONG).unwrap();
        peer.stop().unwrap();
        assert!(peer.read_to_end(LONG).unwrap().stopped);
    }

    /// Tries to run a session until one works: for what must come back by itself.
    pub fn wait_for_a_session(&self) {
        let deadline = Instant::now() + LONG;
        loop {
            // The supervisor may close before it has read the start frame.
            let mut peer = self.peer();
            let _ = peer.start_in(self.directory(), 60, &["/bin/true"]);
            match peer.started(LONG) {
                Ok(_) => return,
                Err(error) => assert!(Instant::now() < deadline, "no session works: {error}"),
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills the server's main process.
    pub fn kill_server(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }

    /// Another process that connects to the supervisor: `opencode-standin probe`, as this uid.
    pub fn probe_as(&self, uid: u32) -> support::standin::Probed {
        let output = Command::new(self.path("opencode-standin"))
            .arg("probe")
            .arg(self.socket())
            .args(["/bin/true"])
            .current_dir("/")
            .uid(uid)
            .gid(uid)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let finished =
            support::standin::Finished { status: output.status, stdout: output.stdout, stderr: output.stderr };
        support::standin::probed(&finished).unwrap()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if thread::panicking()
            && let Some(supervisor) = &self.supervisor
        {
            eprintln!("---- the supervisor's standard error\n{}----", supervisor.log());
        }
        drop(self.supervisor.take());
        // It may be gone already, by the test's own hand.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// A directory of the test's own, with the programs in it that the account runs.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let place = Self(PathBuf::from(format!("/tmp/opencode-it-{}-{count}", std::process::id())));
        fs::create_dir(&place.0).unwrap();
        for name in ["standin", "work"] {
            let path = place.0.join(name);
            fs::create_dir(&path).unwrap();
            std::os::unix::fs::chown(&path, Some(ACCOUNT_ID), Some(ACCOUNT_ID)).unwrap();
        }
        for (from, name) in [(PRODUCT.into(), "opencode-pty-client"), (standin_path(), "opencode-standin")] {
            let to = place.0.join(name);
            if fs::hard_link(&from, &to).is_err() {
                // Another file system.
                programs::copy(&from, &to);
            }
        }
        place
    }

    fn start_standin(&self) -> (Child, Standin) {
        let control = self.0.join("standin/control.sock");
        let server = Command::new(self.0.join("opencode-standin"))
            .arg("serve")
            .arg("--control")
            .arg(&control)
            .arg("--supervisor")
            .arg(self.0.join("supervisor.sock"))
            .arg("--client")
            .arg(self.0.join("opencode-pty-client"))
            .current_dir("/")
            .uid(ACCOUNT_ID)
            .gid(ACCOUNT_ID)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        (server, Standin::connect_within(control, LONG).unwrap())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // What can't be removed is in /tmp.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The stand-in lies beside the product, in the same profile.
/// The program that poses as the service manager.
pub fn impostor_path() -> PathBuf {
    Path::new(PRODUCT).with_file_name("opencode-impostor")
}

fn standin_path() -> PathBuf {
    Path::new(PRODUCT).with_file_name("opencode-standin")
}

/// Cargo builds no other package's programs for a test, so we ask it to; a no-op when it is there already.
fn build_standin() {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        let Some(cargo) = std::env::var_os("CARGO") else { return };
        let profile_dir = Path::new(PRODUCT).parent().unwrap();
        let profile = if profile_dir.ends_with("debug") { "dev" } else { "release" };
        let mut target_dir = profile_dir.parent().unwrap();
        let mut command = Command::new(cargo);
        command.args(["build", "--quiet", "--package", "support", "--bins", "--profile", profile]);
        // With `--target` or `build.target` there is one directory more.
        let name = target_dir.file_name().unwrap().to_str().unwrap().to_owned();
        if name.matches('-').count() >= 2 && name.contains("linux") {
            command.arg("--target").arg(name);
            target_dir = target_dir.parent().unwrap();
        }
        let status = command.arg("--target-dir").arg(target_dir).current_dir(env!("CARGO_MANIFEST_DIR")).status();
        assert!(status.unwrap().success(), "cargo could not build the stand-in and the impostor");
    });
}

/// The supervisor's process.
pub struct Supervisor {
    process: Child,
    heard: Arc<Heard>,
    reader: Option<thread::JoinHandle<()>>,
    notices: UnixDatagram,
}

/// What a supervisor has said so far.
#[derive(Default)]
struct Heard {
    said: Mutex<Said>,
    changed: Condvar,
    /// From now on its notifications are left unread.
    deaf: AtomicBool,
}

#[derive(Default)]
struct Said {
    /// On standard error.
    log: String,
    /// To the service manager.
    notices: Vec<String>,
    /// Standard error is closed: it has ended.
    ended: bool,
}

impl Heard {
    fn change(&self, change: impl FnOnce(&mut Said)) {
        change(&mut self.said.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }
}

impl Supervisor {
    /// Starts it, with a notification socket as systemd would give it.
    fn start(mut command: Command, notify: &Path) -> Self {
        let notices = UnixDatagram::bind(notify).unwrap();
        let mut process = command
            .env("NOTIFY_SOCKET", notify)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let heard = Arc::new(Heard::default());
        let (mut stderr, shared) = (process.stderr.take().unwrap(), Arc::clone(&heard));
        let reader = thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = stderr.read(&mut buffer) {
                let text = String::from_utf8_lossy(buffer.get(..read).unwrap_or_default()).into_owned();
                shared.change(|said| said.log.push_str(&text));
            }
            shared.change(|said| said.ended = true);
        });
        let (socket, shared) = (notices.try_clone().unwrap(), Arc::clone(&heard));
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            // An empty one is ours, from `drop`.
            while let Ok(read @ 1..) = socket.recv(&mut buffer) {
                let text = String::from_utf8_lossy(buffer.get(..read).unwrap_or_default()).into_owned();
                shared.change(|said| said.notices.extend(text.lines().map(str::to_owned)));
                if shared.deaf.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        Self { process, heard, reader: Some(reader), notices }
    }

    /// Waits until it has said this to the service manager since the last such wait; `false` if it ends first.
    pub fn wait_for_notice(&mut self, wanted: &str) -> bool {
        let deadline = Instant::now() + LONG;
        let mut said = self.heard.said.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(at) = said.notices.iter().position(|line| line == wanted) {
                said.notices.drain(..=at);
                return true;
            }
            if said.ended {
                return false;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the supervisor did not say '{wanted}' but {:?}", said.notices);
            said = self.heard.changed.wait_timeout(said, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// From the next notification on nobody reads them, as if the service manager were frozen.
    pub fn leave_notices_unread(&self) {
        self.heard.deaf.store(true, Ordering::Relaxed);
    }

    /// What it wrote to standard error so far.
    pub fn log(&self) -> String {
        self.heard.said.lock().unwrap_or_else(PoisonError::into_inner).log.clone()
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Its resident memory.
    pub fn resident_bytes(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * 1024
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Whether it runs.
    pub fn is_running(&mut self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }

    /// Waits for its end; gives its status and all of its standard error.
    pub fn wait(&mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + LONG;
        let mut said = self.heard.said.lock().unwrap_or_else(PoisonError::into_inner);
        while !said.ended {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the supervisor did not end:\n{}", said.log);
            said = self.heard.changed.wait_timeout(said, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let log = said.log.clone();
        drop(said);
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        (self.process.wait().unwrap(), log)
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // It may have ended already, as the test wanted.
        let _ = self.process.kill();
        let _ = self.process.wait();
        // Lets the reader of its notifications go, unless its queue is full: then it has gone.
        let _ = self.notices.set_nonblocking(true);
        if let Ok(address) = self.notices.local_addr()
            && let Some(path) = address.as_pathname()
        {
            let _ = self.notices.send_to(&[], path);
        }
    }
}
