//! The running sessions, for an operator: a table, or JSON with the raw numbers.
//!
//! A session is what the supervisor holds for one: a unit with exactly its grammar of names and exactly one `BindsTo`,
//! the supervisor's unit. Only reads, so it needs no root where the bus lets everybody read, as it usually does.

use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::io::{self, Write as _};
use std::time::Duration;

use argh::FromArgs;
use smol::future::{FutureExt, pending};

use crate::limits::SUPERVISOR_UNIT_DEFAULT;
use crate::options;
use crate::report::{Doing, ExitStatus, SystemError, json_string, print_error};
use crate::sys::clock::monotonic_usec;
use crate::systemd::unit::UnitName;
use crate::systemd::{BusOptions, CallError, LinkError, Manager, SYSTEM_BUS, UnitState, Usage};

/// The running sessions: unit, state, age, main pid, tasks, memory, CPU time, and what is left of the runtime. A dash, or
/// null, stands for what the host does not account. Exit codes: 0 listed, also when there is none; 1 the service manager
/// could not be asked; 64 bad arguments; 71 the list could not be written.
#[derive(Debug, FromArgs)]
struct Options {
    /// print one JSON object with raw numbers
    #[argh(switch)]
    json: bool,
    /// the supervisor's unit, whose sessions are listed (default opencode-pty-supervisor.service)
    #[argh(option, default = "SUPERVISOR_UNIT_DEFAULT.to_owned()", arg_name = "unit")]
    unit: String,
    /// for tests: D-Bus address (default the system bus)
    #[argh(option, default = "SYSTEM_BUS.to_owned()", arg_name = "address")]
    bus: String,
    /// for tests: pid that must own the service manager's name (default 1)
    #[argh(option, default = "1", arg_name = "pid")]
    manager_pid: u32,
}

/// Why there is no list.
#[derive(Debug)]
enum Error {
    Bus(LinkError),
    Manager(CallError),
    Output(SystemError),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bus(_) => f.write_str("cannot reach the service manager"),
            Self::Manager(_) => f.write_str("cannot ask the service manager for the sessions"),
            Self::Output(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Bus(source) => Some(source),
            Self::Manager(source) => Some(source),
            Self::Output(error) => error.source(),
        }
    }
}

/// Runs the role.
pub async fn main(args: &[OsString]) -> ExitStatus {
    let options: Options = match options::parse("opencode-pty list", "list", args) {
        Ok(options) => options,
        Err(status) => return status,
    };
    let listed = async {
        let (supervisor, sessions) = ask(&options).await?;
        let text = if options.json {
            json(&options.unit, &supervisor, &sessions)
        } else {
            table(&options.unit, &supervisor, &sessions)
        };
        write(&text).map_err(Error::Output)
    };
    match listed.await {
        Ok(()) => ExitStatus::Success,
        Err(error) => {
            print_error("list", &error);
            if matches!(error, Error::Output(_)) { ExitStatus::System } else { ExitStatus::Failure }
        }
    }
}

/// The `ActiveState` of the supervisor's unit, and its sessions, the oldest first.
async fn ask(options: &Options) -> Result<(String, Vec<Row>), Error> {
    let bus = BusOptions { address: options.bus.clone(), manager_pid: options.manager_pid };
    let (manager, keep) = Box::pin(Manager::connect(bus)).await.map_err(Error::Bus)?;
    let asking = async {
        let supervisor = match manager.read(&options.unit).await {
            Ok(state) if state.load == "loaded" => state.active,
            Ok(state) => state.load,
            Err(CallError::NoSuchUnit) => "not-found".to_owned(),
            Err(error) => return Err(Error::Manager(error)),
        };
        let mut sessions = manager.sessions_of(&options.unit).await.map_err(Error::Manager)?;
        let now = monotonic_usec();
        // One that has not become active yet is the youngest.
        sessions.sort_by_key(|(_, state, _)| state.active_enter_usec.wrapping_sub(1));
        let row = |(name, state, usage): &(_, _, _)| Row::new(name, state, *usage, now);
        Ok((supervisor, sessions.iter().map(row).collect()))
    };
    let keeping = async {
        keep.await;
        pending().await
    };
    asking.or(keeping).await
}

/// Writes to standard output. That nobody reads to the end is their business.
fn write(text: &str) -> Result<(), SystemError> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.doing("write to standard output"),
    }
}

