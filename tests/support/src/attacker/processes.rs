//! The server's process: looked into, signalled, limited.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal};

use super::{Attempt, Refusal, Told, perl, run, sh, told};

fn pid(text: &str) -> io::Result<Pid> {
    text.parse().ok().and_then(Pid::from_raw).ok_or_else(|| io::Error::other(format!("no pid '{text}'")))
}

/// Files of `/proc/PID` that tell or take.
const FILES: [&str; 13] = [
    "environ",
    "auxv",
    "maps",
    "smaps",
    "smaps_rollup",
    "numa_maps",
    "pagemap",
    "io",
    "syscall",
    "stack",
    "personality",
    "fdinfo/0",
    "task/PID/environ",
];
const LINKS: [&str; 5] = ["root", "cwd", "exe", "fd/0", "ns/mnt"];
const DIRECTORIES: [&str; 5] = ["root/", "root/home", "cwd/", "fd", "map_files"];

/// Looks into the process, whose memory has something at `address` (hexadecimal) and whose environment has `canary`.
pub(super) fn look_into(text: &str, address: &str, canary: &str) -> io::Result<Vec<Told>> {
    let target = pid(text)?;
    let address = u64::from_str_radix(address, 16).map_err(io::Error::other)?;
    let mut done = Vec::new();
    // Root alone may read a stack.
    for name in FILES.into_iter().filter(|name| *name != "stack") {
        let path = format!("/proc/{text}/{}", name.replace("PID", text));
        let begin = || -> Attempt {
            let mut bytes = [0; 16];
            let count = File::open(&path)?.read(&mut bytes)?;
            Ok(format!("{count} bytes"))
        };
        done.push(told(format!("server, /proc/PID/{name}"), begin()));
    }
    for name in LINKS {
        let link = fs::read_link(format!("/proc/{text}/{name}"));
        done.push(told(
            format!("server, link /proc/PID/{name}"),
            link.map(|to| to.display().to_string()).map_err(Refusal::from),
        ));
    }
    for name in DIRECTORIES {
        let count = fs::read_dir(format!("/proc/{text}/{name}")).map(|entries| format!("{} entries", entries.count()));
        done.push(told(format!("server, directory /proc/PID/{name}"), count.map_err(Refusal::from)));
    }
    let memory = |write: bool| -> Attempt {
        let file = OpenOptions::new().read(true).write(write).open(format!("/proc/{text}/mem"))?;
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, address)?;
        // What is there already: nothing changes.
        if write {
            file.write_all_at(&bytes, address)?;
        }
        Ok("8 bytes".to_owned())
    };
    done.push(told("server, its memory read through /proc/PID/mem", memory(false)));
    done.push(told("server, its memory written through /proc/PID/mem", memory(true)));
    let take = || -> Attempt {
        let held = rustix::process::pidfd_open(target, PidfdFlags::empty())?;
        rustix::process::pidfd_getfd(&held, 0, PidfdGetfdFlags::empty())?;
        Ok("its descriptor 0".to_owned())
    };
    done.push(told("server, pidfd_getfd", take()));
    let address = format!("{address:x}");
    let vectors = "my ($pid, $at, $room) = ($ARGV[0] + 0, hex $ARGV[1], qq(\\0) x 8); \
                   my ($here, $there) = (pack('PJ', $room, 8), pack('JJ', $at, 8));";
    let calls = [
        ("process_vm_readv", format!("{vectors} syscall(310, $pid, $here, 1, $there, 1, 0) == 8 or die qq($!\\n)")),
        (
            "process_vm_writev",
            format!(
                "{vectors} (syscall(310, $pid, $here, 1, $there, 1, 0) == 8 and \
                 syscall(311, $pid, $here, 1, $there, 1, 0) == 8) or die qq($!\\n)"
            ),
        ),
        ("kcmp", "syscall(312, $$ + 0, $ARGV[0] + 0, 0, 0, 0) >= 0 or die qq($!\\n)".to_owned()),
        ("ptrace, seized", "syscall(101, 0x4206, $ARGV[0] + 0, 0, 0) == 0 or die qq($!\\n)".to_owned()),
        (
            "ptrace, attached",
            // The tracer's end lets the process go on.
            "syscall(101, 16, $ARGV[0] + 0, 0, 0) == 0 or die qq($!\\n); waitpid($ARGV[0], 0x40000000); \
             syscall(101, 17, $ARGV[0] + 0, 0, 0)"
                .to_owned(),
        ),
    ];
    for (name, program) in calls {
        let attempt = perl(&program, &[text, &address]).map(|_| "done".to_owned());
        done.push(told(format!("server, {name}"), attempt));
    }
    done.push(told("a secret in any process's environment", find_in_environments(canary)));
    Ok(done)
}

