//! Directories on a file system that does not answer (T18): a FUSE mount whose daemon is stopped.
//!
//! Whoever asks such a file system anything waits until it is dead or well again. The supervisor asks, on threads it has
//! for that, gives up in time, and serves everybody else meanwhile.

use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use opencode_pty::frame::message::{ErrorCode, Start, Words};
use opencode_pty::limits::{FOREIGN_CALL_THREADS, HANDSHAKE_TIME};
use support::peer::{Peer, Transcript};
use support::standin::Opening;

use crate::account::{GID, NAME, UID, WORKSPACE};
use crate::fixture::{Fixture, RUNTIME, SOON, wait_until};
use crate::outside::Running;

/// Less than the 3 s that one call may take: who waited for what hangs takes longer. A busy machine costs less.
const NOT_HANGING: Duration = Duration::from_millis(2_500);
/// More than the 5 s a launcher may take and the 2 s until it is killed. What six starts beside each other take on this machine
/// comes to it.
const KILLED: Duration = Duration::from_secs(9);

/// A file system of directories that are all empty, whatever their name. Its daemon is root's, its files the account's.
const DAEMON: &str = r"
import os, struct, subprocess
mount_point, allow_other = '{mount}', {allow}
fuse = os.open('{device}', os.O_RDWR)
options = f'fd={fuse},rootmode=40755,' + 'user_id={uid},group_id={gid}' + ',allow_other' * allow_other
mount = ['mount', '--internal-only', '--types=fuse', '--options=' + options, 'test', mount_point]
# The newer system calls look at what they mount, and here even root may not look.
subprocess.run(mount, pass_fds=[fuse], check=True, env={'LIBMOUNT_FORCE_MOUNT2': 'always', **os.environ})
open('{ready}', 'w').write('mounted')

def attributes(node):
    return struct.pack('<6Q10I', node, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, {uid}, {gid}, 0, 4096, 0)

nodes = {}
while True:
    request = os.read(fuse, 1 << 17)
    size, opcode, unique, node = struct.unpack_from('<IIQQ', request)
    error, answer = 0, b''
    if opcode == 26:  # INIT
        answer = struct.pack('<4I2H2I2H8I', 7, 31, 65536, 0, 0, 0, 65536, 1, 0, 0, *[0] * 8)
    elif opcode == 3:  # GETATTR
        answer = struct.pack('<QII', 0, 0, 0) + attributes(node)
    elif opcode == 1:  # LOOKUP
        name = request[40:-1]
        number = nodes.setdefault(name, len(nodes) + 2)
        answer = struct.pack('<4Q2I', number, 0, 0, 0, 0, 0) + attributes(number)
    elif opcode == 27:  # OPENDIR
        answer = struct.pack('<QII', 0, 0, 0)
    elif opcode == 17:  # STATFS
        answer = struct.pack('<5Q10I', *[0] * 5, 4096, 255, 4096, *[0] * 7)
    elif opcode in (28, 29, 18, 25):  # READDIR, RELEASEDIR, RELEASE, FLUSH
        pass
    elif opcode in (2, 36, 42):  # FORGET, INTERRUPT, BATCH_FORGET: no answer
        continue
    else:
        error = -38
    os.write(fuse, struct.pack('<IiQ', 16 + len(answer), error, unique) + answer)
";

/// The file system, mounted until dropped.
struct Fuse {
    daemon: Running,
    host: support::host::Host,
    mount: String,
    pid: String,
}

impl Fuse {
    /// Mounts it at a new directory. Without `allow_other`, even root may not look at it: the kernel says so at once.
    fn mount(fixture: &Fixture, allow_other: bool) -> Self {
        let mount = fixture
            .root(&format!("setpriv --reuid {NAME} --regid {GID} --clear-groups mktemp -d {WORKSPACE}/fuse-XXXXXX"));
        let device = "/dev/test-fuse";
        fixture.root(&format!("[ -e {device} ] || mknod -m 600 {device} c 10 229"));
        let program = DAEMON
            .replace("{mount}", &mount)
            .replace("{allow}", if allow_other { "True" } else { "False" })
            .replace("{device}", device)
            .replace("{uid}", &UID)
            .replace("{gid}", &GID);
        let daemon = Running::python(fixture, "root", &program);
        let pid = fixture.property(&daemon.unit, "MainPID");
        let host = support::host::Host::attach(fixture.host.name()).unwrap();
        let fuse = Self { daemon, host, mount, pid };
        // In every mount namespace there is, the server's among them.
        let seen = fixture.standin.spawn(&["/bin/ls", "-ld", &format!("{}/any", fuse.mount)]).unwrap();
        assert!(seen.text().starts_with(&format!("drwxr-xr-x 2 {NAME} {NAME}")), "{}", seen.text() + &seen.complaint());
        fuse
    }

