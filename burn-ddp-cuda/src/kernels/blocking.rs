//! Calls of the runtime that wait for its thread.

use super::KernelError;
use cubecl::server::ServerError;
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Runs a call that waits for the runtime's thread of the device. A panic there is resumed here by cubecl; it becomes an error.
pub(super) fn blocking<T>(
    operation: &'static str,
    call: impl FnOnce() -> Result<T, ServerError>,
) -> Result<T, KernelError> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(source)) => Err(KernelError::Device {
            operation,
            source: Box::new(source),
        }),
        Err(panic) => Err(KernelError::RuntimePanicked {
            operation,
            message: message(&*panic),
        }),
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}
