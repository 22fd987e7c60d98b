//! Why a host could not be built, booted, used or ended.

use std::{fmt, io};

/// What was being attempted, and what stood in the way.
#[derive(Debug)]
pub enum Error {
    /// A system call failed.
    System {
        /// What was being attempted, as the rest of "cannot …".
        doing: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A program ended badly, or the world is not as it must be.
    Failed {
        /// What was being attempted, as the rest of "cannot …".
        doing: String,
        /// What is known about it; can be several lines.
        detail: String,
    },
}

impl Error {
    /// For `map_err`: a system call failed while doing this.
    pub(crate) fn system(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { doing: doing.into(), source }
    }

    /// Something else went wrong while doing this.
    pub(crate) fn failed(doing: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Failed { doing: doing.into(), detail: detail.into() }
    }

    /// The same error with more to read.
    pub(crate) fn and_detail(self, more: &str) -> Self {
        match self {
            Self::Failed { doing, detail } => Self::Failed { doing, detail: format!("{detail}\n{more}") },
            system @ Self::System { .. } => system,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System { doing, source } => write!(f, "cannot {doing}: {source}"),
            Self::Failed { doing, detail } => write!(f, "cannot {doing}: {}", detail.trim()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System { source, .. } => Some(source),
            Self::Failed { .. } => None,
        }
    }
}
