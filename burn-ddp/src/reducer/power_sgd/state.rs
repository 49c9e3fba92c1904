//! What PowerSGD keeps from step to step.

use super::matrix::Real;
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// The state of a [`PowerSgdHook`](crate::PowerSgdHook) on one rank: for each parameter, by module path, its steps so far, its error memory
/// (what has not been sent yet; differs between ranks) and its factor (equal on all).
///
/// Comes from [`PowerSgdHook::state`](crate::PowerSgdHook::state) and goes into a checkpoint. As large as the gradients.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PowerSgdState {
    pub(super) single: BTreeMap<String, Matrix<f32>>,
    pub(super) double: BTreeMap<String, Matrix<f64>>,
}

/// Of one parameter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Matrix<T> {
    /// Steps in which some rank has used the parameter.
    pub(super) steps: u64,
    /// n x m; empty before the first compressed step, and without error feedback.
    pub(super) error: Vec<T>,
    /// k x m, the right factor of the last step; empty before the first.
    pub(super) factor: Vec<T>,
}

/// Types that have a place in the state.
pub(super) trait Kept: Real {
    fn kept(state: &mut PowerSgdState) -> &mut BTreeMap<String, Matrix<Self>>;
}

impl Kept for f32 {
    fn kept(state: &mut PowerSgdState) -> &mut BTreeMap<String, Matrix<Self>> {
        &mut state.single
    }
}

impl Kept for f64 {
    fn kept(state: &mut PowerSgdState) -> &mut BTreeMap<String, Matrix<Self>> {
        &mut state.double
    }
}

impl PowerSgdState {
    /// One state that stands for those of several ranks on any number of ranks: the error memories become their mean. The reduced gradient
    /// depends on nothing else of them, since every product with them is averaged.
    pub(crate) fn mean<E>(states: impl IntoIterator<Item = Result<Self, E>>) -> Result<Self, E> {
        fn add<T: Real>(sum: &mut BTreeMap<String, Matrix<T>>, of: BTreeMap<String, Matrix<T>>) {
            for (path, matrix) in of {
                match sum.get_mut(&path) {
                    None => {
                        sum.insert(path, matrix);
                    }
                    Some(sum) => {
                        for (sum, x) in sum.error.iter_mut().zip(matrix.error) {
                            *sum += x;
                        }
                    }
                }
            }
        }
        fn divide<T: Real>(sum: &mut BTreeMap<String, Matrix<T>>, by: f64) {
            for x in sum.values_mut().flat_map(|matrix| &mut matrix.error) {
                *x = T::of(x.to_f64() / by);
            }
        }
        let mut mean = Self::default();
        let mut count = 0.0;
        for state in states {
            let state = state?;
            add(&mut mean.single, state.single);
            add(&mut mean.double, state.double);
            count += 1.0;
        }
        divide(&mut mean.single, count);
        divide(&mut mean.double, count);
        Ok(mean)
    }
}

/// Numbers in [-1, 1), the same on all ranks, for rows that are all zero; `false` if there are none.
pub(super) fn fill_empty_rows<T: Real>(
    rows: &mut [T],
    length: usize,
    (seed, path, step): (u64, &str, u64),
) -> bool {
    let mut generator = None;
    for row in rows.chunks_exact_mut(length) {
        if row.iter().any(|x| x.to_f64() != 0.0) {
            continue;
        }
        let generator = generator.get_or_insert_with(|| {
            let mut hash = Sha256::new();
            hash.update(seed.to_le_bytes());
            hash.update(step.to_le_bytes());
            hash.update(path.as_bytes());
            ChaCha8Rng::from_seed(hash.finalize().into())
        });
        for x in row {
            *x = T::of(f64::from(generator.next_u32() as i32) / -f64::from(i32::MIN));
        }
    }
    generator.is_some()
}
