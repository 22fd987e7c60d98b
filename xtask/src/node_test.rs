//! `cargo xtask node-test`: the Node side, under every runtime it is for, as the main process of the server's unit.
//!
//! The smoke in `tests/node/smoke` runs *inside* the unit, as the server does; it writes what it found to a file. What only
//! somebody outside can see, that a server which was killed leaves nothing, is looked at from here.

mod opencode;
mod runtimes;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::host::{self, BootOptions, Host, SERVER, SUPERVISOR, Suite, WORKSPACE};

use self::runtimes::Runtime;
use self::table::{Outcome, Table};
use crate::Failure;
use crate::args::Args;

const USAGE: &str = "\
Usage: cargo xtask node-test [--runs N] [--runtime NAME,NAME…] [--only TEXT] [--suite bookworm|trixie] [--write]

  Gets the exact runtimes of tests/node/runtimes.lock from the package registry, builds the single executable, boots two hosts
  (a runtime at a time on each), and runs tests/node/smoke as the main process of opencode-v2.service; kills it there at each
  stage; and runs it against a supervisor of its own. Drives the published OpenCode with the plugin. Prints a table of scenario
  × runtime, which is also in target/node-test/table.md.

  --runs     how often everything is run (default 1). With 2 or more the private supervisor gets all scenarios, not a few
  --runtime  which of sea, node26, node20, bun, opencode (default all)
  --only     only the scenarios whose name has this in it, and nothing killed
  --suite    the host's release (default trixie)
  --write    the table goes into docs/plugin.md, too

Exit 0 if nothing failed.
";

/// How many hosts there are. Chosen: what is tried waits for limits of time more than it computes.
const HOSTS: usize = 2;
/// Where everything is on the host. The account's own; no folder from which plugins load by themselves.
const HOME: &str = "/home/byk/node";
/// How long one run of all scenarios may take. Chosen: half a minute is usual.
const RUN_SECONDS_MAX: u32 = 600;
/// How long something of a killed server's session may still be there. Chosen: two seconds are usual.
const GONE_TIME: Duration = Duration::from_secs(30);
/// Between two looks at what sends no event to here.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// The server's unit and socket of a run.
#[derive(Clone, Copy)]
struct Place {
    supervisor: &'static str,
    server: &'static str,
    socket: &'static str,
}

/// As installed.
const INSTALLED: Place = Place { supervisor: SUPERVISOR, server: SERVER, socket: "/run/opencode-pty/supervisor.sock" };

/// A second one beside it, of the test's own.
const PRIVATE: Place = Place {
    supervisor: "opencode-pty-supervisor-smoke.service",
    server: "opencode-v2-smoke.service",
    socket: "/run/opencode-pty-smoke/supervisor.sock",
};

/// When the server is killed; `tests/node/smoke/die.js` knows how to get there.
const STAGES: [&str; 8] = [
    "connected",
    "helper running",
    "helper running, frame sent",
    "helper gone",
    "started",
    "in the middle of output",
    "in the middle of a write",
    "stopping",
];

