//! `cargo xtask dist`: what an operator installs, from two builds that are byte for byte the same.

mod build;
mod source;

use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, SystemTime};

use support::host::{SERVER, SUPERVISOR, target, workspace};
use support::readiness;
use support::units::{Account, render as render_unit};

use self::build::{Built, Toolchain};
use self::source::{Source, run};
use crate::Failure;
use crate::args::Args;

const USAGE: &str = "\
Usage: cargo xtask dist [--account NAME|NAME:UID:GID:GROUP:HOME] [--out DIR] [--repository DIR] [--allow-dirty]

Builds HEAD twice, in two directories, with two cargo homes, as two users if it is root, refuses unless the binaries are byte
for byte the same, and writes everything an operator needs: see docs/install.md.

  --account      the server's account: one of this machine's by its name, or of another's in full. Default: byk, uid 1000
  --out          where to. Default: target/dist. What is there is replaced if it is an earlier dist
  --repository   build another checkout than this one
  --allow-dirty  build HEAD although there are changes that are not in it
";

const SOURCE_HASH_USAGE: &str = "\
Usage: cargo xtask source-hash [--repository DIR] [--allow-dirty]

Prints the source manifest hash of HEAD. docs/install.md has the same in standard tools.
";

const UNITS: [&str; 3] = [SUPERVISOR, "opencode-pty.slice", SERVER];

/// What is installed below /usr/local/share, and where: files that one pattern names, `*` being what it keeps.
const SHARED: [(&str, &str); 5] = [
    ("README.md", "doc/opencode-pty/README.md"),
    ("docs/*.md", "doc/opencode-pty/docs/*.md"),
    ("completions/opencode-pty.bash", "bash-completion/completions/opencode-pty"),
    ("completions/_opencode-pty", "zsh/site-functions/_opencode-pty"),
    ("completions/opencode-pty.fish", "fish/vendor_completions.d/opencode-pty.fish"),
];

/// Where a tracked file is installed below /usr/local/share, if it is.
fn shared(name: &str) -> Option<String> {
    if let Some(page) = name.strip_prefix("docs/man/") {
        let (_, section) = page.rsplit_once('.')?;
        let known = section.len() == 1 && section.bytes().all(|byte| byte.is_ascii_digit());
        return known.then(|| format!("man/man{section}/{page}"));
    }
    SHARED.iter().find_map(|(from, to)| match from.split_once('*') {
        Some((start, end)) => name.strip_prefix(start)?.strip_suffix(end).map(|kept| to.replace('*', kept)),
        None => (name == *from).then(|| (*to).to_owned()),
    })
}

pub fn main(words: &[String]) -> Result<ExitCode, Failure> {
    let mut args = Args::new(words, USAGE)?;
    let allow_dirty = args.flag("--allow-dirty");
    let account = args.option("--account")?;
    let out = args.option("--out")?.map_or_else(|| target().join("dist"), PathBuf::from);
    let repository = args.option("--repository")?.map_or_else(workspace, PathBuf::from);
    args.finish(0)?;

    let account =
        account.map_or_else(|| Ok(Account::default()), |words| account_named(&words)).map_err(Failure::Usage)?;
    let source = Source::head(&repository, allow_dirty)?;
    let toolchain = Toolchain::of(&repository)?;
    let scratch = Scratch::new("dist")?;
    eprintln!("dist: building {} twice; a few minutes", source.commit);
    let built = build::twice(&source, &toolchain, scratch.path(), &out)?;
    eprintln!("dist: both builds are {}", built.hash);
    let what = What { source, toolchain, built, account };
    let line = write(&what, &scratch, &out)?;
    println!("{}\n{line}\nsha256 of SHA256SUMS: {}", out.display(), sha256(&out.join("SHA256SUMS"))?);
    Ok(ExitCode::SUCCESS)
}

/// `cargo xtask source-hash`.
pub fn source_hash(words: &[String]) -> Result<ExitCode, Failure> {
    let mut args = Args::new(words, SOURCE_HASH_USAGE)?;
    let allow_dirty = args.flag("--allow-dirty");
    let repository = args.option("--repository")?.map_or_else(workspace, PathBuf::from);
    args.finish(0)?;
    println!("{}", Source::head(&repository, allow_dirty)?.hash()?);
    Ok(ExitCode::SUCCESS)
}

