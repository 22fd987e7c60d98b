//! The session is in the very directory that was approved, in mounts of its own, or there is no session.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use opencode_pty::frame::message::ErrorCode;
use support::standin::Opening;

use crate::account::{NAME, WORKSPACE};
use crate::fixture::{Fixture, exited};

/// Where the command finds itself: its path, then device and inode.
const WHERE: [&str; 3] = ["/bin/sh", "-c", "pwd -P; stat -c %d:%i ."];

fn identity(dir: impl AsFd) -> String {
    let stat = rustix::fs::fstat(dir).unwrap();
    format!("{}:{}", stat.st_dev, stat.st_ino)
}

/// Fails unless a session in `dir` is there, and that is at `path`.
fn assert_is_in(fixture: &Fixture, dir: &OwnedFd, path: &str) {
    let transcript = fixture.run_in(dir, &WHERE);
    assert_eq!(transcript.text(), format!("{path}\r\n{}\r\n", identity(dir)), "{transcript:?}");
}

/// Fails unless there is no session in `dir`, for a reason of the directory's that does not tell where it is.
fn assert_is_refused(fixture: &Fixture, dir: impl AsFd, why: &str) {
    let transcript = fixture.run_in(dir, &WHERE);
    let Some((code, message)) = &transcript.error else { panic!("{why}: {transcript:?}") };
    assert_eq!(*code, ErrorCode::BadCwd, "{why}: {message}");
    assert!(message.contains("director") && !message.contains('/'), "{why}: {message}");
    assert!(transcript.unit.is_none() && transcript.exit.is_none(), "{why}: {transcript:?}");
}

#[test]
fn the_command_is_in_the_directory_that_was_opened() {
    let fixture = Fixture::new();
    let dir = fixture.standin.open(WORKSPACE).unwrap();
    assert_is_in(&fixture, &dir, &WORKSPACE);

    let scratch = fixture.scratch();
    let delicate = format!("{scratch}/ $HOME \"é\" 'q' \\");
    fixture.root(&format!("cd {scratch} && install -d -o {NAME} ' $HOME \"é\" '\\''q'\\'' \\'"));
    assert_is_in(&fixture, &fixture.standin.open(&delicate).unwrap(), &delicate);
}

#[test]
fn a_directory_opened_as_a_place_only_is_good_enough() {
    let fixture = Fixture::new();
    let dir = fixture.standin.open_as(WORKSPACE, Opening::Path).unwrap();
    assert_is_in(&fixture, &dir, &WORKSPACE);
}

#[test]
fn the_root_directory_is_a_directory_like_others() {
    let fixture = Fixture::new();
    let dir = fixture.standin.open("/").unwrap();
    let transcript = fixture.run_in(dir, &["pwd"]);
    assert_eq!((transcript.text().as_str(), transcript.exit), ("/\r\n", Some(exited(0))));
}

#[test]
fn a_directory_that_was_renamed_meanwhile_is_the_same_directory() {
    let fixture = Fixture::new();
    let scratch = fixture.scratch();
    fixture.root(&format!("cd {scratch} && install -d -o {NAME} approved other"));
    let dir = fixture.standin.open(format!("{scratch}/approved")).unwrap();
    fixture.root(&format!("cd {scratch} && mv approved other/renamed"));

    assert_is_in(&fixture, &dir, &format!("{scratch}/other/renamed"));
}

#[test]
fn what_was_put_in_the_directorys_place_is_not_entered() {
    let fixture = Fixture::new();
    let directory = format!("install -d -o {NAME} approved");
    for decoy in ["ln -s other approved", &directory, "ln -s /etc approved"] {
        let scratch = fixture.scratch();
        fixture.root(&format!("cd {scratch} && install -d -o {NAME} approved other"));
        let dir = fixture.standin.open(format!("{scratch}/approved")).unwrap();
        fixture.root(&format!("cd {scratch} && mv approved renamed && {decoy}"));

        assert_is_in(&fixture, &dir, &format!("{scratch}/renamed"));
    }
}