/// One session. `None` is what the manager does not know, or not yet.
#[derive(Debug, Default)]
struct Row {
    unit: String,
    state: String,
    age_usec: Option<u64>,
    pid: Option<u64>,
    tasks: Option<u64>,
    memory_bytes: Option<u64>,
    cpu_nsec: Option<u64>,
    runtime_left_usec: Option<u64>,
}

impl Row {
    fn new(name: &UnitName, state: &UnitState, usage: Usage, now: u64) -> Self {
        let age_usec = (state.active_enter_usec != 0).then(|| now.saturating_sub(state.active_enter_usec));
        let left = |runtime: u64| Some(runtime.saturating_sub(age_usec?));
        Self {
            unit: name.to_string(),
            state: state.active.clone(),
            age_usec,
            pid: (state.main_pid != 0).then_some(state.main_pid.into()),
            tasks: usage.tasks,
            memory_bytes: usage.memory_bytes,
            cpu_nsec: usage.cpu_nsec,
            runtime_left_usec: usage.runtime_max_usec.and_then(left),
        }
    }

    /// The numbers by their names in the JSON.
    fn numbers(&self) -> [(&'static str, Option<u64>); 6] {
        [
            ("age_usec", self.age_usec),
            ("pid", self.pid),
            ("tasks", self.tasks),
            ("memory_bytes", self.memory_bytes),
            ("cpu_nsec", self.cpu_nsec),
            ("runtime_left_usec", self.runtime_left_usec),
        ]
    }

    /// The cells of the table.
    fn cells(&self) -> [String; COLUMNS.len()] {
        let plain = |number: u64| number.to_string();
        let usec = |usec: u64| time(Duration::from_micros(usec));
        [
            self.unit.clone(),
            self.state.clone(),
            or_dash(self.age_usec, usec),
            or_dash(self.pid, plain),
            or_dash(self.tasks, plain),
            or_dash(self.memory_bytes, memory),
            or_dash(self.cpu_nsec, |nsec| cpu(Duration::from_nanos(nsec))),
            or_dash(self.runtime_left_usec, usec),
        ]
    }
}

fn or_dash(number: Option<u64>, show: impl FnOnce(u64) -> String) -> String {
    number.map_or_else(|| "-".to_owned(), show)
}

/// The table's columns, and whether they are aligned to the right.
const COLUMNS: [(&str, bool); 8] = [
    ("UNIT", false),
    ("STATE", false),
    ("AGE", true),
    ("PID", true),
    ("TASKS", true),
    ("MEMORY", true),
    ("CPU", true),
    ("LEFT", true),
];

/// The sessions for people.
fn table(unit: &str, supervisor: &str, sessions: &[Row]) -> String {
    let unit = unit.escape_debug();
    if sessions.is_empty() {
        return format!("no sessions; {unit} is {supervisor}\n");
    }
    let mut lines = vec![COLUMNS.map(|(title, _)| title.to_owned())];
    lines.extend(sessions.iter().map(Row::cells));
    let mut widths = [0; COLUMNS.len()];
    for cells in &lines {
        for (width, cell) in widths.iter_mut().zip(cells) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for cells in &lines {
        let mut line = String::new();
        for ((cell, width), (_, right)) in cells.iter().zip(widths).zip(COLUMNS) {
            let _ = if right { write!(line, "{cell:>width$}  ") } else { write!(line, "{cell:<width$}  ") };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    let plural = if sessions.len() == 1 { "" } else { "s" };
    let _ = writeln!(text, "{} session{plural}; {unit} is {supervisor}", sessions.len());
    text
}

/// The sessions for programs: opencode-pty(1) has the names and units.
fn json(unit: &str, supervisor: &str, sessions: &[Row]) -> String {
    let of_session = |row: &Row| {
        let mut text = format!("{{\"unit\":{},\"state\":{}", json_string(&row.unit), json_string(&row.state));
        for (name, number) in row.numbers() {
            let number = number.map_or_else(|| "null".to_owned(), |number| number.to_string());
            let _ = write!(text, ",\"{name}\":{number}");
        }
        text + "}"
    };
    format!(
        "{{\"supervisor\":{{\"unit\":{},\"state\":{}}},\"sessions\":[{}]}}\n",
        json_string(unit),
        json_string(supervisor),
        sessions.iter().map(of_session).collect::<Vec<_>>().join(","),
    )
}

/// A time with its two largest units: `12s`, `3m05s`, `1h02m`.
fn time(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 3_600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds}s"),
        (0, minutes, seconds) => format!("{minutes}m{seconds:02}s"),
        (hours, minutes, _) => format!("{hours}h{minutes:02}m"),
    }
}

/// CPU time: to the hundredth of a second below a minute.
fn cpu(time_used: Duration) -> String {
    if time_used < Duration::from_mins(1) {
        format!("{}.{:02}s", time_used.as_secs(), time_used.subsec_millis() / 10)
    } else {
        time(time_used)
    }
}

/// Bytes as systemd shows them: with one decimal, in powers of 1,024.
fn memory(bytes: u64) -> String {
    let (mut rest, mut unit) = (bytes.saturating_mul(10), "B");
    for larger in ["K", "M", "G", "T"] {
        if rest < 10_240 {
            break;
        }
        (rest, unit) = (rest / 1_024, larger);
    }
    if unit == "B" { format!("{bytes}B") } else { format!("{}.{}{unit}", rest / 10, rest % 10) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USAGE: Usage = Usage {
        tasks: Some(3),
        memory_bytes: None,
        cpu_nsec: Some(1_239_000_000),
        runtime_max_usec: Some(120_000_000),
    };

    fn state() -> UnitState {
        UnitState { active: "active".to_owned(), main_pid: 77, active_enter_usec: 1_000_000, ..UnitState::default() }
    }

    #[test]
    fn what_is_not_known_is_a_dash_and_null() {
        let name = UnitName::from_random([0xab; 16]);
        let row = Row::new(&name, &state(), USAGE, 66_000_000);
        let text = table("s.service", "active", std::slice::from_ref(&row));
        let line: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(line, [name.as_str(), "active", "1m05s", "77", "3", "-", "1.23s", "55s"]);
        let expected = format!(
            "{{\"supervisor\":{{\"unit\":\"s\\\"\",\"state\":\"active\"}},\"sessions\":[{{\"unit\":\"{name}\",\"state\":\"active\",\
             \"age_usec\":65000000,\"pid\":77,\"tasks\":3,\"memory_bytes\":null,\"cpu_nsec\":1239000000,\
             \"runtime_left_usec\":55000000}}]}}\n"
        );
        assert_eq!(json("s\"", "active", &[row]), expected);
    }

    #[test]
    fn one_that_is_not_active_yet_has_no_age_and_all_of_its_runtime_is_unknown() {
        let queued = UnitState { active: "activating".to_owned(), active_enter_usec: 0, main_pid: 0, ..state() };
        let row = Row::new(&UnitName::from_random([1; 16]), &queued, USAGE, 66_000_000);
        assert_eq!((row.age_usec, row.pid, row.runtime_left_usec), (None, None, None));
    }

    #[test]
    fn a_session_past_its_runtime_has_nothing_left() {
        let row = Row::new(&UnitName::from_random([1; 16]), &state(), USAGE, 999_000_000);
        assert_eq!(row.runtime_left_usec, Some(0));
    }

    #[test]
    fn an_empty_list_says_so() {
        assert_eq!(table("s\n.service", "inactive", &[]), "no sessions; s\\n.service is inactive\n");
        let empty = "{\"supervisor\":{\"unit\":\"s.service\",\"state\":\"not-found\"},\"sessions\":[]}\n";
        assert_eq!(json("s.service", "not-found", &[]), empty);
    }

    #[test]
    fn numbers_read_as_people_say_them() {
        let seconds = |seconds| time(Duration::from_secs(seconds));
        assert_eq!([0, 59, 60, 3_599, 3_600, 7_325].map(seconds), ["0s", "59s", "1m00s", "59m59s", "1h00m", "2h02m"]);
        assert_eq!(
            [0, 1_023, 1_024, 1_536, 1 << 20, 5 << 30].map(memory),
            ["0B", "1023B", "1.0K", "1.5K", "1.0M", "5.0G"]
        );
        assert_eq!(memory(u64::MAX), "1677721.5T");
        assert_eq!([Duration::ZERO, Duration::from_millis(59_999)].map(cpu), ["0.00s", "59.99s"]);
        assert_eq!(cpu(Duration::from_mins(90)), "1h30m");
    }
}
