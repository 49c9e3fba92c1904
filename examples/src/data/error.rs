use std::path::PathBuf;

/// Why a data set could not be read.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file is not there.
    #[error(
        "{} is missing (expected {expected} bytes); `--data` takes the folder with CIFAR-10's \
         binary files, which are in {url}",
        path.display()
    )]
    Missing {
        /// The file.
        path: PathBuf,
        /// Its right size.
        expected: u64,
        /// Where to get it.
        url: &'static str,
    },

    /// A file is shorter or longer than it must be.
    #[error(
        "{} has {found} bytes instead of {expected}: the download was cut short, or this is \
         another version of CIFAR-10; the right one (binary version) is in {url}",
        path.display()
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// Its right size.
        expected: u64,
        /// Where to get it.
        url: &'static str,
    },

    /// A label names no class.
    #[error(
        "{} is damaged: image {image} has the label {label}, but there are only {classes} classes",
        path.display()
    )]
    Label {
        /// The file.
        path: PathBuf,
        /// The image's position in the file.
        image: usize,
        /// What stands in the place of its label.
        label: u8,
        /// The number of classes.
        classes: usize,
    },

    /// The system refused to read a file.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
}
