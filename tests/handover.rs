//! The small roles as they are started: the real program, its descriptors, and no systemd.
//!
//! The client is tried as whoever runs the tests. The launcher needs CAP_SETGID as its unit gives it, so what it
//! does from step 3 on takes root and setpriv(1) here; run by an ordinary user, those tests say that they are not
//! applicable, and `cargo xtask test` runs them both ways.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::fs::{self, File, Permissions};
use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use opencode_pty::frame::message::{Start, Words, decode_error};
use opencode_pty::frame::words::encode_word;
use opencode_pty::frame::{self, Header, Kind};
use opencode_pty::launcher::domain::Isolation;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use support::programs;

const PROGRAM: &str = env!("CARGO_BIN_EXE_opencode-pty");

/// A directory of one test's own, open to everybody, removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("opencode-pty-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        Self(path.canonicalize().unwrap())
    }

    fn directory(&self, name: &str, mode: u32) -> PathBuf {
        let path = self.0.join(name);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn receive_frame(stream: &mut UnixStream) -> (Kind, Vec<u8>) {
    let mut header = [0; 12];
    stream.read_exact(&mut header).unwrap();
    let header = Header::decode(&header).unwrap();
    let mut payload = vec![0; header.payload_len()];
    stream.read_exact(&mut payload).unwrap();
    (header.kind(), payload)
}

// ---- the client --------------------------------------------------------------------------------------------

/// The client with these as descriptors 3 and 4, and whatever `more` opens.
fn client_command(socket: OwnedFd, directory: OwnedFd, more: &str, args: &[&str]) -> Command {
    let mut shell = Command::new("sh");
    let script = format!("exec 3<&0 4<&1 0</dev/null 1>/dev/null {more}; exec \"$@\"");
    shell.args(["-c", &script, "sh", PROGRAM, "client"]).args(args);
    shell.stdin(socket).stdout(directory).stderr(Stdio::piped());
    shell
}

fn client(socket: impl Into<OwnedFd>, directory: impl Into<OwnedFd>, args: &[&str]) -> Output {
    client_command(socket.into(), directory.into(), "", args).output().unwrap()
}

/// Everything there is to read, and the descriptors that came with it.
fn receive_all(stream: &UnixStream) -> (Vec<u8>, Vec<OwnedFd>) {
    let (mut bytes, mut descriptors) = (Vec::new(), Vec::new());
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut part = [0; 4096];
        let received =
            recvmsg(stream, &mut [IoSliceMut::new(&mut part)], &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        match received.bytes {
            0 => return (bytes, descriptors),
            count => bytes.extend_from_slice(&part[..count]),
        }
    }
}

#[test]
fn the_client_sends_one_start_frame_with_exactly_the_directory() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let directory = File::open("/usr").unwrap();
    let words = ["sh", "", "a b\n", "$HOME"];
    let encoded = words.map(encode_word);
    let mut args = vec!["60"];
    args.extend(encoded.iter().map(String::as_str));

    let output = client(theirs, directory, &args);

    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    let (bytes, descriptors) = receive_all(&ours);
    let start = Start::decode(&bytes[12..]).unwrap();
    assert_eq!(Header::decode(bytes[..12].try_into().unwrap()).unwrap().kind(), Kind::Start);
    assert_eq!(start.words().as_slice(), words);
    assert_eq!(start.runtime_seconds(), 60);
    let wanted = fs::metadata("/usr").unwrap();
    assert_eq!((start.dev(), start.ino()), (wanted.dev(), wanted.ino()));
    let [received] = descriptors.as_slice() else { panic!("{} descriptors", descriptors.len()) };
    let received = rustix::fs::fstat(received).unwrap();
    assert_eq!((received.st_dev, received.st_ino), (wanted.dev(), wanted.ino()));
}

