//! The supervisor itself: how it begins, what it refuses to begin with, what it finds, and how it ends.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use opencode_pty::frame::message::{ErrorCode, Exit};
use rustix::process::Signal;
use support::fake_manager::{JobEnd, Unit};

use crate::scene::{ACCOUNT_ID, LONG, SUPERVISOR_UNIT, Scene, Setting, WHILE};

#[test]
fn it_is_ready_with_a_socket_that_only_root_and_the_account_can_use() {
    let mut scene = Scene::set();
    let metadata = fs::symlink_metadata(scene.socket()).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!((metadata.uid(), metadata.gid(), metadata.permissions().mode() & 0o7777), (0, ACCOUNT_ID, 0o660));
    let (peer, _) = scene.session();
    assert!(scene.supervisor().wait_for_notice("STATUS=1/16 sessions"));
    drop(peer);
    assert!(scene.supervisor().wait_for_notice("STATUS=0/16 sessions"));
}

#[test]
fn term_and_int_end_every_session_and_then_the_supervisor_with_0() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut scene = Scene::set();
        let (mut running, _) = scene.session();
        scene.fake.with(|state| state.script.job = JobEnd::Held);
        let mut starting = scene.asked();
        scene.fake.wait("the second start", |state| (state.called("StartTransientUnit", "") == 2).then_some(()));
        let mut idle = scene.peer();
        scene.fake.wait("the third peer to be known", |state| (state.called("GetUnitByPIDFD", "") == 3).then_some(()));

        scene.supervisor().signal(signal);

        let transcript = running.read_to_end(LONG).unwrap();
        assert_eq!(transcript.exit, Some(Exit::new(2, 15, "success").unwrap()), "{transcript:?}");
        let transcript = starting.read_to_end(LONG).unwrap();
        assert_eq!(transcript.error_code(), Some(ErrorCode::Shutdown), "{transcript:?}");
        let transcript = idle.read_to_end(LONG).unwrap();
        assert!(matches!(transcript.error_code(), None | Some(ErrorCode::Shutdown)), "{transcript:?}");
        let (status, log) = scene.supervisor().wait();
        assert_eq!(status.code(), Some(0), "{log}");
        scene.fake.wait_until_empty();
        assert!(!scene.socket().exists(), "the socket is left behind");
    }
}

