//! A machine that is rebooted or switched off while sessions run: nothing of them holds it up.
//!
//! `cargo xtask vm test` runs this on the machine outside, with a VM's name in `OPENCODE_PTY_TEST_VM`: who is shut down cannot
//! watch. The last test ends that VM.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::thread;
use std::time::{Duration, Instant};

use support::vm::{FILES, Vm};

/// How long anything may take here, a shutdown too. Chosen: a machine that is twenty times slower, and whatever else runs
/// beside it. What hangs is told by what systemd says, not by this.
const SOON: Duration = Duration::from_mins(5);

/// What may run in a session when the machine goes down: an idle shell; one that takes neither TERM nor HUP, with a child that
/// has left; output that nobody reads.
const COMMANDS: [&str; 3] =
    ["exec /bin/bash -i", "trap '' TERM HUP INT; (setsid sleep 1000 &); while :; do sleep 1000; done", "exec yes"];

/// How long a reboot takes at the most where nothing is waited for. Chosen: ten seconds are usual. Who reads of a longer one wants
/// to know what was.
const USUAL_MAX: Duration = Duration::from_secs(20);

fn vm() -> Vm {
    Vm::attach(&std::env::var("OPENCODE_PTY_TEST_VM").expect("OPENCODE_PTY_TEST_VM names a VM that is up")).unwrap()
}

/// Waits until `look` finds something.
fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {} s for {what}", SOON.as_secs());
        thread::sleep(Duration::from_millis(200));
    }
}

/// Six sessions, held by a process that stays, as the server's would be.
fn start_sessions(vm: &Vm) -> Vec<String> {
    vm.sh_ok("systemctl start opencode-pty-supervisor.service opencode-v2.service").unwrap();
    for (index, command) in COMMANDS.iter().enumerate() {
        // systemd-run(1) has the manager expand what looks like a variable; there is none in these.
        let words = format!("{FILES}/opencode-vm-agent sessions 2 /bin/sh -c \"{command}\"");
        vm.sh_ok(&format!(
            "systemd-run --quiet --unit=holder-{index} --property=StandardOutput=file:/run/holder-{index} {words}"
        ))
        .unwrap();
    }
    wait_for("the sessions to start", || {
        let all = vm.sh_ok("cat /run/holder-* 2>/dev/null | grep -c '^all$' || true").unwrap();
        (all == COMMANDS.len().to_string()).then_some(())
    });
    let units = vm.sh_ok("cat /run/holder-* | sed -n 's/^started //p'").unwrap();
    let units: Vec<String> = units.lines().map(str::to_owned).collect();
    assert_eq!(units.len(), 2 * COMMANDS.len());
    units
}

/// Asks for a reboot or a power-off, a second from now: the agent that would say that it has been asked for goes down with
/// the machine, and nobody hears of that.
fn ask_for(vm: &Vm, what: &str) {
    let script = format!("sleep 1; exec systemctl {what}");
    vm.sh_ok(&format!("systemd-run --quiet --no-block --unit=going-down /bin/sh -c '{script}'")).unwrap();
}

/// Seconds since the boot, of a journal's or the console's line: `[   12.345678] …`.
fn seconds(line: &str) -> Option<f64> {
    line.trim_start().strip_prefix('[')?.split_once(']')?.0.trim().parse().ok()
}

/// What went on from the request on, as the console shows it: the new part of it.
fn console_since(vm: &Vm, before: usize) -> String {
    vm.console().get(before..).unwrap_or_default().to_owned()
}

/// Nothing on the console says that somebody waited for a unit in vain.
fn assert_nothing_hung(console: &str) {
    for complaint in ["A stop job is running for OpenCode", "Failed unmounting", "timed out", "Timed out", "Unable to"]
    {
        assert!(!console.contains(complaint), "'{complaint}' on the console:\n{console}");
    }
}