#[test]
fn the_largest_start_frame_arrives_whole_with_one_descriptor() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    // The smallest buffer the kernel gives, so that the frame can only go in parts.
    rustix::net::sockopt::set_socket_send_buffer_size(&theirs, 1).unwrap();
    theirs.set_nonblocking(true).unwrap();
    let mut words = vec!["c".repeat(4_096)];
    words.extend((0..128).map(|n| char::from(b'a' + n % 26).to_string().repeat(512)));
    let encoded: Vec<String> = words.iter().map(|word| encode_word(word)).collect();
    let mut args = vec!["0"];
    args.extend(encoded.iter().map(String::as_str));
    let reader = std::thread::spawn(move || receive_all(&ours));

    let output = client(theirs, File::open("/").unwrap(), &args);

    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let (bytes, descriptors) = reader.join().unwrap();
    assert_eq!(Start::decode(&bytes[12..]).unwrap().words().as_slice(), words);
    assert_eq!(descriptors.len(), 1);
}

#[test]
fn the_client_says_in_one_line_what_it_refuses_and_sends_nothing() {
    let root = || File::open("/").unwrap();
    let word = encode_word("true");
    let long = encode_word(&"x".repeat(16_385));
    let cases: Vec<Vec<&str>> = vec![
        vec![],
        vec!["0"],
        vec!["--help", "x"],
        vec!["01", &word],
        vec!["3601", &word],
        vec!["+1", &word],
        vec!["", &word],
        vec!["0", "true"],
        vec!["0", "a"],
        vec!["0", "adHJ1ZR"],
        vec!["0", "adHJ1ZQ=="],
        vec!["0", &word, &long],
    ];
    for args in cases {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let output = client(theirs, root(), &args);
        assert_eq!(output.status.code(), Some(64), "{args:?}: {output:?}");
        let line = String::from_utf8(output.stderr).unwrap();
        assert!(line.starts_with("opencode-pty client: ") && line.lines().count() == 1, "{line}");
        let (bytes, descriptors) = receive_all(&ours);
        assert!(bytes.is_empty() && descriptors.is_empty());
    }
}

#[test]
fn descriptors_that_are_not_the_socket_and_the_directory_are_refused() {
    let word = encode_word("true");
    let args = ["0", word.as_str()];
    let file = || File::open("/etc/passwd").unwrap();
    let root = || File::open("/").unwrap();

    let output = client(UnixStream::pair().unwrap().0, file(), &args);
    assert_eq!(output.status.code(), Some(64), "4 is a file: {output:?}");
    let output = client(root(), root(), &args);
    assert_eq!(output.status.code(), Some(64), "3 is a directory: {output:?}");
    let datagrams = std::os::unix::net::UnixDatagram::pair().unwrap();
    let output = client(datagrams.0, root(), &args);
    assert_eq!(output.status.code(), Some(64), "3 is a datagram socket: {output:?}");
    let scratch = Scratch::new("listener");
    let listener = std::os::unix::net::UnixListener::bind(scratch.0.join("socket")).unwrap();
    let output = client(listener, root(), &args);
    assert_eq!(output.status.code(), Some(64), "3 has no peer: {output:?}");
    for closed in ["3<&-", "4<&-"] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let output = client_command(theirs.into(), root().into(), closed, &args).output().unwrap();
        assert_eq!(output.status.code(), Some(64), "{closed}: {output:?}");
        assert!(receive_all(&ours).0.is_empty());
    }
}

#[test]
fn a_supervisor_that_has_gone_is_a_system_error() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(ours);
    // A child that another test starts has a copy of it until it executes its program: this waits for that.
    assert_eq!((&theirs).read(&mut [0]).unwrap(), 0);
    let output = client(theirs, File::open("/").unwrap(), &["0", &encode_word("true")]);
    assert_eq!(output.status.code(), Some(71), "{output:?}");
}