#[test]
fn a_deleted_directory_is_refused() {
    let fixture = Fixture::new();
    let scratch = fixture.scratch();
    let opened = || {
        fixture.root(&format!("install -d -o {NAME} {scratch}/approved"));
        let dir = fixture.standin.open(format!("{scratch}/approved")).unwrap();
        fixture.root(&format!("rmdir {scratch}/approved"));
        dir
    };
    assert_is_refused(&fixture, opened(), "deleted");

    // The kernel shows a deleted directory's path with this behind it.
    fixture.root(&format!("install -d -o {NAME} '{scratch}/approved (deleted)'"));
    assert_is_refused(&fixture, opened(), "deleted, and another of the name it shows");

    fixture.root(&format!("ln -s {WORKSPACE} '{scratch}/decoy (deleted)'; rmdir '{scratch}/approved (deleted)'"));
    let dir = opened();
    fixture.root(&format!("install -d -o {NAME} {scratch}/approved"));
    assert_is_refused(&fixture, dir, "deleted, and another in its place");
}

#[test]
fn a_directory_the_account_cannot_search_is_refused() {
    let fixture = Fixture::new();
    for (owner, mode) in [("root", "700"), ("eve", "700"), ("root", "744"), ("root", "766"), (&NAME, "600")] {
        let place = format!("/srv/{owner}-{mode}");
        fixture.root(&format!("install -d -o {owner} -g {owner} -m {mode} {place}"));
        fixture.remove_at_end(&place);
        // As root, from outside: somebody handed it in.
        let dir = OwnedFd::from(File::open(fixture.host.path(&place)).unwrap());
        assert_is_refused(&fixture, dir, &place);
    }
}

#[test]
fn a_directory_below_one_the_account_cannot_search_is_refused() {
    let fixture = Fixture::new();
    fixture.root(&format!("install -d -o eve -g eve -m 700 /srv/closed && install -d -o {NAME} /srv/closed/inner"));
    fixture.remove_at_end("/srv/closed");
    let dir = OwnedFd::from(File::open(fixture.host.path("/srv/closed/inner")).unwrap());
    assert_is_refused(&fixture, dir, "below eve's");
}

#[test]
fn a_directory_that_only_a_dropped_group_could_enter_is_refused() {
    let fixture = Fixture::new();
    fixture.root("install -d -o root -g docker -m 750 /srv/for-docker");
    fixture.remove_at_end("/srv/for-docker");
    // The server has the group, the session has not.
    let dir = fixture.standin.open("/srv/for-docker").unwrap();
    assert_is_refused(&fixture, dir, "docker's");
}

#[test]
fn the_servers_private_tmp_is_the_sessions() {
    let fixture = Fixture::new();
    let made =
        fixture.standin.spawn(&["/bin/sh", "-c", "mkdir -p /tmp/of-the-server && echo hi >/tmp/of-the-server/f"]);
    assert!(made.unwrap().status.success());

    assert_eq!(fixture.ask(&["cat", "/tmp/of-the-server/f"]), "hi");
    let dir = fixture.standin.open("/tmp/of-the-server").unwrap();
    assert_is_in(&fixture, &dir, "/tmp/of-the-server");

    fixture.ask_sh("echo back >/tmp/of-the-server/f");
    let read = fixture.standin.spawn(&["/bin/sh", "-c", "cat /tmp/of-the-server/f && rm -r /tmp/of-the-server"]);
    assert_eq!(read.unwrap().text(), "back\n");
}

#[test]
fn the_hosts_tmp_is_not_the_sessions() {
    let fixture = Fixture::new();
    fixture.root(&format!("install -d -o {NAME} /tmp/of-the-host"));
    fixture.remove_at_end("/tmp/of-the-host");
    assert_eq!(fixture.ask_sh("ls -d /tmp/of-the-host 2>/dev/null || echo none"), "none");

    let dir = OwnedFd::from(File::open(fixture.host.path("/tmp/of-the-host")).unwrap());
    assert_is_refused(&fixture, &dir, "the host's /tmp");

    // Nor is one that happens to be where the host's would be.
    assert!(fixture.standin.spawn(&["mkdir", "/tmp/of-the-host"]).unwrap().status.success());
    assert_is_refused(&fixture, &dir, "the host's /tmp, and one of that name in the server's");
    assert!(fixture.standin.spawn(&["rmdir", "/tmp/of-the-host"]).unwrap().status.success());
}

#[test]
fn the_directory_may_go_while_the_session_runs() {
    let fixture = Fixture::new();
    let scratch = fixture.scratch();
    fixture.root(&format!("install -d -o {NAME} {scratch}/going"));
    let dir = fixture.standin.open(format!("{scratch}/going")).unwrap();
    let transcript = fixture.run_in(dir, &["/bin/sh", "-c", "rmdir ../going; echo still; exit 6"]);
    assert_eq!((transcript.text().as_str(), transcript.exit), ("still\r\n", Some(exited(6))));
}
