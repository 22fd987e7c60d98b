//! A message bus of the test's own.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A message bus of the test's own.
#[derive(Debug)]
pub struct Bus {
    process: Child,
    dir: PathBuf,
}

impl Bus {
    /// Starts one with its socket in `dir`.
    pub fn start(dir: &Path) -> io::Result<Self> {
        let config = format!(
            "<!DOCTYPE busconfig PUBLIC \"-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN\"\n \
             \"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd\">\n\
             <busconfig><listen>unix:path={}</listen><auth>EXTERNAL</auth>\n\
             <policy context=\"default\"><allow user=\"*\"/><allow own=\"*\"/><allow send_destination=\"*\"/>\n\
             <allow receive_sender=\"*\"/></policy></busconfig>\n",
            dir.join("bus.sock").display()
        );
        std::fs::write(dir.join("bus.conf"), config)?;
        Ok(Self { process: Self::run(dir)?, dir: dir.to_owned() })
    }

    fn run(dir: &Path) -> io::Result<Child> {
        let mut process = Command::new("dbus-daemon")
            .arg(format!("--config-file={}", dir.join("bus.conf").display()))
            .args(["--nofork", "--nopidfile", "--print-address=1"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        // It prints its address once it listens.
        let mut line = Vec::new();
        let mut byte = [0];
        let stdout = process.stdout.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        while !line.ends_with(b"\n") {
            stdout.read_exact(&mut byte)?;
            line.extend(byte);
        }
        Ok(process)
    }

    /// Its address.
    pub fn address(&self) -> String {
        format!("unix:path={}", self.dir.join("bus.sock").display())
    }

    /// Ends it; [`Bus::resume`] starts another in its place.
    pub fn stop(&mut self) -> io::Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        match std::fs::remove_file(self.dir.join("bus.sock")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Starts another bus at the same address.
    pub fn resume(&mut self) -> io::Result<()> {
        self.process = Self::run(&self.dir)?;
        Ok(())
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        // Nothing can be done about a bus that is gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
