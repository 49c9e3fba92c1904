//! The little linear algebra of PowerSGD.
//!
//! Plain loops with a fixed order of additions: each rank rebuilds the gradient from the same factors, and must come to the same bits on any
//! processor, which a library that chooses its kernels at run time does not promise.

use crate::group::DType;
use bytemuck::Pod;
use std::ops::{Add, AddAssign, Div, Mul, Sub, SubAssign};

/// The element type in which a bucket is compressed.
pub(super) trait Real:
    Pod
    + Default
    + Send
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + SubAssign
{
    const DTYPE: DType;
    const ZERO: Self;
    fn of(x: f64) -> Self;
    fn to_f64(self) -> f64;
}

impl Real for f32 {
    const DTYPE: DType = DType::F32;
    const ZERO: Self = 0.0;
    fn of(x: f64) -> Self {
        x as f32
    }
    fn to_f64(self) -> f64 {
        self.into()
    }
}

impl Real for f64 {
    const DTYPE: DType = DType::F64;
    const ZERO: Self = 0.0;
    fn of(x: f64) -> Self {
        x
    }
    fn to_f64(self) -> f64 {
        self
    }
}

/// Independent sums, so that the compiler may use vector registers without changing the order of additions.
const LANES: usize = 16;

fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [T::ZERO; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest = a_rest
        .iter()
        .zip(b_rest)
        .fold(T::ZERO, |sum, (a, b)| sum + *a * *b);
    sums.into_iter().fold(rest, |a, b| a + b)
}

/// Column `i` of `left` (k x n) from row `i` of a matrix (n x m) and `right` (k x m): `left = right * matrix^T`.
pub(super) fn project_row<T: Real>(row: &[T], right: &[T], left: &mut [T], i: usize) {
    let m = row.len();
    let n = left.len() / (right.len() / m);
    for (k, right) in right.chunks_exact(m).enumerate() {
        left[k * n + i] = dot(row, right);
    }
}

/// `right` (k x m) from `matrix` (n x m) and `left` (k x n): `right = left * matrix`.
pub(super) fn project_back<T: Real>(matrix: &[T], left: &[T], right: &mut [T], m: usize) {
    let n = matrix.len() / m;
    right.fill(T::ZERO);
    for (i, row) in matrix.chunks_exact(m).enumerate() {
        for (k, right) in right.chunks_exact_mut(m).enumerate() {
            let factor = left[k * n + i];
            for (sum, x) in right.iter_mut().zip(row) {
                *sum += factor * *x;
            }
        }
    }
}

/// Row `i` of `left^T * right`, into `row`.
pub(super) fn product_row<T: Real>(left: &[T], right: &[T], i: usize, row: &mut [T]) {
    let m = row.len();
    let n = left.len() / (right.len() / m);
    row.fill(T::ZERO);
    for (k, right) in right.chunks_exact(m).enumerate() {
        let factor = left[k * n + i];
        for (sum, x) in row.iter_mut().zip(right) {
            *sum += factor * *x;
        }
    }
}

/// Makes the rows (of length `length`) orthonormal; one that depends on those before it becomes zero.
///
/// Modified Gram-Schmidt, each row twice, after which it is orthogonal to working precision: L. Giraud and J. Langou, "When modified
/// Gram-Schmidt generates a well-conditioned set of vectors", IMA Journal of Numerical Analysis 22, 2002.
pub(super) fn orthonormalize<T: Real>(rows: &mut [T], length: usize) {
    let inner =
        |a: &[T], b: &[T]| -> f64 { a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64()).sum() };
    for k in 0..rows.len() / length {
        let (before, rest) = rows.split_at_mut(k * length);
        let row = &mut rest[..length];
        let norm = inner(row, row).sqrt();
        for _ in 0..2 {
            for other in before.chunks_exact(length) {
                let along = inner(row, other);
                for (x, y) in row.iter_mut().zip(other) {
                    *x = T::of(x.to_f64() - along * y.to_f64());
                }
            }
        }
        let left = inner(row, row).sqrt();
        // What is left of a dependent row is rounding.
        let scale = match left > norm * f64::from(f32::EPSILON) * 16.0 {
            true => 1.0 / left,
            false => 0.0,
        };
        for x in row {
            *x = T::of(x.to_f64() * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_by_hand() {
        // 2 x 3 and two vectors of length 3.
        let matrix = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        let right = [1.0, 0.0, -1.0, 2.0, 1.0, 0.0];
        let mut left = [0.0; 4];
        project_row(&matrix[..3], &right, &mut left, 0);
        project_row(&matrix[3..], &right, &mut left, 1);
        assert_eq!(left, [-2.0, -2.0, 4.0, 13.0]);
        let mut back = [7.0; 6];
        project_back(&matrix, &left, &mut back, 3);
        assert_eq!(back, [-10.0, -14.0, -18.0, 56.0, 73.0, 90.0]);
        let mut row = [7.0; 3];
        product_row(&left, &right, 1, &mut row);
        // -2 * (1, 0, -1) + 13 * (2, 1, 0).
        assert_eq!(row, [24.0, 13.0, 2.0]);
    }

    #[test]
    fn long_rows_are_summed_whole() {
        let a: Vec<f64> = (0..37).map(f64::from).collect();
        let mut left = [0.0];
        project_row(&a, &a, &mut left, 0);
        assert_eq!(left[0], (0..37).map(|x| f64::from(x * x)).sum::<f64>());
    }

    #[test]
    fn rows_become_orthonormal_and_dependent_ones_zero() {
        // The third is the sum of the first two; the fourth is small but independent.
        let mut rows = [
            3.0_f32, 4.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 4.0, 5.0, 1.0, 0.0, 1e-20, 0.0, 0.0, 1e-18,
        ];
        orthonormalize(&mut rows, 4);
        assert_eq!(rows[..4], [0.6, 0.8, 0.0, 0.0]);
        assert_eq!(rows[8..12], [0.0; 4]);
        for (i, a) in rows.chunks(4).enumerate() {
            for (j, b) in rows.chunks(4).enumerate() {
                let expected = if i == j && i != 2 { 1.0 } else { 0.0 };
                assert!((dot(a, b) - expected).abs() < 1e-6, "{i} {j}: {rows:?}");
            }
        }
    }
}
