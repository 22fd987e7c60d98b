//! docs/install.md, docs/root-acceptance.md and docs/cutover.md, followed to the letter: their own commands, on hosts on which
//! nothing is installed, with the stand-in where the server would be.
//!
//! The tree as it is is built and written by `cargo xtask dist`, and both suites go through installation, acceptance, cutover,
//! upgrade, rollback and removal. Needs root, and some minutes for the builds: `cargo xtask test` runs it,
//! plain `cargo test` does not.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::Duration;

use opencode_pty::frame::message::Exit;
use support::host::{BootOptions, Host, Suite, WORKSPACE, build_standin, target, workspace};
use support::page;
use support::readiness::{MARKER_PATH, revision_line};
use support::standin::{CONTROL_PATH, Standin};

/// How long anything that normally takes milliseconds may take. Chosen: a loaded machine is no failure.
const SOON: Duration = Duration::from_mins(1);

const PAGES: [&str; 3] = ["docs/install.md", "docs/root-acceptance.md", "docs/cutover.md"];

/// Where the units say that the server is.
const SERVER: &str =
    "/home/byk/Code/opencode-v2-pilot/packages/cli/dist-v2-pilot-final/cli-node-linux-x64/bin/opencode2-node";

/// What `cargo xtask dist` wrote, and the revision line that a reviewer computed without it.
struct Dist {
    path: PathBuf,
    reviewed: String,
}

/// A version and the next one.
struct Dists {
    first: Dist,
    second: Dist,
    standin: PathBuf,
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{stdout}{stderr}", output.status);
    stdout.trim_end().to_owned()
}

/// The pages, as they are when the rehearsal begins: the builds take their time.
fn pages() -> &'static [String] {
    static TEXTS: OnceLock<Vec<String>> = OnceLock::new();
    TEXTS.get_or_init(|| PAGES.iter().map(|name| fs::read_to_string(workspace().join(name)).unwrap()).collect())
}

/// The one block of all pages that has this name.
fn block(name: &str) -> String {
    let blocks: Vec<String> = pages().iter().filter_map(|text| page::block(text, name)).collect();
    let [block] = blocks.as_slice() else { panic!("{} pages have a block '{name}'", blocks.len()) };
    block.clone()
}

fn dists() -> &'static Dists {
    static DISTS: OnceLock<Dists> = OnceLock::new();
    DISTS.get_or_init(|| {
        let scratch = Scratch::new();
        let at = |name: &str| scratch.0.join(name);
        let git = |words: &[&str]| {
            let mut command = Command::new("git");
            command.args(["-c", "user.name=rehearsal", "-c", "user.email=rehearsal@rehearsal.invalid"]).args(words);
            command
        };
        // The tree as it is, changes that are in no commit included: a repository of its own has it as one.
        run(git(&["init", "--quiet", "--bare"]).arg(at("git")));
        let here = |words: &[&str]| {
            let mut command = git(&["-c", "core.bare=false"]);
            command
                .arg("--git-dir")
                .arg(at("git"))
                .arg("--work-tree")
                .arg(workspace())
                .args(words)
                .current_dir(workspace());
            run(&mut command)
        };
        here(&["add", "--all", "."]);
        here(&["commit", "--quiet", "--message", "The tree as it is"]);
        let checkout = at("checkout");
        run(git(&["clone", "--quiet"]).arg(at("git")).arg(&checkout));

        let build = |name: &str| {
            let path = target().join("rehearsal").join(name);
            let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
            run(command.arg("dist").arg("--repository").arg(&checkout).arg("--out").arg(&path));
            // What a reviewer does: nothing of ours but the line on the page.
            let hash = run(Command::new("sh").args(["-euc", &block("source-hash")]).current_dir(&checkout));
            let commit = run(git(&["rev-parse", "HEAD"]).current_dir(&checkout));
            Dist { path, reviewed: revision_line(&commit, &hash) }
        };
        let first = build("first");
        run(Command::new("sh").args(["-euc", NEXT_VERSION]).current_dir(&checkout));
        run(git(&["commit", "--quiet", "--all", "--message", "The next version"]).current_dir(&checkout));
        let second = build("second");

        let binary = |dist: &Dist| fs::read(dist.path.join("opencode-pty")).unwrap();
        assert!(binary(&first) != binary(&second), "the next version is no other binary");
        Dists { first, second, standin: build_standin().unwrap() }
    })
}

