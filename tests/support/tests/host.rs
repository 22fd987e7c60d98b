//! The test hosts themselves. Needs root: `cargo xtask test` runs it, plain `cargo test` does not.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use support::host::{BootOptions, Host, Suite};

/// Tells the process that is to be killed what its host is called.
const OWNED: &str = "OPENCODE_PTY_TEST_OWNED_HOST";

fn boot(name: &str, suite: Suite) -> Host {
    let name = format!("{name}-{}", std::process::id());
    Host::boot(&BootOptions { name, suite, ephemeral: true }, &mut |line| println!("{line}")).unwrap()
}

fn cgroup(host: &Host) -> String {
    fs::read_to_string(format!("/proc/{}/cgroup", host.leader())).unwrap()
}

fn unified(cgroup: &str) -> &str {
    cgroup.lines().find_map(|line| line.strip_prefix("0::")).unwrap()
}

#[test]
fn two_hosts_at_once_share_nothing_but_the_kernel() {
    let (old, new) = (boot("old", Suite::Bookworm), boot("new", Suite::Trixie));

    assert_ne!(unified(&cgroup(&old)), unified(&cgroup(&new)));
    for (host, version) in [(&old, "systemd 252"), (&new, "systemd 257")] {
        assert_eq!(host.sh_ok("cat /proc/1/cgroup | grep ^0::").unwrap(), "0::/init.scope");
        assert!(host.sh_ok("systemctl --version").unwrap().starts_with(version));
        assert_eq!(host.sh_ok("uname -n").unwrap(), host.name());
        host.sh_ok("touch /run/here /root/here && systemd-run --quiet --unit same-name sleep 1000").unwrap();
    }
    old.sh_ok("systemctl stop same-name").unwrap();
    assert_eq!(new.sh_ok("systemctl is-active same-name").unwrap(), "active");
    assert_ne!(old.sh_ok("cat /etc/machine-id").unwrap(), new.sh_ok("cat /etc/machine-id").unwrap());

    // What one writes is gone with it.
    let name = new.name().to_owned();
    new.down().unwrap();
    let again = Host::boot(&BootOptions { name, suite: Suite::Trixie, ephemeral: true }, &mut |_| ()).unwrap();
    again.sh_ok("! test -e /root/here").unwrap();
}

#[test]
fn the_account_has_every_group_of_its_real_counterpart() {
    for suite in Suite::ALL {
        let host = boot("account", suite);
        let groups = host.sh_ok("id -nG byk").unwrap();
        let mut groups: Vec<&str> = groups.split(' ').collect();
        groups.sort_unstable();
        assert_eq!(groups, ["adm", "byk", "cdrom", "dip", "docker", "lxd", "plugdev", "sudo"]);
        assert_eq!(
            host.sh_ok("getent passwd byk | cut -d: -f3,6,7; id -u eve").unwrap(),
            "1000:/home/byk:/bin/bash\n1001"
        );
        assert_eq!(
            host.sh_ok("env | sort | grep -v -e ^_= -e ^SHLVL= | cut -d= -f1 | xargs").unwrap(),
            "HOME LANG LOGNAME PATH PWD USER"
        );
        assert!(host.journal().unwrap().contains("systemd"));
        assert!(host.path("/run/dbus/system_bus_socket").exists());
    }
}

#[test]
fn a_failed_script_is_an_error_that_tells_all() {
    let host = boot("script", Suite::Trixie);
    let error = host.sh_ok("echo out; echo err >&2; exit 3").unwrap_err().to_string();
    for part in ["exit 3", "exit status: 3", "out", "err", host.name()] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_name_is_taken_while_its_host_is_up() {
    let host = boot("taken", Suite::Trixie);
    let options = BootOptions { name: host.name().to_owned(), suite: Suite::Trixie, ephemeral: true };
    let error = Host::boot(&options, &mut |_| ()).unwrap_err().to_string();
    assert!(error.contains("already up"), "{error}");

    let attached = Host::attach(host.name()).unwrap();
    assert_eq!((attached.leader(), attached.suite()), (host.leader(), Suite::Trixie));
    drop(attached);
    host.sh_ok("true").unwrap();
    host.down().unwrap();
    assert!(Host::attach(&options.name).is_err());
}

/// What the test below does in the process that it kills.
fn own(name: String) -> ! {
    let host = Host::boot(&BootOptions { name, suite: Suite::Trixie, ephemeral: true }, &mut |_| ()).unwrap();
    println!("owned {} {}", host.leader(), unified(&cgroup(&host)));
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn an_ephemeral_host_ends_with_its_owner() {
    if let Ok(name) = std::env::var(OWNED) {
        own(name);
    }
    let name = format!("owned-{}", std::process::id());
    for signal in ["KILL", "TERM", "INT", "HUP"] {
        let mut owner = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "an_ephemeral_host_ends_with_its_owner", "--nocapture"])
            .env(OWNED, &name)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(owner.stdout.take().unwrap()).lines();
        let line = lines.find_map(|line| line.ok()?.split_once("owned ").map(|(_, rest)| rest.to_owned())).unwrap();
        let (leader, cgroup) = line.split_once(' ').unwrap();
        let remains = [
            Path::new("/proc").join(leader),
            Path::new("/run/opencode-pty-hosts").join(&name),
            Path::new("/sys/fs/cgroup").join(cgroup.trim_start_matches('/')),
            Path::new("/sys/fs/cgroup/unified").join(cgroup.trim_start_matches('/')),
        ];
        assert!(remains.iter().filter(|path| path.exists()).count() >= 3, "{remains:?}");

        let killed = Command::new("kill").args(["-s", signal, &owner.id().to_string()]).status().unwrap();
        assert!(killed.success());
        owner.wait().unwrap();

        let deadline = Instant::now() + Duration::from_secs(30);
        while let Some(path) = remains.iter().find(|path| path.exists()) {
            assert!(Instant::now() < deadline, "after SIG{signal} {} is still there", path.display());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
