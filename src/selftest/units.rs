//! The units as the manager has loaded them, against those that this version ships.
//!
//! Files say little: a drop-in, a missing reload or an older manager can make something else of them. So each line
//! of the shipped file is held against the property that the manager shows for it.

use super::context::{Context, Properties, is_loaded, value};
use super::files::anything_installed;
use super::report::Finding;
use crate::account::{Account, group_name};
use crate::report::quoted;
use crate::unit_files::{Owner, SERVER, SLICE, SUPERVISOR, render};

/// A line of a unit file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line<'a> {
    /// What stands before `=`.
    pub key: &'a str,
    /// What stands behind it.
    pub value: &'a str,
}

/// The lines of one section.
pub fn section<'a>(unit: &'a str, section: &str) -> Vec<Line<'a>> {
    let mut inside = false;
    let mut lines = Vec::new();
    for line in unit.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            inside = name == section;
        } else if inside && let Some((key, value)) = line.split_once('=').filter(|_| !line.starts_with('#')) {
            lines.push(Line { key, value });
        }
    }
    lines
}

/// The shipped unit for this account. A group without a name is taken to have the account's, as most have.
pub fn rendered(unit: &str, account: &Account) -> String {
    let group = group_name(account.gid());
    rendered_with(unit, account, group.as_deref().unwrap_or(account.name()))
}

fn rendered_with(unit: &str, account: &Account, group: &str) -> String {
    let (name, uid, gid, home) = (account.name(), account.uid(), account.gid(), account.home());
    render(unit, &Owner { name, group, uid, gid, home })
}