/// What makes the next version of a checkout: another number, which the binary has in it, too. Only the first is a version that
/// is meant to be fast; this one is meant to be built in a fraction of the time.
const NEXT_VERSION: &str = r#"
    sed -i '/^\[profile.release\]$/,/^$/ { s/^opt-level = 3$/opt-level = 0/; s/^lto = "fat"$/lto = false/; s/^codegen-units = 1$/codegen-units = 16/ }' Cargo.toml
    test "$(sed -n '/^\[profile.release\]$/,/^$/p' Cargo.toml | grep -cx 'opt-level = 0\|lto = false\|codegen-units = 16')" = 3
    sed -i 's/^version = "[^"]*"$/version = "0.0.99"/' Cargo.toml
    sed -i '/^name = "\(opencode-pty\|support\|xtask\)"$/ { n; s/"[^"]*"/"0.0.99"/ }' Cargo.lock
"#;

/// A directory that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("opencode-pty-rehearsal-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        // One of the builds is another user's.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o711)).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A host without the product, and what has been followed on it.
struct Rehearsal {
    host: Host,
    followed: BTreeSet<String>,
}

impl Rehearsal {
    fn begin(suite: Suite) -> Self {
        let dists = dists();
        let name = format!("rehearsal-{suite}-{}", std::process::id());
        let host = Host::boot(&BootOptions { name, suite, ephemeral: true }, &mut |line| println!("{line}")).unwrap();
        for (dist, to) in [(&dists.first, "/root/dist-1"), (&dists.second, "/root/dist-2")] {
            run(Command::new("cp").arg("--recursive").arg(&dist.path).arg(host.path(to)));
        }
        // What is on a host before the product is: the account's files, a server, the old server.
        host.sh_ok(&format!(
            "install -d -o byk -g byk {WORKSPACE} /home/byk/standin $(dirname {SERVER}) /home/byk/.opencode \\
                /home/byk/.local/share/opencode-v2-pilot
            printf '#!/bin/sh\\nexec /home/byk/standin/opencode-standin serve\\n' >{SERVER}
            chmod 0755 {SERVER}
            echo 'OPENCODE_CANARY=x' >/home/byk/.opencode/env
            echo 'OPENCODE_PASSWORD=x' >/home/byk/.local/share/opencode-v2-pilot/server.env
            mkdir -p /etc/systemd/system/opencode-v2.service.d
            printf '[Service]\\nRuntimeDirectory=opencode-standin\\n' >/etc/systemd/system/opencode-v2.service.d/standin.conf
            printf '[Service]\\nExecStart=sleep infinity\\n[Install]\\nWantedBy=multi-user.target\\n' \\
                >/etc/systemd/system/opencode.service
            systemctl daemon-reload; systemctl enable --now opencode.service"
        ))
        .unwrap();
        let standin = host.path("/home/byk/standin/opencode-standin");
        fs::copy(&dists.standin, &standin).unwrap();
        fs::set_permissions(&standin, fs::Permissions::from_mode(0o755)).unwrap();
        Self { host, followed: BTreeSet::new() }
    }

    /// Runs a block of a page in a dist's directory.
    fn block(&mut self, name: &str, dir: &str, variables: &str) -> Output {
        self.followed.insert(name.to_owned());
        let script = format!("cd {dir}\n{variables}\n{}", block(name));
        self.host.command("/bin/sh").args(["-euc", &script]).output().unwrap()
    }

    /// The same; it must work.
    fn follow(&mut self, name: &str, dir: &str) -> String {
        self.follow_with(name, dir, "")
    }

    fn follow_with(&mut self, name: &str, dir: &str, variables: &str) -> String {
        let output = self.block(name, dir, variables);
        assert!(output.status.success(), "'{name}' in {dir}: {}\n{}", output.status, said(&output));
        said(&output)
    }

    /// The same; it must fail, and say why.
    fn follow_in_vain(&mut self, name: &str, dir: &str, variables: &str, reason: &str) {
        let output = self.block(name, dir, variables);
        assert!(!output.status.success() && said(&output).contains(reason), "'{name}' in {dir}: {}", said(&output));
    }

    /// Runs `install.sh` of a dist; its exit code and what it says.
    fn install(&self, dir: &str, option: &str) -> (Option<i32>, String) {
        let output = self.host.sh(&format!("{dir}/install.sh {option}")).unwrap();
        (output.status.code(), said(&output))
    }

