//! Ranks as threads of one process.
//!
//! For tests of what is built on a group: same trait, same checks and same errors as the
//! [`host`](super::host) group, but no sockets and no processes.

mod meeting;

use super::{
    GroupBuffer, GroupError, ProcessGroup, Result,
    engine::{Engine, Payload},
    heap::HeapBuffer,
    ops::{Call, Identity},
};
use meeting::{Job, Member};
use std::{sync::Arc, time::Duration};

/// A group whose ranks are threads. Cloning gives another handle of the same rank.
#[derive(Clone, Debug)]
pub struct ThreadGroup(Arc<Member>);

impl ThreadGroup {
    /// A group of `world_size` ranks, one handle per rank, with an operation time-out of 60 s.
    pub fn new(world_size: usize) -> Vec<Self> {
        Self::with_timeout(world_size, Duration::from_secs(60))
    }

    /// As [`new`](Self::new), with the time that an operation waits for the slowest rank.
    pub fn with_timeout(world_size: usize, timeout: Duration) -> Vec<Self> {
        let job = Arc::new(Job::new(world_size));
        let meeting = job.lock().open_group(world_size);
        (0..world_size)
            .map(|rank| Self(Member::new(job.clone(), meeting, rank, timeout)))
            .collect()
    }
}

impl Engine for ThreadGroup {
    fn identity(&self) -> &Identity {
        &self.0.id
    }

    fn label(&self) -> &'static str {
        "thread"
    }

    fn run(&self, call: Call, payload: Payload<'_>) -> Result<()> {
        let member = &self.0;
        let mut counters = member.counters();
        let mut meet = |input: &[u8]| member.meet(&mut counters, call, input);
        match payload {
            Payload::AllReduce { data, dtype, op } => {
                let round = meet(data)?;
                data.copy_from_slice(round.reduced(dtype, op));
            }
            Payload::Broadcast { data, root } if root == member.id.rank => {
                meet(data)?;
            }
            Payload::Broadcast { data, root } => data.copy_from_slice(&meet(&[])?.inputs[root]),
            Payload::AllGather { send, recv } => {
                recv.copy_from_slice(&meet(send)?.inputs.concat());
            }
            Payload::ReduceScatter {
                send,
                recv,
                dtype,
                op,
            } => {
                let block = member.id.rank * recv.len()..(member.id.rank + 1) * recv.len();
                recv.copy_from_slice(&meet(send)?.reduced(dtype, op)[block]);
            }
            Payload::Barrier => {
                meet(&[])?;
            }
        }
        Ok(())
    }

    fn make_buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>> {
        let member = &self.0;
        let mut counters = member.counters();
        let number = counters.buffers + 1;
        member.meet(&mut counters, Call::buffer(number, bytes), &[])?;
        counters.buffers = number;
        drop(counters);
        HeapBuffer::reserve(self, number, bytes)
    }

    fn make_group(&self) -> Result<Arc<dyn ProcessGroup>> {
        let member = &self.0;
        let round = member.meet(&mut member.counters(), Call::new_group(), &[])?;
        let open = || member.job.lock().open_group(member.id.world_size);
        let group = *round.group.get_or_init(open);
        Ok(Arc::new(Self(Member::new(
            member.job.clone(),
            group,
            member.id.rank,
            member.timeout,
        ))))
    }

    fn fail(&self, error: GroupError) {
        self.0.fail(error);
    }

    fn first_failure(&self) -> Option<GroupError> {
        self.0.failure()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(world_size: usize, timeout: Duration) -> Vec<Arc<dyn ProcessGroup>> {
        let ranks = ThreadGroup::with_timeout(world_size, timeout);
        ranks
            .into_iter()
            .map(|rank| Arc::new(rank) as Arc<dyn ProcessGroup>)
            .collect()
    }

    crate::group::conformance::suite!(make);
}
