//! `cargo xtask test`: everything that shows whether the tree works, with one line a stage and one line at the end.

mod run;

use std::fs;
use std::ops::AddAssign;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use support::host::{self, BootOptions, Host, Suite};
use support::vm;

pub use self::run::Counts;
use self::run::Ran;
use crate::Failure;
use crate::args::Args;
use crate::containment;
use crate::host::other_account;

const USAGE: &str = "\
Usage: cargo xtask test [--only STAGE,STAGE…]

  check     cargo xtask check
  build     what the hosts get: the product as it ships, the stand-in server, the system tests
  unit      unit, property, protocol and corpus tests: cargo test --workspace
  user      the same binaries as an ordinary user
  readiness the readiness verifier in directory roots of its own, under dash and busybox
  manuals   man pages in mandoc and groff; completions in bash, zsh and fish
  hosts     the test hosts themselves: apart from each other, and gone when they should be
  trixie    tests/system on a host with systemd 257
  bookworm  tests/system on a host with systemd 252
  it        the built binary against the fake manager
  image     what a virtual machine is made of: its disk, kernel, initrd and emulator
  backports attacks and threats of tests/system on a host with systemd 254 and another account
  rehearsal cargo xtask dist, and the pages on installation, acceptance and cutover followed on both
  node      cargo xtask node-test
  soak      cargo xtask soak for two minutes
  bench     cargo xtask bench --smoke: every figure can be measured; says nothing of time
  demo      cargo xtask demo, with a command and as a tour
  vm        cargo xtask vm test: limits under pressure, attacks, reboot and power-off, on a virtual machine

What each printed is in target/test-logs/STAGE.log, the journal of a host whose tests failed beside it. The last line counts
the tests of all stages, those before it name what failed. Exit 0 when nothing failed and every stage ran something.
";

/// The variable that tells the system tests which host to attach to.
pub const HOST: &str = "OPENCODE_PTY_TEST_HOST";

/// Who the stage `user` runs as: nobody.
const ORDINARY_USER: &str = "65534";

/// How many lines of a failed stage's log are shown.
const LINES_SHOWN: usize = 60;

type Run = fn(&Context) -> Ran;

/// Stages one after the other.
type Lane = &'static [(&'static str, Run)];

/// The stages in rows, which follow each other. The lanes of a row run at the same time: what of two processors one of them
/// leaves, as it waits for a linker, a download or a limit of time to pass, another takes.
const ROWS: &[&[Lane]] = &[
    // What the hosts get is built into a directory of its own; cargo builds into two at a time.
    &[&[("check", check), ("unit", unit)], &[("build", build)]],
    &[&[("user", user)], &[("readiness", readiness), ("manuals", manuals)], &[("hosts", hosts)]],
    &[
        &[("trixie", |context| system(context, Suite::Trixie, &[]))],
        &[("bookworm", |context| system(context, Suite::Bookworm, &[]))],
        &[("it", it), ("image", image)],
    ],
    &[
        &[("backports", |context| system(context, Suite::Backports, &threats(&context.root)))],
        &[("rehearsal", rehearsal)],
    ],
    &[&[("node", node)], &[("soak", soak), ("bench", bench)]],
    &[&[("demo", demo)]],
    &[&[("vm", vm)]],
];

/// What the stages share.
struct Context {
    root: PathBuf,
    logs: PathBuf,
    built: OnceLock<Result<Built, String>>,
}

/// What goes onto the hosts, and the tests that use it; built once.
struct Built {
    product: PathBuf,
    standin: PathBuf,
    tests: PathBuf,
}

impl Context {
    fn log(&self, stage: &str) -> PathBuf {
        self.logs.join(format!("{stage}.log"))
    }

    /// `cargo` with these words, in the workspace.
    fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(cargo());
        command.args(arguments).current_dir(&self.root);
        command
    }

    fn built(&self) -> Result<&Built, String> {
        let build = || {
            let product = host::build_product().map_err(|error| error.to_string())?;
            let standin = host::build_standin().map_err(|error| error.to_string())?;
            let tests = test_binaries(&self.root, &["--package", "opencode-pty", "--test", "system"])?;
            let (tests, _) = tests.into_iter().next().ok_or("cargo built no system test")?;
            Ok(Built { product, standin, tests })
        };
        self.built.get_or_init(build).as_ref().map_err(Clone::clone)
    }
}

