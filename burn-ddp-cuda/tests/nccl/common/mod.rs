//! What the tests share: the mock and the ranks.

pub(crate) mod mock;
mod ranks;

pub(crate) use mock::Mock;
pub(crate) use ranks::{Rank, ranks};

use burn_ddp_cuda::nccl::{
    Communicator, DType, DevicePtr, NcclError, ReduceOp, Result, Settings, Stream,
};
use std::{ptr, time::Duration};

/// The stream that the tests use.
pub(crate) const STREAM: Stream = Stream(ptr::without_provenance_mut(0x5000));

/// All ranks have long to come to the start; `timeout` is for all else.
pub(crate) fn settings(timeout: Duration) -> Settings {
    let mut settings = Settings::default();
    settings.init_timeout = LONG;
    settings.timeout = timeout;
    settings
}

/// More than any test takes, even where the machine stands still for a minute, so that no error comes from it.
pub(crate) const LONG: Duration = Duration::from_secs(1000);
/// For waits that nothing ends.
pub(crate) const SHORT: Duration = Duration::from_millis(300);

/// Three elements, reduced in place, with the wait for the stream. The data stay for ever: after an error the stream may be using them.
pub(crate) fn sum(mock: &Mock, communicator: &Communicator, value: f32) -> Result<Vec<f32>> {
    let data = vec![value; 3].leak();
    let first = data.as_ptr();
    post(communicator, data)?;
    communicator.wait("the stream", || mock.is_done(STREAM))?;
    // SAFETY: the data stay for ever, and the stream is done with them.
    Ok(unsafe { std::slice::from_raw_parts(first, 3) }.to_vec())
}

/// The same without the wait.
pub(crate) fn post(communicator: &Communicator, data: &'static mut [f32]) -> Result<()> {
    let buffer = DevicePtr(data.as_mut_ptr().expose_provenance() as u64);
    // SAFETY: the data stay for ever.
    unsafe {
        communicator.all_reduce_in_place(buffer, data.len(), DType::F32, ReduceOp::Sum, STREAM)
    }
}

/// An error without its times.
pub(crate) fn kind(error: NcclError) -> String {
    match error {
        NcclError::Failed {
            rank,
            world_size,
            operation,
            code,
            message,
            ..
        } => format!("rank {rank} of {world_size}: {operation} failed: {code}: {message}"),
        NcclError::TimedOut {
            rank,
            world_size,
            operation,
            elapsed,
            limit,
            ..
        } => {
            assert!(elapsed >= limit);
            format!("rank {rank} of {world_size}: {operation} timed out")
        }
        NcclError::Aborted {
            rank,
            world_size,
            operation,
            reason,
            ..
        } => format!("rank {rank} of {world_size}: {operation} aborted: {reason}"),
        other => other.to_string(),
    }
}
