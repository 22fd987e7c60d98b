//! The readiness verifier and its marker.

use std::fmt::Write as _;

/// The verifier before it is rendered, in the repository.
pub const TEMPLATE_PATH: &str = "units/opencode-pty-verify-readiness.in";

/// Where the verifier is installed.
pub const VERIFIER_PATH: &str = "/usr/local/libexec/opencode-pty-verify-readiness";

/// What it reads.
pub const MARKER_PATH: &str = "/etc/opencode/pty-supervisor-verified";

/// What stands in the template for the revision line.
const PLACEHOLDER: &str = "@REVISION@";

/// The first line of a marker, without its end.
pub fn revision_line(commit: &str, source_hash: &str) -> String {
    format!("revision=opencode-v2-pilot:git:{commit};pty-source:sha256:{source_hash}")
}

/// The verifier for a revision line; nothing if the template has not exactly one place for it.
pub fn render(template: &str, revision_line: &str) -> Option<String> {
    (template.matches(PLACEHOLDER).count() == 1).then(|| template.replace(PLACEHOLDER, revision_line))
}

/// A marker that is right for a binary with this hash.
pub fn marker(revision_line: &str, binary_hash: &str) -> String {
    let mut text = format!("{revision_line}\n");
    for name in ["supervisor", "launcher", "client"] {
        let _ = writeln!(text, "{binary_hash}  /usr/local/libexec/opencode-pty-{name}");
    }
    text
}
