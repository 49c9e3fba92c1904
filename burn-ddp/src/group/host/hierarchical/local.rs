//! The control plane as the ranks of one machine see it.

use super::super::control::Control;
use crate::group::{GroupError, Result, recorder::Recorder};
use std::{sync::Arc, time::Duration};

/// Some of a job's ranks, counted from 0. Exchanges are still among all ranks of the job; each sees those of its own.
#[derive(Debug)]
pub(super) struct LocalControl {
    job: Arc<dyn Control>,
    /// The job's number of each rank, ascending.
    ranks: Vec<usize>,
    rank: usize,
}

impl LocalControl {
    pub(super) fn new(job: Arc<dyn Control>, ranks: Vec<usize>, rank: usize) -> Self {
        Self { job, ranks, rank }
    }
}

impl Control for LocalControl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.ranks.len()
    }

    fn name(&self, rank: usize) -> usize {
        self.ranks[rank]
    }

    fn job(&self) -> u64 {
        self.job.job()
    }

    fn generation(&self) -> u32 {
        self.job.generation()
    }

    fn operation_timeout(&self) -> Duration {
        self.job.operation_timeout()
    }

    fn host(&self, rank: usize) -> String {
        self.job.host(self.ranks[rank])
    }

    fn next_group(&self) -> u32 {
        self.job.next_group()
    }

    fn recorder(&self) -> &Recorder {
        self.job.recorder()
    }

    fn exchange(&self, tag: u64, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut all = self.job.exchange(tag, data)?;
        let ours = self
            .ranks
            .iter()
            .map(|rank| std::mem::take(&mut all[*rank]));
        Ok(ours.collect())
    }

    fn check(
        &self,
        missing: &dyn Fn() -> Vec<usize>,
        operation: &dyn Fn() -> String,
    ) -> Result<()> {
        let missing = || missing().into_iter().map(|rank| self.name(rank)).collect();
        self.job.check(&missing, operation)
    }

    fn fail(&self, error: GroupError) {
        self.job.fail(error);
    }

    fn await_report(&self) {
        self.job.await_report();
    }
}
