//! What a command finds: its terminal, its identity, its environment; and how its end is told.

use std::collections::BTreeMap;
use std::time::Duration;

use opencode_pty::frame::message::{ErrorCode, Exit};
use support::host::{ENVIRONMENT_CANARY, PASSWORD_CANARY};
use support::peer::is_unit_name;

use crate::account::{GID, HOME, NAME, UID, filled};
use crate::fixture::{Fixture, PLACES, SOON, exited, side_by_side};

/// What a session's environment is, all of it.
const ENVIRONMENT: [&str; 7] = [
    "HOME=<home>",
    "LANG=C.UTF-8",
    "LOGNAME=<name>",
    "PATH=/usr/local/bin:/usr/bin:/bin",
    "SHELL=/bin/sh",
    "TERM=xterm-256color",
    "USER=<name>",
];

#[test]
fn a_command_says_hello_and_succeeds() {
    let fixture = Fixture::new();

    let transcript = fixture.run(&["/bin/echo", "hello"]);

    assert_eq!((transcript.text().as_str(), &transcript.exit), ("hello\r\n", &Some(exited(0))));
    assert!(is_unit_name(transcript.unit.as_deref().unwrap()), "{transcript:?}");
    assert!(!transcript.stopped && transcript.error.is_none(), "{transcript:?}");
}

#[test]
fn what_no_test_may_leave_is_seen_while_it_is_there() {
    let fixture = Fixture::new();
    let mut session = fixture.start(&["sleep", "1000"]);
    let (unit, left) = (&session.unit, fixture.left_of_sessions());
    for end in [format!("{unit} active"), format!("/transient/{unit}"), format!(".slice/{unit}")] {
        assert!(left.lines().any(|line| line.ends_with(&end)), "nothing ends with '{end}': {left}");
    }
    session.stop_and_read();

    let failed = "opencode-pty-failed.service";
    fixture.root(&format!("systemd-run --quiet --wait --unit={failed} false || true"));
    assert!(fixture.left_of_sessions().ends_with(&format!("{failed} failed")));
    let left = fixture.gone_within(failed, Duration::ZERO).unwrap_err();
    assert!(left.contains("LoadState=loaded") && left.contains("ActiveState=failed"), "{left}");
    fixture.systemctl(&["reset-failed", failed]);
    // When the bus has told the manager that who asked for it has gone.
    fixture.wait_until_gone(failed, SOON);
}

// ---- how it ended --------------------------------------------------------------------------------------------

#[test]
fn a_command_that_dies_of_a_signal_arrives_as_128_and_its_number() {
    let fixture = Fixture::new();
    for (signal, number) in [("KILL", 9), ("SEGV", 11), ("TERM", 15), ("HUP", 1), ("PIPE", 13)] {
        let transcript = fixture.sh(&format!("kill -{signal} $$"));
        assert_eq!(transcript.exit, Some(exited(128 + number)), "{signal}: {transcript:?}");
    }
}

#[test]
fn exit_143_and_death_by_term_read_the_same() {
    // script(1) is in between; docs/protocol.md says so.
    let fixture = Fixture::new();
    assert_eq!(fixture.sh("exit 143").exit, fixture.sh("kill -TERM $$").exit);
}

#[test]
fn a_command_killed_from_outside_is_137_every_time() {
    let fixture = Fixture::new();
    for _ in 0..20 {
        let mut session = fixture.start(&["sleep", "1000"]);
        let pid = fixture.wait_for_process(&session.unit, "sleep 1000");
        fixture.root(&format!("kill -KILL {pid}"));
        assert_eq!(session.read_to_end().exit, Some(exited(137)));
    }
}

#[test]
fn a_unit_killed_from_outside_is_a_signal() {
    let fixture = Fixture::new();
    let mut session = fixture.start(&["sleep", "1000"]);
    fixture.root(&format!("systemctl kill --signal=KILL {}", session.unit));

    assert_eq!(session.read_to_end().exit, Some(Exit::new(2, 9, "signal").unwrap()));
    fixture.assert_gone(&session.unit);
}

// ---- what is executed ----------------------------------------------------------------------------------------

#[test]
fn a_command_without_a_slash_is_looked_up_in_the_fixed_path() {
    let fixture = Fixture::new();
    assert_eq!(fixture.ask(&["readlink", "/proc/self/exe"]), "/usr/bin/readlink");
    fixture.root("printf '#!/bin/sh\\necho from local\\n' >/usr/local/bin/uptime && chmod 755 /usr/local/bin/uptime");
    fixture.remove_at_end("/usr/local/bin/uptime");
    assert_eq!(fixture.ask(&["uptime"]), "from local");
}

