//! Pristine roots: a small Debian each, built once per recipe and machine, never written to afterwards.
//!
//! The archive they come from is the one the machine's own apt uses; no host name is written down here.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::{Error, PATH, Suite};

/// Where the roots are kept; `OPENCODE_PTY_CACHE` names another directory (the roots are in `roots` below it).
const CACHE: &str = "/var/cache/opencode-pty";

/// The steps around mmdebstrap, and how it is called.
const BUILD: &str = include_str!("build-root.sh");

/// What is set up inside.
const SETTINGS: &str = include_str!("settings.sh");

/// What makes a root of a host: what is in it, and that [`SETTINGS`] are made inside.
pub(crate) const ROOT: [&str; 4] = [
    "--variant=minbase",
    "--include=systemd,systemd-sysv,dbus,util-linux,bsdutils,procps,python3-minimal,sudo,strace,iproute2,bash,ncurses-bin,\
     at,cron,tmux",
    "--setup-hook=mkdir -p \"$1/tmp\" && printf %s \"$OPENCODE_PTY_SETTINGS\" >\"$1/tmp/settings\"",
    "--customize-hook=chroot \"$1\" /bin/bash -e /tmp/settings",
];

/// Each program that a host or a test needs on the machine, and the Debian package that has it.
const TOOLS: [(&str, &str); 10] = [
    ("systemd-nspawn", "systemd-container"),
    ("mmdebstrap", "mmdebstrap"),
    ("unshare", "util-linux"),
    ("nsenter", "util-linux"),
    ("setpriv", "util-linux"),
    ("setsid", "util-linux"),
    ("flock", "util-linux"),
    ("dbus-daemon", "dbus-daemon"),
    ("busybox", "busybox"),
    ("git", "git"),
];

/// The same of what reads man pages and completions.
const READERS: [(&str, &str); 4] = [("mandoc", "mandoc"), ("groff", "groff-base"), ("zsh", "zsh"), ("fish", "fish")];

/// After this long without a word from the build, the time that has passed is shown.
const SILENCE_MAX: Duration = Duration::from_secs(3);

/// Where things are kept that take long to get.
pub fn cache() -> PathBuf {
    std::env::var_os("OPENCODE_PTY_CACHE").map_or_else(|| PathBuf::from(CACHE), PathBuf::from)
}

/// The pristine root of a suite, from the cache or built now.
pub(super) fn pristine(suite: Suite, progress: &mut dyn FnMut(&str)) -> Result<PathBuf, Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::failed(
            "boot a host",
            "only root can: it mounts, and starts systemd in namespaces of its own",
        ));
    }
    install_tools(progress)?;

    let roots = cache().join("roots");
    let root = roots.join(format!("{suite}-{:016x}", key(&[&ROOT, further_options(suite)].concat())));
    let mut build = |unfinished: &Path, progress: &mut dyn FnMut(&str)| debian(suite, unfinished, &ROOT, "", progress);
    once(&root, &format!("{suite} root"), "about half a minute", &mut build, progress)?;
    Ok(root)
}

/// Takes systemd and what is built with it, and nothing else, from the backports: a package of theirs is not preferred by
/// itself.
const PREFER_BACKPORTS: &str = "--setup-hook=mkdir -p \"$1/etc/apt/preferences.d\" && printf '%s\\n' \
    'Package: src:systemd' 'Pin: release n=bookworm-backports' 'Pin-Priority: 990' \
    >\"$1/etc/apt/preferences.d/systemd\"";

/// mmdebstrap's options for one suite alone.
fn further_options(suite: Suite) -> &'static [&'static str] {
    match suite {
        Suite::Bookworm | Suite::Trixie => &[],
        Suite::Backports => &[PREFER_BACKPORTS],
    }
}

/// What mmdebstrap takes packages from: an archive, or lines of apt's where one does not do.
fn sources(suite: Suite, mirror: &str) -> String {
    match suite {
        Suite::Bookworm | Suite::Trixie => mirror.to_owned(),
        Suite::Backports => format!("deb {mirror} bookworm main\ndeb {mirror} bookworm-backports main"),
    }
}

/// What a thing in the cache is called by: how it is built, and what goes into it.
pub(crate) fn key(more: &[&str]) -> u64 {
    fnv1a(&[&[BUILD, SETTINGS], more].concat())
}

