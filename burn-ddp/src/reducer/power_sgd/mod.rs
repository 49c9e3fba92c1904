//! Gradients sent as the product of two thin matrices.

mod matrix;
mod state;
#[cfg(test)]
mod tests;

pub use state::PowerSgdState;

use super::{
    comm_hook::{BucketParam, CommHook, GradBucket},
    elements::{narrow, widen},
};
use crate::group::{DType, GroupError, ReduceOp};
use matrix::{Real, add_and_project, orthonormalize, project_back, take_product};
use state::{Kept, Matrix, fill_empty_rows};
use std::{
    borrow::Cow,
    collections::BTreeMap,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// A [`CommHook`] that sends each gradient matrix as the product of two thin ones: `rank * (n + m)` numbers in place of `n * m`.
///
/// What the product leaves out stays on the rank as its error memory and is added to the next step's gradient, so that nothing is lost, only late. One step of the
/// power method per training step, warm-started with the last step's factor, finds the subspace: T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: Practical
/// Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019, algorithms 1 and 2.
///
/// A tensor of more than two dimensions is a matrix of its first dimension by the others. Vectors, and matrices that
/// would not become [smaller enough](Self::min_compression_rate), travel as they are, in the same operation as the first factors: two operations a
/// bucket. Arithmetic is in f32, for f64 gradients in f64.
///
/// The error memory takes as much host memory as the gradients. It is keyed by module path, and so survives the making of new buckets; it belongs into
/// checkpoints ([`Snapshot::power_sgd`](crate::train::Snapshot::power_sgd)).
///
/// A gradient that is not finite makes the step's gradient of its parameter NaN on all ranks, and does not stay in the error memory. What other buckets of a
/// step that [`NonFinitePolicy::Skip`](crate::NonFinitePolicy::Skip) withholds have sent of their error memory before is given up with it.
#[derive(Debug)]
pub struct PowerSgdHook {
    rank: usize,
    start_step: u64,
    error_feedback: bool,
    warm_start: bool,
    min_compression_rate: f64,
    seed: u64,
    state: Mutex<PowerSgdState>,
}

impl PowerSgdHook {
    /// Matrices of this rank (width of the factors; that of a matrix at most): 1 to 4 are usual. Error feedback and warm start are on, compression begins
    /// with the first step. Rank 0 compresses nothing. For another model, or another run of the same one, make another hook: this one's error memory goes on.
    pub fn new(rank: usize) -> Self {
        Self {
            rank,
            start_step: 0,
            error_feedback: true,
            warm_start: true,
            min_compression_rate: 2.0,
            seed: 0,
            state: Mutex::default(),
        }
    }

    /// How many steps of a parameter are reduced plainly before its first compressed one (default 0). Gradients change fast in the
    /// beginning; where compression costs accuracy, the first tenth of the training without it often gives it back.
    pub fn start_step(mut self, step: u64) -> Self {
        self.start_step = step;
        self
    }

    /// Whether what was left out is added to the next step's gradient (default true). Without it no error memory is kept, and training may not converge.
    pub fn error_feedback(mut self, on: bool) -> Self {
        self.error_feedback = on;
        self
    }

    /// Whether a step begins with the last step's factor (default true) and not with a random one.
    pub fn warm_start(mut self, on: bool) -> Self {
        self.warm_start = on;
        self
    }

    /// A matrix is compressed if this makes it at least so many times smaller (default 2).
    pub fn min_compression_rate(mut self, rate: f64) -> Self {
        self.min_compression_rate = rate;
        self
    }

    /// Of the random start of the factors (default 0), the same on all ranks.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// A copy of this rank's state. Local; between backward passes.
    pub fn state(&self) -> PowerSgdState {
        self.lock().clone()
    }

    /// Goes on from a state: this rank's own, of the same model. Local; before the first backward pass or between two, on all ranks.
    pub fn load_state(&self, state: PowerSgdState) {
        *self.lock() = state;
    }

    fn lock(&self) -> MutexGuard<'_, PowerSgdState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rows, columns and rank of a parameter's matrix, if it is compressed.
    fn size(&self, shape: &[usize]) -> Option<(usize, usize, usize)> {
        let (&n, rest) = shape.split_first()?;
        let m: usize = rest.iter().product();
        let k = self.rank.min(n).min(m);
        let sent = (n + m) as f64 * k as f64;
        let worth = k > 0 && sent * self.min_compression_rate <= n as f64 * m as f64;
        (!rest.is_empty() && worth).then_some((n, m, k))
    }

    fn reduce_as<T: Kept>(&self, bucket: &mut GradBucket<'_>) -> Result<(), GroupError> {
        let mut state = self.lock();
        let kept = T::kept(&mut state);
        let (plain, mut low_rank) = self.divide(bucket, kept);

        // What travels as it is, then the left factors.
        let mut message: Vec<T> = Vec::new();
        for parameter in &plain {
            let gradient = &bucket.data()[parameter.range.clone()];
            message.extend_from_slice(&read::<T>(gradient, bucket.dtype()));
        }
        let plain_elements = message.len();
        for matrix in &mut low_rank {
            let start = message.len();
            message.resize(start + matrix.left_elements(), T::ZERO);
            let gradient = read(&bucket.data()[matrix.range.clone()], bucket.dtype());
            let (factor, left) = (T::of(bucket.factor()), &mut message[start..]);
            add_and_project(
                &mut matrix.sum,
                &gradient,
                factor,
                &matrix.right,
                left,
                matrix.m,
            );
        }
        let all_reduce = |message: &mut [T]| match message.is_empty() {
            true => Ok(()),
            false => {
                let bytes = bytemuck::cast_slice_mut(message);
                bucket.group().all_reduce(bytes, T::DTYPE, ReduceOp::Mean)
            }
        };
        all_reduce(&mut message)?;
        let (mut means, mut lefts) = message.split_at_mut(plain_elements);

        let mut message: Vec<T> = Vec::new();
        for matrix in &mut low_rank {
            let left = lefts.split_off_mut(..matrix.left_elements());
            matrix.left = left.unwrap_or_default().to_vec();
            orthonormalize(&mut matrix.left, matrix.n);
            project_back(&matrix.sum, &matrix.left, &mut matrix.right, matrix.m);
            message.extend_from_slice(&matrix.right);
        }
        all_reduce(&mut message)?;

        let (dtype, factor) = (bucket.dtype(), bucket.factor());
        for parameter in plain {
            let elements = parameter.range.len() / dtype.size();
            let mean = means.split_off_mut(..elements).unwrap_or_default();
            write(mean, &mut bucket.data_mut()[parameter.range], dtype);
        }
        let mut rights = &message[..];
        for mut matrix in low_rank {
            let right = rights.split_off(..matrix.right.len()).unwrap_or_default();
            matrix.right.copy_from_slice(right);
            let data = &mut bucket.data_mut()[matrix.range.clone()];
            let finite = matrix.decompress(data, dtype, factor);
            if let Some(kept) = kept.get_mut(matrix.path) {
                if self.error_feedback {
                    kept.error = matrix.sum;
                }
                if finite && self.warm_start {
                    kept.factor = matrix.right;
                }
            }
        }
        Ok(())
    }

    /// The bucket's parameters that travel as they are, and those that are compressed. Counts the step.
    fn divide<'a, T: Kept>(
        &self,
        bucket: &GradBucket<'a>,
        kept: &mut BTreeMap<String, Matrix<T>>,
    ) -> (Vec<BucketParam<'a>>, Vec<LowRank<'a, T>>) {
        let (mut plain, mut low_rank) = (Vec::new(), Vec::new());
        for parameter in bucket.parameters().filter(|parameter| parameter.used) {
            let kept = kept.entry(parameter.path.into()).or_default();
            kept.steps += 1;
            let size = self.size(parameter.shape);
            let Some((n, m, k)) = size.filter(|_| kept.steps > self.start_step) else {
                plain.push(parameter);
                continue;
            };
            let mut sum = std::mem::take(&mut kept.error);
            if sum.len() != n * m {
                sum = vec![T::ZERO; n * m];
            }
            let mut right = std::mem::take(&mut kept.factor);
            right.resize(k * m, T::ZERO);
            // Rows that are lost because the gradient had fewer dimensions get another chance, also those that only show to depend on others.
            let random = (self.seed, parameter.path, kept.steps);
            fill_empty_rows(&mut right, m, random);
            orthonormalize(&mut right, m);
            if fill_empty_rows(&mut right, m, random) {
                orthonormalize(&mut right, m);
            }
            low_rank.push(LowRank {
                path: parameter.path,
                range: parameter.range,
                n,
                m,
                sum,
                left: Vec::new(),
                right,
            });
        }
        (plain, low_rank)
    }
}

