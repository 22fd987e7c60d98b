//! What happens, as a test wants it.

use super::Launcher;

/// What happens, until the test says otherwise.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// What a call gets instead of its proper answer.
    pub answers: Vec<Exception>,
    /// How a start job ends.
    pub job: JobEnd,
    /// What the launcher does once the job is done.
    pub launcher: Launcher,
    /// What a unit does when it is stopped.
    pub stop: Stopping,
    /// The control group of units to come, if it is to be one that exists.
    pub control_group: Option<String>,
}

/// A call that is not answered as it should be.
#[derive(Clone, Debug)]
pub struct Exception {
    /// The method.
    pub method: &'static str,
    /// The unit, or any.
    pub unit: Option<String>,
    /// What it gets.
    pub answer: Answer,
    /// How often.
    pub times: usize,
}

/// What a call gets instead of its proper answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// This error; nothing is carried out.
    Error(&'static str, &'static str),
    /// Nothing, and nothing is carried out.
    Silence,
    /// It is carried out, and nobody is told.
    LostReply,
    /// Nothing for now; carried out and answered at `FakeManager::release`.
    Held,
    /// An answer of the wrong type; nothing is carried out.
    Malformed,
}

/// How a start job ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// At once, with this word.
    Word(String),
    /// When the test calls `FakeManager::finish_job`.
    Held,
}

impl Default for JobEnd {
    fn default() -> Self {
        Self::Word("done".into())
    }
}

/// What a unit does when it is stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stopping {
    /// Dies of SIGTERM at once.
    #[default]
    Obeys,
    /// Dies of `KillUnit` alone.
    NeedsKill,
    /// Does not die.
    Never,
}
