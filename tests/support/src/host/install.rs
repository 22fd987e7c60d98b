//! Installs the product on a host as the README tells an operator to, and a stand-in for the server.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::Path;
use std::process::Command;

use super::{Error, Host, SERVER, SUPERVISOR, workspace};
use crate::units::render;

/// The password in the server's environment on a host. Whoever reads it in a session has found a hole.
pub const PASSWORD_CANARY: &str = "canary-password-7c1e";

/// A value in the other environment file of the server.
pub const ENVIRONMENT_CANARY: &str = "canary-environment-58d0";

/// A directory of the usual account for sessions to work in; another account has its own
/// ([`Account::workspace`](crate::units::Account::workspace)).
pub const WORKSPACE: &str = "/home/byk/work";

/// The stand-in, and the program that plays strangers and attackers.
pub const STANDIN_PATH: &str = "/usr/local/lib/opencode-standin/opencode-standin";

/// Installs the product: one file under three names, a link for the operator, the units.
pub fn install(host: &Host, binary: &Path) -> Result<(), Error> {
    let libexec = "/usr/local/libexec";
    host.sh_ok(&format!("mkdir -p {libexec} /usr/local/sbin /etc/systemd/system"))?;
    let program = format!("{libexec}/opencode-pty-supervisor");
    copy(host, binary, &program)?;
    host.sh_ok(&format!(
        "set -e
        ln -f {program} {libexec}/opencode-pty-launcher
        ln -f {program} {libexec}/opencode-pty-client
        ln -sf {program} /usr/local/sbin/opencode-pty"
    ))?;
    for unit in [SUPERVISOR, "opencode-pty.slice"] {
        install_unit(host, unit)?;
    }
    host.sh_ok("systemctl daemon-reload").map(drop)
}

/// Installs the server's unit with the stand-in as its main process, and what that unit expects to find.
pub fn install_standin(host: &Host, binary: &Path) -> Result<(), Error> {
    let account = host.account();
    let (name, gid, home) = (&account.name, account.gid, &account.home);
    let (workspace, pilot) = (account.workspace(), format!("{home}/.local/share/opencode-v2-pilot"));
    host.sh_ok(&format!(
        "set -e
        mkdir -p /usr/local/libexec /usr/local/lib/opencode-standin /etc/systemd/system/opencode-v2.service.d
        setpriv --reuid {name} --regid {gid} --clear-groups mkdir -p {home}/.opencode {workspace} \\
            {pilot}/config/opencode {pilot}/data/opencode {pilot}/cache {pilot}/state"
    ))?;
    copy(host, binary, STANDIN_PATH)?;

    // For tests alone: the real verifier compares hashes with a marker that no test may write.
    write(
        host,
        "/usr/local/libexec/opencode-pty-verify-readiness",
        0o755,
        "#!/bin/sh\n# Test host: every build counts as ready here. NOT the real verifier.\nexit 0\n",
    )?;
    write(host, &format!("{home}/.opencode/env"), 0o600, &format!("OPENCODE_CANARY={ENVIRONMENT_CANARY}\n"))?;
    write(host, &format!("{pilot}/server.env"), 0o600, &format!("OPENCODE_PASSWORD={PASSWORD_CANARY}\n"))?;
    install_unit(host, SERVER)?;
    write(
        host,
        "/etc/systemd/system/opencode-v2.service.d/10-test-host.conf",
        0o644,
        &format!(
            "# Test host: the stand-in instead of the server, and a place for its control socket.\n\
             [Service]\n\
             ExecStart=\n\
             ExecStart={STANDIN_PATH} serve\n\
             RuntimeDirectory=opencode-standin\n"
        ),
    )?;
    host.sh_ok("systemctl daemon-reload").map(drop)
}

/// Starts the supervisor and then the server, as an operator would.
pub fn start(host: &Host) -> Result<(), Error> {
    for unit in [SUPERVISOR, SERVER] {
        if let Err(error) = host.sh_ok(&format!("systemctl start {unit}")) {
            let journal = host.sh(&format!("journalctl --no-pager --lines=20 --unit={unit}"))?;
            return Err(error.and_detail(&String::from_utf8_lossy(&journal.stdout)));
        }
    }
    Ok(())
}

fn install_unit(host: &Host, unit: &str) -> Result<(), Error> {
    let source = workspace().join("units").join(unit);
    let text = fs::read_to_string(&source).map_err(Error::system(format!("read {}", source.display())))?;
    write(host, &format!("/etc/systemd/system/{unit}"), 0o644, &render(&text, host.account()))
}

/// Copies a program of the account into place.
pub fn copy_program(host: &Host, source: &Path, path: &str) -> Result<(), Error> {
    if let Some((directory, _)) = path.rsplit_once('/') {
        host.sh_ok(&format!("mkdir -p {directory}"))?;
    }
    copy(host, source, path)?;
    let account = host.account();
    host.sh_ok(&format!("chown {}:{} {path}", account.name, account.gid)).map(drop)
}

/// Copies a directory with all that is in it, as the account's; what is there is replaced.
pub fn copy_tree(host: &Host, source: &Path, path: &str) -> Result<(), Error> {
    host.sh_ok(&format!("rm -rf --one-file-system {path}"))?;
    let doing = || format!("copy {} to {path} of {host}", source.display());
    let output = Command::new("cp")
        .args(["--recursive", "--no-target-directory"])
        .arg(source)
        .arg(host.path(path))
        .output()
        .map_err(Error::system(doing()))?;
    if !output.status.success() {
        return Err(Error::failed(doing(), String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    let account = host.account();
    host.sh_ok(&format!("chown --recursive {}:{} {path}", account.name, account.gid)).map(drop)
}

/// Gives the host a shared library of the machine's that its small root lacks.
pub fn copy_library(host: &Host, name: &str) -> Result<(), Error> {
    let found = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib"]
        .into_iter()
        .map(|directory| Path::new(directory).join(name))
        .find(|path| path.exists());
    let Some(source) = found else {
        return Err(Error::failed(format!("give {host} {name}"), "the machine has none".to_owned()));
    };
    copy(host, &source, &format!("/usr/local/lib/{name}"))?;
    host.sh_ok("ldconfig").map(drop)
}

/// Copies a program into place by a rename, since the one that is there may be running.
fn copy(host: &Host, source: &Path, path: &str) -> Result<(), Error> {
    let target = host.path(path);
    let new = host.path(format!("{path}.new"));
    fs::copy(source, &new)
        .and_then(|_| fs::set_permissions(&new, fs::Permissions::from_mode(0o755)))
        .and_then(|()| chown(&new, Some(0), Some(0)))
        .and_then(|()| fs::rename(&new, target))
        .map_err(Error::system(format!("copy {} to {path} of {host}", source.display())))
}

/// Writes a file of root's.
pub fn write(host: &Host, path: &str, mode: u32, text: &str) -> Result<(), Error> {
    let target = host.path(path);
    fs::write(&target, text)
        .and_then(|()| fs::set_permissions(&target, fs::Permissions::from_mode(mode)))
        .map_err(Error::system(format!("write {path} of {host}")))
}
