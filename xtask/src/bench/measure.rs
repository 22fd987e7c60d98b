//! The measurements, one after the other; within each, all contenders in turn.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use opencode_pty::frame::words::encode_word;
use support::host::{self, Host, WORKSPACE};
use support::standin::{CONTROL_PATH, SUPERVISOR_PATH, Standin};

use super::contenders::{Contender, OURS};
use super::report::{Figure, Machine, Report, Target};
use super::stats::{Summary, quantile};
use super::{Size, loops};
use crate::Failure;

/// What every run measures. Instruction counts are the one thing that may be left out.
pub const FIGURES: &[&str] = &[
    "echo-first",
    "echo-exit",
    "bash-prompt",
    "bash-exit",
    "steps",
    "stop",
    "flow-zeros-1",
    "flow-zeros-16",
    "flow-base64-1",
    "flow-base64-16",
    "flow-seq-1",
    "flow-seq-16",
    "cpu",
    "trip",
    "helper",
    "bus",
    "idle",
    "flood",
    "memory-resident",
    "memory-proportional",
    "growth-start",
    "growth-flow",
];

/// Where the second stand-in listens.
const ROOT_CONTROL: &str = "/run/bench-root.sock";
const STANDIN: &str = host::STANDIN_PATH;
/// How long a stand-in has to listen. Chosen.
const START_MAX: Duration = Duration::from_secs(10);
/// Sessions of a flow of many, and those that are there while the supervisor's idleness is looked at.
const MANY: usize = 16;
/// Until what a measurement left behind has come to rest. Chosen.
const SETTLE: Duration = Duration::from_secs(2);

/// A command, as a session's words and as a shell's text.
struct Work<'a> {
    words: &'a [&'a str],
    text: &'a str,
}

const ECHO: Work<'_> = Work { words: &["echo", "hi"], text: "echo hi" };
const BASH: Work<'_> = Work { words: &["bash", "-i"], text: "bash -i" };
const RAW_CAT: &str = "stty raw -echo; echo ready; exec cat";
const IDLE: &str = "printf ready; exec sleep 3600";

/// What is printed, and how.
const FLOWS: [(&str, &str); 3] = [
    ("zeros", "head -c %N /dev/zero"),
    ("base64", "base64 /dev/zero 2>/dev/null | head -c %N"),
    ("seq", "seq 99999999 2>/dev/null | head -c %N"),
];

/// A program that waits for a line, prints so many bytes, and tells what that cost script(1), if it is below one. (There may be a
/// shell between the two. What the process did before it was script(1) does not count.)
fn flow_text(producer: &str, bytes: u64) -> String {
    let producer = producer.replace("%N", &bytes.to_string());
    format!(
        "p=$PPID n= before=0 after=0
        while [ $p -gt 1 ] && read -r n </proc/$p/comm && [ \"$n\" != script ]; do read -r a b c p d </proc/$p/stat; done
        printf ready; read x
        read -r before x 2>/dev/null </proc/$p/schedstat; {producer}; read -r after x 2>/dev/null </proc/$p/schedstat
        echo; echo $((after - before))"
    )
}

pub struct Bench<'a> {
    host: &'a Host,
    size: Size,
    /// The program whose loops are counted; none in a smoke run.
    loops: Option<&'a Path>,
    /// The server's main process, and a process of root's.
    server: Standin,
    root: Standin,
    varlink_sockets: Vec<String>,
    report: Report,
}

type Done = Result<(), Failure>;
/// Takes one part's figures.
type Measure<B> = fn(&mut B) -> Done;