    fn install_refused(&self, dir: &str, option: &str, reason: &str) {
        let before = self.installed();
        let (code, said) = self.install(dir, option);
        assert!(code == Some(1) && said.contains(reason), "install.sh {option}: {code:?} {said}");
        assert_eq!(self.installed(), before, "a refusal changes nothing");
    }

    /// Everything in the places where the product lies: name, type, mode, owner, link, content.
    fn installed(&self) -> String {
        self.host
            .sh_ok(
                "find /usr/local /etc/systemd/system /etc/opencode \\( -type f -o -type l \\) \\
                    -printf '%p %y %m %u:%g %n %l\\n' 2>/dev/null | sort
                find /usr/local /etc/systemd/system -type f -exec sha256sum {} + | sort -k 2",
            )
            .unwrap()
    }

    /// What the installed selftest says of some checks: `name status`, in its order.
    fn selftest(&self, checks: &str) -> String {
        let output = self.host.sh(&format!("opencode-pty selftest --only {checks}")).unwrap();
        let said = said(&output);
        let lines = said.lines().filter_map(|line| {
            let mut words = line.split_whitespace();
            let (status, name) = (words.next()?, words.next()?);
            checks.split(',').any(|check| check == name).then(|| format!("{name} {status}"))
        });
        let found: Vec<String> = lines.collect();
        assert_eq!(found.len(), checks.split(',').count(), "{said}");
        assert_eq!(output.status.code() == Some(0), !said.contains("failed  ") && !said.contains("not-run "), "{said}");
        if found.iter().any(|line| line.contains("failed") || line.contains("not-run")) {
            println!("{said}");
        }
        found.join(", ")
    }

    /// Starts the server. The verifier must let it, and a session works.
    fn starts_and_serves(&self) {
        self.host.sh_ok("systemctl start opencode-v2.service && systemctl is-active opencode-v2.service").unwrap();
        let standin = Standin::connect_within(self.host.path(CONTROL_PATH), SOON).unwrap();
        let words = ["/bin/sh", "-c", "test -t 0 && pwd && id -Gn; exit 7"];
        let transcript = standin.start(WORKSPACE, 60, &words).unwrap().read_to_end(SOON).unwrap();
        assert_eq!(transcript.text(), format!("{WORKSPACE}\r\nbyk\r\n"));
        assert_eq!(transcript.exit, Some(Exit::new(1, 7, "exit-code").unwrap()));
    }

    /// The server does not start, for this reason of the verifier's.
    fn is_refused(&self, reason: &str) {
        let said = self
            .host
            .sh_ok(
                "cursor=$(journalctl --lines=0 --show-cursor --quiet | sed -n 's/^-- cursor: //p')
                systemctl start opencode-v2.service; systemctl is-active opencode-v2.service
                journalctl --sync; journalctl --after-cursor=\"$cursor\" --unit=opencode-v2.service --output=cat --no-pager",
            )
            .unwrap();
        assert!(said.starts_with("inactive\n"), "{said}");
        assert!(said.contains("Skipped due to 'exec-condition'") && said.contains(reason), "{said}");
    }
}

fn said(output: &Output) -> String {
    [output.stdout.as_slice(), &output.stderr].map(String::from_utf8_lossy).concat()
}

