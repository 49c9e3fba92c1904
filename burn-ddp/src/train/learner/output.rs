//! Outputs of steps on their way to rank 0.

use burn::tensor::{Device, Int, Tensor, TensorData, kind::Basic};
use burn::train::{
    ClassificationOutput, ItemLazy, MultiLabelClassificationOutput, RegressionOutput,
    SequenceOutput,
};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The output of a training or validation step, which rank 0 shows to the metrics, with those of the other ranks.
///
/// Burn's own outputs implement it. For one of your own, hand over each of its tensors, and take them back in the same order:
///
/// ```
/// use burn::{tensor::Tensor, train::ItemLazy};
/// use burn_ddp::train::learner::{GatherOutput, Pack, Unpack, UnpackError};
/// # type ExecutionError = burn::tensor::ExecutionError;
///
/// struct Scores {
///     loss: Tensor<1>,   // the mean of the batch
///     scores: Tensor<2>, // [batch, classes]
/// }
///
/// impl GatherOutput for Scores {
///     fn pack(self, parts: &mut Pack) {
///         parts.samples(self.scores);
///         parts.loss(self.loss);
///     }
///
///     fn unpack(parts: &mut Unpack) -> Result<Self, UnpackError> {
///         let scores = parts.tensor()?;
///         let loss = parts.tensor()?;
///         Ok(Self { loss, scores })
///     }
/// }
/// # impl ItemLazy for Scores { fn sync(self) -> Result<Self, ExecutionError> { Ok(self) } }
/// ```
pub trait GatherOutput: ItemLazy {
    /// Hands over the tensors.
    fn pack(self, parts: &mut Pack);

    /// The output of all ranks together, from the tensors in the order in which `pack` gave them.
    ///
    /// # Errors
    ///
    /// [`UnpackError`] from [`Unpack::tensor`].
    fn unpack(parts: &mut Unpack) -> Result<Self, UnpackError>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Kind {
    /// A sample in each row.
    Samples,
    /// One number for all samples.
    Mean,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Part {
    kind: Kind,
    data: TensorData,
}

/// The tensors of one output, on the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pack {
    /// Samples that count, which are the first; `None` before it is known.
    samples: Option<usize>,
    parts: Vec<Part>,
    /// A tensor that could not be read.
    failure: Option<String>,
}

impl Pack {
    /// Of `output`, the first `valid` samples; all of them if `None`.
    pub(super) fn of(output: Result<impl GatherOutput, String>, valid: Option<usize>) -> Self {
        let mut pack = Self {
            samples: valid,
            parts: Vec::new(),
            failure: None,
        };
        match output {
            Ok(output) => output.pack(&mut pack),
            Err(cause) => pack.failure = Some(cause),
        }
        pack
    }

    /// A tensor with one sample in each row (dimension 0). The rows of all ranks are put together, those of padding left out.
    pub fn samples<const D: usize, K: Basic>(&mut self, tensor: Tensor<D, K>) {
        let Some(data) = self.read(tensor) else {
            return;
        };
        let shape = data.shape().to_vec();
        let rows = shape.first().copied().unwrap_or(1);
        let kept = *self.samples.get_or_insert(rows);
        let data = if kept < rows {
            let (bytes, _, dtype) = data.into_parts();
            let mut shape = shape;
            shape[0] = kept;
            TensorData::from_bytes_vec(bytes[..bytes.len() / rows * kept].to_vec(), shape, dtype)
        } else {
            data
        };
        let kind = Kind::Samples;
        self.parts.push(Part { kind, data });
    }

    /// A loss: of one element, which is the mean of the batch, or of one for each sample. Means become the mean over the samples
    /// of all ranks. Give it after a tensor of samples, from which their number is known.
    pub fn loss(&mut self, loss: Tensor<1>) {
        let [elements] = loss.dims();
        if elements != 1 {
            return self.samples(loss);
        }
        if let Some(data) = self.read(loss) {
            let kind = Kind::Mean;
            self.parts.push(Part { kind, data });
        }
    }

    fn read<const D: usize, K: Basic>(&mut self, tensor: Tensor<D, K>) -> Option<TensorData> {
        match tensor.try_into_data() {
            Ok(data) => Some(data),
            Err(error) => {
                self.failure.get_or_insert(error.to_string());
                None
            }
        }
    }

    fn weight(&self) -> f64 {
        self.samples.unwrap_or(1) as f64
    }

    fn counts(&self) -> bool {
        self.samples != Some(0)
    }

    /// Puts the outputs of one step together, in rank order. Where shapes do not fit (sequences of another length), they stay apart.
    pub(super) fn merge(all: Vec<Self>) -> Result<Vec<Self>, UnpackError> {
        if let Some(cause) = all.iter().find_map(|pack| pack.failure.clone()) {
            return Err(UnpackError::Read { cause });
        }
        let all: Vec<Self> = all.into_iter().filter(Self::counts).collect();
        let count = all.first().map_or(0, |pack| pack.parts.len());
        if all.iter().any(|pack| pack.parts.len() != count) {
            return Ok(all);
        }
        let parts: Option<Vec<Part>> = (0..count).map(|part| together(&all, part)).collect();
        Ok(match parts {
            Some(parts) if !all.is_empty() => vec![Self {
                samples: None,
                parts,
                failure: None,
            }],
            _ => all,
        })
    }

