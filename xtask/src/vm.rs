//! `cargo xtask vm`: a virtual machine with every controller, to try things on and to run its tests.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Duration;

use support::host;
use support::vm::{FILES, HOST, Port, Vm};

use crate::Failure;
use crate::args::Args;
use crate::demo::terminal::Terminal;
use crate::test::{HOST as HOST_VARIABLE, test_binaries};

const USAGE: &str = "\
Usage: cargo xtask vm up|shell|down [--name NAME] [--bare]
       cargo xtask vm run [--name NAME] SCRIPT
       cargo xtask vm test [--name NAME] [--only STEP] [FILTER]

  up     boot a virtual machine (Debian trixie, systemd 257, QEMU without KVM), install the product and the stand-in
         server on it, start both; if it is up already: install both anew, restart both
  shell  a root shell on it
  run    a bash script on it, as root
  test   its tests, on one that is booted for them: inside it what a session may use (`limits`) and a choice of
         tests/system (`system`), from outside a reboot and a power-off with sessions (`shutdown`); FILTER replaces the choice
  down   end it; nothing is left

  --name  its name; by default trixie. With test: use the one of this name that is up, and leave it up
  --bare  only boot it
  --only  limits, system or shutdown
";

pub fn main(words: &[String]) -> Result<ExitCode, Failure> {
    let mut args = Args::new(words, USAGE)?;
    let bare = args.flag("--bare");
    let named = args.option("--name")?;
    let name = named.clone().unwrap_or_else(|| "trixie".to_owned());
    let only = args.option("--only")?;
    match args.first() {
        Some("run") => {
            let words = args.finish(2)?;
            let script = words.last().map_or("", String::as_str);
            run(&name, Port::Tests, &["/bin/bash", "-c", script], io::empty())
        }
        Some("up") => args.finish(1).and_then(|_| up(&name, bare)),
        Some("shell") => args.finish(1).and_then(|_| shell(&name)),
        Some("test") => {
            let filters = args.rest();
            test(named.as_deref(), only.as_deref(), filters.get(1..).unwrap_or_default())
        }
        Some("down") => {
            args.finish(1)?;
            Vm::attach(&name)?.down()?;
            println!("VM {name} is gone");
            Ok(ExitCode::SUCCESS)
        }
        _ => Err(Failure::Usage(USAGE.to_owned())),
    }
}

fn up(name: &str, bare: bool) -> Result<ExitCode, Failure> {
    let binaries = if bare { None } else { Some((host::build_product()?, host::build_standin()?)) };
    let vm = match Vm::attach(name) {
        Ok(vm) => vm,
        Err(_) => Vm::boot(name, false, &mut |line| eprintln!("{line}"))?,
    };
    if let Some((product, standin)) = binaries {
        eprintln!("{vm}: installing the product and the stand-in");
        vm.install(&product, &standin)?;
    }
    println!("{vm} is up");
    println!("a shell: cargo xtask vm shell --name {name}   the end: cargo xtask vm down --name {name}");
    Ok(ExitCode::SUCCESS)
}

/// A shell with a terminal of its own inside, as big as the one here.
fn shell(name: &str) -> Result<ExitCode, Failure> {
    let terminal = Terminal::take()?;
    let size = rustix::termios::tcgetwinsize(io::stdin()).map_or((24, 80), |size| (size.ws_row, size.ws_col));
    let kind = std::env::var("TERM").unwrap_or_else(|_| "dumb".to_owned());
    let script = format!("stty rows {} cols {}; export TERM={kind:?}; cd /root; exec bash -l", size.0, size.1);
    let _raw = terminal.raw()?;
    run(name, Port::Shell, &["/usr/bin/script", "--quiet", "--return", "--command", &script, "/dev/null"], io::stdin())
}

