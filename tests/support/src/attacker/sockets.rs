//! Sockets that a session should not find: directly, and by every detour.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::{Attempt, Refusal, Told, told};

/// More steps up than any directory is deep.
const UP: &str = "../../../../../../../../";

/// Tries sockets: `hidden:PATH` by every way, `shared:PATH` directly, `abstract:NAME`, `loopback:PORT`. `server`: a process,
/// whether it can be seen or not.
pub(super) fn attack(server: &str, names: &[&str]) -> Vec<Told> {
    let of_kind = |prefix: &str| names.iter().filter_map(|name| name.strip_prefix(prefix)).collect::<Vec<_>>();
    let paths = of_kind("hidden:");
    let processes = visible_processes(server);
    let below = |link: &str, up: &str, path: &str| -> Vec<String> {
        processes.iter().map(|pid| format!("/proc/{pid}/{link}{up}{path}")).collect()
    };
    let mut done = vec![
        told("sockets, directly", reach(&paths, |path| vec![path.to_owned()])),
        told("sockets, by /var/run", reach(&paths, |path| vec![path.replacen("/run/", "/var/run/", 1)])),
        told("sockets, up from the working directory", reach(&paths, |path| vec![format!("{UP}{path}")])),
        told(
            "sockets, up from every descriptor and the working directory by /proc/self",
            reach(&paths, |path| {
                (0..10)
                    .map(|n| format!("fd/{n}"))
                    .chain(["cwd".to_owned()])
                    .map(|at| format!("/proc/self/{at}/{UP}{path}"))
                    .collect()
            }),
        ),
        told("sockets, by /proc/PID/root of every visible process", reach(&paths, |path| below("root", "", path))),
        told("sockets, up from /proc/PID/cwd of every visible process", reach(&paths, |path| below("cwd/", UP, path))),
    ];
    done.extend(of_kind("abstract:").iter().map(|name| told("an abstract socket outside", reach_abstract(name))));
    done.extend(of_kind("shared:").iter().map(|path| {
        told(
            "a socket in the /tmp that is the server's, too",
            connect_to(path).map(|()| "connected".to_owned()).map_err(Refusal::from),
        )
    }));
    done.extend(of_kind("loopback:").iter().map(|port| told("a service on the loopback address", reach_port(port))));
    done
}

/// Every process but this one that can be seen, and the server's.
fn visible_processes(server: &str) -> Vec<String> {
    let own = std::process::id().to_string();
    let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()) && *name != own)
        .chain([server.to_owned()])
        .collect()
}

/// Tries to connect to each path by one of its spellings. Says `all N`, or which.
fn reach(paths: &[&str], spellings: impl Fn(&str) -> Vec<String>) -> Attempt {
    let (mut reached, mut errors) = (Vec::new(), BTreeMap::<String, usize>::new());
    for path in paths {
        let mut tried = spellings(path).into_iter().map(|spelling| connect_to(&spelling));
        let outcome = tried.try_fold(None, |_, result| result.map_or_else(|error| Ok(Some(error)), Err));
        match outcome {
            Err(()) => reached.push(*path),
            Ok(error) => {
                *errors
                    .entry(error.map_or_else(|| "nothing to try".to_owned(), |error| error.to_string()))
                    .or_default() += 1;
            }
        }
    }
    if reached.is_empty() {
        let errors: Vec<String> = errors.iter().map(|(error, count)| format!("{count} × {error}")).collect();
        return Err(Refusal(format!("none of {}; {}", paths.len(), errors.join(", "))));
    }
    if reached.len() == paths.len() {
        return Ok(format!("all {}", paths.len()));
    }
    Ok(format!("{} of {}: {}", reached.len(), paths.len(), reached.join(" ")))
}

/// Connects, whatever kind of socket it is.
fn connect_to(path: &str) -> io::Result<()> {
    let address = SocketAddrUnix::new(Path::new(path))?;
    let mut result = Err(Errno::PROTOTYPE);
    for kind in [SocketType::STREAM, SocketType::DGRAM, SocketType::SEQPACKET] {
        if result != Err(Errno::PROTOTYPE) {
            break;
        }
        let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        result = connect(&socket, &address);
    }
    Ok(result?)
}

fn reach_abstract(name: &str) -> Attempt {
    let address = SocketAddr::from_abstract_name(name)?;
    UnixStream::connect_addr(&address)?;
    Ok("connected".to_owned())
}

fn reach_port(port: &str) -> Attempt {
    TcpStream::connect(format!("127.0.0.1:{port}"))?;
    Ok("connected".to_owned())
}
