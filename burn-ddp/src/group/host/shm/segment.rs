//! A file of shared memory that all ranks of a group have mapped, or none of them.

use super::sync::Line;
use crate::group::Result;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{self, FallocateFlags, Mode, OFlags};
use std::{
    fmt,
    fs::File,
    io,
    ops::Range,
    path::{Path, PathBuf},
};

/// The environment variable that says where segments are made.
const DIRECTORY_VARIABLE: &str = "BURN_DDP_SHM_DIR";
const DIRECTORY: &str = "/dev/shm";

/// `BURN_DDP_SHM_DIR`, or else `/dev/shm`.
pub(super) fn directory() -> PathBuf {
    match std::env::var_os(DIRECTORY_VARIABLE) {
        Some(path) if !path.is_empty() => path.into(),
        _ => DIRECTORY.into(),
    }
}

/// The ranks agreed that they cannot share memory, because of what one of them met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoSharedMemory {
    /// The rank that could not.
    pub(crate) rank: usize,
    /// What it tried and what the system said.
    pub(crate) cause: String,
}

impl fmt::Display for NoSharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rank {}: {}. Give the machine (or container) a larger /dev/shm, or set \
             {DIRECTORY_VARIABLE} to a directory in memory that all ranks see",
            self.rank, self.cause
        )
    }
}

/// Gathers a small message from every rank, in rank order. Collective.
pub(super) type Exchange<'a> = dyn FnMut(&[u8]) -> Result<Vec<Vec<u8>>> + 'a;

/// Memory that other processes have mapped too.
pub(super) struct Segment {
    map: MmapRaw,
}

impl Segment {
    /// Makes a segment of `bytes` zeroed bytes, reserved in full, that all ranks have mapped.
    ///
    /// Collective. If any rank fails, all return the same [`NoSharedMemory`]. The file has no name
    /// left when this returns: the memory lives until the last rank unmaps it, however that rank ends.
    pub(super) fn create(
        rank: usize,
        job: u64,
        directory: &Path,
        bytes: usize,
        exchange: &mut Exchange<'_>,
    ) -> Result<Result<Self, NoSharedMemory>> {
        let made = if rank == 0 {
            Named::create(directory, job, bytes).map(Some)
        } else {
            Ok(None)
        };
        let name = made
            .as_ref()
            .map(|named| named.as_ref().map_or("", |named| &named.name));
        let names = match verdict(exchange(&message(name))?) {
            Ok(names) => names,
            Err(refused) => {
                // The exchange may be one among more ranks, who are in the second one.
                exchange(&message(Err(&refused.cause)))?;
                return Ok(Err(refused));
            }
        };
        let map = match &made {
            Ok(Some(named)) => map(&named.file, bytes),
            _ => open(directory, &names[0], bytes).and_then(|file| map(&file, bytes)),
        };
        let map = map.map_err(|e| {
            format!(
                "mapping {bytes} bytes of shared memory in {}: {e}",
                directory.display()
            )
        });
        let mapped = verdict(exchange(&message(map.as_ref().map(|_| "")))?);
        drop(made);
        match (mapped, map) {
            (Ok(_), Ok(map)) => Ok(Ok(Self { map })),
            (Err(refused), _) => Ok(Err(refused)),
            // This rank's own message was among the verdicts.
            (Ok(_), Err(cause)) => Ok(Err(NoSharedMemory { rank, cause })),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// The counters at the start of the segment.
    pub(super) fn lines(&self, ranks: usize) -> &[Line] {
        assert!(ranks * size_of::<Line>() <= self.len());
        // SAFETY: a mapping starts on a page, which is aligned enough, and holds that many lines. A
        // line is atomics only, so any bits are valid and any process may change them at any time.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), ranks) }
    }

    /// A part of the segment, for reading.
    ///
    /// # Safety
    ///
    /// No rank writes the range while the slice lives.
    pub(super) unsafe fn read(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len());
        // SAFETY: the range lies in the mapping, which lives as long as `self`; nobody writes
        // it, by this function's contract.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(range.start), range.len()) }
    }

    /// A part of the segment, for writing.
    ///
    /// # Safety
    ///
    /// No rank, this one included, reads or writes the range in another way while the slice lives.
    #[allow(clippy::mut_from_ref)] // what makes the reference unique is the caller's protocol
    pub(super) unsafe fn write(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len());
        // SAFETY: the range lies in the mapping, which lives as long as `self`; nobody else
        // uses it, by this function's contract.
        unsafe {
            std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(range.start), range.len())
        }
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment")
            .field("bytes", &self.len())
            .finish()
    }
}

/// A segment's file while it has a name, which ends with this value.
struct Named {
    file: File,
    name: String,
    path: PathBuf,
}

impl Named {
    fn create(directory: &Path, job: u64, bytes: usize) -> Result<Self, String> {
        let tried = |e: io::Error| {
            format!(
                "reserving {bytes} bytes of shared memory in {}: {e}",
                directory.display()
            )
        };
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|e| tried(io::Error::other(e)))?;
        let name = format!("burn-ddp-{job:016x}-{:016x}", u64::from_ne_bytes(random));
        let path = directory.join(&name);
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| tried(e.into()))?;
        let named = Self {
            file: file.into(),
            name,
            path,
        };
        // Without the reservation a full file system shows at the first write, as a signal.
        fs::fallocate(&named.file, FallocateFlags::empty(), 0, bytes as u64)
            .map_err(|e| tried(e.into()))?;
        Ok(named)
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a shared memory file could not be removed");
        }
    }
}

/// Opens the file that rank 0 made, and makes sure that it is that one.
fn open(directory: &Path, name: &str, bytes: usize) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = fs::open(directory.join(name), flags, Mode::empty())?;
    let stat = fs::fstat(&file)?;
    if stat.st_uid != rustix::process::geteuid().as_raw() || stat.st_size as u64 != bytes as u64 {
        return Err(io::Error::other(
            "another owner or size than this job's segment",
        ));
    }
    Ok(file.into())
}

fn map(file: &File, bytes: usize) -> io::Result<MmapRaw> {
    // Faults are taken here, not in the first operation.
    MmapOptions::new().len(bytes).populate().map_raw(file)
}

const DONE: u8 = 0;
const FAILED: u8 = 1;

fn message(outcome: Result<&str, &String>) -> Vec<u8> {
    let (code, text) = match outcome {
        Ok(text) => (DONE, text),
        Err(cause) => (FAILED, cause.as_str()),
    };
    [&[code], text.as_bytes()].concat()
}

/// What all ranks said, or the first refusal.
fn verdict(messages: Vec<Vec<u8>>) -> Result<Vec<String>, NoSharedMemory> {
    let read = |(rank, message): (usize, Vec<u8>)| match message.split_first() {
        Some((&DONE, text)) => Ok(String::from_utf8_lossy(text).into_owned()),
        Some((_, text)) => Err(NoSharedMemory {
            rank,
            cause: String::from_utf8_lossy(text).into_owned(),
        }),
        None => Err(NoSharedMemory {
            rank,
            cause: "an empty answer".into(),
        }),
    };
    messages.into_iter().enumerate().map(read).collect()
}
