//! Who is measured beside us: what a user would type instead, to the letter.

use support::host::WORKSPACE;

/// A way to run a command at a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// A session.
    Ours,
    /// `systemd-run --pipe … script`, with every property that our sessions have.
    PipeSame,
    /// The same without them.
    PipePlain,
    /// `systemd-run --pty`, which has a terminal of its own.
    Pty,
    /// script(1) alone, into a pipe.
    Script,
    /// script(1) between two cat(1): a process more on the way there and on the way back that does nothing but copy.
    ScriptBetweenCats,
}

impl Contender {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => OURS,
            Self::PipeSame => "systemd-run --pipe, same properties",
            Self::PipePlain => "systemd-run --pipe, plain",
            Self::Pty => "systemd-run --pty, plain",
            Self::Script => "script(1) alone",
            Self::ScriptBetweenCats => "script(1) between two cat(1)",
        }
    }

    /// The means of `support::bench`.
    pub fn means(self) -> &'static str {
        match self {
            Self::Ours => "session",
            Self::PipeSame | Self::PipePlain => "pipe",
            Self::Pty => "terminal",
            Self::Script | Self::ScriptBetweenCats => "account-pipe",
        }
    }

    /// What runs the shell's `text` at a terminal.
    pub fn argv(self, text: &str, varlink_sockets: &[String]) -> Vec<String> {
        let owned = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let script = owned(&["/usr/bin/script", "-qefc", text, "/dev/null"]);
        let run = ["/usr/bin/systemd-run", "--quiet", "--wait", "--collect", "--uid=byk"];
        let pipe = ["--pipe", "--service-type=exec", "--expand-environment=no"];
        match self {
            Self::Ours => owned(&["/bin/sh", "-c", text]),
            Self::Script => script,
            Self::ScriptBetweenCats => {
                let words = ["/bin/sh", "-c", "cat | /usr/bin/script -qefc \"$1\" /dev/null | cat", "sh", text];
                owned(&words)
            }
            Self::PipePlain => [owned(&run), owned(&pipe), script].concat(),
            Self::PipeSame => [owned(&run), owned(&pipe), same_properties(varlink_sockets), script].concat(),
            Self::Pty => [owned(&run), owned(&["--pty", "--expand-environment=no", "/bin/sh", "-c", text])].concat(),
        }
    }
}

/// What we call ourselves in a table.
pub const OURS: &str = "opencode-pty";

/// The properties of a session's unit (`opencode_pty::systemd::unit::properties`) as systemd-run takes them. Not here: the
/// descriptors, which it places itself, the command, `Type` and `CollectMode`, which are options above, and `AddRef`, which
/// `--wait` implies.
const PROPERTIES: [&str; 45] = [
    "Description=opencode-pty session",
    "Slice=opencode-pty.slice",
    "Group=1000",
    "BindsTo=opencode-pty-supervisor.service",
    "After=opencode-pty-supervisor.service",
    "TimeoutStartSec=10s",
    "TimeoutStopSec=2s",
    "RuntimeMaxSec=3600s",
    "KillMode=control-group",
    "KillSignal=SIGTERM",
    "SendSIGHUP=yes",
    "SendSIGKILL=yes",
    "FinalKillSignal=SIGKILL",
    "OOMPolicy=kill",
    "Delegate=no",
    "IgnoreSIGPIPE=no",
    "UMask=0077",
    "NoNewPrivileges=yes",
    "AmbientCapabilities=CAP_SETGID",
    "CapabilityBoundingSet=CAP_SETGID",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "RestrictRealtime=yes",
    "ProtectKernelTunables=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectControlGroups=yes",
    "ProtectClock=yes",
    "ProtectHostname=yes",
    "ProtectProc=invisible",
    "KeyringMode=private",
    "PrivateTmp=yes",
    "JoinsNamespaceOf=opencode-v2.service",
    "TemporaryFileSystem=/run:ro,mode=0755,nosuid,nodev,noexec",
    "BindReadOnlyPaths=-/run/systemd/resolve -/run/resolvconf -/run/NetworkManager/resolv.conf -/run/nscd",
    "CPUAccounting=yes",
    "MemoryAccounting=yes",
    "TasksAccounting=yes",
    "IOAccounting=yes",
    "TasksMax=256",
    "MemoryHigh=768M",
    "MemoryMax=1G",
    "CPUQuota=400%",
    "IOWeight=100",
    HIDDEN,
];

/// What is hidden on every host; the varlink sockets come to it as they exist.
const HIDDEN: &str = "InaccessiblePaths=-/run/dbus/system_bus_socket -/run/docker.sock -/var/run/docker.sock \
                      -/run/containerd -/run/podman -/run/systemd/private -/var/lib/lxd -/var/snap/lxd -/run/opencode-pty \
                      -/run/user/1000 -/run/user/1000/bus";

fn same_properties(varlink_sockets: &[String]) -> Vec<String> {
    let mut list: Vec<String> = PROPERTIES.iter().map(|property| format!("--property={property}")).collect();
    list.extend(varlink_sockets.iter().map(|path| format!("--property=InaccessiblePaths=-{path}")));
    // Where a session is.
    list.push(format!("--working-directory={WORKSPACE}"));
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use opencode_pty::systemd::unit::{Description, properties};
    use std::os::fd::AsFd;
    use support::host::{SERVER, SUPERVISOR};

    /// A property that sessions get later is one that systemd-run must get here.
    #[test]
    fn systemd_run_is_given_what_a_session_has() {
        let file = std::fs::File::open("/").expect("there is a root");
        let description = Description {
            launcher: "/L",
            slice: "opencode-pty.slice",
            supervisor_unit: SUPERVISOR,
            server_unit: SERVER,
            user: "byk",
            uid: 1000,
            gid: 1000,
            runtime_seconds: 3_600,
            varlink_sockets: &[],
            terminal: file.as_fd(),
            directory: file.as_fd(),
        };
        let given_otherwise = [
            "Type",
            "User",
            "ExecStart",
            "CollectMode",
            "AddRef",
            "StandardInputFileDescriptor",
            "StandardOutputFileDescriptor",
            "StandardErrorFileDescriptor",
        ];
        let in_files = |name: &str| match name {
            "CPUQuotaPerSecUSec" => "CPUQuota".to_owned(),
            _ => name.replace("USec", "Sec"),
        };
        let mut wanted: Vec<String> = properties(&description)
            .iter()
            .filter(|(name, _)| !given_otherwise.contains(name))
            .map(|(name, _)| in_files(name))
            .collect();
        let mut given: Vec<String> =
            PROPERTIES.iter().filter_map(|property| Some(property.split_once('=')?.0.to_owned())).collect();
        wanted.sort();
        given.sort();
        assert_eq!(given, wanted);
    }
}