impl<'a> Bench<'a> {
    /// What can be measured alone, in the order of a whole run.
    pub const PARTS: [(&'static str, Measure<Self>); 10] = [
        ("starts", Self::starts),
        ("helper", Self::helper),
        ("bus", Self::bus),
        ("echo", Self::echoes),
        ("flow", Self::flows),
        ("idle", Self::idle),
        ("flood", Self::flood),
        ("instructions", |bench| {
            bench.instructions();
            Ok(())
        }),
        ("memory", Self::memory),
        ("growth", Self::growth),
    ];

    pub fn new(host: &'a Host, size: Size, loops: Option<&'a Path>, machine: Machine) -> Result<Self, Failure> {
        host.sh_ok(&format!(
            "systemd-run --quiet --unit=bench-root --property=TasksMax=infinity {STANDIN} serve --control {ROOT_CONTROL}"
        ))?;
        let sockets = host.sh_ok("ls -d /run/systemd/io.systemd.* 2>/dev/null || true")?;
        let report = Report {
            machine,
            size: size.name.to_owned(),
            figures: Vec::new(),
            targets: Vec::new(),
            skipped: Vec::new(),
        };
        Ok(Self {
            host,
            size,
            loops,
            server: standin(host, CONTROL_PATH)?,
            root: standin(host, ROOT_CONTROL)?,
            varlink_sockets: sockets.lines().map(str::to_owned).collect(),
            report,
        })
    }

    /// Everything, or one of [`Self::PARTS`].
    pub fn run(mut self, only: Option<&str>) -> Result<Report, Failure> {
        for (_, measure) in Self::PARTS.iter().filter(|(part, _)| only.is_none_or(|only| only == *part)) {
            measure(&mut self)?;
        }
        Ok(self.report)
    }

    /// Asks for one measurement of a contender; the numbers are nanoseconds, here milliseconds.
    fn milliseconds(&self, who: Contender, what: &[&str], work: &Work<'_>) -> Result<Vec<f64>, Failure> {
        let words = self.ask(who, what, work)?;
        words.iter().map(|word| Ok(number(word)? / 1e6)).collect()
    }

    fn ask(&self, who: Contender, what: &[&str], work: &Work<'_>) -> Result<Vec<String>, Failure> {
        let argv = match who {
            Contender::Ours => work.words.iter().map(|&word| word.to_owned()).collect(),
            other => other.argv(work.text, &self.varlink_sockets),
        };
        let mut request = what.to_vec();
        request.push(who.means());
        request.extend(argv.iter().map(String::as_str));
        let standin = if who == Contender::Ours { &self.server } else { &self.root };
        standin.bench(&request).map_err(|error| Failure::Failed(format!("{}: {what:?}: {error}", who.name())))
    }

    fn target(&mut self, what: &str, found: f64, limit: f64, at_most: bool) {
        self.report.targets.push(Target { what: what.to_owned(), found, limit, at_most });
    }

    // ---- (a), (d): starts and ends ---------------------------------------------------------------------------

    fn starts(&mut self) -> Done {
        say("starts: echo hi, bash -i, stop");
        let everyone = [Contender::Ours, Contender::PipeSame, Contender::PipePlain, Contender::Pty, Contender::Script];
        let floors = [("bare unit, same properties", "session"), ("bare unit, plain", "plain")];
        let (mut first, mut exit) = (Samples::default(), Samples::default());
        let (mut prompt, mut leave) = (Samples::default(), Samples::default());
        let (mut steps, mut cleanups) = (Samples::default(), Samples::default());
        for _ in 0..self.size.starts {
            for who in everyone {
                let times = self.milliseconds(who, &["whole", "hi", "none"], &ECHO)?;
                first.add(who.name(), times.first())?;
                exit.add(who.name(), times.get(1))?;
                if who == Contender::Ours {
                    for (step, at) in [
                        ("the client has sent the start frame and is gone", 3),
                        ("'started'", 4),
                        ("first byte", 0),
                        ("exit record: unit and cgroup are gone", 1),
                    ] {
                        steps.add(step, times.get(at))?;
                    }
                }
            }
            for (name, list) in floors {
                let words =
                    self.root.bench(&["unit", list, "/bin/echo", "hi"]).map_err(|error| format!("{name}: {error}"))?;
                let times: Vec<f64> =
                    words.iter().map(|word| Ok(number(word)? / 1e6)).collect::<Result<_, Failure>>()?;
                first.add(name, times.get(1))?;
                exit.add(name, times.get(3))?;
            }
            for who in everyone {
                let times = self.milliseconds(who, &["whole", "$ ", "exit"], &BASH)?;
                prompt.add(who.name(), times.first())?;
                leave.add(who.name(), times.get(2))?;
            }
            let times = self.milliseconds(Contender::Ours, &["whole", "$ ", "stop"], &BASH)?;
            cleanups.add(OURS, times.get(2))?;
        }
        self.report.figures.push(first.compared("echo-first", "`echo hi`: start to first byte", "ms")?);
        self.report.figures.push(exit.compared("echo-exit", "`echo hi`: start to exit", "ms")?);
        self.report.figures.push(prompt.compared("bash-prompt", "`bash -i`: start to its prompt", "ms")?);
        self.report.figures.push(leave.compared("bash-exit", "`bash -i`: `exit` typed to everything gone", "ms")?);
        self.report.figures.push(steps.listed("steps", "`echo hi`, our steps, from the start", "ms")?);
        self.report.figures.push(cleanups.listed("stop", "`bash -i`: stop to empty cgroup", "ms")?);
        let ratio = exit.median(OURS)? / exit.median(Contender::PipeSame.name())?;
        self.target("start to exit ÷ systemd-run --pipe with the same properties", ratio, 0.9, true);
        let stop = cleanups.median(OURS)?;
        self.target("stop of bash -i to empty cgroup, ms", stop, 300.0, true);
        Ok(())
    }

    // ---- (g): the client ---------------------------------------------------------------------------------------

    fn helper(&mut self) -> Done {
        say("the client helper");
        let mut samples = Samples::default();
        let argv = ["helper", "/bin/bash", "-lc", "cargo test --workspace"];
        for _ in 0..self.size.starts {
            let times = self.server.bench(&argv).map_err(|error| format!("helper: {error}"))?;
            samples.add_ns("spawn to the whole frame on the wire", times.first())?;
            samples.add_ns("spawn to the client's end", times.get(1))?;
            let times = self.server.bench(&["child", "/bin/true"]).map_err(|error| format!("true: {error}"))?;
            samples.add_ns("/bin/true, spawn to its end", times.first())?;
        }
        self.report.figures.push(samples.listed("helper", "The client helper", "ms")?);
        Ok(())
    }

    // ---- calls on the bus --------------------------------------------------------------------------------------

    /// Counts what the supervisor asks of PID 1 and of the bus for one `echo hi`.
    fn bus(&mut self) -> Done {
        say("calls on the bus");
        let pid = supervisor(self.host)?;
        let name = self.host.sh_ok(&format!("busctl list --no-legend --unique | awk '$2 == {pid} {{ print $1 }}'"))?;
        let mut monitor = self
            .host
            .command("busctl")
            .args(["monitor", &format!("--match=sender='{name}'")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot run busctl: {error}"))?;
        let mut stderr = BufReader::new(monitor.stderr.take().ok_or_else(|| "no pipe".to_owned())?);
        stderr.read_line(&mut String::new()).map_err(|error| format!("busctl says nothing: {error}"))?;
        let stdout = monitor.stdout.take().ok_or_else(|| "no pipe".to_owned())?;
        let lines = thread::spawn(move || {
            let mut is_call = false;
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            lines.filter_map(|line| called(&line, &mut is_call)).map(|call| (Instant::now(), call)).collect::<Vec<_>>()
        });

        // In two steps, so that what authenticates a connection and what a start takes are apart.
        let mut peer = self.server.peer().map_err(|error| format!("cannot connect: {error}"))?;
        thread::sleep(Duration::from_millis(300));
        let authenticated = Instant::now();
        let dir = self.server.open(WORKSPACE).map_err(|error| format!("cannot open {WORKSPACE}: {error}"))?;
        let words: Vec<String> =
            ["60".to_owned()].into_iter().chain(ECHO.words.iter().map(|word| encode_word(word))).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let client = self.server.client(&words, &[peer.socket(), std::os::fd::AsFd::as_fd(&dir)]);
        client.map_err(|error| format!("cannot run the client: {error}"))?;
        peer.read_to_end(START_MAX).map_err(|error| format!("cannot run echo: {error}"))?;
        drop(peer);
        thread::sleep(Duration::from_millis(300));
        // Of the host's processes, only our monitor has this name.
        self.host.sh_ok("kill $(pidof busctl)")?;
        let _ = monitor.wait();
        let calls = lines.join().map_err(|_| "the reader panicked".to_owned())?;

        let is_manager = |call: &Call| call.destination != "org.freedesktop.DBus";
        let start = calls.iter().position(|(_, call)| call.member == "StartTransientUnit");
        let start = start.ok_or_else(|| "the monitor saw no StartTransientUnit".to_owned())?;
        let (mut before, mut starting, mut after, mut driver) = (0, 0, 0, 0);
        for (index, (at, call)) in calls.iter().enumerate() {
            let count = match () {
                () if !is_manager(call) => &mut driver,
                () if *at < authenticated => &mut before,
                () if index <= start => &mut starting,
                () => &mut after,
            };
            *count += 1;
        }
        let mut figure = Figure::new("bus", "Calls of the supervisor for one `echo hi`", "calls");
        for (what, count) in [
            ("to PID 1: authentication, before the start frame", before),
            ("to PID 1: start frame to start job, with the second look at the server", starting),
            ("to PID 1: from the start job to the unit's removal", after),
            ("to the bus: match rules", driver),
        ] {
            figure.row(what, Summary::once(f64::from(count)));
        }
        self.report.figures.push(figure);
        self.target("calls to PID 1 between start frame and start job", f64::from(starting), 2.0, true);
        Ok(())
    }

    // ---- (c): echo ---------------------------------------------------------------------------------------------

    fn echoes(&mut self) -> Done {
        say("round trips of a byte");
        let work = Work { words: &["/bin/sh", "-c", RAW_CAT], text: RAW_CAT };
        let mut trips: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        let everyone = [Contender::Ours, Contender::Script, Contender::ScriptBetweenCats, Contender::Pty];
        for _ in 0..self.size.trip_rounds {
            for who in everyone {
                let count = self.size.trips.to_string();
                let times = self.milliseconds(who, &["echo", &count], &work)?;
                trips.entry(who.name()).or_default().extend(times.iter().map(|time| time * 1e3));
            }
        }
        let mut figure = Figure::new("trip", "Round trip of one byte through `cat`: p50 (and below it p99)", "µs");
        let at = |name: &str, share| {
            let samples = trips.get(name).map(Vec::as_slice).unwrap_or_default();
            quantile(samples, share).ok_or_else(|| Failure::Failed(format!("no round trips of {name}")))
        };
        for who in everyone {
            let samples = trips.get(who.name()).map(Vec::as_slice).unwrap_or_default();
            let summary = Summary::of(samples).ok_or_else(|| format!("no round trips of {}", who.name()))?;
            if who == Contender::Ours {
                figure.row(who.name(), summary)
            } else {
                figure.against(who.name(), summary)
            };
        }
        for who in everyone {
            figure.row(&format!("{}, p99", who.name()), Summary::once(at(who.name(), 0.99)?));
        }
        let added = at(OURS, 0.5)? - at(Contender::Script.name(), 0.5)?;
        figure.row("added by the supervisor, p50", Summary::once(added));
        let floor = at(Contender::ScriptBetweenCats.name(), 0.5)? - at(Contender::Script.name(), 0.5)?;
        figure.row("added by two cat(1), p50", Summary::once(floor));
        self.report.figures.push(figure);
        self.target("echo round trip added, p50, µs", added, 60.0, true);
        Ok(())
    }

    // ---- (b): throughput ---------------------------------------------------------------------------------------

    fn flows(&mut self) -> Done {
        let everyone = [Contender::Ours, Contender::Script, Contender::PipeSame, Contender::Pty];
        let mut cpu = Samples::default();
        for (kind, producer) in FLOWS {
            for count in [1, MANY] {
                say(&format!("throughput: {kind}, {count} at once"));
                let mut samples = Samples::default();
                for _ in 0..self.size.flows {
                    for who in everyone {
                        let (mib_per_second, seconds_per_gib) = self.flow(who, producer, count)?;
                        samples.add(who.name(), Some(&mib_per_second))?;
                        for (process, seconds) in seconds_per_gib.iter().filter(|_| count == 1) {
                            cpu.add(&format!("{kind}: {process}"), Some(seconds))?;
                        }
                    }
                }
                let id = format!("flow-{kind}-{count}");
                let many = if count == 1 { "1 session".to_owned() } else { format!("{count} sessions together") };
                let figure = samples.compared(&id, &format!("Throughput of {kind}, {many}"), "MiB/s")?;
                let ratio = samples.median(OURS)? / samples.median(Contender::Script.name())?;
                self.report.figures.push(figure);
                self.target(&format!("throughput of {kind}, {many}, ÷ script(1) alone"), ratio, 0.95, false);
            }
        }
        self.report.figures.push(cpu.listed("cpu", "CPU time, 1 session", "s/GiB")?);
        Ok(())
    }

    /// One sample: MiB/s of all together, and CPU seconds per GiB of the processes that carried them.
    fn flow(&self, who: Contender, producer: &str, count: usize) -> Result<(f64, Vec<(String, f64)>), Failure> {
        let mib = self.size.flow_mib;
        let bytes = (mib << 20) / count as u64;
        let text = flow_text(producer, bytes);
        let work = Work { words: &["/bin/sh", "-c", &text], text: &text };
        let before = self.supervisor_cpu()?;
        let words = self.ask(who, &["flow", &count.to_string()], &work)?;
        let after = self.supervisor_cpu()?;
        let seconds = words.first().map(|word| number(word)).transpose()?.unwrap_or_default() / 1e9;
        let mut script_ns = 0.0;
        for pair in words.get(1..).unwrap_or_default().chunks(2) {
            let [came, tail] = pair else { return Err(Failure::Failed("half an answer".to_owned())) };
            #[allow(clippy::cast_precision_loss)]
            if number(came)? < bytes as f64 {
                return Err(Failure::Failed(format!("{}: {came} bytes came of {bytes}", who.name())));
            }
            let line = tail.trim_end().lines().last().unwrap_or_default();
            script_ns += line.trim().parse::<f64>().unwrap_or_default();
        }
        #[allow(clippy::cast_precision_loss)]
        let (mib, gib) = (mib as f64, mib as f64 / 1024.0);
        let cpu = match who {
            Contender::Ours => {
                vec![
                    ("supervisor".to_owned(), (after - before) / gib),
                    ("script(1) of a session".to_owned(), script_ns / 1e9 / gib),
                ]
            }
            Contender::Script => vec![("script(1) alone".to_owned(), script_ns / 1e9 / gib)],
            Contender::PipeSame | Contender::PipePlain | Contender::Pty | Contender::ScriptBetweenCats => Vec::new(),
        };
        Ok((mib / seconds, cpu))
    }

    /// Seconds on a processor of all threads of the supervisor so far.
    fn supervisor_cpu(&self) -> Result<f64, Failure> {
        let pid = supervisor(self.host)?;
        let sum: f64 = self
            .threads(pid)?
            .iter()
            .filter_map(|thread| {
                fs::read_to_string(thread.join("schedstat")).ok()?.split(' ').next()?.parse::<f64>().ok()
            })
            .sum();
        Ok(sum / 1e9)
    }

    fn threads(&self, pid: u32) -> Result<Vec<std::path::PathBuf>, Failure> {
        let tasks = self.host.path(format!("/proc/{pid}/task"));
        let entries = fs::read_dir(&tasks).map_err(|error| format!("cannot list {}: {error}", tasks.display()))?;
        Ok(entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
    }

    // ---- (f): idleness -----------------------------------------------------------------------------------------

    fn idle(&mut self) -> Done {
        say("wake-ups of an idle supervisor");
        let pid = supervisor(self.host)?;
        let mut figure = Figure::new(
            "idle",
            &format!("Wake-ups of all threads in {} s", self.size.idle_seconds),
            "context switches",
        );
        let mut most = 0.0_f64;
        for count in [0, MANY] {
            self.hold(Contender::Ours, count)?;
            thread::sleep(SETTLE);
            let before = self.switches(pid)?;
            thread::sleep(Duration::from_secs(self.size.idle_seconds));
            let woken = self.switches(pid)? - before;
            most = most.max(woken);
            figure.row(&format!("{count} idle sessions"), Summary::once(woken));
        }
        self.release()?;
        self.report.figures.push(figure);
        // The watchdog's is twice a minute; feeding it may take the thread away once more.
        self.target("wake-ups of an idle supervisor (the watchdog's: 2)", most, 2.0, true);
        Ok(())
    }

    fn switches(&self, pid: u32) -> Result<f64, Failure> {
        let mut sum = 0.0;
        for thread in self.threads(pid)? {
            let status = fs::read_to_string(thread.join("status")).unwrap_or_default();
            let of = |key| status.lines().find_map(|line| line.strip_prefix(key)?.trim().parse::<f64>().ok());
            sum += of("voluntary_ctxt_switches:").unwrap_or_default();
        }
        Ok(sum)
    }

    /// Makes the number of idle programs `count`; gives the times of the starts, ms.
    fn hold(&self, who: Contender, count: usize) -> Result<Vec<f64>, Failure> {
        let work = Work { words: &["/bin/sh", "-c", IDLE], text: IDLE };
        self.milliseconds(who, &["hold", &count.to_string()], &work)
    }

    fn release(&self) -> Done {
        for standin in [&self.server, &self.root] {
            standin.bench(&["release"]).map_err(|error| format!("cannot end what is held: {error}"))?;
        }
        Ok(())
    }

    // ---- (i): strangers ----------------------------------------------------------------------------------------

    fn flood(&mut self) -> Done {
        say("a flood of connections");
        let mut figure = Figure::new("flood", "Flood by a stranger of the same uid", "");
        for kind in ["blocking", "non-blocking"] {
            let seconds = self.size.flood_seconds.to_string();
            let begun = Instant::now();
            let before = self.supervisor_cpu()?;
            let flooded = self.server.spawn(&[STANDIN, "flood", SUPERVISOR_PATH, &seconds, kind]);
            let text = flooded.map_err(|error| format!("cannot flood: {error}"))?.text();
            let cpu = self.supervisor_cpu()? - before;
            let elapsed = begun.elapsed().as_secs_f64();
            let count = number(text.lines().last().unwrap_or_default())?;
            figure.row(&format!("{kind}: connections refused a second"), Summary::once(count / elapsed));
            figure
                .row(&format!("{kind}: the supervisor's CPU time, µs a connection"), Summary::once(cpu * 1e6 / count));
        }
        self.report.figures.push(figure);
        Ok(())
    }

    // ---- hot loops ---------------------------------------------------------------------------------------------

    fn instructions(&mut self) {
        let Some(program) = self.loops else {
            self.report.skipped.push("instruction counts: not in a smoke run".to_owned());
            return;
        };
        say("instruction counts");
        match loops::measure(program, self.size.turns) {
            Ok(figure) => self.report.figures.push(figure),
            Err(reason) => {
                say(&format!("NOT MEASURED: {reason}"));
                self.report.skipped.push(format!("instruction counts: {reason}"));
            }
        }
    }

    // ---- (e), (h): many sessions -------------------------------------------------------------------------------

    /// From here on with room for more sessions than the unit files allow.
    fn lift_limits(&mut self) -> Done {
        if self.host.path("/etc/systemd/system/opencode-pty-supervisor.service.d/50-bench.conf").exists() {
            return Ok(());
        }
        self.host.sh_ok(
            "set -e
            mkdir -p /etc/systemd/system/opencode-pty-supervisor.service.d /etc/systemd/system/opencode-pty.slice.d
            printf '[Service]\nExecStart=\nExecStart=/usr/local/libexec/opencode-pty-supervisor --max-sessions 300\nLimitNOFILE=65536\nTasksMax=infinity\n' \
                >/etc/systemd/system/opencode-pty-supervisor.service.d/50-bench.conf
            printf '[Slice]\nTasksMax=infinity\nMemoryHigh=infinity\nMemoryMax=infinity\n' \
                >/etc/systemd/system/opencode-pty.slice.d/50-bench.conf
            # Three match rules a session: more than the bus gives a connection by default (512) from the 171st on.
            printf '<busconfig><limit name=\"max_match_rules_per_connection\">4096</limit></busconfig>' >/etc/dbus-1/system.d/50-bench.conf
            busctl call org.freedesktop.DBus /org/freedesktop/DBus org.freedesktop.DBus ReloadConfig
            mkdir -p /etc/systemd/system/opencode-v2.service.d
            printf '[Service]\nLimitNPROC=infinity\n' >/etc/systemd/system/opencode-v2.service.d/50-bench.conf
            systemctl daemon-reload
            systemctl stop opencode-v2.service opencode-pty-supervisor.service",
        )?;
        host::start(self.host)?;
        self.server = standin(self.host, CONTROL_PATH)?;
        Ok(())
    }

    fn memory(&mut self) -> Done {
        self.lift_limits()?;
        let pid = supervisor(self.host)?;
        let mut resident = Figure::new("memory-resident", "Memory of the supervisor, resident (VmRSS)", "KiB");
        let mut proportional =
            Figure::new("memory-proportional", "Memory of the supervisor, proportional (Pss)", "KiB");
        let mut starts = Figure::new("growth-hold", "Start of an idle session, by how many there are already", "ms");
        let mut known = Vec::new();
        let mut before = 0;
        for &count in self.size.sessions {
            say(&format!("memory: {count} idle sessions"));
            let times = self.hold(Contender::Ours, count)?;
            if let Some(summary) = Summary::of(&times) {
                starts.row(&format!("from {before} to {count} sessions"), summary);
            }
            before = count;
            thread::sleep(SETTLE / 4);
            let memory = self.memory_of(pid)?;
            resident.row(&format!("{count} idle sessions"), Summary::once(memory.resident));
            proportional.row(&format!("{count} idle sessions"), Summary::once(memory.proportional));
            known.push((count, memory.resident));
        }
        self.release()?;
        let at = |count: usize| known.iter().find(|(known, _)| *known == count).map(|(_, resident)| *resident);
        if let (Some(sixteen), Some(&(most, resident))) = (at(MANY), known.last()) {
            #[allow(clippy::cast_precision_loss)]
            let further = (resident - sixteen) / (most - MANY) as f64;
            self.target("resident memory at 16 sessions, KiB", sixteen, 8_192.0, true);
            self.target("resident memory of each further session, KiB", further, 64.0, true);
        }

        self.hold(Contender::PipePlain, MANY)?;
        let pids = self.host.sh_ok("pidof systemd-run")?;
        let each: Vec<Memory> = pids
            .split_whitespace()
            .map(|pid| self.memory_of(pid.parse().map_err(|_| Failure::Failed(format!("'{pid}' is no pid")))?))
            .collect::<Result<_, _>>()?;
        self.release()?;
        self.host.sh_ok("systemctl kill --signal=KILL 'run-*.service' 2>/dev/null || true")?;
        let of = |pick: fn(&Memory) -> f64| {
            Summary::of(&each.iter().map(pick).collect::<Vec<_>>()).ok_or_else(|| "no systemd-run is there".to_owned())
        };
        resident.row("one systemd-run, of which each session needs one", of(|memory| memory.resident)?);
        proportional.row("one systemd-run, of 16", of(|memory| memory.proportional)?);
        self.report.figures.extend([resident, proportional, starts]);
        Ok(())
    }

    fn memory_of(&self, pid: u32) -> Result<Memory, Failure> {
        let file = self.host.path(format!("/proc/{pid}/smaps_rollup"));
        let text = fs::read_to_string(&file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
        let of = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key)?.trim().strip_suffix(" kB"));
            line.ok_or_else(|| format!("{} has no {key}", file.display()))
        };
        Ok(Memory { resident: number(of("Rss:")?)?, proportional: number(of("Pss:")?)? })
    }

    fn growth(&mut self) -> Done {
        self.lift_limits()?;
        let mut starts = Figure::new("growth-start", "`echo hi`, start to first byte, beside idle sessions", "ms");
        for &count in self.size.sessions {
            say(&format!("starts beside {count} idle sessions"));
            self.hold(Contender::Ours, count)?;
            let mut samples = Samples::default();
            for _ in 0..self.size.growth_starts {
                for who in [Contender::Ours, Contender::PipeSame] {
                    let times = self.milliseconds(who, &["whole", "hi", "none"], &ECHO)?;
                    samples.add(who.name(), times.first())?;
                }
            }
            for who in [Contender::Ours, Contender::PipeSame] {
                let summary = samples.summary(who.name())?;
                starts.row(&format!("{count} idle sessions: {}", who.name()), summary);
            }
        }
        self.release()?;
        let mut flow = Figure::new("growth-flow", "Throughput of base64, all sessions together", "MiB/s");
        let (_, producer) = FLOWS.iter().find(|(kind, _)| *kind == "base64").unwrap_or(&FLOWS[0]);
        for &count in self.size.sessions.iter().filter(|count| **count > 0) {
            say(&format!("throughput of {count} sessions together"));
            let mut samples = Samples::default();
            for _ in 0..self.size.flows.min(2) {
                for who in [Contender::Ours, Contender::Script] {
                    samples.add(who.name(), Some(&self.flow(who, producer, count)?.0))?;
                }
            }
            for who in [Contender::Ours, Contender::Script] {
                flow.row(&format!("{count} at once: {}", who.name()), samples.summary(who.name())?);
            }
        }
        self.report.figures.extend([starts, flow]);
        Ok(())
    }
}

struct Memory {
    resident: f64,
    proportional: f64,
}

/// Samples by name, in the order in which the names came.
#[derive(Default)]
struct Samples(Vec<(String, Vec<f64>)>);

impl Samples {
    fn add(&mut self, name: &str, sample: Option<&f64>) -> Done {
        let sample = *sample.ok_or_else(|| format!("{name}: an answer without the number"))?;
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, samples)) => samples.push(sample),
            None => self.0.push((name.to_owned(), vec![sample])),
        }
        Ok(())
    }

    /// A number of nanoseconds, as milliseconds.
    fn add_ns(&mut self, name: &str, word: Option<&String>) -> Done {
        let word = word.ok_or_else(|| format!("{name}: an answer without the number"))?;
        self.add(name, Some(&(number(word)? / 1e6)))
    }

    fn summary(&self, name: &str) -> Result<Summary, Failure> {
        let samples = self.0.iter().find(|(known, _)| known == name).map(|(_, samples)| samples.as_slice());
        Ok(Summary::of(samples.unwrap_or_default()).ok_or_else(|| format!("no samples of {name}"))?)
    }

    fn median(&self, name: &str) -> Result<f64, Failure> {
        Ok(self.summary(name)?.median)
    }

    /// A figure whose first row is ours and whose others are compared with it.
    fn compared(&self, id: &str, title: &str, unit: &str) -> Result<Figure, Failure> {
        let mut figure = Figure::new(id, title, unit);
        for (index, (name, _)) in self.0.iter().enumerate() {
            let summary = self.summary(name)?;
            if index == 0 {
                figure.row(name, summary)
            } else {
                figure.against(name, summary)
            };
        }
        Ok(figure)
    }

    fn listed(&self, id: &str, title: &str, unit: &str) -> Result<Figure, Failure> {
        let mut figure = Figure::new(id, title, unit);
        for (name, _) in &self.0 {
            figure.row(name, self.summary(name)?);
        }
        Ok(figure)
    }
}

