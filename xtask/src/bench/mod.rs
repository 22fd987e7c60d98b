//! `cargo xtask bench`: how fast the product is, beside what a user would pick instead, in one run on one host.

mod contenders;
mod loops;
mod measure;
mod page;
mod picture;
mod report;
mod stats;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use support::host::{self, BootOptions, Host, Suite};

use self::measure::Bench;
use self::report::{Machine, Report};
use crate::Failure;
use crate::args::Args;

const USAGE: &str = "\
Usage: cargo xtask bench [--quick | --smoke] [--json FILE] [--write-docs] [--suite bookworm|trixie] [--binary FILE]
       cargo xtask bench --only PART [--quick] [--json FILE] [--suite bookworm|trixie] [--binary FILE]
       cargo xtask bench --from FILE [--write-docs]

  Boots a host, installs the product, and measures sessions, systemd-run, script(1) and bare units in turn: A B C A B C.
  Prints a table with medians, spreads and ratios.

  --quick       fewer samples: two minutes instead of ten
  --smoke       one sample of everything: shows that every figure can be measured, and says nothing of time
  --only        one part: starts, helper, bus, echo, flow, idle, flood, instructions, memory or growth
  --json        the same as data
  --write-docs  docs/performance/bench.json and bench.svg, and the tables of docs/performance.md, from this run
  --from        measures nothing: takes what an earlier run wrote with --json
  --suite       the host's release (default trixie)
  --binary      the product to measure, instead of the one that this tree builds

Instruction counts need valgrind; without it they are left out, and the report says so. Wants a quiet machine.
Exit 0 if every figure was measured; a missed target is no failure.
";

/// How much is measured.
pub struct Size {
    name: &'static str,
    /// Samples of each start.
    starts: usize,
    /// Bytes of one throughput sample, MiB, all sessions together.
    flow_mib: u64,
    flows: usize,
    /// Round trips of a sample, and samples.
    trips: usize,
    trip_rounds: usize,
    /// Idle sessions at which memory and growth are measured.
    sessions: &'static [usize],
    growth_starts: usize,
    idle_seconds: u64,
    flood_seconds: u64,
    /// Turns of each loop under callgrind; 0 leaves the loops out, and measures with what the tests have built already.
    turns: u64,
}

const FULL: Size = Size {
    name: "full",
    starts: 30,
    flow_mib: 256,
    flows: 3,
    trips: 1_000,
    trip_rounds: 5,
    sessions: &[0, 1, 16, 64, 256],
    growth_starts: 10,
    idle_seconds: 20,
    flood_seconds: 5,
    turns: 2_000,
};

const QUICK: Size = Size {
    name: "quick",
    starts: 8,
    flow_mib: 32,
    flows: 2,
    trips: 500,
    trip_rounds: 2,
    sessions: &[0, 1, 16, 64],
    growth_starts: 4,
    idle_seconds: 10,
    flood_seconds: 2,
    turns: 500,
};

const SMOKE: Size = Size {
    name: "smoke",
    starts: 1,
    flow_mib: 1,
    flows: 1,
    trips: 20,
    trip_rounds: 1,
    sessions: &[0, 1, 16, 17],
    growth_starts: 1,
    idle_seconds: 1,
    flood_seconds: 1,
    turns: 0,
};

pub fn main(words: &[String]) -> Result<ExitCode, Failure> {
    let mut args = Args::new(words, USAGE)?;
    let (quick, smoke, write_docs) = (args.flag("--quick"), args.flag("--smoke"), args.flag("--write-docs"));
    let (json, from) = (args.option("--json")?, args.option("--from")?);
    let (binary, only) = (args.option("--binary")?, args.option("--only")?);
    let suite: Suite = match args.option("--suite")? {
        Some(name) => name.parse().map_err(Failure::Usage)?,
        None => Suite::Trixie,
    };
    args.finish(0)?;
    let size = match (quick, smoke) {
        (false, false) => FULL,
        (true, false) => QUICK,
        (false, true) => SMOKE,
        (true, true) => return Err(Failure::Usage(format!("--quick or --smoke, not both\n{USAGE}"))),
    };
    if let Some(part) = only.as_deref() {
        if !Bench::PARTS.iter().any(|(known, _)| *known == part) {
            return Err(Failure::Usage(format!("'{part}' is no part of the bench\n{USAGE}")));
        }
        if write_docs || from.is_some() {
            return Err(Failure::Usage(format!("--only measures too little for --write-docs and --from\n{USAGE}")));
        }
    }

    let report = match &from {
        Some(file) => read(file)?,
        None => run(size, suite, binary.map(PathBuf::from), only.as_deref())?,
    };
    print!("{}", report.table());
    if let Some(file) = json {
        write(Path::new(&file), &as_json(&report)?)?;
    }
    if write_docs {
        page::write_docs(&report)?;
    }
    let missing = if only.is_some() { Vec::new() } else { report.missing(measure::FIGURES) };
    if missing.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure::Failed(format!("not measured: {}", missing.join(", "))))
}

fn run(size: Size, suite: Suite, binary: Option<PathBuf>, only: Option<&str>) -> Result<Report, Failure> {
    let say = |line: &str| eprintln!("bench: {line}");
    say("building, if something has changed");
    let product = match binary {
        Some(file) => file,
        None => host::build_product()?,
    };
    let (standin, loops) = match size.turns {
        0 => (host::build_standin()?, None),
        _ => host::build_bench().map(|(standin, loops)| (standin, Some(loops)))?,
    };
    let name = format!("bench-{}", std::process::id());
    let host = Host::boot(&BootOptions { name, suite, ephemeral: true }, &mut |line| say(line))?;
    host::install(&host, &product)?;
    host::install_standin(&host, &standin)?;
    host::start(&host)?;
    let machine = machine(&host)?;
    let mut report = Bench::new(&host, size, loops.as_deref(), machine)?.run(only)?;
    report.machine.load_after = load();
    host.down()?;
    Ok(report)
}

fn machine(host: &Host) -> Result<Machine, Failure> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let models: Vec<&str> = cpuinfo
        .lines()
        .filter_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name))
        .collect();
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    Ok(Machine {
        date: said(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M UTC"])),
        revision: said(Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(host::workspace())),
        processor: models.first().map_or_else(|| "unknown".to_owned(), |&name| name.trim().to_owned()),
        processors: models.len(),
        memory_gib: kib.unwrap_or_default() / f64::from(1 << 20),
        kernel: kernel.trim().to_owned(),
        systemd: host.sh_ok("systemctl --version | head -n 1")?,
        script: host.sh_ok("script --version")?,
        load_before: load(),
        load_after: String::new(),
    })
}

fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}

/// What a command prints, or nothing: it is for the record alone.
fn said(command: &mut Command) -> String {
    let output = command.output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).trim().to_owned()
}

fn as_json(report: &Report) -> Result<String, Failure> {
    let json = serde_json::to_string_pretty(report).map_err(|error| format!("cannot write JSON: {error}"))?;
    Ok(json + "\n")
}

fn read(file: &str) -> Result<Report, Failure> {
    let text = fs::read_to_string(file).map_err(|error| format!("cannot read {file}: {error}"))?;
    Ok(serde_json::from_str(&text).map_err(|error| format!("{file} is no report: {error}"))?)
}

fn write(file: &Path, text: &str) -> Result<(), Failure> {
    Ok(fs::write(file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))?)
}
