//! The other side of a threat test: the same attack where the protection is not.
//!
//! An attack that fails in a session proves little; it may fail anywhere. So each test shows first that it succeeds:
//! as the account in a plain transient unit ([`outside`]), in a session whose launcher is [`Naive`], or on a host whose
//! operator changed a unit ([`DropIn`]). All of it is undone when dropped.

use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use support::host::{Host, STANDIN_PATH};
pub use support::host::{SERVER, SUPERVISOR};

use crate::account::NAME;
use crate::fixture::{Fixture, SOON, wait_until};

/// The program that connects and says what the supervisor did.
pub const PROBE: &str = STANDIN_PATH;

/// A command that runs as the account in a plain transient unit with these properties, and is waited for.
pub fn outside_command(fixture: &Fixture, properties: &[&str], words: &[&str]) -> Command {
    let mut command = fixture.host.command("systemd-run");
    command.args(["--quiet", "--pipe", "--wait", "--collect", &format!("--property=User={NAME}")]);
    command.args(properties.iter().map(|property| format!("--property={property}")));
    // systemd-run(1) has the manager expand what looks like a variable.
    command.arg("--").args(words.iter().map(|word| word.replace('$', "$$"))).stdin(Stdio::null());
    command
}

/// Runs it; gives what it printed. It must succeed.
pub fn outside(fixture: &Fixture, properties: &[&str], words: &[&str]) -> String {
    text(&outside_command(fixture, properties, words).output().unwrap())
}

/// What a command that must have succeeded printed, without the last line end.
pub fn text(output: &Output) -> String {
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {stdout}{}", output.status, String::from_utf8_lossy(&output.stderr));
    stdout.trim_end().to_owned()
}

/// The next [`Running`]'s number.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Something that runs as long as this is held, in a transient unit of its own.
pub struct Running {
    host: Host,
    /// Its unit.
    pub unit: String,
}

impl Running {
    /// Starts a Python program as the account; returns when it has created the file that `{ready}` in it stands for.
    pub fn python(fixture: &Fixture, user: &str, program: &str) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let (unit, ready) = (format!("test-{number}.service"), format!("/run/test-ready-{number}"));
        let program = program.replace("{ready}", &ready);
        fixture.root(&format!("install -o {user} -m 600 /dev/null {ready}"));
        let mut command = fixture.host.command("systemd-run");
        command.args(["--quiet", "--collect", &format!("--unit={unit}"), &format!("--property=User={user}")]);
        text(&command.args(["--", "/usr/bin/python3", "-c", &program.replace('$', "$$")]).output().unwrap());
        let running = Self { host: again(&fixture.host), unit };
        wait_until(&format!("{} to be ready", running.unit), SOON, || match std::fs::read(fixture.host.path(&ready)) {
            Ok(bytes) if !bytes.is_empty() => Ok(()),
            _ if fixture.has_cgroup(&running.unit) => Err("it runs".to_owned()),
            _ => Err(fixture.root(&format!("systemctl status --no-pager {} || true", running.unit))),
        });
        fixture.root(&format!("rm {ready}"));
        running
    }

    /// Starts a command in a unit of this name with these properties; returns when it has been executed.
    pub fn start(fixture: &Fixture, name: &str, properties: &[&str], words: &[&str]) -> Self {
        let mut command = fixture.host.command("systemd-run");
        command.args(["--quiet", "--collect", "--service-type=exec", &format!("--unit={name}")]);
        command.args(properties.iter().map(|property| format!("--property={property}")));
        text(&command.arg("--").args(words.iter().map(|word| word.replace('$', "$$"))).output().unwrap());
        Self { host: again(&fixture.host), unit: format!("{name}.service") }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // However it ends, the manager forgets it: `--collect`.
        let _ = self.host.run_ok("systemctl", &["stop", &self.unit]);
    }
}

/// A second handle on the same host, for what outlives a borrow of the first.
fn again(host: &Host) -> Host {
    Host::attach(host.name()).unwrap()
}

