//! PID 1, as the supervisor needs it: start, stop, watch and read units. The only module that speaks D-Bus.
//!
//! What would surprise: a signal is only ever a hint. It comes from whoever the bus says owns the manager's name,
//! and that owner must be PID 1 (`link`); a session then reads the unit with one `GetAll`, since single reads tear.
//! Calls go to the well-known name, because the unique one changes when PID 1 re-executes itself. An answer that
//! does not come is `CallError::NoAnswer`, which is not a refusal: what was asked may have been done, or be done
//! later.

mod link;
pub mod policy;
mod shown;
pub mod unit;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use zbus::zvariant::{DynamicType, Fd, OwnedObjectPath, OwnedValue, Type, Value};

use crate::limits::CALL_TIME;
use crate::wait::{Watched, within};
use link::Link;
pub use link::{BusOptions, LinkError};
use unit::{Description, UnitName, object_path};

const MANAGER_INTERFACE: &str = "org.freedesktop.systemd1.Manager";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
/// The system bus. The environment has no say in where a program of root's looks for it.
pub const SYSTEM_BUS: &str = "unix:path=/run/dbus/system_bus_socket";

/// A call that did not give what it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallError {
    /// No answer: the bus or the manager is away, or too slow. It may have been carried out all the same.
    NoAnswer {
        /// The method.
        method: &'static str,
    },
    /// The manager knows no such unit.
    NoSuchUnit,
    /// The manager knows no process with this pidfd: it has been reaped.
    NoSuchProcess,
    /// The manager is older than the method.
    UnknownMethod,
    /// The manager said no.
    Refused {
        /// The method.
        method: &'static str,
        /// D-Bus error name and text.
        answer: String,
    },
    /// An answer that is not what the method's is.
    Malformed {
        /// The method.
        method: &'static str,
    },
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAnswer { method } => write!(f, "no answer from the service manager to {method}"),
            Self::NoSuchUnit => f.write_str("the service manager knows no such unit"),
            Self::NoSuchProcess => f.write_str("the service manager knows no such process"),
            Self::UnknownMethod => f.write_str("the service manager is too old"),
            Self::Refused { method, answer } => write!(f, "the service manager refused {method}: {answer}"),
            Self::Malformed { method } => write!(f, "the service manager's answer to {method} is malformed"),
        }
    }
}

impl std::error::Error for CallError {}

impl CallError {
    fn new(method: &'static str, error: &zbus::Error) -> Self {
        match error {
            zbus::Error::MethodError(name, text, _) => match name.as_str() {
                "org.freedesktop.systemd1.NoSuchUnit" | "org.freedesktop.DBus.Error.UnknownObject" => Self::NoSuchUnit,
                "org.freedesktop.systemd1.NoUnitForPID"
                | "org.freedesktop.systemd1.NoSuchProcess"
                | "org.freedesktop.DBus.Error.UnixProcessIdUnknown" => Self::NoSuchProcess,
                "org.freedesktop.DBus.Error.UnknownMethod" => Self::UnknownMethod,
                // The bus says these when the manager, or the bus itself, went away under the call.
                "org.freedesktop.DBus.Error.NoReply"
                | "org.freedesktop.DBus.Error.Timeout"
                | "org.freedesktop.DBus.Error.TimedOut"
                | "org.freedesktop.DBus.Error.Disconnected"
                | "org.freedesktop.DBus.Error.NameHasNoOwner"
                | "org.freedesktop.DBus.Error.ServiceUnknown" => Self::NoAnswer { method },
                other => Self::Refused { method, answer: format!("{other}: {}", text.as_deref().unwrap_or("")) },
            },
            zbus::Error::InputOutput(_) => Self::NoAnswer { method },
            _ => Self::Malformed { method },
        }
    }
}

/// A unit, as one `GetAll` found it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitState {
    /// `Id`.
    pub id: String,
    /// `LoadState`: anything but `loaded` makes the rest meaningless.
    pub load: String,
    /// `ActiveState`.
    pub active: String,
    /// `SubState`.
    pub sub: String,
    /// `Result`.
    pub result: String,
    /// `ExecMainCode`.
    pub code: i32,
    /// `ExecMainStatus`.
    pub status: i32,
    /// `InvocationID`: 16 bytes, or none while it has not been started.
    pub invocation: Vec<u8>,
    /// `ControlGroup`: a path below the hierarchy's root, or empty.
    pub control_group: String,
    /// `MainPID`, or 0.
    pub main_pid: u32,
    /// `NotifyAccess`.
    pub notify_access: String,
    /// `BindsTo`.
    pub binds_to: Vec<String>,
    /// Number of the queued job, or 0.
    pub job: u32,
    /// `ActiveEnterTimestampMonotonic`: when it last became active, microseconds of CLOCK_MONOTONIC, or 0.
    pub active_enter_usec: u64,
    /// `ActiveExitTimestampMonotonic`: when it last ceased to be, or 0.
    pub active_exit_usec: u64,
}

