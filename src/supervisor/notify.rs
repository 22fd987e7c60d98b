//! Words to the service manager: ready, status, watchdog, stopping (sd_notify(3)).
//!
//! Never waits for whoever reads them: a service manager that hangs must not make the supervisor hang, so a datagram
//! that would have to wait is tried again later or left out.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use smol::Timer;

/// Pause before a datagram that found no room is tried again. Chosen.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Where the service manager listens, if there is one that does.
#[derive(Debug)]
pub struct Notifier(Option<(UnixDatagram, SocketAddr)>);

impl Notifier {
    /// What `NOTIFY_SOCKET` names: a path, or an abstract name behind an `@`.
    pub fn new(address: Option<&OsStr>) -> io::Result<Self> {
        let Some(address) = address else { return Ok(Self(None)) };
        let address = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(address)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        Ok(Self(Some((socket, address))))
    }

    /// Says `state` once. Whether there is no point in saying it again.
    pub fn say(&self, state: &str) -> bool {
        let Some((socket, address)) = &self.0 else { return true };
        match socket.send_to_addr(state.as_bytes(), address) {
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
            Ok(_) => true,
        }
    }

    /// Says `state`, as often as it takes.
    pub async fn insist(&self, state: &str) {
        while !self.say(state) {
            Timer::after(RETRY_PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_that_does_not_read_holds_nobody_up() {
        let path = std::env::temp_dir().join(format!("opencode-pty-notify-{}", std::process::id()));
        let manager = UnixDatagram::bind(&path).unwrap();
        let notifier = Notifier::new(Some(path.as_os_str())).unwrap();
        let said = (0..100_000).take_while(|_| notifier.say("STATUS=x")).count();
        assert!(said < 100_000, "the queue of a Unix socket is bounded");
        assert_eq!(manager.recv(&mut [0; 16]).unwrap(), 8);
        assert!(notifier.say("READY=1"));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn without_a_manager_there_is_nobody_to_tell() {
        assert!(Notifier::new(None).unwrap().say("READY=1"));
    }
}
