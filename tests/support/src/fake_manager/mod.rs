//! A service manager that says what a test wants: it owns `org.freedesktop.systemd1` on a private bus and starts
//! nothing.
//!
//! A "unit" here is a record; its launcher is played by a thread of the test, at the other end of the very
//! socketpair that the supervisor put into `StartTransientUnit`. What the manager answers, when the job ends and
//! with which word, what the launcher does and how a stop goes is a `Script`, which a test may change at any
//! time. `tests/system` runs the product against the real manager, so that this one can't drift.
//!
//! Its helpers panic, with what was waited for and the list of calls so far: they are for tests alone.

mod bus;
mod calls;
mod launcher;
mod script;
mod state;
mod wire;

use std::collections::{BTreeMap, HashMap};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use smol::stream::StreamExt;
use zbus::zvariant::Value;
use zbus::{Connection, Message, MessageStream, message};

pub use bus::Bus;
use calls::{describe, dispatch, end, end_start_job};
pub use launcher::{Ending, Launcher, Program, Terminal};
pub use script::{Answer, Exception, JobEnd, Script, Stopping};
pub use state::{Call, Handed, Server, State, Unit};
use wire::{
    MANAGER_NAME, SERVICE_INTERFACE, UNIT_INTERFACE, error, job_removed, path_of, properties_changed, reply,
    unit_changed,
};

/// The error systemd gives for a unit it does not have.
pub const NO_SUCH_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
/// The error every bus gives for a method that is not there.
pub const UNKNOWN_METHOD: &str = "org.freedesktop.DBus.Error.UnknownMethod";
/// systemd's error for a process that has been reaped.
pub const PROCESS_UNKNOWN: &str = "org.freedesktop.DBus.Error.UnixProcessIdUnknown";

/// How long [`FakeManager::wait`] waits. Chosen: several times the product's longest wait.
const WAIT_TIME: Duration = Duration::from_mins(1);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    connection: Mutex<Option<Connection>>,
}

/// A fake manager; clones are handles on the same one.
#[derive(Clone, Debug)]
pub struct FakeManager {
    shared: Arc<Shared>,
    address: String,
}

impl FakeManager {
    /// Takes the manager's name on this bus.
    pub fn start(address: &str, server: Server) -> zbus::Result<Self> {
        let state =
            State { script: Script::default(), server, units: BTreeMap::new(), calls: vec![], held: vec![], jobs: 0 };
        let shared = Shared { state: Mutex::new(state), changed: Condvar::new(), connection: Mutex::new(None) };
        let fake = Self { shared: Arc::new(shared), address: address.to_owned() };
        fake.connect()?;
        Ok(fake)
    }

    /// Connects and takes the name; also after the bus was restarted.
    pub fn connect(&self) -> zbus::Result<()> {
        let (connection, stream) = smol::block_on(async {
            let connection = zbus::connection::Builder::address(self.address.as_str())?.build().await?;
            // Before the name, or the first calls could be missed.
            let stream = MessageStream::from(&connection);
            connection.request_name(MANAGER_NAME).await?;
            zbus::Result::Ok((connection, stream))
        })?;
        *self.connection() = Some(connection.clone());
        let fake = self.clone();
        thread::spawn(move || smol::block_on(fake.serve(connection, stream)));
        Ok(())
    }

    /// Gives the name up: calls in flight are lost.
    pub fn disconnect(&self) -> zbus::Result<()> {
        let connection = self.connection().take();
        if let Some(connection) = connection {
            smol::block_on(connection.close())?;
        }
        self.lock().held.clear();
        Ok(())
    }

    /// What a daemon-reexec looks like from outside: calls in flight are lost, and the name moves to a new unique
    /// name of the same process.
    pub fn reexecute(&self) -> zbus::Result<()> {
        self.disconnect()?;
        self.connect()
    }

    /// What a restart of the bus does to the manager: references are gone, and ended units with them.
    pub fn lose_references(&self) {
        let mut state = self.lock();
        for unit in state.units.values_mut() {
            unit.references = 0;
            unit.removed |= unit.is_ended();
        }
    }

