//! The manager's methods: what each does to the units, what it answers, and the signals that follow.

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use zbus::Message;
use zbus::zvariant::{Fd, OwnedObjectPath, OwnedValue, Value};

use super::wire::{
    MANAGER_INTERFACE, MANAGER_PATH, error, job_path, job_removed, name_of, no_such_unit, object, path_of,
    properties_of, reply, signal, unit_changed,
};
use super::{Call, Ending, JobEnd, PROCESS_UNKNOWN, State, Stopping, UNKNOWN_METHOD, Unit};

fn member(call: &Message) -> String {
    call.header().member().map(|member| member.as_str().to_owned()).unwrap_or_default()
}

/// What a call is about, for the list of calls.
pub(super) fn describe(call: &Message) -> Call {
    let method = member(call);
    let body = call.body();
    let of_path = call.header().path().and_then(|path| name_of(path.as_str())).unwrap_or_default();
    let (unit, detail) = match method.as_str() {
        "StopUnit" | "StartUnit" | "RestartUnit" => body.deserialize::<(String, String)>().unwrap_or_default(),
        "StartTransientUnit" => match started(call) {
            Some((name, mode, _)) => (name, mode),
            None => (String::new(), "malformed".into()),
        },
        "KillUnit" => match body.deserialize::<(String, String, i32)>() {
            Ok((name, who, signal)) => (name, format!("{who} {signal}")),
            Err(_) => (String::new(), "malformed".into()),
        },
        "RefUnit" | "UnrefUnit" | "GetUnit" | "LoadUnit" | "ResetFailedUnit" | "GetUnitProcesses" => {
            (body.deserialize::<String>().unwrap_or_default(), String::new())
        }
        "GetUnitByPID" => (String::new(), body.deserialize::<u32>().map(|pid| pid.to_string()).unwrap_or_default()),
        _ => (of_path, String::new()),
    };
    Call { method, unit, detail }
}

type Started = (String, String, Vec<(String, OwnedValue)>);

fn started(call: &Message) -> Option<Started> {
    type Auxiliary = Vec<(String, Vec<(String, OwnedValue)>)>;
    let (name, mode, properties, _) =
        call.body().deserialize::<(String, String, Vec<(String, OwnedValue)>, Auxiliary)>().ok()?;
    Some((name, mode, properties))
}

/// Carries a call out; the first message is the answer, the others are signals.
pub(super) fn dispatch(state: &mut State, call: &Message, to_play: &mut Option<String>) -> Vec<Message> {
    let header = call.header();
    let path = header.path().map(|path| path.as_str().to_owned()).unwrap_or_default();
    let described = describe(call);
    let name = described.unit.as_str();
    match described.method.as_str() {
        "Get" | "GetAll" if path == MANAGER_PATH => match described.method.as_str() {
            "Get" => vec![reply(call, &Value::from("255.4"))],
            _ => vec![reply(call, &HashMap::from([("Version", Value::from("255.4"))]))],
        },
        "GetAll" => vec![reply(call, &properties_of(state, &name_of(&path).unwrap_or_default()))],
        "Get" => {
            let all = properties_of(state, &name_of(&path).unwrap_or_default());
            let wanted = call.body().deserialize::<(String, String)>().map(|(_, name)| name).unwrap_or_default();
            match all.get(wanted.as_str()) {
                Some(value) => vec![reply(call, value)],
                None => vec![error(call, "org.freedesktop.DBus.Error.UnknownProperty", "Unknown property")],
            }
        }
        "GetUnitByPIDFD" => vec![unit_by_pidfd(state, call)],
        "GetUnitByPID" => match call.body().deserialize::<u32>().ok().map(|pid| unit_of_pid(state, pid)) {
            Some(Some(unit)) => vec![reply(call, &object(&path_of(&unit)))],
            _ => vec![error(call, "org.freedesktop.systemd1.NoUnitForPID", "PID does not belong to any loaded unit.")],
        },
        "GetUnit" if state.loaded(name).is_none() && name != state.server.unit => vec![no_such_unit(call)],
        "GetUnit" | "LoadUnit" => vec![reply(call, &object(&path_of(name)))],
        "StartTransientUnit" => start_transient_unit(state, call, to_play),
        "RefUnit" | "UnrefUnit" | "StopUnit" | "KillUnit" | "ResetFailedUnit" | "GetUnitProcesses"
            if state.loaded(name).is_none() =>
        {
            vec![no_such_unit(call)]
        }
        "RefUnit" => {
            change(state, name, |unit| unit.references += 1);
            vec![reply(call, &())]
        }
        "UnrefUnit" => {
            change(state, name, |unit| unit.references = unit.references.saturating_sub(1));
            let mut messages = vec![reply(call, &())];
            messages.extend(collect(state, name));
            messages
        }
        "Subscribe" | "Unsubscribe" | "ResetFailedUnit" => vec![reply(call, &())],
        "GetUnitProcesses" => vec![reply(call, &Vec::<(String, u32, String)>::new())],
        "KillUnit" => {
            let mut messages = vec![reply(call, &())];
            if state.script.stop != Stopping::Never {
                messages.extend(end(state, name, (2, 9, "signal")));
            }
            messages
        }
        "StopUnit" => stop_unit(state, call, name, to_play),
        "ListUnitsByPatterns" => vec![list_units(state, call)],
        "ListJobs" => {
            let jobs: Vec<_> = state
                .units
                .values()
                .filter_map(|unit| unit.job.map(|(id, kind)| (unit, id, kind)))
                .map(|(unit, id, kind)| {
                    (id, unit.name.clone(), kind, "waiting", object(&job_path(id)), object(&path_of(&unit.name)))
                })
                .collect();
            vec![reply(call, &jobs)]
        }
        _ => vec![error(call, UNKNOWN_METHOD, "Unknown method")],
    }
}

