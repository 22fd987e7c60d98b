//! Two builds that share nothing but the commit, the crates and the toolchain.
//!
//! Everything that could find its way into a binary differs between them: the directory of the source, that of the crates,
//! cargo's home, the target directory, the toolchain's place, the user and the umask (if we are root), HOME and the time
//! zone. Neither can reach a registry. What is the same is written down in the manifest, in the words that were executed.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use super::failed;
use super::source::{Source, run};

const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// The second build's user, if we may choose: nobody.
const OTHER_USER: u32 = 65534;

/// The names by which the manifest and the binary know the directories.
const SOURCE: &str = "/source";
const CRATES: &str = "/crates";
const TOOLCHAIN: &str = "/toolchain";

/// The compiler and the programs around it that have a say in the binary.
pub struct Toolchain {
    sysroot: PathBuf,
    /// A line or more each.
    pub versions: String,
}

impl Toolchain {
    /// Those that a build in `repository` would use.
    pub fn of(repository: &Path) -> Result<Self, String> {
        let sysroot = run(Command::new("rustc").args(["--print", "sysroot"]).current_dir(repository))?;
        let sysroot = PathBuf::from(sysroot.trim());
        let mut versions = run(Command::new(sysroot.join("bin/rustc")).arg("-vV"))?;
        versions.push_str(&run(Command::new(sysroot.join("bin/cargo")).arg("-V"))?);
        // The C library is in the binary, and the linker has put it together.
        for program in ["cc", "ld", "ldd"] {
            let said = run(Command::new(program).arg("--version").env("LC_ALL", "C"))?;
            versions.push_str(said.lines().next().unwrap_or_default());
            versions.push('\n');
        }
        Ok(Self { sysroot, versions })
    }
}

/// The crates that are compiled into the binary or for building it, a line each: name, version, SHA-256 as `Cargo.lock` has it.
pub fn dependencies(toolchain: &Toolchain, tree: &Path) -> Result<String, String> {
    let listed = run(Command::new(toolchain.sysroot.join("bin/cargo"))
        .args(["tree", "--locked", "--package", "opencode-pty", "--edges", "normal,build", "--target", TRIPLE])
        .args(["--prefix", "none", "--no-dedupe", "--format", "{p}"])
        .current_dir(tree))?;
    let locked = fs::read_to_string(tree.join("Cargo.lock")).map_err(failed("read Cargo.lock"))?;
    let mut lines = BTreeSet::new();
    for line in listed.lines() {
        let mut words = line.split(' ');
        let (Some(name), Some(version)) = (words.next(), words.next().and_then(|word| word.strip_prefix('v'))) else {
            return Err(format!("cargo tree says '{line}'"));
        };
        let record = format!("name = \"{name}\"\nversion = \"{version}\"\n");
        let package = locked.split("[[package]]\n").find(|package| package.starts_with(&record));
        let package = package.ok_or_else(|| format!("Cargo.lock has no {name} {version}"))?;
        if let Some(sum) = package.lines().find_map(|line| line.strip_prefix("checksum = \"")) {
            lines.insert(format!("{name} {version} {}\n", sum.trim_end_matches('"')));
        } else if name != "opencode-pty" {
            return Err(format!("{name} {version} has no checksum in Cargo.lock"));
        }
    }
    Ok(lines.into_iter().collect())
}

/// One build's directories.
struct Place {
    root: PathBuf,
    user: Option<u32>,
    environment: [(&'static str, &'static str); 2],
}

impl Place {
    fn source(&self) -> PathBuf {
        self.root.join("source")
    }

    fn crates(&self) -> PathBuf {
        self.root.join("crates")
    }

    fn home(&self) -> PathBuf {
        self.root.join("home")
    }

    fn target(&self) -> PathBuf {
        self.root.join("target")
    }

    fn binary(&self) -> PathBuf {
        self.target().join(TRIPLE).join("release/opencode-pty")
    }