pub fn main(words: &[String]) -> Result<ExitCode, Failure> {
    let mut args = Args::new(words, USAGE)?;
    let only: Option<Vec<String>> = args.option("--only")?.map(|names| names.split(',').map(str::to_owned).collect());
    args.finish(0)?;
    for name in only.iter().flatten() {
        if !ROWS.iter().copied().flatten().copied().flatten().any(|(known, _)| known == name) {
            return Err(Failure::Usage(format!("no such stage '{name}'\n{USAGE}")));
        }
    }

    let context = Context { root: host::workspace(), logs: host::target().join("test-logs"), built: OnceLock::new() };
    let _ = fs::remove_dir_all(&context.logs);
    fs::create_dir_all(&context.logs).map_err(|error| format!("cannot make {}: {error}", context.logs.display()))?;

    let mut total = Sum::default();
    let chosen = |name: &str| only.as_ref().is_none_or(|only| only.iter().any(|chosen| chosen == name));
    for row in ROWS {
        for sum in run_row(&context, row, &chosen)? {
            total += sum;
        }
    }
    // Once more at the end: of a long output that is what is read, and sometimes all that is kept of it.
    for failed in &total.failed {
        println!("failed: {failed}");
    }
    println!("{}", total.counts);
    if total.counts.failed > 0 { Err(Failure::Failed(String::new())) } else { Ok(ExitCode::SUCCESS) }
}

/// What stages add to the last lines.
#[derive(Default)]
struct Sum {
    counts: Counts,
    /// Each failed test, or the fault of a stage without one, behind its stage's name.
    failed: Vec<String>,
}

impl AddAssign for Sum {
    fn add_assign(&mut self, other: Self) {
        self.counts += other.counts;
        self.failed.extend(other.failed);
    }
}

/// Runs the chosen stages of a row, and prints a line for each when it is done. Gives back what each lane adds to the sum.
fn run_row(context: &Context, row: &[Lane], chosen: &(dyn Fn(&str) -> bool + Sync)) -> Result<Vec<Sum>, Failure> {
    let run_lane = |lane: Lane| {
        let mut sum = Sum::default();
        for (name, run) in lane.iter().filter(|(name, _)| chosen(name)) {
            eprintln!("       {name} …");
            let started = Instant::now();
            let ran = run(context);
            sum += report(context, name, &ran, started);
        }
        sum
    };
    thread::scope(|scope| {
        let running: Vec<_> = row.iter().map(|&lane| scope.spawn(move || run_lane(lane))).collect();
        running
            .into_iter()
            .map(|lane| lane.join().map_err(|_| Failure::Failed("a stage panicked".to_owned())))
            .collect()
    })
}

/// Prints a stage's line, and the end of its log if it failed. Gives back what it adds to the sum.
fn report(context: &Context, name: &str, ran: &Ran, started: Instant) -> Sum {
    let seconds = started.elapsed().as_secs_f32();
    let mut counts = ran.counts;
    let Some(fault) = &ran.fault else {
        let tests = if counts == Counts::default() { String::new() } else { format!("  {counts}") };
        println!("ok     {name:<9} {seconds:6.1} s{tests}");
        return Sum { counts, failed: Vec::new() };
    };
    // A stage that fails without a failed test fails all the same.
    counts.failed = counts.failed.max(1);
    let log = context.log(name);
    let text = fs::read_to_string(&log).unwrap_or_default();
    // A fault of many lines is what a program said that has no log.
    let (fault, more) = fault.split_once('\n').unwrap_or((fault, ""));
    // In one piece: another stage may be printing, too.
    let mut shown = format!("FAILED {name:<9} {seconds:6.1} s  {counts}: {fault} ({})\n", log.display());
    for line in excerpt(if more.is_empty() { &text } else { more }) {
        shown.push_str("       | ");
        shown.push_str(line);
        shown.push('\n');
    }
    print!("{shown}");
    let mut failed = failed_tests(&text);
    if failed.is_empty() {
        failed.push(fault);
    }
    Sum { counts, failed: failed.into_iter().map(|failed| format!("{name}: {failed}")).collect() }
}

/// The tests that libtest lists behind the last of its `failures:`, of all binaries in a log.
fn failed_tests(log: &str) -> Vec<&str> {
    let mut lines = log.lines();
    let mut failed = Vec::new();
    while lines.any(|line| line == "failures:") {
        failed.extend(lines.by_ref().map_while(|line| line.strip_prefix("    ")));
    }
    failed
}