/// A gradient on its way, as a matrix of `n` x `m`.
struct LowRank<'a, T> {
    path: &'a str,
    range: Range<usize>,
    n: usize,
    m: usize,
    /// The error memory; from [`add_and_project`] to [`decompress`](Self::decompress) the gradient with it.
    sum: Vec<T>,
    /// k x n.
    left: Vec<T>,
    /// k x m.
    right: Vec<T>,
}

impl<T: Real> LowRank<'_, T> {
    /// Those of the left factor, k x n.
    fn left_elements(&self) -> usize {
        self.right.len() / self.m * self.n
    }

    /// Replaces the gradient by the product of the factors; `false` if that is not finite.
    fn decompress(&mut self, data: &mut [u8], dtype: DType, factor: f64) -> bool {
        let finite = |x: &T| x.to_f64().is_finite();
        let all_finite = self.left.iter().chain(&self.right).all(finite);
        let factor = T::of(factor);
        if !all_finite {
            // Only the error memory of before is kept.
            for (sum, x) in self.sum.iter_mut().zip(&*read::<T>(data, dtype)) {
                let before = *sum - *x * factor;
                *sum = if finite(&before) { before } else { T::ZERO };
            }
            write(&vec![T::of(f64::NAN); self.sum.len()], data, dtype);
            return false;
        }
        let Self {
            sum,
            left,
            right,
            m,
            ..
        } = self;
        let mut take = |product: &mut [T]| take_product(sum, left, right, factor, product, *m);
        match bytemuck::try_cast_slice_mut(data) {
            Ok(product) if dtype == T::DTYPE => take(product),
            _ => {
                let mut product = vec![T::ZERO; data.len() / dtype.size()];
                take(&mut product);
                write(&product, data, dtype);
            }
        }
        true
    }
}