/// Builds something into a directory that does not exist yet, and says how far it is.
pub(crate) type Build<'a> = &'a mut dyn FnMut(&Path, &mut dyn FnMut(&str)) -> Result<(), Error>;

/// Builds a thing in the cache if it is not there: under another name, renamed when it is whole, by one process at a time.
pub(crate) fn once(
    path: &Path,
    what: &str,
    how_long: &str,
    build: Build<'_>,
    progress: &mut dyn FnMut(&str),
) -> Result<(), Error> {
    if path.exists() {
        return Ok(());
    }
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::failed(format!("build the {what}"), "it has no place in the cache"));
    };
    fs::create_dir_all(directory).map_err(Error::system(format!("make {}", directory.display())))?;
    // The name without its key: an older recipe's builder and ours need not run at the same time either.
    let name = name.to_string_lossy();
    let name = name.split('-').next().unwrap_or_default();
    let lock = File::create(directory.join(format!("{name}.lock"))).map_err(Error::system("open the cache's lock"))?;
    if lock.try_lock().is_err() {
        progress(&format!("{what}: waiting for another process that builds it"));
        lock.lock().map_err(Error::system("lock the cache"))?;
    }
    if path.exists() {
        return Ok(());
    }
    let started = Instant::now();
    progress(&format!("{what}: building it, once on this machine; {how_long}"));
    let unfinished = path.with_extension("unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).map_err(Error::system(format!("remove an unfinished {what}")))?;
    }
    build(&unfinished, progress)?;
    fs::rename(&unfinished, path).map_err(Error::system(format!("build the {what}")))?;
    progress(&format!("{what}: built in {} s", started.elapsed().as_secs()));
    Ok(())
}

/// Installs or unpacks packages of a release into a directory that does not exist; `options` are mmdebstrap's, [`ROOT`] or
/// others, and hooks among them find `settings` in `OPENCODE_PTY_MORE_SETTINGS`.
pub(crate) fn debian(
    suite: Suite,
    directory: &Path,
    options: &[&str],
    settings: &str,
    progress: &mut dyn FnMut(&str),
) -> Result<(), Error> {
    let doing = format!("install packages of Debian {suite} into {}", directory.display());
    let started = Instant::now();
    let mut command = Command::new("setsid");
    let sources = sources(suite, &mirror(progress)?);
    command.args(["bash", "-c", BUILD, "build-root.sh", suite.release()]).arg(directory).arg(sources);
    command.args(further_options(suite));
    for option in apt_options()? {
        command.arg(format!("--aptopt={option}"));
    }
    let mut child = command
        .args(options)
        .env("PATH", PATH)
        .env("OPENCODE_PTY_SETTINGS", SETTINGS)
        .env("OPENCODE_PTY_MORE_SETTINGS", settings)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(Error::system(doing.clone()))?;
    let said = follow(&mut child.stdout, &format!("{suite}: "), started, progress);
    let status = child.wait().map_err(Error::system(doing.clone()))?;
    if status.success() { Ok(()) } else { Err(Error::failed(doing, format!("{status}\n{said}"))) }
}

