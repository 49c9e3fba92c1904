use super::Image;
use burn::data::dataloader::batcher::Batcher;
use burn::tensor::{Device, Int, Tensor, TensorData};
use std::sync::atomic::{AtomicU64, Ordering};

/// Images and their classes as tensors.
#[derive(Debug, Clone)]
pub struct Batch {
    /// `[batch, channels, height, width]`, normalized.
    pub images: Tensor<4>,
    /// `[batch]`.
    pub labels: Tensor<1, Int>,
}

/// How grey or colour levels become numbers around zero: `(level / full - mean) / std`.
#[derive(Debug, Clone, Copy)]
pub struct Normalization {
    /// The highest level.
    pub full: f32,
    /// Mean of each channel, on a scale where the highest level is 1.
    pub mean: &'static [f32],
    /// Standard deviation of each channel, on the same scale.
    pub std: &'static [f32],
}

/// Random changes to a training image that leave its class as it is.
#[derive(Debug, Clone, Copy)]
pub struct Augmentation {
    /// Shift by up to so many pixels along either axis; level 0 moves in.
    pub shift: usize,
    /// Mirror left and right with probability one half.
    pub mirror: bool,
}

/// Makes a [`Batch`] of [`Image`]s.
#[derive(Debug)]
pub struct ImageBatcher {
    shape: [usize; 3],
    normalization: Normalization,
    augmentation: Option<Augmentation>,
    seed: u64,
    batches: AtomicU64,
}

impl ImageBatcher {
    /// Batches of images of `shape` (channels, height, width) as they are.
    pub fn new(shape: [usize; 3], normalization: Normalization) -> Self {
        Self {
            shape,
            normalization,
            augmentation: None,
            seed: 0,
            batches: AtomicU64::new(0),
        }
    }

    /// Changes images at random, another way each time.
    ///
    /// What happens to an image is a function of `seed`, the number of batches made before, and
    /// its index in the data set; not of the process that loads it. So it does not depend on how
    /// the batch of a step is shared among ranks.
    pub fn augment(mut self, augmentation: Augmentation, seed: u64) -> Self {
        self.augmentation = Some(augmentation);
        self.seed = seed;
        self
    }

    fn placement(&self, image: &Image, batch: u64) -> Placement {
        let Some(Augmentation { shift, mirror }) = self.augmentation else {
            return Placement::default();
        };
        let mut random = splitmix64(self.seed ^ splitmix64(batch ^ splitmix64(image.index as u64)));
        let mut below = |n: usize| {
            let value = (random % n as u64) as isize;
            random = splitmix64(random);
            value
        };
        let offset = shift as isize;
        Placement {
            down: below(2 * shift + 1) - offset,
            right: below(2 * shift + 1) - offset,
            mirrored: mirror && below(2) == 1,
        }
    }

    fn write(&self, image: &Image, placement: Placement, out: &mut Vec<f32>) {
        let [channels, height, width] = self.shape;
        let inside = |at: isize, end: usize| usize::try_from(at).ok().filter(|&at| at < end);
        for channel in 0..channels {
            let plane = &image.pixels[channel * height * width..][..height * width];
            let mean = self.normalization.mean[channel];
            let std = self.normalization.std[channel];
            for y in 0..height {
                let row = inside(y as isize - placement.down, height);
                for x in 0..width {
                    let x = if placement.mirrored { width - 1 - x } else { x };
                    let column = inside(x as isize - placement.right, width);
                    let level = match (row, column) {
                        (Some(row), Some(column)) => plane[row * width + column],
                        _ => 0,
                    };
                    out.push((f32::from(level) / self.normalization.full - mean) / std);
                }
            }
        }
    }
}