/// A call on the bus.
#[derive(Debug, PartialEq, Eq)]
struct Call {
    destination: String,
    member: String,
}

/// The call in a line of `busctl monitor`, which says in one line what a message is and in the next where it goes.
fn called(line: &str, is_call: &mut bool) -> Option<Call> {
    if let Some(behind) = line.split_once(" Type=").map(|(_, behind)| behind) {
        *is_call = behind.starts_with("method_call ");
    }
    let text = |key: &str| line.split_whitespace().find_map(|word| word.strip_prefix(key)).map(str::to_owned);
    let call = Call { destination: text("Destination=")?, member: text("Member=")? };
    is_call.then_some(call)
}

fn standin(host: &Host, control: &str) -> Result<Standin, Failure> {
    Ok(Standin::connect_within(host.path(control), START_MAX)
        .map_err(|error| format!("cannot reach the stand-in: {error}"))?)
}

fn supervisor(host: &Host) -> Result<u32, Failure> {
    let pid = host.sh_ok("systemctl show --property=MainPID --value opencode-pty-supervisor.service")?;
    Ok(pid.parse().map_err(|_| format!("the supervisor has no pid but '{pid}'"))?)
}

fn number(word: &str) -> Result<f64, Failure> {
    Ok(word.trim().parse().map_err(|_| format!("'{word}' is no number"))?)
}

