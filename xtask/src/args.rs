//! Command lines: `--name value` options, flags, and the words between them.

use crate::Failure;

/// The words of a command, taken apart.
pub struct Args {
    words: Vec<String>,
    usage: &'static str,
}

impl Args {
    /// The words after the command's name; `usage` is what a wrong one is answered with, and `--help` among them.
    pub fn new(words: &[String], usage: &'static str) -> Result<Self, Failure> {
        if words.iter().any(|word| word == "--help") {
            return Err(Failure::Help(usage));
        }
        Ok(Self { words: words.to_vec(), usage })
    }

    /// Takes a flag out, and says whether it was there.
    pub fn flag(&mut self, name: &str) -> bool {
        let before = self.words.len();
        self.words.retain(|word| word != name);
        self.words.len() != before
    }

    /// Takes an option and its value out.
    pub fn option(&mut self, name: &str) -> Result<Option<String>, Failure> {
        let Some(position) = self.words.iter().position(|word| word == name) else { return Ok(None) };
        if position + 1 == self.words.len() {
            return Err(self.wrong(&format!("{name} needs a value")));
        }
        self.words.remove(position);
        let value = self.words.remove(position);
        if self.words.iter().any(|word| word == name) {
            return Err(self.wrong(&format!("{name} is given twice")));
        }
        Ok(Some(value))
    }

    /// The words that are left, which must be `count`.
    pub fn finish(self, count: usize) -> Result<Vec<String>, Failure> {
        match self.words.get(count).or_else(|| self.words.iter().find(|word| word.starts_with('-'))) {
            Some(word) => Err(self.wrong(&format!("'{word}' was not expected"))),
            None if self.words.len() < count => Err(Failure::Usage(self.usage.to_owned())),
            None => Ok(self.words),
        }
    }

    /// The first of the words that are left, which says what to do.
    pub fn first(&self) -> Option<&str> {
        self.words.first().map(String::as_str)
    }

    /// The words that are left, however many.
    pub fn rest(self) -> Vec<String> {
        self.words
    }

    fn wrong(&self, message: &str) -> Failure {
        Failure::Usage(format!("{message}\n{}", self.usage))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> Result<Args, Failure> {
        Args::new(&words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>(), "usage")
    }

    fn args(words: &[&str]) -> Args {
        parsed(words).unwrap_or_else(|_| panic!("{words:?} ask for help"))
    }

    #[test]
    fn help_comes_first_wherever_it_is_asked_for() {
        for words in [&["--help"][..], &["up", "--name", "--help"], &["--nmae", "--help"]] {
            assert!(matches!(parsed(words), Err(Failure::Help("usage"))), "{words:?}");
        }
    }

    #[test]
    fn options_flags_and_words_come_in_any_order() {
        let mut args = args(&["--name", "a", "up", "--bare"]);
        assert!(args.flag("--bare"));
        assert!(!args.flag("--bare"));
        assert_eq!(args.option("--name").ok().flatten().as_deref(), Some("a"));
        assert_eq!(args.finish(1).ok(), Some(vec!["up".to_owned()]));
    }

    #[test]
    fn what_is_not_known_is_refused() {
        assert!(args(&["up", "--nmae"]).finish(1).is_err());
        assert!(args(&["up", "down"]).finish(1).is_err());
        assert!(args(&[]).finish(1).is_err());
        assert!(args(&["--name"]).option("--name").is_err());
        assert!(args(&["--name", "a", "--name", "b"]).option("--name").is_err());
    }
}