    /// Where this build finds the compiler.
    fn toolchain(&self, toolchain: &Toolchain) -> PathBuf {
        if self.user.is_some() { self.root.join("toolchain") } else { toolchain.sysroot.clone() }
    }

    /// Text with the directories that its names stand for.
    fn real(&self, text: &str, toolchain: &Toolchain) -> String {
        let directories = [
            ("$SOURCE", self.source()),
            ("$CRATES", self.crates()),
            ("$CARGO_HOME", self.home()),
            ("$TARGET", self.target()),
            ("$TOOLCHAIN", self.toolchain(toolchain)),
        ];
        directories.iter().fold(text.to_owned(), |text, (name, path)| text.replace(name, &path.to_string_lossy()))
    }

    /// Source, crates, and a cargo home that knows of nothing else.
    fn prepare(&self, source: &Source, crates: &Path) -> Result<(), String> {
        fs::create_dir_all(self.home()).map_err(failed("make a cargo home"))?;
        source.export(&self.source())?;
        run(Command::new("cp").args(["--recursive", "--no-target-directory"]).arg(crates).arg(self.crates()))?;
        let config = format!(
            "source.crates-io.replace-with = \"vendored\"\nsource.vendored.directory = \"{}\"\n",
            self.crates().display()
        );
        fs::write(self.home().join("config.toml"), config).map_err(failed("write cargo's configuration"))?;
        if let Some(user) = self.user {
            fs::create_dir_all(self.root.join("toolchain")).map_err(failed("make a place for the toolchain"))?;
            run(Command::new("chown").args(["--recursive", &format!("{user}:{user}")]).arg(&self.root))?;
        }
        Ok(())
    }

    fn build(&self, recipe: &Recipe, toolchain: &Toolchain) -> Result<(), String> {
        refuse_other_configuration(&self.root)?;
        let real = |text: &str| self.real(text, toolchain);
        let pinned = recipe.environment.iter().map(|(name, value)| format!("{name}={}", real(value)));
        let environment = self.environment.iter().map(|(name, value)| format!("{name}={value}")).chain(pinned);
        let mut build = if let Some(user) = self.user {
            // The toolchain may lie in root's home, so it is mounted where the other user gets at it, for as long as it runs.
            let script = "mount --bind \"$1\" \"$2\" && umask 077 && user=$3 && shift 3 &&
                exec setpriv --reuid \"$user\" --regid \"$user\" --clear-groups --no-new-privs -- \"$@\"";
            let mut command = Command::new("unshare");
            command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
            command.arg(&toolchain.sysroot).arg(self.toolchain(toolchain)).arg(user.to_string()).arg("env");
            command
        } else {
            Command::new("env")
        };
        build.arg("-i").args(environment).arg(real(&recipe.program));
        build.args(recipe.arguments.iter().map(|word| real(word)));
        build.current_dir(self.source()).stdin(Stdio::null());
        run(&mut build).map(drop)
    }
}

/// The command of both builds, with names for the directories that differ.
pub struct Recipe {
    program: String,
    arguments: Vec<String>,
    environment: Vec<(&'static str, String)>,
}

impl Recipe {
    fn new(source: &Source) -> Self {
        let flags = [
            "-Ctarget-feature=+crt-static".to_owned(),
            format!("--remap-path-prefix=$SOURCE={SOURCE}"),
            format!("--remap-path-prefix=$CRATES={CRATES}"),
            format!("--remap-path-prefix=$TOOLCHAIN={TOOLCHAIN}"),
        ];
        let words = ["build", "--frozen", "--release", "--package", "opencode-pty", "--bin", "opencode-pty"];
        let mut arguments: Vec<String> = words.map(str::to_owned).into();
        arguments.extend(["--target", TRIPLE, "--target-dir", "$TARGET"].map(str::to_owned));
        Self {
            program: "$TOOLCHAIN/bin/cargo".to_owned(),
            arguments,
            environment: vec![
                ("CARGO_HOME", "$CARGO_HOME".to_owned()),
                ("CARGO_INCREMENTAL", "0".to_owned()),
                ("LC_ALL", "C".to_owned()),
                ("PATH", "$TOOLCHAIN/bin:/usr/local/bin:/usr/bin:/bin".to_owned()),
                ("RUSTFLAGS", flags.join(" ")),
                ("SOURCE_DATE_EPOCH", source.epoch.to_string()),
            ],
        }
    }

