//! Streams: threads that do operations one after another.

use crate::{comm::Comm, lock, operation::Operation, run};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, LazyLock, Mutex, PoisonError, atomic::Ordering},
    thread,
    time::Duration,
};

static STREAMS: LazyLock<Mutex<HashMap<usize, Arc<Stream>>>> = LazyLock::new(Mutex::default);

#[derive(Default)]
pub(crate) struct Stream {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<(Arc<Comm>, Vec<Operation>)>,
    /// Operations that are not done.
    open: usize,
}

/// The stream of that number, made if there is none.
pub(crate) fn of(number: usize) -> Arc<Stream> {
    let mut streams = lock(&STREAMS);
    let start = || {
        let stream = Arc::new(Stream::default());
        let mine = stream.clone();
        thread::spawn(move || mine.run());
        stream
    };
    streams.entry(number).or_insert_with(start).clone()
}

impl Stream {
    pub(crate) fn push(&self, comm: Arc<Comm>, operations: Vec<Operation>) {
        let mut queue = lock(&self.queue);
        queue.open += 1;
        queue.tasks.push_back((comm, operations));
        self.changed.notify_all();
    }

    /// Whether everything so far is done, waiting `limit` for it at most.
    pub(crate) fn synchronize(&self, limit: Duration) -> bool {
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.queue), limit, |queue| queue.open > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0.open == 0
    }

    fn run(&self) {
        loop {
            let queue = lock(&self.queue);
            let queue = self
                .changed
                .wait_while(queue, |queue| queue.tasks.is_empty());
            let task = queue
                .unwrap_or_else(PoisonError::into_inner)
                .tasks
                .pop_front();
            let Some((comm, operations)) = task else {
                continue;
            };
            // An abort ends the operations; the stream goes on, as on a GPU.
            let _ = run::run(&comm, &operations);
            lock(&self.queue).open -= 1;
            self.changed.notify_all();
            comm.running.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