    fn stop(&self) {
        self.host.sh_ok(&format!("kill -STOP {}", self.pid)).unwrap();
        wait_until("the daemon to be stopped", SOON, || {
            let state = self.host.sh_ok(&format!("grep ^State /proc/{}/status", self.pid)).unwrap();
            if state.contains("T (") { Ok(()) } else { Err(state) }
        });
    }

    fn go_on(&self) {
        let _ = self.host.sh(&format!("kill -CONT {}", self.pid));
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.go_on();
        let _ = self.host.sh(&format!(
            "umount --lazy {0}; systemctl stop {1}; rmdir {0}; rm -f /dev/test-fuse",
            self.mount, self.daemon.unit
        ));
    }
}

/// A start request for a directory, made while its file system answered.
fn request(fixture: &Fixture, path: &str, opening: Opening) -> (Start, OwnedFd) {
    let dir = fixture.standin.open_as(path, opening).unwrap();
    // By the account: root may not look everywhere.
    let seen = fixture.standin.spawn(&["/usr/bin/stat", "--format=%d %i", path]).unwrap().text();
    let (dev, ino) = seen.trim().split_once(' ').unwrap();
    let words = Words::new(vec!["true".to_owned()]).unwrap();
    (Start::new(dev.parse().unwrap(), ino.parse().unwrap(), RUNTIME, words).unwrap(), dir)
}

fn threads(fixture: &Fixture) -> usize {
    fixture.root(&format!("ls /proc/{}/task | wc -l", fixture.supervisor_pid())).trim().parse().unwrap()
}

/// How long sessions in the workspace take from connect to exit, one after the other.
fn times_of_others(fixture: &Fixture, count: usize) -> Vec<Duration> {
    let mut times: Vec<Duration> = (0..count)
        .map(|_| {
            let begun = Instant::now();
            assert_eq!(fixture.run_one_of_many(&["echo", "hi"]).text(), "hi\r\n");
            begun.elapsed()
        })
        .collect();
    times.sort();
    times
}

/// Fails if sessions wait for what hangs: each would take so much longer than without.
fn assert_not_slowed(times: &[Duration], quiet: &[Duration]) {
    let middle = |times: &[Duration]| times[times.len() / 2];
    assert!(middle(times) < middle(quiet) + NOT_HANGING, "{times:?}, quiet {quiet:?}");
    // Each of them worked. Times are held against each other in the long form, on a machine that has nothing else to do.
    if crate::flood::long() {
        assert!(middle(times) < middle(quiet) * 2 + Duration::from_millis(250), "{times:?}, quiet {quiet:?}");
        assert!(times[times.len() - 1] < Duration::from_secs(2), "{times:?}, quiet {quiet:?}");
    }
}

/// Sends the requests side by side, each on a connection of its own; what came back, and after how long.
fn send_all(fixture: &Fixture, requests: &[(Start, OwnedFd)]) -> thread::JoinHandle<Vec<(Transcript, Duration)>> {
    let begun = Instant::now();
    let peers: Vec<Peer> = requests
        .iter()
        .map(|(start, dir)| {
            let peer = fixture.standin.peer().unwrap();
            peer.send_start(start, dir.as_fd()).unwrap();
            peer
        })
        .collect();
    thread::spawn(move || {
        thread::scope(|scope| {
            let readers: Vec<_> = peers
                .into_iter()
                .map(|mut peer| scope.spawn(move || (peer.read_until_closed(SOON).unwrap(), begun.elapsed())))
                .collect();
            readers.into_iter().map(|reader| reader.join().unwrap()).collect()
        })
    })
}