    /// The commands, as a shell would be given them.
    pub fn text(&self, source: &Source) -> String {
        let mut text = format!(
            "cd a checkout && cargo vendor --locked --versioned-dirs --respect-source-config $CRATES\n\
             git archive {} | tar --extract --directory $SOURCE\n\
             echo 'source.crates-io.replace-with = \"vendored\"' >$CARGO_HOME/config.toml\n\
             echo 'source.vendored.directory = \"'$CRATES'\"' >>$CARGO_HOME/config.toml\n\
             cd $SOURCE && env -i \\\n",
            source.commit
        );
        for (name, value) in &self.environment {
            let _ = writeln!(text, "    {name}=\"{value}\" \\");
        }
        let _ = writeln!(text, "    {} {}", self.program, self.arguments.join(" "));
        text
    }
}

/// What both builds gave.
pub struct Built {
    /// The binary, below the directory.
    pub binary: PathBuf,
    /// Of it.
    pub hash: String,
    pub recipe: Recipe,
}

/// Builds twice below a directory and compares. Two that differ are left beside `out`, to be looked at.
pub fn twice(source: &Source, toolchain: &Toolchain, below: &Path, out: &Path) -> Result<Built, String> {
    let tree = below.join("vendored/source");
    source.export(&tree)?;
    let crates = below.join("vendored/crates");
    // The user's own cargo home and its registry, once. Cargo compares with the checksums in Cargo.lock.
    run(Command::new(toolchain.sysroot.join("bin/cargo"))
        .args(["vendor", "--locked", "--versioned-dirs", "--respect-source-config"])
        .arg(&crates)
        .current_dir(&tree))?;

    let root = rustix::process::geteuid().is_root() && run(Command::new("unshare").args(["--mount", "true"])).is_ok();
    if !root {
        eprintln!("dist: both builds as this user: only root that may mount can make one of them another's");
    }
    let places = [
        Place { root: below.join("1"), user: None, environment: [("HOME", "/nonexistent"), ("TZ", "UTC")] },
        Place {
            root: below.join("the/second/build"),
            user: root.then_some(OTHER_USER),
            environment: [("HOME", "/"), ("TZ", "Asia/Tokyo")],
        },
    ];
    let recipe = Recipe::new(source);
    for place in &places {
        place.prepare(source, &crates)?;
    }
    thread::scope(|scope| {
        let builds: Vec<_> = places.iter().map(|place| scope.spawn(|| place.build(&recipe, toolchain))).collect();
        builds.into_iter().try_for_each(|build| build.join().map_err(|_| "a build panicked".to_owned())?)
    })?;
    let [first, second] = places.map(|place| place.binary());
    if run(Command::new("cmp").arg(&first).arg(&second)).is_err() {
        let mut names = String::new();
        for (binary, number) in [(&first, 1), (&second, 2)] {
            let kept = format!("{}.differs-{number}", out.display());
            fs::copy(binary, &kept).map_err(failed(&format!("keep {kept}")))?;
            let _ = write!(names, " {kept}");
        }
        return Err(format!("the two builds differ, so nothing is written; compare{names}"));
    }
    let hash = super::sha256(&first)?;
    Ok(Built { binary: first, hash, recipe })
}

/// Cargo reads configuration in every directory above; none may have a say here.
fn refuse_other_configuration(place: &Path) -> Result<(), String> {
    for above in place.ancestors() {
        for name in [".cargo/config.toml", ".cargo/config"] {
            let path = above.join(name);
            if path.exists() {
                return Err(format!("{} would have a say in the build; set TMPDIR to another place", path.display()));
            }
        }
    }
    Ok(())
}