/// Says what is being done, and when it began.
fn say(line: &str) {
    static BEGUN: OnceLock<Instant> = OnceLock::new();
    let seconds = BEGUN.get_or_init(Instant::now).elapsed().as_secs();
    eprintln!("bench: {seconds:4} s  {line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_told_from_other_messages() {
        let to = |kind: &str| {
            let mut is_call = false;
            let first = format!("‣ Type={kind}  Endian=l  Flags=0  Version=1 Cookie=12");
            assert_eq!(called(&first, &mut is_call), None);
            called(
                "  Sender=:1.2  Destination=org.freedesktop.systemd1  Path=/x  Interface=a.b  Member=GetAll",
                &mut is_call,
            )
        };
        let expected = Call { destination: "org.freedesktop.systemd1".to_owned(), member: "GetAll".to_owned() };
        assert_eq!(to("method_call"), Some(expected));
        assert_eq!(to("signal"), None);
    }

    #[test]
    fn the_first_name_is_ours_and_the_others_are_compared_with_it() {
        let mut samples = Samples::default();
        for (name, sample) in [("ours", 1.0), ("theirs", 2.0), ("ours", 3.0), ("theirs", 4.0)] {
            assert!(samples.add(name, Some(&sample)).is_ok());
        }
        let Ok(figure) = samples.compared("x", "x", "ms") else { panic!("there are samples") };
        let ratios: Vec<_> = figure.rows.iter().map(|row| (row.who.as_str(), row.ratio)).collect();
        assert_eq!(ratios, [("ours", None), ("theirs", Some(2.0 / 3.0))]);
        assert!(samples.summary("nobody").is_err());
    }
}
