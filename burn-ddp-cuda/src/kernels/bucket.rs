//! Device memory with a slot for each gradient.

use super::{BucketLayout, DType, KernelError, blocking::blocking, layout::Slot, support};
use cubecl::{
    client::Client,
    future,
    server::{Handle, ServerStorage},
};
use cubecl_environment::stream::StreamId;
use cubecl_runtime::storage::{ComputeStorage, ManagedResource};

/// Device memory with a slot for each gradient: one allocation, laid out by a [`BucketLayout`].
///
/// # A bucket is used once
///
/// Make a new one for each reduction. cubecl orders work of different streams by when memory was *allocated*, and not by when
/// it was written last: whoever reads from another stream what was written a second time may read the old values
/// (`tests/rewrites.rs` shows it). So this type keeps the handle to itself, and every call about the memory is made in the order of
/// the [stream](Self::stream) that allocated it, whatever thread makes it.
///
/// Make the bucket on the thread whose tensors go into it, because that is where its slots are read afterwards. It can be
/// filled and reduced from any thread.
///
/// # Padding
///
/// Slots begin at multiples of [`SLOT_ALIGNMENT`](super::SLOT_ALIGNMENT) bytes. What is between them is zeros, written together
/// with each slot, so that a collective or [`norm`](Self::norm) can take the bucket as a whole. Reading a bucket before every
/// slot is written is an error, [`KernelError::Unwritten`].
pub struct Bucket {
    pub(super) client: Client,
    handle: Handle,
    layout: BucketLayout,
    written: Vec<bool>,
}

impl Bucket {
    /// Memory for a bucket, in the order of this thread's stream. Does not wait.
    ///
    /// # Errors
    ///
    /// The device has no such element type, or gives less memory at once than the bucket needs. Memory that has run out shows later, at
    /// the first call that waits.
    pub fn new(client: &Client, layout: BucketLayout) -> Result<Self, KernelError> {
        support::require(client, layout.dtype())?;
        // An empty bucket gets memory too, so that a collective has a pointer.
        let bytes = layout.bytes().max(super::SLOT_ALIGNMENT as u64);
        support::require_size(client, bytes)?;
        Ok(Self {
            handle: client.empty(bytes as usize),
            client: client.clone(),
            written: (0..layout.slots())
                .map(|slot| layout.range(slot).is_some_and(|range| range.is_empty()))
                .collect(),
            layout,
        })
    }

    /// Where the slots are.
    pub fn layout(&self) -> &BucketLayout {
        &self.layout
    }

    /// The bucket's element type.
    pub fn dtype(&self) -> DType {
        self.layout.dtype()
    }

    /// The stream in whose order everything happens that is done with the bucket.
    pub fn stream(&self) -> StreamId {
        self.handle.stream
    }

    /// Waits until everything that was started on the bucket has happened on the device.
    ///
    /// # Errors
    ///
    /// Something of it failed.
    pub fn wait(&self) -> Result<(), KernelError> {
        self.on_stream(|| {
            blocking("waiting for a bucket", || {
                future::block_on(self.client.sync_buffers([&self.handle]))
            })
        })
    }

    /// Whether everything that was started on the bucket so far could be started. Waits for the runtime's thread, not for the
    /// device.
    ///
    /// # Errors
    ///
    /// A launch or the allocation failed.
    pub fn check(&self) -> Result<(), KernelError> {
        self.on_stream(|| {
            blocking("starting work on a bucket", || {
                self.client.check([&self.handle])
            })
        })
    }

    /// The memory itself, for a collective that is none of cubecl's. It stays where it is for as long as the answer lives; waits
    /// for the runtime's thread, not for the device.
    ///
    /// The pointer says nothing about order: what follows has to wait for the bucket ([`wait`](Self::wait)), and the bucket's stream for it.
    ///
    /// # Errors
    ///
    /// `S` is not the server of this device, or what was started on the bucket failed.
    pub fn resource<S: ServerStorage>(
        &self,
    ) -> Result<ManagedResource<<S::Storage as ComputeStorage>::Resource>, KernelError> {
        self.on_stream(|| {
            blocking("locating a bucket", || {
                self.client.get_resource::<S>(self.handle.clone())
            })
        })
    }

    /// Says that something else has written the whole bucket, through the [`resource`](Self::resource): a broadcast on the
    /// ranks that receive. Padding has to be zeros, as in the bucket that was sent.
    pub fn assume_written(&mut self) {
        self.written.fill(true);
    }

    /// Runs client calls in the order of the bucket's stream.
    pub(super) fn on_stream<T>(&self, calls: impl FnOnce() -> T) -> T {
        self.handle.stream.executes(calls)
    }

    pub(super) fn slot(&self, slot: usize) -> Result<Slot, KernelError> {
        self.layout.slot(slot).ok_or(KernelError::NoSuchSlot {
            slot,
            slots: self.layout.slots(),
        })
    }

    /// So many elements of the memory.
    pub(super) fn part(&self, offset: usize, len: usize) -> Handle {
        let size = self.dtype().size();
        let (offset, len) = ((offset * size) as u64, (len * size) as u64);
        let behind = self.handle.size_in_used() - offset - len;
        self.handle.clone().offset_start(offset).offset_end(behind)
    }

    /// The whole memory, with the padding.
    pub(super) fn whole(&self) -> Handle {
        self.part(0, self.layout.len())
    }

    pub(super) fn set_written(&mut self, slot: usize) {
        if let Some(written) = self.written.get_mut(slot) {
            *written = true;
        }
    }

    pub(super) fn require_written(&self, slot: usize) -> Result<(), KernelError> {
        match self.written.get(slot) {
            Some(false) => Err(KernelError::Unwritten { slot }),
            _ => Ok(()),
        }
    }

    pub(super) fn require_all_written(&self) -> Result<(), KernelError> {
        (0..self.written.len()).try_for_each(|slot| self.require_written(slot))
    }
}

impl std::fmt::Debug for Bucket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bucket")
            .field("layout", &self.layout)
            .field("stream", &self.handle.stream)
            .field("written", &self.written)
            .finish_non_exhaustive()
    }
}
