//! Is this host ready, and does it hold? (SPEC 10; docs/selftest.md.)
//!
//! Looks at the host and at what is installed, and says for each check what it found, why, and what to do. Looking
//! changes nothing. What would surprise: a check that could not be made is no pass, and neither is one that makes no
//! sense here; the exit code tells the first from a success.

mod attempt;
mod checks;
mod context;
mod environment;
mod files;
mod host;
mod marker;
mod report;
mod server;
mod units;

use std::ffi::OsString;
use std::io::IsTerminal as _;

use argh::FromArgs;
use smol::future::FutureExt as _;

use crate::limits::ACCOUNT_DEFAULT;
use crate::report::{Chain, ExitStatus};
use crate::systemd::{BusOptions, Manager, SYSTEM_BUS};
use checks::{CHECKS, Check, GROUPS, How};
use context::Context;
use report::Report;

/// Checks whether this host is ready for opencode-pty and whether it holds, a line a check with its reason and a remedy.
/// Exit codes: 0 all that ran passed; 1 a check failed; 2 a check that is needed could not be made; 64 bad arguments.
#[derive(Clone, Debug, FromArgs)]
struct Options {
    /// print one JSON object instead of lines (docs/selftest.md)
    #[argh(switch)]
    json: bool,
    /// only these checks or groups (host, installed), separated by commas
    #[argh(option, arg_name = "names")]
    only: Option<String>,
    /// print every check with its group, its stage and the acceptance checks it serves, and make none
    #[argh(switch)]
    list_checks: bool,
    /// account that sessions and the server run as (default byk)
    #[argh(option, default = "ACCOUNT_DEFAULT.to_owned()", arg_name = "name")]
    account: String,
}

/// The first argument of an attempt: what is tried as somebody else (`attempt`). For this program alone.
const ATTEMPT: &str = "--attempt";

/// Runs the role.
pub async fn main(args: &[OsString]) -> ExitStatus {
    let args: Option<Vec<&str>> = args.iter().map(|arg| arg.to_str()).collect();
    let Some(args) = args else {
        eprintln!("opencode-pty selftest: an argument is not UTF-8");
        return ExitStatus::Usage;
    };
    if let [ATTEMPT, attempt @ ..] = args.as_slice() {
        return attempt::main(attempt).await;
    }
    let options = match Options::from_args(&["opencode-pty selftest"], &args) {
        Ok(options) => options,
        Err(early) if early.status.is_ok() => {
            println!("{}", early.output);
            return ExitStatus::Success;
        }
        Err(early) => {
            eprintln!("opencode-pty selftest: {}", early.output.trim_end());
            return ExitStatus::Usage;
        }
    };
    if options.list_checks {
        print!("{}", if options.json { report::json_list(CHECKS) + "\n" } else { report::text_list(CHECKS) });
        return ExitStatus::Success;
    }
    match checks::choose(options.only.as_deref().unwrap_or(&GROUPS.join(","))) {
        Ok(chosen) => perform(&options, &chosen).await,
        Err(unknown) => {
            let names: Vec<&str> = GROUPS.into_iter().chain(CHECKS.iter().map(|check| check.name)).collect();
            let unknown = crate::report::quoted(&unknown);
            eprintln!("opencode-pty selftest: no check or group is called {unknown}; there are: {}", names.join(" "));
            ExitStatus::Usage
        }
    }
}

/// Makes the checks.
async fn perform(options: &Options, chosen: &[&'static Check]) -> ExitStatus {
    let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let bus = BusOptions { address: SYSTEM_BUS.to_owned(), manager_pid: 1 };
    let connected = Box::pin(Manager::connect(bus)).await;
    let mut report = Report::default();
    match connected {
        Ok((manager, keep)) => {
            let work = async {
                let context = Context::gather(&options.account, Some(&manager), "").await;
                look(&context, options, chosen, &mut report, colours);
            };
            // The link's future never ends; it is what makes the manager answer.
            work.or(keep).await;
        }
        Err(error) => {
            let context = Context::gather(&options.account, None, &Chain(&error).to_string()).await;
            look(&context, options, chosen, &mut report, colours);
        }
    }
    if options.json {
        println!("{}", report.json());
    } else {
        println!("{}", report.summary());
    }
    report.exit_status()
}

/// Makes the checks that look.
fn look(context: &Context, options: &Options, chosen: &[&'static Check], report: &mut Report, colours: bool) {
    for check in chosen {
        let How::Look(look) = check.how;
        let finding = look(context);
        if !options.json {
            println!("{}", report::line(check, &finding, colours));
        }
        report.add(check, finding);
    }
}