#[test]
fn a_reboot_with_live_sessions_is_not_held_up_by_them() {
    let mut vm = vm();
    // As an operator does in the end; the next boot starts both.
    vm.sh_ok("systemctl enable opencode-pty-supervisor.service opencode-v2.service").unwrap();
    let units = start_sessions(&vm);
    let (boot, console) = (vm.boot_id().unwrap(), vm.console().len());

    let asked = Instant::now();
    ask_for(&vm, "reboot");
    wait_for("the kernel to say that it restarts", || {
        console_since(&vm, console).contains("reboot: Restarting system").then_some(())
    });
    let time = asked.elapsed();
    assert_nothing_hung(&console_since(&vm, console));
    vm.wait_until_up(&mut |line| println!("{line}")).unwrap();
    assert_ne!(vm.boot_id().unwrap(), boot);

    // What the journal of that boot says of each of them.
    let journal = vm.journal(-1).unwrap();
    if time > USUAL_MAX {
        let lines: Vec<&str> = journal.lines().collect();
        let begin = lines.iter().position(|line| line.contains("going-down.service")).unwrap_or_default();
        println!("{} s from the request on:\n{}", time.as_secs(), lines[begin..].join("\n"));
        println!("the console:\n{}", console_since(&vm, console));
    }
    // The last such: other tests of that boot have restarted the supervisor, too.
    let line = |text: &str| journal.lines().rfind(|line| line.contains(text)).unwrap_or_else(|| panic!("no '{text}'"));
    for unit in &units {
        let end =
            journal.lines().find(|line| line.contains(unit.as_str()) && line.contains("ended")).unwrap_or_default();
        assert!(end.contains("ended"), "no record of the end of {unit}:\n{journal}");
    }
    let stopping = seconds(line("Stopping opencode-pty-supervisor.service")).unwrap();
    let stopped = seconds(line("Stopped opencode-pty-supervisor.service")).unwrap();
    assert!(!journal.contains("opencode-pty-supervisor.service: State 'stop-sigterm' timed out"), "{journal}");
    // Its own limit; beyond that it would have been killed.
    assert!(stopped - stopping < 20.0, "the supervisor took from {stopping} to {stopped}");
    println!(
        "| a reboot with {} sessions, two of them immune to TERM and HUP | TimeoutStopSec=20s | all ended and recorded, \
         supervisor stopped in {:.1} s, the machine restarted {} s after the request |",
        units.len(),
        stopped - stopping,
        time.as_secs()
    );

    // The new boot has nothing of the old one, and serves.
    vm.sh_ok("systemctl is-active opencode-pty-supervisor.service opencode-v2.service").unwrap();
    let left = vm
        .sh_ok("systemctl list-units --all --plain --no-legend 'opencode-pty-*.service' | grep -v supervisor || true");
    assert_eq!(left.unwrap(), "");
    let words = format!("{FILES}/opencode-vm-agent sessions 1 /bin/cat");
    vm.sh_ok(&format!("systemd-run --quiet --unit=holder --property=StandardOutput=file:/run/holder {words}")).unwrap();
    wait_for("a session after the reboot", || {
        vm.sh_ok("cat /run/holder 2>/dev/null || true").unwrap().contains("\nall").then_some(())
    });
    vm.sh_ok("systemctl stop holder.service").unwrap();
}

#[test]
fn a_switched_off_machine_with_live_sessions_goes_off() {
    let mut vm = vm();
    let units = start_sessions(&vm);
    let console = vm.console().len();

    let asked = Instant::now();
    ask_for(&vm, "poweroff");
    // The console is a file of the VM's, which outlives it.
    vm.wait_until_off(SOON).unwrap();
    let time = asked.elapsed();
    let said = console_since(&vm, console);
    assert!(said.contains("reboot: Power down"), "{said}");
    assert_nothing_hung(&said);
    println!(
        "| a power-off with {} sessions of the same kinds | TimeoutStopSec=20s | off {} s after the request |",
        units.len(),
        time.as_secs()
    );
}
