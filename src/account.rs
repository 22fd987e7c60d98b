//! The account that sessions run as, from `/etc/passwd`.
//!
//! Two things may surprise. Root is never an account here: a session that ran as root could undo everything this
//! program does. And no name service is asked: a static binary can't load one, and whom a session runs as should
//! not depend on a network. The login shell is read past; nothing depends on it.

use std::{error, fmt, fs, io};

use crate::limits::{GROUP_PATH, PASSWD_PATH, SESSION_PATH, SHELL_PATH};

/// One entry of the account database, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    name: String,
    uid: u32,
    gid: u32,
    home: String,
}

/// Why there is no account.
#[derive(Debug)]
pub enum Error {
    /// The account database can't be read.
    Read {
        /// What the system said.
        source: io::Error,
    },
    /// Nobody is called this, or has this uid.
    NotFound {
        /// The name, or the uid in digits.
        wanted: String,
    },
    /// The entry is there and can't be used.
    Malformed {
        /// The field that is not what it should be.
        field: &'static str,
    },
    /// The entry is root's.
    Root,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read { .. } => write!(f, "cannot read {PASSWD_PATH}"),
            Self::NotFound { wanted } => write!(f, "no account '{}' in {PASSWD_PATH}", wanted.escape_debug()),
            Self::Malformed { field } => write!(f, "the account's line in {PASSWD_PATH} has a bad {field}"),
            Self::Root => f.write_str("sessions never run as root"),
        }
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Read { source } => Some(source),
            Self::NotFound { .. } | Self::Malformed { .. } | Self::Root => None,
        }
    }
}

impl Account {
    /// The account with this name.
    pub fn by_name(name: &str) -> Result<Self, Error> {
        find_by_name(&read_database()?, name)
    }

    /// The account with this uid.
    pub fn by_uid(uid: u32) -> Result<Self, Error> {
        find_by_uid(&read_database()?, uid)
    }

    /// The account this process runs as, by its effective uid.
    pub fn of_this_process() -> Result<Self, Error> {
        Self::by_uid(rustix::process::geteuid().as_raw())
    }

    /// The login name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The user id; never 0.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// The primary group's id.
    pub fn gid(&self) -> u32 {
        self.gid
    }

    /// The home directory, an absolute path.
    pub fn home(&self) -> &str {
        &self.home
    }

    /// The seven variables of a session, and no others.
    pub fn environment(&self) -> [(&'static str, String); 7] {
        [
            ("HOME", self.home.clone()),
            ("LANG", "C.UTF-8".to_owned()),
            ("LOGNAME", self.name.clone()),
            ("PATH", SESSION_PATH.to_owned()),
            ("SHELL", SHELL_PATH.to_owned()),
            ("TERM", "xterm-256color".to_owned()),
            ("USER", self.name.clone()),
        ]
    }
}

fn read_database() -> Result<String, Error> {
    let bytes = fs::read(PASSWD_PATH).map_err(|source| Error::Read { source })?;
    // Somebody's full name in another encoding must not hide the rest of the file; `parse_line` refuses the
    // replacement character where it would matter.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// What the group with this id is called in `/etc/group`; nothing if it has no name there, or the file can't be read.
pub fn group_name(gid: u32) -> Option<String> {
    let bytes = fs::read(GROUP_PATH).ok()?;
    find_group(&String::from_utf8_lossy(&bytes), gid).map(str::to_owned)
}

/// The name in the first entry with this id, as getgrgid(3) does.
fn find_group(text: &str, gid: u32) -> Option<&str> {
    let line = text.lines().find(|line| line.split(':').nth(2).and_then(id) == Some(gid))?;
    line.split(':').next().filter(|name| !name.is_empty())
}

/// The first entry with this name: as getpwnam(3) does, the first of several wins, even if it can't be used.
pub fn find_by_name(text: &str, name: &str) -> Result<Account, Error> {
    let line = text.lines().find(|line| line.split(':').next() == Some(name) && !name.is_empty());
    parse_line(line.ok_or_else(|| Error::NotFound { wanted: name.to_owned() })?)
}

/// The first entry with this uid.
pub fn find_by_uid(text: &str, uid: u32) -> Result<Account, Error> {
    let line = text.lines().find(|line| line.split(':').nth(2).and_then(id) == Some(uid));
    parse_line(line.ok_or_else(|| Error::NotFound { wanted: uid.to_string() })?)
}

/// One line, strictly: exactly seven fields, ids of digits, a home that is an absolute path.
pub fn parse_line(line: &str) -> Result<Account, Error> {
    let fields: Vec<&str> = line.split(':').collect();
    let &[name, _password, uid, gid, _full_name, home, _login_shell] = fields.as_slice() else {
        return Err(Error::Malformed { field: "number of fields" });
    };
    // Both reach the environment of every session, and the name a unit's `User=`.
    let plain = |text: &str| !text.chars().any(|c| c.is_control() || c == char::REPLACEMENT_CHARACTER);
    if name.is_empty() || !plain(name) || name.contains(|c: char| c.is_whitespace() || c == '/') {
        return Err(Error::Malformed { field: "name" });
    }
    // systemd takes digits in `User=` for an id: an account called 0 would be root.
    if name.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Error::Malformed { field: "name" });
    }
    let uid = id(uid).ok_or(Error::Malformed { field: "uid" })?;
    let gid = id(gid).ok_or(Error::Malformed { field: "gid" })?;
    if !home.starts_with('/') || !plain(home) {
        return Err(Error::Malformed { field: "home" });
    }
    if uid == 0 {
        return Err(Error::Root);
    }
    Ok(Account { name: name.to_owned(), uid, gid, home: home.to_owned() })
}

