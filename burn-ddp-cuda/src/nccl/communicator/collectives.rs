//! The operations by name.

use super::Communicator;
use crate::nccl::{DType, DevicePtr, Operation, ReduceOp, Result, Stream};

impl Communicator {
    /// Reduces `count` elements over all ranks; every rank gets the result.
    ///
    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue).
    pub unsafe fn all_reduce(
        &self,
        send: DevicePtr,
        recv: DevicePtr,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: Stream,
    ) -> Result<()> {
        let operation = Operation::AllReduce {
            send,
            recv,
            count,
            dtype,
            op,
        };
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(operation, stream) }
    }

    /// [`all_reduce`](Self::all_reduce) whose result replaces the `count` elements in `buffer`.
    ///
    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue).
    pub unsafe fn all_reduce_in_place(
        &self,
        buffer: DevicePtr,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.all_reduce(buffer, buffer, count, dtype, op, stream) }
    }

    /// Reduces `count` elements over all ranks; rank `root` gets the result.
    ///
    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue).
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn reduce(
        &self,
        send: DevicePtr,
        recv: DevicePtr,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        root: usize,
        stream: Stream,
    ) -> Result<()> {
        let operation = Operation::Reduce {
            send,
            recv,
            count,
            dtype,
            op,
            root,
        };
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(operation, stream) }
    }

    /// Replaces the `count` elements in `buffer` on every rank by the root's.
    ///
    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue).
    pub unsafe fn broadcast(
        &self,
        buffer: DevicePtr,
        count: usize,
        dtype: DType,
        root: usize,
        stream: Stream,
    ) -> Result<()> {
        let operation = Operation::Broadcast {
            send: buffer,
            recv: buffer,
            count,
            dtype,
            root,
        };
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(operation, stream) }
    }

    /// Fills `recv` (`world_size * count` elements) with every rank's `count` elements, in rank order.
    ///
    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue).
    pub unsafe fn all_gather(
        &self,
        send: DevicePtr,
        recv: DevicePtr,
        count: usize,
        dtype: DType,
        stream: Stream,
    ) -> Result<()> {
        let operation = Operation::AllGather {
            send,
            recv,
            count,
            dtype,
        };
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(operation, stream) }
    }

    /// Reduces `send` (`world_size * count` elements) over all ranks and leaves block `rank` (`count` elements) in `recv`.
    ///
    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue).
    pub unsafe fn reduce_scatter(
        &self,
        send: DevicePtr,
        recv: DevicePtr,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: Stream,
    ) -> Result<()> {
        let operation = Operation::ReduceScatter {
            send,
            recv,
            count,
            dtype,
            op,
        };
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(operation, stream) }
    }

    /// Sends `count` elements to rank `peer`. For an exchange use [`group`](Self::group): alone, a send waits on the stream for its receiver.
    ///
    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue).
    pub unsafe fn send(
        &self,
        send: DevicePtr,
        count: usize,
        dtype: DType,
        peer: usize,
        stream: Stream,
    ) -> Result<()> {
        let operation = Operation::Send {
            send,
            count,
            dtype,
            peer,
        };
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(operation, stream) }
    }

    /// Receives `count` elements from rank `peer`.
    ///
    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue).
    pub unsafe fn recv(
        &self,
        recv: DevicePtr,
        count: usize,
        dtype: DType,
        peer: usize,
        stream: Stream,
    ) -> Result<()> {
        let operation = Operation::Recv {
            recv,
            count,
            dtype,
            peer,
        };
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(operation, stream) }
    }
}
