//! The unit files that ship, and what they say for another account than the one they are written for. Pure.
//!
//! The files in `units/` are complete and say `byk`, so that they can be read, verified and installed as they are. Another
//! account differs in its name, group, uid and home, and in the supervisor's `--account`. `cargo xtask dist` and the test
//! hosts write what is rendered here, and `selftest` holds what is loaded against it.

use std::path::Path;

/// The supervisor's unit.
pub const SUPERVISOR: &str = include_str!("../units/opencode-pty-supervisor.service");
/// The sessions' slice.
pub const SLICE: &str = include_str!("../units/opencode-pty.slice");
/// The server's unit.
pub const SERVER: &str = include_str!("../units/opencode-v2.service");

/// Whose account the units are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its primary group's name.
    pub group: &'a str,
    /// Its uid.
    pub uid: u32,
    /// Its primary group's gid.
    pub gid: u32,
    /// Its home.
    pub home: &'a str,
}

/// The one that the files in `units/` are written for.
pub const SHIPPED_FOR: Owner<'_> = Owner { name: "byk", group: "byk", uid: 1000, gid: 1000, home: "/home/byk" };

/// A unit file of `units/` for an account: the one knob it has.
pub fn render(unit: &str, owner: &Owner<'_>) -> String {
    if *owner == SHIPPED_FOR {
        return unit.to_owned();
    }
    let lines = unit.lines().map(|line| {
        let line = match line.split_once('=') {
            Some(("User", name)) if name == SHIPPED_FOR.name => format!("User={}", owner.name),
            Some(("Group", name)) if name == SHIPPED_FOR.group => format!("Group={}", owner.group),
            Some(("ExecStart", command)) if command.ends_with("/opencode-pty-supervisor") => {
                format!("{line} --account {}", owner.name)
            }
            // `ProtectHome=` hides the usual places alone.
            Some(("InaccessiblePaths", _)) if !is_protected(owner.home) => format!("{line} -{}", owner.home),
            _ => line.to_owned(),
        };
        line.replace(&format!("/run/user/{}", SHIPPED_FOR.uid), &format!("/run/user/{}", owner.uid))
            .replace(SHIPPED_FOR.home, owner.home)
            + "\n"
    });
    lines.collect()
}

/// Whether `ProtectHome=` is about this path.
fn is_protected(home: &str) -> bool {
    ["/home", "/root", "/run/user"].iter().any(|place| Path::new(home).starts_with(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNITS: [&str; 3] = [SUPERVISOR, SERVER, SLICE];
    const OTHER: Owner<'_> = Owner { name: "worker", group: "crew", uid: 4242, gid: 4243, home: "/srv/worker" };

    #[test]
    fn nothing_of_the_account_they_are_written_for_is_left() {
        let rendered = UNITS.map(|unit| render(unit, &OTHER));
        for text in &rendered {
            for word in ["byk", "/1000", "/home/"] {
                assert!(!text.contains(word), "{word} in {text}");
            }
        }
        let has = |line: &str| rendered.iter().any(|text| text.lines().any(|found| found == line));
        for line in [
            "ExecStart=/usr/local/libexec/opencode-pty-supervisor --account worker",
            "User=root",
            "Group=crew",
            "User=worker",
            "WorkingDirectory=/srv/worker",
            "ReadWritePaths=/srv/worker",
            "EnvironmentFile=/srv/worker/.opencode/env",
        ] {
            assert!(has(line), "no '{line}' in {rendered:?}");
        }
        let hidden = rendered[0].lines().find(|line| line.starts_with("InaccessiblePaths=")).unwrap();
        assert!(hidden.contains("-/run/user/4242 ") && hidden.ends_with(" -/srv/worker"), "{hidden}");
    }

    #[test]
    fn everything_else_stays_as_it_is() {
        for unit in UNITS {
            assert_eq!(render(unit, &SHIPPED_FOR), unit);
            let changed = render(unit, &OTHER).lines().zip(unit.lines()).filter(|(new, old)| new != old).count();
            let about = unit.lines().filter(|line| line.contains("byk") || line.contains("/run/user/1000")).count();
            let supervisor = usize::from(unit.contains("libexec/opencode-pty-supervisor\n"));
            assert_eq!(changed, about + supervisor, "{unit}");
            assert_eq!(render(unit, &OTHER).lines().count(), unit.lines().count());
        }
        let at_home = Owner { home: "/home/worker", ..OTHER };
        assert!(!render(UNITS[0], &at_home).contains("/home/worker"), "hidden by ProtectHome already");
    }
}
