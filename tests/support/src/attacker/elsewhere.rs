//! Work that would go on elsewhere: asked of daemons, left behind, moved to another cgroup.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::{Attempt, Refusal, Told, perl, run, sh, told};

/// How long a job that was accepted may take to run. Chosen: at(1) needs a second or two.
const JOB_TIME: Duration = Duration::from_secs(30);
/// Between two looks for its file.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Asks whoever would listen for work outside; each job writes which cgroup it runs in to a file in `directory`.
pub(super) fn work(directory: &str) -> io::Result<Vec<Told>> {
    let own = fs::read_to_string("/proc/self/cgroup")?;
    let attempt = |name: &str, script: &str| -> Attempt {
        let file = Path::new(directory).join(name);
        let job = format!("cat /proc/self/cgroup >{0}.new && mv {0}.new {0}", file.display());
        sh(script, &[&job])?;
        let deadline = Instant::now() + JOB_TIME;
        let cgroup = loop {
            match fs::read_to_string(&file) {
                Ok(cgroup) => break cgroup,
                Err(error) if Instant::now() > deadline => {
                    return Err(Refusal(format!("accepted, never run: {error}")));
                }
                Err(_) => thread::sleep(LOOK_AGAIN),
            }
        };
        fs::remove_file(&file)?;
        if cgroup == own { Err(Refusal("it ran inside".to_owned())) } else { Ok(format!("it ran in {cgroup}")) }
    };
    Ok(vec![
        told("work, at", attempt("at", "echo \"$1\" | at now")),
        told(
            "work, crontab",
            sh("echo '0 0 1 1 * true' | crontab - && crontab -r", &[]).map(|_| "accepted".to_owned()),
        ),
        told("work, a tmux server", attempt("tmux", "tmux new-session -d \"$1\"")),
        told(
            "work, systemd-run --user",
            attempt("user", "XDG_RUNTIME_DIR=/run/user/$(id -u) systemd-run --quiet --user -- /bin/sh -c \"$1\""),
        ),
        told("work, systemd-run", attempt("system", "systemd-run --quiet -- /bin/sh -c \"$1\"")),
        told("work, a manager asked by busctl", run("busctl", &["--no-pager", "list"]).map(|_| "answered".to_owned())),
        told(
            "work, another session's unit stopped",
            run("systemctl", &["stop", "opencode-pty-ffffffffffffffffffffffffffffffff.service"])
                .map(|_| "asked".to_owned())
                .or_else(|Refusal(why)| if why.contains("not loaded") { Ok(why) } else { Err(Refusal(why)) }),
        ),
    ])
}

/// The ways to leave something behind; each is a Perl program that gets the mark as its argument, and goes away by itself
/// after ten minutes.
const DAEMONS: [(&str, &str); 8] = [
    ("setsid", "require POSIX; POSIX::setsid(); sleep 600"),
    ("double-fork", "exit if fork; exit if fork; sleep 600"),
    (
        "daemon",
        "require POSIX; exit if fork; POSIX::setsid(); exit if fork; chdir '/'; umask 0; POSIX::close($_) for 0 .. 99; sleep 600",
    ),
    (
        "deaf",
        "require POSIX; $SIG{$_} = 'IGNORE' for qw(TERM HUP INT QUIT USR1 USR2); exit if fork; POSIX::setsid(); sleep 600 while 1",
    ),
    ("stopped", "require POSIX; exit if fork; POSIX::setsid(); kill 'STOP', $$; sleep 600"),
    (
        "running-away",
        // Rests now and then, as a look that takes longer than a process lives, on a slow machine, would never see it.
        "require POSIX; POSIX::setsid(); for (1 .. 8700) { exit if fork; select(undef, undef, undef, $_ % 20 ? 0.02 : 1) }",
    ),
    ("own-group", "exit if fork; setpgrp(0, 0); sleep 600"),
    ("namespace", "exit if fork; exec 'unshare', '-Urpf', 'perl', '-e', 'sleep 600', @ARGV"),
];

/// Leaves a daemon behind in each way. Its outcome is seen later, from outside: whether one with this mark is left.
pub(super) fn daemons(mark: &str) -> io::Result<Vec<Told>> {
    for (way, program) in DAEMONS {
        Command::new("/usr/bin/perl")
            .args(["-e", program, &format!("{mark}-{way}-")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
    }
    Ok(DAEMONS.map(|(way, _)| told(format!("daemons, {way}"), Ok("started".to_owned()))).into())
}

/// Tries to leave its cgroup, to make one, and to command those of others. `slice`: the sessions', below the root.
pub(super) fn cgroups(slice: &str) -> Vec<Told> {
    let root = "/sys/fs/cgroup";
    let server = "/system.slice/opencode-v2.service";
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default().to_owned();
    let opens = |path: String| -> Attempt {
        OpenOptions::new().write(true).open(path)?;
        Ok("opened".to_owned())
    };
    let moves = |group: &str| -> Attempt {
        fs::write(format!("{root}{group}/cgroup.procs"), std::process::id().to_string())?;
        let back = fs::write(format!("{root}{own}/cgroup.procs"), std::process::id().to_string());
        Ok(back.map_or_else(|error| format!("moved; not back: {error}"), |()| "moved".to_owned()))
    };
    let make = || -> Attempt {
        let mine = format!("{root}{own}/mine");
        fs::create_dir(&mine)?;
        fs::remove_dir(&mine)?;
        Ok("made".to_owned())
    };
    vec![
        told("cgroups, moving into the server's", moves(server)),
        told("cgroups, moving into another below the slice", opens(format!("{root}{slice}/cgroup.procs"))),
        told("cgroups, moving into the root", opens(format!("{root}/cgroup.procs"))),
        told("cgroups, making one below its own", make()),
        told("cgroups, its own limits", opens(format!("{root}{own}/cgroup.max.depth"))),
        told("cgroups, the server's frozen", opens(format!("{root}{server}/cgroup.freeze"))),
        told("cgroups, the server's killed", opens(format!("{root}{server}/cgroup.kill"))),
        told(
            "cgroups, a mount of its own",
            perl(
                "exec 'unshare', (($> == 0) ? '-m' : '-UrmC'), '/bin/sh', '-c', \
                 'mount -t cgroup2 none /tmp && echo 0 >/tmp/cgroup.procs && echo moved'",
                &[],
            ),
        ),
    ]
}
