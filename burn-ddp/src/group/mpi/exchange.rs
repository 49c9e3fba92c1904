//! One operation's messages: the descriptions that all ranks compare, and waiting for the rest.

use super::{
    control::Control,
    library::{self, Mpi},
    request::{Receiving, Refusal, Sending},
};
use crate::{
    group::{
        GroupError, OpDescriptor, Ranks, Result,
        ops::{self, Call, DESCRIPTOR_WORDS, Identity},
    },
    notice,
};
use std::{
    collections::VecDeque,
    mem,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// The descriptor, the length of what lies in line behind it, and a number that the operation may use.
const HEADER: usize = 8 * (DESCRIPTOR_WORDS + 2);

/// How long a wait only yields: messages that are on their way come within that time.
const BRISK: Duration = Duration::from_micros(50);
/// After that it sleeps for this part of the time since the last message came, so that it wakes late by no more.
const PART: u32 = 16;
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// What a rank has said of the operation.
#[derive(Debug)]
pub(super) struct Block {
    descriptor: OpDescriptor,
    pub(super) payload: Vec<u8>,
    pub(super) number: u64,
}

/// Memory for messages, kept from operation to operation.
#[derive(Debug, Default)]
pub(super) struct Pool(Vec<Vec<u8>>);

impl Pool {
    /// Of any content.
    pub(super) fn take(&mut self, length: usize) -> Vec<u8> {
        let mut memory = self.0.pop().unwrap_or_default();
        memory.resize(length, 0);
        memory
    }

    pub(super) fn copy(&mut self, data: &[u8]) -> Vec<u8> {
        let mut memory = self.0.pop().unwrap_or_default();
        memory.clear();
        memory.extend_from_slice(data);
        memory
    }

    pub(super) fn put(&mut self, memory: Vec<u8>) {
        self.0.push(memory);
    }
}

/// Messages of one step that are waited for together.
#[derive(Debug, Default)]
pub(super) struct Pending {
    sends: VecDeque<Sending>,
    receives: VecDeque<(usize, Receiving)>,
    received: Vec<(usize, Vec<u8>)>,
}

impl Pending {
    /// Whether all is there; and whether anything came since the last look.
    fn poll(&mut self, mpi: &Mpi, pool: &mut Pool) -> Result<(bool, bool), Refusal> {
        let mut progress = false;
        while let Some((peer, message)) = self.receives.front_mut() {
            let Some(received) = message.poll(mpi)? else {
                return Ok((false, progress));
            };
            self.received.push((*peer, received.data));
            self.receives.pop_front();
            progress = true;
        }
        while let Some(message) = self.sends.front_mut() {
            let Some(memory) = message.poll(mpi)? else {
                return Ok((false, progress));
            };
            if let Some(memory) = Arc::into_inner(memory) {
                pool.put(memory);
            }
            self.sends.pop_front();
            progress = true;
        }
        Ok((true, progress))
    }
}

/// An operation that this rank has begun.
#[derive(Debug)]
pub(super) struct Operation<'a> {
    pub(super) id: &'a Identity,
    pub(super) control: &'a Control,
    pub(super) pool: &'a mut Pool,
    ours: OpDescriptor,
    start: Instant,
    /// `None`: as long as the peers live.
    limit: Option<Duration>,
    /// Between two warnings; half of the limit, or what would be it.
    half: Duration,
    /// When to warn next.
    warning: Option<Duration>,
}

impl<'a> Operation<'a> {
    /// An error if the job has failed before.
    pub(super) fn begin(
        id: &'a Identity,
        control: &'a Control,
        pool: &'a mut Pool,
        timeout: Duration,
        call: Call,
        sequence: u64,
    ) -> Result<Self> {
        let ours = id.describe(call, sequence);
        let operation = Self {
            id,
            control,
            pool,
            ours,
            start: Instant::now(),
            limit: call.is_limited().then_some(timeout),
            half: timeout / 2,
            warning: Some(timeout / 2),
        };
        let mpi = operation.enter()?;
        let begun = control.begin(&mpi, &ours);
        drop(mpi);
        begun.map_err(|refusal| refusal.on(id.rank))?;
        control.check(id, &ours)?;
        Ok(operation)
    }

    fn enter(&self) -> Result<Mpi> {
        library::enter().ok_or_else(|| GroupError::Transport {
            rank: self.id.rank,
            operation: self.ours.to_string(),
            cause: "MPI has been finalized: end the job's groups before the program ends MPI"
                .into(),
        })
    }

    /// Messages between two ranks keep their order, so one tag for all that a group does is enough.
    fn tag(&self) -> i32 {
        self.id.group as i32 + 1
    }

