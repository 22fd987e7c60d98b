//! Instructions of the product's hot loops, counted by callgrind: a number that does not depend on what else the machine does.

use std::path::Path;
use std::process::{Command, Stdio};

use super::report::Figure;
use super::stats::Summary;

/// The loops of `opencode-loops`, and what one turn is.
const LOOPS: [(&str, &str); 6] = [
    ("header", "decoding a frame's header"),
    ("start", "decoding a start payload of three words"),
    ("words", "decoding the launcher's words"),
    ("output", "relaying 64 bytes of output"),
    ("output-full", "relaying 32,768 bytes of output"),
    ("input", "relaying 16 bytes of input"),
];

/// The figure, or why there is none.
pub fn measure(program: &Path, turns: u64) -> Result<Figure, String> {
    let mut figure = Figure::new("instructions", "Instructions in user space, one turn of a loop", "instructions");
    for (name, title) in LOOPS {
        // Header and words are so short that more turns cost nothing.
        let turns = if name.starts_with("output") || name == "input" { turns } else { turns * 10 };
        let (once, twice) = (count(program, name, turns)?, count(program, name, 2 * turns)?);
        let difference =
            twice.checked_sub(once).ok_or_else(|| format!("{name}: more turns took fewer instructions"))?;
        #[allow(clippy::cast_precision_loss)]
        figure.row(title, Summary::once((difference as f64 / turns as f64).round()));
    }
    Ok(figure)
}

fn count(program: &Path, name: &str, turns: u64) -> Result<u64, String> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args([name, &turns.to_string()])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("valgrind cannot be run ({error}); apt-get install valgrind"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("valgrind on '{name}' ended with {}: {said}", output.status));
    }
    collected(&said).ok_or_else(|| format!("valgrind on '{name}' gave no count: {said}"))
}

/// The count in callgrind's last words: `==7== Collected : 1234`.
fn collected(said: &str) -> Option<u64> {
    said.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found_in_what_callgrind_says() {
        assert_eq!(collected("==7== Events    : Ir\n==7== Collected : 120034\n==7==\n"), Some(120_034));
        assert_eq!(collected("==7== Command: x"), None);
    }
}