    /// Changes or reads what there is.
    pub fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        let result = look(&mut self.lock());
        self.shared.changed.notify_all();
        result
    }

    /// Waits until `look` finds what it wants.
    pub fn wait<T>(&self, waiting_for: &str, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        let deadline = Instant::now() + WAIT_TIME;
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return found;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the fake manager waited for {waiting_for}; it has {state:#?}");
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until a unit has been started, which has not been asked for before, and gives its name.
    pub fn wait_for_start(&self, known: &[&str]) -> String {
        self.wait("a unit to be started", |state| {
            state.units.keys().find(|name| !known.contains(&name.as_str())).cloned()
        })
    }

    /// Waits until no unit is loaded.
    pub fn wait_until_empty(&self) {
        self.wait("every unit to be unloaded", |state| state.units.values().all(|unit| unit.removed).then_some(()));
    }

    /// Answers this method differently, `times` times.
    pub fn answer(&self, method: &'static str, answer: Answer, times: usize) {
        self.with(|state| state.script.answers.push(Exception { method, unit: None, answer, times }));
    }

    /// The same for one unit only.
    pub fn answer_for(&self, method: &'static str, unit: &str, answer: Answer, times: usize) {
        let unit = Some(unit.to_owned());
        self.with(|state| state.script.answers.push(Exception { method, unit, answer, times }));
    }

    /// Ends a held start job.
    pub fn finish_job(&self, unit: &str, word: &str) {
        let messages = self.with(|state| end_start_job(state, unit, word));
        self.send(messages);
        self.play(unit);
    }

    /// Says that a job has ended, whether there was one or not.
    pub fn pretend_job_removed(&self, job: u32, unit: &str, word: &str) {
        self.send(vec![job_removed(job, unit, word)]);
    }

    /// Ends a unit's main process, as an outsider's signal would.
    pub fn end_unit(&self, unit: &str, ending: Ending) {
        let messages = self.with(|state| end(state, unit, ending));
        self.send(messages);
    }

    /// The same, but somebody outside the unit has its terminal and keeps it: a process it was passed to, say.
    pub fn end_unit_with_its_terminal_kept(&self, unit: &str, ending: Ending) -> Option<UnixStream> {
        let terminal = self.with(|state| state.units.get_mut(unit).and_then(|unit| unit.terminal.take()));
        self.end_unit(unit, ending);
        terminal
    }

    /// Takes a unit away all at once and without a signal: every call about it says that there is none.
    pub fn vanish(&self, unit: &str) {
        self.with(|state| {
            if let Some(unit) = state.units.get_mut(unit) {
                unit.removed = true;
                if let Some(terminal) = unit.terminal.take() {
                    // The player's thread has a duplicate.
                    let _ = terminal.shutdown(std::net::Shutdown::Both);
                }
            }
        });
    }

    /// Carries out and answers every held call.
    pub fn release(&self) {
        let held = self.with(|state| std::mem::take(&mut state.held));
        for call in held {
            self.carry_out(&call, true);
        }
    }

    /// What somebody's `systemctl restart` of a session does: another invocation.
    pub fn change_invocation(&self, name: &str) {
        let messages = self.with(|state| {
            let Some(unit) = state.units.get_mut(name) else { return vec![] };
            unit.invocation = vec![0xee; 16];
            unit_changed(unit)
        });
        self.send(messages);
    }

    /// Tells everyone about the server's unit, as a change of it would.
    pub fn announce_server(&self) {
        let messages = self.with(|state| {
            let server = &state.server;
            let path = path_of(&server.unit);
            let service = HashMap::from([("MainPID", Value::from(server.main_pid))]);
            let unit = HashMap::from([
                ("ActiveState", Value::from(server.active.clone())),
                ("SubState", Value::from(server.sub.clone())),
                ("InvocationID", Value::from(server.invocation.clone())),
            ]);
            vec![
                properties_changed(&path, SERVICE_INTERFACE, &service),
                properties_changed(&path, UNIT_INTERFACE, &unit),
            ]
        });
        self.send(messages);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connection(&self) -> MutexGuard<'_, Option<Connection>> {
        self.shared.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, messages: Vec<Message>) {
        let connection = self.connection().clone();
        let Some(connection) = connection else { return };
        for message in messages {
            // Between two connections nobody can hear us, as with the real one.
            let _ = smol::block_on(connection.send(&message));
        }
    }

    async fn serve(self, connection: Connection, mut stream: MessageStream) {
        while let Some(Ok(call)) = stream.next().await {
            if call.message_type() == message::Type::MethodCall {
                self.take(&call);
            }
        }
        drop(connection);
    }

    /// One call: noted, and answered as the script says.
    fn take(&self, call: &Message) {
        let described = describe(call);
        let exception = self.with(|state| {
            let exception = state.script.answers.iter_mut().find(|exception| {
                exception.times > 0
                    && exception.method == described.method
                    && exception.unit.as_ref().is_none_or(|unit| *unit == described.unit)
            });
            let answer = exception.map(|exception| {
                exception.times -= 1;
                exception.answer
            });
            if answer == Some(Answer::Held) {
                state.held.push(call.clone());
            }
            answer
        });
        match exception {
            None => self.carry_out(call, true),
            Some(Answer::LostReply) => self.carry_out(call, false),
            Some(Answer::Error(name, text)) => self.send(vec![error(call, name, text)]),
            Some(Answer::Malformed) => self.send(vec![reply(call, &(0_u8, "malformed"))]),
            Some(Answer::Silence | Answer::Held) => {}
        }
        // After the answer, so that a test that has seen the call knows it was answered.
        self.with(|state| state.calls.push(described));
    }

    fn carry_out(&self, call: &Message, answered: bool) {
        let mut to_play = None;
        let mut messages = self.with(|state| dispatch(state, call, &mut to_play));
        if !answered && !messages.is_empty() {
            messages.remove(0);
        }
        self.send(messages);
        if let Some(name) = to_play {
            self.play(&name);
        }
    }

    /// Plays the launcher of a unit whose start job has ended.
    fn play(&self, name: &str) {
        let (socket, launcher) = {
            let mut state = self.lock();
            let launcher = state.script.launcher.clone();
            let Some(unit) = state.units.get_mut(name) else { return };
            let Some(Ok(socket)) = unit.terminal.as_ref().map(UnixStream::try_clone) else { return };
            (socket, (unit.active == "active").then_some(launcher))
        };
        let (fake, name) = (self.clone(), name.to_owned());
        thread::spawn(move || {
            if let Some(ending) = fake.run_launcher(&name, socket, launcher) {
                fake.end_unit(&name, ending);
            }
        });
    }
}