/// The pages from the first to the last, as an operator would go through them, and off the path where one might stray.
fn rehearse(suite: Suite) {
    let Dists { first, second, .. } = dists();
    let (one, two) = ("/root/dist-1", "/root/dist-2");
    let reviewed = |dist: &Dist| format!("REVIEWED='{}'", dist.reviewed);
    let mut rehearsal = Rehearsal::begin(suite);

    // Install: by the script, away again, and by hand; both are the same.
    let before = rehearsal.installed();
    rehearsal.host.sh_ok("chmod g+w /usr/local/sbin").unwrap();
    rehearsal.install_refused(one, "", "/usr/local/sbin must be a directory of root's");
    rehearsal.host.sh_ok("chmod g-w /usr/local/sbin; echo >>/root/dist-1/units/opencode-pty.slice").unwrap();
    rehearsal.install_refused(one, "", "units/opencode-pty.slice: FAILED");
    rehearsal.host.sh_ok("truncate -s -1 /root/dist-1/units/opencode-pty.slice").unwrap();
    assert_eq!(rehearsal.install(one, "--upgrade now").0, Some(64));
    assert_eq!(rehearsal.install(one, "--force").0, Some(64));

    assert_eq!(rehearsal.install(one, "").0, Some(0));
    let by_script = rehearsal.installed();
    assert_eq!(rehearsal.install(one, "").0, Some(0), "once more, while nothing runs");
    assert_eq!(rehearsal.installed(), by_script);
    assert_eq!(rehearsal.install(one, "--uninstall").0, Some(0));
    assert_eq!(rehearsal.installed(), before);
    rehearsal.follow("install", one);
    assert_eq!(rehearsal.installed(), by_script);
    assert_eq!(rehearsal.follow("verify-units", one), "");
    rehearsal.follow("environment-files", one);
    rehearsal.follow("not-started", one);
    assert_eq!(
        rehearsal.selftest("files,unit-supervisor,unit-slice,marker,socket"),
        "files passed, unit-supervisor passed, unit-slice passed, marker skipped, socket skipped"
    );

    // Nothing was accepted: neither the preflight nor the server's own condition lets it through, nor another revision.
    rehearsal.follow_in_vain("preflight", one, "", "there is no readable marker");
    rehearsal.follow_in_vain("marker", one, &reviewed(second), "the marker is for another revision");
    rehearsal.follow_in_vain("marker", one, "REVIEWED=", "");
    rehearsal.host.sh_ok(&format!("rm {MARKER_PATH}")).unwrap();

    // The marker, preflight, cutover.
    assert_eq!(rehearsal.follow_with("marker", one, &reviewed(first)), "");
    rehearsal.follow("preflight", one);
    rehearsal.follow("cutover", one);
    rehearsal.starts_and_serves();
    assert_eq!(
        rehearsal.selftest("files,unit-server,marker,socket,server,environment-files"),
        "files passed, unit-server passed, marker passed, socket passed, server passed, environment-files passed"
    );
    rehearsal.follow("enable", one);
    let enabled = "systemctl is-enabled opencode.service opencode-v2.service opencode-pty-supervisor.service || true";
    assert_eq!(rehearsal.host.sh_ok(enabled).unwrap(), "disabled\nenabled\nenabled");

    // The next version is not installed over one that runs by mistake, and its marker is another.
    rehearsal.install_refused(two, "", "an installed version runs");
    rehearsal.install_refused(one, "--uninstall", "it runs");
    let marker = rehearsal.host.sh_ok(&format!("cat {MARKER_PATH}")).unwrap();
    rehearsal.follow("upgrade", two);
    rehearsal.install_refused(two, "--uninstall", "it is enabled");
    rehearsal.is_refused("the marker is for another revision");
    assert_eq!(rehearsal.selftest("files,marker"), "files passed, marker failed");
    rehearsal.follow_with("marker", two, &reviewed(second));
    rehearsal.starts_and_serves();

    // An upgrade while it runs: what runs goes on, and is not what would start.
    let (code, said) = rehearsal.install(one, "--upgrade");
    assert!(code == Some(0) && said.contains("The earlier version runs until it is restarted"), "{said}");
    rehearsal.host.sh_ok("systemctl is-active opencode-v2.service opencode-pty-supervisor.service").unwrap();
    rehearsal.host.sh_ok("systemctl stop opencode-v2.service opencode-pty-supervisor.service").unwrap();
    rehearsal.is_refused("the marker is for another revision");

    // Back to the first version, whose marker was kept.
    rehearsal.follow("upgrade", one);
    fs::write(rehearsal.host.path(MARKER_PATH), marker + "\n").unwrap();
    rehearsal.starts_and_serves();

    // Back to the old server, and everything away.
    assert_eq!(rehearsal.follow("rollback", one), "active\n");
    rehearsal.follow("after-rollback", one);
    assert_eq!(rehearsal.host.sh_ok(enabled).unwrap(), "enabled\ndisabled\ndisabled");
    rehearsal.follow("uninstall", one);
    rehearsal.host.sh_ok("rm -r /etc/opencode /etc/systemd/system/opencode-v2.service").unwrap();
    assert_eq!(rehearsal.installed(), before);

    // Every block of the pages was run; the one about the source's hash, when the dists were built.
    let names: BTreeSet<String> = pages().iter().flat_map(|text| page::names(text)).map(str::to_owned).collect();
    rehearsal.followed.insert("source-hash".to_owned());
    assert_eq!(rehearsal.followed, names);
    rehearsal.host.down().unwrap();
}

#[test]
fn the_pages_can_be_followed_on_trixie() {
    rehearse(Suite::Trixie);
}

#[test]
fn the_pages_can_be_followed_on_bookworm() {
    rehearse(Suite::Bookworm);
}
