//! Control connections between threads, for tests of the data path.

#![allow(clippy::unwrap_used)]

use super::super::control::Control;
use crate::group::{GroupError, Result, recorder::Recorder};
use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

/// What each rank has given to one exchange.
type Gathered = Vec<Option<Vec<u8>>>;

#[derive(Debug, Default)]
struct Shared {
    failure: OnceLock<(usize, GroupError)>,
    gathers: Mutex<HashMap<(u64, u64), Gathered>>,
    arrived: Condvar,
}

/// One rank's end.
#[derive(Debug)]
pub(crate) struct MockControl {
    shared: Arc<Shared>,
    rank: usize,
    world_size: usize,
    timeout: Duration,
    /// How often each tag was used.
    counts: Mutex<HashMap<u64, u64>>,
    groups: AtomicU32,
    recorder: Recorder,
}

impl MockControl {
    /// One per rank.
    pub(crate) fn all(world_size: usize, timeout: Duration) -> Vec<Arc<dyn Control>> {
        let shared = Arc::new(Shared::default());
        let control = |rank| -> Arc<dyn Control> {
            let (shared, counts) = (shared.clone(), Mutex::default());
            Arc::new(Self {
                shared,
                rank,
                world_size,
                timeout,
                counts,
                groups: AtomicU32::new(0),
                recorder: Recorder::new(),
            })
        };
        (0..world_size).map(control).collect()
    }
}

impl Control for MockControl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn job(&self) -> u64 {
        0xdd9
    }

    fn generation(&self) -> u32 {
        0
    }

    fn operation_timeout(&self) -> Duration {
        self.timeout
    }

    fn host(&self, rank: usize) -> String {
        format!("node{rank}")
    }

    fn next_group(&self) -> u32 {
        self.groups.fetch_add(1, Ordering::Relaxed)
    }

    fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    fn exchange(&self, tag: u64, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut counts = self.counts.lock().unwrap();
        let count = counts.entry(tag).or_default();
        let key = (tag, *count);
        *count += 1;
        drop(counts);
        let mut gathers = self.shared.gathers.lock().unwrap();
        let empty = || vec![None; self.world_size];
        gathers.entry(key).or_insert_with(empty)[self.rank] = Some(data.to_vec());
        self.shared.arrived.notify_all();
        let gathers = self
            .shared
            .arrived
            .wait_while(gathers, |gathers| gathers[&key].iter().any(Option::is_none));
        Ok(gathers.unwrap()[&key].iter().flatten().cloned().collect())
    }

    fn check(&self, _: &dyn Fn() -> Vec<usize>, _: &dyn Fn() -> String) -> Result<()> {
        match self.shared.failure.get() {
            None => Ok(()),
            Some((origin, error)) if *origin == self.rank => Err(error.clone()),
            Some((origin, error)) => {
                let reason = match error {
                    GroupError::Aborted { reason, .. } => reason.clone(),
                    error => error.to_string(),
                };
                Err(GroupError::aborted(self.rank, *origin, reason))
            }
        }
    }

    fn await_report(&self) {}

    fn fail(&self, error: GroupError) {
        let _ = self.shared.failure.set((self.rank, error));
    }
}
