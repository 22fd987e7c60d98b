//! Giving up what the unit lends the launcher: groups, capabilities, and the right to gain more.
//!
//! All of it belongs to the calling *thread*; the launcher has one, and that one executes script(1). What was
//! given up is read back, since a launcher that only believes it is unprivileged would be worse than one that fails.

use std::io;

use rustix::process::getgroups;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, set_capabilities, set_no_new_privs,
    set_thread_groups,
};

/// Leaves every supplementary group. The primary group stays. Needs `CAP_SETGID`.
pub fn drop_groups() -> io::Result<()> {
    set_thread_groups(&[])?;
    let left = getgroups()?;
    if left.is_empty() { Ok(()) } else { Err(io::Error::other(format!("{} groups are still there", left.len()))) }
}

/// Empties the ambient, permitted, effective and inheritable sets.
///
/// The bounding set stays, as changing it takes a capability; without privileges to gain it bounds nothing.
pub fn drop_capabilities() -> io::Result<()> {
    const NONE: CapabilitySets = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    clear_ambient_capability_set()?;
    set_capabilities(None, NONE)?;
    // The ambient set is always part of the permitted and of the inheritable one (capabilities(7)), so these
    // three being empty says that all four are.
    if capabilities(None)? == NONE { Ok(()) } else { Err(io::Error::other("capabilities are still there")) }
}

/// No program executed from here on gains privileges: set-user-ID bits and file capabilities are ignored.
pub fn forbid_new_privileges() -> io::Result<()> {
    Ok(set_no_new_privs(true)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_gone_for_good_on_the_thread_that_drops_them() {
        std::thread::spawn(|| {
            drop_capabilities().unwrap();
            drop_capabilities().unwrap();
            assert_eq!(drop_groups().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        })
        .join()
        .unwrap();
    }
}
