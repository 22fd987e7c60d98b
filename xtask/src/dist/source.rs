//! What is built: one commit of a repository, and the hash that names its content.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A commit of a git repository.
pub struct Source {
    repository: PathBuf,
    /// Its name, 40 hexadecimal digits.
    pub commit: String,
    /// When it was made, seconds since 1970.
    pub epoch: u64,
}

impl Source {
    /// HEAD, unless there are changes that are not in it.
    pub fn head(repository: &Path, allow_dirty: bool) -> Result<Self, String> {
        let git = |words: &[&str]| run(git(repository).args(words));
        let commit = git(&["rev-parse", "--verify", "HEAD^{commit}"])?.trim().to_owned();
        if commit.len() != 40 || !commit.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)) {
            return Err(format!("a revision line has room for a SHA-1 commit, and this is '{commit}'"));
        }
        let changes = git(&["status", "--porcelain"])?;
        if !changes.is_empty() && !allow_dirty {
            return Err(format!("these are not in HEAD (commit them, or say --allow-dirty):\n{}", changes.trim_end()));
        }
        let epoch = git(&["log", "-1", "--format=%ct"])?;
        let epoch = epoch.trim().parse().map_err(|_| format!("a commit of the date '{epoch}'"))?;
        Ok(Self { repository: repository.to_owned(), commit, epoch })
    }

    /// The commit's files, at a directory that is made for them.
    pub fn export(&self, to: &Path) -> Result<(), String> {
        fs::create_dir_all(to).map_err(|error| format!("cannot make {}: {error}", to.display()))?;
        let archive = to.with_extension("tar");
        run(git(&self.repository).args(["archive", "--format=tar", "--output"]).arg(&archive).arg(&self.commit))?;
        run(Command::new("tar").arg("--extract").arg("--file").arg(&archive).arg("--directory").arg(to))?;
        fs::remove_file(&archive).map_err(|error| format!("cannot remove {}: {error}", archive.display()))
    }

    /// The source manifest hash: of the list that sha256sum(1) makes of all tracked files, sorted by name.
    ///
    /// docs/install.md has the same in one line of shell; a test compares.
    pub fn hash(&self) -> Result<String, String> {
        let scratch = super::Scratch::new("source")?;
        let tree = scratch.path().join("tree");
        self.export(&tree)?;
        let words = ["ls-tree", "-r", "-z", "--name-only", "--full-tree", &self.commit];
        let listed = run(git(&self.repository).args(words))?;
        let mut names: Vec<&str> = listed.split_terminator('\0').collect();
        names.sort_unstable();
        let sums = run(Command::new("sha256sum").arg("--").args(names).current_dir(&tree))?;
        fs::write(scratch.path().join("sums"), sums).map_err(|error| format!("cannot write a list: {error}"))?;
        super::sha256(&scratch.path().join("sums"))
    }
}

/// git, in a repository whoever it belongs to: building it runs its code, so asking git about it is no further trust.
fn git(repository: &Path) -> Command {
    let mut command = Command::new("git");
    command.args(["-c", "safe.directory=*"]).current_dir(repository);
    command
}

/// Runs a command to its end; what it printed.
pub fn run(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("cannot run {name}: {error}"))?;
    if !output.status.success() {
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).take(8).collect();
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{name} {}: {}\n{}", words.join(" "), output.status, said.trim_end()));
    }
    String::from_utf8(output.stdout).map_err(|_| format!("{name} printed something that is not UTF-8"))
}