    pub(super) fn open<T: GatherOutput>(self, device: &Device) -> Result<T, UnpackError> {
        T::unpack(&mut Unpack {
            parts: self.parts.into_iter().map(|part| part.data).collect(),
            device: device.clone(),
        })
    }
}

/// Part number `part` of all ranks; `None` if they do not fit.
fn together(all: &[Pack], part: usize) -> Option<Part> {
    let first = &all[0].parts[part];
    let of = |pack: &'_ Pack| pack.parts[part].clone();
    if all.iter().all(|pack| pack.parts[part].kind == Kind::Mean) {
        let total: f64 = all.iter().map(Pack::weight).sum();
        let mut mean = 0.0;
        for pack in all {
            let value = of(pack).data.try_cast(burn::tensor::DType::F64).ok()?;
            mean += value.as_slice::<f64>().ok()?.first()? * (pack.weight() / total);
        }
        let data = TensorData::new(vec![mean], [1]);
        let data = data.try_cast(first.data.dtype()).ok()?;
        return Some(Part {
            kind: Kind::Mean,
            data,
        });
    }
    let (dtype, row) = (first.data.dtype(), first.data.shape().get(1..)?.to_vec());
    let (mut bytes, mut rows) = (Vec::new(), 0);
    for pack in all {
        let data = &pack.parts[part].data;
        if data.dtype() != dtype || data.shape().get(1..)? != row {
            return None;
        }
        bytes.extend_from_slice(data.as_bytes());
        rows += data.shape()[0];
    }
    let shape: Vec<usize> = std::iter::once(rows).chain(row).collect();
    Some(Part {
        kind: Kind::Samples,
        data: TensorData::from_bytes_vec(bytes, shape, dtype),
    })
}

/// The tensors of the ranks' outputs, put together.
#[derive(Debug)]
pub struct Unpack {
    parts: VecDeque<TensorData>,
    device: Device,
}

impl Unpack {
    /// The next tensor, on the device that trains, without autodiff.
    ///
    /// # Errors
    ///
    /// [`UnpackError::Shape`] when it has another number of dimensions, [`UnpackError::Missing`] when there is none.
    pub fn tensor<const D: usize, K: Basic>(&mut self) -> Result<Tensor<D, K>, UnpackError> {
        let data = self.parts.pop_front().ok_or(UnpackError::Missing)?;
        let (found, dtype) = (data.rank(), data.dtype());
        if found != D {
            return Err(UnpackError::Shape { found, expected: D });
        }
        Ok(Tensor::from_data(data, (&self.device, dtype)))
    }

    /// Whether there is another tensor.
    pub fn has_more(&self) -> bool {
        !self.parts.is_empty()
    }
}

/// An output that could not be put together again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnpackError {
    /// A rank could not read a tensor of its output.
    #[error("a rank cannot compute or read a tensor of a step's output: {cause}")]
    Read {
        /// The backend's words.
        cause: String,
    },
    /// `unpack` asks for more tensors than `pack` gave.
    #[error(
        "`GatherOutput::unpack` asks for more tensors than `pack` has given: both must name the same tensors in the same order"
    )]
    Missing,
    /// `unpack` asks for a tensor of another shape than `pack` gave.
    #[error(
        "`GatherOutput::unpack` asks for a tensor of {expected} dimensions where `pack` has given one of {found}: both must name \
         the same tensors in the same order"
    )]
    Shape {
        /// Dimensions of the tensor that was given.
        found: usize,
        /// Dimensions of the one that was asked for.
        expected: usize,
    },
}

impl GatherOutput for ClassificationOutput {
    fn pack(self, parts: &mut Pack) {
        parts.samples(self.output);
        parts.samples(self.targets);
        parts.loss(self.loss);
    }

    fn unpack(parts: &mut Unpack) -> Result<Self, UnpackError> {
        let (output, targets) = (parts.tensor()?, parts.tensor::<1, Int>()?);
        Ok(Self::new(parts.tensor()?, output, targets))
    }
}

impl GatherOutput for MultiLabelClassificationOutput {
    fn pack(self, parts: &mut Pack) {
        parts.samples(self.output);
        parts.samples(self.targets);
        parts.loss(self.loss);
    }

    fn unpack(parts: &mut Unpack) -> Result<Self, UnpackError> {
        let (output, targets) = (parts.tensor()?, parts.tensor::<2, Int>()?);
        Ok(Self::new(parts.tensor()?, output, targets))
    }
}

impl GatherOutput for RegressionOutput {
    fn pack(self, parts: &mut Pack) {
        parts.samples(self.output);
        parts.samples(self.targets);
        parts.loss(self.loss);
    }

    fn unpack(parts: &mut Unpack) -> Result<Self, UnpackError> {
        let (output, targets) = (parts.tensor()?, parts.tensor()?);
        Ok(Self::new(parts.tensor()?, output, targets))
    }
}

impl GatherOutput for SequenceOutput {
    fn pack(self, parts: &mut Pack) {
        parts.samples(self.logits);
        parts.samples(self.targets);
        parts.loss(self.loss);
        if let Some(predictions) = self.predictions {
            parts.samples(predictions);
        }
    }

    fn unpack(parts: &mut Unpack) -> Result<Self, UnpackError> {
        let (logits, targets, loss) = (parts.tensor()?, parts.tensor()?, parts.tensor()?);
        let predictions = match parts.has_more() {
            true => Some(parts.tensor()?),
            false => None,
        };
        Ok(Self::new(loss, logits, predictions, targets))
    }
}

/// A step without metrics.
impl GatherOutput for () {
    fn pack(self, _: &mut Pack) {}

    fn unpack(_: &mut Unpack) -> Result<Self, UnpackError> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
