//! A step that is being written.

use super::{
    directory::{Directory, Keep},
    files::{Writer, failed},
    lock::Lock,
    manifest::{self, Entry, Kind, Manifest},
};
use std::{fs, path::PathBuf};

/// A temporary directory, removed when it is dropped before [`publish`](Self::publish).
#[derive(Debug)]
pub(super) struct Draft {
    directory: Directory,
    path: PathBuf,
    manifest: Manifest,
    /// From before the first file is there until the last old one is gone.
    _lock: Option<Lock>,
}

impl Draft {
    pub(super) fn create(
        directory: &Directory,
        step: u64,
        world_size: usize,
    ) -> Result<Self, String> {
        directory.create()?;
        let lock = Lock::exclusive(directory.path())?;
        if lock.is_some() {
            directory.sweep()?;
        }
        let path = directory.hidden(step, "tmp")?;
        fs::create_dir(&path).map_err(failed("creating", &path))?;
        Ok(Self {
            directory: directory.clone(),
            path,
            manifest: Manifest::new(step, world_size),
            _lock: lock,
        })
    }

    /// An empty file for the entry of this name, kind and rank.
    pub(super) fn file(&self, entry: (&str, Kind, Option<usize>)) -> Result<Writer, String> {
        let (name, kind, rank) = entry;
        Writer::create(self.path.join(Entry::file(name, kind, rank)))
    }

    /// Syncs the entry's file and takes it into the manifest.
    pub(super) fn finish(
        &mut self,
        (name, kind, rank): (&str, Kind, Option<usize>),
        file: Writer,
    ) -> Result<(), String> {
        let (bytes, sha256) = file.finish()?;
        self.manifest.entries.push(Entry {
            name: name.into(),
            kind,
            rank,
            bytes,
            sha256,
        });
        Ok(())
    }

    pub(super) fn publish(self, keep: Keep) -> Result<(), String> {
        let mut file = Writer::create(self.path.join(manifest::FILE))?;
        file.write(self.manifest.to_text()?.as_bytes())?;
        file.finish()?;
        self.directory.publish(&self.path, self.manifest.step, keep)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Gone already when it was published; what stays is swept away by the next save.
        let _ = fs::remove_dir_all(&self.path);
    }
}