impl Batcher<Image, Batch> for ImageBatcher {
    fn batch(&self, images: Vec<Image>, device: &Device) -> Batch {
        let [channels, height, width] = self.shape;
        let count = images.len();
        let batch = self.batches.fetch_add(1, Ordering::Relaxed);
        let mut pixels = Vec::with_capacity(count * channels * height * width);
        for image in &images {
            self.write(image, self.placement(image, batch), &mut pixels);
        }
        let labels: Vec<i32> = images.iter().map(|image| image.label.into()).collect();
        let shape = [count, channels, height, width];
        Batch {
            images: Tensor::from_data(TensorData::new(pixels, shape), device),
            labels: Tensor::from_data(TensorData::new(labels, [count]), device),
        }
    }
}

/// Where an image comes to lie in its frame.
#[derive(Debug, Clone, Copy, Default)]
struct Placement {
    down: isize,
    right: isize,
    mirrored: bool,
}

/// The mixing step of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators"
/// (2014): enough to draw a shift, and the same on every platform.
fn splitmix64(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(all(test, feature = "flex"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const LEVELS: Normalization = Normalization {
        full: 1.0,
        mean: &[0.0],
        std: &[1.0],
    };

    fn image(index: usize) -> Image {
        Image {
            index,
            pixels: vec![1, 2, 3, 4],
            label: 7,
        }
    }

    fn placed(down: isize, right: isize, mirrored: bool) -> Vec<f32> {
        let mut out = Vec::new();
        let placement = Placement {
            down,
            right,
            mirrored,
        };
        ImageBatcher::new([1, 2, 2], LEVELS).write(&image(0), placement, &mut out);
        out
    }

    fn values(batch: Batch) -> Vec<f32> {
        batch.images.into_data().try_to_vec().unwrap()
    }

    #[test]
    fn normalizes_each_channel_with_its_own_figures() {
        let batcher = ImageBatcher::new(
            [2, 1, 2],
            Normalization {
                full: 4.0,
                mean: &[0.25, 0.5],
                std: &[0.5, 0.25],
            },
        );
        let batch = batcher.batch(vec![image(0)], &Device::flex());
        assert_eq!(batch.images.dims(), [1, 2, 1, 2]);
        let labels: Vec<i32> = batch.labels.clone().into_data().try_to_vec().unwrap();
        assert_eq!(labels, [7]);
        // (1/4 - 1/4) / (1/2), (2/4 - 1/4) / (1/2), (3/4 - 1/2) / (1/4), (4/4 - 1/2) / (1/4)
        assert_eq!(values(batch), [0.0, 0.5, 1.0, 2.0]);
    }

    #[test]
    fn moves_and_mirrors() {
        assert_eq!(placed(0, 0, false), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(placed(1, 0, false), [0.0, 0.0, 1.0, 2.0]);
        assert_eq!(placed(-1, 1, false), [0.0, 3.0, 0.0, 0.0]);
        assert_eq!(placed(0, 0, true), [2.0, 1.0, 4.0, 3.0]);
    }

    #[test]
    fn augmentation_depends_on_seed_step_and_image_alone() {
        let augmentation = Augmentation {
            shift: 1,
            mirror: true,
        };
        let run = |seed, shards: &[&[usize]]| -> Vec<Vec<f32>> {
            let batcher = ImageBatcher::new([1, 2, 2], LEVELS).augment(augmentation, seed);
            let items = |indices: &[usize]| indices.iter().map(|&i| image(i)).collect();
            (shards.iter())
                .map(|indices| values(batcher.batch(items(indices), &Device::flex())))
                .collect()
        };
        let all: Vec<usize> = (0..32).collect();
        let whole = run(5, &[&all]);
        // Two ranks with half of the batch each see what one process with all of it sees.
        let halves = [run(5, &[&all[..16]]), run(5, &[&all[16..]])].concat();
        assert_eq!(whole.concat(), halves.concat());
        assert_ne!(whole, run(6, &[&all]));
        let twice = run(5, &[&all, &all]);
        assert_ne!(twice[0], twice[1]);
    }
}