/// What a reader of a failed stage's log wants to see first: the failures that libtest reports, or else the end.
fn excerpt(log: &str) -> Vec<&str> {
    let lines: Vec<&str> = log.lines().collect();
    let failures = lines.iter().position(|line| *line == "failures:");
    let start = failures.unwrap_or_else(|| lines.len().saturating_sub(LINES_SHOWN));
    let ends = |line: &&str| failures.is_some() && line.starts_with("test result: ");
    lines.into_iter().skip(start).take(LINES_SHOWN).take_while(|line| !ends(line)).collect()
}

fn check(context: &Context) -> Ran {
    run_own(context, &["check"], &context.log("check"))
}

fn unit(context: &Context) -> Ran {
    let mut command = context.cargo(&["test", "--workspace", "--no-fail-fast"]);
    run::logged(&mut command, &context.log("unit")).with_tests()
}

/// Runs the test binaries of `unit` as nobody. (As that user cargo could not write to `target/`.)
fn user(context: &Context) -> Ran {
    let binaries = match test_binaries(&context.root, &["--workspace"]) {
        Ok(binaries) => binaries,
        Err(fault) => return Ran::fault(fault),
    };
    let log = context.log("user");
    let mut sum = Ran::default();
    for (binary, package) in binaries {
        let mut command = as_ordinary_user(&context.root);
        command.arg(&binary).current_dir(&package).env("CARGO_MANIFEST_DIR", &package).env("HOME", "/nonexistent");
        sum.add(run::logged(&mut command, &log));
    }
    sum.with_tests()
}

/// The beginning of a command that runs as nobody, or as who we are if that is an ordinary user already.
fn as_ordinary_user(root: &Path) -> Command {
    if !rustix::process::geteuid().is_root() {
        return Command::new("env");
    }
    let setpriv = |more: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", ORDINARY_USER, "--regid", ORDINARY_USER, "--clear-groups"]).args(more);
        command
    };
    let readable = setpriv(&["test", "-r"]).arg(root.join("Cargo.toml")).status().is_ok_and(|status| status.success());
    if readable {
        return setpriv(&[]);
    }
    // The tree lies below a directory that is closed to others; that one power opens it, for reading.
    setpriv(&["--inh-caps", "-all,+dac_read_search", "--ambient-caps", "-all,+dac_read_search"])
}

fn it(context: &Context) -> Ran {
    if let Err(error) = host::install_tools(&mut |line| eprintln!("       it: {line}")) {
        return Ran::fault(error.to_string());
    }
    let mut command = context.cargo(&["test", "--package", "opencode-pty", "--test", "it"]);
    run::logged(&mut command, &context.log("it")).with_tests()
}

fn manuals(context: &Context) -> Ran {
    if let Err(error) = host::install_readers(&mut |line| eprintln!("       manuals: {line}")) {
        return Ran::fault(error.to_string());
    }
    let mut command = context.cargo(&["test", "--package", "opencode-pty", "--test", "manuals"]);
    run::logged(&mut command, &context.log("manuals")).with_tests()
}

fn readiness(context: &Context) -> Ran {
    if let Err(error) = host::install_tools(&mut |line| eprintln!("       readiness: {line}")) {
        return Ran::fault(error.to_string());
    }
    let mut command = context.cargo(&["test", "--package", "opencode-pty", "--test", "readiness"]);
    run::logged(&mut command, &context.log("readiness")).with_tests()
}

fn hosts(context: &Context) -> Ran {
    let mut command = context.cargo(&["test", "--package", "support", "--test", "host"]);
    run::logged(&mut command, &context.log("hosts")).with_tests()
}

fn build(context: &Context) -> Ran {
    context.built().map_or_else(Ran::fault, |_| Ran::default())
}

/// The tests of tests/system that are about threats: the modules, and what docs/threats.md names.
fn threats(root: &Path) -> Vec<String> {
    let page = fs::read_to_string(root.join("docs/threats.md")).unwrap_or_default();
    let named = containment::rows(&page).into_iter().flat_map(|row| row.tests);
    ["attacks::", "threats::"].into_iter().map(str::to_owned).chain(named).collect()
}

