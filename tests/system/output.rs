//! Output arrives whole, unchanged and before the record of the end; input arrives whole, too.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use support::peer::Frame;

use crate::account::WORKSPACE;
use crate::fixture::{Fixture, RUNTIME, SOON, at_a_time, exited, side_by_side, wait_until};
use crate::flood::long;

/// How long a session that moves many megabytes may take. Chosen: seconds are usual.
const LONG: Duration = Duration::from_mins(2);

/// The numbers up to `last` as a terminal shows them.
fn numbers(last: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    for number in 1..=last {
        bytes.extend_from_slice(number.to_string().as_bytes());
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// As `assert_eq!`, but with the place of the first difference instead of megabytes.
fn assert_same(found: &[u8], wanted: &[u8], what: &str) {
    let common = found.iter().zip(wanted).take_while(|(found, wanted)| found == wanted).count();
    let excerpt =
        |bytes: &[u8]| bytes[common..].iter().take(60).copied().collect::<Vec<u8>>().escape_ascii().to_string();
    assert!(
        found == wanted,
        "{what}: {} bytes instead of {}; from byte {common} on '{}' instead of '{}'",
        found.len(),
        wanted.len(),
        excerpt(found),
        excerpt(wanted),
    );
}

pub fn sha256_of(bytes: &[u8]) -> String {
    let mut child = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    let output = child.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().to_owned()
}

// ---- whole before the end ------------------------------------------------------------------------------------

#[test]
fn a_million_numbers_arrive_whole_before_the_end() {
    let fixture = Fixture::new();
    let wanted = numbers(1_000_000);
    assert_eq!(wanted.len(), 7_888_896, "6,888,896 bytes, and a carriage return for each line");

    let times = at_a_time(4, 12, |_| {
        let begun = std::time::Instant::now();
        let mut peer = fixture.standin.start(WORKSPACE, RUNTIME, &["seq", "1", "1000000"]).unwrap();
        let transcript = peer.read_to_end(LONG).unwrap();
        assert_same(&transcript.output, &wanted, "seq 1 1000000");
        assert_eq!(transcript.exit, Some(exited(0)));
        begun.elapsed()
    });

    // What the case asks of their times is for a machine that has nothing else to do.
    if long() {
        let mut sorted = times.clone();
        sorted.sort_unstable();
        assert!(sorted[11] < sorted[6] * 10, "one was slower than ten times the median: {times:?}");
    }
}

#[test]
fn of_many_short_commands_each_says_its_word() {
    let fixture = Fixture::new();

    let count = if long() { 1_000 } else { 100 };
    let transcripts = side_by_side(count, |_| fixture.run_one_of_many(&["echo", "hoge"]));

    for (index, transcript) in transcripts.iter().enumerate() {
        let heard = (transcript.text(), transcript.exit.clone());
        assert_eq!(heard, ("hoge\r\n".to_owned(), Some(exited(0))), "number {index}: {transcript:?}");
    }
}

#[test]
fn a_long_word_from_a_command_that_ends_at_once_is_not_cut() {
    let fixture = Fixture::new();
    // Longer than one argument may be, so in two.
    let half = "hello".repeat(2_048);
    let wanted = format!("{half} {half}");

    let transcripts = side_by_side(64, |_| fixture.run_one_of_many(&["/bin/echo", "-n", &half, &half]));

    for transcript in transcripts {
        assert_same(&transcript.output, wanted.as_bytes(), "echo -n");
        assert_eq!(transcript.exit, Some(exited(0)));
    }
}

#[test]
fn output_of_a_command_that_gets_no_input_arrives_whole() {
    let fixture = Fixture::new();
    let mut session = fixture.start(&["seq", "-s", " ", "1", "1000000"]);

    // A reader that is slower than the writer: some frames, then a look at the host.
    let (mut output, mut next_look) = (Vec::new(), 0);
    let exit = loop {
        match session.next_frame(SOON).unwrap() {
            Frame::Output(bytes) => output.extend(bytes),
            Frame::Exit(exit) => break exit,
            other => panic!("{other:?}"),
        }
        if output.len() >= next_look && output.len() < 6_000_000 {
            next_look += 400_000;
            assert!(!fixture.processes(&session.unit).is_empty(), "it waits for us");
        }
    };

    assert_eq!(output.len(), 6_888_897, "the line's end is two bytes");
    assert!(output.ends_with(b" 999999 1000000\r\n"));
    assert_eq!(exit, exited(0));
}

#[test]
fn what_is_unread_when_the_command_ends_comes_before_the_end() {
    let fixture = Fixture::new();
    let wanted = numbers(10_000);
    let scratch = fixture.scratch();
    let mut session = fixture.start_sh(&format!("seq 1 10000; : >{scratch}/written; exit 9"));
    // Nothing is read until the command has written all and ended.
    wait_until("the command to write all", SOON, || {
        let path = fixture.host.path(format!("{scratch}/written"));
        if path.exists() { Ok(()) } else { Err(fixture.processes(&session.unit)) }
    });
    fixture.wait_until_gone(&session.unit, SOON);

    let transcript = session.read_to_end();

    assert_same(&transcript.output, &wanted, "seq 1 10000");
    assert_eq!(transcript.exit, Some(exited(9)));
}

#[test]
fn a_client_that_does_not_read_stops_the_command_and_costs_no_memory() {
    let fixture = Fixture::new();
    let resident = || -> u64 {
        let pid = fixture.supervisor_pid();
        let line = fixture.root(&format!("grep VmRSS /proc/{pid}/status"));
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let before = resident();
    let mut sessions: Vec<_> = (0..8).map(|_| fixture.start(&["yes"])).collect();
    for session in &sessions {
        let pid = fixture.wait_for_process(&session.unit, "yes");
        let ticks = || fixture.root(&format!("cut -d ' ' -f 14,15 /proc/{pid}/stat"));
        let mut last = ticks();
        let mut same = 0;
        wait_until("yes to stand still", SOON, || {
            let now = ticks();
            same = if now == last { same + 1 } else { 0 };
            last.clone_from(&now);
            if same >= 5 { Ok(()) } else { Err(format!("CPU time {now}")) }
        });
    }
    let after = resident();
    assert!(after < before + 8_192, "{before} KiB resident before, {after} with 8 floods nobody reads");

    // Each goes on when it is read, and takes an interrupt.
    for session in &mut sessions {
        let mut output = Vec::new();
        while output.len() < 1_000_000 {
            match session.next_frame(SOON).unwrap() {
                Frame::Output(bytes) => output.extend(bytes),
                other => panic!("{other:?}"),
            }
        }
        let text: Vec<&[u8]> = output.split(|byte| *byte == b'\n').collect();
        assert!(text[..text.len() - 1].iter().all(|line| *line == b"y\r"), "yes says y");
        session.input(b"\x03").unwrap();
        let transcript = session.read_to_end();
        assert_eq!(transcript.exit, Some(exited(130)));
    }
}

// ---- unchanged -----------------------------------------------------------------------------------------------

#[test]
fn a_character_cut_between_two_writes_is_not_harmed() {
    let fixture = Fixture::new();
    let program = r"import os, time; os.write(1, b'cleanup \xe2'); time.sleep(.05); os.write(1, b'\x80\x94 end')";
    let transcript = fixture.run(&["python3", "-c", program]);
    assert_eq!(transcript.output, "cleanup — end".as_bytes());
}

#[test]
fn many_long_lines_of_wide_characters_arrive_as_they_are() {
    let fixture = Fixture::new();
    let transcript = fixture.run(&["python3", "-c", r"print('\n'.join(['\u2500' * 200] * 5000))"]);
    assert_same(&transcript.output, format!("{}\r\n", "─".repeat(200)).repeat(5_000).as_bytes(), "box characters");
}

#[test]
fn every_byte_arrives_as_it_is_from_a_raw_terminal() {
    let fixture = Fixture::new();
    let program = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000)";
    let transcript = fixture.sh(&format!("stty raw -echo; exec python3 -c '{program}'"));
    let wanted: Vec<u8> = (0..=255).collect::<Vec<u8>>().repeat(1_000);
    assert_same(&transcript.output, &wanted, "all bytes");
    assert_eq!(transcript.exit, Some(exited(0)));
}

// ---- input ---------------------------------------------------------------------------------------------------

#[test]
fn a_megabyte_typed_into_a_raw_terminal_arrives_as_it_is() {
    let fixture = Fixture::new();
    let mut typed = Vec::with_capacity(1_000_000);
    let mut random = 1_u32;
    while typed.len() < 1_000_000 {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        typed.push(random.to_be_bytes()[0]);
    }
    let mut session = fixture.start_sh("stty raw -echo; echo R; head -c 1000000 | sha256sum");
    session.output_until(b"R\n", SOON).unwrap();
    session.input(&typed).unwrap();

    let transcript = session.read_to_end();

    assert_eq!(transcript.text(), format!("{}  -\n", sha256_of(&typed)));
    assert_eq!(transcript.exit, Some(exited(0)));
}

#[test]
fn a_line_longer_than_the_kernel_takes_is_cut_by_it_and_the_session_goes_on() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("stty -echo; echo R; cat | wc -c; exit 5");
    session.line("R");
    session.input(format!("{}\n\x04", "a".repeat(10_000)).as_bytes()).unwrap();

    let transcript = session.read_to_end();

    assert_eq!((transcript.text().as_str(), transcript.exit), ("4096\r\n", Some(exited(5))));
}

#[test]
fn a_large_paste_to_a_client_that_reads_late_arrives_whole() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("stty -echo; echo R; exec cat");
    session.line("R");
    let lines: Vec<String> = (0..200_000).map(|number| format!("{number:09}")).collect();
    let typed = lines.join("\n") + "\n\x04";

    // What fits while nobody reads, and then the rest.
    let sender = session.sender();
    let frames = |bytes: &[u8]| -> Vec<u8> {
        bytes
            .chunks(opencode_pty::limits::DATA_BYTES_MAX)
            .flat_map(|part| opencode_pty::frame::encode(opencode_pty::frame::Kind::Input, part).unwrap())
            .collect()
    };
    let frames = frames(typed.as_bytes());
    let mut sent = 0;
    loop {
        match sender.send_now(&frames[sent..]).unwrap() {
            0 => break,
            count => sent += count,
        }
        if sent == frames.len() {
            break;
        }
    }
    let rest = thread::spawn(move || sender.send_raw(&frames[sent..], &[]).unwrap());
    let transcript = session.peer.read_to_end(LONG).unwrap();
    rest.join().unwrap();

    assert_same(&transcript.output, (lines.join("\r\n") + "\r\n").as_bytes(), "cat");
    assert_eq!(transcript.exit, Some(exited(0)));
}

