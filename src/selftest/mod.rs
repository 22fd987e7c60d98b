//! Is this host ready, and does it hold? (SPEC 10; docs/selftest.md.)
//!
//! Looks at the host and at what is installed, and says for each check what it found, why, and what to do. Looking
//! changes nothing; `--live` starts a supervisor of its own and tries the escapes (`live`). What would surprise: a check that could not be made is no pass, and neither is one that makes no
//! sense here; the exit code tells the first from a success.

mod attempt;
mod checks;
mod context;
mod environment;
mod files;
mod host;
mod live;
mod marker;
mod report;
mod server;
mod units;

use std::ffi::OsString;
use std::io::IsTerminal as _;

use argh::FromArgs;
use smol::future::FutureExt as _;

use crate::limits::ACCOUNT_DEFAULT;
use crate::options;
use crate::report::{Chain, ExitStatus};
use crate::systemd::{BusOptions, Manager, SYSTEM_BUS};
use checks::{CHECKS, Check, GROUPS, How};
use context::Context;
use report::{Finding, Report};

/// Checks whether this host is ready for opencode-pty and whether it holds, a line a check with its reason and a remedy.
/// Exit codes: 0 all that ran passed; 1 a check failed; 2 a check that is needed could not be made; 64 bad arguments.
#[derive(Clone, Debug, FromArgs)]
struct Options {
    /// also start a private supervisor and try the escapes; needs root, changes nothing that stays
    #[argh(switch)]
    live: bool,
    /// print one JSON object instead of lines (docs/selftest.md)
    #[argh(switch)]
    json: bool,
    /// only these checks or groups (host, installed, live), separated by commas
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
    // The two that only this program starts take plain words.
    let words: Vec<&str> = args.iter().filter_map(|word| word.to_str()).collect();
    match words.as_slice() {
        [ATTEMPT, attempt @ ..] => return attempt::main(attempt).await,
        [live::tries::AS_SERVER, words @ ..] => return live::tries::main(words).await,
        _ => {}
    }
    let options: Options = match options::parse("opencode-pty selftest", "selftest", args) {
        Ok(options) => options,
        Err(status) => return status,
    };
    if options.list_checks {
        print!("{}", if options.json { report::json_list(CHECKS) + "\n" } else { report::text_list(CHECKS) });
        return ExitStatus::Success;
    }
    let live = |check: &&Check| matches!(check.how, How::Live);
    match checks::choose(options.only.as_deref().unwrap_or(&GROUPS.join(","))) {
        Ok(chosen) if options.only.is_some() && !options.live && chosen.iter().any(live) => {
            eprintln!("opencode-pty selftest: what begins with live- needs --live");
            ExitStatus::Usage
        }
        Ok(mut chosen) => {
            chosen.retain(|check| options.live || !live(check));
            perform(&options, &chosen).await
        }
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
    let bus = BusOptions { address: SYSTEM_BUS.to_owned(), manager_pid: 1 };
    let connected = Box::pin(Manager::connect(bus)).await;
    let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut report = Report::default();
    let mut found = |check: &'static Check, finding: Finding| {
        if !options.json {
            println!("{}", report::line(check, &finding, colours));
        }
        report.add(check, finding);
    };
    match connected {
        Ok((manager, keep)) => {
            let work = async {
                let context = Context::gather(&options.account, Some(&manager), "").await;
                look(&context, chosen, &mut found);
                try_escapes(&context, Some(&manager), chosen, &mut found).await;
            };
            // The link's future never ends; it is what makes the manager answer.
            Box::pin(work).or(keep).await;
        }
        Err(error) => {
            let context = Context::gather(&options.account, None, &Chain(&error).to_string()).await;
            look(&context, chosen, &mut found);
            try_escapes(&context, None, chosen, &mut found).await;
        }
    }
    if options.json {
        println!("{}", report.json());
    } else {
        let live =
            if options.live || options.only.is_some() { "" } else { "; the escapes were not asked for (--live)" };
        println!("{}{live}", report.summary());
    }
    report.exit_status()
}

/// Makes the checks that look.
fn look(context: &Context, chosen: &[&'static Check], found: &mut dyn FnMut(&'static Check, Finding)) {
    for check in chosen {
        if let How::Look(look) = check.how {
            found(check, look(context));
        }
    }
}

/// Makes the live checks, if any is chosen.
async fn try_escapes(
    context: &Context,
    manager: Option<&Manager>,
    chosen: &[&'static Check],
    found: &mut dyn FnMut(&'static Check, Finding),
) {
    let chosen: Vec<&'static Check> = chosen.iter().copied().filter(|check| matches!(check.how, How::Live)).collect();
    let (why_not, remedy) = match (&context.account, manager) {
        _ if chosen.is_empty() => return,
        _ if !context.is_root => ("it takes root to start the private supervisor", "run as root"),
        (Ok(account), Some(manager)) => return live::perform(account, manager, &chosen, found).await,
        (Err(_), _) => ("there is no account to run as", "see the check 'account'"),
        (_, None) => ("the service manager can't be talked to", "see the check 'manager'"),
    };
    for check in chosen {
        found(check, Finding::not_run(why_not, remedy));
    }
}
