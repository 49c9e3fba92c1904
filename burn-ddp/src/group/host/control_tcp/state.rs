//! What callers and the monitor thread share.

use super::{
    super::poll::Waker,
    Membership,
    frame::{Failure, Frame},
    report::Collection,
};
use crate::group::{GroupError, Result, recorder::Recorder};
use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Longest sleep on the condition variable, so that nothing depends on a wake-up alone.
const SLICE: Duration = Duration::from_millis(500);
/// Rank 0 knows which ranks are missing from an exchange, so the others leave it the time to say so.
const GRACE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) member: Membership,
    /// By rank.
    pub(super) hosts: Vec<String>,
    pub(super) recorder: Recorder,
    pub(super) waker: Arc<Waker>,
    /// Set with, and before the release of, the first failure or departure in `state`.
    troubled: AtomicBool,
    state: Mutex<State>,
    pub(super) changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct State {
    failure: Option<Failure>,
    /// On rank 0, after a failure, until the report is out.
    pub(super) collection: Option<Collection>,
    left: BTreeSet<usize>,
    /// When rank 0 left.
    alone_since: Option<Instant>,
    /// For the monitor to send: to rank 0, or from rank 0 to all.
    outbox: Vec<Frame>,
    closing: bool,
    /// The monitor has tried to send the failure.
    announced: bool,
    pub(super) finished: bool,
    /// Next sequence number by tag.
    sequences: HashMap<u64, u64>,
    /// Complete exchanges that their caller has not taken yet.
    complete: HashMap<(u64, u64), Vec<Vec<u8>>>,
    /// On rank 0: exchanges that wait for contributions.
    gathering: HashMap<(u64, u64), Gathering>,
}

/// An exchange that some ranks have come to.
#[derive(Debug)]
struct Gathering {
    since: Instant,
    parts: Vec<Option<Vec<u8>>>,
}

impl Gathering {
    fn missing(&self) -> Vec<usize> {
        (0..self.parts.len())
            .filter(|rank| self.parts[*rank].is_none())
            .collect()
    }
}

/// What the monitor has to do next.
pub(super) struct Work {
    pub(super) frames: Vec<Frame>,
    pub(super) closing: bool,
}

