//! The account of a host or of a dist, and the unit files for it (`opencode_pty::unit_files`).

use opencode_pty::unit_files::{self, Owner, SHIPPED_FOR};

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
        let Owner { name, group, uid, gid, home } = SHIPPED_FOR;
        Self { name: name.into(), group: group.into(), uid, gid, home: home.into() }
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
    let Account { name, group, uid, gid, home } = account;
    unit_files::render(unit, &Owner { name, group, uid: *uid, gid: *gid, home })
}
