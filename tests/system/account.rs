//! The account that sessions and server run as on the host under test: `byk` where nothing else is said, another one on
//! the host that is there to show that nothing depends on it.

use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::sync::LazyLock;

use support::host::Host;

/// A word about the account, usable wherever text is.
#[derive(Clone, Copy)]
pub struct Word(fn(&'static Words) -> &'static str);

/// Its name.
pub const NAME: Word = Word(|words| &words.name);
/// Its uid.
pub const UID: Word = Word(|words| &words.uid);
/// Its primary gid.
pub const GID: Word = Word(|words| &words.gid);
/// Its home.
pub const HOME: Word = Word(|words| &words.home);
/// A directory of it for sessions to work in.
pub const WORKSPACE: Word = Word(|words| &words.workspace);

struct Words {
    name: String,
    uid: String,
    gid: String,
    home: String,
    workspace: String,
}

static WORDS: LazyLock<Words> = LazyLock::new(|| {
    let name = std::env::var("OPENCODE_PTY_TEST_HOST").expect("OPENCODE_PTY_TEST_HOST names a host that is up");
    let account = Host::attach(&name).expect("the host is up").account().clone();
    let workspace = account.workspace();
    Words {
        name: account.name,
        uid: account.uid.to_string(),
        gid: account.gid.to_string(),
        home: account.home,
        workspace,
    }
});

/// A text with `<name>`, `<uid>`, `<gid>` and `<home>` in it, for this account.
pub fn filled(text: &str) -> String {
    text.replace("<name>", &NAME).replace("<uid>", &UID).replace("<gid>", &GID).replace("<home>", &HOME)
}

impl Deref for Word {
    type Target = str;

    fn deref(&self) -> &str {
        self.0(&WORDS)
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

impl AsRef<Path> for Word {
    fn as_ref(&self) -> &Path {
        Path::new(&**self)
    }
}
