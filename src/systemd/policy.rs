//! Whether the bus would let this process become the service manager.

use zbus::fdo::RequestNameFlags;

use super::SYSTEM_BUS;
use super::link::{LinkError, MANAGER_NAME};
use crate::limits::CALL_TIME;
use crate::wait::within;

/// Asks for the manager's name, without waiting for it and without taking it from its owner. `false` if the policy refuses.
///
/// On a host whose manager runs this changes nothing. Should the name be free, it is held for a moment.
pub async fn may_own_the_managers_name() -> Result<bool, LinkError> {
    const DOING: &str = "ask for the manager's name";
    let bus = |source| LinkError::Bus { doing: DOING, source: Box::new(source) };
    let asking = async {
        let connection = zbus::connection::Builder::address(SYSTEM_BUS)?.build().await?;
        connection.request_name_with_flags(MANAGER_NAME, RequestNameFlags::DoNotQueue.into()).await
    };
    match within(CALL_TIME, Box::pin(asking)).await.ok_or(LinkError::Timeout { doing: DOING })? {
        Ok(_) | Err(zbus::Error::NameTaken) => Ok(true),
        Err(zbus::Error::MethodError(name, ..)) if name.as_str() == "org.freedesktop.DBus.Error.AccessDenied" => {
            Ok(false)
        }
        Err(zbus::Error::FDO(error)) if matches!(*error, zbus::fdo::Error::AccessDenied(_)) => Ok(false),
        Err(error) => Err(bus(error)),
    }
}
