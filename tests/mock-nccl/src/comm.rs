//! A communicator.

use crate::{
    code::{IN_PROGRESS, SUCCESS},
    faults::Faults,
    lock,
    segment::{Counter, Segment},
    worker::Job,
};
use std::{
    ffi::c_int,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering},
        mpsc::Sender,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

pub(crate) struct Comm {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) segment: Segment,
    pub(crate) faults: Faults,
    /// What ncclCommGetAsyncError says.
    state: AtomicI32,
    aborted: AtomicBool,
    /// Operations that were called so far.
    pub(crate) called: AtomicU64,
    /// Operations that are on a stream.
    pub(crate) running: AtomicUsize,
    /// Steps of collectives that this rank has made.
    steps: AtomicU64,
    jobs: Sender<Job>,
    pub(crate) worker: Mutex<Option<JoinHandle<()>>>,
}

/// The communicator was aborted.
pub(crate) struct Aborted;

impl Comm {
    pub(crate) fn new(
        rank: usize,
        world: usize,
        segment: Segment,
        faults: Faults,
        jobs: Sender<Job>,
    ) -> Self {
        Self {
            rank,
            world,
            segment,
            faults,
            state: AtomicI32::new(IN_PROGRESS),
            aborted: AtomicBool::new(false),
            called: AtomicU64::new(0),
            running: AtomicUsize::new(0),
            steps: AtomicU64::new(0),
            jobs,
            worker: Mutex::new(None),
        }
    }

    pub(crate) fn state(&self) -> c_int {
        self.state.load(Ordering::Acquire)
    }

    pub(crate) fn set_state(&self, state: c_int) {
        self.state.store(state, Ordering::Release);
    }

    /// The call that was in progress is done; an error stays.
    pub(crate) fn done(&self) {
        let _ =
            self.state
                .compare_exchange(IN_PROGRESS, SUCCESS, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Hands work to the thread of the communicator.
    pub(crate) fn submit(&self, job: Job) {
        self.set_state(IN_PROGRESS);
        let _ = self.jobs.send(job);
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Ends the thread of the communicator and everything on its streams, and waits for both.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        self.segment.unlink();
        self.stop();
        while self.running.load(Ordering::Acquire) > 0 {
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// Ends the thread of the communicator.
    pub(crate) fn stop(&self) {
        let _ = self.jobs.send(Job::Stop);
        if let Some(worker) = lock(&self.worker).take() {
            let _ = worker.join();
        }
    }

    /// Waits until `there` holds or the communicator is aborted.
    pub(crate) fn wait(&self, there: impl Fn() -> bool) -> Result<(), Aborted> {
        let mut looks = 0;
        while !there() {
            if self.is_aborted() {
                return Err(Aborted);
            }
            looks += 1;
            if looks < 20 {
                thread::yield_now();
            } else {
                thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    }

    /// Waits for the abort.
    pub(crate) fn hang(&self) -> Aborted {
        let _ = self.wait(|| false);
        Aborted
    }

    /// Returns when every rank has made this step.
    pub(crate) fn step(&self) -> Result<(), Aborted> {
        let step = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        self.segment.set(Counter::Step, self.rank, step);
        self.wait(|| self.segment.all_at(Counter::Step, step))
    }
}