/// What the manager accounts for a unit. `None` where it does not, which it tells as the largest number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// `TasksCurrent`.
    pub tasks: Option<u64>,
    /// `MemoryCurrent`.
    pub memory_bytes: Option<u64>,
    /// `CPUUsageNSec`.
    pub cpu_nsec: Option<u64>,
    /// `RuntimeMaxUSec`.
    pub runtime_max_usec: Option<u64>,
}

impl Usage {
    fn from_properties(all: &HashMap<String, OwnedValue>) -> Self {
        let number = |name: &str| u64::try_from(all.get(name)?).ok().filter(|number| *number != u64::MAX);
        Self {
            tasks: number("TasksCurrent"),
            memory_bytes: number("MemoryCurrent"),
            cpu_nsec: number("CPUUsageNSec"),
            runtime_max_usec: number("RuntimeMaxUSec"),
        }
    }
}

impl UnitState {
    fn from_properties(mut all: HashMap<String, OwnedValue>) -> Option<Self> {
        fn take<T: TryFrom<OwnedValue>>(all: &mut HashMap<String, OwnedValue>, name: &str) -> Option<T> {
            T::try_from(all.remove(name)?).ok()
        }
        let (job, _): (u32, OwnedObjectPath) = take(&mut all, "Job")?;
        Some(Self {
            id: take(&mut all, "Id")?,
            load: take(&mut all, "LoadState")?,
            active: take(&mut all, "ActiveState")?,
            sub: take(&mut all, "SubState")?,
            invocation: take(&mut all, "InvocationID")?,
            binds_to: take(&mut all, "BindsTo")?,
            job,
            active_enter_usec: take(&mut all, "ActiveEnterTimestampMonotonic").unwrap_or_default(),
            active_exit_usec: take(&mut all, "ActiveExitTimestampMonotonic").unwrap_or_default(),
            // These lie on the service interface, which a unit that is not loaded may lack.
            result: take(&mut all, "Result").unwrap_or_default(),
            code: take(&mut all, "ExecMainCode").unwrap_or_default(),
            status: take(&mut all, "ExecMainStatus").unwrap_or_default(),
            control_group: take(&mut all, "ControlGroup").unwrap_or_default(),
            main_pid: take(&mut all, "MainPID").unwrap_or_default(),
            notify_access: take(&mut all, "NotifyAccess").unwrap_or_default(),
        })
    }

    /// Whether every process is gone as far as the manager is concerned, and no job is about to change that.
    pub fn is_at_rest(&self) -> bool {
        self.load != "loaded" || (self.has_ended() && self.job == 0)
    }

    /// How long the unit was active the last time; zero while it is.
    pub fn was_active_for(&self) -> Duration {
        Duration::from_micros(self.active_exit_usec.saturating_sub(self.active_enter_usec))
    }

    /// Whether the unit has stopped: `inactive` or `failed`.
    pub fn has_ended(&self) -> bool {
        is_end(&self.active)
    }
}

/// Whether an `ActiveState` is that of a unit that has stopped.
fn is_end(active: &str) -> bool {
    matches!(active, "inactive" | "failed")
}

/// What the manager's signals have said of a unit so far. Hints: read the unit before acting on them.
#[derive(Clone, Debug, Default)]
pub struct UnitEvents {
    /// Finished jobs: object path and result word, the latest few.
    pub jobs: Vec<(String, String)>,
    /// The latest `ActiveState`.
    pub active: Option<String>,
    /// The latest of each property in `link::WORTH_READING`, as text.
    said: [Option<String>; link::WORTH_READING.len()],
    /// How often the unit was said to be unloaded: really, or for a moment in a reload of the manager.
    pub removals: u64,
    /// How often something changed that is worth reading the unit again.
    pub changes: u64,
    /// The bus connection's generation. Signals of the time between two of them are lost.
    pub generation: u64,
}

