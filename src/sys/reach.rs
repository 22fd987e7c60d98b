//! What one process can do to another of its own uid, as `selftest` tries it from inside a session.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, pidfd_getfd, pidfd_open, prlimit, test_kill_process,
};

fn pid(number: u32) -> io::Result<Pid> {
    Ok(i32::try_from(number).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?)
}

/// Whether a signal could be sent: sends the one that is none.
pub fn signal(process: u32) -> io::Result<()> {
    Ok(test_kill_process(pid(process)?)?)
}

/// Takes a duplicate of a descriptor of another process.
pub fn take_descriptor(process: u32, number: i32) -> io::Result<OwnedFd> {
    let process = pidfd_open(pid(process)?, PidfdFlags::empty())?;
    Ok(pidfd_getfd(process, number, PidfdGetfdFlags::empty())?)
}

/// Sets a limit of another process: no core files, which harms nobody.
pub fn forbid_core_files(process: u32) -> io::Result<()> {
    prlimit(Some(pid(process)?), Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    Ok(())
}
