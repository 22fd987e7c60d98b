//! What every check may look at: the account, and what the service manager said of the units when we asked.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::account::{Account, Error as AccountError};
use crate::limits::{SERVER_UNIT_DEFAULT, SLICE_DEFAULT, SUPERVISOR_UNIT_DEFAULT};
use crate::report::Chain;
use crate::sys::socket;
use crate::systemd::Manager;

/// A unit's properties by their D-Bus names; each value as a list of words.
pub type Properties = BTreeMap<String, Vec<String>>;

/// How long a program that should answer at once may take. Chosen: far beyond what a loaded machine needs.
const PROGRAM_TIME: Duration = Duration::from_secs(20);
/// Between two looks whether a program has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// What every check may look at.
pub struct Context {
    /// The account that sessions run as.
    pub account: Result<Account, AccountError>,
    /// Its name, whether there is such an account or not.
    pub account_name: String,
    /// Whether we are root.
    pub is_root: bool,
    /// The service manager's version, or why it can't be talked to.
    pub manager_version: Result<String, String>,
    supervisor: Result<Properties, String>,
    slice: Result<Properties, String>,
    server: Result<Properties, String>,
}

impl Context {
    /// Asks the manager about everything that the checks look at.
    pub async fn gather(account_name: &str, manager: Option<&Manager>, why_not: &str) -> Self {
        let Some(manager) = manager else {
            let units = [(); 3].map(|()| Err(why_not.to_owned()));
            return Self::new(account_name, Err(why_not.to_owned()), units);
        };
        let version = manager.version().await.map_err(|error| Chain(&error).to_string());
        let mut units = [(); 3].map(|()| Err(String::new()));
        for (properties, unit) in units.iter_mut().zip([SUPERVISOR_UNIT_DEFAULT, SLICE_DEFAULT, SERVER_UNIT_DEFAULT]) {
            *properties = manager.properties(unit).await.map_err(|error| Chain(&error).to_string());
        }
        Self::new(account_name, version, units)
    }

    fn new(
        account_name: &str,
        manager_version: Result<String, String>,
        [supervisor, slice, server]: [Result<Properties, String>; 3],
    ) -> Self {
        Self {
            account: Account::by_name(account_name),
            account_name: account_name.to_owned(),
            is_root: socket::is_root(),
            manager_version,
            supervisor,
            slice,
            server,
        }
    }

    /// The supervisor's unit.
    pub fn supervisor(&self) -> Result<&Properties, &str> {
        self.supervisor.as_ref().map_err(String::as_str)
    }

    /// The sessions' slice.
    pub fn slice(&self) -> Result<&Properties, &str> {
        self.slice.as_ref().map_err(String::as_str)
    }

    /// The server's unit.
    pub fn server(&self) -> Result<&Properties, &str> {
        self.server.as_ref().map_err(String::as_str)
    }
}

/// A property with one value, or an empty text.
pub fn value<'a>(properties: &'a Properties, name: &str) -> &'a str {
    properties.get(name).and_then(|words| words.first()).map_or("", String::as_str)
}

/// Whether a unit's file was found and could be loaded.
pub fn is_loaded(properties: &Properties) -> bool {
    value(properties, "LoadState") == "loaded"
}

/// What a program said and how it ended.
pub struct Ran {
    /// Its exit code; `None` if a signal or our patience ended it.
    pub code: Option<i32>,
    /// Its standard output and error.
    pub said: String,
}

/// Runs a program without input and waits for it, but not for ever.
pub fn run(command: &mut Command) -> Result<Ran, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |error| format!("cannot run {name}: {error}");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    let deadline = Instant::now() + PROGRAM_TIME;
    // What these programs say fits into a pipe, so nobody waits for us to read it.
    while child.try_wait().map_err(failed)?.is_none() {
        if Instant::now() > deadline {
            child.kill().map_err(failed)?;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    let output = child.wait_with_output().map_err(failed)?;
    let mut said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok(Ran { code: output.status.code(), said: said.trim_end().to_owned() })
}