/// What a line must look like as a property.
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    /// The property is exactly this.
    Is(&'static str, String),
    /// The property has these words, in any order, and no others.
    Set(&'static str, Vec<String>),
    /// The property has at least these words.
    Has(&'static str, Vec<String>),
    /// The property's one entry begins with this.
    Begins(&'static str, String),
    /// Nothing to compare.
    Nothing,
}

const UNKNOWN: &str = "this program does not know how to compare";

/// Lines whose property has the same name and, but for its spelling, the same value.
const SAME: [&str; 52] = [
    "AmbientCapabilities",
    "CPUAccounting",
    "CPUWeight",
    "CapabilityBoundingSet",
    "Delegate",
    "DevicePolicy",
    "Group",
    "IOAccounting",
    "IOWeight",
    "KillMode",
    "KillSignal",
    "LimitNOFILE",
    "LimitNPROC",
    "LockPersonality",
    "MemoryAccounting",
    "MemoryDenyWriteExecute",
    "MemoryHigh",
    "MemoryMax",
    "Nice",
    "NoNewPrivileges",
    "NotifyAccess",
    "OOMPolicy",
    "OOMScoreAdjust",
    "PrivateDevices",
    "PrivateMounts",
    "PrivateNetwork",
    "PrivateTmp",
    "ProcSubset",
    "ProtectClock",
    "ProtectControlGroups",
    "ProtectHome",
    "ProtectHostname",
    "ProtectKernelLogs",
    "ProtectKernelModules",
    "ProtectKernelTunables",
    "ProtectProc",
    "ProtectSystem",
    "Restart",
    "RestrictNamespaces",
    "RestrictRealtime",
    "RestrictSUIDSGID",
    "RuntimeDirectoryMode",
    "SendSIGKILL",
    "TasksAccounting",
    "TasksMax",
    "Type",
    "UMask",
    "User",
    "WorkingDirectory",
    "RuntimeDirectory",
    "SupplementaryGroups",
    "SystemCallArchitectures",
];

fn wanted(line: Line<'_>) -> Result<Wanted, String> {
    let Line { key, value } = line;
    let words = || value.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    if let Some(name) = SAME.into_iter().find(|name| *name == key) {
        return Ok(Wanted::Is(name, spelled(key, value)?));
    }
    Ok(match key {
        "TimeoutStopSec" => Wanted::Is("TimeoutStopUSec", microseconds(value)?),
        "WatchdogSec" => Wanted::Is("WatchdogUSec", microseconds(value)?),
        "RestartSec" => Wanted::Is("RestartUSec", microseconds(value)?),
        "StartLimitIntervalSec" => Wanted::Is("StartLimitIntervalUSec", microseconds(value)?),
        "CPUQuota" => Wanted::Is("CPUQuotaPerSecUSec", quota(value)?),
        "RestrictAddressFamilies" => {
            let mut all = vec!["yes".to_owned()];
            all.extend(words());
            Wanted::Set("RestrictAddressFamilies", all)
        }
        "IPAddressDeny" if value == "any" => Wanted::Set("IPAddressDeny", any_address()),
        "SystemCallFilter" => Wanted::Has("SystemCallFilter", refused_calls(value)?),
        "InaccessiblePaths" => Wanted::Set("InaccessiblePaths", words()),
        "ReadWritePaths" => Wanted::Set("ReadWritePaths", words()),
        "Environment" => Wanted::Has("Environment", words()),
        "EnvironmentFile" => Wanted::Has("EnvironmentFiles", vec![format!("{value} no")]),
        "Requires" => Wanted::Has("Requires", words()),
        "After" => Wanted::Has("After", words()),
        "ExecStart" => Wanted::Begins("ExecStart", command(value)),
        "ExecCondition" => Wanted::Begins("ExecCondition", command(value)),
        "Description" | "Documentation" => Wanted::Nothing,
        _ => return Err(format!("{UNKNOWN} {key}=")),
    })
}

/// A command line as the manager shows it: the program, its argv, and that a failure is one.
fn command(line: &str) -> String {
    format!("{} {line} no ", line.split(' ').next().unwrap_or(line))
}

/// A value as the manager shows it.
fn spelled(key: &str, value: &str) -> Result<String, String> {
    Ok(match (key, value) {
        ("ProtectHome", other) => other.to_owned(),
        ("AmbientCapabilities" | "CapabilityBoundingSet", "") | ("RestrictNamespaces", "yes") => "0".to_owned(),
        ("UMask" | "RuntimeDirectoryMode", octal) => {
            u32::from_str_radix(octal, 8).map_err(|_| format!("{UNKNOWN} {key}={octal}"))?.to_string()
        }
        (_, "true") => "yes".to_owned(),
        (_, "SIGTERM") => "15".to_owned(),
        ("MemoryHigh" | "MemoryMax", size) => bytes(size).ok_or_else(|| format!("{UNKNOWN} {key}={size}"))?,
        (_, other) => other.to_owned(),
    })
}

fn bytes(size: &str) -> Option<String> {
    let (number, shift) = match size.strip_suffix('M') {
        Some(number) => (number, 20),
        None => (size.strip_suffix('G')?, 30),
    };
    number.parse::<u64>().ok().map(|number| (number << shift).to_string())
}

fn microseconds(time: &str) -> Result<String, String> {
    let (number, unit) = match time.strip_suffix("ms") {
        Some(number) => (number, 1_000),
        None => (time.strip_suffix('s').unwrap_or(time), 1_000_000),
    };
    number.parse::<u64>().map(|number| (number * unit).to_string()).map_err(|_| format!("{UNKNOWN} the time {time}"))
}

fn quota(percent: &str) -> Result<String, String> {
    let number = percent.strip_suffix('%').and_then(|number| number.parse::<u64>().ok());
    number.map(|number| (number * 10_000).to_string()).ok_or_else(|| format!("{UNKNOWN} the quota {percent}"))
}

/// All of IPv4 and all of IPv6, as the manager shows them: family, address, prefix.
fn any_address() -> Vec<String> {
    vec![format!("2 {} 0", ["0"; 4].join(" ")), format!("10 {} 0", ["0"; 16].join(" "))]
}

/// The manager shows calls and not groups; each group is looked for by calls that hardly any other group has.
fn refused_calls(value: &str) -> Result<Vec<String>, String> {
    let groups = value.strip_prefix('~').ok_or_else(|| format!("{UNKNOWN} SystemCallFilter={value}"))?;
    let mut calls = vec!["no".to_owned()];
    for group in groups.split_whitespace() {
        let of: &[&str] = match group {
            "@clock" => &["clock_settime", "settimeofday"],
            "@cpu-emulation" => &["modify_ldt"],
            "@debug" => &["ptrace", "perf_event_open"],
            "@module" => &["init_module", "finit_module"],
            "@mount" => &["mount", "pivot_root"],
            "@obsolete" => &["uselib", "_sysctl"],
            "@privileged" => &["chown", "setuid", "capset"],
            "@raw-io" => &["iopl", "ioperm"],
            "@reboot" => &["reboot", "kexec_load"],
            "@resources" => &["setpriority", "sched_setaffinity", "mbind"],
            "@swap" => &["swapon"],
            other => return Err(format!("{UNKNOWN} the group {other}")),
        };
        calls.extend(of.iter().map(|call| (*call).to_owned()));
    }
    Ok(calls)
}

/// What of a property is not as wanted.
fn difference(loaded: &Properties, wanted: &Wanted) -> Option<String> {
    let told = |name: &str, wanted: &[String]| {
        let found = loaded.get(name)?;
        let differs = |problem: String| Some(format!("{name} {problem}"));
        let missing: Vec<&str> = wanted.iter().filter(|word| !found.contains(word)).map(String::as_str).collect();
        if missing.is_empty() { None } else { differs(format!("lacks {}", missing.join(" "))) }
    };
    match wanted {
        // A manager that has no such property shows nothing to compare; the oldest that we support has all of them.
        Wanted::Is(name, wanted) => {
            let found = loaded.get(*name)?.join(" ");
            // What was loaded is known from the first start on; until then the manager shows no limit.
            if *name == "WatchdogUSec" && found == u64::MAX.to_string() && value(loaded, "ActiveState") == "inactive" {
                return None;
            }
            (found != *wanted).then(|| format!("{name} is {}, should be {}", quoted(&found), quoted(wanted)))
        }
        Wanted::Has(name, wanted) => told(name, wanted),
        Wanted::Set(name, wanted) => told(name, wanted).or_else(|| {
            let more: Vec<&str> =
                loaded.get(*name)?.iter().filter(|word| !wanted.contains(word)).map(String::as_str).collect();
            (!more.is_empty()).then(|| format!("{name} has more: {}", more.join(" ")))
        }),
        Wanted::Begins(name, wanted) => {
            let found = loaded.get(*name)?.first().map_or("", String::as_str);
            let rest = found.strip_prefix(wanted.as_str());
            rest.is_none().then(|| format!("{name} is {}, should be {}", quoted(found), quoted(wanted.trim_end())))
        }
        Wanted::Nothing => None,
    }
}

/// Compares a shipped unit with a loaded one. Lines with a key of `except` are not looked at.
pub fn compare(shipped: &str, loaded: &Properties, except: &[&str]) -> Vec<String> {
    let sections = ["Unit", "Service", "Slice"];
    let lines = sections.into_iter().flat_map(|name| section(shipped, name));
    // A line that says something again without a value before it adds to the list: those are looked for one by one.
    lines
        .filter(|line| !except.contains(&line.key))
        .filter_map(|line| match wanted(line) {
            Ok(wanted) => difference(loaded, &wanted),
            Err(why) => Some(why),
        })
        .collect()
}

/// The whole of a unit's check.
fn check(context: &Context, name: &str, shipped: &str, loaded: Result<&Properties, &str>, except: &[&str]) -> Finding {
    let Ok(account) = &context.account else {
        return Finding::not_run("the shipped unit is for an account that does not exist", "see the check 'account'");
    };
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(why) => return Finding::not_run(why, "see the check 'manager'"),
    };
    // A slice that nobody installed is always loaded, from nothing.
    if !is_loaded(loaded) || value(loaded, "FragmentPath").is_empty() {
        return match value(loaded, "LoadState") {
            "not-found" | "loaded" | "" if !anything_installed(context) => {
                Finding::skipped(format!("there is no {name}"))
            }
            state => Finding::failed(
                format!("{name} is {}", if matches!(state, "loaded" | "") { "not installed" } else { state }),
                "install the unit, then systemctl daemon-reload",
            ),
        };
    }
    let mut problems = compare(&rendered(shipped, account), loaded, except);
    if value(loaded, "NeedDaemonReload") == "yes" {
        problems.push("its file has changed since it was loaded".to_owned());
    }
    let drop_ins = loaded.get("DropInPaths").filter(|paths| !paths.is_empty());
    let from = match drop_ins {
        Some(paths) => format!("{} with {}", value(loaded, "FragmentPath"), paths.join(" ")),
        None => format!("{}, no drop-in", value(loaded, "FragmentPath")),
    };
    let problems = if problems.is_empty() { problems } else { vec![format!("{} (from {from})", problems.join("; "))] };
    Finding::from_problems(
        &problems,
        format!("as shipped; {from}"),
        format!("install {name} of this version, remove drop-ins that change it, systemctl daemon-reload"),
    )
}

pub fn supervisor(context: &Context) -> Finding {
    // The masks have a check of their own.
    let except = ["InaccessiblePaths"];
    check(context, "opencode-pty-supervisor.service", SUPERVISOR, context.supervisor(), &except)
}

pub fn slice(context: &Context) -> Finding {
    check(context, "opencode-pty.slice", SLICE, context.slice(), &[])
}

pub fn server(context: &Context) -> Finding {
    // Which build of the server is run is the operator's choice.
    let finding = check(context, "opencode-v2.service", SERVER, context.server(), &["ExecStart"]);
    let missing = context.server().is_ok_and(|loaded| !is_loaded(loaded));
    if missing && context.server().is_ok_and(|loaded| value(loaded, "LoadState") == "not-found") {
        return Finding::skipped("there is no opencode-v2.service: it is installed at the cutover (docs/cutover.md)");
    }
    finding
}

pub fn masks(context: &Context) -> Finding {
    let loaded = match context.supervisor() {
        Ok(loaded) if is_loaded(loaded) => loaded,
        Ok(_) => return Finding::skipped("there is no opencode-pty-supervisor.service"),
        Err(why) => return Finding::not_run(why, "see the check 'manager'"),
    };
    let Ok(account) = &context.account else {
        return Finding::not_run("there is no account whose masks to look for", "see the check 'account'");
    };
    let shipped = rendered(SUPERVISOR, account);
    let wanted: Vec<&str> = section(&shipped, "Service")
        .into_iter()
        .filter(|line| line.key == "InaccessiblePaths")
        .flat_map(|line| line.value.split_whitespace())
        .collect();
    let found = loaded.get("InaccessiblePaths").map_or(&[][..], Vec::as_slice);
    let removed: Vec<String> = wanted
        .iter()
        .filter(|path| !found.iter().any(|known| known.trim_start_matches('-') == path.trim_start_matches('-')))
        .map(|path| format!("the mask of {} is removed", path.trim_start_matches('-')))
        .collect();
    Finding::from_problems(
        &removed,
        format!("{} masks in force", wanted.len()),
        "remove the drop-in that resets InaccessiblePaths=, systemctl daemon-reload",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_every_shipped_unit_can_be_compared() {
        for unit in [SUPERVISOR, SLICE, SERVER] {
            for name in ["Unit", "Service", "Slice"] {
                for line in section(unit, name) {
                    assert!(wanted(line).is_ok(), "{line:?}");
                }
            }
        }
    }

    #[test]
    fn values_are_spelled_as_the_manager_shows_them() {
        for (key, value, want) in [
            ("NoNewPrivileges", "true", Wanted::Is("NoNewPrivileges", "yes".into())),
            ("UMask", "0077", Wanted::Is("UMask", "63".into())),
            ("MemoryMax", "2G", Wanted::Is("MemoryMax", "2147483648".into())),
            ("CPUQuota", "800%", Wanted::Is("CPUQuotaPerSecUSec", "8000000".into())),
            ("RestartSec", "250ms", Wanted::Is("RestartUSec", "250000".into())),
            ("RestartSec", "5", Wanted::Is("RestartUSec", "5000000".into())),
            ("ExecStart", "/a", Wanted::Begins("ExecStart", "/a /a no ".into())),
        ] {
            assert_eq!(wanted(Line { key, value }), Ok(want));
        }
        for (key, value) in
            [("NewThing", "yes"), ("SystemCallFilter", "@basic-io"), ("MemoryMax", "1x"), ("CPUQuota", "8")]
        {
            assert!(wanted(Line { key, value }).is_err(), "{key}={value}");
        }
    }

    #[test]
    fn another_accounts_units_say_its_name_its_group_its_uid_and_its_home() {
        let account = crate::account::parse_line("eve:x:1001:1001::/srv/eve:/bin/sh").unwrap();
        let supervisor = rendered_with(SUPERVISOR, &account, "crew");
        let has = |line: &str| supervisor.lines().any(|known| known == line);
        assert!(has("Group=crew") && has("User=root"), "{supervisor}");
        assert!(has("ExecStart=/usr/local/libexec/opencode-pty-supervisor --account eve"), "{supervisor}");
        assert!(supervisor.contains("-/run/user/1001 ") && supervisor.contains(" -/srv/eve\n"), "{supervisor}");
        let server = rendered_with(SERVER, &account, "crew");
        assert!(server.contains("User=eve\n") && server.contains("ReadWritePaths=/srv/eve\n"), "{server}");
        assert!(!server.contains("byk") || server.matches("byk").count() == server.matches("/byk").count(), "{server}");
        let byk = crate::account::parse_line("byk:x:1000:1000::/home/byk:/bin/sh").unwrap();
        assert_eq!(rendered_with(SERVER, &byk, "byk"), SERVER);
    }

    #[test]
    fn a_difference_names_the_property_what_it_is_and_what_it_should_be() {
        let loaded = |name: &str, words: &[&str]| {
            Properties::from([(name.to_owned(), words.iter().map(|word| (*word).to_owned()).collect())])
        };
        let told = |shipped: &str, name: &str, words: &[&str]| compare(shipped, &loaded(name, words), &[]);
        assert_eq!(told("[Slice]\nTasksMax=512", "TasksMax", &["9999"]), ["TasksMax is '9999', should be '512'"]);
        assert_eq!(told("[Slice]\nTasksMax=512", "TasksMax", &["512"]), [""; 0]);
        let masks = "[Service]\nInaccessiblePaths=-/a -/b";
        assert_eq!(told(masks, "InaccessiblePaths", &["-/a"]), ["InaccessiblePaths lacks -/b"]);
        assert_eq!(told(masks, "InaccessiblePaths", &["-/b", "-/a", "-/c"]), ["InaccessiblePaths has more: -/c"]);
        let calls = "[Service]\nSystemCallFilter=~@swap @reboot";
        assert_eq!(told(calls, "SystemCallFilter", &["no", "swapon", "reboot"]), ["SystemCallFilter lacks kexec_load"]);
        assert_eq!(
            told("[Service]\nExecStart=/a", "ExecStart", &["/a /a --launcher /b no 0"]),
            ["ExecStart is '/a /a --launcher /b no 0', should be '/a /a no'"]
        );
    }

    /// `selftest` on a host where everything was installed and nothing had been started failed over the watchdog: a
    /// manager shows `WatchdogUSec=infinity` until the unit's first start, whatever its file says.
    #[test]
    fn a_unit_that_was_never_started_does_not_differ_by_its_watchdog() {
        let loaded = |state: &str, time: &str| {
            let entries = [("ActiveState", state), ("WatchdogUSec", time)];
            Properties::from(entries.map(|(name, word)| (name.to_owned(), vec![word.to_owned()])))
        };
        let told = |state: &str, time: &str| compare("[Service]\nWatchdogSec=60", &loaded(state, time), &[]);
        let infinity = u64::MAX.to_string();
        assert_eq!(told("inactive", &infinity), [""; 0]);
        assert_eq!(told("active", "60000000"), [""; 0]);
        assert_eq!(told("active", &infinity).len(), 1);
        assert_eq!(told("inactive", "0").len(), 1);
    }
}