pub fn main(words: &[String]) -> Result<ExitCode, Failure> {
    let mut args = Args::new(words, USAGE)?;
    let write = args.flag("--write");
    let runs: u32 = match args.option("--runs")? {
        Some(number) => number.parse().map_err(|_| Failure::Usage(format!("'{number}' is no number\n{USAGE}")))?,
        None => 1,
    };
    let chosen = args.option("--runtime")?;
    let only = args.option("--only")?;
    let suite: Suite = match args.option("--suite")? {
        Some(name) => name.parse().map_err(Failure::Usage)?,
        None => Suite::Trixie,
    };
    args.finish(0)?;

    let chosen: Option<BTreeSet<&str>> = chosen.as_deref().map(|names| names.split(',').collect());
    let work = host::target().join("node-test");
    fs::create_dir_all(&work).map_err(|error| format!("cannot make {}: {error}", work.display()))?;
    let mut progress = |line: &str| eprintln!("{line}");
    let mut runtimes = runtimes::get(chosen.as_ref(), &work, &mut progress)?;
    let mut missing = None;
    if chosen.as_ref().is_none_or(|chosen| chosen.contains(opencode::NAME)) {
        let (opencode, why) = opencode::get(&mut progress);
        runtimes.push(opencode);
        missing = why;
    }

    // Every column on one of the hosts, whichever is free.
    let next = AtomicUsize::new(0);
    let (product, standin) = (host::build_product()?, host::build_standin()?);
    let on_a_host = |index: usize| -> Result<_, Failure> {
        let mut smoke = Smoke::prepare(suite, index, (&product, &standin), runs, only.clone())?;
        let mut columns = Vec::new();
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(runtime) = runtimes.get(place) else { break };
            let mut column = Table::new(&runtimes);
            match &missing {
                Some(why) if runtime.name == opencode::NAME => {
                    column.add("OpenCode: all of it", runtime, Outcome::Skipped(why.clone()));
                }
                _ => smoke.run_all(runtime, &mut column)?,
            }
            columns.push((place, column));
        }
        let descriptors = smoke.supervisor_is_as_before()?;
        if descriptors.is_some() || columns.iter().any(|(_, column)| column.counts().failed > 0) {
            smoke.keep_journal(&work)?;
        }
        Ok((columns, descriptors))
    };
    let hosts: Vec<_> = thread::scope(|scope| {
        let running: Vec<_> =
            (0..HOSTS.min(runtimes.len())).map(|index| scope.spawn(move || on_a_host(index))).collect();
        running
            .into_iter()
            .map(|host| host.join().unwrap_or_else(|_| Err(Failure::Failed("a host's thread panicked".to_owned()))))
            .collect::<Result<_, Failure>>()
    })?;
    let mut table = Table::new(&runtimes);
    let (columns, descriptors): (Vec<_>, Vec<_>) = hosts.into_iter().unzip();
    let in_their_places: BTreeMap<usize, Table> = columns.into_iter().flatten().collect();
    for column in in_their_places.into_values() {
        table.append(column);
    }
    let descriptors = descriptors.into_iter().flatten().next();
    let text = table.markdown();
    print!("{text}");
    let file = work.join("table.md");
    fs::write(&file, &text).map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    if write {
        table::write_into(&host::workspace().join("docs/plugin.md"), &text)?;
    }

    print!("{}", table.failures());
    let counts = table.counts();
    let verdict = if counts.failed == 0 && descriptors.is_none() { "ok" } else { "FAILED" };
    println!(
        "test result: {verdict}. {} passed; {} failed; {} ignored; 0 measured; 0 filtered out",
        counts.passed, counts.failed, counts.skipped
    );
    if let Some(difference) = descriptors {
        return Err(Failure::Failed(difference));
    }
    if counts.failed > 0 {
        return Err(Failure::Failed(format!("{} of {} failed", counts.failed, counts.passed + counts.failed)));
    }
    Ok(ExitCode::SUCCESS)
}

/// A host with everything on it but the runtimes.
struct Smoke {
    host: Host,
    runs: u32,
    only: Option<String>,
    /// What the supervisor had open after the first run, when it had done everything once.
    descriptors: Option<String>,
}

impl Smoke {
    fn prepare(
        suite: Suite,
        index: usize,
        (product, standin): (&Path, &Path),
        runs: u32,
        only: Option<String>,
    ) -> Result<Self, Failure> {
        let name = format!("node-test-{suite}-{}-{index}", std::process::id());
        let host = Host::boot(&BootOptions { name, suite, ephemeral: true }, &mut |line| eprintln!("{line}"))?;
        host::install(&host, product)?;
        host::install_standin(&host, standin)?;
        host::copy_library(&host, "libatomic.so.1")?;
        host.sh_ok(&format!("mkdir -p {HOME}/results"))?;
        host::copy_tree(&host, &host::workspace().join("tests/node"), &format!("{HOME}/tests"))?;
        install_private(&host)?;
        Ok(Self { host, runs, only, descriptors: None })
    }