/// What is written about, and what of.
struct What {
    source: Source,
    toolchain: Toolchain,
    built: Built,
    account: Account,
}

/// Writes the directory, under another name until it is whole. Gives the revision line.
fn write(what: &What, scratch: &Scratch, out: &Path) -> Result<String, String> {
    let What { source, built, account, .. } = what;
    if out.exists() && !out.join("MANIFEST").exists() && out.read_dir().map_or(true, |mut dir| dir.next().is_some()) {
        return Err(format!("{} is there already, and is not an earlier dist", out.display()));
    }
    let new = PathBuf::from(format!("{}.new", out.display()));
    let _ = fs::remove_dir_all(&new);
    fs::create_dir_all(&new).map_err(failed("make the directory"))?;

    let tree = scratch.path().join("tree");
    source.export(&tree)?;
    let hash = source.hash()?;
    let line = readiness::revision_line(&source.commit, &hash);
    let mut dist =
        Dist { root: new.clone(), time: SystemTime::UNIX_EPOCH + Duration::from_secs(source.epoch), names: Vec::new() };

    dist.add("opencode-pty", 0o755, &read(&built.binary)?)?;
    let template = text(&tree.join(readiness::TEMPLATE_PATH))?;
    let verifier = readiness::render(&template, &line).ok_or("the verifier's template has no place for a revision")?;
    dist.add("opencode-pty-verify-readiness", 0o755, verifier.as_bytes())?;
    for unit in UNITS {
        let rendered = render_unit(&text(&tree.join("units").join(unit))?, account);
        dist.add(&format!("units/{unit}"), 0o644, rendered.as_bytes())?;
    }
    dist.add("install.sh", 0o755, &read(&tree.join("units/install.sh"))?)?;
    for file in files_below(&tree) {
        let name = file.strip_prefix(&tree).unwrap_or(&file).to_string_lossy().into_owned();
        if let Some(place) = shared(&name) {
            dist.add(&format!("share/{place}"), 0o644, &read(&file)?)?;
        }
    }
    let manifest = manifest(what, &line, &dist, &tree)?;
    dist.add("MANIFEST", 0o644, manifest.as_bytes())?;
    let sums = dist.sums()?;
    dist.add("SHA256SUMS", 0o644, sums.as_bytes())?;

    if out.exists() {
        fs::remove_dir_all(out).map_err(failed("remove the earlier dist"))?;
    }
    fs::rename(&new, out).map_err(failed("put the directory in place"))?;
    Ok(line)
}

fn manifest(what: &What, line: &str, dist: &Dist, tree: &Path) -> Result<String, String> {
    let What { source, toolchain, built, account } = what;
    let mut text = String::new();
    let mut section = |title: &str, body: &str| {
        let _ = writeln!(text, "[{title}]\n{}\n", body.trim_end());
    };
    section("revision", line);
    let Account { name, group, uid, gid, home } = account;
    section("account", &format!("{name}, uid {uid}, group {group}, gid {gid}, home {home}"));
    section("toolchain", &toolchain.versions);
    section("commands, run in two places", &built.recipe.text(source));
    section("binary of both", &built.hash);
    section("dependencies, as Cargo.lock has them", &build::dependencies(toolchain, tree)?);
    section("files", &dist.sums()?);
    Ok(text.trim_end().to_owned() + "\n")
}

/// The directory while it is written.
struct Dist {
    root: PathBuf,
    time: SystemTime,
    names: Vec<String>,
}

impl Dist {
    fn add(&mut self, name: &str, mode: u32, bytes: &[u8]) -> Result<(), String> {
        let path = self.root.join(name);
        let dir = path.parent().unwrap_or(&self.root);
        fs::DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(failed("make a directory"))?;
        fs::write(&path, bytes)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(mode)))
            .and_then(|()| File::options().write(true).open(&path)?.set_modified(self.time))
            .map_err(failed(&format!("write {name}")))?;
        self.names.push(name.to_owned());
        Ok(())
    }

    /// What `sha256sum --check` reads, sorted by name.
    fn sums(&self) -> Result<String, String> {
        let mut names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        names.sort_unstable();
        run(Command::new("sha256sum").arg("--").args(names).current_dir(&self.root))
    }
}

