//! Data sets, and the batches that are made of them.

mod batch;
pub mod cifar10;
pub mod digits;
mod error;
pub mod text;

pub use batch::{Augmentation, Batch, ImageBatcher, Normalization};
pub use error::DataError;

use burn::data::dataset::{Dataset, DatasetError};

/// One labelled image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Position in the data set.
    pub index: usize,
    /// Grey or colour levels, `channels * height * width` of them.
    pub pixels: Vec<u8>,
    /// The class.
    pub label: u8,
}

/// Labelled images of one size, in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSet {
    shape: [usize; 3],
    pixels: Vec<u8>,
    labels: Vec<u8>,
}

impl ImageSet {
    fn new(shape: [usize; 3]) -> Self {
        Self {
            shape,
            pixels: Vec::new(),
            labels: Vec::new(),
        }
    }

    fn push(&mut self, pixels: &[u8], label: u8) {
        debug_assert_eq!(pixels.len(), self.image_len());
        self.pixels.extend_from_slice(pixels);
        self.labels.push(label);
    }

    fn image_len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The classes, in the order of the images.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }
}

impl Dataset<Image> for ImageSet {
    fn get(&self, index: usize) -> Result<Image, DatasetError> {
        let len = self.image_len();
        Ok(Image {
            index,
            pixels: self.pixels[index * len..(index + 1) * len].to_vec(),
            label: self.labels[index],
        })
    }

    fn len(&self) -> usize {
        self.labels.len()
    }
}

/// A data set with all that a training program needs to know about it.
#[derive(Debug, Clone)]
pub struct Task {
    /// What it is called on the screen.
    pub name: &'static str,
    /// Images to learn from.
    pub train: ImageSet,
    /// Images to measure with.
    pub test: ImageSet,
    /// Channels, height and width of an image.
    pub shape: [usize; 3],
    /// Number of classes.
    pub classes: usize,
    /// How grey levels become numbers around zero.
    pub normalization: Normalization,
    /// What may be done to a training image without changing its class.
    pub augmentation: Augmentation,
    /// Settings that were measured to train well.
    pub recipe: Recipe,
}

/// Training settings that suit a [`Task`]; the command line overrides them one by one.
#[derive(Debug, Clone, Copy)]
pub struct Recipe {
    /// Passes over the training images.
    pub epochs: usize,
    /// Images per batch and rank.
    pub batch_size: usize,
    /// Highest learning rate of the schedule.
    pub lr: f64,
    /// Feature maps of the network's four stages.
    pub widths: [usize; 4],
}