#[test]
fn the_end_of_input_reaches_the_command_and_its_code_comes_back() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("cat >/dev/null; exit 42");
    session.input(b"abc\n\x04").unwrap();
    let transcript = session.read_to_end();
    assert_eq!((transcript.text().as_str(), transcript.exit), ("abc\r\n", Some(exited(42))));
}

#[test]
fn an_interrupt_is_a_signal_to_what_runs_in_the_foreground() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("trap 'echo GOTINT' INT; sleep 100; echo AFTER; sleep 1000; exit 7");
    fixture.wait_for_process(&session.unit, "sleep 100");
    session.input(b"\x03").unwrap();
    let text = session.line("AFTER");
    assert!(text.contains("GOTINT\r\n"), "{text}");

    fixture.wait_for_process(&session.unit, "sleep 1000");
    session.input(b"\x03").unwrap();
    let transcript = session.read_to_end();
    assert!(transcript.text().contains("GOTINT\r\n"), "{transcript:?}");
    assert_eq!(transcript.exit, Some(exited(7)));
}

#[test]
fn an_interrupt_that_the_command_handles_does_not_change_how_its_end_reads() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("trap 'echo GOTINT' INT; echo ready; read line; exit 7");
    session.line("ready");
    session.input(b"\x03").unwrap();
    session.line("GOTINT");
    session.input(b"go on\n").unwrap();
    assert_eq!(session.read_to_end().exit, Some(exited(7)));
}

