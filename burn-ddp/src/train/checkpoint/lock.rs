//! One save at a time into a directory, whoever started it.

use crate::notice;
use std::{
    fs::{File, TryLockError},
    io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

const FILE: &str = ".lock";
/// Another job's save can take minutes; one that takes longer than this is stuck.
const LIMIT: Duration = Duration::from_secs(600);
const POLL: Duration = Duration::from_millis(20);

/// Held while it lives; the system gives it back when the process dies.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    /// `None` where the file system has no locks.
    pub(super) fn exclusive(directory: &Path) -> Result<Option<Self>, String> {
        let path = directory.join(FILE);
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path);
        match file {
            Ok(file) => Self::wait(file, directory, File::try_lock),
            Err(error) => Err(format!("opening {}: {error}", path.display())),
        }
    }

    /// Keeps savers away from a reader. `None` where nothing was ever saved, or this process may not write.
    pub(super) fn shared(directory: &Path) -> Result<Option<Self>, String> {
        match File::open(directory.join(FILE)) {
            Ok(file) => Self::wait(file, directory, File::try_lock_shared),
            Err(_) => Ok(None),
        }
    }

    fn wait(
        file: File,
        directory: &Path,
        take: impl Fn(&File) -> Result<(), TryLockError>,
    ) -> Result<Option<Self>, String> {
        let start = Instant::now();
        let mut told = false;
        loop {
            match take(&file) {
                Ok(()) => return Ok(Some(Self { _file: file })),
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(TryLockError::Error(_)) => return Ok(None),
                Err(TryLockError::WouldBlock) => {}
            }
            let directory = directory.display();
            if start.elapsed() > LIMIT {
                return Err(format!(
                    "{directory}: another process has been saving or loading here for {} s. Give each job a directory of its own",
                    LIMIT.as_secs()
                ));
            }
            if !told && start.elapsed() > Duration::from_secs(10) {
                told = true;
                notice::warn(format_args!(
                    "{directory}: waiting for another process that saves or loads a checkpoint here"
                ));
            }
            thread::sleep(POLL);
        }
    }
}