    /// The other ranks, each rank beginning with its next.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.id.rank, self.id.world_size);
        (1..ranks).map(move |k| (rank + k) % ranks)
    }

    /// Starts to send and to receive; messages without a byte are left out on both sides.
    pub(super) fn post(
        &mut self,
        sends: impl IntoIterator<Item = (usize, Arc<Vec<u8>>)>,
        receives: impl IntoIterator<Item = (usize, usize)>,
    ) -> Result<Pending> {
        let mpi = self.enter()?;
        let (comm, tag, rank) = (self.control.comm(), self.tag(), self.id.rank);
        let mut pending = Pending::default();
        for (peer, length) in receives {
            if length > 0 {
                let memory = self.pool.take(length);
                let message = mpi.receive(comm, memory, Some(peer), tag);
                let message = message.map_err(|refusal| refusal.on(rank))?;
                pending.receives.push_back((peer, message));
            }
        }
        for (peer, data) in sends {
            if !data.is_empty() {
                let message = mpi.send(comm, data, peer, tag);
                pending
                    .sends
                    .push_back(message.map_err(|refusal| refusal.on(rank))?);
            }
        }
        Ok(pending)
    }

    /// Waits until all of `pending` is there, and returns what came by rank.
    pub(super) fn wait(&mut self, pending: Pending) -> Result<Vec<(usize, Vec<u8>)>> {
        self.wait_for(pending)
            .map_err(|error| error.after(self.start.elapsed()))
    }

    fn wait_for(&mut self, mut pending: Pending) -> Result<Vec<(usize, Vec<u8>)>> {
        let mut last = Instant::now();
        loop {
            let mpi = self.enter()?;
            let polled = pending.poll(&mpi, self.pool);
            let (done, progress) = polled.map_err(|refusal| refusal.on(self.id.rank))?;
            if done {
                return Ok(mem::take(&mut pending.received));
            }
            if progress {
                last = Instant::now();
                continue;
            }
            let polled = self.control.poll(&mpi);
            drop(mpi);
            polled.map_err(|refusal| refusal.on(self.id.rank))?;
            self.control.check(self.id, &self.ours)?;
            self.check_time(&pending)?;
            let waited = last.elapsed();
            if waited < BRISK {
                thread::yield_now();
            } else {
                thread::sleep((waited / PART).clamp(SHORTEST, LONGEST));
            }
        }
    }

    /// An error when the time is over; at half of it, a warning.
    fn check_time(&mut self, pending: &Pending) -> Result<()> {
        let elapsed = self.start.elapsed();
        let over = self.limit.is_some_and(|limit| elapsed >= limit);
        let warn = self.warning.is_some_and(|at| elapsed >= at);
        if !over && !warn {
            return Ok(());
        }
        // Tells from who is missing those that wait for them as this rank does.
        let mut missing = self.control.missing(&self.ours);
        self.control.check(self.id, &self.ours)?;
        if missing.is_empty() {
            // All have come, but the data does not.
            missing = pending.receives.iter().map(|(peer, _)| *peer).collect();
            missing.sort_unstable();
        }
        let hosts: Vec<_> = missing
            .iter()
            .map(|rank| self.control.host(*rank))
            .collect();
        let (rank, operation) = (self.id.rank, self.ours.to_string());
        if over {
            return Err(GroupError::Timeout {
                rank,
                operation,
                elapsed,
                missing,
                hosts,
            });
        }
        let (next, then) = match self.limit {
            Some(limit) => (None, format!("it fails after {limit:.1?}")),
            None => (
                Some(self.start.elapsed() + self.half),
                "it goes on as long as they live".into(),
            ),
        };
        self.warning = next;
        notice::warn(format_args!(
            "rank {rank}: {operation} has waited {elapsed:.1?} for {}; {then}",
            Ranks(&missing, &hosts)
        ));
        Ok(())
    }

    /// Compares the ranks' descriptions of this operation, and returns what they sent in line, in rank order.
    ///
    /// All-gather by dissemination (Bruck, Ho, Kipnis, Upfal, Weathersby: Efficient Algorithms for All-to-All Communications in
    /// Multiport Message-Passing Systems, 1997, section 3): after round k a rank has the blocks of the 2^k ranks from its own on, in
    /// ceil(log2 n) messages in all.
    pub(super) fn meet(&mut self, payload: &[u8], number: u64, limit: usize) -> Result<Vec<Block>> {
        let (rank, ranks) = (self.id.rank, self.id.world_size);
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        for word in ops::encode(&self.ours)
            .into_iter()
            .chain([payload.len() as u64, number])
        {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(payload);
        let mut ends = vec![bytes.len()];
        let mut blocks = vec![self.parse(&bytes, limit)?.0];
        while blocks.len() < ranks {
            let have = blocks.len();
            let count = have.min(ranks - have);
            let (to, from) = ((rank + ranks - have) % ranks, (rank + have) % ranks);
            let send = Arc::new(self.pool.copy(&bytes[..ends[count - 1]]));
            let pending = self.post([(to, send)], [(from, count * (HEADER + limit))])?;
            let received = self.wait(pending)?;
            for (_, data) in received {
                let mut rest = &data[..];
                while blocks.len() < have + count {
                    let (block, length) = self.parse(rest, limit)?;
                    rest = &rest[length..];
                    ends.push(ends[ends.len() - 1] + length);
                    blocks.push(block);
                }
                bytes.extend_from_slice(&data);
                self.pool.put(data);
            }
        }
        blocks.rotate_right(rank);
        self.id.compare(
            &self.ours,
            blocks.iter().map(|block| block.descriptor),
            |rank| rank,
        )?;
        Ok(blocks)
    }

    /// The block at the beginning of `bytes`, and its length.
    fn parse(&self, bytes: &[u8], limit: usize) -> Result<(Block, usize)> {
        self.parse_block(bytes, limit)
            .ok_or_else(|| GroupError::Transport {
                rank: self.id.rank,
                operation: self.ours.to_string(),
                cause:
                    "a peer's message makes no sense: build all ranks from one version of burn-ddp"
                        .into(),
            })
    }

    fn parse_block(&self, bytes: &[u8], limit: usize) -> Option<(Block, usize)> {
        let (header, rest) = bytes.split_at_checked(HEADER)?;
        let mut words = [0; DESCRIPTOR_WORDS + 2];
        for (word, bytes) in words.iter_mut().zip(header.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        let [descriptor @ .., length, number] = words;
        let length = usize::try_from(length).ok().filter(|l| *l <= limit)?;
        let block = Block {
            descriptor: ops::decode(&descriptor)?,
            payload: rest.get(..length)?.to_vec(),
            number,
        };
        Some((block, HEADER + length))
    }
}