/// Elements of `dtype`, in the type in which they are compressed.
fn read<T: Real>(bytes: &[u8], dtype: DType) -> Cow<'_, [T]> {
    if dtype == T::DTYPE {
        let aligned = bytemuck::try_cast_slice(bytes).ok().map(Cow::Borrowed);
        return aligned.unwrap_or_else(|| Cow::Owned(bytemuck::pod_collect_to_vec(bytes)));
    }
    let mut elements = vec![T::ZERO; bytes.len() / dtype.size()];
    let into = bytemuck::cast_slice_mut(&mut elements);
    widen(bytes, dtype, into, T::DTYPE);
    Cow::Owned(elements)
}

/// The inverse of [`read`].
fn write<T: Real>(elements: &[T], bytes: &mut [u8], dtype: DType) {
    match dtype == T::DTYPE {
        true => bytes.copy_from_slice(bytemuck::cast_slice(elements)),
        false => narrow(bytemuck::cast_slice(elements), T::DTYPE, bytes, dtype),
    }
}

impl CommHook for PowerSgdHook {
    fn describe(&self) -> String {
        let Self {
            rank,
            start_step,
            error_feedback,
            warm_start,
            min_compression_rate,
            seed,
            state: _,
        } = self;
        format!(
            "PowerSGD rank {rank} from step {start_step}, error feedback {error_feedback}, warm start {warm_start}, at least {min_compression_rate} times smaller, seed {seed}"
        )
    }

    fn reduce(&self, bucket: &mut GradBucket<'_>) -> Result<(), GroupError> {
        match bucket.dtype() {
            DType::F64 => self.reduce_as::<f64>(bucket),
            _ => self.reduce_as::<f32>(bucket),
        }
    }
}
