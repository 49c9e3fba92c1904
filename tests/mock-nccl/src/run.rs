//! The work itself, on the thread of a stream.

use crate::{
    comm::{Aborted, Comm},
    element,
    operation::{Kind, Operation},
    segment::CHUNK,
    worker,
};
use std::{ptr, slice, sync::atomic::Ordering, thread, time::Duration};

/// Runs the operations of one group: collectives in order, sends and receives at the same time.
pub(crate) fn run(comm: &Comm, operations: &[Operation]) -> Result<(), Aborted> {
    let mut transfers = Vec::new();
    for operation in operations {
        if comm.faults.hits("hang", operation.number) {
            return Err(comm.hang());
        }
        if comm.faults.hits("async-error", operation.number) {
            return Err(worker::asynchronous_error(comm));
        }
        match operation.kind {
            Kind::Send { peer } => transfers.push(Transfer {
                sends: true,
                peer,
                operation: *operation,
                at: 0,
            }),
            Kind::Recv { peer } => transfers.push(Transfer {
                sends: false,
                peer,
                operation: *operation,
                at: 0,
            }),
            _ => collective(comm, operation)?,
        }
    }
    while !transfers.is_empty() {
        if comm.is_aborted() {
            return Err(Aborted);
        }
        let moved = transfers.iter_mut().map(|transfer| transfer.advance(comm));
        if !moved.fold(false, |any, moved| any | moved) {
            thread::sleep(Duration::from_micros(50));
        }
        transfers.retain(|transfer| !transfer.is_done());
    }
    Ok(())
}

fn collective(comm: &Comm, operation: &Operation) -> Result<(), Aborted> {
    let size = element::size(operation.dtype);
    let bytes = operation.count * size;
    // The blocks that every rank shows to the others, one after another.
    let blocks = match operation.kind {
        Kind::ReduceScatter { .. } => comm.world,
        _ => 1,
    };
    for block in 0..blocks {
        for at in (0..bytes).step_by(CHUNK) {
            let length = CHUNK.min(bytes - at);
            let shows = match operation.kind {
                Kind::Broadcast { root } => root == comm.rank,
                _ => true,
            };
            if shows {
                let from = (operation.send + block * bytes + at) as *const u8;
                // SAFETY: within the caller's buffer, and within this rank's chunk, which the others read only between the two steps.
                unsafe { ptr::copy_nonoverlapping(from, comm.segment.chunk(comm.rank), length) };
            }
            comm.step()?;
            take(comm, operation, block, at, length);
            comm.step()?;
        }
    }
    Ok(())
}

/// Reads what the ranks show and writes this rank's result.
fn take(comm: &Comm, operation: &Operation, block: usize, at: usize, length: usize) {
    let shown = |rank: usize| {
        // SAFETY: nobody writes to a chunk between the two steps.
        unsafe { slice::from_raw_parts(comm.segment.chunk(rank).cast_const(), length) }
    };
    let write = |at: usize, data: &[u8]| {
        // SAFETY: within the caller's buffer.
        unsafe {
            ptr::copy_nonoverlapping(data.as_ptr(), (operation.recv + at) as *mut u8, length);
        }
    };
    let reduced = |op| {
        let parts: Vec<_> = (0..comm.world).map(shown).collect();
        let mut out = vec![0; length];
        element::reduce(operation.dtype, op, &parts, &mut out);
        out
    };
    match operation.kind {
        Kind::AllReduce { op } => write(at, &reduced(op)),
        Kind::Reduce { op, root } if root == comm.rank => write(at, &reduced(op)),
        Kind::ReduceScatter { op } if block == comm.rank => write(at, &reduced(op)),
        Kind::Broadcast { root } => write(at, shown(root)),
        Kind::AllGather => {
            let bytes = operation.count * element::size(operation.dtype);
            (0..comm.world).for_each(|rank| write(rank * bytes + at, shown(rank)));
        }
        _ => {}
    }
}

/// A send or a receive that is under way.
struct Transfer {
    sends: bool,
    peer: usize,
    operation: Operation,
    /// Bytes that are done.
    at: usize,
}

impl Transfer {
    fn bytes(&self) -> usize {
        self.operation.count * element::size(self.operation.dtype)
    }

    fn is_done(&self) -> bool {
        self.at >= self.bytes()
    }

    /// Moves a chunk if the other side is ready for it.
    fn advance(&mut self, comm: &Comm) -> bool {
        if self.is_done() {
            return false;
        }
        let length = CHUNK.min(self.bytes() - self.at);
        let (from, to) = if self.sends {
            (comm.rank, self.peer)
        } else {
            (self.peer, comm.rank)
        };
        let full = comm.segment.mail(from, to);
        let there = u64::from(!self.sends);
        if full.load(Ordering::Acquire) != there {
            return false;
        }
        let chunk = comm.segment.mail_chunk(from, to);
        // SAFETY: within the caller's buffer and the chunk, which the other side leaves alone until the flag changes.
        unsafe {
            if self.sends {
                let data = (self.operation.send + self.at) as *const u8;
                ptr::copy_nonoverlapping(data, chunk, length);
            } else {
                let data = (self.operation.recv + self.at) as *mut u8;
                ptr::copy_nonoverlapping(chunk.cast_const(), data, length);
            }
        }
        full.store(1 - there, Ordering::Release);
        self.at += length;
        true
    }
}
