//! The unit files for another account than the one they are written for: the one knob that they have.
//!
//! The files in `units/` are complete and say `byk`, so that they can be read, verified and installed as they are. Another
//! account differs in its name, group, uid and home, and in the supervisor's `--account`.

/// The account that sessions and the server run as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Its name.
    pub name: String,
    /// Its primary group's name.
    pub group: String,
    /// Its uid.
    pub uid: u32,
    /// Its primary group's gid.
    pub gid: u32,
    /// Its home.
    pub home: String,
}

impl Default for Account {
    /// The one that the files in `units/` are written for.
    fn default() -> Self {
        Self { name: "byk".into(), group: "byk".into(), uid: 1000, gid: 1000, home: "/home/byk".into() }
    }
}

impl Account {
    /// A directory of the account for sessions to work in, on test hosts.
    pub fn workspace(&self) -> String {
        format!("{}/work", self.home)
    }
}

/// A unit file of `units/` for an account.
pub fn render(unit: &str, account: &Account) -> String {
    let shipped = Account::default();
    if *account == shipped {
        return unit.to_owned();
    }
    let lines = unit.lines().map(|line| {
        let line = match line.split_once('=') {
            Some(("User", name)) if name == shipped.name => format!("User={}", account.name),
            Some(("Group", name)) if name == shipped.group => format!("Group={}", account.group),
            Some(("ExecStart", command)) if command.ends_with("/opencode-pty-supervisor") => {
                format!("{line} --account {}", account.name)
            }
            // `ProtectHome=` hides the usual places alone.
            Some(("InaccessiblePaths", _)) if !is_protected(&account.home) => format!("{line} -{}", account.home),
            _ => line.to_owned(),
        };
        line.replace(&format!("/run/user/{}", shipped.uid), &format!("/run/user/{}", account.uid))
            .replace(&shipped.home, &account.home)
            + "\n"
    });
    lines.collect()
}

/// Whether `ProtectHome=` is about this path.
fn is_protected(home: &str) -> bool {
    ["/home", "/root", "/run/user"].iter().any(|place| std::path::Path::new(home).starts_with(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNITS: [&str; 3] = [
        include_str!("../../../units/opencode-pty-supervisor.service"),
        include_str!("../../../units/opencode-v2.service"),
        include_str!("../../../units/opencode-pty.slice"),
    ];

    fn other() -> Account {
        Account { name: "worker".into(), group: "crew".into(), uid: 4242, gid: 4243, home: "/srv/worker".into() }
    }

    #[test]
    fn nothing_of_the_account_they_are_written_for_is_left() {
        let rendered = UNITS.map(|unit| render(unit, &other()));
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
            assert_eq!(render(unit, &Account::default()), unit);
            let changed = render(unit, &other()).lines().zip(unit.lines()).filter(|(new, old)| new != old).count();
            let about = unit.lines().filter(|line| line.contains("byk") || line.contains("/run/user/1000")).count();
            let supervisor = usize::from(unit.contains("libexec/opencode-pty-supervisor\n"));
            assert_eq!(changed, about + supervisor, "{unit}");
            assert_eq!(render(unit, &other()).lines().count(), unit.lines().count());
        }
        let at_home = Account { home: "/home/worker".into(), ..other() };
        assert!(!render(UNITS[0], &at_home).contains("/home/worker"), "hidden by ProtectHome already");
    }
}