impl Shared {
    pub(super) fn new(member: Membership, hosts: Vec<String>, waker: Arc<Waker>) -> Self {
        Self {
            member,
            hosts,
            recorder: Recorder::new(),
            waker,
            troubled: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Every change is a single assignment or insertion, so a poisoned lock holds a usable state.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn check(
        &self,
        missing: &dyn Fn() -> Vec<usize>,
        operation: &dyn Fn() -> String,
    ) -> Result<()> {
        if !self.troubled.load(Ordering::Acquire) {
            return Ok(());
        }
        let (failure, left, alone_since) = {
            let state = self.lock();
            (state.failure.clone(), state.left.clone(), state.alone_since)
        };
        let rank = self.member.rank;
        if let Some(failure) = failure {
            return Err(failure.seen_by(rank, &self.hosts, operation));
        }
        // The lock is free here: the closure is the caller's.
        // Without rank 0 nobody tells this rank what becomes of the others, and every operation needs rank 0 as well. What
        // is still on its way from before has had as long as a silent peer gets.
        let limit = self.member.heartbeat.limit;
        let alone = alone_since
            .filter(|since| since.elapsed() > limit)
            .map(|_| 0);
        let missing = || missing().into_iter().find(|peer| left.contains(peer));
        match alone.or_else(missing) {
            None => Ok(()),
            Some(peer) => {
                // Recorded, so that all later operations fail too.
                let failure = Failure::Left { peer };
                self.fail(failure.clone());
                Err(failure.seen_by(rank, &self.hosts, operation))
            }
        }
    }

    /// The first failure is kept and told to the peers.
    pub(super) fn fail(&self, failure: Failure) {
        self.fail_locked(&mut self.lock(), failure);
    }

    fn fail_locked(&self, state: &mut State, failure: Failure) {
        if state.failure.is_some() {
            return;
        }
        state.outbox.push(Frame::Failed(failure.clone()));
        if failure.deserves_report() {
            let tail = self.recorder.tail();
            if self.member.rank == 0 {
                let cause = failure.seen_by(0, &self.hosts, &String::new);
                let ranks = self.member.world_size;
                let hang = failure.is_timeout();
                state.collection = Some(Collection::new(ranks, cause, hang, tail));
            } else {
                state.outbox.push(Frame::Tail(tail));
            }
        }
        state.failure = Some(failure);
        self.troubled.store(true, Ordering::Release);
        self.notify();
    }

    fn notify(&self) {
        self.changed.notify_all();
        self.waker.wake();
    }

    /// A peer said goodbye.
    pub(super) fn left(&self, peer: usize) {
        let mut state = self.lock();
        if !state.left.insert(peer) {
            return;
        }
        if peer == 0 {
            state.alone_since = Some(Instant::now());
        }
        self.troubled.store(true, Ordering::Release);
        if self.member.rank == 0 {
            state.outbox.push(Frame::Left { peer });
            // Exchanges that wait for it wait in vain.
            if state
                .gathering
                .values()
                .any(|gathering| gathering.parts[peer].is_none())
            {
                self.fail_locked(&mut state, Failure::Left { peer });
            }
        }
        self.notify();
    }

    pub(super) fn exchange(&self, tag: u64, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        let sequence = {
            let mut state = self.lock();
            let next = state.sequences.entry(tag).or_default();
            *next += 1;
            *next - 1
        };
        let running = self.recorder.begin_exchange(tag, sequence);
        running.end(self.gather((tag, sequence), data))
    }

    fn gather(&self, key: (u64, u64), data: &[u8]) -> Result<Vec<Vec<u8>>> {
        let rank = self.member.rank;
        let (tag, sequence) = key;
        let operation = || format!("control exchange {tag:#x}");
        let start = Instant::now();
        let limit = self.member.operation_timeout;
        let deadline = start + limit + if rank == 0 { Duration::ZERO } else { GRACE };
        let mut state = self.lock();
        if rank == 0 {
            self.give_locked(&mut state, key, 0, data.to_vec());
        } else {
            state.outbox.push(Frame::Give {
                tag,
                sequence,
                data: data.to_vec(),
            });
            self.waker.wake();
        }
        loop {
            if let Some(parts) = state.complete.remove(&key) {
                return Ok(parts);
            }
            // On rank 0 a departure that matters has become a failure; the others need rank 0 itself.
            if state.failure.is_none() && state.left.contains(&0) {
                self.fail_locked(&mut state, Failure::Left { peer: 0 });
            }
            if let Some(failure) = &state.failure {
                return Err(failure.seen_by(rank, &self.hosts, &operation));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = state
                    .gathering
                    .get(&key)
                    .map_or(vec![0], Gathering::missing);
                let error = self.timeout(operation(), start.elapsed(), missing);
                self.fail_locked(&mut state, Failure::from_error(rank, error.clone()));
                return Err(error);
            }
            state = self
                .changed
                .wait_timeout(state, left.min(SLICE))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// On rank 0: a contribution has come.
    pub(super) fn give(&self, key: (u64, u64), peer: usize, data: Vec<u8>) {
        self.give_locked(&mut self.lock(), key, peer, data);
    }

    fn give_locked(&self, state: &mut State, key: (u64, u64), peer: usize, data: Vec<u8>) {
        let gathering = state.gathering.entry(key).or_insert_with(|| Gathering {
            since: Instant::now(),
            parts: vec![None; self.member.world_size],
        });
        gathering.parts[peer] = Some(data);
        let missing = gathering.missing();
        if missing.is_empty() {
            if let Some(gathering) = state.gathering.remove(&key) {
                let parts: Vec<_> = gathering.parts.into_iter().flatten().collect();
                let (tag, sequence) = key;
                state.outbox.push(Frame::All {
                    tag,
                    sequence,
                    parts: parts.clone(),
                });
                state.complete.insert(key, parts);
            }
        } else if let Some(peer) = missing.into_iter().find(|peer| state.left.contains(peer)) {
            self.fail_locked(state, Failure::Left { peer });
        }
        self.notify();
    }

    /// On other ranks: rank 0 has all contributions.
    pub(super) fn complete(&self, key: (u64, u64), parts: Vec<Vec<u8>>) {
        self.lock().complete.insert(key, parts);
        self.changed.notify_all();
    }

    fn timeout(&self, operation: String, elapsed: Duration, missing: Vec<usize>) -> GroupError {
        let host = |rank: &usize| self.hosts.get(*rank).cloned().unwrap_or_default();
        GroupError::Timeout {
            rank: self.member.rank,
            operation,
            elapsed,
            hosts: missing.iter().map(host).collect(),
            missing,
        }
    }

    /// On rank 0: an exchange that this rank itself has not come to still ends for the others.
    pub(super) fn expire(&self, now: Instant) {
        let (rank, limit) = (self.member.rank, self.member.operation_timeout);
        let mut state = self.lock();
        let overdue = state.gathering.iter().find_map(|((tag, _), gathering)| {
            let elapsed = now.saturating_duration_since(gathering.since);
            let operation = || format!("control exchange {tag:#x}");
            (elapsed > limit).then(|| self.timeout(operation(), elapsed, gathering.missing()))
        });
        if let Some(error) = overdue {
            self.fail_locked(&mut state, Failure::from_error(rank, error));
        }
    }

    /// By the monitor: the failure is with the kernel, as far as the peers take it.
    pub(super) fn announced(&self) {
        self.lock().announced = true;
        self.changed.notify_all();
    }

    /// Gives the monitor the moment it needs to send the failure, since the process may be about to exit.
    pub(super) fn wait_for_announcement(&self, limit: Duration) {
        let waiting = |state: &mut State| !state.announced && !state.finished;
        drop(self.changed.wait_timeout_while(self.lock(), limit, waiting));
    }

    pub(super) fn close(&self) {
        self.lock().closing = true;
        self.waker.wake();
    }

    pub(super) fn work(&self) -> Work {
        let mut state = self.lock();
        Work {
            frames: std::mem::take(&mut state.outbox),
            closing: state.closing,
        }
    }

    /// By the monitor, last.
    pub(super) fn finish(&self) {
        self.lock().finished = true;
        self.changed.notify_all();
    }

    /// Whether the monitor is done.
    pub(super) fn wait_for_monitor(&self, limit: Duration) -> bool {
        let waiting = |state: &mut State| !state.finished;
        let waited = self.changed.wait_timeout_while(self.lock(), limit, waiting);
        waited.unwrap_or_else(PoisonError::into_inner).0.finished
    }

    /// Exchanges that are not over, for tests.
    #[cfg(test)]
    pub(super) fn pending(&self) -> usize {
        let state = self.lock();
        state.gathering.len() + state.complete.len()
    }

    #[cfg(test)]
    pub(super) fn left_ranks(&self) -> Vec<usize> {
        self.lock().left.iter().copied().collect()
    }
}