impl UnitEvents {
    /// Whether they said last that the unit has stopped.
    pub fn has_ended(&self) -> bool {
        self.active.as_deref().is_some_and(is_end)
    }
}

/// Registration for the signals of one unit. Call [`UnitWatch::forget`] when done.
#[derive(Debug)]
pub struct UnitWatch {
    link: Rc<Link>,
    name: String,
    events: Watched<UnitEvents>,
}

impl UnitWatch {
    /// The cell the signals end up in.
    pub fn events(&self) -> &Watched<UnitEvents> {
        &self.events
    }

    /// Ends the registration.
    pub async fn forget(self) {
        self.link.forget(&self.name).await;
    }
}

/// One entry of `ListUnitsByPatterns`: name, description, load, active, sub, followed, path, job, its type, its path.
type ListedReply = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

/// Who a process belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The unit's name.
    pub unit: String,
    /// The unit's invocation; `None` from managers before 253, which find it by pid alone.
    pub invocation: Option<Vec<u8>>,
}

/// The service manager.
#[derive(Clone, Debug)]
pub struct Manager {
    link: Rc<Link>,
}

impl Manager {
    /// Connects to the bus, makes sure that the manager is who it should be, and subscribes to its signals.
    ///
    /// The future that comes with it keeps the connection: signals, re-connection, a new manager after a
    /// re-execution. It must run for as long as the manager is used, and never ends.
    pub async fn connect(options: BusOptions) -> Result<(Self, impl Future<Output = ()> + Unpin), LinkError> {
        let (link, keep) = Link::connect(options).await?;
        Ok((Self { link }, Box::pin(keep)))
    }

    /// Whether the bus can be used right now.
    pub fn is_online(&self) -> bool {
        self.link.is_online()
    }

    /// Waits until the bus can be used.
    pub async fn online(&self) {
        self.link.online().await;
    }

    /// Registers for a unit's signals; nothing is missed from the return on.
    pub async fn watch(&self, name: &str) -> Result<UnitWatch, CallError> {
        let events = self.link.watch(name).await?;
        Ok(UnitWatch { link: Rc::clone(&self.link), name: name.to_owned(), events })
    }

    /// Reads a unit. One that does not exist is [`CallError::NoSuchUnit`] or has a `load` of `not-found`.
    pub async fn read(&self, name: &str) -> Result<UnitState, CallError> {
        let all = self.get_all(&object_path(name)).await?;
        UnitState::from_properties(all).ok_or(CallError::Malformed { method: "GetAll" })
    }

    /// Every property of a unit by its D-Bus name, as words (`shown`). For comparing and showing, not for deciding.
    pub async fn properties(&self, name: &str) -> Result<BTreeMap<String, Vec<String>>, CallError> {
        let all = self.get_all(&object_path(name)).await?;
        Ok(all.into_iter().map(|(name, value)| (name, shown::words(&value))).collect())
    }

    /// The manager's version, as it says it.
    pub async fn version(&self) -> Result<String, CallError> {
        let body = (MANAGER_INTERFACE, "Version");
        let value: OwnedValue = self.call(MANAGER_PATH, "org.freedesktop.DBus.Properties", "Get", &body).await?;
        Ok(shown::words(&value).concat())
    }

    async fn get_all(&self, path: &str) -> Result<HashMap<String, OwnedValue>, CallError> {
        self.call(path, "org.freedesktop.DBus.Properties", "GetAll", &("",)).await
    }

    /// Whether the manager knows a unit. Unlike a read, this does not make it load one to tell that there is none.
    pub async fn find(&self, name: &str) -> Result<(), CallError> {
        let _: OwnedObjectPath = self.manager("GetUnit", &(name,)).await?;
        Ok(())
    }

    /// The unit a process belongs to: the very process of the pidfd where the manager can say so, else whoever has
    /// this pid (then the pidfd must be checked afterwards).
    pub async fn unit_of(&self, pidfd: BorrowedFd<'_>, pid: u32) -> Result<Membership, CallError> {
        let by_pidfd: Result<(OwnedObjectPath, String, Vec<u8>), _> =
            self.manager("GetUnitByPIDFD", &(Fd::from(pidfd),)).await;
        match by_pidfd {
            Ok((_, unit, invocation)) => Ok(Membership { unit, invocation: Some(invocation) }),
            Err(CallError::UnknownMethod) => {
                let path: OwnedObjectPath = self.manager("GetUnitByPID", &(pid,)).await?;
                let all = self.get_all(path.as_str()).await?;
                let state = UnitState::from_properties(all).ok_or(CallError::Malformed { method: "GetAll" })?;
                Ok(Membership { unit: state.id, invocation: None })
            }
            Err(error) => Err(error),
        }
    }

