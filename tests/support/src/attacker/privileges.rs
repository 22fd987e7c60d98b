//! Groups, set-user-ID programs, namespaces, keys, terminals, files.

use std::fs;
use std::os::unix::net::UnixStream;

use super::{Attempt, Outcome, Refusal, Told, perl, run, sh, told};

/// Tries to use the account's groups and to become somebody else. `programs`: copies of id(1) that are set-user-ID root and
/// set-group-ID, and a setpriv(1) that has CAP_SETUID as a file capability.
pub(super) fn gain(adm: &str, docker: &str, programs: [&str; 3]) -> Vec<Told> {
    let [setuid, setgid, capable] = programs;
    let read = |path: &str| -> Attempt { Ok(format!("{} bytes", fs::read(path)?.len())) };
    let docker = || -> Attempt {
        UnixStream::connect(docker)?;
        Ok("connected".to_owned())
    };
    // What a program of that kind prints as an ordinary one is no success.
    let unless_own = |attempt: Attempt, own: &str| match attempt {
        Ok(id) if id.trim() == own => Err(Refusal(format!("it runs as {own}"))),
        other => other,
    };
    let own = |flag: &str| run("/usr/bin/id", &[flag]).unwrap_or_default().trim().to_owned();
    vec![
        told("privileges, a file of group adm", read(adm)),
        told("privileges, a socket of group docker", docker()),
        told("privileges, setgroups", perl("my $adm = pack('I', 4); syscall(116, 1, $adm) == 0 or die qq($!\\n)", &[])),
        told("privileges, sudo", run("/usr/bin/sudo", &["-n", "/usr/bin/id", "-u"])),
        told("privileges, su", run("/usr/bin/su", &["-c", "id -u"])),
        told("privileges, a set-user-ID program of root", unless_own(run(setuid, &["-u"]), &own("-u"))),
        told("privileges, a set-group-ID program", unless_own(run(setgid, &["-g"]), &own("-g"))),
        told("privileges, a program with file capabilities", run(capable, &["--reuid", "0", "/usr/bin/id", "-u"])),
        told("privileges, making a set-user-ID program", make_setuid()),
    ]
}

/// The other half of a trick: a set-user-ID program of the account's for others to run.
fn make_setuid() -> Attempt {
    let directory = sh("mktemp -d", &[])?;
    let result = sh("cp /usr/bin/id $1/id && chmod 4755 $1/id && stat -c %a $1/id", &[directory.trim()]);
    sh("rm -r $1", &[directory.trim()])?;
    result
}

/// Makes namespaces and tries to use them for more.
pub(super) fn namespaces(pid: &str, adm: &str) -> Vec<Told> {
    let unshare =
        |flags: &str, script: &str| sh(&format!("exec unshare {flags} /bin/sh -c '{script}' sh $1 $2"), &[pid, adm]);
    let joined =
        |kind: &str| run("/usr/bin/nsenter", &["--target", pid, kind, "/bin/true"]).map(|_| "joined".to_owned());
    vec![
        told("namespaces, a user namespace", unshare("-Ur", "id -u")),
        told("namespaces, a mount in a user namespace", unshare("-Urm", "mount -t tmpfs none /tmp && echo mounted")),
        told("namespaces, a file of group adm in a user namespace", unshare("-Ur", "cat $2")),
        told("namespaces, the mask taken off in a user namespace", uncover(pid)),
        told("namespaces, the server's mount namespace joined", joined("--mount")),
        told(
            "namespaces, root directory changed to the server's",
            run("/usr/sbin/chroot", &[&format!("/proc/{pid}/root"), "/bin/true"]),
        ),
    ]
}

/// Takes the empty `/run` off, as root of a user namespace unless it is root already.
fn uncover(pid: &str) -> Attempt {
    let script = "umount --lazy /run && echo taken off";
    if rustix::process::geteuid().is_root() {
        return sh(&format!("unshare -m /bin/sh -c '{script}'"), &[pid]);
    }
    sh(&format!("unshare -Urm /bin/sh -c '{script}'"), &[pid])
}

/// Reads files, each given as `NAME=PATH`.
pub(super) fn files(words: &[&str]) -> Vec<Told> {
    let read = |path: &str| -> Attempt { Ok(format!("{} bytes", fs::read(path)?.len())) };
    let named = words.iter().filter_map(|word| word.split_once('='));
    named.map(|(name, path)| told(format!("files, {name}"), read(path))).collect()
}

/// Looks for keys: one called `shared` of the account's user keyring, and one of the server's own session keyring.
pub(super) fn keys(shared: &str, serial: &str) -> Vec<Told> {
    let available = perl("syscall(250, 0, -3, 1) >= 0 or die qq($!\\n)", &[]);
    if let Err(Refusal(why)) = available {
        let names = [
            "keys, searched for from the session's keyring",
            "keys, the server's by number",
            "keys, the account's user keyring linked",
        ];
        return names.map(|name| (name.to_owned(), Outcome::NotApplicable(format!("no keyrings: {why}")))).into();
    }
    // KEYCTL_SEARCH, KEYCTL_READ, KEYCTL_LINK; -3 is the session's keyring, -4 the user's.
    let found = "my $kind = 'user'; my $key = syscall(250, 10, -3, $kind, $ARGV[0], 0); $key >= 0 or die qq($!\\n); \
                 my $room = qq(\\0) x 64; my $count = syscall(250, 11, $key, $room, 64); \
                 $count > 0 or die qq($!\\n); print substr($room, 0, $count)";
    let by_number = "my $room = qq(\\0) x 64; my $count = syscall(250, 11, $ARGV[0] + 0, $room, 64); \
                     $count > 0 or die qq($!\\n); print substr($room, 0, $count)";
    let linked = format!("syscall(250, 8, -4, -3) == 0 or die qq($!\\n); {found}");
    vec![
        told("keys, searched for from the session's keyring", perl(found, &[shared])),
        told("keys, the server's by number", perl(by_number, &[serial])),
        told("keys, the account's user keyring linked", perl(&linked, &[shared])),
    ]
}

/// Tries to type into somebody else's terminal, to take it over, and to read and write it.
pub(super) fn terminals(other: &str) -> Vec<Told> {
    let type_in = "open(my $tty, '+<', $ARGV[0]) or die qq($!\\n); my $letter = 'x'; ioctl($tty, 0x5412, $letter) or die qq($!\\n)";
    // In a session of its own, without a terminal. TIOCSCTTY with 1 steals.
    let take = "my $steal = 1; if (my $child = fork) { waitpid($child, 0); exit($? >> 8) } require POSIX; POSIX::setsid(); \
                sysopen(my $tty, $ARGV[0], 0x102) or die qq($!\\n); ioctl($tty, 0x540e, $steal) or die qq($!\\n)";
    let write = |path: &str| -> Attempt {
        fs::write(path, "written by another\n")?;
        Ok("written".to_owned())
    };
    vec![
        told("terminals, typing into another session's", perl(type_in, &[other]).map(|_| "typed".to_owned())),
        told("terminals, taking another session's over", perl(take, &[other]).map(|_| "taken".to_owned())),
        told("terminals, writing on another session's", write(other)),
    ]
}