#[test]
fn t18_a_directory_whose_file_system_hangs_is_refused_in_time_and_nobody_else_notices() {
    let fixture = Fixture::new();
    let pid = fixture.supervisor_pid();
    // What is opened once and kept is open from here on.
    fixture.ask(&["true"]);
    let fuse = Fuse::mount(&fixture, true);
    // It does work while it works.
    let (start, dir) = request(&fixture, &format!("{}/fine", fuse.mount), Opening::Plain);
    let fine = send_all(&fixture, &[(start, dir)]).join().unwrap().remove(0).0;
    assert_eq!(fine.exit, Some(crate::fixture::exited(0)), "{fine:?}");
    let quiet = times_of_others(&fixture, 10);
    let (threads_before, descriptors) = (threads(&fixture), fixture.idle_descriptors());

    let mut patient = fixture.start(&["cat"]);
    let requests: Vec<_> = (0..12)
        .map(|index| {
            let opening = if index % 2 == 0 { Opening::Plain } else { Opening::Path };
            request(&fixture, &format!("{}/dir-{index}", fuse.mount), opening)
        })
        .collect();
    fuse.stop();
    let refused = send_all(&fixture, &requests);
    // While they wait, and more of them than the pool has threads.
    let during = times_of_others(&fixture, 10);
    patient.input(b"hello\n").unwrap();
    patient.output_until(b"hello\r\nhello\r\n", NOT_HANGING).unwrap();
    // The pool's word, at 3 s: at 5 s the handshake ends with another, where the machine stood still in between.
    let mut late = 0;
    let mut assert_refused = |answers: Vec<(Transcript, Duration)>| {
        for (transcript, time) in answers {
            if transcript.error_code() == Some(ErrorCode::Timeout) && time >= HANDSHAKE_TIME {
                late += 1;
            } else {
                assert_eq!(transcript.error_code(), Some(ErrorCode::BadCwd), "{transcript:?} after {time:?}");
            }
        }
        assert!(late <= requests.len(), "{late} times it was not the pool's word");
    };
    assert_refused(refused.join().unwrap());
    // And once they were refused and the file system still hangs, again and again.
    for _ in 0..3 {
        assert_refused(send_all(&fixture, &requests).join().unwrap());
    }
    let after = times_of_others(&fixture, 10);
    let most = threads(&fixture);
    assert!(most <= threads_before + FOREIGN_CALL_THREADS, "{most} threads, {threads_before} before");

    fuse.go_on();
    patient.stop_and_read();
    fixture.wait_for_descriptors(descriptors, "all of it");
    let (start, dir) = request(&fixture, &format!("{}/fine", fuse.mount), Opening::Plain);
    let fine = send_all(&fixture, &[(start, dir)]).join().unwrap().remove(0).0;
    assert_eq!(fine.exit, Some(crate::fixture::exited(0)), "{fine:?}");
    assert_eq!(fixture.supervisor_pid(), pid);

    let middle = quiet[quiet.len() / 2];
    eprintln!(
        "others: {middle:?} quiet, {:?} during, {:?} after; {threads_before} to {most} threads",
        during[5], after[5]
    );
    for times in [&during, &after] {
        assert_not_slowed(times, &quiet);
    }
}

#[test]
fn t18_a_directory_that_root_may_not_look_at_hangs_the_launcher_alone() {
    let fixture = Fixture::new();
    let pid = fixture.supervisor_pid();
    let fuse = Fuse::mount(&fixture, false);
    let (start, dir) = request(&fixture, &format!("{}/fine", fuse.mount), Opening::Plain);
    let fine = send_all(&fixture, &[(start, dir)]).join().unwrap().remove(0).0;
    assert_eq!(fine.exit, Some(crate::fixture::exited(0)), "{fine:?}");
    let descriptors = fixture.idle_descriptors();
    let quiet = times_of_others(&fixture, 10);

    let requests: Vec<_> =
        (0..6).map(|index| request(&fixture, &format!("{}/dir-{index}", fuse.mount), Opening::Plain)).collect();
    fuse.stop();
    let refused = send_all(&fixture, &requests);
    let during = times_of_others(&fixture, 10);
    // A second each in a VM.
    let killed = KILLED + 6 * quiet[quiet.len() / 2];
    for (transcript, time) in refused.join().unwrap() {
        assert!(transcript.unit.is_none() && transcript.error.is_some(), "{transcript:?}");
        assert!(time < killed, "refused after {time:?}, quiet {quiet:?}");
        eprintln!("{:?} after {time:?}", transcript.error);
    }
    // Its processes are killed although they wait for the file system.
    assert_eq!(fixture.left_of_sessions(), "");
    assert_not_slowed(&during, &quiet);

    fuse.go_on();
    fixture.wait_for_descriptors(descriptors, "all of it");
    assert_eq!(fixture.supervisor_pid(), pid);
    assert_eq!(fixture.ask(&["echo", "again"]), "again");
}