    /// Everything under one runtime.
    fn run_all(&mut self, runtime: &Runtime, table: &mut Table) -> Result<(), Failure> {
        eprintln!("{}: {}", self.host, runtime.title);
        if runtime.name == opencode::NAME {
            return (0..self.runs).try_for_each(|_| opencode::run(self, runtime, table));
        }
        if runtime.name.starts_with("node") && self.only.is_none() {
            // Needs neither a host nor a supervisor.
            let tests = host::workspace().join("tests/node/plugin/tests/pure.test.js");
            let outcome = match run_here(Command::new(&runtime.program).arg("--test").arg(tests)) {
                Ok(_) => Outcome::Passed,
                Err(why) => Outcome::Failed(why),
            };
            table.add("plugin: escapes, patterns, text, commands and schemas, in tests of their own", runtime, outcome);
        }
        host::copy_program(&self.host, &runtime.program, &format!("{HOME}/bin/{}", runtime.name))?;
        for _ in 0..self.runs {
            self.run_scenarios(runtime, INSTALLED, false, table)?;
            if self.descriptors.is_none() {
                self.descriptors = Some(self.settled_descriptors()?);
            }
        }
        if self.only.is_none() {
            for _ in 0..self.runs {
                for stage in STAGES {
                    let outcome = self.kill_at(runtime, stage)?;
                    table.add(&format!("killed when {stage}: nothing is left"), runtime, outcome);
                }
            }
            self.run_private(runtime, table)?;
        }
        self.host.sh_ok(&format!("rm {HOME}/bin/{}", runtime.name))?;
        Ok(())
    }

    /// One run of all scenarios, or of the few of the core, each a line in the table.
    fn run_scenarios(&self, runtime: &Runtime, place: Place, core: bool, table: &mut Table) -> Result<u64, Failure> {
        let plan = plan(runtime, place, core, self.only.as_deref(), None);
        let lines = self.run(runtime, place, &plan)?;
        let mut done = false;
        let mut failed = 0;
        for line in &lines {
            if let Some(name) = line["scenario"].as_str() {
                for note in line["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                    println!("note    {}: {name}: {note}", runtime.title);
                }
                let outcome = match line["skipped"].as_str() {
                    Some(reason) => Outcome::Skipped(reason.to_owned()),
                    None if line["ok"] == json!(true) => Outcome::Passed,
                    None => Outcome::Failed(line["error"].as_str().unwrap_or("without a word").to_owned()),
                };
                failed += u64::from(matches!(outcome, Outcome::Failed(_)));
                if place.server == INSTALLED.server {
                    table.add(name, runtime, outcome);
                } else if let Outcome::Failed(why) = outcome {
                    table.add(&format!("private supervisor: {name}"), runtime, Outcome::Failed(why));
                }
            } else if let Some(fault) = line["fault"].as_str() {
                failed += 1;
                table.add("the run gets to its end", runtime, Outcome::Failed(fault.to_owned()));
            }
            done |= line["done"] == json!(true);
        }
        if !done && failed == 0 {
            failed += 1;
            let last = lines.last().map_or_else(String::new, |line| format!(" after {line}"));
            let journal = self.host.sh_ok(&format!("journalctl --no-pager --lines=30 --unit={}", place.server))?;
            let why = format!("it ended{last}\n{journal}");
            table.add("the run gets to its end", runtime, Outcome::Failed(why));
        }
        Ok(failed)
    }

