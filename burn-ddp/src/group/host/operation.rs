//! What every operation of the host group does around its work.

use super::control::Control;
use crate::group::{GroupError, OpDescriptor, Result};

/// A panic inside an earlier operation has left the group in the middle of it, so no other can follow. The job's failure.
pub(super) fn half_way(control: &dyn Control, ours: &OpDescriptor) -> GroupError {
    let error = GroupError::Transport {
        rank: control.name(control.rank()),
        operation: ours.to_string(),
        cause: "an earlier operation of this group ended half-way".into(),
    };
    control.fail(error.clone());
    error
}

/// Runs `body` as operation `ours`: with a record of it, and if it fails the job fails.
///
/// An error is returned when the peers have been told, and on rank 0 when the report is out: what comes next may be the end of the process.
pub(super) fn run<T>(
    control: &dyn Control,
    ours: &OpDescriptor,
    body: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let running = control.recorder().begin(ours);
    running.end(body()).inspect_err(|error| {
        control.fail(error.clone());
        control.await_report();
    })
}
