//! What the fake manager has: the server's unit, the sessions' units, and the calls that came.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use opencode_pty::frame::message::Start;
use zbus::Message;
use zbus::zvariant::OwnedValue;

use super::Script;

/// The server's unit.
#[derive(Clone, Debug)]
pub struct Server {
    /// Its name.
    pub unit: String,
    /// Its main process.
    pub main_pid: u32,
    /// Its `InvocationID`.
    pub invocation: Vec<u8>,
    /// Its `ControlGroup`.
    pub control_group: String,
    /// Its `ActiveState`.
    pub active: String,
    /// Its `SubState`.
    pub sub: String,
    /// Its `NotifyAccess`.
    pub notify_access: String,
    /// The invocation `GetUnitByPIDFD` gives, if it is not the unit's.
    pub invocation_by_pidfd: Option<Vec<u8>>,
}

impl Server {
    /// A server as it should be, with `main_pid` as its main process.
    pub fn new(unit: &str, main_pid: u32) -> Self {
        Self {
            unit: unit.into(),
            main_pid,
            invocation: vec![0x5e; 16],
            control_group: format!("/system.slice/{unit}"),
            active: "active".into(),
            sub: "running".into(),
            notify_access: "none".into(),
            invocation_by_pidfd: None,
        }
    }
}

/// What came through the socketpair before anything else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Handed {
    /// Nothing so far.
    #[default]
    Nothing,
    /// A start frame.
    Start(Box<Start>),
    /// The end, after these bytes, which are no whole start frame.
    Closed(Vec<u8>),
}

/// A transient unit.
#[derive(Debug)]
pub struct Unit {
    /// Its name.
    pub name: String,
    /// The properties it was started with, without its descriptors.
    pub properties: HashMap<String, OwnedValue>,
    /// Its `ActiveState`.
    pub active: String,
    /// Its `SubState`.
    pub sub: String,
    /// Its `Result`, `ExecMainCode` and `ExecMainStatus`.
    pub result: String,
    /// See `result`.
    pub code: i32,
    /// See `result`.
    pub status: i32,
    /// Its `InvocationID`.
    pub invocation: Vec<u8>,
    /// Its `ControlGroup` while it runs.
    pub control_group: String,
    /// Its `BindsTo`.
    pub binds_to: Vec<String>,
    /// Its queued job: number and kind.
    pub job: Option<(u32, &'static str)>,
    /// Clients that keep it loaded.
    pub references: usize,
    /// Whether it has been unloaded. It stays in the list for tests to look at.
    pub removed: bool,
    /// What came through its socketpair first.
    pub handed: Handed,
    /// Bytes that lay in its socketpair when its start job ended.
    pub bytes_before_job_end: usize,
    /// The directory it was given.
    pub directory: Option<OwnedFd>,
    pub(super) terminal: Option<UnixStream>,
}

impl Unit {
    /// A unit that an earlier supervisor could have left behind.
    pub fn left_behind(name: &str, active: &str, binds_to: &str) -> Self {
        Self {
            name: name.into(),
            properties: HashMap::new(),
            active: active.into(),
            sub: if active == "active" { "running" } else { "dead" }.into(),
            result: "success".into(),
            code: 0,
            status: 0,
            invocation: vec![0x0b; 16],
            control_group: format!("/opencode.slice/opencode-pty.slice/{name}"),
            binds_to: vec![binds_to.into()],
            job: None,
            references: 0,
            removed: false,
            handed: Handed::Nothing,
            bytes_before_job_end: 0,
            directory: None,
            terminal: None,
        }
    }

    /// Whether it has stopped, with nothing queued.
    pub(super) fn is_ended(&self) -> bool {
        self.job.is_none() && matches!(self.active.as_str(), "inactive" | "failed")
    }
}

/// One call that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The method.
    pub method: String,
    /// The unit it is about, or nothing.
    pub unit: String,
    /// Its mode or the like, or nothing.
    pub detail: String,
}

/// Everything the fake manager knows.
#[derive(Debug)]
pub struct State {
    /// What happens.
    pub script: Script,
    /// The server's unit.
    pub server: Server,
    /// Every session unit there ever was, by name.
    pub units: BTreeMap<String, Unit>,
    /// Every call that came, in order.
    pub calls: Vec<Call>,
    pub(super) held: Vec<Message>,
    pub(super) jobs: u32,
}

impl State {
    /// The unit, if it is loaded.
    pub fn loaded(&self, name: &str) -> Option<&Unit> {
        self.units.get(name).filter(|unit| !unit.removed)
    }

    /// How many units are loaded and not ended.
    pub fn running(&self) -> usize {
        self.units.values().filter(|unit| !unit.removed && !unit.is_ended()).count()
    }

    /// How often a method was called, for this unit or (with an empty name) any.
    pub fn called(&self, method: &str, unit: &str) -> usize {
        self.calls.iter().filter(|call| call.method == method && (unit.is_empty() || call.unit == unit)).count()
    }
}
