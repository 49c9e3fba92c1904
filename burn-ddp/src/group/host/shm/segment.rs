//! A file of shared memory that all ranks of a group have mapped, or none of them.

use super::sync::Line;
use crate::group::{GroupError, Result, host::control::Control};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{self, FallocateFlags, Mode, OFlags};
use std::{
    fmt,
    fs::File,
    io,
    ops::Range,
    os::fd::AsRawFd,
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

impl NoSharedMemory {
    /// The failure of a job whose new group has no other way.
    pub(in crate::group::host) fn of_new_group(&self, control: &dyn Control) -> GroupError {
        let error = GroupError::Transport {
            rank: control.rank(),
            operation: "new_group".into(),
            cause: self.to_string(),
        };
        control.fail(error.clone());
        error
    }
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
    /// How often [`create`](Self::create) exchanges, whatever it comes to.
    pub(super) const EXCHANGES: usize = 2;

    /// Makes a segment of `bytes` zeroed bytes, reserved in full, that all ranks have mapped.
    ///
    /// Collective. If any rank fails, all return the same [`NoSharedMemory`]. The memory lives until the last
    /// rank unmaps it, however that rank ends: its file has no name when this returns, and never had one where the file system
    /// allows that, so that nothing is left behind by ranks that are killed in here.
    pub(super) fn create(
        rank: usize,
        job: u64,
        directory: &Path,
        bytes: usize,
        exchange: &mut Exchange<'_>,
    ) -> Result<Result<Self, NoSharedMemory>> {
        // A file system without nameless files has another chance.
        let make = || {
            Backing::nameless(directory, bytes).or_else(|_| Backing::named(directory, job, bytes))
        };
        Self::share(rank, directory, bytes, &make, exchange)
    }

    /// Rank 0 makes the file, the others open it.
    fn share(
        rank: usize,
        directory: &Path,
        bytes: usize,
        make: &dyn Fn() -> Result<Backing, String>,
        exchange: &mut Exchange<'_>,
    ) -> Result<Result<Self, NoSharedMemory>> {
        let made = match rank {
            0 => make().map(Some),
            _ => Ok(None),
        };
        let place = made
            .as_ref()
            .map(|backing| backing.as_ref().map_or("", |backing| &backing.place));
        let places = match verdict(exchange(&message(place))?) {
            Ok(places) => places,
            Err(refused) => {
                // The exchange may be one among more ranks, who are in the second one.
                exchange(&message(Err(&refused.cause)))?;
                return Ok(Err(refused));
            }
        };
        let map = match &made {
            Ok(Some(backing)) => map(&backing.file, bytes),
            _ => open(directory, &places[0], bytes).and_then(|file| map(&file, bytes)),
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

/// A segment's file on rank 0, for as long as the others need to find it.
struct Backing {
    file: File,
    /// Where the others find it, for [`open`]: a name in the directory, or this process's descriptor and the file's inode.
    place: String,
    /// To be removed.
    path: Option<PathBuf>,
}

impl Backing {
    /// A file that is found through this process alone.
    fn nameless(directory: &Path, bytes: usize) -> Result<Self, String> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let make = || {
            let file = File::from(fs::open(directory, flags, Mode::RUSR | Mode::WUSR)?);
            let (process, descriptor) = (std::process::id(), file.as_raw_fd());
            let inode = fs::fstat(&file)?.st_ino;
            Ok(Self {
                file,
                place: format!("/proc/{process}/fd/{descriptor}{INODE}{inode}"),
                path: None,
            })
        };
        make()
            .and_then(|backing: Self| backing.reserve(bytes))
            .map_err(|error| refused(directory, bytes, error))
    }

    /// A file in the directory.
    fn named(directory: &Path, job: u64, bytes: usize) -> Result<Self, String> {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let make = || {
            let mut random = [0; 8];
            getrandom::fill(&mut random).map_err(io::Error::other)?;
            let place = format!("burn-ddp-{job:016x}-{:016x}", u64::from_ne_bytes(random));
            let path = directory.join(&place);
            Ok(Self {
                file: fs::open(&path, flags, Mode::RUSR | Mode::WUSR)?.into(),
                place,
                path: Some(path),
            })
        };
        make()
            .and_then(|backing: Self| backing.reserve(bytes))
            .map_err(|error| refused(directory, bytes, error))
    }

    /// Without the reservation a full file system shows at the first write, as a signal.
    fn reserve(self, bytes: usize) -> io::Result<Self> {
        fs::fallocate(&self.file, FallocateFlags::empty(), 0, bytes as u64)?;
        Ok(self)
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        let Some(path) = &self.path else { return };
        if let Err(error) = std::fs::remove_file(path) {
            tracing::warn!(path = %path.display(), %error, "a shared memory file could not be removed");
        }
    }
}

fn refused(directory: &Path, bytes: usize, error: io::Error) -> String {
    let directory = directory.display();
    format!("reserving {bytes} bytes of shared memory in {directory}: {error}")
}

/// Between the path and the inode of a file without a name.
const INODE: &str = " inode ";

/// Opens the file that rank 0 made, and makes sure that it is that one.
fn open(directory: &Path, place: &str, bytes: usize) -> io::Result<File> {
    let (path, inode, follow) = match place.split_once(INODE) {
        // A link to follow; another process may have the number in this one's view.
        Some((path, inode)) => (PathBuf::from(path), Some(inode), OFlags::empty()),
        None => (directory.join(place), None, OFlags::NOFOLLOW),
    };
    let file = fs::open(
        path,
        OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | follow,
        Mode::empty(),
    )?;
    let stat = fs::fstat(&file)?;
    let ours = stat.st_uid == rustix::process::geteuid().as_raw()
        && stat.st_size as u64 == bytes as u64
        && inode.is_none_or(|inode| *inode == stat.st_ino.to_string());
    if !ours {
        return Err(io::Error::other("it is not the file that rank 0 has made"));
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

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
