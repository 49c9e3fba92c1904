//! What the data transports need of the control connections.

use crate::group::{GroupError, Result, recorder::Recorder};
use std::{fmt::Debug, time::Duration};

/// The control plane of a job: small messages between all ranks, and the one place that knows
/// whether the job has failed. Transports wait in short slices and call [`check`](Self::check)
/// between them, so that a failure ends every wait.
pub(crate) trait Control: Send + Sync + Debug {
    fn rank(&self) -> usize;
    fn world_size(&self) -> usize;
    /// What errors call rank `rank`: its number in the job, where these are some of the job's ranks and are counted anew.
    fn name(&self, rank: usize) -> usize {
        rank
    }
    /// Random number of the job, drawn by rank 0.
    fn job(&self) -> u64;
    fn generation(&self) -> u32;
    /// How long an operation may take.
    fn operation_timeout(&self) -> Duration;
    /// The machine that `rank` runs on.
    fn host(&self, rank: usize) -> String;
    /// What this rank proposes as the number of a new group; rank 0's proposal counts. One count for the groups of all
    /// transports, so that no two groups of a job have the same number.
    fn next_group(&self) -> u32;
    /// Where transports record what they do.
    fn recorder(&self) -> &Recorder;

    /// All-gather of small blobs (64 KiB at most) over the control connections, in rank order. Collective: the
    /// ranks must call it with the same `tag`; each tag has its own order, so that two threads
    /// with different tags never swap data. Blocks for `operation_timeout` at most.
    fn exchange(&self, tag: u64, data: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// `Err` once the job has failed, a peer is gone, or one of the ranks in `missing` has left in good order.
    /// Called between the slices of a wait; `missing` (the ranks not yet heard from) and `operation` (what the caller
    /// waits in, for the error text) are only evaluated on failure. One atomic load while all is well.
    fn check(&self, missing: &dyn Fn() -> Vec<usize>, operation: &dyn Fn() -> String)
    -> Result<()>;

    /// Records `error` as the job's failure (the first one wins) and tells the peers. Never waits for
    /// a peer, only for the moment that sending takes, since the process may be about to exit.
    fn fail(&self, error: GroupError);

    /// On rank 0, after a failure, waits until the ranks' last operations have been gathered and logged; [`REPORT_LIMIT`] at most.
    fn await_report(&self);
}

/// How long the report on a failure waits for the ranks that can be reached.
pub(crate) const REPORT_LIMIT: Duration = Duration::from_secs(2);
