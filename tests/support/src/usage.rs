//! What a role's `--help` says, for those who hold a page or a completion to it.

use std::collections::BTreeSet;

/// The options: those of argh's list, and `--help`, which every role takes.
pub fn options(help: &str) -> BTreeSet<String> {
    let names = help.lines().filter_map(|line| {
        let word = line.strip_prefix("  ")?.split([' ', ',']).next()?;
        word.starts_with("--").then(|| word.to_owned())
    });
    names.chain(["--help".to_owned()]).collect()
}

/// The words that the program's own help lists as its first argument.
pub fn roles(help: &str) -> BTreeSet<String> {
    let lines = help.lines().skip_while(|line| *line != "Roles:").skip(1);
    let listed = lines.take_while(|line| line.is_empty() || line.starts_with("  "));
    listed
        .filter_map(|line| line.strip_prefix("  ")?.split("  ").next())
        .flat_map(|words| words.split(", "))
        .map(str::to_owned)
        .collect()
}