/// An id of digits only. The largest number is no id: setresuid(2) and chown(2) read it as "leave as it is".
fn id(text: &str) -> Option<u32> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|id| *id != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYK: &str = "byk:x:1000:1001:Burak,,,:/home/byk:/usr/bin/zsh";

    #[test]
    fn a_line_gives_name_ids_and_home_and_the_seven_variables_follow() {
        let account = parse_line(BYK).unwrap();
        assert_eq!((account.name(), account.uid(), account.gid(), account.home()), ("byk", 1000, 1001, "/home/byk"));
        assert_eq!(
            account.environment().map(|(name, value)| format!("{name}={value}")),
            [
                "HOME=/home/byk",
                "LANG=C.UTF-8",
                "LOGNAME=byk",
                "PATH=/usr/local/bin:/usr/bin:/bin",
                "SHELL=/bin/sh",
                "TERM=xterm-256color",
                "USER=byk"
            ]
        );
    }

    #[test]
    fn each_field_that_is_not_what_it_should_be_is_named() {
        for (line, want) in [
            ("", "number of fields"),
            ("byk:x:1000:1001::/home/byk", "number of fields"),
            ("byk:x:1000:1001::/home/byk:/bin/sh:", "number of fields"),
            (":x:1000:1001::/home/byk:/bin/sh", "name"),
            ("b\u{7}k:x:1000:1001::/home/byk:/bin/sh", "name"),
            ("b k:x:1000:1001::/home/byk:/bin/sh", "name"),
            ("b/k:x:1000:1001::/home/byk:/bin/sh", "name"),
            ("b\u{fffd}k:x:1000:1001::/home/byk:/bin/sh", "name"),
            ("0:x:1000:1001::/home/byk:/bin/sh", "name"),
            ("1000:x:1000:1001::/home/byk:/bin/sh", "name"),
            ("byk:x::1001::/home/byk:/bin/sh", "uid"),
            ("byk:x:+1000:1001::/home/byk:/bin/sh", "uid"),
            ("byk:x:-1:1001::/home/byk:/bin/sh", "uid"),
            ("byk:x:4294967295:1001::/home/byk:/bin/sh", "uid"),
            ("byk:x:4294967296:1001::/home/byk:/bin/sh", "uid"),
            ("byk:x:1000: 1001::/home/byk:/bin/sh", "gid"),
            ("byk:x:1000:1001:::/bin/sh", "home"),
            ("byk:x:1000:1001::home/byk:/bin/sh", "home"),
            ("byk:x:1000:1001::/home/b\tyk:/bin/sh", "home"),
            ("byk:x:1000:1001::/home/b\u{fffd}k:/bin/sh", "home"),
        ] {
            let refused = parse_line(line);
            assert!(matches!(refused, Err(Error::Malformed { field }) if field == want), "'{line}': {refused:?}");
        }
    }

    #[test]
    fn root_is_never_an_account_whatever_its_name() {
        assert!(matches!(parse_line("root:x:0:0::/root:/bin/sh"), Err(Error::Root)));
        assert!(matches!(parse_line("toor:x:000:1000::/root:/bin/sh"), Err(Error::Root)));
        assert!(matches!(find_by_uid("root:x:0:0::/root:/bin/sh", 0), Err(Error::Root)));
    }

    #[test]
    fn of_two_entries_the_first_wins_and_a_broken_first_is_not_passed_over() {
        let twice =
            format!("bykx:x:7:7::/:/\n{BYK}\nbyk:x:1002:1002::/home/other:/bin/sh\nalias:x:1000:5::/srv:/bin/sh");
        assert_eq!(find_by_name(&twice, "byk").unwrap().uid(), 1000);
        assert_eq!(find_by_uid(&twice, 1000).unwrap().name(), "byk");
        let broken = format!("byk:x:1000:1001::\n{BYK}");
        assert!(matches!(find_by_name(&broken, "byk"), Err(Error::Malformed { .. })));
        assert!(matches!(find_by_uid(&broken, 1000), Err(Error::Malformed { .. })));
    }

    #[test]
    fn a_groups_name_is_that_of_the_first_entry_with_its_id() {
        let groups = "root:x:0:\ncrew:x:1001:byk\nlater:x:1001:\n:x:1002:\nshort:x\n";
        assert_eq!(find_group(groups, 1001), Some("crew"));
        assert_eq!([find_group(groups, 1000), find_group(groups, 1002)], [None, None]);
    }

    #[test]
    fn who_is_not_there_is_not_found() {
        for name in ["", "by", "bykk", "x", "Burak,,,", "BYK"] {
            assert!(matches!(find_by_name(BYK, name), Err(Error::NotFound { .. })), "'{name}'");
        }
        assert!(matches!(find_by_name("::::::", ""), Err(Error::NotFound { .. })));
        assert!(matches!(find_by_uid(BYK, 1001), Err(Error::NotFound { .. })));
    }
}