#[test]
fn a_file_in_the_directory_does_not_stand_in_for_a_command() {
    let fixture = Fixture::new();
    let scratch = fixture.scratch();
    for name in ["uptime", "only-here"] {
        fixture.write(&format!("{scratch}/{name}"), 0o755, "#!/bin/sh\necho from the directory\n");
    }
    let dir = || fixture.standin.open(&scratch).unwrap();

    let transcript = fixture.run_in(dir(), &["uptime"]);
    assert!(!transcript.text().contains("from the directory"), "{transcript:?}");
    assert_eq!(transcript.exit, Some(exited(0)), "{transcript:?}");

    let transcript = fixture.run_in(dir(), &["only-here"]);
    assert_eq!(transcript.text(), "opencode-pty: 'only-here': command not found\r\n");
    assert_eq!(transcript.exit, Some(exited(127)));

    let transcript = fixture.run_in(dir(), &["./only-here"]);
    assert_eq!((transcript.text().as_str(), transcript.exit), ("from the directory\r\n", Some(exited(0))));
}

#[test]
fn a_command_that_cannot_be_executed_is_one_line_and_127_or_126() {
    let fixture = Fixture::new();
    let scratch = fixture.scratch();
    fixture.write(&format!("{scratch}/plain"), 0o644, "#!/bin/sh\necho it ran\n");
    fixture.write(&format!("{scratch}/bad-interpreter"), 0o755, "#!/nonexistent/interpreter\n");
    fixture.write(&format!("{scratch}/bad-binary"), 0o755, "\x7fELF\n");
    let descriptors = fixture.idle_descriptors();

    for (command, code) in [
        ("no-such-command", 127),
        ("/nonexistent/x", 127),
        ("./bad-interpreter", 127),
        ("./plain", 126),
        ("/", 126),
        ("/etc", 126),
        ("./plain/x", 126),
        ("..", 127),
    ] {
        let transcript = fixture.run_in(fixture.standin.open(&scratch).unwrap(), &[command]);
        let text = transcript.text();
        assert_eq!(transcript.exit, Some(exited(code)), "{command}: {text}");
        assert!(text.starts_with(&format!("opencode-pty: '{command}'")), "{command}: {text}");
        assert_eq!(text.matches('\n').count(), 1, "{command}: {text}");
    }
    fixture.wait_for_descriptors(descriptors, "them");
}

#[test]
fn a_script_without_an_interpreter_line_runs_in_the_shell() {
    let fixture = Fixture::new();
    let scratch = fixture.scratch();
    fixture.write(&format!("{scratch}/bare"), 0o755, "echo \"bare $1\"\n");

    let transcript = fixture.run_in(fixture.standin.open(&scratch).unwrap(), &["./bare", "script"]);

    assert_eq!((transcript.text().as_str(), transcript.exit), ("bare script\r\n", Some(exited(0))));
}

#[test]
fn the_longest_command_the_kernel_takes_is_executed() {
    let fixture = Fixture::new();
    let longest = format!("{}/bin/true", "/.".repeat((4095 - "/bin/true".len()) / 2));
    assert_eq!(longest.len(), 4095);
    assert_eq!(fixture.run(&[&longest]).exit, Some(exited(0)));

    let one_more = format!("/{longest}");
    let transcript = fixture.run(&[&one_more]);
    assert_eq!(transcript.exit, Some(exited(126)), "{transcript:?}");
}

// ---- environment ---------------------------------------------------------------------------------------------

#[test]
fn the_environment_is_seven_variables_and_no_other() {
    let fixture = Fixture::new();
    for words in [&["/usr/bin/env", "-0"][..], &["/bin/cat", "/proc/self/environ"]] {
        let text = fixture.run(words).text();
        let mut variables: Vec<&str> = text.strip_suffix('\0').unwrap().split('\0').collect();
        variables.sort_unstable();
        assert_eq!(variables, ENVIRONMENT.map(filled), "{words:?}");
    }
}

#[test]
fn a_shell_finds_a_usable_terminal_and_locale() {
    let fixture = Fixture::new();
    let answer = fixture.ask_sh(
        r#"echo "$TERM|$LANG|$HOME|$USER|$SHELL|$PATH"; tput colors; locale charmap; id -un; cd; pwd; command -v id"#,
    );
    let settings = format!("xterm-256color|C.UTF-8|{HOME}|{NAME}|/bin/sh|/usr/local/bin:/usr/bin:/bin");
    assert_eq!(answer, format!("{settings}\n256\nUTF-8\n{NAME}\n{HOME}\n/usr/bin/id"));
}

