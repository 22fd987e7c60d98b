//! The command's arguments arrive byte for byte: no shell, no systemd and no terminal has had a hand in them.

use std::os::fd::OwnedFd;

use opencode_pty::limits::{ARG_BYTES_MAX, ARGS_BYTES_MAX, ARGS_MAX, COMMAND_BYTES_MAX};
use support::peer::Peer;
use support::standin::StartError;

use crate::account::WORKSPACE;
use crate::fixture::{Fixture, RUNTIME, exited};

/// Prints each argument in hexadecimal, one a line.
const ECHO: &str = "#!/usr/bin/python3
import os, sys
for word in sys.argv[1:]:
    print('arg', os.fsencode(word).hex())
";

/// A directory with the program `./echo`.
struct Echo {
    fixture: Fixture,
    directory: String,
}

impl Echo {
    fn new() -> Self {
        let fixture = Fixture::new();
        let directory = fixture.scratch();
        fixture.write(&format!("{directory}/echo"), 0o755, ECHO);
        Self { fixture, directory }
    }

    fn dir(&self) -> OwnedFd {
        self.fixture.standin.open(&self.directory).unwrap()
    }

    /// Fails unless `./echo` finds exactly these arguments.
    fn assert_arrive(&self, args: &[&str]) {
        let words: Vec<&str> = std::iter::once("./echo").chain(args.iter().copied()).collect();
        let transcript = self.fixture.run_in(self.dir(), &words);
        assert_eq!(transcript.exit, Some(exited(0)), "{args:?}: {}", transcript.text());
        let hex = |arg: &&str| arg.bytes().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat();
        let lines: Vec<String> = args.iter().map(|arg| format!("arg {}\r\n", hex(arg))).collect();
        assert!(transcript.text() == lines.concat(), "{args:?} arrived as {}", transcript.text());
    }
}

/// What a shell, systemd, printf, a terminal or a careless decoder would change.
const DELICATE: [&str; 44] = [
    "$HOME",
    "${PATH}",
    "$$",
    "$1",
    "$",
    "%n",
    "%%",
    "%h",
    "%",
    "'",
    "\"",
    "it's \"quoted\"",
    "\\",
    "\\n",
    "\\x41",
    "\n",
    "two\nlines\n",
    "\r\n",
    "\t",
    " ",
    "  two  spaces  ",
    "",
    "é",
    "日本語",
    "\u{1f980}",
    "\u{feff}",
    "\u{7f}\u{1b}[31m\u{3}\u{4}",
    "-c",
    "--",
    "--exec",
    "-",
    "*",
    "?",
    "[a-z]",
    "~",
    "{a,b}",
    ";",
    "&",
    "|",
    "`id`",
    "$(id)",
    "#",
    "a.b",
    "OPENCODE_PTY_ARGV=aQQ",
];

#[test]
fn delicate_arguments_arrive_as_they_are_one_by_one() {
    let echo = Echo::new();
    for arg in DELICATE {
        echo.assert_arrive(&[arg]);
    }
}

#[test]
fn delicate_arguments_arrive_as_they_are_together() {
    let echo = Echo::new();
    echo.assert_arrive(&DELICATE);
    echo.assert_arrive(&["", "", ""]);
    echo.assert_arrive(&[]);
}

#[test]
fn every_character_below_256_arrives_as_it_is() {
    let echo = Echo::new();
    let all: String = (1..=255).map(|byte: u8| char::from(byte)).collect();
    echo.assert_arrive(&[&all]);
}

#[test]
fn arguments_at_each_limit_arrive_as_they_are() {
    let echo = Echo::new();
    let longest = "a$".repeat(ARG_BYTES_MAX / 2);
    echo.assert_arrive(&[&longest]);

    let many: Vec<String> = (0..ARGS_MAX).map(|index| format!("{index} $HOME")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    echo.assert_arrive(&many);

    // Together as much as may be, in few and in many.
    for count in [ARGS_BYTES_MAX / ARG_BYTES_MAX, ARGS_MAX] {
        let each = "é".repeat(ARGS_BYTES_MAX / count / 2);
        echo.assert_arrive(&vec![each.as_str(); count]);
    }
}

#[test]
fn the_name_of_the_command_is_its_own_first_argument() {
    let fixture = Fixture::new();
    let transcript = fixture.run(&["cat", "/proc/self/cmdline"]);
    assert_eq!(transcript.text(), "cat\0/proc/self/cmdline\0");
}

#[test]
fn a_command_with_delicate_characters_is_executed() {
    let echo = Echo::new();
    for name in ["with space", "$HOME", "quote'\"", "new\nline", "-c", "é*", "%n;x"] {
        let path = format!("{}/{name}", echo.directory);
        std::fs::copy(echo.fixture.host.path("/usr/bin/true"), echo.fixture.host.path(&path)).unwrap();
        let transcript = echo.fixture.run_in(echo.dir(), &[&format!("./{name}")]);
        assert_eq!((transcript.text().as_str(), transcript.exit), ("", Some(exited(0))), "{name:?}");
    }
}

#[test]
fn the_client_refuses_what_is_over_a_limit_and_sends_nothing() {
    let fixture = Fixture::new();
    let (one_more, too_long, half) =
        ("x".repeat(COMMAND_BYTES_MAX + 1), "x".repeat(ARG_BYTES_MAX + 1), "x".repeat(ARG_BYTES_MAX / 2 + 1));
    let many = vec!["echo"; ARGS_MAX + 2];
    let together = [vec!["echo"], vec![half.as_str(); 2 * ARGS_BYTES_MAX / ARG_BYTES_MAX]].concat();
    let cases: [(u32, &[&str]); 6] = [
        (RUNTIME, &[&one_more]),
        (RUNTIME, &["echo", &too_long]),
        (RUNTIME, &many),
        (RUNTIME, &together),
        (RUNTIME, &[""]),
        (3_601, &["echo"]),
    ];
    for (runtime, words) in cases {
        let Err(StartError::Client { finished, peer }) = fixture.standin.start(WORKSPACE, runtime, words) else {
            panic!("{} words, {runtime} s: the client did not refuse", words.len());
        };
        assert_eq!(finished.status.code(), Some(64), "{}", finished.complaint());
        assert_eq!(finished.complaint().lines().count(), 1, "{}", finished.complaint());
        // Nothing was sent, so nothing is refused: the supervisor sees a hang-up.
        let mut peer: Peer = *peer;
        peer.half_close().unwrap();
        let transcript = peer.read_to_end(crate::fixture::SOON).unwrap();
        assert_eq!(transcript.frames, 0, "{transcript:?}");
    }
}
