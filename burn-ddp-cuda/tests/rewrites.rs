//! Why a bucket is used once and under its own stream: cubecl's accounting of streams knows when memory was allocated, and not
//! when it was written.
//!
//! This runs the accounting of the CUDA runtime without CUDA, and pins what it does in the version this was written for. If one of
//! these fails after an upgrade, see whether the hazard is gone: then [`Bucket`](burn_ddp_cuda::kernels::Bucket) may be
//! reused, and read from other streams.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cubecl::{
    MemoryConfiguration,
    ir::MemoryDeviceProperties,
    server::{BufferBinding, Handle, ServerError},
};
use cubecl_common::device::{DeviceId, ServiceId};
use cubecl_environment::stream::StreamId;
use cubecl_server::{
    logging::ServerLogger,
    memory_management::{
        ErrorGraph, FailureId, MemoryAllocationMode, MemoryManagement, MemoryManagementOptions,
        PageUpdate,
    },
    storage::BytesStorage,
    stream::{EventStreamBackend, MultiStream, StreamMemory},
};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// Streams like those of the CUDA runtime, of which only the memory is real. What would be waits on the device is counted.
struct Counting {
    waits: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Stream {
    memory: MemoryManagement<BytesStorage>,
    waits: Arc<AtomicUsize>,
}

impl StreamMemory for Stream {
    fn failure(&self, binding: &BufferBinding) -> Option<FailureId> {
        self.memory.failure(&binding.memory, binding.range())
    }

    fn taint(&mut self, binding: &BufferBinding, failure: FailureId, failures: &mut ErrorGraph) {
        self.memory
            .taint(&binding.memory, binding.range(), failure, failures);
    }

    fn written(&mut self, binding: &BufferBinding, failures: &mut ErrorGraph) {
        self.memory
            .written(&binding.memory, binding.range(), failures);
    }
}

impl EventStreamBackend for Counting {
    type Stream = Stream;
    type Event = ();

    fn create_stream(&self) -> Result<Stream, ServerError> {
        Ok(Stream {
            memory: MemoryManagement::from_configuration(
                BytesStorage::default(),
                &MemoryDeviceProperties::new(1 << 20, 64),
                MemoryConfiguration::Adaptive,
                Arc::new(ServerLogger::default()),
                MemoryManagementOptions::new("rewrites").mode(MemoryAllocationMode::Auto),
            ),
            waits: self.waits.clone(),
        })
    }

    /// As `CudaStreamBackend` does it.
    fn handle_cursor(stream: &Stream, binding: &BufferBinding) -> u64 {
        stream
            .memory
            .get_cursor(binding.memory.clone())
            .unwrap_or(u64::MAX)
    }

    fn flush(_: &mut Stream, _: &mut ErrorGraph) {}

    fn wait_event(stream: &mut Stream, (): ()) -> Result<(), ServerError> {
        stream.waits.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn wait_event_sync((): ()) -> Result<(), ServerError> {
        Ok(())
    }
}

/// The accounting, and two streams.
struct Streams {
    streams: MultiStream<Counting>,
    waits: Arc<AtomicUsize>,
}

const A: StreamId = StreamId { value: 1 };
const B: StreamId = StreamId { value: 2 };

impl Streams {
    fn new() -> Self {
        let waits = Arc::new(AtomicUsize::new(0));
        let backend = Counting {
            waits: waits.clone(),
        };
        let streams = MultiStream::new(Arc::new(ServerLogger::default()), backend, 4);
        Self { streams, waits }
    }

    /// Memory of a stream, as `Command::empty` gives it.
    fn allocate(&mut self, stream: StreamId) -> Handle {
        let service = ServiceId::of::<Counting>(DeviceId::new(0, 0));
        let handle = Handle::new(service, stream, 64);
        let mut resolved = self.streams.resolve(stream, [].into_iter()).unwrap();
        let cursor = resolved.cursor;
        let (stream, failures) = resolved.current_and_failures();
        let reserved = stream
            .memory
            .reserve(64, PageUpdate::Allow, failures)
            .unwrap();
        stream
            .memory
            .bind(reserved, handle.memory.clone(), cursor, failures)
            .unwrap();
        drop(resolved);
        handle
    }

    /// A launch on `stream` with this argument, read or written: the accounting makes no difference. How often the stream
    /// was made to wait for another.
    fn launch(&mut self, stream: StreamId, argument: &Handle) -> usize {
        let before = self.waits.load(Ordering::Relaxed);
        let binding = argument.clone().binding();
        let resolved = self
            .streams
            .resolve(stream, [&binding].into_iter())
            .unwrap();
        // Not those of the release of the argument, which happens when this is dropped.
        let waits = self.waits.load(Ordering::Relaxed) - before;
        drop(resolved);
        waits
    }
}

#[test]
fn the_first_read_on_another_stream_waits() {
    let mut streams = Streams::new();
    let bucket = streams.allocate(A);
    assert_eq!(streams.launch(A, &bucket), 0, "its own stream writes");
    assert_eq!(streams.launch(B, &bucket), 1, "another reads");
}

#[test]
fn a_read_after_a_rewrite_does_not_wait() {
    let mut streams = Streams::new();
    let bucket = streams.allocate(A);
    streams.launch(A, &bucket);
    assert_eq!(streams.launch(B, &bucket), 1, "the first read");
    streams.launch(A, &bucket);
    assert_eq!(streams.launch(B, &bucket), 0, "stale");
}

#[test]
fn the_owner_does_not_wait_for_a_foreign_write() {
    let mut streams = Streams::new();
    let bucket = streams.allocate(A);
    assert_eq!(streams.launch(B, &bucket), 1, "another stream writes");
    assert_eq!(streams.launch(A, &bucket), 0, "stale");
}

#[test]
fn even_the_first_read_does_not_wait_where_the_streams_met_between_allocation_and_write() {
    let mut streams = Streams::new();
    let bucket = streams.allocate(A);
    let other = streams.allocate(A);
    assert_eq!(streams.launch(B, &other), 1, "B waits for A");
    streams.launch(A, &bucket);
    assert_eq!(streams.launch(B, &bucket), 0, "stale");
}