/// An operator's drop-in, in force from now until dropped. What it changes may need a restart; that is the test's.
pub struct DropIn {
    host: Host,
    directory: String,
    file: String,
}

impl DropIn {
    /// Writes a drop-in with these lines, and reloads the manager.
    pub fn new(fixture: &Fixture, unit: &str, lines: &str) -> Self {
        let directory = format!("/run/systemd/system/{unit}.d");
        let file = format!("{directory}/90-test.conf");
        std::fs::create_dir_all(fixture.host.path(&directory)).unwrap();
        let mut created = File::create_new(fixture.host.path(&file)).unwrap();
        writeln!(created, "{lines}").unwrap();
        fixture.systemctl(&["daemon-reload"]);
        Self { host: again(&fixture.host), directory, file }
    }
}

impl Drop for DropIn {
    fn drop(&mut self) {
        let (file, directory) = (&self.file, &self.directory);
        let _ = self.host.sh(&format!("rm -f {file}; rmdir {directory}; systemctl daemon-reload"));
    }
}

/// Restarts supervisor and server when dropped, after whatever was declared behind it is undone: declare it first.
pub struct RestartAtEnd {
    host: Host,
}

impl RestartAtEnd {
    /// For the supervisor and, with it, the server.
    pub fn new(fixture: &Fixture) -> Self {
        Self { host: again(&fixture.host) }
    }
}

impl Drop for RestartAtEnd {
    fn drop(&mut self) {
        let units = format!("{SUPERVISOR} {SERVER}");
        let _ = self.host.sh(&format!("systemctl reset-failed {units}; systemctl restart {units}"));
    }
}

/// Answers for the launcher and does nothing of what it does: no groups dropped, no directory of its own, no domain.
/// The unit with all its properties stays, so what succeeds here and not in a session is held by the launcher.
const NAIVE: &str = r#"#!/usr/bin/perl
sub take {
    my ($count, $bytes) = (@_, "");
    while (length $bytes < $count) { sysread(STDIN, $bytes, $count - length $bytes, length $bytes) or exit 71 }
    $bytes
}
my $body = take(unpack("x8 N", take(12)));
my ($size, $count) = unpack("x20 n n", $body);
my @words = (substr($body, 24, $size), unpack("(n/a*)$count", substr($body, 24 + $size)));
my $answer = "groups=dropped landlock=none scope=none";
syswrite(STDOUT, pack("a4 C C x2 N/a*", "OPTY", 1, 6, $answer));
syscall(81, 2) == 0 or exit 71; # fchdir
open(STDERR, ">&", STDOUT);
exec { $words[0] } @words;
exit 71;
"#;
const NAIVE_PATH: &str = "/usr/local/libexec/test-naive-launcher";

/// The host with [`NAIVE`] in the launcher's place, until dropped.
pub struct Naive {
    // In this order: the drop-in goes, the units restart without it, the fixture looks whether all is as found.
    _drop_in: DropIn,
    _restart: RestartAtEnd,
    /// Sessions of it.
    pub fixture: Fixture,
}

impl Naive {
    /// Installs it and restarts the supervisor.
    pub fn new() -> Self {
        let mut fixture = Fixture::new();
        fixture.remove_at_end(NAIVE_PATH);
        std::fs::write(fixture.host.path(NAIVE_PATH), NAIVE).unwrap();
        std::fs::set_permissions(fixture.host.path(NAIVE_PATH), Permissions::from_mode(0o755)).unwrap();
        let program = "/usr/local/libexec/opencode-pty-supervisor";
        let restart = RestartAtEnd::new(&fixture);
        let lines = format!("[Service]\nExecStart=\nExecStart={program} --account {NAME} --launcher {NAIVE_PATH}");
        let drop_in = DropIn::new(&fixture, SUPERVISOR, &lines);
        fixture.restart_supervisor();
        Self { _drop_in: drop_in, _restart: restart, fixture }
    }
}