/// Runs them on a host of this suite, with the log where other stages' logs are not: for `cargo xtask containment`.
pub fn threats_on(suite: Suite, logs: &Path) -> Result<(), Failure> {
    let context = Context { root: host::workspace(), logs: logs.to_owned(), built: OnceLock::new() };
    let started = Instant::now();
    let ran = system(&context, suite, &threats(&context.root));
    match report(&context, suite.name(), &ran, started).counts.failed {
        0 => Ok(()),
        failed => Err(Failure::Failed(format!("{failed} tests failed on {suite}"))),
    }
}

/// The system tests whose name has one of these words, or all of them.
fn system(context: &Context, suite: Suite, filter: &[String]) -> Ran {
    match on_a_host(context, suite, filter) {
        Ok(ran) => ran.with_tests(),
        Err(fault) => Ran::fault(fault),
    }
}

fn on_a_host(context: &Context, suite: Suite, filter: &[String]) -> Result<Ran, String> {
    let built = context.built()?;
    let name = format!("test-{suite}-{}", std::process::id());
    let text = |error: host::Error| error.to_string();
    let mut host = Host::boot(&BootOptions { name, suite, ephemeral: true }, &mut |line| eprintln!("       {line}"))
        .map_err(text)?;
    if suite == Suite::Backports {
        // Nothing may depend on the account that the units are written for.
        host.change_account(other_account("worker")).map_err(text)?;
    }
    let prepared = host::install(&host, &built.product)
        .and_then(|()| host::install_standin(&host, &built.standin))
        .and_then(|()| host::start(&host));
    let ran = match prepared {
        Ok(()) => {
            let mut command = Command::new(&built.tests);
            // The attacks print what came of them.
            command.args(["--test-threads=1", "--show-output"]).args(filter).env(HOST, host.name());
            command.env("CARGO_MANIFEST_DIR", &context.root).current_dir(&context.root);
            run::logged(&mut command, &context.log(suite.name()))
        }
        Err(error) => Ran::fault(error.to_string()),
    };
    if ran.fault.is_some() {
        let directory = context.logs.join(suite.name());
        let journal = host.journal().map_err(text)?;
        fs::create_dir_all(&directory)
            .and_then(|()| fs::write(directory.join("journal.txt"), journal))
            .map_err(|error| format!("cannot keep the journal: {error}"))?;
    }
    host.down().map_err(text)?;
    Ok(ran)
}

fn rehearsal(context: &Context) -> Ran {
    if let Err(error) = host::install_tools(&mut |line| eprintln!("       rehearsal: {line}")) {
        return Ran::fault(error.to_string());
    }
    let mut command = context.cargo(&["test", "--package", "xtask", "--test", "rehearsal"]);
    run::logged(&mut command, &context.log("rehearsal")).with_tests()
}

fn soak(context: &Context) -> Ran {
    run_own(context, &["soak", "--minutes", "2"], &context.log("soak"))
}

fn bench(context: &Context) -> Ran {
    run_own(context, &["bench", "--smoke"], &context.log("bench"))
}

fn node(context: &Context) -> Ran {
    run_own(context, &["node-test"], &context.log("node")).with_tests()
}

fn image(_: &Context) -> Ran {
    vm::prepare(&mut |line| eprintln!("       image: {line}"))
        .map_or_else(|error| Ran::fault(error.to_string()), |()| Ran::default())
}

fn vm(context: &Context) -> Ran {
    run_own(context, &["vm", "test"], &context.log("vm")).with_tests()
}

/// How long a demo may take on a machine that has everything. Chosen: a newcomer waits so long.
const SECOND_DEMO_TIME: Duration = Duration::from_secs(5);
/// How often it may try: a machine may stand still for a moment, and what is claimed is that it can. Chosen.
const SECOND_DEMOS: usize = 3;

/// The demo with a command, as the README shows it, and without.
fn demo(context: &Context) -> Ran {
    let demos = || -> Result<(), String> {
        let with_command = ["--", "/bin/sh", "-c", "tty; id; pwd; exit 7"];
        demo_once(context, &with_command, 7, &[host::WORKSPACE, "exit: exited 7 (result exit-code)"])?;
        for _ in 0..SECOND_DEMOS {
            if demo_once(context, &[], 0, &["exit: exited 0 (result success)", "is gone"])? < SECOND_DEMO_TIME {
                return Ok(());
            }
        }
        Err(format!("{SECOND_DEMOS} demos after the first took over {SECOND_DEMO_TIME:?} each"))
    };
    demos().map_or_else(Ran::fault, |()| Ran::default())
}

