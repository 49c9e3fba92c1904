//! Means over ranks.

use crate::{Ddp, Error, ReduceOp};

/// A mean over the samples of all ranks: a sum and a count in f64, which are added up over the ranks before they are divided.
///
/// Equal numbers of samples on all ranks are not needed, nor any at all on this one. Of a batch with padding count the first
/// [`valid`](crate::data::MarkedBatch::valid) samples only.
///
/// ```
/// # use burn_ddp::{Ddp, train::Mean};
/// # fn evaluate(ddp: Ddp) -> Result<(), burn_ddp::Error> {
/// let (mut loss, mut accuracy) = (Mean::default(), Mean::default());
/// loss.extend([0.5, 1.5]); // the losses of two samples
/// accuracy.add(1.0, 2); // one of two was right
/// let [loss, accuracy] = Mean::reduce_all(&ddp, [loss, accuracy])?; // of all ranks
/// assert_eq!((loss, accuracy), (Some(1.0), Some(0.5)));
/// # Ok(())
/// # }
/// # fn main() -> Result<(), burn_ddp::Error> { burn_ddp::launch(evaluate) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    sum: f64,
    count: u64,
}

impl Mean {
    /// Adds `count` samples whose values sum up to `sum`. Of a batch whose mean is known, that is the mean times `count`. Local.
    pub fn add(&mut self, sum: f64, count: usize) {
        // No samples have no mean, which some losses give as 0 / 0.
        if count > 0 {
            self.sum += sum;
            self.count += count as u64;
        }
    }

    /// The sum of this rank's samples.
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// Number of this rank's samples.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The mean over the samples of all ranks, the same bits on each; `None` if there are none. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::Group`].
    pub fn reduce(self, ddp: &Ddp) -> Result<Option<f64>, Error> {
        let [mean] = Self::reduce_all(ddp, [self])?;
        Ok(mean)
    }

    /// [`reduce`](Self::reduce) of several means in one operation. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::Group`].
    pub fn reduce_all<const N: usize>(
        ddp: &Ddp,
        means: [Self; N],
    ) -> Result<[Option<f64>; N], Error> {
        // A count is exact in f64 up to 2^53.
        let mut values: Vec<[f64; 2]> = means.iter().map(|m| [m.sum, m.count as f64]).collect();
        ddp.all_reduce(values.as_flattened_mut(), ReduceOp::Sum)?;
        Ok(std::array::from_fn(|i| {
            let [sum, count] = values[i];
            (count > 0.0).then(|| sum / count)
        }))
    }
}

/// One sample each.
impl Extend<f64> for Mean {
    fn extend<T: IntoIterator<Item = f64>>(&mut self, samples: T) {
        for sample in samples {
            self.add(sample, 1);
        }
    }
}
