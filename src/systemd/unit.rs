//! A session's unit: its name and its properties. Pure.
//!
//! Nothing of a client's request but the runtime gets in here, and it shows: [`properties`] has no parameter for
//! anything else.

use std::fmt;
use std::os::fd::BorrowedFd;

use zbus::zvariant::{Fd, Value};

use crate::limits::{
    SESSION_CPU_QUOTA_USEC, SESSION_IO_WEIGHT, SESSION_MEMORY_HIGH_BYTES, SESSION_MEMORY_MAX_BYTES, SESSION_TASKS_MAX,
    START_JOB_TIME, TERM_TO_KILL_TIME,
};

const PREFIX: &str = "opencode-pty-";
const SUFFIX: &str = ".service";
const ID_DIGITS: usize = 32;
/// Where PID 1 has its units' objects.
const OBJECT_PREFIX: &str = "/org/freedesktop/systemd1/unit/";
/// `CAP_SETGID` of linux/capability.h, for the launcher's dropping of groups.
const CAP_SETGID: u64 = 1 << 6;

/// The name of a session's unit: `opencode-pty-[0-9a-f]{32}.service`, and nothing else.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UnitName(String);

impl UnitName {
    /// The name for 128 random bits.
    pub fn from_random(bits: [u8; 16]) -> Self {
        Self(format!("{PREFIX}{:032x}{SUFFIX}", u128::from_be_bytes(bits)))
    }

