//! Collectives in the background, in submission order.

use std::{
    sync::mpsc::{self, Receiver, Sender},
    thread,
};

/// The queue's thread is gone: it panicked, which is a defect of the operation it ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the communication thread ended unexpectedly; its panic message is on stderr")]
pub struct QueueClosed;

type Task = Box<dyn FnOnce() + Send>;

/// A thread that runs operations one after another, in the order of submission.
///
/// The order of operations on a group must be the same on all ranks, so every group that is used
/// asynchronously has a queue of its own, and nothing else calls its collectives.
#[derive(Debug)]
pub struct WorkQueue {
    tasks: Sender<Task>,
}

impl WorkQueue {
    /// Starts the thread, named `name` (15 bytes are visible in `top`).
    ///
    /// The thread ends when the queue is dropped and what was submitted has run.
    ///
    /// # Errors
    ///
    /// When the operating system has no thread to give.
    pub fn new(name: &str) -> std::io::Result<Self> {
        let (tasks, queue) = mpsc::channel::<Task>();
        thread::Builder::new()
            .name(name.to_string())
            .spawn(move || queue.into_iter().for_each(|task| task()))?;
        Ok(Self { tasks })
    }

    /// Appends `operation`. Does not block.
    pub fn submit<T: Send + 'static>(
        &self,
        operation: impl FnOnce() -> T + Send + 'static,
    ) -> Work<T> {
        let (result, receiver) = mpsc::sync_channel(1);
        // A closed queue drops the task and with it `result`, which `wait` reports. A caller that
        // dropped its `Work` does not want the value.
        let _ = self.tasks.send(Box::new(move || {
            let _ = result.send(operation());
        }));
        Work { receiver }
    }
}

/// A submitted operation.
#[derive(Debug)]
pub struct Work<T> {
    receiver: Receiver<T>,
}

impl<T> Work<T> {
    /// Blocks until the operation has run. Operations of a process group end by their own deadline.
    ///
    /// # Errors
    ///
    /// [`QueueClosed`] when the operation panicked.
    pub fn wait(self) -> Result<T, QueueClosed> {
        self.receiver.recv().map_err(|_| QueueClosed)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn operations_run_in_order_and_return_their_values() {
        let queue = WorkQueue::new("test-queue").expect("a thread");
        let (log, seen) = mpsc::channel();
        let works: Vec<_> = (0..50)
            .map(|i| {
                let log = log.clone();
                queue.submit(move || log.send(i).map(|()| i * 2))
            })
            .collect();
        for (i, work) in works.into_iter().enumerate() {
            assert_eq!(work.wait(), Ok(Ok(i * 2)));
        }
        drop(log);
        assert_eq!(seen.iter().collect::<Vec<_>>(), (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn a_panicking_operation_is_an_error_for_it_and_all_later_ones() {
        let queue = WorkQueue::new("test-queue").expect("a thread");
        let bad = queue.submit(|| panic!("expected by the test"));
        let later = queue.submit(|| 1);
        assert_eq!(bad.wait(), Err::<(), _>(QueueClosed));
        assert_eq!(later.wait(), Err(QueueClosed));
    }
}