#[test]
fn a_supervisor_without_sessions_ends_at_once_and_a_second_one_can_follow() {
    let mut scene = Scene::set();
    scene.check_that_a_session_works();
    scene.supervisor().signal(Signal::TERM);
    let (status, log) = scene.supervisor().wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn a_stale_socket_is_replaced() {
    let scene = Scene::with(Setting {
        before: Box::new(|scene| drop(UnixListener::bind(scene.socket()).unwrap())),
        ..Setting::default()
    });
    scene.check_that_a_session_works();
}

/// The supervisor ends with 1 and says this, on one line.
fn assert_does_not_start(setting: Setting, wanted: &str) -> Scene {
    let mut scene = Scene::without_waiting(setting);
    let (status, log) = scene.supervisor().wait();
    assert_eq!(status.code(), Some(1), "{log}");
    let lines: Vec<_> = log.lines().filter(|line| line.contains("opencode-pty supervisor: ")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines.concat().contains(wanted), "{log}");
    scene
}

#[test]
fn anything_but_a_stale_socket_in_its_place_is_an_error_and_stays() {
    let scene = assert_does_not_start(
        Setting { before: Box::new(|scene| fs::write(scene.socket(), "precious").unwrap()), ..Setting::default() },
        "supervisor.sock",
    );
    assert_eq!(fs::read_to_string(scene.socket()).unwrap(), "precious");

    let scene = assert_does_not_start(
        Setting { before: Box::new(|scene| fs::create_dir(scene.socket()).unwrap()), ..Setting::default() },
        "supervisor.sock",
    );
    assert!(scene.socket().is_dir());

    let scene = assert_does_not_start(
        Setting {
            before: Box::new(|scene| std::os::unix::fs::symlink("/dev/null", scene.socket()).unwrap()),
            ..Setting::default()
        },
        "supervisor.sock",
    );
    assert!(fs::symlink_metadata(scene.socket()).unwrap().is_symlink());
}

#[test]
fn a_socket_that_somebody_listens_on_is_not_taken_away() {
    let listener = std::sync::Arc::new(std::sync::Mutex::new(None));
    let kept = std::sync::Arc::clone(&listener);
    let scene = assert_does_not_start(
        Setting {
            before: Box::new(move |scene| {
                *kept.lock().unwrap() = Some(UnixListener::bind(scene.socket()).unwrap());
            }),
            ..Setting::default()
        },
        "supervisor.sock",
    );
    assert!(scene.socket().exists());
    drop(listener);
}

#[test]
fn it_refuses_to_run_as_anybody_but_root() {
    let output = Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .arg(env!("CARGO_BIN_EXE_opencode-pty"))
        .args(["supervisor", "--account", "nobody", "--socket", "/tmp/never.sock"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("root"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[test]
fn an_account_that_does_not_exist_or_is_root_is_refused() {
    drop(assert_does_not_start(
        Setting { options: vec![("--account", "no-such-account")], ..Setting::default() },
        "no-such-account",
    ));
    drop(assert_does_not_start(Setting { options: vec![("--account", "root")], ..Setting::default() }, "root"));
}

#[test]
fn a_bus_that_is_not_there_is_one_clear_line() {
    drop(assert_does_not_start(
        Setting { options: vec![("--bus", "unix:path=/nonexistent/bus")], ..Setting::default() },
        "bus",
    ));
}

#[test]
fn a_manager_with_another_pid_is_not_believed() {
    let scene = assert_does_not_start(Setting { manager_pid: 1, ..Setting::default() }, "org.freedesktop.systemd1");
    scene.fake.with(|state| assert_eq!(state.called("ListUnitsByPatterns", ""), 0, "an impostor was asked"));
}

#[test]
fn wrong_arguments_are_usage_and_64() {
    for args in [
        vec!["--no-such-option"],
        vec!["--max-sessions", "many"],
        vec!["--max-sessions"],
        vec!["--manager-pid", "-1"],
        vec!["a-word"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_opencode-pty"))
            .arg0("opencode-pty-supervisor")
            .args(&args)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(64), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
}

/// Names of sessions, and names that only look like them.
const ORPHAN: [&str; 5] = [
    "opencode-pty-00000000000000000000000000000001.service",
    "opencode-pty-00000000000000000000000000000002.service",
    "opencode-pty-00000000000000000000000000000003.service",
    "opencode-pty-00000000000000000000000000000004.service",
    "opencode-pty-00000000000000000000000000000005.service",
];

#[test]
fn what_an_earlier_supervisor_left_is_gone_before_the_socket_is_there() {
    let scene = Scene::with(Setting {
        before: Box::new(|scene| {
            scene.fake.with(|state| {
                for (name, active, job) in [
                    (ORPHAN[0], "active", None),
                    (ORPHAN[1], "failed", None),
                    (ORPHAN[2], "activating", Some((7, "start"))),
                    // A start that its predecessor left queued: inactive, with a job.
                    (ORPHAN[3], "inactive", Some((8, "start"))),
                    (ORPHAN[4], "deactivating", Some((9, "stop"))),
                ] {
                    let mut unit = Unit::left_behind(name, active, SUPERVISOR_UNIT);
                    unit.job = job;
                    state.units.insert(name.to_owned(), unit);
                }
            });
            let fake = scene.fake.clone();
            std::thread::spawn(move || {
                // The one that is being stopped takes a while.
                std::thread::sleep(WHILE);
                fake.end_unit(ORPHAN[4], (2, 15, "success"));
            });
        }),
        ..Setting::default()
    });
    scene.fake.with(|state| {
        for name in [ORPHAN[0], ORPHAN[2], ORPHAN[3], ORPHAN[4]] {
            let unit = &state.units[name];
            assert!(
                unit.removed || (unit.job.is_none() && matches!(unit.active.as_str(), "inactive" | "failed")),
                "{unit:?}"
            );
        }
        for call in state.calls.iter().filter(|call| call.method == "StopUnit") {
            assert_eq!(call.detail, "replace");
        }
    });
    scene.check_that_a_session_works();
}

#[test]
fn units_that_only_look_like_orphans_are_left_alone() {
    let bystanders = [
        // Another supervisor's, by its BindsTo.
        ("opencode-pty-0000000000000000000000000000000a.service", "other.service"),
        ("opencode-pty-0000000000000000000000000000000b.service", "opencode-pty-it.service.evil"),
        // Not the grammar.
        ("opencode-pty-0000000000000000000000000000000.service", SUPERVISOR_UNIT),
        ("opencode-pty-000000000000000000000000000000000.service", SUPERVISOR_UNIT),
        ("opencode-pty-0000000000000000000000000000000A.service", SUPERVISOR_UNIT),
        ("opencode-pty-0000000000000000000000000000000g.service", SUPERVISOR_UNIT),
        ("opencode-pty-mine.service", SUPERVISOR_UNIT),
        ("opencode-pty-supervisor.service", SUPERVISOR_UNIT),
    ];
    let scene = Scene::with(Setting {
        before: Box::new(move |scene| {
            scene.fake.with(|state| {
                for (name, binds_to) in bystanders {
                    state.units.insert(name.to_owned(), Unit::left_behind(name, "active", binds_to));
                }
            });
        }),
        ..Setting::default()
    });
    scene.fake.with(|state| {
        for (name, _) in bystanders {
            assert_eq!(state.called("StopUnit", name) + state.called("KillUnit", name), 0, "{name}");
            assert_eq!(state.units[name].active, "active");
        }
    });
}

#[test]
fn running_out_of_descriptors_neither_ends_nor_spins_the_supervisor() {
    let mut scene = Scene::with(Setting { wrapper: vec!["prlimit", "--nofile=40:40"], ..Setting::default() });
    let mut held = Vec::new();
    for _ in 0..60 {
        // Root is a stranger and is closed at once; the server's own hold what they get.
        if let Ok(peer) = scene.standin.peer() {
            held.push(peer);
        }
    }
    let cpu = |scene: &mut Scene| {
        let stat = fs::read_to_string(format!("/proc/{}/stat", scene.supervisor().pid())).unwrap();
        let fields: Vec<u64> =
            stat.rsplit_once(')').unwrap().1.split_whitespace().filter_map(|f| f.parse().ok()).collect();
        // utime and stime are fields 14 and 15, 10 and 11 numbers after the state.
        fields[10] + fields[11]
    };
    let before = cpu(&mut scene);
    std::thread::sleep(WHILE * 3);
    let ticks = cpu(&mut scene) - before;
    assert!(ticks < 45, "{ticks} ticks of CPU in 0.9 s");
    assert!(scene.supervisor().is_running());
    drop(held);
    scene.wait_for_a_session();
}

#[test]
fn notifications_that_nobody_reads_do_not_hold_it_up() {
    // As when PID 1 is frozen. The socket's queue holds a few dozen of them at most (max_dgram_qlen).
    let mut scene = Scene::set();
    scene.supervisor().leave_notices_unread();
    let queue: usize = fs::read_to_string("/proc/sys/net/unix/max_dgram_qlen").unwrap().trim().parse().unwrap();
    for _ in 0..queue.min(600) + 3 {
        scene.check_that_a_session_works();
    }
}

#[test]
fn the_watchdog_is_fed_from_the_loop_that_does_the_work() {
    let mut scene = Scene::with(Setting { wrapper: vec!["env", "WATCHDOG_USEC=400000"], ..Setting::default() });
    for _ in 0..3 {
        assert!(scene.supervisor().wait_for_notice("WATCHDOG=1"));
    }
}

#[test]
fn an_idle_supervisor_with_an_idle_session_does_not_wake_up() {
    let mut scene = Scene::set();
    let (_peer, _) = scene.session();
    let pid = scene.supervisor().pid();
    // Of each thread: one that was there for the start may end meanwhile, and its file with it.
    let wake_ups = || -> BTreeMap<OsString, u64> {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        tasks
            .filter_map(|task| {
                let task = task.unwrap();
                let status = fs::read_to_string(task.path().join("status")).ok()?;
                let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
                Some((task.file_name(), line.unwrap().trim().parse().unwrap()))
            })
            .collect()
    };
    // What the start set in motion comes to rest first. The last of it is the status, a while later.
    assert!(scene.supervisor().wait_for_notice("STATUS=1/16 sessions"));
    let mut before = BTreeMap::new();
    while before != wake_ups() {
        before = wake_ups();
        std::thread::sleep(WHILE);
    }
    std::thread::sleep(WHILE * 7);
    let woken: u64 = wake_ups().iter().map(|(thread, count)| count - before.get(thread).unwrap_or(&0)).sum();
    assert_eq!(woken, 0, "woken {woken} times in two seconds");
}

#[test]
fn neither_arguments_nor_input_nor_output_nor_the_directory_are_logged() {
    let mut scene = Scene::set();
    let mut peer = scene.standin.start(scene.path("work"), 60, &["/bin/secret-command", "secret-argument"]).unwrap();
    peer.started(LONG).unwrap();
    peer.input(b"secret-text").unwrap();
    peer.output_until(b"secret-text", LONG).unwrap();
    peer.stop().unwrap();
    peer.read_to_end(LONG).unwrap();
    scene.supervisor().signal(Signal::TERM);
    let (_, log) = scene.supervisor().wait();
    assert!(log.contains("opencode-pty-"), "the session is not in the log:\n{log}");
    assert!(!log.contains("secret") && !log.contains("/work"), "{log}");
}

#[test]
fn every_roles_help_is_printed_and_ends_with_0() {
    for role in ["supervisor", "client", "launcher"] {
        let output = Command::new(env!("CARGO_BIN_EXE_opencode-pty")).args([role, "--help"]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{role}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(String::from_utf8_lossy(&output.stdout).to_lowercase().contains("exit"), "{role}");
    }
}