#[test]
fn a_socket_that_stays_full_times_out_and_what_node_leaked_was_closed_before() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    while theirs.write(&[0; 4096]).is_ok() {}
    let flags = rustix::fs::fcntl_getfl(&ours).unwrap();
    let scratch = Scratch::new("leak");
    let fifo = scratch.0.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // Both ends, so that neither open waits for the other.
    let held = File::options().read(true).write(true).open(&fifo).unwrap();
    let mut reader = File::open(&fifo).unwrap();
    let leak = format!("7>'{}'", fifo.display());
    let begun = Instant::now();

    let mut child = client_command(theirs.into(), File::open("/").unwrap().into(), &leak, &["0", &encode_word("true")])
        .spawn()
        .unwrap();
    // The shell has opened its end by the time it is a client; the end of file then says that the client closed it.
    wait_for_program(&child, PROGRAM);
    drop(held);
    assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0);
    // A process that ends gives up its whole table at once, so this one is still trying.
    assert!(fs::read_link(format!("/proc/{}/fd/3", child.id())).is_ok(), "closed only by ending");

    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(75));
    assert!(begun.elapsed() >= Duration::from_secs(5));
    assert_eq!(rustix::fs::fcntl_getfl(&ours).unwrap(), flags);
}

/// Waits until the child has executed `program`.
fn wait_for_program(child: &Child, program: &str) {
    let link = format!("/proc/{}/exe", child.id());
    let wanted = fs::canonicalize(program).unwrap();
    while fs::read_link(&link).unwrap() != wanted {
        std::thread::yield_now();
    }
}

#[test]
fn help_is_on_standard_output_and_no_error() {
    for (role, word) in [("client", "--help"), ("client", "-h"), ("launcher", "--help")] {
        let output = Command::new(PROGRAM).args([role, word]).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(output.stderr.is_empty());
        assert!(String::from_utf8(output.stdout).unwrap().contains("Exit codes:"));
    }
}

// ---- the launcher ------------------------------------------------------------------------------------------

/// Whoever runs the tests as root lends the launcher what its unit does.
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn not_applicable(needs: &str) {
    eprintln!("not applicable: this test needs to run as {needs}");
}

/// Both ends of a hand-over: what the supervisor holds, and the launcher as a process.
struct Session {
    pair: UnixStream,
    launcher: Child,
}

impl Session {
    fn start(mut command: Command, directory: impl Into<OwnedFd>) -> Self {
        let (pair, theirs) = UnixStream::pair().unwrap();
        pair.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let launcher = command
            .stdin(OwnedFd::from(theirs.try_clone().unwrap()))
            .stdout(OwnedFd::from(theirs))
            .stderr(directory.into())
            .spawn()
            .unwrap();
        // The command holds copies of the launcher's end, which would hide its closing.
        drop(command);
        Self { pair, launcher }
    }

    fn send(&mut self, kind: Kind, payload: &[u8]) -> &mut Self {
        self.pair.write_all(&frame::encode(kind, payload).unwrap()).unwrap();
        self
    }

    fn refused(mut self) -> (String, String) {
        let (kind, payload) = receive_frame(&mut self.pair);
        assert_eq!(kind, Kind::Error);
        let (code, message) = decode_error(&payload).unwrap();
        assert_eq!(self.launcher.wait().unwrap().code(), Some(71));
        // A launcher that leaves bytes unread resets the connection by ending.
        let mut rest = Vec::new();
        let end = self.pair.read_to_end(&mut rest).map_err(|error| error.kind());
        assert!(matches!(end, Ok(0) | Err(io::ErrorKind::ConnectionReset)), "behind the frame: {end:?} {rest:?}");
        assert!(rest.is_empty());
        (code.to_string(), message)
    }

    fn started(&mut self) -> Isolation {
        let (kind, payload) = receive_frame(&mut self.pair);
        let payload = String::from_utf8(payload).unwrap();
        assert_eq!(kind, Kind::Started, "{payload}");
        Isolation::decode(&payload).unwrap()
    }

    /// The terminal's bytes up to the end, and how script(1) exited.
    fn ended(mut self) -> (String, i32) {
        let mut output = Vec::new();
        self.pair.read_to_end(&mut output).unwrap();
        (String::from_utf8(output).unwrap(), self.launcher.wait().unwrap().code().unwrap())
    }
}