#[test]
fn nothing_of_the_servers_environment_is_within_reach() {
    let fixture = Fixture::new();
    let server =
        fixture.root("tr '\\0' '\\n' </proc/$(systemctl show --property=MainPID --value opencode-v2.service)/environ");
    assert!(server.contains(PASSWORD_CANARY) && server.contains(ENVIRONMENT_CANARY), "the canaries are where we look");

    let seen = fixture.ask_python(
        "import os
read = 0
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        text = open(f'/proc/{pid}/environ', 'rb').read().decode(errors='replace')
    except OSError:
        continue
    read += 1
    print(pid, text.replace('\\0', ' '))
print('read', read)",
    );

    for canary in [PASSWORD_CANARY, ENVIRONMENT_CANARY] {
        assert!(!seen.contains(canary), "{seen}");
    }
    // What it can read is itself and its ancestors up to script(1), which have the words besides.
    let read: u32 = seen.lines().last().and_then(|line| line.strip_prefix("read ")).unwrap().parse().unwrap();
    assert!((2..=3).contains(&read), "{seen}");
}

#[test]
fn no_process_of_a_session_has_a_variable_of_its_unit() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("echo ready; sleep 100 & wait");
    session.line("ready");
    fixture.wait_for_process(&session.unit, "sleep 100");

    let pids = fixture.pids(&session.unit);
    assert!(pids.len() >= 3, "script, sh, sleep: {}", fixture.processes(&session.unit));
    let wanted = ENVIRONMENT.map(filled);
    for pid in pids {
        let environment = fixture.root(&format!("tr '\\0' '\\n' </proc/{pid}/environ"));
        let known = |line: &str| wanted.iter().any(|known| known == line) || line.starts_with("OPENCODE_PTY_ARGV=a");
        let others: Vec<&str> = environment.lines().filter(|line| !known(line)).collect();
        // What a shell adds for its own children.
        assert!(others.iter().all(|line| line.starts_with("PWD=")), "{pid}: {others:?}");
    }
    session.stop_and_read();
}

// ---- terminal ------------------------------------------------------------------------------------------------

#[test]
fn the_command_has_a_terminal_of_24_by_80_on_all_three_descriptors() {
    let fixture = Fixture::new();
    let tty = fixture.ask(&["tty"]);
    assert!(tty.starts_with("/dev/pts/"), "{tty}");
    assert_eq!(fixture.ask(&["stty", "size"]), "24 80");
    assert_eq!(
        fixture.ask_python(
            "import os
names = {os.ttyname(fd) for fd in range(3)}
print([os.isatty(fd) for fd in range(3)], len(names))"
        ),
        "[True, True, True] 1"
    );
}

#[test]
fn the_terminal_is_the_commands_controlling_terminal() {
    let fixture = Fixture::new();
    let answer = fixture.ask_python(
        "import os
tty = os.open('/dev/tty', os.O_RDWR)
fields = open('/proc/self/stat').read().rpartition(')')[2].split()
print(int(fields[4]) == os.fstat(0).st_rdev, os.tcgetpgrp(tty) == os.getpgrp())",
    );
    assert_eq!(answer, "True True");
}

#[test]
fn job_control_works_in_an_interactive_shell() {
    let fixture = Fixture::new();
    let mut session = fixture.start(&["bash", "--norc", "-i"]);
    session.input(b"PS1=; sleep 100 & echo $((40 + 2)); jobs; kill %1; wait %1; echo code $?; exit 3\n").unwrap();
    let transcript = session.read_to_end();
    let text = transcript.text();
    assert_eq!(transcript.exit, Some(exited(3)), "{text}");
    assert!(text.contains("42\r\n") && text.contains("Running") && text.contains("code 143\r\n"), "{text}");
    assert!(!text.contains("no job control"), "{text}");
}

#[test]
fn the_command_has_three_descriptors() {
    let fixture = Fixture::new();
    // One that Python has open while it lists them is gone afterwards.
    let answer = fixture.ask_python(
        "import os
def is_open(fd):
    try:
        return os.fstat(fd) is not None
    except OSError:
        return False
print([fd for fd in sorted(map(int, os.listdir('/proc/self/fd'))) if is_open(fd)])",
    );
    assert_eq!(answer, "[0, 1, 2]");
    // `ls` opens the directory it lists.
    assert_eq!(fixture.ask_sh("exec ls -1 /proc/self/fd"), "0\n1\n2\n3");
}