fn find_in_environments(canary: &str) -> Attempt {
    let mut seen = 0;
    for entry in fs::read_dir("/proc")?.filter_map(Result::ok) {
        let Ok(environment) = fs::read(entry.path().join("environ")) else { continue };
        seen += 1;
        if environment.windows(canary.len()).any(|window| window == canary.as_bytes()) {
            return Ok("found".to_owned());
        }
    }
    Err(Refusal(format!("not in the {seen} that can be read")))
}

/// Signals the process, with one that is ignored.
pub(super) fn signal(text: &str) -> io::Result<Vec<Told>> {
    let target = pid(text)?;
    let sent = |result: rustix::io::Result<()>| result.map(|()| "sent".to_owned()).map_err(Refusal::from);
    let by_pidfd = || {
        let held = rustix::process::pidfd_open(target, PidfdFlags::empty())?;
        rustix::process::pidfd_send_signal(held, Signal::URG)
    };
    let group = || rustix::process::kill_process_group(rustix::process::getpgid(Some(target))?, Signal::URG);
    let call = |call: &str| {
        perl(&format!("my $information = pack('iiix4x112', 23, 0, -1); syscall({call}) == 0 or die qq($!\\n)"), &[text])
            .map(|_| "sent".to_owned())
    };
    Ok(vec![
        told("signal, asked whether it could", sent(rustix::process::test_kill_process(target))),
        told("signal, kill", sent(rustix::process::kill_process(target, Signal::URG))),
        told("signal, kill of its process group", sent(group())),
        told("signal, pidfd_send_signal", sent(by_pidfd())),
        told("signal, tgkill", call("234, $ARGV[0] + 0, $ARGV[0] + 0, 23")),
        told("signal, tkill", call("200, $ARGV[0] + 0, 23")),
        told("signal, rt_sigqueueinfo", call("129, $ARGV[0] + 0, 23, $information")),
        told("signal, rt_tgsigqueueinfo", call("297, $ARGV[0] + 0, $ARGV[0] + 0, 23, $information")),
    ])
}

/// Sets what limits the process, to what it is.
pub(super) fn limit(text: &str) -> io::Result<Vec<Told>> {
    let target = pid(text)?;
    // Asking is open to everybody of the account, wherever it runs.
    let rlimit = |option: &str| {
        let script = "what=$(prlimit --pid $1 $2 --noheadings --raw --output SOFT,HARD | tr ' ' :) && \
                      prlimit --pid $1 \"$2=$what\" && echo \"set to $what\"";
        sh(script, &[text, option])
    };
    let nice = || -> Attempt {
        let priority = rustix::process::getpriority_process(Some(target))?;
        rustix::process::setpriority_process(Some(target), priority)?;
        Ok(format!("set to {priority}"))
    };
    let affinity = || -> Attempt {
        let set = rustix::thread::sched_getaffinity(Some(target))?;
        rustix::thread::sched_setaffinity(Some(target), &set)?;
        Ok("set".to_owned())
    };
    let score = || -> Attempt {
        let path = format!("/proc/{text}/oom_score_adj");
        let score = fs::read_to_string(&path)?;
        fs::write(&path, &score)?;
        Ok(format!("set to {}", score.trim()))
    };
    Ok(vec![
        told("limits, prlimit of descriptors", rlimit("--nofile")),
        told("limits, prlimit of CPU time", rlimit("--cpu")),
        told("limits, nice value", nice()),
        told("limits, CPU affinity", affinity()),
        told("limits, scheduling policy", run("/usr/bin/chrt", &["--other", "--pid", "0", text])),
        told("limits, I/O priority", run("/usr/bin/ionice", &["-c", "2", "-n", "4", "-p", text])),
        told("limits, who is killed first when memory is short", score()),
    ])
}