fn plain_launcher() -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg0("opencode-pty-launcher");
    command
}

/// A copy of the program that every account may execute.
fn installed(scratch: &Scratch) -> PathBuf {
    let copy = scratch.0.join("opencode-pty-launcher");
    if !copy.exists() {
        programs::copy(Path::new(PROGRAM), &copy);
    }
    copy
}

/// The launcher as a unit starts it: an ordinary account with the groups it has, and CAP_SETGID. And as no unit
/// does, with every signal ignored or blocked.
fn unit_launcher(scratch: &Scratch) -> Command {
    let mut command = Command::new("env");
    command.args(["--ignore-signal", "--block-signal", "setpriv", "--reuid=65534", "--regid=65534", "--groups=4,27"]);
    command.args(["--inh-caps=-all,+setgid", "--ambient-caps=+setgid", "--bounding-set=-all,+setgid"]);
    command.arg("--no-new-privs").arg(installed(scratch));
    command
}

fn start_in(directory: &Path, words: &[&str]) -> Vec<u8> {
    let metadata = fs::metadata(directory).unwrap();
    let words = Words::new(words.iter().map(|word| (*word).to_owned()).collect()).unwrap();
    Start::new(metadata.dev(), metadata.ino(), 60, words).unwrap().encode()
}

/// Runs a command in `directory` as a unit would, up to its end.
fn run_in(scratch: &Scratch, directory: &Path, words: &[&str]) -> (String, i32) {
    let mut session = Session::start(unit_launcher(scratch), File::open(directory).unwrap());
    session.send(Kind::Start, &start_in(directory, words));
    session.started();
    session.ended()
}

#[test]
fn without_the_units_capability_the_launcher_names_the_groups_and_starts_nothing() {
    if is_root() {
        return not_applicable("an ordinary user");
    }
    let root = Path::new("/");
    let mut session = Session::start(plain_launcher(), File::open(root).unwrap());
    session.send(Kind::Start, &start_in(root, &["true"]));

    let (code, message) = session.refused();

    assert_eq!(code, "start-failed");
    assert_eq!(message, "cannot drop the supplementary groups: Operation not permitted (os error 1)");
}

#[test]
fn a_launcher_started_by_hand_says_so_in_one_line() {
    let output = plain_launcher().stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(71));
    assert!(output.stdout.is_empty());
    let line = String::from_utf8(output.stderr).unwrap();
    assert!(line.starts_with("opencode-pty launcher: only the supervisor starts this"), "{line}");
    assert_eq!(line.lines().count(), 1);

    let output = plain_launcher().arg("x").stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(64));
}

#[test]
fn a_launcher_whose_input_and_output_differ_does_not_answer() {
    let (first, second) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    let mut child = plain_launcher().stdin(OwnedFd::from(first.1)).stdout(OwnedFd::from(second.1)).spawn().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(71));
    for mut end in [first.0, second.0] {
        assert_eq!(end.read(&mut [0; 1]).unwrap(), 0);
    }
}

#[test]
fn what_is_no_start_frame_is_refused_before_anything_is_done() {
    let good = frame::encode(Kind::Start, &start_in(Path::new("/"), &["true"])).unwrap();
    let mut trailing = good.clone();
    trailing[11] += 1;
    trailing.push(0);
    for (bytes, want) in [
        (&b"GET / HTTP/1.0\r\n\r\n"[..], "what came is no start frame: "),
        (&frame::encode(Kind::Input, b"ls\n").unwrap(), "what came is no start frame: "),
        (&frame::encode(Kind::Stop, b"").unwrap(), "what came is no start frame: "),
        (&trailing, "what came is no start frame: "),
        (&good[..good.len() - 1], "no complete start frame came: "),
        (&good[..5], "no complete start frame came: "),
        (b"", "no complete start frame came: "),
    ] {
        let mut session = Session::start(plain_launcher(), File::open("/").unwrap());
        session.pair.write_all(bytes).unwrap();
        session.pair.shutdown(std::net::Shutdown::Write).unwrap();
        let (code, message) = session.refused();
        assert_eq!(code, "bad-start");
        assert!(message.starts_with(want), "{message}");
    }
}