    /// The server is killed at this stage; afterwards nothing of its session may be there.
    fn kill_at(&self, runtime: &Runtime, stage: &str) -> Result<Outcome, Failure> {
        let plan = plan(runtime, INSTALLED, false, None, Some(stage));
        let lines = self.run(runtime, INSTALLED, &plan)?;
        if lines.first().and_then(|line| line["stage"].as_str()) != Some(stage) {
            return Ok(Outcome::Failed(format!("the stage was not reached: {lines:?}")));
        }
        let how = self.host.sh_ok(&format!("systemctl show --property=ExecMainStatus --value {}", INSTALLED.server))?;
        if how != "9" {
            return Ok(Outcome::Failed(format!("it was not killed: status {how}")));
        }
        let deadline = Instant::now() + GONE_TIME;
        loop {
            let left = self.left()?;
            if left.is_empty() {
                return Ok(Outcome::Passed);
            }
            if Instant::now() > deadline {
                return Ok(Outcome::Failed(format!("still there: {left}")));
            }
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// What is left of sessions: units, cgroups, files, processes, places taken.
    fn left(&self) -> Result<String, Failure> {
        let script = "{
                systemctl list-units --all --plain --no-legend 'opencode-pty-*.service'
                find /sys/fs/cgroup -type d -name 'opencode-pty-*.service' 2>/dev/null
                find /run/systemd/transient -name 'opencode-pty-*'
            } | grep -v opencode-pty-supervisor
            pgrep --uid byk --list-full .
            systemctl show --property=StatusText --value opencode-pty-supervisor.service | grep -v '^0/'
            true";
        Ok(self.host.sh_ok(script)?)
    }

    /// The same against a supervisor of the test's own, which is there for as long.
    fn run_private(&self, runtime: &Runtime, table: &mut Table) -> Result<(), Failure> {
        let failed = self.run_scenarios(runtime, PRIVATE, self.runs == 1, table)?;
        self.host.sh_ok(&format!("systemctl stop {}", PRIVATE.supervisor))?;
        let outcome = match failed {
            0 => Outcome::Passed,
            _ => Outcome::Failed(format!("{failed} scenarios")),
        };
        table.add("a private supervisor serves as well", runtime, outcome);
        Ok(())
    }

    /// Runs the smoke as the unit's main process until it ends; gives the lines it wrote.
    fn run(&self, runtime: &Runtime, place: Place, plan: &Value) -> Result<Vec<Value>, Failure> {
        let text = |path: &str, text: &str| host::write(&self.host, path, 0o644, text);
        let results = plan["results"].as_str().unwrap_or_default();
        text(&format!("{HOME}/plan.json"), &plan.to_string())?;
        text(results, "")?;
        let main = if runtime.is_single { String::new() } else { format!("{HOME}/tests/smoke/main.js ") };
        text(
            &format!("/etc/systemd/system/{}.d/20-smoke.conf", place.server),
            &format!(
                "[Service]\nExecStart=\nExecStart={HOME}/bin/{} {main}{HOME}/plan.json\nRestart=no\n",
                runtime.name
            ),
        )?;
        self.host.sh_ok(&format!(
            "set -e
            chown byk:byk {results}
            systemctl daemon-reload
            systemctl reset-failed {server} 2>/dev/null || true
            systemctl start {supervisor} {server}
            timeout {RUN_SECONDS_MAX} sh -c 'while systemctl is-active --quiet {server}; do sleep 0.1; done' || true
            systemctl stop {server}",
            supervisor = place.supervisor,
            server = place.server,
        ))?;
        let written =
            fs::read_to_string(self.host.path(results)).map_err(|error| format!("cannot read {results}: {error}"))?;
        written
            .lines()
            .map(|line| serde_json::from_str(line).map_err(|error| format!("the smoke wrote '{line}': {error}").into()))
            .collect()
    }

    fn supervisor_descriptors(&self) -> Result<String, Failure> {
        Ok(self.host.sh_ok(&format!(
            "pid=$(systemctl show --property=MainPID --value {})
            for fd in /proc/$pid/fd/*; do readlink $fd || true; done | sed 's/:.*//' | sort",
            INSTALLED.supervisor
        ))?)
    }

    /// The same, once it stays: the last connection may still be closing.
    fn settled_descriptors(&self) -> Result<String, Failure> {
        let deadline = Instant::now() + GONE_TIME;
        let mut last = self.supervisor_descriptors()?;
        loop {
            thread::sleep(LOOK_AGAIN);
            let now = self.supervisor_descriptors()?;
            if now == last {
                return Ok(now);
            }
            if Instant::now() > deadline {
                return Err(Failure::Failed(format!("the supervisor had open:\n{last}\nand then:\n{now}")));
            }
            last = now;
        }
    }

    /// What the supervisor has open that it didn't, or doesn't any more; nothing is how it must be.
    fn supervisor_is_as_before(&self) -> Result<Option<String>, Failure> {
        let deadline = Instant::now() + GONE_TIME;
        loop {
            let now = self.supervisor_descriptors()?;
            let Some(before) = self.descriptors.as_ref().filter(|before| **before != now) else { return Ok(None) };
            if Instant::now() > deadline {
                return Ok(Some(format!("the supervisor had open:\n{before}\nand has:\n{now}")));
            }
            thread::sleep(LOOK_AGAIN);
        }
    }

    fn keep_journal(&self, directory: &Path) -> Result<(), Failure> {
        let file = directory.join(format!("{}.journal.txt", self.host.name()));
        fs::write(&file, self.host.journal()?).map_err(|error| format!("cannot write {}: {error}", file.display()))?;
        eprintln!("{}: its journal is in {}", self.host, file.display());
        Ok(())
    }
}

/// What the smoke is to do; `null` is nothing in particular.
fn plan(runtime: &Runtime, place: Place, core: bool, only: Option<&str>, stage: Option<&str>) -> Value {
    json!({
        "runtime": runtime.name,
        "expected": runtime.version,
        "directory": format!("{HOME}/tests"),
        "workspace": WORKSPACE,
        "socket": place.socket,
        "results": format!("{HOME}/results/{}.jsonl", runtime.name),
        "core": core,
        "only": only,
        "stage": stage,
    })
}

/// Unit files of a second supervisor and server: the installed ones under other names.
fn install_private(host: &Host) -> Result<(), Failure> {
    let units = "/etc/systemd/system";
    let read = |name: &str| {
        fs::read_to_string(host.path(format!("{units}/{name}"))).map_err(|error| format!("cannot read {name}: {error}"))
    };
    let supervisor = read(INSTALLED.supervisor)?
        .replace(
            "ExecStart=/usr/local/libexec/opencode-pty-supervisor",
            &format!(
                "ExecStart=/usr/local/libexec/opencode-pty-supervisor --socket {} --unit {} --server-unit {}",
                PRIVATE.socket, PRIVATE.supervisor, PRIVATE.server
            ),
        )
        .replace("RuntimeDirectory=opencode-pty", "RuntimeDirectory=opencode-pty-smoke");
    let server = read(INSTALLED.server)?.replace(INSTALLED.supervisor, PRIVATE.supervisor);
    host.sh_ok(&format!("mkdir -p {units}/{0}.d {units}/{1}.d", INSTALLED.server, PRIVATE.server))?;
    host::write(host, &format!("{units}/{}", PRIVATE.supervisor), 0o644, &supervisor)?;
    host::write(host, &format!("{units}/{}", PRIVATE.server), 0o644, &server)?;
    Ok(())
}

/// Runs a program of the machine's; what it prints is the error if it fails.
fn run_here(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().display().to_string();
    let output = command.output().map_err(|error| format!("cannot run {name}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if !output.status.success() {
        return Err(format!("{name} ended with {}\n{}{}", output.status, text(&output.stdout), text(&output.stderr)));
    }
    Ok(text(&output.stdout))
}