/// An account: `NAME` of this machine, or all about one of another.
fn account_named(words: &str) -> Result<Account, String> {
    let shipped = Account::default();
    if words == shipped.name {
        return Ok(shipped);
    }
    let account = match *words.split(':').collect::<Vec<_>>() {
        [name] => {
            let passwd = fs::read_to_string("/etc/passwd").map_err(failed("read /etc/passwd"))?;
            let groups = fs::read_to_string("/etc/group").map_err(failed("read /etc/group"))?;
            account_in(name, &passwd, &groups).ok_or_else(|| {
                format!("this machine has no account '{name}'; say NAME:UID:GID:GROUP:HOME of the one it is for")
            })?
        }
        [name, uid, gid, group, home] => Account {
            name: name.to_owned(),
            group: group.to_owned(),
            uid: uid.parse().map_err(|_| format!("'{uid}' is no uid"))?,
            gid: gid.parse().map_err(|_| format!("'{gid}' is no gid"))?,
            home: home.to_owned(),
        },
        _ => return Err(format!("'{words}' is neither NAME nor NAME:UID:GID:GROUP:HOME")),
    };
    // They are written into unit files, where a space, a quote or a percent sign would be something else.
    let plain = |word: &str, more: &[u8]| {
        !word.is_empty()
            && !word.starts_with('-')
            && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte) || more.contains(&byte))
    };
    if !plain(&account.name, b"") || !plain(&account.group, b"") {
        return Err("account and group have letters, digits, dots, dashes and underscores".to_owned());
    }
    if !plain(&account.home, b"/") || !account.home.starts_with('/') || account.home == "/" {
        return Err("a home is an absolute path of letters, digits, dots, dashes and underscores".to_owned());
    }
    if account.uid == 0 || account.gid == 0 {
        return Err("root is no account for sessions".to_owned());
    }
    Ok(account)
}

/// An account as /etc/passwd and /etc/group have it.
fn account_in(name: &str, passwd: &str, groups: &str) -> Option<Account> {
    let fields = |line: &str| line.split(':').map(str::to_owned).collect::<Vec<_>>();
    let entry = passwd.lines().map(fields).find(|entry| entry.first().is_some_and(|first| first == name))?;
    let [name, _, uid, gid, _, home, ..] = entry.as_slice() else { return None };
    let group = groups.lines().map(fields).find(|group| group.get(2) == Some(gid))?;
    Some(Account {
        name: name.clone(),
        group: group.first()?.clone(),
        uid: uid.parse().ok()?,
        gid: gid.parse().ok()?,
        home: home.clone(),
    })
}