#[test]
fn a_quit_that_the_command_handles_does_not_end_the_session() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("trap 'echo GOTQUIT' QUIT; echo ready; read line; read line; exit 7");
    session.line("ready");
    session.input(b"\x1c").unwrap();
    session.line("GOTQUIT");
    session.input(b"go on\nand on\n").unwrap();
    assert_eq!(session.read_to_end().exit, Some(exited(7)));
}

#[test]
fn a_quit_ends_the_command_with_131() {
    let fixture = Fixture::new();
    let mut session = fixture.start(&["sleep", "100"]);
    fixture.wait_for_process(&session.unit, "sleep 100");
    session.input(b"\x1c").unwrap();
    assert_eq!(session.read_to_end().exit, Some(exited(131)));
}

#[test]
fn sessions_do_not_see_each_others_bytes() {
    let fixture = Fixture::new();
    let answers: BTreeMap<usize, String> = side_by_side(16, |index| {
        let mut session = fixture.start_sh("stty -echo; echo R; read line; echo \"got $line\"");
        session.line("R");
        session.input(format!("for {index}\n").as_bytes()).unwrap();
        (index, session.read_to_end().text())
    })
    .into_iter()
    .collect();
    for (index, answer) in answers {
        assert_eq!(answer, format!("got for {index}\r\n"));
    }
}
