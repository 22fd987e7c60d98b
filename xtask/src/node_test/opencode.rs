//! A real OpenCode: the published binary as the server's main process, driven by `tests/node/opencode/drive.js` on the host.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};
use support::host::{self, WORKSPACE};

use super::runtimes::{self, Runtime};
use super::table::{Outcome, Table};
use super::{HOME, INSTALLED, Smoke};
use crate::Failure;

/// The column's name, and the one in the lock file.
pub const NAME: &str = "opencode";

/// Where OpenCode looks for its configuration, by `opencode-v2.service`.
const CONFIG: &str = "/home/byk/.local/share/opencode-v2-pilot/config/opencode";

/// How long all of it may take. Chosen: a minute is usual.
const RUN_SECONDS_MAX: u32 = 600;

/// OpenCode, or why it can't be had. Then everything about it is skipped, which the table and the log say.
pub fn get(progress: &mut dyn FnMut(&str)) -> (Runtime, Option<String>) {
    let runtime = |version: &str, program| Runtime {
        name: NAME,
        title: format!("OpenCode {version}").trim_end().to_owned(),
        version: version.to_owned(),
        program,
        is_single: true,
    };
    match runtimes::locked_program(NAME, progress) {
        Ok((version, program)) => (runtime(&version, program), None),
        Err(failure) => (runtime("", PathBuf::new()), Some(failure.to_string())),
    }
}

/// The line of the lock file with the Node that the driver runs under.
const DRIVERS_NODE: &str = "node26";

/// Everything about it.
pub fn run(smoke: &Smoke, runtime: &Runtime, table: &mut Table) -> Result<(), Failure> {
    let (_, node) = runtimes::locked_program(DRIVERS_NODE, &mut |line| eprintln!("{line}"))?;
    let (program, driver) = (format!("{HOME}/bin/{NAME}"), format!("{HOME}/bin/driver"));
    host::copy_program(&smoke.host, &runtime.program, &program)?;
    host::copy_program(&smoke.host, &node, &driver)?;
    let results = format!("{HOME}/results/{NAME}.jsonl");
    let plan = json!({
        "directory": format!("{HOME}/tests"),
        "workspace": WORKSPACE,
        "config": CONFIG,
        "version": runtime.version,
        "results": results,
        "only": smoke.only,
    });
    host::write(&smoke.host, &format!("{HOME}/opencode.json"), 0o644, &plan.to_string())?;
    host::write(&smoke.host, &results, 0o644, "")?;
    host::write(
        &smoke.host,
        &format!("/etc/systemd/system/{}.d/20-smoke.conf", INSTALLED.server),
        0o644,
        &format!(
            "[Service]\nExecStart=\nExecStart={program} serve --hostname=127.0.0.1 --port=4096\nRestart=no\n\
             Environment=OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_AUTOUPDATE=1\n"
        ),
    )?;
    let said = smoke.host.sh_ok(&format!(
        "systemctl daemon-reload
        systemctl start {supervisor}
        timeout {RUN_SECONDS_MAX} {driver} {HOME}/tests/opencode/drive.js {HOME}/opencode.json 2>&1 || echo ended with $?
        systemctl stop {server}
        rm {program} {driver}",
        supervisor = INSTALLED.supervisor,
        server = INSTALLED.server,
    ))?;
    let file = smoke.host.path(&results);
    let text = fs::read_to_string(&file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    for line in &lines {
        let Some(name) = line["scenario"].as_str() else { continue };
        let outcome = match line["error"].as_str() {
            None if line["ok"] == json!(true) => Outcome::Passed,
            error => Outcome::Failed(error.unwrap_or("without a word").to_owned()),
        };
        table.add(name, runtime, outcome);
    }
    if !lines.iter().any(|line| line["done"] == json!(true)) {
        table.add("OpenCode: the run gets to its end", runtime, Outcome::Failed(said));
    }
    Ok(())
}