/// A directory that is removed at the end.
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// A new one. Others may pass through it, since one of the builds is another user's, and not list it.
    pub fn new(what: &str) -> Result<Self, String> {
        let path = std::env::temp_dir().join(format!("opencode-pty-{what}-{}", std::process::id()));
        let made = fs::DirBuilder::new().mode(0o711).create(&path);
        made.map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        Ok(Self { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The SHA-256 of a file, as sha256sum(1) says it.
fn sha256(path: &Path) -> Result<String, String> {
    let said = run(Command::new("sha256sum").arg("--").arg(path))?;
    said.split(' ').next().map(str::to_owned).ok_or_else(|| "sha256sum said nothing".to_owned())
}

/// Every file below a directory, sorted; none if there is no such directory.
fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(dir).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect();
    entries.sort();
    entries.into_iter().flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

fn text(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

fn failed(doing: &str) -> impl FnOnce(std::io::Error) -> String {
    let doing = doing.to_owned();
    move |error| format!("cannot {doing}: {error}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use support::page;

    use super::*;

    fn install_page() -> String {
        text(&workspace().join("docs/install.md")).unwrap()
    }

    #[test]
    fn install_sh_does_what_the_page_lists_word_for_word() {
        let script = text(&workspace().join("units/install.sh")).unwrap();
        for name in ["install", "uninstall"] {
            let start = format!("    # -- {name} --\n");
            let (_, rest) = script.split_once(&start).unwrap();
            let (done, _) = rest.split_once("    # -- end --\n").unwrap();
            let done: String = done.lines().map(|line| line.trim_start().to_owned() + "\n").collect();
            assert_eq!(done, page::block(&install_page(), name).unwrap(), "{name}");
        }
    }

    #[test]
    fn the_pages_own_commands_give_the_source_manifest_hash() {
        let scratch = Scratch::new("hash-test").unwrap();
        let repository = scratch.path().join("repository");
        let files = "mkdir -p b/-c; echo 1 >a; echo 2 >'with space'; echo 3 >Z; echo 4 >b/-c/-d; echo 5 >b.c; echo 6 >ü; : >e; printf '\\0' >f";
        let git = "git -c init.defaultBranch=main init --quiet; git add .; echo ignored >not-tracked; echo not-tracked >.gitignore;
            git add .gitignore; git -c user.name=t -c user.email=t@t.invalid commit --quiet --message t";
        fs::create_dir(&repository).unwrap();
        let sh = |script: &str| run(Command::new("sh").args(["-euc", script]).current_dir(&repository)).unwrap();
        sh(&format!("{files}; {git}"));

        let by_page = sh(&page::block(&install_page(), "source-hash").unwrap());
        let ours = Source::head(&repository, false).unwrap();
        assert_eq!(ours.hash().unwrap(), by_page.trim());
        assert_eq!(ours.commit, sh("git rev-parse HEAD").trim());

        // One byte anywhere makes another.
        sh("echo 7 >>'with space'");
        assert!(Source::head(&repository, false).is_err_and(|fault| fault.contains("with space")));
        assert_eq!(Source::head(&repository, true).unwrap().hash().unwrap(), by_page.trim(), "HEAD is what counts");
        sh("git -c user.name=t -c user.email=t@t.invalid commit --quiet --all --message t");
        let changed = Source::head(&repository, false).unwrap().hash().unwrap();
        assert_ne!(changed, by_page.trim());
        assert_eq!(changed, sh(&page::block(&install_page(), "source-hash").unwrap()).trim());
    }

    #[test]
    fn pages_and_completions_go_where_their_readers_look() {
        for (name, place) in [
            ("README.md", Some("doc/opencode-pty/README.md")),
            ("docs/install.md", Some("doc/opencode-pty/docs/install.md")),
            ("docs/decisions/4-zbus-5.md", Some("doc/opencode-pty/docs/decisions/4-zbus-5.md")),
            ("docs/man/opencode-pty.1", Some("man/man1/opencode-pty.1")),
            ("docs/man/opencode-pty-supervisor.8", Some("man/man8/opencode-pty-supervisor.8")),
            ("docs/man/README", None),
            ("completions/_opencode-pty", Some("zsh/site-functions/_opencode-pty")),
            ("completions/other", None),
            ("tests/docs/x.md", None),
            ("src/main.rs", None),
        ] {
            assert_eq!(shared(name).as_deref(), place, "{name}");
        }
    }

    #[test]
    fn an_account_is_this_machines_or_given_in_full() {
        assert_eq!(account_named("byk"), Ok(Account::default()));
        let account =
            Account { name: "worker".into(), group: "crew".into(), uid: 4242, gid: 4243, home: "/srv/w".into() };
        assert_eq!(account_named("worker:4242:4243:crew:/srv/w"), Ok(account.clone()));
        let passwd = "root:x:0:0:root:/root:/bin/bash\nworker:x:4242:4243::/srv/w:/bin/sh\n";
        assert_eq!(account_in("worker", passwd, "root:x:0:\ncrew:x:4243:a,b\n"), Some(account));
        assert_eq!(account_in("work", passwd, "crew:x:4243:\n"), None);
        assert_eq!(account_in("worker", passwd, "crew:x:4244:\n"), None);
    }

    #[test]
    fn what_has_no_place_in_a_unit_file_is_refused() {
        for words in [
            "",
            "no such account",
            "root",
            "a:1:1:a",
            "a:1:1:a:/home/a:/bin/sh",
            "a:0:1:a:/home/a",
            "a:1:0:a:/home/a",
            "a:x:1:a:/home/a",
            "a:1:1:a:home",
            "a:1:1:a:/",
            "a:1:1:a:/home/%h",
            "a b:1:1:a:/home/a",
            "a:1:1:a\n:/home/a",
            "-a:1:1:a:/home/a",
        ] {
            assert!(account_named(words).is_err(), "{words:?}");
        }
    }
}
