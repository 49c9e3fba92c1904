//! The folder that a program writes to.

use crate::Error;
use std::io;
use std::path::Path;

/// Makes the folder if need be, and a file in it that is removed again: so that a mistake is told
/// at the start and not after the training.
///
/// # Errors
///
/// [`Error::Output`].
pub fn check_writable(folder: &Path) -> Result<(), Error> {
    write_probe(folder).map_err(|source| Error::Output {
        path: folder.to_owned(),
        source,
    })
}

fn write_probe(folder: &Path) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let probe = folder.join(format!(".probe-{}", std::process::id()));
    std::fs::File::create(&probe)?;
    std::fs::remove_file(probe)
}
