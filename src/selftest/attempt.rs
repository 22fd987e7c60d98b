//! What is tried as somebody else: as the account, in a session, as a stranger. Each way prints `WAY: open` or
//! `WAY: shut, REASON`; whoever reads it decides what should have been.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::time::Duration;

use crate::report::{Chain, ExitStatus, print_error};
use crate::sys::reach;
use crate::systemd::policy;

/// How long a connection is waited on for a word. Chosen: a loaded machine is no silence.
const WORD_TIME: Duration = Duration::from_secs(20);

/// Makes one attempt.
pub async fn main(words: &[&str]) -> ExitStatus {
    let number = |text: &str| text.parse::<u32>().unwrap_or(0);
    match words {
        ["own-manager-name"] => match policy::may_own_the_managers_name().await {
            Ok(true) => told("manager-name", Ok::<(), io::Error>(())),
            Ok(false) => println!("manager-name: shut"),
            Err(error) => {
                print_error("selftest", &error);
                return ExitStatus::System;
            }
        },
        ["connect", paths @ ..] => paths.iter().for_each(|path| told(path, connect(path))),
        ["tcp", addresses @ ..] => addresses.iter().for_each(|address| told(address, TcpStream::connect(address))),
        ["call", path] => println!("call: {}", call(path)),
        ["trace", process] => trace(number(process)),
        ["signal", process] => told("signal", reach::signal(number(process))),
        ["rlimit", process] => told("rlimit", reach::forbid_core_files(number(process))),
        _ => return ExitStatus::Usage,
    }
    ExitStatus::Success
}

fn told<T>(way: &str, tried: io::Result<T>) {
    match tried {
        Ok(_) => println!("{way}: open"),
        Err(error) => println!("{way}: shut, {}", Chain(&error)),
    }
}

/// Connects to a socket of any kind; `@` begins an abstract name.
fn connect(path: &str) -> io::Result<()> {
    let address = match path.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(path)?,
    };
    match UnixStream::connect_addr(&address) {
        // EPROTOTYPE: it is there, and no stream.
        Err(error) if error.raw_os_error() == Some(91) => UnixDatagram::unbound()?.connect_addr(&address),
        other => other.map(drop),
    }
}

/// Connects to a supervisor as a stranger, and says what it did.
fn call(path: &str) -> String {
    let mut stream = match UnixStream::connect(path) {
        Ok(stream) => stream,
        Err(error) => return format!("refused, {error}"),
    };
    let mut answer = [0; 256];
    match stream.set_read_timeout(Some(WORD_TIME)).and_then(|()| stream.read(&mut answer)) {
        Ok(0) => "closed".to_owned(),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => "closed".to_owned(),
        Ok(count) => format!("answered, {}", answer.get(..count).unwrap_or_default().escape_ascii()),
        Err(error) => format!("silent, {error}"),
    }
}

/// Looks into a process, and takes from it.
fn trace(process: u32) {
    let of = |name: &str| format!("/proc/{process}/{name}");
    for name in ["environ", "auxv", "maps", "syscall"] {
        told(name, File::open(of(name)).and_then(|mut file| file.read(&mut [0; 16])));
    }
    told("mem", File::open(of("mem")));
    for name in ["root", "cwd", "exe", "fd/0"] {
        told(name, fs::read_link(of(name)));
    }
    told("root/", fs::read_dir(of("root/")));
    told("fd/", fs::read_dir(of("fd")));
    told("pidfd_getfd", reach::take_descriptor(process, 0));
}
