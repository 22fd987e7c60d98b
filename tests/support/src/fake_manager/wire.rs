//! Messages as systemd writes them: object paths, properties, answers, signals.

use std::collections::HashMap;

use zbus::Message;
use zbus::zvariant::{DynamicType, OwnedObjectPath, Value};

use super::{NO_SUCH_UNIT, State, Unit};

pub(super) const MANAGER_NAME: &str = "org.freedesktop.systemd1";
pub(super) const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
pub(super) const MANAGER_INTERFACE: &str = "org.freedesktop.systemd1.Manager";
pub(super) const UNIT_INTERFACE: &str = "org.freedesktop.systemd1.Unit";
pub(super) const SERVICE_INTERFACE: &str = "org.freedesktop.systemd1.Service";
pub(super) const PROPERTIES_INTERFACE: &str = "org.freedesktop.DBus.Properties";
pub(super) const UNIT_PATH_PREFIX: &str = "/org/freedesktop/systemd1/unit/";

pub(super) fn properties_of(state: &State, name: &str) -> HashMap<&'static str, Value<'static>> {
    let server = &state.server;
    if name == server.unit {
        return all_properties(&Shown {
            id: name,
            load: "loaded",
            active: &server.active,
            sub: &server.sub,
            result: "success",
            code: 0,
            status: 0,
            invocation: &server.invocation,
            control_group: &server.control_group,
            main_pid: server.main_pid,
            notify_access: &server.notify_access,
            binds_to: &[],
            job: 0,
        });
    }
    let Some(unit) = state.loaded(name) else {
        // What the real one says of a unit it does not have: a lie to whoever reads on.
        return all_properties(&Shown {
            id: name,
            load: "not-found",
            active: "inactive",
            sub: "dead",
            result: "success",
            code: 0,
            status: 0,
            invocation: &[],
            control_group: "",
            main_pid: 0,
            notify_access: "none",
            binds_to: &[],
            job: 0,
        });
    };
    let alive = matches!(unit.active.as_str(), "active" | "deactivating");
    all_properties(&Shown {
        id: &unit.name,
        load: "loaded",
        active: &unit.active,
        sub: &unit.sub,
        result: &unit.result,
        code: unit.code,
        status: unit.status,
        invocation: &unit.invocation,
        control_group: if alive { &unit.control_group } else { "" },
        main_pid: if alive { u32::MAX >> 10 } else { 0 },
        notify_access: "none",
        binds_to: &unit.binds_to,
        job: unit.job.map_or(0, |(id, _)| id),
    })
}

/// The properties of a unit that anybody asks for.
struct Shown<'a> {
    id: &'a str,
    load: &'a str,
    active: &'a str,
    sub: &'a str,
    result: &'a str,
    code: i32,
    status: i32,
    invocation: &'a [u8],
    control_group: &'a str,
    main_pid: u32,
    notify_access: &'a str,
    binds_to: &'a [String],
    job: u32,
}

fn all_properties(shown: &Shown<'_>) -> HashMap<&'static str, Value<'static>> {
    let text = |text: &str| Value::from(text.to_owned());
    let job = (shown.job, if shown.job == 0 { object("/") } else { object(&job_path(shown.job)) });
    HashMap::from([
        ("Id", text(shown.id)),
        ("Names", Value::from(vec![shown.id.to_owned()])),
        ("LoadState", text(shown.load)),
        ("ActiveState", text(shown.active)),
        ("SubState", text(shown.sub)),
        ("InvocationID", Value::from(shown.invocation.to_vec())),
        ("BindsTo", Value::from(shown.binds_to.to_vec())),
        ("Job", Value::from(job)),
        ("Result", text(shown.result)),
        ("ExecMainCode", Value::from(shown.code)),
        ("ExecMainStatus", Value::from(shown.status)),
        ("ControlGroup", text(shown.control_group)),
        ("MainPID", Value::from(shown.main_pid)),
        ("NotifyAccess", text(shown.notify_access)),
    ])
}

pub(super) fn unit_changed(unit: &Unit) -> Vec<Message> {
    let path = path_of(&unit.name);
    let service = HashMap::from([
        ("Result", Value::from(unit.result.clone())),
        ("ExecMainCode", Value::from(unit.code)),
        ("ExecMainStatus", Value::from(unit.status)),
    ]);
    let state = HashMap::from([
        ("ActiveState", Value::from(unit.active.clone())),
        ("SubState", Value::from(unit.sub.clone())),
        ("InvocationID", Value::from(unit.invocation.clone())),
    ]);
    vec![properties_changed(&path, SERVICE_INTERFACE, &service), properties_changed(&path, UNIT_INTERFACE, &state)]
}

pub(super) fn properties_changed(path: &str, interface: &str, changed: &HashMap<&str, Value<'_>>) -> Message {
    let invalidated: &[&str] = &[];
    signal(path, PROPERTIES_INTERFACE, "PropertiesChanged", &(interface, changed, invalidated))
}

pub(super) fn job_removed(job: u32, unit: &str, word: &str) -> Message {
    signal(MANAGER_PATH, MANAGER_INTERFACE, "JobRemoved", &(job, object(&job_path(job)), unit, word))
}

pub(super) fn job_path(job: u32) -> String {
    format!("/org/freedesktop/systemd1/job/{job}")
}

pub(super) fn object(path: &str) -> OwnedObjectPath {
    OwnedObjectPath::try_from(path).expect("the fake makes well-formed paths")
}

pub(super) fn no_such_unit(call: &Message) -> Message {
    error(call, NO_SUCH_UNIT, "Unit not loaded.")
}

pub(super) fn reply(call: &Message, body: &(impl serde::Serialize + DynamicType)) -> Message {
    Message::method_return(&call.header()).and_then(|reply| reply.build(body)).expect("an answer can be built")
}

pub(super) fn error(call: &Message, name: &str, text: &str) -> Message {
    Message::error(&call.header(), name).and_then(|error| error.build(&(text,))).expect("an error can be built")
}

pub(super) fn signal(
    path: &str,
    interface: &str,
    member: &str,
    body: &(impl serde::Serialize + DynamicType),
) -> Message {
    Message::signal(path, interface, member).and_then(|signal| signal.build(body)).expect("a signal can be built")
}

/// The object path of a unit, escaped as systemd does: all but letters and digits, and a digit in front.
pub(super) fn path_of(name: &str) -> String {
    let mut path = UNIT_PATH_PREFIX.to_owned();
    for (index, byte) in name.bytes().enumerate() {
        if byte.is_ascii_alphabetic() || (byte.is_ascii_digit() && index > 0) {
            path.push(char::from(byte));
        } else {
            path.push('_');
            path.extend([byte >> 4, byte & 15].map(|digit| char::from_digit(u32::from(digit), 16).unwrap_or('0')));
        }
    }
    path
}

/// The reverse of [`path_of`].
pub(super) fn name_of(path: &str) -> Option<String> {
    let mut rest = path.strip_prefix(UNIT_PATH_PREFIX)?.bytes();
    let mut name = Vec::new();
    while let Some(byte) = rest.next() {
        if byte == b'_' {
            let digits = [rest.next()?, rest.next()?];
            name.push(u8::from_str_radix(str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            name.push(byte);
        }
    }
    String::from_utf8(name).ok()
}