fn run(name: &str, port: Port, words: &[&str], input: impl io::Read + Send + 'static) -> Result<ExitCode, Failure> {
    let status = Vm::attach(name)?.run(port, None, words, input, &mut io::stdout(), &mut io::stderr())?;
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

/// Of tests/system, what is worth its time on a machine ten times slower: what stands on something that container hosts share
/// with the machine they run on (kernel 6.12, its Landlock, controllers, AppArmor) or lack, and a test of each threat.
const SYSTEM: [&str; 9] = [
    "attacks::",
    "threats::",
    "hardening::the_kernel_holds",
    "hardening::what_",
    "frames::a_start_without_its_one_descriptor",
    "admission::a_process_that_connects_and_dies",
    "admission::a_connection_from_before_a_restart",
    "faults::t15_",
    "hanging::t18_a_directory_that_root_may_not_look_at",
];

/// Of these, what takes longest there and stands on none of that, and those about what the attacks try there, too.
const LEFT_OUT: [&str; 7] =
    ["t16_a_session_that_ends_at_once", "t01_a_link_that_is_swapped_in", "t02_", "t09_", "t14_", "t19_", "t22_"];

/// How long a test inside may say nothing before the VM counts as hung. Chosen: the longest take a minute and a half.
const SILENCE_MAX: Duration = Duration::from_mins(5);

/// The steps in their order: the last one ends the VM.
const STEPS: [&str; 3] = ["limits", "system", OUTSIDE];

/// The step whose test runs here and not inside.
const OUTSIDE: &str = "shutdown";

/// Runs the steps; each prints what libtest prints.
fn test(named: Option<&str>, only: Option<&str>, filters: &[String]) -> Result<ExitCode, Failure> {
    let steps: Vec<&str> = STEPS.into_iter().filter(|step| only.is_none_or(|only| only == *step)).collect();
    if steps.is_empty() {
        return Err(Failure::Usage(USAGE.to_owned()));
    }
    let binary = |step: &&str| {
        let built = test_binaries(&host::workspace(), &["--package", "opencode-pty", "--test", step])?;
        built.into_iter().next().map(|(binary, _)| binary).ok_or_else(|| format!("cargo built no test '{step}'"))
    };
    let plan = Plan {
        product: host::build_product()?,
        standin: host::build_standin()?,
        binaries: steps.iter().map(binary).collect::<Result<_, _>>()?,
        steps,
        filters: filters.iter().map(String::as_str).collect(),
    };

    let mut vm = match named {
        Some(name) => plan.prepare(Vm::attach(name)?)?,
        None => plan.boot()?,
    };
    let (mut passed, mut spare) = (true, named.is_none());
    for (step, binary) in plan.steps.iter().zip(&plan.binaries) {
        let mut ran = plan.run(&vm, step, binary);
        // That is the emulator's fault (`support::vm`), and the step's result is none. A second time would be something else.
        if vm.has_panicked() && spare {
            println!("{vm}: its kernel has panicked: {step} again, on another\n{}", vm.console_tail());
            spare = false;
            vm.down()?;
            vm = plan.boot()?;
            ran = plan.run(&vm, step, binary);
        }
        passed &= ran?;
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What is run on a VM.
struct Plan<'a> {
    product: PathBuf,
    standin: PathBuf,
    steps: Vec<&'a str>,
    /// A test for each step.
    binaries: Vec<PathBuf>,
    filters: Vec<&'a str>,
}

impl Plan<'_> {
    fn boot(&self) -> Result<Vm, host::Error> {
        let name = format!("test-{}", std::process::id());
        let boot = || Vm::boot(&name, true, &mut |line| println!("{line}")).and_then(|vm| self.prepare(vm));
        // A machine that does not come up is the emulator's fault or its kernel's; what is tested has not begun.
        boot().or_else(|error| {
            println!("{error}\nonce more");
            boot()
        })
    }

    fn prepare(&self, vm: Vm) -> Result<Vm, host::Error> {
        vm.install(&self.product, &self.standin)?;
        let files = self.steps.iter().copied().zip(self.binaries.iter().map(PathBuf::as_path));
        vm.copy_in(&files.filter(|(step, _)| *step != OUTSIDE).collect::<Vec<_>>())?;
        Ok(vm)
    }

    /// Whether the step passed. If one inside did not, the journal is printed.
    fn run(&self, vm: &Vm, step: &str, binary: &Path) -> Result<bool, Failure> {
        if step == OUTSIDE {
            println!("{vm}: {step}, from outside");
            return Ok(self.outside(vm, binary)?.success());
        }
        println!("{vm}: {step}, inside");
        let status = self.inside(vm, step)?;
        if !status.success() {
            println!("{}", vm.journal(0)?);
        }
        Ok(status.success())
    }

    fn inside(&self, vm: &Vm, step: &str) -> Result<ExitStatus, Failure> {
        let program = format!("{FILES}/{step}");
        let manifest = format!("CARGO_MANIFEST_DIR={}", host::workspace().display());
        let host = format!("{HOST_VARIABLE}={HOST}");
        let mut words = vec!["/usr/bin/env", &host, &manifest, "RUST_BACKTRACE=0", &program];
        // The long forms say nothing for as long as they take.
        let long = std::env::var_os("OPENCODE_PTY_LONG").is_some();
        let silence = (!long).then_some(SILENCE_MAX);
        if long {
            words.insert(1, "OPENCODE_PTY_LONG=1");
        }
        words.extend(["--test-threads=1", "--nocapture"]);
        if self.filters.is_empty() && step == "system" {
            words.extend(SYSTEM);
            words.extend(LEFT_OUT.into_iter().flat_map(|test| ["--skip", test]));
        } else {
            words.extend(&self.filters);
        }
        Ok(vm.run(Port::Tests, silence, &words, io::empty(), &mut io::stdout(), &mut io::stderr())?)
    }

    /// Runs a test here that is told which VM to use.
    fn outside(&self, vm: &Vm, binary: &Path) -> Result<ExitStatus, Failure> {
        let mut command = Command::new(binary);
        command.args(["--test-threads=1", "--nocapture"]).args(&self.filters).env("OPENCODE_PTY_TEST_VM", vm.name());
        let status = command.current_dir(host::workspace()).status();
        Ok(status.map_err(|error| format!("cannot run {}: {error}", binary.display()))?)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::check::docs;
    use crate::containment;

    /// Whether a test of tests/system is run there, by the name that libtest has for it.
    fn is_run(name: &str) -> bool {
        SYSTEM.iter().any(|word| name.contains(word)) && !LEFT_OUT.iter().any(|word| name.contains(word))
    }

    #[test]
    fn every_threat_is_tried_there_by_a_test_or_by_the_attacks() {
        let root = host::workspace();
        let read = |path: &str| fs::read_to_string(root.join(path)).unwrap();
        // docs/threats.md gives a test without its module.
        let run: Vec<String> = docs::functions(&root)
            .into_iter()
            .filter(|(file, _)| file.starts_with("tests/system"))
            .filter(|(file, test)| is_run(&format!("{}::{test}", file.file_stem().unwrap().display())))
            .map(|(_, test)| test)
            .collect();
        let attacks = read("tests/system/attacks.rs");
        let rows = containment::rows(&read("docs/threats.md"));
        assert!(rows.len() >= 22, "{rows:?}");
        for row in rows {
            // What is not closable from here (T21) has no test.
            let tried = row.tests.is_empty()
                || row.tests.iter().any(|test| run.contains(test))
                || attacks.contains(&format!("\"{}\", Held", row.threat));
            assert!(tried, "{row:?}");
        }
    }
}
