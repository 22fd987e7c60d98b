//! `opencode-impostor ADDRESS`: takes the service manager's name on a bus, and answers as a fake manager does.
//!
//! A process of its own, since who it is is the point: the bus says its pid, whatever it claims.

use std::process::ExitCode;

use support::fake_manager::{FakeManager, Server};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let [_, address] = words.as_slice() else {
        eprintln!("usage: opencode-impostor ADDRESS");
        return ExitCode::from(64);
    };
    // The real server's pid would be asked for; an impostor would say just that.
    let fake = FakeManager::start(address, Server::new("opencode-it.service", 1));
    if let Err(error) = fake {
        eprintln!("opencode-impostor: {error}");
        return ExitCode::FAILURE;
    }
    println!("has the name");
    loop {
        std::thread::park();
    }
}
