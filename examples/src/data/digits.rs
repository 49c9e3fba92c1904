//! The UCI handwritten digits: 1,797 images of 8x8 pixels with 17 grey levels.
//!
//! They are part of the program, so that it trains without a download. Origin, licence and
//! citation: `examples/data/README.md`.

use super::{Augmentation, ImageSet, Normalization, Recipe, Task};

/// One record an image: 64 grey levels (0 to 16) row by row, then the digit.
static RECORDS: &[u8] = include_bytes!("../../data/digits.bin");

const PIXELS: usize = 8 * 8;
const CLASSES: usize = 10;
/// The split is by position and not by chance: of each digit, in the order of the file, the
/// 1st, 6th, 11th ... image is for testing.
const TEST_EVERY: usize = 5;

/// The data set, split into 1,433 images to learn from and 364 to measure with.
pub fn load() -> Task {
    let shape = [1, 8, 8];
    let mut train = ImageSet::new(shape);
    let mut test = ImageSet::new(shape);
    let mut seen = [0; CLASSES];
    for record in RECORDS.chunks_exact(PIXELS + 1) {
        let (pixels, label) = (&record[..PIXELS], record[PIXELS]);
        let count = &mut seen[usize::from(label)];
        let set = if *count % TEST_EVERY == 0 {
            &mut test
        } else {
            &mut train
        };
        set.push(pixels, label);
        *count += 1;
    }
    Task {
        name: "UCI handwritten digits",
        train,
        test,
        shape,
        classes: CLASSES,
        normalization: Normalization {
            full: 16.0,
            // Over all pixels of the training images.
            mean: &[0.3054],
            std: &[0.3763],
        },
        augmentation: Augmentation {
            shift: 1,
            mirror: false,
        },
        recipe: Recipe {
            epochs: 12,
            batch_size: 32,
            lr: 0.1,
            widths: [16, 32, 64, 128],
        },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use burn::data::dataset::Dataset;

    #[test]
    fn holds_every_image_once() {
        let task = load();
        assert_eq!(RECORDS.len(), 1797 * 65);
        assert_eq!((task.train.len(), task.test.len()), (1433, 364));

        // Images per digit as scikit-learn's description of the data set gives them.
        let all = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180];
        for (digit, all) in all.into_iter().enumerate() {
            let count = |set: &ImageSet| {
                let of_digit = |&&label: &&u8| usize::from(label) == digit;
                set.labels().iter().filter(of_digit).count()
            };
            assert_eq!(count(&task.test), usize::div_ceil(all, 5), "digit {digit}");
            assert_eq!(count(&task.train) + count(&task.test), all, "digit {digit}");
        }
    }

    #[test]
    fn first_image_is_the_zero_at_the_head_of_the_file() {
        let first = load().test.get(0).unwrap();
        assert_eq!(first.label, 0);
        assert_eq!(first.pixels[..8], [0, 0, 5, 13, 9, 1, 0, 0]);
        assert_eq!(first.pixels[56..], [0, 0, 6, 13, 10, 0, 0, 0]);
    }

    #[test]
    fn normalization_is_that_of_the_training_images() {
        let task = load();
        let values: Vec<f64> = (task.train.pixels.iter())
            .map(|&p| f64::from(p) / 16.0)
            .collect();
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let var = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        assert!((mean - f64::from(task.normalization.mean[0])).abs() < 1e-4);
        assert!((var.sqrt() - f64::from(task.normalization.std[0])).abs() < 1e-4);
    }
}
