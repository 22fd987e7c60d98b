//! The readiness verifier against every marker, binary and directory that is not as it must be, under dash and busybox.
//!
//! Each test has a directory root of its own with one shell, stat(1) and sha256sum(1) in it and nothing else, and runs the
//! verifier there by its path, as the server's account does, since its paths cannot be changed from outside. Needs root:
//! `cargo xtask test` runs it, plain `cargo test` does not. On a real host `tests/system/readiness.rs` runs it, started by
//! systemd.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use support::host::workspace;
use support::programs;
use support::readiness::{MARKER_PATH, TEMPLATE_PATH, VERIFIER_PATH, marker, render, revision_line};

/// A shell, with the stat(1) and sha256sum(1) that go with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shell {
    /// dash and coreutils.
    Dash,
    /// busybox alone.
    Busybox,
}

const SHELLS: [Shell; 2] = [Shell::Dash, Shell::Busybox];

const BINARY: &str = "not a program, but the verifier only hashes it\n";

/// A directory root on which all is as it must be.
struct Root {
    path: PathBuf,
}

fn revision() -> String {
    revision_line(&"0123456789abcdef".repeat(3)[..40], &"fedcba98".repeat(8))
}

impl Root {
    fn new(shell: Shell) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("opencode-pty-readiness-{}-{number}", std::process::id()));
        fs::create_dir(&path).unwrap();
        let root = Self { path };
        root.set_mode("/", 0o755);
        fs::create_dir(root.at("/bin")).unwrap();
        match shell {
            Shell::Dash => {
                for (program, name) in [("dash", "sh"), ("stat", "stat"), ("sha256sum", "sha256sum")] {
                    root.copy_program(program, name);
                }
            }
            Shell::Busybox => {
                root.copy_program("busybox", "busybox");
                for name in ["sh", "stat", "sha256sum"] {
                    symlink("busybox", root.at("/bin").join(name)).unwrap();
                }
            }
        }
        root.make_ready();
        root
    }

    fn at(&self, path: &str) -> PathBuf {
        self.path.join(path.trim_start_matches('/'))
    }

    fn set_mode(&self, path: &str, mode: u32) {
        fs::set_permissions(self.at(path), fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Copies a program of this machine with the libraries it is linked to.
    fn copy_program(&self, program: &str, name: &str) {
        let script = "program=$(command -v \"$1\") || { echo \"$1 is not installed\" >&2; exit 1; }
            cp -L \"$program\" \"$2/bin/$3\"
            for library in $(ldd \"$program\" | grep -o '/[^ ]*'); do
                mkdir -p \"$2$(dirname \"$library\")\" && cp -L \"$library\" \"$2$library\"
            done";
        let copied = Command::new("sh").args(["-ec", script, "sh", program]).arg(&self.path).arg(name).status();
        assert!(copied.unwrap().success(), "{program}");
    }

    /// Installs binary, verifier and marker anew, as they must be.
    fn make_ready(&self) {
        for path in ["/etc", "/usr"] {
            if self.at(path).exists() {
                fs::remove_dir_all(self.at(path)).unwrap();
            }
        }
        chown(&self.path, Some(0), Some(0)).unwrap();
        self.set_mode("/", 0o755);
        let template = fs::read_to_string(workspace().join(TEMPLATE_PATH)).unwrap();
        fs::create_dir_all(self.at("/usr/local/libexec")).unwrap();
        fs::create_dir_all(self.at("/etc/opencode")).unwrap();
        programs::write(&self.at(VERIFIER_PATH), &render(&template, &revision()).unwrap());
        self.write("/usr/local/libexec/opencode-pty-supervisor", 0o755, BINARY);
        self.sh("cd usr/local/libexec
            ln opencode-pty-supervisor opencode-pty-launcher
            ln opencode-pty-supervisor opencode-pty-client");
        self.write(MARKER_PATH, 0o644, &marker(&revision(), &self.binary_hash()));
    }

    fn binary_hash(&self) -> String {
        self.sh("sha256sum <usr/local/libexec/opencode-pty-supervisor | cut -d' ' -f1").trim().to_owned()
    }

    fn write(&self, path: &str, mode: u32, text: &str) {
        fs::write(self.at(path), text).unwrap();
        self.set_mode(path, mode);
    }

    /// Runs a script of this machine's shell in the root's directory; gives what it printed.
    fn sh(&self, script: &str) -> String {
        let output = Command::new("sh").args(["-ec", script]).current_dir(&self.path).output().unwrap();
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// A command inside, that runs the verifier with these words.
    fn command(&self, user: &str, words: &[&str]) -> Command {
        // By their paths: the environment is the test's.
        let mut command = Command::new("/usr/bin/timeout");
        command.args(["--kill-after=1", "20", "/usr/sbin/chroot", &format!("--userspec={user}"), "--groups="]);
        command
            .arg(&self.path)
            .args(words)
            .stdin(Stdio::null())
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command
    }

    /// What the verifier says.
    fn verify(&self) -> Verdict {
        Verdict::of(&self.command("1000:1000", &[VERIFIER_PATH]).output().unwrap())
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Verdict {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Verdict {
    fn of(output: &Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    fn ready() -> Self {
        Self { code: Some(0), stdout: String::new(), stderr: String::new() }
    }

    fn is_not_ready_because(&self, reason: &str) -> bool {
        let line =
            self.stderr.lines().last().and_then(|line| line.strip_prefix("opencode-pty-verify-readiness: not ready: "));
        self.code == Some(1) && self.stdout.is_empty() && line.is_some_and(|line| line.contains(reason))
    }
}

/// Does what each row says to a root on which all is well; the verifier must refuse, for the reason the row gives.
///
/// In a script `m` is the marker and `l` the directory of the binary.
fn refuses(rows: &[(&str, &str, &str)]) {
    for shell in SHELLS {
        let root = Root::new(shell);
        assert_eq!(root.verify(), Verdict::ready(), "{shell:?}");
        for (what, script, reason) in rows {
            root.make_ready();
            root.sh(&format!("m=etc/opencode/pty-supervisor-verified l=usr/local/libexec\n{script}"));
            let verdict = root.verify();
            assert!(verdict.is_not_ready_because(reason), "{shell:?}, {what}: {verdict:?}");
        }
        root.make_ready();
        assert_eq!(root.verify(), Verdict::ready(), "{shell:?}, after all that");
    }
}

#[test]
fn what_is_as_it_was_accepted_is_ready_for_root_and_for_the_account() {
    for shell in SHELLS {
        let root = Root::new(shell);
        for user in ["0:0", "1000:1000", "65534:65534"] {
            let output = root.command(user, &[VERIFIER_PATH]).output().unwrap();
            assert_eq!(Verdict::of(&output), Verdict::ready(), "{shell:?} as {user}");
        }
    }
}

#[test]
fn a_marker_that_is_not_roots_own_plain_file_is_refused() {
    let kind = "must be a regular file, root:root, mode 0644";
    refuses(&[
        ("missing", "rm $m", "there is no readable marker"),
        ("its directory missing", "rm -r etc/opencode", "there is no readable marker"),
        ("a link to a right one", "mv $m etc/opencode/right; ln -s right $m", kind),
        ("a link to nothing", "rm $m; ln -s nothing $m", kind),
        ("a directory", "rm $m; mkdir $m", kind),
        ("a directory of the right mode", "rm $m; mkdir -m 0644 $m", kind),
        ("a FIFO nobody writes to", "rm $m; mkfifo -m 0644 $m", kind),
        ("a device", "rm $m; mknod -m 0644 $m c 1 3", kind),
        ("of the account", "chown 1000:1000 $m", kind),
        ("of another owner", "chown 1000:0 $m", kind),
        ("of another group", "chown 0:1000 $m", kind),
        ("writable by the group", "chmod 0664 $m", kind),
        ("writable by all", "chmod 0666 $m", kind),
        ("closed", "chmod 0600 $m", kind),
        ("closed to its owner, too", "chmod 0000 $m", kind),
        ("executable", "chmod 0755 $m", kind),
        ("set-user-id", "chmod 4644 $m", kind),
        ("sticky", "chmod 1644 $m", kind),
        ("below a directory closed to the account", "chmod 0700 etc/opencode", "there is no readable marker"),
    ]);
}

#[test]
fn a_marker_that_is_not_exactly_four_lines_is_refused() {
    refuses(&[
        ("empty", ": >$m", "the marker is empty"),
        ("no newline at the end", "truncate -s -1 $m", "no whole line for /usr/local/libexec/opencode-pty-client"),
        ("one line without an end", "printf x >$m", "does not end"),
        ("the first line alone", "sed -i 1q $m", "no whole line for /usr/local/libexec/opencode-pty-supervisor"),
        ("the last line missing", "sed -i '$d' $m", "no whole line for /usr/local/libexec/opencode-pty-client"),
        ("the first line missing", "sed -i 1d $m", "the first line of the marker is not"),
        ("a blank line at the end", "echo >>$m", "more in it than the four lines"),
        ("a blank line first", "sed -i '1i\\\\' $m", "the first line of the marker is not"),
        ("a blank line between", "sed -i '2i\\\\' $m", "something else where"),
        ("a comment at the end", "echo '# reviewed' >>$m", "more in it than the four lines"),
        ("the first line twice", "sed -i 1p $m", "something else where"),
        ("a record twice", "sed -i 2p $m", "something else where"),
        ("the last record twice", "sed -i 4p $m", "more in it than the four lines"),
        ("all of it twice", "cat $m $m >new; cat new >$m", "more in it than the four lines"),
        ("a further record", "sed -n 4p $m | sed 's/client/other/' >new; cat new >>$m", "more in it"),
        ("a NUL at the end", "printf '\\0' >>$m", "more in it than the four lines"),
        ("NULs instead of the text", "head -c $(stat -c %s $m) /dev/zero >new; cat new >$m", "does not end"),
        ("a NUL in a line", "sed -i '2s/  /\\x00 /' $m", "something else where"),
        ("a byte between the fields", "sed -i '3s/  /   /' $m", "something else where"),
        ("a binary-mode record", "sed -i '2s/  / */' $m", "something else where"),
        ("a tab between the fields", "sed -i '4s/  /\\t/' $m", "something else where"),
        ("a space at a line's end", "sed -i '1s/$/ /' $m", "the first line of the marker is not"),
        ("a space at a line's start", "sed -i '1s/^/ /' $m", "the first line of the marker is not"),
        ("a byte-order mark", "sed -i '1s/^/\\xef\\xbb\\xbf/' $m", "the first line of the marker is not"),
        ("CRLF", "sed -i 's/$/\\r/' $m", "the first line of the marker is not"),
        ("CRLF in the last line", "sed -i '4s/$/\\r/' $m", "something else where"),
        ("CR instead of LF", "tr '\\n' '\\r' <$m >new; cat new >$m", "does not end"),
        ("records in another order", "sed -i '2{h;d};3{G}' $m", "something else where"),
        ("the revision last", "sed -i '1{h;d};4{G}' $m", "the first line of the marker is not"),
        ("one name for another's", "sed -i '4s/client/launcher/' $m", "something else where"),
        ("a name without its directory", "sed -i '2s/.usr.*libexec.//' $m", "something else where"),
        ("a name another way round", "sed -i '2s/libexec/libexec\\/./' $m", "something else where"),
        ("very long", "head -c 100000 /dev/zero | tr '\\0' a >>$m", "far too long"),
        ("endless", "rm $m; truncate -s 1T $m", "far too long"),
    ]);
}

#[test]
fn a_marker_for_something_else_is_refused() {
    let revision = "for another revision";
    let hash = "has another hash than the one that was accepted";
    let first = "the first line of the marker is not";
    refuses(&[
        ("another commit", "sed -i '1s/git:0/git:1/' $m", revision),
        ("another source", "sed -i '1s/sha256:f/sha256:0/' $m", revision),
        ("a commit in upper case", "sed -i '1s/abcdef;/ABCDEF;/;1s/cdef/CDEF/' $m", first),
        ("a hash of the source in upper case", "sed -i '1s/fedc/FEDC/' $m", first),
        ("a short commit", "sed -i '1s/git:0/git:/' $m", first),
        ("a long hash of the source", "sed -i '1s/$/0/' $m", first),
        ("another product", "sed -i '1s/opencode-v2-pilot/opencode-v3-pilot/' $m", first),
        ("another key", "sed -i '1s/revision=/Revision=/' $m", first),
        ("another source's name", "sed -i '1s/pty-source/source/' $m", first),
        ("a template's line", "sed -i '1s/.*/@REVISION@/' $m", first),
        ("a hash of the binary in upper case", "sed -i '2s/^[0-9a-f]*/\\U&/' $m", "something else where"),
        ("another hash of the supervisor", "sed -i '2s/^......../00000000/' $m", hash),
        ("another hash of the launcher", "sed -i '3s/^......../00000000/' $m", hash),
        ("another hash of the client", "sed -i '4s/^......../00000000/' $m", hash),
        ("a short hash", "sed -i '3s/^.//' $m", "something else where"),
        ("a SHA-512 record", "sha512sum /dev/null >new; sed -i -e '2{r new' -e 'd}' $m", "something else where"),
    ]);
}

#[test]
fn a_binary_that_is_not_the_accepted_one_under_three_names_is_refused() {
    let one = "must be three names of one file";
    let plain = "opencode-pty-supervisor must be a regular file, root:root, mode 0755";
    let missing = "a name of the binary cannot be examined";
    refuses(&[
        ("changed", "echo more >>$l/opencode-pty-supervisor", "has another hash"),
        ("changed in one byte", "printf N | dd of=$l/opencode-pty-client conv=notrunc status=none", "has another hash"),
        ("empty", ": >$l/opencode-pty-supervisor", "has another hash"),
        ("the client a copy", "cd $l; cp -p opencode-pty-client new; mv new opencode-pty-client", one),
        ("the launcher a copy", "cd $l; cp -p opencode-pty-launcher new; mv new opencode-pty-launcher", one),
        ("the supervisor a copy", "cd $l; cp -p opencode-pty-client new; mv new opencode-pty-supervisor", one),
        ("the client a link", "ln -sf opencode-pty-supervisor $l/opencode-pty-client", one),
        ("the supervisor a link", "cd $l; mv opencode-pty-supervisor x; ln -s x opencode-pty-supervisor", plain),
        ("no supervisor", "rm $l/opencode-pty-supervisor", missing),
        ("no launcher", "rm $l/opencode-pty-launcher", missing),
        ("no client", "rm $l/opencode-pty-client", missing),
        ("a directory", "rm $l/opencode-pty-supervisor; mkdir $l/opencode-pty-supervisor", plain),
        ("a FIFO", "rm $l/opencode-pty-supervisor; mkfifo -m 0755 $l/opencode-pty-supervisor", plain),
        ("writable by the group", "chmod 0775 $l/opencode-pty-supervisor", plain),
        ("writable by all", "chmod 0757 $l/opencode-pty-supervisor", plain),
        ("not readable by all", "chmod 0711 $l/opencode-pty-supervisor", plain),
        ("set-user-id", "chmod 4755 $l/opencode-pty-supervisor", plain),
        ("of the account", "chown 1000:0 $l/opencode-pty-supervisor", plain),
        ("of the account's group", "chown 0:1000 $l/opencode-pty-supervisor", plain),
    ]);
}

#[test]
fn a_directory_in_which_somebody_else_could_put_another_file_is_refused() {
    for directory in ["/", "/etc", "/etc/opencode", "/usr", "/usr/local", "/usr/local/libexec"] {
        let reason = format!("{directory} must be a directory of root's that only root can write to");
        let here = format!(".{directory}");
        refuses(&[
            ("of the account", &format!("chown 1000:1000 {here}"), &reason),
            ("writable by a group", &format!("chmod g+w {here}"), &reason),
            ("writable by all, like /tmp", &format!("chmod 1777 {here}"), &reason),
        ]);
        if directory == "/" {
            continue;
        }
        // The verifier itself may be behind the link: starting it follows the link, and it does not.
        for shell in SHELLS {
            let root = Root::new(shell);
            root.sh(&format!("mv {here} ./moved && ln -s /moved {here}"));
            let verdict = root.verify();
            assert!(verdict.is_not_ready_because(&reason), "{shell:?}, {directory} a link: {verdict:?}");
            root.sh(&format!("rm {here} && mv ./moved {here}"));
            assert_eq!(root.verify(), Verdict::ready(), "{shell:?}, {directory}");
        }
    }
}

#[test]
fn a_verifier_that_was_not_rendered_for_a_revision_refuses_everything() {
    let template = fs::read_to_string(workspace().join(TEMPLATE_PATH)).unwrap();
    let right = revision();
    for shell in SHELLS {
        let root = Root::new(shell);
        for line in
            ["@REVISION@", "", "revision=", &right.to_uppercase(), &format!("{right}0"), &right[..right.len() - 1]]
        {
            let rendered = render(&template, line).unwrap();
            programs::write(&root.at(VERIFIER_PATH), &rendered);
            root.write(MARKER_PATH, 0o644, &marker(line, &root.binary_hash()));
            let verdict = root.verify();
            assert!(verdict.is_not_ready_because("not rendered for a revision"), "{shell:?}, '{line}': {verdict:?}");
        }
    }
    assert_eq!(render("no place", &right), None);
    assert_eq!(render("@REVISION@ @REVISION@", &right), None);
}

#[test]
fn no_variable_and_no_argument_makes_it_look_elsewhere() {
    for shell in SHELLS {
        let root = Root::new(shell);
        fs::create_dir(root.at("/evil")).unwrap();
        root.sh("printf '#!/bin/sh\\necho fooled; exit 0\\n' >evil/stat; chmod 755 evil/stat; cp -p evil/stat evil/sha256sum");
        root.sh("printf 'echo fooled; exit 0\\n' >evil/rc");
        let hostile: &[(&str, &str)] = &[
            ("PATH", "/evil"),
            ("ENV", "/evil/rc"),
            ("BASH_ENV", "/evil/rc"),
            ("IFS", "/0-9a-f"),
            ("LC_ALL", "tr_TR.UTF-8"),
            ("CDPATH", "/evil"),
            ("POSIXLY_CORRECT", "1"),
            ("PS4", "$(/evil/stat)"),
            ("marker", "/evil/marker"),
            ("supervisor", "/evil/stat"),
            ("expected", "nothing"),
            ("libexec", "/evil"),
            ("hash", "*"),
            ("hex8", "*"),
            ("BASH_FUNC_stat%%", "() { echo fooled; }"),
            ("BASH_FUNC_sha256sum%%", "() { echo fooled; }"),
        ];
        let verify = || {
            let output = root.command("1000:1000", &[VERIFIER_PATH]).envs(hostile.iter().copied()).output();
            Verdict::of(&output.unwrap())
        };
        assert_eq!(verify(), Verdict::ready(), "{shell:?}");
        root.sh("rm etc/opencode/pty-supervisor-verified");
        assert!(verify().is_not_ready_because("there is no readable marker"), "{shell:?}");

        root.make_ready();
        for argument in ["--help", "/evil", ""] {
            let output = root.command("1000:1000", &[VERIFIER_PATH, argument]).output().unwrap();
            assert!(Verdict::of(&output).is_not_ready_because("no argument is taken"), "{shell:?} '{argument}'");
        }
    }
}

#[test]
fn without_the_tools_it_needs_it_is_not_ready() {
    // Not with busybox, which may run its own without looking for them.
    let root = Root::new(Shell::Dash);
    for tool in ["stat", "sha256sum"] {
        root.sh(&format!("mv bin/{tool} bin/elsewhere"));
        let verdict = root.verify();
        assert!(verdict.code == Some(1) && verdict.stderr.contains("not ready: "), "without {tool}: {verdict:?}");
        root.sh(&format!("mv bin/elsewhere bin/{tool}"));
    }
    assert_eq!(root.verify(), Verdict::ready());
}

#[test]
fn its_verdict_is_that_of_sha256sum_itself() {
    let root = Root::new(Shell::Dash);
    let records = fs::read_to_string(root.at(MARKER_PATH)).unwrap();
    let records = records.split_once('\n').unwrap().1.replace("/usr/local", "usr/local");
    fs::write(root.path.join("records"), records).unwrap();
    root.sh("sha256sum --check --strict --quiet records");
}