/// Passes a program's lines on as progress until it closes its output; gives back the last of them.
fn follow(
    stdout: &mut Option<std::process::ChildStdout>,
    prefix: &str,
    started: Instant,
    progress: &mut dyn FnMut(&str),
) -> String {
    let Some(stdout) = stdout.take() else { return String::new() };
    let (lines, received) = mpsc::channel();
    let reader = thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if lines.send(line).is_err() {
                return;
            }
        }
    });
    let mut last: Vec<String> = Vec::new();
    loop {
        match received.recv_timeout(SILENCE_MAX) {
            Ok(line) => {
                if let Some(step) = line.strip_prefix("I: ").filter(|step| !step.starts_with("running --")) {
                    progress(&format!("{prefix}{step}"));
                }
                last.push(line);
                if last.len() > 20 {
                    last.remove(0);
                }
            }
            Err(RecvTimeoutError::Timeout) => progress(&format!("{prefix}… {} s", started.elapsed().as_secs())),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let _ = reader.join();
    last.join("\n")
}

/// Installs what the machine lacks of the programs that hosts and tests need.
///
/// # Errors
/// apt can't.
pub fn install_tools(progress: &mut dyn FnMut(&str)) -> Result<(), Error> {
    install_missing(&TOOLS, progress)
}

/// Installs what reads man pages and completions: tests of those alone need it.
pub fn install_readers(progress: &mut dyn FnMut(&str)) -> Result<(), Error> {
    install_missing(&READERS, progress)
}

/// Installs what the machine lacks of these programs, each with the Debian package that has it.
///
/// # Errors
/// apt can't.
pub fn install_missing(tools: &[(&str, &str)], progress: &mut dyn FnMut(&str)) -> Result<(), Error> {
    let found = |tool: &str| PATH.split(':').any(|dir| Path::new(dir).join(tool).exists());
    let missing: BTreeSet<&str> = tools.iter().filter(|(tool, _)| !found(tool)).map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    progress(&format!("installing {}", missing.iter().copied().collect::<Vec<_>>().join(", ")));
    apt_get(&["update"])?;
    let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
    arguments.extend(missing);
    apt_get(&arguments)
}

fn apt_get(arguments: &[&str]) -> Result<(), Error> {
    let doing = format!("run apt-get {}", arguments.join(" "));
    let output = Command::new("apt-get")
        .args(["--quiet", "--option", "DPkg::Lock::Timeout=300"])
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output()
        .map_err(Error::system(doing.clone()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::failed(doing, format!("{}\n{}", output.status, String::from_utf8_lossy(&output.stderr))))
}

/// The archive that the machine's own apt takes Debian from.
fn mirror(progress: &mut dyn FnMut(&str)) -> Result<String, Error> {
    let format = "$(CREATED_BY)|$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)";
    let look = || {
        let listed = Command::new("apt-get")
            .args(["indextargets", "--format", format])
            .output()
            .map_err(Error::system("ask apt for its archives"))?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        Ok(listed.lines().find_map(|line| line.strip_prefix("Packages|Debian|Debian|main|")).map(str::to_owned))
    };
    if let Some(mirror) = look()? {
        return Ok(mirror);
    }
    // Origin and label are known only once the lists are there.
    progress("asking apt for its lists");
    apt_get(&["update"])?;
    look()?.ok_or_else(|| {
        Error::failed("find a Debian archive", "apt on this machine has none with Origin and Label Debian")
    })
}

/// How the machine's apt reaches its archives: proxies, and what it checks about dates.
fn apt_options() -> Result<Vec<String>, Error> {
    let dump = Command::new("apt-config")
        .args(["dump", "Acquire"])
        .output()
        .map_err(Error::system("ask apt for its settings"))?;
    let dump = String::from_utf8_lossy(&dump.stdout).into_owned();
    Ok(dump.lines().filter(|line| is_about_access(line)).map(|line| line.trim_end_matches(';').to_owned()).collect())
}

fn is_about_access(option: &str) -> bool {
    let Some((key, value)) = option.split_once(' ') else { return false };
    let protocol = key.starts_with("Acquire::http::") || key.starts_with("Acquire::https::");
    let date = key == "Acquire::Check-Valid-Until" || key == "Acquire::Check-Date";
    (protocol || date) && value != "\"\";"
}

/// A key for the cache: 64-bit FNV-1a, which is the same on every machine and with every compiler.
fn fnv1a(texts: &[&str]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for byte in texts.iter().flat_map(|text| text.bytes().chain([0])) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_recipe_is_another_root() {
        assert_eq!(fnv1a(&[]), 0xcbf2_9ce4_8422_2325);
        assert_ne!(fnv1a(&["a", "b"]), fnv1a(&["ab", ""]));
        assert_ne!(fnv1a(&["a"]), fnv1a(&["b"]));
    }

    #[test]
    fn proxies_are_passed_on_and_index_targets_are_not() {
        assert!(is_about_access("Acquire::http::Proxy \"http://proxy:1\";"));
        assert!(is_about_access("Acquire::Check-Date \"false\";"));
        assert!(!is_about_access("Acquire::http \"\";"));
        assert!(!is_about_access("Acquire::http::Proxy \"\";"));
        assert!(!is_about_access("Acquire::Languages:: \"none\";"));
        assert!(!is_about_access("Acquire::IndexTargets::deb::Packages::MetaKey \"x\";"));
    }
}