fn change(state: &mut State, name: &str, change: impl FnOnce(&mut Unit)) {
    if let Some(unit) = state.units.get_mut(name) {
        change(unit);
    }
}

fn start_transient_unit(state: &mut State, call: &Message, to_play: &mut Option<String>) -> Vec<Message> {
    let Some((name, _, properties)) = started(call).filter(|(_, mode, _)| mode == "fail") else {
        return vec![error(call, "org.freedesktop.DBus.Error.InvalidArgs", "not a StartTransientUnit in mode fail")];
    };
    if state.loaded(&name).is_some() {
        return vec![error(call, "org.freedesktop.systemd1.UnitExists", "Unit already exists.")];
    }
    state.jobs += 1;
    let job = state.jobs;
    let mut properties: HashMap<String, OwnedValue> = properties.into_iter().collect();
    let mut descriptor = |name: &str| -> Option<OwnedFd> {
        let value = properties.remove(name)?;
        let fd = Fd::try_from(Value::from(value)).ok()?;
        fd.as_fd().try_clone_to_owned().ok()
    };
    let terminal = descriptor("StandardInputFileDescriptor").map(UnixStream::from);
    drop(descriptor("StandardOutputFileDescriptor"));
    let directory = descriptor("StandardErrorFileDescriptor");
    let flag = |name: &str| properties.get(name).is_some_and(|value| bool::try_from(value) == Ok(true));
    let binds_to = properties.get("BindsTo").and_then(|value| value.try_clone().ok());
    let left_behind = Unit::left_behind(&name, "activating", "");
    let unit = Unit {
        control_group: state.script.control_group.clone().unwrap_or(left_behind.control_group.clone()),
        active: "activating".into(),
        sub: "start".into(),
        invocation: u128::from(job).to_be_bytes().to_vec(),
        binds_to: binds_to.and_then(|value| Vec::<String>::try_from(value).ok()).unwrap_or_default(),
        job: Some((job, "start")),
        references: usize::from(flag("AddRef")),
        directory,
        terminal,
        properties,
        ..left_behind
    };
    let mut messages = vec![
        reply(call, &object(&job_path(job))),
        signal(MANAGER_PATH, MANAGER_INTERFACE, "UnitNew", &(&name, object(&path_of(&name)))),
        signal(MANAGER_PATH, MANAGER_INTERFACE, "JobNew", &(job, object(&job_path(job)), &name)),
    ];
    messages.extend(unit_changed(&unit));
    state.units.insert(name.clone(), unit);
    if let JobEnd::Word(word) = state.script.job.clone() {
        messages.extend(end_start_job(state, &name, &word));
        *to_play = Some(name);
    }
    messages
}

pub(super) fn end_start_job(state: &mut State, name: &str, word: &str) -> Vec<Message> {
    let Some(unit) = state.units.get_mut(name) else { return vec![] };
    let Some((job, _)) = unit.job.take() else { return vec![] };
    unit.bytes_before_job_end = unit
        .terminal
        .as_ref()
        .map_or(0, |socket| rustix::io::ioctl_fionread(socket).unwrap_or(0))
        .try_into()
        .unwrap_or(0);
    (unit.active, unit.sub) = match word {
        "done" => ("active".into(), "running".into()),
        "failed" | "timeout" => ("failed".into(), "failed".into()),
        _ => ("inactive".into(), "dead".into()),
    };
    if word == "failed" {
        (unit.code, unit.status, unit.result) = (1, 203, "exit-code".into());
    }
    let mut messages = unit_changed(unit);
    messages.push(job_removed(job, name, word));
    messages.extend(collect(state, name));
    messages
}