#[test]
fn signals_are_as_a_login_has_them() {
    let fixture = Fixture::new();
    let status = Status::of(&fixture, &["/bin/cat", "/proc/self/status"]);
    for mask in ["SigBlk", "SigIgn", "SigCgt"] {
        assert_eq!(status[mask], "0000000000000000", "{mask}");
    }
    assert_eq!(fixture.ask(&["bash", "-c", "yes | head -n 1; echo ${PIPESTATUS[0]}"]), "y\n141");
}

#[test]
fn new_files_are_for_the_account_alone() {
    let fixture = Fixture::new();
    let scratch = fixture.scratch();
    assert_eq!(fixture.ask_sh(&format!("umask; cd {scratch}; : >f; mkdir d; stat -c %a f d")), "0077\n600\n700");
}

// ---- identity ------------------------------------------------------------------------------------------------

/// `/proc/PID/status` of a session's command.
struct Status;

impl Status {
    fn of(fixture: &Fixture, words: &[&str]) -> BTreeMap<String, String> {
        let text = fixture.ask(words);
        text.lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(key, value)| (key.to_owned(), value.split_whitespace().collect::<Vec<_>>().join(" ")))
            .collect()
    }
}

#[test]
fn the_command_is_the_account_without_groups_or_capabilities() {
    let fixture = Fixture::new();
    let groups = fixture.root(&format!("id -Gn {NAME}"));
    assert!(groups.contains("docker") && groups.contains("sudo"), "the account has groups to lose: {groups}");

    assert_eq!(fixture.ask(&["id"]), format!("uid={UID}({NAME}) gid={GID}({NAME}) groups={GID}({NAME})"));

    let status = Status::of(&fixture, &["/bin/cat", "/proc/self/status"]);
    assert_eq!(status["Uid"], [&*UID; 4].join(" "));
    assert_eq!(status["Gid"], [&*GID; 4].join(" "));
    assert_eq!(status["Groups"], "");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(status[set], "0000000000000000", "{set}");
    }
    assert_eq!(status["NoNewPrivs"], "1");
    assert_eq!(status["Seccomp"], "2");
    // It can't be used any more, under no_new_privs; SETGID is what the launcher needed.
    assert!(["0000000000000000", "0000000000000040"].contains(&status["CapBnd"].as_str()), "{}", status["CapBnd"]);
}

#[test]
fn no_program_gives_a_session_other_rights() {
    let fixture = Fixture::new();
    let transcript = fixture.sh("sudo -n id; su -c id root </dev/null; newgrp docker </dev/null; id -G; exit 4");
    assert_eq!(transcript.exit, Some(exited(4)), "{transcript:?}");
    assert!(transcript.text().ends_with(&format!("\r\n{GID}\r\n")), "{}", transcript.text());
    assert!(!transcript.text().contains("uid=0"), "{}", transcript.text());
}

#[test]
fn the_command_is_in_the_cgroup_of_its_unit() {
    let fixture = Fixture::new();
    let transcript = fixture.run(&["cat", "/proc/self/cgroup"]);
    let unit = transcript.unit.clone().unwrap();
    // The machine's own hierarchies may show besides.
    let line = format!("0::/opencode.slice/opencode-pty.slice/{unit}");
    assert!(transcript.text().lines().any(|other| other == line), "{}", transcript.text());
}

// ---- places --------------------------------------------------------------------------------------------------

#[test]
fn sixteen_sessions_run_at_once_and_one_more_is_refused_until_one_ends() {
    let fixture = Fixture::new();
    let mut sessions = side_by_side(PLACES, |_| fixture.start(&["cat"]));
    let refused = || {
        let answer = fixture.answer(&["cat"]);
        assert_eq!((answer.error_code(), answer.frames), (Some(ErrorCode::Busy), 1), "{answer:?}");
    };
    refused();
    refused();

    let stopped = sessions.pop().unwrap().stop_and_read();
    assert_eq!(stopped.exit, Some(Exit::stopped()));
    sessions.push(fixture.start(&["cat"]));
    refused();

    // One that ends by itself leaves its place, too; each of the others still works.
    for session in &mut sessions {
        session.input(b"still here\n\x04").unwrap();
    }
    for mut session in sessions {
        let transcript = session.read_to_end();
        assert_eq!(transcript.text(), "still here\r\nstill here\r\n");
        assert_eq!(transcript.exit, Some(exited(0)));
    }
    assert_eq!(fixture.ask(&["echo", "free"]), "free");
}
