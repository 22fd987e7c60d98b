//! Man pages and completions in the programs that read them: mandoc(1), groff(1), bash, zsh and fish. `cargo xtask test`
//! runs it where `.ci/run` has installed those; plain `cargo test` does not.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use support::usage;

const PROGRAM: &str = env!("CARGO_BIN_EXE_opencode-pty");
/// What an operator types.
const SUBCOMMANDS: [&str; 2] = ["list", "selftest"];
/// What units and the server start: nobody types their options.
const OTHERS: [&str; 3] = ["supervisor", "client", "launcher"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn run(command: &mut Command) -> Output {
    let program = command.get_program().to_owned();
    let output = command.stdin(Stdio::null()).output();
    output.unwrap_or_else(|error| panic!("{}: {error}; .ci/run installs it", program.display()))
}

/// The words a command printed, a line each, without what is behind a tab.
fn words(output: &Output) -> BTreeSet<String> {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(|line| line.split('\t').next().unwrap().trim().to_owned()).collect()
}

fn help(arguments: &[&str]) -> String {
    String::from_utf8(run(Command::new(PROGRAM).args(arguments)).stdout).unwrap()
}

fn pages() -> Vec<PathBuf> {
    let pages: Vec<PathBuf> =
        fs::read_dir(root().join("docs/man")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(!pages.is_empty());
    pages
}

#[test]
fn mandoc_and_groff_have_nothing_to_say_about_any_page() {
    for page in pages() {
        let lint = run(Command::new("mandoc").args(["-T", "lint", "-W", "warning"]).arg(&page));
        let groff = run(Command::new("groff").args(["-ww", "-mandoc", "-Tutf8", "-z"]).arg(&page));
        for (tool, output) in [("mandoc", lint), ("groff", groff)] {
            let said = [output.stdout, output.stderr].concat();
            assert_eq!(String::from_utf8_lossy(&said), "", "{tool}");
            assert!(output.status.success(), "{tool} {}", page.display());
        }
    }
}

// ---- completions -------------------------------------------------------------------------------------------------------

/// The `PATH` on which a completion finds the program by its name.
fn path_with_program() -> String {
    let directory = Path::new(PROGRAM).parent().unwrap();
    format!("{}:{}", directory.display(), std::env::var("PATH").unwrap())
}

fn bash(line: &[&str]) -> BTreeSet<String> {
    let script = "source \"$1\"; shift; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); _opencode_pty; printf '%s\\n' \"${COMPREPLY[@]}\"";
    let file = root().join("completions/opencode-pty.bash");
    let mut command = Command::new("bash");
    command.args(["--noprofile", "--norc", "-c", script, "bash"]).arg(file).args(line);
    words(&run(command.env("PATH", path_with_program())))
}

fn fish(line: &[&str]) -> BTreeSet<String> {
    let file = root().join("completions/opencode-pty.fish");
    let mut command = Command::new("fish");
    command.args(["--no-config", "-c", "source $argv[1]; complete -C \"$argv[2]\""]).arg(file).arg(line.join(" "));
    let home = std::env::temp_dir();
    words(&run(command.env("PATH", path_with_program()).env("HOME", home)))
}

fn zsh(line: &[&str]) -> BTreeSet<String> {
    let mut command = Command::new("timeout");
    command.args(["60", "zsh", "-f"]).arg(root().join("tests/zsh-complete.zsh")).arg(root().join("completions"));
    let mut found = words(&run(command.arg(line.join(" ")).env("PATH", path_with_program()).env("TERM", "dumb")));
    assert!(found.remove("end-of-the-list"), "it did not finish: {found:?}");
    found
}

type Shell = (&'static str, fn(&[&str]) -> BTreeSet<String>);
const SHELLS: [Shell; 3] = [("bash", bash), ("fish", fish), ("zsh", zsh)];

#[test]
fn every_shell_offers_the_options_of_each_subcommands_help_and_no_other() {
    for role in SUBCOMMANDS {
        let wanted = usage::options(&help(&[role, "--help"]));
        for (name, shell) in SHELLS {
            assert_eq!(shell(&["opencode-pty", role, "--"]), wanted, "{name}: {role}");
        }
    }
}

#[test]
fn every_shell_offers_help_alone_for_what_nobody_types() {
    for role in OTHERS {
        for (name, shell) in SHELLS {
            assert_eq!(shell(&["opencode-pty", role, "--"]), ["--help".to_owned()].into(), "{name}: {role}");
        }
    }
}

#[test]
fn every_shell_offers_the_roles_of_the_usage_and_no_other() {
    let wanted = usage::roles(&help(&["--help"]));
    for (name, shell) in SHELLS {
        // Options are offered to who begins one.
        let mut found = shell(&["opencode-pty", ""]);
        found.extend(shell(&["opencode-pty", "--"]));
        assert_eq!(found, wanted, "{name}");
    }
}

#[test]
fn every_shell_offers_the_checks_and_groups_of_selftest() {
    let listed = help(&["selftest", "--list-checks"]);
    let wanted: BTreeSet<String> = listed
        .lines()
        .flat_map(|line| line.split('\t').take(2))
        .filter(|word| word.starts_with('m'))
        .map(str::to_owned)
        .collect();
    assert!(wanted.len() >= 2, "{wanted:?}");
    for (name, shell) in SHELLS {
        let found = shell(&["opencode-pty", "selftest", "--only", "m"]);
        assert_eq!(found, wanted, "{name}");
    }
}
