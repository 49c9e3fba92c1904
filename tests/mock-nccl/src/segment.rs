//! The file that the ranks of a communicator map: who has come, how far each is, and the data on their way.

use memmap2::{MmapOptions, MmapRaw};
use std::{
    env,
    fs::{self, OpenOptions},
    io,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
};

/// Bytes that travel at a time; small, so that tests need several rounds.
pub(crate) const CHUNK: usize = 16 * 1024;

/// Each counter has a cache line.
const LINE: usize = 64;

/// A counter of each rank.
#[derive(Clone, Copy)]
pub(crate) enum Counter {
    /// One once the rank has come.
    Joined,
    /// How many steps of collectives it has made.
    Step,
    /// One once it has finalised.
    Left,
}

pub(crate) struct Segment {
    map: MmapRaw,
    path: PathBuf,
    world: usize,
}

impl Segment {
    /// The file of the communicator `id`, made if no rank has made it.
    pub(crate) fn open(id: &str, world: usize) -> io::Result<Self> {
        let directory = env::var_os("MOCK_NCCL_DIR").map_or_else(env::temp_dir, PathBuf::from);
        let path = directory.join(id);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)?;
        let bytes = (3 * world + world * world) * LINE + (world + world * world) * CHUNK;
        // New bytes are zeros; a length that it has already changes nothing.
        file.set_len(bytes as u64)?;
        let map = MmapOptions::new().len(bytes).map_raw(&file)?;
        Ok(Self { map, path, world })
    }

    /// Takes the name away; the ranks that have mapped it keep it.
    pub(crate) fn unlink(&self) {
        let _ = fs::remove_file(&self.path);
    }

    fn line(&self, index: usize) -> &AtomicU64 {
        assert!(index < 3 * self.world + self.world * self.world);
        // SAFETY: within the mapping, which lives as long as `self`; aligned, since a mapping begins at a page; every process uses it as an
        // atomic only.
        unsafe { &*self.map.as_ptr().add(index * LINE).cast::<AtomicU64>() }
    }

    fn counter(&self, counter: Counter, rank: usize) -> &AtomicU64 {
        self.line(counter as usize * self.world + rank)
    }

    pub(crate) fn set(&self, counter: Counter, rank: usize, value: u64) {
        self.counter(counter, rank).store(value, Ordering::Release);
    }

    /// Whether every rank's counter has come to `value`.
    pub(crate) fn all_at(&self, counter: Counter, value: u64) -> bool {
        (0..self.world).all(|rank| self.counter(counter, rank).load(Ordering::Acquire) >= value)
    }

    /// One when the chunk from rank `from` to rank `to` is full, zero when it is empty.
    pub(crate) fn mail(&self, from: usize, to: usize) -> &AtomicU64 {
        self.line(3 * self.world + from * self.world + to)
    }

    /// Rank `rank`'s chunk for collectives: [`CHUNK`] bytes.
    pub(crate) fn chunk(&self, rank: usize) -> *mut u8 {
        self.data(rank)
    }

    /// The chunk from rank `from` to rank `to`.
    pub(crate) fn mail_chunk(&self, from: usize, to: usize) -> *mut u8 {
        self.data(self.world + from * self.world + to)
    }

    fn data(&self, index: usize) -> *mut u8 {
        assert!(index < self.world + self.world * self.world);
        let lines = 3 * self.world + self.world * self.world;
        self.map
            .as_mut_ptr()
            .wrapping_add(lines * LINE + index * CHUNK)
    }
}