fn stop_unit(state: &mut State, call: &Message, name: &str, to_play: &mut Option<String>) -> Vec<Message> {
    state.jobs += 1;
    let (job, stopping) = (state.jobs, state.script.stop);
    let mut messages = vec![reply(call, &object(&job_path(job)))];
    let Some(unit) = state.units.get_mut(name) else { return messages };
    match unit.job {
        Some((_, "start")) => {
            messages.extend(end_start_job(state, name, "canceled"));
            messages.push(job_removed(job, name, "done"));
            *to_play = Some(name.to_owned());
        }
        Some((stop, _)) => {
            // The stop that is under way already.
            messages = vec![reply(call, &object(&job_path(stop)))];
        }
        None if unit.is_ended() => messages.push(job_removed(job, name, "done")),
        None => {
            unit.job = Some((job, "stop"));
            if stopping == Stopping::Obeys {
                messages.extend(end(state, name, (2, 15, "success")));
            } else {
                (unit.active, unit.sub) = ("deactivating".into(), "stop-sigterm".into());
                messages.extend(unit_changed(unit));
            }
        }
    }
    messages
}

/// Ends a unit: its terminal is closed, its state told, its job removed.
pub(super) fn end(state: &mut State, name: &str, (code, status, result): Ending) -> Vec<Message> {
    let Some(unit) = state.units.get_mut(name) else { return vec![] };
    if unit.is_ended() || unit.removed {
        return vec![];
    }
    if let Some(socket) = unit.terminal.take() {
        // The player's thread has a duplicate; shut down, it sees the end, and so does the supervisor.
        let _ = socket.shutdown(Shutdown::Both);
    }
    let job = unit.job.take();
    (unit.code, unit.status, unit.result) = (code, status, result.into());
    unit.active = if result == "success" { "inactive" } else { "failed" }.into();
    unit.sub = if result == "success" { "dead" } else { "failed" }.into();
    let mut messages = unit_changed(unit);
    if let Some((job, kind)) = job {
        messages.push(job_removed(job, name, if kind == "stop" { "done" } else { "failed" }));
    }
    messages.extend(collect(state, name));
    messages
}

/// Unloads a unit that has ended and that nobody refers to.
fn collect(state: &mut State, name: &str) -> Vec<Message> {
    match state.units.get_mut(name) {
        Some(unit) if unit.is_ended() && unit.references == 0 && !unit.removed => {
            unit.removed = true;
            vec![signal(MANAGER_PATH, MANAGER_INTERFACE, "UnitRemoved", &(name, object(&path_of(name))))]
        }
        _ => vec![],
    }
}

fn unit_by_pidfd(state: &State, call: &Message) -> Message {
    let body = call.body();
    let Ok(fd) = body.deserialize::<zbus::zvariant::OwnedFd>() else {
        return error(call, "org.freedesktop.DBus.Error.InvalidArgs", "no descriptor");
    };
    match pid_of(&fd) {
        None => error(call, PROCESS_UNKNOWN, "Failed to get process ID from pidfd"),
        Some(pid) => match unit_of_pid(state, pid) {
            None => error(call, "org.freedesktop.systemd1.NoUnitForPID", "PID does not belong to any loaded unit."),
            Some(unit) => {
                let invocation = state.server.invocation_by_pidfd.clone().unwrap_or(state.server.invocation.clone());
                reply(call, &(object(&path_of(&unit)), unit, invocation))
            }
        },
    }
}

/// The process of a pidfd, unless it has been reaped.
fn pid_of(pidfd: impl AsFd) -> Option<u32> {
    use std::os::fd::AsRawFd;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_fd().as_raw_fd())).ok()?;
    info.lines().find_map(|line| line.strip_prefix("Pid:")).and_then(|pid| pid.trim().parse().ok())
}

/// The server's unit for its main process and whoever descends from it, nothing for anybody else.
fn unit_of_pid(state: &State, pid: u32) -> Option<String> {
    let mut pid = pid;
    while pid > 1 {
        if pid == state.server.main_pid {
            return Some(state.server.unit.clone());
        }
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        pid = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
    }
    None
}

type ListedUnit = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

fn list_units(state: &State, call: &Message) -> Message {
    let Ok((states, patterns)) = call.body().deserialize::<(Vec<String>, Vec<String>)>() else {
        return error(call, "org.freedesktop.DBus.Error.InvalidArgs", "malformed ListUnitsByPatterns");
    };
    let listed: Vec<ListedUnit> = state
        .units
        .values()
        .filter(|unit| !unit.removed && (states.is_empty() || states.contains(&unit.active)))
        .filter(|unit| patterns.is_empty() || patterns.iter().any(|pattern| matches(pattern, &unit.name)))
        .map(|unit| {
            let (id, kind) = unit.job.unwrap_or((0, ""));
            (
                unit.name.clone(),
                "opencode-pty session".to_owned(),
                "loaded".to_owned(),
                unit.active.clone(),
                unit.sub.clone(),
                String::new(),
                object(&path_of(&unit.name)),
                id,
                kind.to_owned(),
                if id == 0 { object("/") } else { object(&job_path(id)) },
            )
        })
        .collect();
    reply(call, &listed)
}

/// A pattern with at most one star.
fn matches(pattern: &str, name: &str) -> bool {
    pattern.split_once('*').map_or(pattern == name, |(begin, end)| {
        name.len() >= begin.len() + end.len() && name.starts_with(begin) && name.ends_with(end)
    })
}
