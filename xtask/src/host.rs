//! `cargo xtask host`: a host to try things on, which stays until it is told to go.

use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use support::host::{self, BootOptions, Host, Suite};
use support::units::Account;

use crate::Failure;
use crate::args::Args;

const USAGE: &str = "\
Usage: cargo xtask host up|shell|down [--suite SUITE] [--name NAME] [--account NAME] [--bare]

  up     boot a host, install the product and the stand-in server on it, start both; if it is up already: install
         both anew, restart both
  shell  a root shell on it
  down   end it; nothing is left

  --suite  the Debian: trixie (systemd 257, the default), bookworm (252), or backports (bookworm with 254)
  --account  another account than byk for sessions and server: uid 4242, home /srv/NAME, shell nologin
  --name   its name; by default that of its suite
  --bare   only boot it
";

pub fn main(words: &[String]) -> Result<ExitCode, Failure> {
    let mut args = Args::new(words, USAGE)?;
    let bare = args.flag("--bare");
    let suite: Suite = match args.option("--suite")? {
        Some(name) => name.parse().map_err(Failure::Usage)?,
        None => Suite::Trixie,
    };
    let account = args.option("--account")?;
    let name = args.option("--name")?.unwrap_or_else(|| suite.name().to_owned());
    let words = args.finish(1)?;
    match words.first().map(String::as_str) {
        Some("up") => up(&BootOptions { name, suite, ephemeral: false }, account.as_deref(), bare),
        Some("shell") => shell(&name),
        Some("down") => {
            Host::attach(&name)?.down()?;
            println!("host {name} is gone");
            Ok(ExitCode::SUCCESS)
        }
        _ => Err(Failure::Usage(USAGE.to_owned())),
    }
}

fn up(options: &BootOptions, account: Option<&str>, bare: bool) -> Result<ExitCode, Failure> {
    let binaries = if bare { None } else { Some((host::build_product()?, host::build_standin()?)) };
    let host = if let Ok(host) = Host::attach(&options.name) {
        host
    } else {
        let mut host = Host::boot(options, &mut |line| eprintln!("{line}"))?;
        if let Some(name) = account {
            host.change_account(other_account(name))?;
        }
        host
    };
    if let Some((product, standin)) = binaries {
        host::install(&host, &product)?;
        host::install_standin(&host, &standin)?;
        host.sh_ok("systemctl stop opencode-v2.service opencode-pty-supervisor.service")?;
        host::start(&host)?;
    }
    println!("{host} is up; its systemd is process {}", host.leader());
    println!("a shell: cargo xtask host shell --name {0}   the end: cargo xtask host down --name {0}", host.name());
    Ok(ExitCode::SUCCESS)
}

/// An account that has nothing in common with the usual one.
pub fn other_account(name: &str) -> Account {
    Account { name: name.to_owned(), group: name.to_owned(), uid: 4242, gid: 4343, home: format!("/srv/{name}") }
}

fn shell(name: &str) -> Result<ExitCode, Failure> {
    let host = Host::attach(name)?;
    let terminal = std::env::var_os("TERM").unwrap_or_else(|| "dumb".into());
    let error = host.command("/bin/bash").arg("-l").env("TERM", terminal).exec();
    Err(Failure::Failed(format!("cannot start a shell: {error}")))
}
