//! The last operations of this rank, always recorded, for the moment when something goes wrong.
//!
//! A ring of fixed size; an entry costs two uncontended locks and two looks at the clock. The exchanges over the control
//! connections, which set up groups, are recorded as well. When the job fails, the ranks' [`Tail`]s are gathered over the control connections and [`Report`] puts them side by side. PyTorch calls this
//! the flight recorder.

#[cfg(any(test, fuzzing))]
pub(super) mod fuzzing;
mod report;

pub(crate) use report::Report;

use super::{DType, OpDescriptor, OpKind, Result};
use serde::{Deserialize, Serialize};
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Operations kept per process, over all its groups.
pub(crate) const CAPACITY: usize = 256;

/// What this process has done last.
#[derive(Debug)]
pub(crate) struct Recorder {
    start: Instant,
    ring: Mutex<Ring>,
}

#[derive(Debug)]
struct Ring {
    /// At most [`CAPACITY`].
    entries: Vec<Entry>,
    /// Operations started so far.
    count: u64,
    /// Where the next one goes, unless what is there still runs.
    next: usize,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Tells the entry from one that has taken its place since.
    number: u64,
    operation: Operation,
    started: Duration,
    end: Option<(Duration, bool)>,
}

/// One operation, without what is the same for all operations of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Operation {
    /// Of a group.
    Collective {
        group: u32,
        buffer: u32,
        sequence: u64,
        kind: OpKind,
        dtype: DType,
        count: u64,
    },
    /// Over the control connections, as in the set-up of a group.
    Exchange { tag: u64, sequence: u64 },
}

/// How an operation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum State {
    Pending,
    /// It took this many microseconds.
    Completed(u64),
    Failed(u64),
}

/// One operation of a [`Tail`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    operation: Operation,
    /// Microseconds from its start to the moment the tail was taken. Ranks take their tails at nearly the same
    /// moment, so ages compare where clocks would not.
    age: u64,
    state: State,
}

/// A rank's last operations, by age, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tail {
    records: Vec<Record>,
}

impl Recorder {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            ring: Mutex::new(Ring {
                entries: Vec::with_capacity(CAPACITY),
                count: 0,
                next: 0,
            }),
        }
    }

    /// Every change under the lock is complete before anything could panic.
    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a collective begins.
    pub(crate) fn begin(&self, descriptor: &OpDescriptor) -> Running<'_> {
        self.record(Operation::from(descriptor))
    }

    /// Records that this rank comes to the exchange of this number under `tag`.
    pub(crate) fn begin_exchange(&self, tag: u64, sequence: u64) -> Running<'_> {
        self.record(Operation::Exchange { tag, sequence })
    }

    fn record(&self, operation: Operation) -> Running<'_> {
        let started = self.start.elapsed();
        let (slot, number) = self.lock().push(operation, started);
        Running {
            recorder: self,
            slot,
            number,
            started,
        }
    }

    /// The last operations as of now.
    pub(crate) fn tail(&self) -> Tail {
        let mut entries = self.lock().entries.clone();
        let now = self.start.elapsed();
        entries.sort_by_key(|entry| entry.number);
        let record = |entry: Entry| Record {
            operation: entry.operation,
            age: micros(now.saturating_sub(entry.started)),
            state: match entry.end {
                None => State::Pending,
                Some((end, true)) => State::Completed(micros(end.saturating_sub(entry.started))),
                Some((end, false)) => State::Failed(micros(end.saturating_sub(entry.started))),
            },
        };
        Tail {
            records: entries.into_iter().map(record).collect(),
        }
    }
}

impl Ring {
    fn push(&mut self, operation: Operation, started: Duration) -> (usize, u64) {
        let entry = Entry {
            number: self.count,
            operation,
            started,
            end: None,
        };
        self.count += 1;
        if self.entries.len() < CAPACITY {
            self.entries.push(entry);
            return (self.entries.len() - 1, entry.number);
        }
        // What still runs says most about a hang, however long ago it began. There is one such entry per thread.
        let pending = |slot: &usize| self.entries[*slot % CAPACITY].end.is_none();
        let slot = (self.next..self.next + CAPACITY)
            .find(|slot| !pending(slot))
            .unwrap_or(self.next)
            % CAPACITY;
        self.next = (slot + 1) % CAPACITY;
        self.entries[slot] = entry;
        (slot, entry.number)
    }
}

/// An operation under way. One that is dropped without [`end`](Self::end), by a panic, stays pending in the record.
#[must_use = "an operation that does not end stays pending in the record"]
pub(crate) struct Running<'a> {
    recorder: &'a Recorder,
    slot: usize,
    number: u64,
    started: Duration,
}

impl Running<'_> {
    /// Records the end. An error learns how long the operation had run.
    pub(crate) fn end<T>(self, result: Result<T>) -> Result<T> {
        let now = self.recorder.start.elapsed();
        let mut ring = self.recorder.lock();
        if let Some(entry) = ring
            .entries
            .get_mut(self.slot)
            .filter(|entry| entry.number == self.number)
        {
            entry.end = Some((now, result.is_ok()));
        }
        drop(ring);
        result.map_err(|error| error.after(now.saturating_sub(self.started)))
    }
}

impl Tail {
    /// Whether a recorder could have made it.
    pub(crate) fn is_bounded(&self) -> bool {
        self.records.len() <= CAPACITY
    }
}

impl From<&OpDescriptor> for Operation {
    fn from(d: &OpDescriptor) -> Self {
        Operation::Collective {
            group: d.group,
            buffer: d.buffer,
            sequence: d.sequence,
            kind: d.kind,
            dtype: d.dtype,
            count: d.count,
        }
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