    /// Asks for a session's unit to be started, in mode `fail`. Gives the job's object path.
    pub async fn start(&self, name: &UnitName, description: &Description<'_>) -> Result<String, CallError> {
        let auxiliary: Vec<(&str, Vec<(&str, Value<'_>)>)> = Vec::new();
        let body = (name.as_str(), "fail", unit::properties(description), auxiliary);
        let job: OwnedObjectPath = self.manager("StartTransientUnit", &body).await?;
        Ok(job.as_str().to_owned())
    }

    /// Asks for a unit to be stopped. Mode `replace`, since `fail` is refused while it is being started. Gives the job's
    /// number, as [`UnitState::job`] shows it.
    pub async fn stop(&self, name: &str) -> Result<u32, CallError> {
        const METHOD: &str = "StopUnit";
        let job: OwnedObjectPath = self.manager(METHOD, &(name, "replace")).await?;
        let number = job.as_str().rsplit('/').next().and_then(|number| number.parse().ok());
        number.ok_or(CallError::Malformed { method: METHOD })
    }

    /// Sends SIGKILL to every process of a unit.
    pub async fn kill(&self, name: &str) -> Result<(), CallError> {
        self.manager("KillUnit", &(name, "all", 9_i32)).await
    }

    /// Keeps a unit loaded after its end, for as long as this bus connection lives.
    pub async fn reference(&self, name: &str) -> Result<(), CallError> {
        self.manager("RefUnit", &(name,)).await
    }

    /// Lets a unit go.
    pub async fn release(&self, name: &str) -> Result<(), CallError> {
        self.manager("UnrefUnit", &(name,)).await
    }

    /// The sessions of the supervisor that runs as `unit`, in any state: loaded units with the name of a session and
    /// exactly one `BindsTo`, that unit.
    pub async fn sessions_of(&self, unit: &str) -> Result<Vec<(UnitName, UnitState, Usage)>, CallError> {
        let states: &[&str] = &[];
        let found: Vec<ListedReply> =
            self.manager("ListUnitsByPatterns", &(states, ["opencode-pty-*.service"].as_slice())).await?;
        let mut sessions = Vec::new();
        for name in found.iter().filter_map(|(name, ..)| UnitName::parse(name)) {
            let all = match self.get_all(&object_path(name.as_str())).await {
                Ok(all) => all,
                Err(CallError::NoSuchUnit) => continue,
                Err(error) => return Err(error),
            };
            let usage = Usage::from_properties(&all);
            let state = UnitState::from_properties(all).ok_or(CallError::Malformed { method: "GetAll" })?;
            if state.load == "loaded" && state.binds_to == [unit] {
                sessions.push((name, state, usage));
            }
        }
        Ok(sessions)
    }

    async fn manager<B, R>(&self, method: &'static str, body: &B) -> Result<R, CallError>
    where
        B: serde::Serialize + DynamicType,
        R: DeserializeOwned + Type,
    {
        self.call(MANAGER_PATH, MANAGER_INTERFACE, method, body).await
    }

    /// One call to the manager. Waits for the bus to come back if it is away, [`CALL_TIME`] in all.
    async fn call<B, R>(
        &self,
        path: &str,
        interface: &'static str,
        method: &'static str,
        body: &B,
    ) -> Result<R, CallError>
    where
        B: serde::Serialize + DynamicType,
        R: DeserializeOwned + Type,
    {
        let work = async {
            let connection = self.link.believed().await;
            connection.call_method(Some(link::MANAGER_NAME), path, Some(interface), method, body).await
        };
        // zbus's futures are large: a session has one only while it calls.
        let answer = within(CALL_TIME, Box::pin(work)).await;
        self.link.note_answer(answer.is_some());
        let answer = answer.ok_or(CallError::NoAnswer { method })?;
        let answer = answer.map_err(|error| CallError::new(method, &error))?;
        answer.body().deserialize().map_err(|_| CallError::Malformed { method })
    }
}
