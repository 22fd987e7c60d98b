//! The connection to the bus: who the manager is, where its signals go, and what happens when either goes away.
//!
//! Three rules. The manager is believed only while the bus says that its name is owned by PID 1, uid 0; anybody may
//! send us a signal, so one from another sender is ignored. One task reads the message stream and never waits for
//! anything else: a stream that is not read blocks the whole connection. And a signal ends up in a cell of its unit,
//! the latest state alone, so nothing can pile up.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;

use smol::Timer;
use smol::future::{self, FutureExt};
use smol::stream::StreamExt;
use zbus::message::Type;
use zbus::zvariant::{OwnedObjectPath, Value};
use zbus::{Connection, Message, MessageStream};

use super::{CallError, MANAGER_INTERFACE, MANAGER_PATH, UnitEvents, unit};
use crate::journal::{self, Event};
use crate::limits::{CALL_TIME, RECONNECT_PAUSE_MAX, RECONNECT_PAUSE_MIN};
use crate::wait::{Watched, within};

/// The manager's well-known name.
pub const MANAGER_NAME: &str = "org.freedesktop.systemd1";
const BUS_NAME: &str = "org.freedesktop.DBus";
const BUS_PATH: &str = "/org/freedesktop/DBus";
/// Finished jobs kept per unit: a start and a stop, and some that others asked for.
const JOBS_KEPT: usize = 8;
const SUBSCRIBE: &str = "subscribe to the service manager";

/// Which bus, and who must be the manager on it.
#[derive(Clone, Debug)]
pub struct BusOptions {
    /// D-Bus address.
    pub address: String,
    /// Pid of the process that owns the manager's name: 1 but for tests.
    pub manager_pid: u32,
}

/// Why there is no manager to talk to.
#[derive(Debug)]
pub enum LinkError {
    /// The bus does not answer.
    Bus {
        /// What was being attempted.
        doing: &'static str,
        /// Why not.
        source: Box<zbus::Error>,
    },
    /// No answer from the bus in time.
    Timeout {
        /// What was being attempted.
        doing: &'static str,
    },
    /// Somebody else has the manager's name.
    Impostor {
        /// The owner's pid.
        pid: u32,
        /// The owner's uid.
        uid: u32,
    },
}

/// What of a unit is worth reading it again for.
pub(super) const WORTH_READING: [&str; 4] = ["ActiveState", "MainPID", "InvocationID", "Job"];

impl LinkError {
    fn bus(doing: &'static str, source: zbus::Error) -> Self {
        Self::Bus { doing, source: Box::new(source) }
    }
}

impl fmt::Display for LinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bus { doing, .. } => write!(f, "cannot {doing}"),
            Self::Timeout { doing } => write!(f, "cannot {doing}: no answer in time"),
            Self::Impostor { pid, uid } => {
                write!(f, "{MANAGER_NAME} is owned by pid {pid}, uid {uid}, which is not the service manager")
            }
        }
    }
}

impl std::error::Error for LinkError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Bus { source, .. } => Some(&**source),
            _ => None,
        }
    }
}

/// What there is of a connection right now.
#[derive(Debug, Default)]
struct Line {
    connection: Option<Connection>,
    /// The unique name the bus gives as the owner of the manager's name; checked or not.
    claimed: Option<String>,
    /// The same, once it has been found to be the manager.
    believed: Option<String>,
    /// Counts how often a manager has been believed anew.
    generation: u64,
    /// The last call got no answer: as good as away, until one gets an answer.
    silent: bool,
}

#[derive(Debug)]
pub struct Link {
    options: BusOptions,
    line: Watched<Line>,
    units: RefCell<HashMap<String, Watched<UnitEvents>>>,
}

impl Link {
    /// Connects once; the future keeps the link up from then on.
    pub async fn connect(options: BusOptions) -> Result<(Rc<Self>, impl Future<Output = ()>), LinkError> {
        let link = Rc::new(Self { options, line: Watched::default(), units: RefCell::default() });
        let (connection, mut stream) = link.dial().await?;
        // The first acquaintance needs the pump and the executor already running.
        link.acquaint(&connection).or(link.run(&connection, &mut stream)).await?;
        let keep = Rc::clone(&link).keep(connection, stream);
        Ok((link, keep))
    }