#[test]
fn silence_is_refused_after_five_seconds() {
    let begun = Instant::now();
    let (code, message) = Session::start(plain_launcher(), File::open("/").unwrap()).refused();
    assert_eq!((code.as_str(), message.as_str()), ("bad-start", "no complete start frame came: timed out"));
    assert!(begun.elapsed() >= Duration::from_secs(5));
}

#[test]
fn a_whole_session_runs_its_command_in_the_directory_with_nothing_but_what_it_should_have() {
    if !is_root() {
        return not_applicable("root");
    }
    let scratch = Scratch::new("session");
    let work = scratch.directory("work place", 0o755);
    let mut session = Session::start(unit_launcher(&scratch), File::open(&work).unwrap());
    // The outer shell has every signal blocked until it comes round after its fork.
    let script = "until grep -q '^SigBlk:.0*$' /proc/$PPID/status; do sleep 0.01; done; \
                  pwd; printf '%s|' \"$@\"; echo; cat /proc/self/status; \
                  sed -n 's/^Sig/outer &/p' /proc/$PPID/status; ls -l /proc/self/fd; stty size; env; exit 7";
    session.send(Kind::Start, &start_in(&work, &["sh", "-c", script, "sh", "", "a b", "$HOME", "'\"`id`"]));

    let isolation = session.started();
    let (output, code) = session.ended();

    println!("{isolation}\n{output}");
    assert_eq!(code, 7);
    let lines: Vec<&str> = output.split("\r\n").collect();
    assert_eq!(lines[0], work.to_str().unwrap());
    assert_eq!(lines[1], "|a b|$HOME|'\"`id`|");
    for line in [
        "Groups:\t ",
        "CapInh:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "CapAmb:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
        "SigBlk:\t0000000000000000",
        "SigIgn:\t0000000000000000",
        // The shell that script(1) runs is what a stop has to end as well, with TERM; ^C and ^\ are the command's.
        "outer SigBlk:\t0000000000000000",
        "outer SigIgn:\t0000000000000006",
        "Gid:\t65534\t65534\t65534\t65534",
        "24 80",
    ] {
        assert!(lines.contains(&line), "{line:?} is missing");
    }
    // 0, 1, 2 are the terminal; 3 is ls's own look at /proc.
    let descriptors: Vec<&str> = lines.iter().filter_map(|line| line.split_once(" -> ")).map(|(_, to)| to).collect();
    let [zero, one, two, _own] = descriptors.as_slice() else { panic!("{descriptors:?}") };
    assert!(zero.starts_with("/dev/pts/") && zero == one && one == two, "{descriptors:?}");
    // A shell adds PWD, and perhaps OLDPWD, SHLVL and `_`, of its own.
    let mut names: Vec<&str> = lines.iter().filter_map(|line| line.split_once('=')).map(|(name, _)| name).collect();
    names.retain(|name| !["PWD", "OLDPWD", "SHLVL", "_"].contains(name));
    names.sort_unstable();
    assert_eq!(names, ["HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "USER"]);
}

#[test]
fn what_can_not_be_executed_is_one_line_and_a_shells_exit_code() {
    if !is_root() {
        return not_applicable("root");
    }
    let scratch = Scratch::new("execute");
    let work = scratch.directory("work", 0o755);
    for (name, mode, content) in
        [("plain", 0o644, "echo hi\n"), ("ls", 0o755, "#!/bin/sh\necho wrong\n"), ("bare", 0o755, "echo $# $1\n")]
    {
        programs::write(&work.join(name), content);
        fs::set_permissions(work.join(name), Permissions::from_mode(mode)).unwrap();
    }
    for (words, want, code) in [
        (&["no-such-command"][..], "opencode-pty: 'no-such-command': command not found\r\n", 127),
        (&["plain"], "opencode-pty: 'plain': command not found\r\n", 127),
        (&["./nothing"], "opencode-pty: './nothing': No such file or directory (os error 2)\r\n", 127),
        (&["./plain"], "opencode-pty: './plain': Permission denied (os error 13)\r\n", 126),
        (&["/"], "opencode-pty: '/': Permission denied (os error 13)\r\n", 126),
        (&["ls", "-d", "."], ".\r\n", 0),
        (&["./bare", "a b"], "1 a b\r\n", 0),
        // script(1)'s own shell says the word.
        (&["sh", "-c", "kill -KILL $$"], "Killed\r\n", 137),
    ] {
        assert_eq!(run_in(&scratch, &work, words), (want.to_owned(), code), "{words:?}");
    }
}

#[test]
fn a_directory_that_is_not_the_frames_or_can_not_be_reached_is_bad_cwd() {
    if !is_root() {
        return not_applicable("root");
    }
    let scratch = Scratch::new("directory");
    let work = scratch.directory("work", 0o755);
    let other = scratch.directory("other", 0o755);
    let private = scratch.directory("private", 0o700);
    let group = scratch.directory("group", 0o750);
    std::os::unix::fs::chown(&group, Some(0), Some(27)).unwrap();
    let deleted = scratch.directory("deleted", 0o755);
    let deleted_frame = start_in(&deleted, &["true"]);
    let held = File::open(&deleted).unwrap();
    fs::remove_dir(&deleted).unwrap();
    fs::create_dir(scratch.0.join("deleted (deleted)")).unwrap();
    let file = File::open("/etc/passwd").unwrap();

    let not_approved = "descriptor 2 is not the directory of the start frame";
    let unsearchable = "the directory cannot be searched: Permission denied (os error 13)";
    for (directory, frame, want) in [
        (File::open(&other).unwrap(), start_in(&work, &["true"]), not_approved),
        (file, start_in(Path::new("/etc/passwd"), &["true"]), not_approved),
        (held, deleted_frame, "the directory's path leads to another one in the session's own mounts"),
        (File::open(&private).unwrap(), start_in(&private, &["true"]), unsearchable),
        // Only a group that step 2 drops could search it.
        (File::open(&group).unwrap(), start_in(&group, &["true"]), unsearchable),
    ] {
        let mut session = Session::start(unit_launcher(&scratch), directory);
        session.send(Kind::Start, &frame);
        let (code, message) = session.refused();
        assert_eq!((code.as_str(), message.as_str()), ("bad-cwd", want));
    }
}

#[test]
fn a_directory_of_other_mounts_is_reached_by_the_sessions_own_or_not_at_all() {
    if !is_root() {
        return not_applicable("root");
    }
    let scratch = Scratch::new("mounts");
    let work = scratch.directory("work", 0o755);
    let inner = scratch.directory("hidden", 0o755);
    // A child in other mounts, whose /proc/PID/root leads there. There, `hidden` is a file system of its own.
    let mut elsewhere = Command::new("unshare")
        .args(["--mount", "sh", "-c", "mount -t tmpfs none \"$1\" && echo ready && exec sleep 60", "sh"])
        .arg(&inner)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    elsewhere.stdout.take().unwrap().read_exact(&mut [0; 6]).unwrap();
    let through = |path: &Path| PathBuf::from(format!("/proc/{}/root{}", elsewhere.id(), path.display()));

    let mut session = Session::start(unit_launcher(&scratch), File::open(through(&work)).unwrap());
    session.send(Kind::Start, &start_in(&work, &["sh", "-c", "stat -f -c %T ../hidden; pwd"]));
    session.started();
    let (output, _) = session.ended();
    let mut session = Session::start(unit_launcher(&scratch), File::open(through(&inner)).unwrap());
    session.send(Kind::Start, &start_in(&through(&inner), &["true"]));
    let (code, message) = session.refused();
    elsewhere.kill().unwrap();
    elsewhere.wait().unwrap();

    let own = Command::new("stat").args(["-f", "-c", "%T"]).arg(&inner).output().unwrap().stdout;
    let own = String::from_utf8(own).unwrap();
    assert_eq!(output, format!("{}\r\n{}\r\n", own.trim(), work.display()), "`..` stays in the session's mounts");
    assert_eq!(code, "bad-cwd");
    assert!(message.contains("leads to another one"), "{message}");
}

#[test]
fn a_second_launcher_on_the_same_descriptors_finds_nothing_to_run() {
    if !is_root() {
        return not_applicable("root");
    }
    let scratch = Scratch::new("restart");
    let work = scratch.directory("work", 0o777);
    let (mut pair, theirs) = UnixStream::pair().unwrap();
    let directory = File::open(&work).unwrap();
    let launch = || {
        let end = |fd: &dyn Fn() -> io::Result<OwnedFd>| Stdio::from(fd().unwrap());
        let socket = || theirs.as_fd().try_clone_to_owned();
        unit_launcher(&scratch)
            .stdin(end(&socket))
            .stdout(end(&socket))
            .stderr(directory.try_clone().unwrap())
            .spawn()
            .unwrap()
    };
    let start = start_in(&work, &["sh", "-c", "echo ran >>ran"]);
    pair.write_all(&frame::encode(Kind::Start, &start).unwrap()).unwrap();
    assert_eq!(launch().wait().unwrap().code(), Some(0));
    assert_eq!(receive_frame(&mut pair).0, Kind::Started);

    assert_eq!(launch().wait().unwrap().code(), Some(71));

    let (kind, payload) = receive_frame(&mut pair);
    assert_eq!((kind, decode_error(&payload).unwrap().0.word()), (Kind::Error, "bad-start"));
    assert_eq!(fs::read_to_string(work.join("ran")).unwrap(), "ran\n");
}

// ---- inner-exec --------------------------------------------------------------------------------------------

/// Inner-exec as the shell executes it, with signals ignored, and with `argv` and a stranger's variables to read.
fn inner_exec(scratch: &Scratch, argv: Option<&str>) -> Output {
    let mut command = Command::new(if is_root() { "setpriv" } else { "env" });
    if is_root() {
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    }
    let script = "trap '' HUP TERM USR1; exec 3<\"$1\" 9</dev/null; exec /proc/self/fd/3 --exec";
    command.args(["sh", "-c", script, "sh"]).arg(installed(scratch)).stdin(Stdio::null());
    command.env_remove("OPENCODE_PTY_ARGV").env("HOME", "/stranger").env("LD_PRELOAD_X", "1");
    if let Some(argv) = argv {
        command.env("OPENCODE_PTY_ARGV", argv);
    }
    command.output().unwrap()
}

#[test]
fn inner_exec_without_words_runs_nothing() {
    let scratch = Scratch::new("words");
    for argv in [None, Some(""), Some("a"), Some("b"), Some("dHJ1ZQ"), Some("adHJ1ZQ."), Some("adHJ1ZQ=="), Some("aAA")]
    {
        let output = inner_exec(&scratch, argv);
        assert_eq!(output.status.code(), Some(64), "{argv:?}: {output:?}");
        assert!(output.stdout.is_empty());
        let line = String::from_utf8(output.stderr).unwrap();
        assert!(line.starts_with("opencode-pty: OPENCODE_PTY_ARGV ") && line.lines().count() == 1, "{line}");
    }
}

#[test]
fn inner_exec_believes_its_environment_nothing_but_the_words() {
    let scratch = Scratch::new("inner");
    let script = "env; grep ^SigIgn: /proc/self/status; ls /proc/self/fd";
    let argv = ["sh", "-c", script].map(encode_word).join(".");

    let output = inner_exec(&scratch, Some(&argv));

    let output = String::from_utf8(output.stdout).unwrap();
    assert!(!output.contains("stranger") && !output.contains("LD_PRELOAD") && !output.contains("PTY_ARGV"), "{output}");
    assert!(output.contains("SigIgn:\t0000000000000000\n0\n1\n2\n3\n"), "{output}");
    assert!(!output.contains("\n9\n"), "{output}");
}
