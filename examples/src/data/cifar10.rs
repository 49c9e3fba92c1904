//! CIFAR-10 (Krizhevsky 2009) from the files of its binary version.

use super::{Augmentation, DataError, ImageSet, Normalization, Recipe, Task};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const URL: &str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz";
/// The folder inside the archive.
const FOLDER: &str = "cifar-10-batches-bin";
const TRAIN: [&str; 5] = [
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
];
const TEST: [&str; 1] = ["test_batch.bin"];
const IMAGES_PER_FILE: usize = 10_000;
const SHAPE: [usize; 3] = [3, 32, 32];
const CLASSES: usize = 10;
/// One record: the label, then 1,024 red, 1,024 green and 1,024 blue levels row by row.
const RECORD: usize = 1 + 3 * 32 * 32;

/// Reads the data set from `dir` or from `dir/cifar-10-batches-bin`.
///
/// # Errors
///
/// When a file is missing, has the wrong size, or holds a label that does not exist. The error
/// names the file and says where to get it.
pub fn load(dir: &Path) -> Result<Task, DataError> {
    load_sized(dir, IMAGES_PER_FILE)
}

/// Looks whether all files are there and have the right size, without reading them.
///
/// # Errors
///
/// As [`load`], but for labels.
pub fn check(dir: &Path) -> Result<(), DataError> {
    let dir = folder(dir);
    let mut names = TRAIN.iter().chain(&TEST);
    names.try_for_each(|name| check_file(&dir.join(name), IMAGES_PER_FILE))
}

fn load_sized(dir: &Path, images: usize) -> Result<Task, DataError> {
    let dir = folder(dir);
    Ok(Task {
        name: "CIFAR-10",
        train: read_files(&dir, &TRAIN, images)?,
        test: read_files(&dir, &TEST, images)?,
        shape: SHAPE,
        classes: CLASSES,
        normalization: Normalization {
            full: 255.0,
            // Per channel, over the 50,000 training images.
            mean: &[0.4914, 0.4822, 0.4465],
            std: &[0.2470, 0.2435, 0.2616],
        },
        augmentation: Augmentation {
            shift: 4,
            mirror: true,
        },
        recipe: Recipe {
            epochs: 30,
            batch_size: 64,
            lr: 0.1,
            widths: [64, 128, 256, 512],
        },
    })
}

fn read_files(dir: &Path, names: &[&str], images: usize) -> Result<ImageSet, DataError> {
    let mut set = ImageSet::new(SHAPE);
    for name in names {
        read_file(dir.join(name), images, &mut set)?;
    }
    Ok(set)
}

fn read_file(path: PathBuf, images: usize, set: &mut ImageSet) -> Result<(), DataError> {
    check_file(&path, images)?;
    let bytes = fs::read(&path).map_err(|source| DataError::Read {
        path: path.clone(),
        source,
    })?;
    for (image, record) in bytes.chunks_exact(RECORD).enumerate() {
        let label = record[0];
        if usize::from(label) >= CLASSES {
            return Err(DataError::Label {
                path,
                image,
                label,
                classes: CLASSES,
            });
        }
        set.push(&record[1..], label);
    }
    Ok(())
}

fn check_file(path: &Path, images: usize) -> Result<(), DataError> {
    let path = path.to_path_buf();
    let expected = (images * RECORD) as u64;
    match fs::metadata(&path) {
        Ok(file) if file.len() == expected => Ok(()),
        Ok(file) => Err(DataError::Size {
            path,
            found: file.len(),
            expected,
            url: URL,
        }),
        Err(source) if source.kind() == ErrorKind::NotFound => Err(DataError::Missing {
            path,
            expected,
            url: URL,
        }),
        Err(source) => Err(DataError::Read { path, source }),
    }
}

fn folder(dir: &Path) -> PathBuf {
    let inner = dir.join(FOLDER);
    if inner.is_dir() { inner } else { dir.into() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use burn::data::dataset::Dataset;

    /// The six files with two images each. The label of an image is its running number, its
    /// pixels are its number, then 200, 201 and 202 at the start of the three colour planes.
    fn write_small(dir: &Path) {
        for (file, name) in TRAIN.iter().chain(&TEST).enumerate() {
            let mut bytes = Vec::new();
            for image in 0..2 {
                let number = (file * 2 + image) as u8;
                let mut record = vec![number; RECORD];
                record[0] = number % 10;
                for plane in 0..3 {
                    record[1 + plane * 1024] = 200 + plane as u8;
                }
                bytes.extend(record);
            }
            fs::write(dir.join(name), bytes).unwrap();
        }
    }

    #[test]
    fn reads_labels_and_planes_in_order() {
        let dir = tempfile::tempdir().unwrap();
        write_small(dir.path());

        let task = load_sized(dir.path(), 2).unwrap();

        assert_eq!(task.train.labels(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(task.test.labels(), [0, 1]);
        let last = task.test.get(1).unwrap();
        assert_eq!(last.pixels.len(), 3072);
        assert_eq!(last.pixels[..2], [200, 11]);
        assert_eq!(last.pixels[1023..1026], [11, 201, 11]);
        assert_eq!(last.pixels[2048..2050], [202, 11]);
    }

    #[test]
    fn accepts_the_folder_above() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join(FOLDER);
        fs::create_dir(&inner).unwrap();
        write_small(&inner);

        assert_eq!(load_sized(dir.path(), 2).unwrap().train.len(), 10);
    }

    #[test]
    fn names_a_missing_file_its_size_and_its_source() {
        let dir = tempfile::tempdir().unwrap();
        write_small(dir.path());
        fs::remove_file(dir.path().join("data_batch_3.bin")).unwrap();

        let error = load_sized(dir.path(), 2).err().unwrap();

        assert!(matches!(error, DataError::Missing { .. }));
        let text = error.to_string();
        assert!(text.contains("data_batch_3.bin"), "{text}");
        assert!(text.contains("6146 bytes"), "{text}");
        assert!(text.contains(URL), "{text}");
    }

    #[test]
    fn tells_a_file_that_was_cut_short() {
        let dir = tempfile::tempdir().unwrap();
        write_small(dir.path());
        let path = dir.path().join("test_batch.bin");
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..6145]).unwrap();

        match load_sized(dir.path(), 2) {
            Err(DataError::Size {
                path: named,
                found: 6145,
                expected: 6146,
                ..
            }) => assert_eq!(named, path),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn refuses_a_label_that_is_no_class() {
        let dir = tempfile::tempdir().unwrap();
        write_small(dir.path());
        let path = dir.path().join("data_batch_1.bin");
        let mut bytes = fs::read(&path).unwrap();
        bytes[RECORD] = 10;
        fs::write(&path, bytes).unwrap();

        assert!(matches!(
            load_sized(dir.path(), 2),
            Err(DataError::Label {
                image: 1,
                label: 10,
                ..
            })
        ));
    }

    #[test]
    fn the_full_files_have_their_published_size() {
        assert_eq!(IMAGES_PER_FILE * RECORD, 30_730_000);
    }
}
