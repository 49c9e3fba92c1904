//! The thread of a communicator: what NCCL does in the background before something is on a stream.

use crate::{
    code::{REMOTE_ERROR, SYSTEM_ERROR},
    comm::{Aborted, Comm},
    message,
    operation::Operation,
    segment::Counter,
    stream,
};
use std::{
    sync::{Arc, Weak, atomic::Ordering, mpsc::Receiver},
    thread,
    time::Duration,
};

pub(crate) enum Job {
    /// Meet the other ranks.
    Init,
    /// Put operations on a stream, as one.
    Post {
        operations: Vec<Operation>,
        stream: usize,
    },
    /// Wait for the streams and for the other ranks.
    Finalize,
    Stop,
}

/// How long NCCL takes to put something on a stream.
const LAUNCH: Duration = Duration::from_micros(200);

pub(crate) fn main(comm: &Weak<Comm>, jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        let Some(comm) = comm.upgrade() else { return };
        let result = match job {
            Job::Init => init(&comm),
            Job::Post { operations, stream } => post(&comm, operations, stream),
            Job::Finalize => finalize(&comm),
            Job::Stop => return,
        };
        if result.is_ok() {
            comm.done();
        }
    }
}

fn init(comm: &Comm) -> Result<(), Aborted> {
    if comm.faults.has("init-error") {
        message::set("mock: the start was made to fail");
        comm.set_state(SYSTEM_ERROR);
        return Ok(());
    }
    if comm.faults.has("init-hang") {
        return Err(comm.hang());
    }
    comm.segment.set(Counter::Joined, comm.rank, 1);
    comm.wait(|| comm.segment.all_at(Counter::Joined, 1))?;
    // All have it open.
    comm.step()?;
    comm.segment.unlink();
    Ok(())
}

fn post(comm: &Arc<Comm>, operations: Vec<Operation>, stream: usize) -> Result<(), Aborted> {
    let hits = |operation: &Operation| comm.faults.hits("enqueue-hang", operation.number);
    if operations.iter().any(hits) {
        return Err(comm.hang());
    }
    thread::sleep(LAUNCH);
    comm.running.fetch_add(1, Ordering::AcqRel);
    stream::of(stream).push(comm.clone(), operations);
    Ok(())
}

fn finalize(comm: &Comm) -> Result<(), Aborted> {
    if comm.faults.has("finalize-hang") {
        return Err(comm.hang());
    }
    comm.wait(|| comm.running.load(Ordering::Acquire) == 0)?;
    comm.segment.set(Counter::Left, comm.rank, 1);
    comm.wait(|| comm.segment.all_at(Counter::Left, 1))
}

/// An operation on a stream that fails in the middle.
pub(crate) fn asynchronous_error(comm: &Comm) -> Aborted {
    message::set("mock: the connection to another rank was made to break");
    comm.set_state(REMOTE_ERROR);
    comm.hang()
}