    /// The name, if `text` is one to the letter.
    pub fn parse(text: &str) -> Option<Self> {
        let id = text.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
        let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        (id.len() == ID_DIGITS && id.bytes().all(digit)).then(|| Self(text.to_owned()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for UnitName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The D-Bus object path of the unit with this name: systemd's `bus_path_escape`.
pub fn object_path(name: &str) -> String {
    let mut path = OBJECT_PREFIX.to_owned();
    for (index, byte) in name.bytes().enumerate() {
        let plain = byte.is_ascii_alphabetic() || (index > 0 && byte.is_ascii_digit());
        if plain {
            path.push(char::from(byte));
        } else {
            path.push('_');
            path.extend([byte >> 4, byte & 15].map(|digit| char::from_digit(u32::from(digit), 16).unwrap_or('0')));
        }
    }
    path
}

/// What a session's unit is made of, besides what is fixed.
#[derive(Debug)]
pub struct Description<'a> {
    /// The launcher's path.
    pub launcher: &'a str,
    /// The sessions' slice.
    pub slice: &'a str,
    /// The supervisor's own unit, to which the session is bound.
    pub supervisor_unit: &'a str,
    /// The server's unit, whose `/tmp` the session shares.
    pub server_unit: &'a str,
    /// The account's name.
    pub user: &'a str,
    /// The account's uid.
    pub uid: u32,
    /// The account's primary gid.
    pub gid: u32,
    /// How long it may run, seconds.
    pub runtime_seconds: u32,
    /// PID 1's varlink sockets, `/run/systemd/io.systemd.*`, as they exist.
    pub varlink_sockets: &'a [String],
    /// Descriptors 0 and 1: the session's end of the socketpair.
    pub terminal: BorrowedFd<'a>,
    /// Descriptor 2: the approved directory.
    pub directory: BorrowedFd<'a>,
}

/// What comes back into the session's empty `/run`, read-only, if it exists: name resolution.
const RUN_BINDS: [&str; 4] =
    ["/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager/resolv.conf", "/run/nscd"];

/// What is hidden although `/run` is empty already: these lines hold if somebody takes the empty `/run` away, and
/// those outside `/run` are the only protection. The dash ignores what does not exist, which is the rule once
/// `/run` is empty.
const HIDDEN_PATHS: [&str; 9] = [
    "-/run/dbus/system_bus_socket",
    "-/run/docker.sock",
    "-/var/run/docker.sock",
    "-/run/containerd",
    "-/run/podman",
    "-/run/systemd/private",
    "-/var/lib/lxd",
    "-/var/snap/lxd",
    "-/run/opencode-pty",
];

/// The property list of `StartTransientUnit`, with systemd's D-Bus names and types.
pub fn properties<'a>(description: &Description<'a>) -> Vec<(&'static str, Value<'a>)> {
    let usec = |time: std::time::Duration| u64::try_from(time.as_micros()).expect("limits are seconds");
    let mut hidden: Vec<String> = HIDDEN_PATHS.map(str::to_owned).to_vec();
    hidden.extend(description.varlink_sockets.iter().map(|path| format!("-{path}")));
    hidden.push(format!("-/run/user/{}", description.uid));
    hidden.push(format!("-/run/user/{}/bus", description.uid));
    let binds: Vec<(String, String, bool, u64)> =
        RUN_BINDS.iter().map(|path| ((*path).to_owned(), (*path).to_owned(), true, 0)).collect();
    let command = vec![(description.launcher.to_owned(), vec![description.launcher.to_owned()], false)];

    vec![
        ("Description", Value::from("opencode-pty session")),
        ("Type", Value::from("exec")),
        ("Slice", Value::from(description.slice)),
        ("User", Value::from(description.user)),
        ("Group", Value::from(description.gid.to_string())),
        ("ExecStart", Value::from(command)),
        // The session's life.
        ("BindsTo", Value::from(vec![description.supervisor_unit])),
        ("After", Value::from(vec![description.supervisor_unit])),
        ("CollectMode", Value::from("inactive-or-failed")),
        ("AddRef", Value::from(true)),
        ("TimeoutStartUSec", Value::from(usec(START_JOB_TIME))),
        ("TimeoutStopUSec", Value::from(usec(TERM_TO_KILL_TIME))),
        ("RuntimeMaxUSec", Value::from(u64::from(description.runtime_seconds) * 1_000_000)),
        ("KillMode", Value::from("control-group")),
        ("KillSignal", Value::from(15_i32)),
        ("SendSIGHUP", Value::from(true)),
        ("SendSIGKILL", Value::from(true)),
        ("FinalKillSignal", Value::from(9_i32)),
        ("OOMPolicy", Value::from("kill")),
        ("Delegate", Value::from(false)),
        // Its descriptors.
        ("StandardInputFileDescriptor", Value::from(Fd::from(description.terminal))),
        ("StandardOutputFileDescriptor", Value::from(Fd::from(description.terminal))),
        ("StandardErrorFileDescriptor", Value::from(Fd::from(description.directory))),
        ("IgnoreSIGPIPE", Value::from(false)),
        ("UMask", Value::from(0o077_u32)),
        // What it can't do.
        ("NoNewPrivileges", Value::from(true)),
        ("AmbientCapabilities", Value::from(CAP_SETGID)),
        ("CapabilityBoundingSet", Value::from(CAP_SETGID)),
        ("RestrictSUIDSGID", Value::from(true)),
        ("LockPersonality", Value::from(true)),
        ("RestrictRealtime", Value::from(true)),
        ("ProtectKernelTunables", Value::from(true)),
        ("ProtectKernelModules", Value::from(true)),
        ("ProtectKernelLogs", Value::from(true)),
        ("ProtectControlGroups", Value::from(true)),
        ("ProtectClock", Value::from(true)),
        ("ProtectHostname", Value::from(true)),
        ("ProtectProc", Value::from("invisible")),
        ("KeyringMode", Value::from("private")),
        // What it can't see.
        ("PrivateTmp", Value::from(true)),
        ("JoinsNamespaceOf", Value::from(vec![description.server_unit])),
        ("TemporaryFileSystem", Value::from(vec![("/run", "ro,mode=0755,nosuid,nodev,noexec")])),
        ("BindReadOnlyPaths", Value::from(binds)),
        ("InaccessiblePaths", Value::from(hidden)),
        // What it may use.
        ("CPUAccounting", Value::from(true)),
        ("MemoryAccounting", Value::from(true)),
        ("TasksAccounting", Value::from(true)),
        ("IOAccounting", Value::from(true)),
        ("TasksMax", Value::from(SESSION_TASKS_MAX)),
        ("MemoryHigh", Value::from(SESSION_MEMORY_HIGH_BYTES)),
        ("MemoryMax", Value::from(SESSION_MEMORY_MAX_BYTES)),
        ("CPUQuotaPerSecUSec", Value::from(SESSION_CPU_QUOTA_USEC)),
        ("IOWeight", Value::from(SESSION_IO_WEIGHT)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_random_name_has_the_grammar() {
        let name = UnitName::from_random([0xab; 16]);
        assert_eq!(name.as_str(), format!("opencode-pty-{}.service", "ab".repeat(16)));
        assert_eq!(UnitName::parse(name.as_str()), Some(name));
        assert!(UnitName::parse(UnitName::from_random([0; 16]).as_str()).is_some());
    }

    #[test]
    fn look_alikes_are_not_names() {
        let id = "0123456789abcdef0123456789abcdef";
        for text in [
            format!("opencode-pty-{}.service", &id[1..]),
            format!("opencode-pty-{id}0.service"),
            format!("opencode-pty-{}.service", id.to_uppercase()),
            format!("opencode-pty-{id}.scope"),
            format!("opencode-pty-{id}.service "),
            format!("xopencode-pty-{id}.service"),
            format!("opencode-pty-supervisor-{id}.service"),
            "opencode-pty-supervisor.service".to_owned(),
            format!("opencode-pty-{}g.service", &id[1..]),
        ] {
            assert_eq!(UnitName::parse(&text), None, "'{text}'");
        }
    }

    #[test]
    fn object_paths_are_escaped_as_systemd_does() {
        assert_eq!(object_path("opencode-v2.service"), "/org/freedesktop/systemd1/unit/opencode_2dv2_2eservice");
        assert_eq!(object_path("0a.service"), "/org/freedesktop/systemd1/unit/_30a_2eservice");
    }

    #[test]
    fn the_request_reaches_no_property_but_the_runtime() {
        let (left, right) = std::os::unix::net::UnixStream::pair().unwrap();
        let description = Description {
            launcher: "/L",
            slice: "S.slice",
            supervisor_unit: "U.service",
            server_unit: "V.service",
            user: "byk",
            uid: 1000,
            gid: 1001,
            runtime_seconds: 60,
            varlink_sockets: &[],
            terminal: left.as_fd(),
            directory: right.as_fd(),
        };
        let list = properties(&description);
        let of = |name: &str| list.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        assert_eq!(of("RuntimeMaxUSec"), Some(Value::from(60_000_000_u64)));
        assert_eq!(of("Group"), Some(Value::from("1001")));
        assert_eq!(of("Environment"), None);
        let mut names: Vec<_> = list.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), list.len(), "a property is given twice");
    }
}
