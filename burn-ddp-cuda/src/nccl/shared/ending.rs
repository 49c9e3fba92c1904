//! How a communicator ends, and the errors of operations that meet its end.

use super::{End, Shared, State};
use crate::nccl::{
    NcclError, Result, ResultCode,
    deadline::Deadline,
    ffi::RawComm,
    is_error,
    release::{self, How},
};
use std::{
    ffi::c_int,
    ptr,
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

/// How long an operation that failed waits until the communicator is aborted, beyond its own limit. Then its stream moves on; and up to
/// NCCL 2.26 the thread that made a call must live until NCCL has let go of it.
const GRACE: Duration = Duration::from_secs(2);

impl Shared {
    /// The error of an operation whose time is over; aborts.
    pub(in crate::nccl) fn late(self: &Arc<Self>, deadline: &Deadline) -> NcclError {
        self.fail(self.timeout(deadline), deadline)
    }

    fn timeout(&self, deadline: &Deadline) -> NcclError {
        NcclError::TimedOut {
            rank: self.rank,
            world_size: self.world_size,
            operation: deadline.operation.clone(),
            elapsed: deadline.elapsed(),
            limit: deadline.limit,
            message: self.library.last_message(),
        }
    }

    /// The error of an operation for which NCCL said `code`; aborts.
    pub(in crate::nccl) fn failed(self: &Arc<Self>, code: c_int, deadline: &Deadline) -> NcclError {
        self.fail(self.failure(code, deadline), deadline)
    }

    fn failure(&self, code: c_int, deadline: &Deadline) -> NcclError {
        NcclError::Failed {
            rank: self.rank,
            world_size: self.world_size,
            operation: deadline.operation.clone(),
            elapsed: deadline.elapsed(),
            code: ResultCode(code),
            message: self.library.last_message(),
        }
    }

    /// Aborts because of `error`, and returns it, unless the communicator has ended before.
    fn fail(self: &Arc<Self>, error: NcclError, deadline: &Deadline) -> NcclError {
        if !self.abort(&error.to_string()) {
            return self.interrupted(deadline);
        }
        drop(self.wait_released(GRACE));
        error
    }

    /// The error of an operation that finds its communicator at its end.
    pub(super) fn interrupted(&self, deadline: &Deadline) -> NcclError {
        let state = self.wait_released(GRACE);
        let end = state.end.clone().unwrap_or(End::Closed);
        drop(state);
        self.refusal(&end, deadline)
    }

    /// The error of a call that comes after the end, if this is one. Returns at once.
    pub(in crate::nccl) fn refused(&self, deadline: &Deadline) -> Option<NcclError> {
        let end = self.lock().end.clone()?;
        Some(self.refusal(&end, deadline))
    }

    /// Ends the communicator, unless it has ended. Returns at once.
    pub(in crate::nccl) fn abort(self: &Arc<Self>, reason: &str) -> bool {
        self.end(End::Aborted(reason.to_owned()), How::Abort)
    }

    /// Destroys the communicator, which NCCL has finalised.
    pub(in crate::nccl) fn destroy(self: &Arc<Self>, deadline: &Deadline) -> Result<()> {
        if !self.end(End::Closed, How::Destroy) {
            return Err(self.interrupted(deadline));
        }
        let code = self.wait_released(deadline.left()).released;
        match code {
            Some(code) if is_error(code) => Err(self.failure(code, deadline)),
            Some(_) => Ok(()),
            // The thread that destroys it goes on.
            None => Err(self.timeout(deadline)),
        }
    }

    fn end(self: &Arc<Self>, end: End, how: How) -> bool {
        let first = self.change(|state| {
            let first = state.end.is_none();
            state.end.get_or_insert(end);
            first
        });
        if first {
            release::start(self, how);
        }
        first
    }

    fn wait_released(&self, limit: Duration) -> MutexGuard<'_, State> {
        self.wait_until(limit, |state| state.released.is_some())
    }

    /// Waits until no thread is in a call, and takes the communicator out of everybody's reach.
    pub(in crate::nccl) fn take_comm(&self) -> RawComm {
        let state = self.changed.wait_while(self.lock(), |state| state.calling);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut state.comm.0, ptr::null_mut())
    }

    pub(in crate::nccl) fn released(&self, code: c_int) {
        self.change(|state| state.released = Some(code));
    }

    pub(super) fn refusal(&self, end: &End, deadline: &Deadline) -> NcclError {
        let (rank, world_size, operation) =
            (self.rank, self.world_size, deadline.operation.clone());
        match end {
            End::Closed => NcclError::Closed {
                rank,
                world_size,
                operation,
            },
            End::Aborted(reason) => NcclError::Aborted {
                rank,
                world_size,
                operation,
                elapsed: deadline.elapsed(),
                reason: reason.clone(),
            },
        }
    }
}
