//! What an earlier supervisor left behind: found by strict name and by exactly our `BindsTo`, and ended.
//!
//! Nobody's prefix is trusted: a unit that only looks like a session's is left alone.

use super::Options;
use super::session::stop_leftover;
use crate::journal::{self, Event, Field};
use crate::systemd::unit::UnitName;
use crate::systemd::{CallError, Manager};

/// Ends every orphan. Gives the names of those that can't be ended now.
pub async fn clean_up(manager: &Manager, options: &Options) -> Result<Vec<UnitName>, CallError> {
    let mut stuck = Vec::new();
    for (name, state, _) in manager.sessions_of(&options.unit).await? {
        let unit = [(Field::Unit, &name as _)];
        let message = format!("{name}: {} since an earlier supervisor; stopping it", state.active);
        journal::record(Event::LeftoverFound, &unit, &message);
        if let Err(error) = stop_leftover(manager, &name).await {
            journal::record(Event::LeftoverStuck, &unit, &error.to_string());
            stuck.push(name);
        }
    }
    Ok(stuck)
}