    async fn dial(&self) -> Result<(Connection, MessageStream), LinkError> {
        const DOING: &str = "connect to the system bus";
        let bus = |source| LinkError::bus(DOING, source);
        let builder = zbus::connection::Builder::address(self.options.address.as_str()).map_err(bus)?;
        let building = builder.internal_executor(false).build();
        let connection =
            within(CALL_TIME, Box::pin(building)).await.ok_or(LinkError::Timeout { doing: DOING })?.map_err(bus)?;
        let stream = MessageStream::from(&connection);
        Ok((connection, stream))
    }

    /// Runs a connection until it ends: the executor that moves its bytes, and the one reader of its messages.
    async fn run<T>(&self, connection: &Connection, stream: &mut MessageStream) -> Result<T, LinkError> {
        let executor = connection.executor().clone();
        let tick = async {
            loop {
                executor.tick().await;
            }
        };
        let pump = async {
            while let Some(Ok(message)) = stream.next().await {
                self.take(&message);
            }
            Err(LinkError::Timeout { doing: "read from the system bus" })
        };
        pump.or(tick).await
    }

    /// Finds out who the manager is, and subscribes to what concerns us.
    async fn acquaint(&self, connection: &Connection) -> Result<(), LinkError> {
        let owner_rule = format!(
            "type='signal',sender='{BUS_NAME}',interface='{BUS_NAME}',member='NameOwnerChanged',arg0='{MANAGER_NAME}'"
        );
        driver::<_, ()>(connection, "AddMatch", &(owner_rule.as_str(),)).await?;
        let owner: String = driver(connection, "GetNameOwner", &(MANAGER_NAME,)).await?;
        self.check(connection, &owner).await
    }

    /// Believes `owner` if it is the manager, and registers with it.
    async fn check(&self, connection: &Connection, owner: &str) -> Result<(), LinkError> {
        let pid: u32 = driver(connection, "GetConnectionUnixProcessID", &(owner,)).await?;
        let uid: u32 = driver(connection, "GetConnectionUnixUser", &(owner,)).await?;
        if pid != self.options.manager_pid || uid != 0 {
            return Err(LinkError::Impostor { pid, uid });
        }
        let subscribe = connection.call_method(Some(owner), MANAGER_PATH, Some(MANAGER_INTERFACE), "Subscribe", &());
        match within(CALL_TIME, Box::pin(subscribe)).await {
            // A refusal means that it is ours already, as after a re-execution.
            Some(Ok(_) | Err(zbus::Error::MethodError(..))) => {}
            Some(Err(source)) => return Err(LinkError::bus(SUBSCRIBE, source)),
            None => return Err(LinkError::Timeout { doing: SUBSCRIBE }),
        }
        let names: Vec<String> = self.units.borrow().keys().cloned().collect();
        let is_new = self.line.with(|line| line.connection.is_none());
        for name in names.iter().filter(|_| is_new) {
            add_rules(connection, name).await?;
        }
        let generation = self.line.change(|line| {
            line.connection = Some(connection.clone());
            line.claimed = Some(owner.to_owned());
            line.believed = Some(owner.to_owned());
            line.generation += 1;
            line.generation
        });
        for events in self.units.borrow().values() {
            events.change(|events| events.generation = generation);
        }
        Ok(())
    }

    /// Keeps the link up: re-checks a new owner of the name, and connects again when the bus goes away.
    async fn keep(self: Rc<Self>, mut connection: Connection, mut stream: MessageStream) {
        loop {
            let ended: Result<(), LinkError> =
                self.run(&connection, &mut stream).or(self.follow_owner(&connection)).await;
            drop(ended);
            self.line.change(|line| {
                line.connection = None;
                line.claimed = None;
                line.believed = None;
            });
            journal::record(Event::BusAway, &[], "the system bus is away");
            let mut pause = RECONNECT_PAUSE_MIN;
            (connection, stream) = loop {
                Timer::after(pause).await;
                pause = (pause * 2).min(RECONNECT_PAUSE_MAX);
                let Ok((connection, mut stream)) = self.dial().await else { continue };
                let acquainted = self.acquaint(&connection).or(self.run(&connection, &mut stream)).await;
                if acquainted.is_ok() {
                    break (connection, stream);
                }
            };
            journal::record(Event::BusBack, &[], "the system bus is back");
        }
    }