/// One demo; how long it took, if it ended with this code and said all of this.
fn demo_once(context: &Context, words: &[&str], code: i32, texts: &[&str]) -> Result<Duration, String> {
    let log = context.log("demo");
    let ordinary_id = "uid=1000(byk) gid=1000(byk) groups=1000(byk)";
    let before = fs::read_to_string(&log).unwrap_or_default().len();
    let started = Instant::now();
    let run = run_own(context, &[&["demo"], words].concat(), &log);
    let took = started.elapsed();
    let all = fs::read_to_string(&log).unwrap_or_default();
    let said = all.get(before..).unwrap_or_default().replace('\r', "");
    let wanted = ["/dev/pts/", ordinary_id].into_iter().chain(texts.iter().copied());
    let missing: Vec<&str> = wanted.filter(|text| !said.contains(text)).collect();
    let id_line = said.lines().any(|line| line.contains("uid=") && !line.trim().ends_with(ordinary_id));
    match (run.code, run.fault) {
        (None, fault) => Err(fault.unwrap_or_else(|| "the demo was killed".to_owned())),
        (Some(found), _) if found != code => Err(format!("the demo exited {found} instead of {code}")),
        _ if !missing.is_empty() => Err(format!("the demo did not print '{}'", missing.join("', '"))),
        _ if id_line => Err("the session has a further group".to_owned()),
        _ => Ok(took),
    }
}

/// Runs this program again, with another command.
fn run_own(context: &Context, words: &[&str], log: &Path) -> Ran {
    match std::env::current_exe() {
        Ok(program) => run::logged(Command::new(program).args(words).current_dir(&context.root), log),
        Err(error) => Ran::fault(format!("cannot find this program: {error}")),
    }
}

/// Builds tests; gives back each binary with the directory of its package.
pub fn test_binaries(root: &Path, selection: &[&str]) -> Result<Vec<(PathBuf, PathBuf)>, String> {
    let output = Command::new(cargo())
        .args(["test", "--no-run", "--message-format=json-render-diagnostics"])
        .args(selection)
        .current_dir(root)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot run cargo: {error}"))?;
    if !output.status.success() {
        return Err(format!("cannot build the tests:\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    Ok(messages.lines().filter_map(test_binary).collect())
}

/// The executable and the package's directory in one of cargo's messages, if it is about a test.
///
/// The profile is what tells: a program's own target may say `"test":true`, too. Paths with a quote or a backslash are not met.
fn test_binary(message: &str) -> Option<(PathBuf, PathBuf)> {
    let profile = message.split_once("\"profile\":{")?.1.split_once('}')?.0;
    if !profile.contains("\"test\":true") {
        return None;
    }
    let value = |key: &str| Some(message.split_once(&format!("\"{key}\":\""))?.1.split_once('"')?.0);
    let package = Path::new(value("manifest_path")?).parent()?.to_owned();
    Some((value("executable")?.into(), package))
}

fn cargo() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_shown_first_and_otherwise_the_end() {
        assert_eq!(excerpt("a\nfailures:\nb\ntest result: FAILED.\nc"), ["failures:", "b"]);
        let long = "x\n".repeat(LINES_SHOWN) + "last";
        assert_eq!(excerpt(&long).last(), Some(&"last"));
        assert_eq!(excerpt(&long).len(), LINES_SHOWN);
    }

    #[test]
    fn failed_tests_are_named_whatever_they_printed() {
        let log = "\
test a ... FAILED

failures:

---- a stdout ----
    an indented line of its output

failures:
    a
    m::b

test result: FAILED. 0 passed; 2 failed; 0 ignored
failures:
    c
test result: FAILED. 0 passed; 1 failed; 0 ignored
";
        assert_eq!(failed_tests(log), ["a", "m::b", "c"]);
        assert!(failed_tests("test a ... ok\n").is_empty());
    }

    #[test]
    fn a_test_binary_is_found_in_cargos_message() {
        let message = r#"{"reason":"compiler-artifact","manifest_path":"/w/x/Cargo.toml","profile":{"test":true},"executable":"/w/t/x-1","fresh":true}"#;
        assert_eq!(test_binary(message), Some(("/w/t/x-1".into(), "/w/x".into())));
        let program = message.replace("{\"test\":true}", "{\"test\":false},\"target\":{\"test\":true}");
        assert_eq!(test_binary(&program), None);
        assert_eq!(test_binary(&message.replace("\"/w/t/x-1\"", "null")), None);
    }
}
