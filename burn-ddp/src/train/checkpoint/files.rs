//! Files and directories that survive a crash.

use sha2::{Digest, Sha256};
use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

/// `doing: path: cause`.
pub(super) fn failed<E: Display>(doing: &str, path: &Path) -> impl FnOnce(E) -> String {
    move |cause| format!("{doing} {}: {cause}", path.display())
}

/// A new file that is written once, hashed on the way.
#[derive(Debug)]
pub(super) struct Writer {
    file: File,
    path: PathBuf,
    hasher: Sha256,
    bytes: u64,
}

impl Writer {
    pub(super) fn create(path: PathBuf) -> Result<Self, String> {
        Ok(Self {
            file: File::create_new(&path).map_err(failed("creating", &path))?,
            path,
            hasher: Sha256::new(),
            bytes: 0,
        })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        let written = self.file.write_all(bytes);
        written.map_err(failed("writing", &self.path))?;
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Returns when the disk has it: length and SHA-256.
    pub(super) fn finish(self) -> Result<(u64, String), String> {
        self.file
            .sync_all()
            .map_err(failed("syncing", &self.path))?;
        Ok((self.bytes, hexadecimal(self.hasher)))
    }
}

/// Length and SHA-256 of a file.
pub(super) fn digest(path: &Path) -> Result<(u64, String), String> {
    let mut hasher = Sha256::new();
    let read = File::open(path).and_then(|mut file| io::copy(&mut file, &mut hasher));
    let bytes = read.map_err(failed("reading", path))?;
    Ok((bytes, hexadecimal(hasher)))
}

pub(super) fn sha256(bytes: &[u8]) -> String {
    hexadecimal(Sha256::new_with_prefix(bytes))
}

fn hexadecimal(hasher: Sha256) -> String {
    let digest = hasher.finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A whole file, which has at most `limit` bytes.
pub(super) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed("reading", path))?;
    let read = file.take(limit.saturating_add(1)).read_to_end(&mut bytes);
    read.map_err(failed("reading", path))?;
    if bytes.len() as u64 > limit {
        let path = path.display();
        return Err(format!("reading {path}: it has more than {limit} bytes"));
    }
    Ok(bytes)
}

/// Makes what was created, renamed or removed in `directory` survive a crash.
#[cfg(unix)]
pub(super) fn sync_directory(directory: &Path) -> Result<(), String> {
    match File::open(directory).and_then(|file| file.sync_all()) {
        // Some network file systems know no sync of a directory.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
            ) =>
        {
            Ok(())
        }
        result => result.map_err(failed("syncing", directory)),
    }
}

/// Directories cannot be synced here; the file system's journal keeps the order.
#[cfg(not(unix))]
pub(super) fn sync_directory(_: &Path) -> Result<(), String> {
    Ok(())
}

/// Gives the directory `new` the name `place`, and what was there before the name `aside`. At no moment is there nothing at
/// `place`, where the system can exchange two names.
pub(super) fn replace_directory(new: &Path, place: &Path, aside: &Path) -> Result<(), String> {
    if !place.exists() {
        return fs::rename(new, place).map_err(failed("renaming to", place));
    }
    let renamed = match exchange(new, place) {
        Ok(()) => fs::rename(new, aside),
        Err(_) => fs::rename(place, aside).and_then(|()| fs::rename(new, place)),
    };
    renamed.map_err(failed("replacing", place))
}

#[cfg(target_os = "linux")]
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

#[cfg(not(target_os = "linux"))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