    /// Waits for the name to get another owner, and checks it. Ends only when the bus does not answer.
    async fn follow_owner(&self, connection: &Connection) -> Result<(), LinkError> {
        loop {
            let claimed = self
                .line
                .wait_for(|line| {
                    (line.claimed.is_some() && line.claimed != line.believed).then(|| line.claimed.clone())?
                })
                .await;
            match self.check(connection, &claimed).await {
                Ok(()) => {}
                Err(error @ LinkError::Impostor { .. }) => {
                    journal::record(Event::Impostor, &[], &error.to_string());
                    // Nobody is believed until the name changes hands again.
                    self.line.wait_for(|line| (line.claimed.as_deref() != Some(&claimed)).then_some(())).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Looks at one message. Signals of the believed manager, and of the bus about its name, count; nothing else.
    fn take(&self, message: &Message) {
        if message.message_type() != Type::Signal {
            return;
        }
        let header = message.header();
        let (Some(sender), Some(member)) = (header.sender(), header.member()) else { return };
        let body = message.body();
        if sender.as_str() == BUS_NAME {
            if member.as_str() == "NameOwnerChanged"
                && let Ok((name, _old, new)) = body.deserialize::<(&str, &str, &str)>()
                && name == MANAGER_NAME
            {
                self.line.change(|line| {
                    line.claimed = (!new.is_empty()).then(|| new.to_owned());
                    if line.believed != line.claimed {
                        line.believed = None;
                    }
                });
            }
            return;
        }
        if self.line.with(|line| line.believed.as_deref() != Some(sender.as_str())) {
            return;
        }
        match member.as_str() {
            "JobRemoved" => {
                if let Ok((_, job, unit, result)) = body.deserialize::<(u32, OwnedObjectPath, &str, &str)>() {
                    self.tell(unit, |events| {
                        events.jobs.truncate(JOBS_KEPT - 1);
                        events.jobs.insert(0, (job.as_str().to_owned(), result.to_owned()));
                    });
                }
            }
            "UnitRemoved" => {
                if let Ok((unit, _path)) = body.deserialize::<(&str, OwnedObjectPath)>() {
                    self.tell(unit, |events| events.removals += 1);
                }
            }
            "PropertiesChanged" => {
                let Some(path) = header.path() else { return };
                let Some(name) = self.name_of(path.as_str()) else { return };
                if let Ok((_, changed, _)) = body.deserialize::<(&str, HashMap<&str, Value<'_>>, Vec<&str>)>() {
                    self.note_changes(&name, &changed);
                }
            }
            _ => {}
        }
    }

    /// Takes note of what a unit is said to be. The manager says it all again whenever anything about the unit changed, and
    /// of the server's unit at each start and end of a session; only what is new is worth reading the unit for.
    fn note_changes(&self, name: &str, changed: &HashMap<&str, Value<'_>>) {
        if !WORTH_READING.iter().any(|property| changed.contains_key(property)) {
            return;
        }
        self.tell(name, |events| {
            if let Some(active) = changed.get("ActiveState").and_then(|value| value.downcast_ref::<&str>().ok()) {
                events.active = Some(active.to_owned());
            }
            let ended = events.has_ended();
            let mut is_new = false;
            for (known, property) in events.said.iter_mut().zip(WORTH_READING) {
                let Some(said) = changed.get(property).map(ToString::to_string) else { continue };
                if known.as_ref() != Some(&said) {
                    // A job of a unit that runs is told by its removal; of one that has ended, it is somebody's restart.
                    is_new |= property != "Job" || ended;
                    *known = Some(said);
                }
            }
            events.changes += u64::from(is_new);
        });
    }

    fn tell(&self, unit: &str, change: impl FnOnce(&mut UnitEvents)) {
        if let Some(events) = self.units.borrow().get(unit) {
            events.change(change);
        }
    }

    fn name_of(&self, path: &str) -> Option<String> {
        self.units.borrow().keys().find(|name| unit::object_path(name) == path).cloned()
    }

    /// Whether there is a manager to talk to.
    pub fn is_online(&self) -> bool {
        self.line.with(|line| line.believed.is_some() && !line.silent)
    }

    /// Waits until there is one.
    pub async fn online(&self) {
        self.line.wait_for(|line| (line.believed.is_some() && !line.silent).then_some(())).await;
    }

    /// Notes whether a call got an answer.
    pub fn note_answer(&self, answered: bool) {
        if self.line.with(|line| line.silent == answered) {
            self.line.change(|line| line.silent = !answered);
        }
    }

    /// The connection, once its manager is believed.
    pub async fn believed(&self) -> Connection {
        self.line.wait_for(|line| line.believed.as_ref().and_then(|_| line.connection.clone())).await
    }

    /// Registers for a unit's signals.
    pub async fn watch(&self, name: &str) -> Result<Watched<UnitEvents>, CallError> {
        let added = within(CALL_TIME, async {
            let connection = self.believed().await;
            add_rules(&connection, name).await
        });
        match added.await {
            Some(Ok(())) => {
                // Registered only now, or a reconnection meanwhile would add the rules a second time.
                let generation = self.line.with(|line| line.generation);
                let events = Watched::new(UnitEvents { generation, ..UnitEvents::default() });
                self.units.borrow_mut().insert(name.to_owned(), events.clone());
                Ok(events)
            }
            _ => Err(CallError::NoAnswer { method: "AddMatch" }),
        }
    }

    /// Ends a registration. If the bus is away, it is gone with it.
    pub async fn forget(&self, name: &str) {
        self.units.borrow_mut().remove(name);
        let Some(connection) = self.line.with(|line| line.connection.clone()) else { return };
        for rule in rules(name) {
            let message = Message::method_call(BUS_PATH, "RemoveMatch")
                .and_then(|builder| builder.destination(BUS_NAME))
                .and_then(|builder| builder.interface(BUS_NAME))
                .and_then(|builder| builder.with_flags(zbus::message::Flags::NoReplyExpected))
                .and_then(|builder| builder.build(&(rule.as_str(),)));
            if let Ok(message) = message {
                // A connection that fails here has lost the rule with it.
                let _ = within(CALL_TIME, Box::pin(connection.send(&message))).await;
            }
        }
    }
}

/// The match rules for one unit's signals. Narrow, so that other units' doings don't wake us.
fn rules(name: &str) -> [String; 3] {
    let manager =
        format!("type='signal',sender='{MANAGER_NAME}',path='{MANAGER_PATH}',interface='{MANAGER_INTERFACE}'");
    [
        format!("{manager},member='JobRemoved',arg2='{name}'"),
        format!("{manager},member='UnitRemoved',arg0='{name}'"),
        format!(
            "type='signal',sender='{MANAGER_NAME}',path='{}',interface='org.freedesktop.DBus.Properties',\
             member='PropertiesChanged'",
            unit::object_path(name)
        ),
    ]
}

async fn add_rules(connection: &Connection, name: &str) -> Result<(), LinkError> {
    let [job, removed, changed] = rules(name);
    let add = |rule: String| async move { driver::<_, ()>(connection, "AddMatch", &(rule.as_str(),)).await };
    let ((job, removed), changed) = future::zip(future::zip(add(job), add(removed)), add(changed)).await;
    job.and(removed).and(changed)
}

/// One call to the bus itself.
async fn driver<B, R>(connection: &Connection, method: &'static str, body: &B) -> Result<R, LinkError>
where
    B: serde::Serialize + zbus::zvariant::DynamicType,
    R: serde::de::DeserializeOwned + zbus::zvariant::Type,
{
    const DOING: &str = "ask the system bus about the service manager";
    let call = connection.call_method(Some(BUS_NAME), BUS_PATH, Some(BUS_NAME), method, body);
    let answer = within(CALL_TIME, Box::pin(call)).await.ok_or(LinkError::Timeout { doing: DOING })?;
    answer.and_then(|answer| answer.body().deserialize()).map_err(|source| LinkError::bus(DOING, source))
}
