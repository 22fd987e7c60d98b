//! What a process has from whoever executed it: descriptors by number, and signal dispositions.
//!
//! One of the two files with `unsafe`. Rust can't know what a descriptor's *number* stands for; these functions
//! act on numbers, so they are for a role's main function alone, once each, before anything else in the process
//! owns a descriptor they could hit. Standard descriptors need none of this: std hands those out itself.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint};
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// The kernel's `_NSIG`: signals are numbered from 1 to this, the real-time ones included.
const SIGNAL_MAX: c_int = 64;

/// Owns the inherited descriptor `raw` and sets close-on-exec on it; `EBADF` if it is not open.
///
/// For a role's main function, once for each number: nothing else may own it.
pub fn take(raw: RawFd) -> io::Result<OwnedFd> {
    if raw < 0 {
        return Err(rustix::io::Errno::BADF.into());
    }
    // SAFETY: `raw` is not -1, checked above. It may be closed: then the call below says EBADF and touches
    // nothing. The borrow ends with this function.
    let borrowed = unsafe { BorrowedFd::borrow_raw(raw) };
    rustix::io::fcntl_setfd(borrowed, rustix::io::FdFlags::CLOEXEC)?;
    // SAFETY: `raw` is open, as the kernel just said. It came from the process before us, so nothing here owns it
    // unless `take` was called for it before, which its description rules out.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Closes every descriptor from `first` on.
///
/// For a role's main function, while nothing in the process owns a descriptor that high.
pub fn close_from(first: c_uint) -> io::Result<()> {
    // SAFETY: close_range takes three integers and reads no memory of ours. It closes descriptors whoever owns
    // them; by the function's description nobody does.
    let result = unsafe { libc::close_range(first, c_uint::MAX, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The kernel's `struct sigaction` on amd64, not the C library's: that one refuses two real-time signals.
#[repr(C)]
struct KernelSigaction {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// Sets every signal to its default action and lets all of them through.
///
/// execve(2) keeps ignored signals ignored and the mask as it is, so without this a session would inherit both.
pub fn reset_signals() -> io::Result<()> {
    for signal in (1..=SIGNAL_MAX).filter(|signal| ![libc::SIGKILL, libc::SIGSTOP].contains(signal)) {
        set_action(signal, libc::SIG_DFL)?;
    }
    let nothing_blocked: u64 = 0;
    // SAFETY: `nothing_blocked` lives through the call and has the 8 bytes said in the last argument. The null
    // pointer means that the old mask is not asked for.
    let result = unsafe {
        let no_old = std::ptr::null_mut::<u64>();
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const nothing_blocked, no_old, size_of::<u64>())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Ignores a terminal's two signals, SIGINT and SIGQUIT, here and in what is executed next.
pub fn ignore_keyboard_signals() -> io::Result<()> {
    set_action(libc::SIGINT, libc::SIG_IGN)?;
    set_action(libc::SIGQUIT, libc::SIG_IGN)
}

/// Sets one signal's action to `SIG_DFL` or `SIG_IGN`.
fn set_action(signal: c_int, handler: usize) -> io::Result<()> {
    let action = KernelSigaction { handler, flags: 0, restorer: 0, mask: 0 };
    // SAFETY: `action` lives through the call and has the layout that the call reads; its mask has the 8 bytes said
    // in the last argument. The null pointer means that the old action is not asked for. Neither action runs code
    // of ours.
    let result = unsafe {
        let no_old = std::ptr::null_mut::<KernelSigaction>();
        libc::syscall(libc::SYS_rt_sigaction, signal, &raw const action, no_old, size_of::<u64>())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, IntoRawFd};

    #[test]
    fn a_descriptor_that_is_not_open_is_refused() {
        for raw in [-1, 1 << 20] {
            assert_eq!(take(raw).unwrap_err().raw_os_error(), Some(libc::EBADF));
        }
    }

    #[test]
    fn a_taken_descriptor_is_close_on_exec() {
        let (end, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let inherited = end.try_clone().unwrap();
        rustix::io::fcntl_setfd(&inherited, rustix::io::FdFlags::empty()).unwrap();
        assert_eq!(rustix::io::fcntl_getfd(&inherited).unwrap(), rustix::io::FdFlags::empty());

        let taken = take(inherited.into_raw_fd()).unwrap();

        assert_eq!(rustix::io::fcntl_getfd(taken.as_fd()).unwrap(), rustix::io::FdFlags::CLOEXEC);
    }
}
