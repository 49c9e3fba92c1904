//! The little linear algebra of PowerSGD.
//!
//! Plain loops with a fixed order of additions: each rank rebuilds the gradient from the same factors, and must come to the same bits on any
//! processor, which a library that chooses its kernels at run time does not promise. The compiler's vectors for the processor at hand do: they neither
//! reorder nor fuse.
#![allow(
    clippy::extra_unused_type_parameters,
    reason = "`with_simd` wants the level's type, though only the compiler makes vectors here"
)]

use crate::group::DType;
use bytemuck::Pod;
use macerator::{Simd, with_simd};
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

/// Rows that are added together, so that what they are added to is read and written once for all.
const BLOCK: usize = 4;

#[inline(always)]
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

/// `sum += factors[0] * rows[0] + ...`, added in this order.
#[inline(always)]
fn add_scaled<T: Real, const N: usize>(sum: &mut [T], factors: [T; N], rows: [&[T]; N]) {
    let rows = rows.map(|row| &row[..sum.len()]);
    for (j, sum) in sum.iter_mut().enumerate() {
        for (factor, row) in factors.iter().zip(rows) {
            *sum += *factor * row[j];
        }
    }
}

/// The first `N` of `rows`, which have this length.
#[inline(always)]
fn first<T, const N: usize>(rows: &[T], length: usize) -> [&[T]; N] {
    std::array::from_fn(|row| &rows[row * length..][..length])
}

/// Adds `factor * gradient` to `sum` (both n x m) and multiplies it with `right` (k x m) into `left` (k x n): `left = right * sum^T`. One pass over the memory.
#[with_simd]
pub(super) fn add_and_project<S: Simd, T: Real>(
    sum: &mut [T],
    gradient: &[T],
    factor: T,
    right: &[T],
    left: &mut [T],
    m: usize,
) {
    let n = sum.len() / m;
    let rows = sum.chunks_exact_mut(m).zip(gradient.chunks_exact(m));
    for (i, (row, gradient)) in rows.enumerate() {
        for (sum, x) in row.iter_mut().zip(gradient) {
            *sum += *x * factor;
        }
        for (k, right) in right.chunks_exact(m).enumerate() {
            left[k * n + i] = dot(row, right);
        }
    }
}

/// `right` (k x m) from `matrix` (n x m) and `left` (k x n): `right = left * matrix`.
#[with_simd]
pub(super) fn project_back<S: Simd, T: Real>(matrix: &[T], left: &[T], right: &mut [T], m: usize) {
    let n = matrix.len() / m;
    right.fill(T::ZERO);
    for (block, rows) in matrix.chunks(BLOCK * m).enumerate() {
        let i = block * BLOCK;
        for (right, left) in right.chunks_exact_mut(m).zip(left.chunks_exact(n)) {
            if rows.len() == BLOCK * m {
                let factors: [T; BLOCK] = std::array::from_fn(|row| left[i + row]);
                add_scaled(right, factors, first(rows, m));
            } else {
                for (row, factor) in rows.chunks_exact(m).zip(&left[i..]) {
                    add_scaled(right, [*factor], [row]);
                }
            }
        }
    }
}

/// Row `i` of `left^T * right` (k x n, k x m), into `row`.
#[inline(always)]
fn product_row<T: Real>(left: &[T], right: &[T], i: usize, row: &mut [T]) {
    let m = row.len();
    let ranks = right.len() / m;
    let n = left.len() / ranks;
    row.fill(T::ZERO);
    let mut k = 0;
    while k + BLOCK <= ranks {
        let factors: [T; BLOCK] = std::array::from_fn(|of| left[(k + of) * n + i]);
        add_scaled(row, factors, first(&right[k * m..], m));
        k += BLOCK;
    }
    for k in k..ranks {
        add_scaled(row, [left[k * n + i]], first(&right[k * m..], m));
    }
}

/// Takes `left^T * right` (k x n, k x m) off `sum`, and writes it divided by `factor` to `product` (both n x m).
#[with_simd]
pub(super) fn take_product<S: Simd, T: Real>(
    sum: &mut [T],
    left: &[T],
    right: &[T],
    factor: T,
    product: &mut [T],
    m: usize,
) {
    let rows = sum.chunks_exact_mut(m).zip(product.chunks_exact_mut(m));
    for (i, (sum, product)) in rows.enumerate() {
        product_row(left, right, i, product);
        for (sum, x) in sum.iter_mut().zip(product) {
            *sum -= *x;
            *x = *x / factor;
        }
    }
}

/// Makes the rows (of length `length`) orthonormal; one that depends on those before it becomes zero.
///
/// Modified Gram-Schmidt, each row twice, after which it is orthogonal to working precision: L. Giraud and J. Langou, "When modified
/// Gram-Schmidt generates a well-conditioned set of vectors", IMA Journal of Numerical Analysis 22, 2002.
#[with_simd]
pub(super) fn orthonormalize<S: Simd, T: Real>(rows: &mut [T], length: usize) {
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

/// The inner product in f64.
#[inline(always)]
fn inner<T: Real>(a: &[T], b: &[T]) -> f64 {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += a[lane].to_f64() * b[lane].to_f64();
        }
    }
    let rest = a_rest.iter().zip(b_rest);
    let rest: f64 = rest.map(|(a, b)| a.to_f64() * b.to_f64()).sum();
    rest + sums.iter().sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `count` numbers that f32 and f64 hold, and all sums of products of a few of them too.
    fn numbers(count: usize, seed: usize) -> Vec<f64> {
        let number = |i| ((i * 7 + seed * 11) % 13) as f64 - 6.0;
        (0..count).map(number).collect()
    }

    #[test]
    fn products_by_hand() {
        // 2 x 3, half of it in the sum and half of it in the gradient, and two vectors of length 3.
        let mut sum = [0.5_f32, 1.0, 1.5, 2.0, 2.5, 3.0];
        let right = [1.0, 0.0, -1.0, 2.0, 1.0, 0.0];
        let mut left = [0.0; 4];
        add_and_project(
            &mut sum,
            &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            0.5,
            &right,
            &mut left,
            3,
        );
        assert_eq!(sum, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(left, [-2.0, -2.0, 4.0, 13.0]);
        let mut back = [7.0; 6];
        project_back(&sum, &left, &mut back, 3);
        assert_eq!(back, [-10.0, -14.0, -18.0, 56.0, 73.0, 90.0]);
        // -2 * (1, 0, -1) + 4 * (2, 1, 0) and -2 * (1, 0, -1) + 13 * (2, 1, 0).
        let mut product = [7.0; 6];
        take_product(&mut sum, &left, &right, 2.0, &mut product, 3);
        assert_eq!(product, [3.0, 2.0, 1.0, 12.0, 6.5, 1.0]);
        assert_eq!(sum, [-5.0, -2.0, 1.0, -20.0, -8.0, 4.0]);
    }

    /// Against the definition, for sizes below, at and beyond those of the blocks. All numbers are exact.
    #[test]
    fn products_of_every_size() {
        let sizes = [
            (1, 1, 1),
            (3, 15, 2),
            (4, 16, 4),
            (5, 17, 5),
            (9, 37, 8),
            (8, 64, 3),
        ];
        for (n, m, ranks) in sizes {
            let at = |matrix: &[f64], i: usize, j: usize| matrix[i * m + j];
            let (gradient, right) = (numbers(n * m, 1), numbers(ranks * m, 2));
            let mut sum = vec![0.0; n * m];
            let mut left = vec![7.0; ranks * n];
            add_and_project(&mut sum, &gradient, 1.0, &right, &mut left, m);
            assert_eq!(sum, gradient);
            for k in 0..ranks {
                for i in 0..n {
                    let expected: f64 =
                        (0..m).map(|j| at(&gradient, i, j) * at(&right, k, j)).sum();
                    assert_eq!(left[k * n + i], expected, "{n} x {m}: left {k} {i}");
                }
            }
            let left = numbers(ranks * n, 3);
            let mut back = vec![7.0; ranks * m];
            project_back(&gradient, &left, &mut back, m);
            for k in 0..ranks {
                for j in 0..m {
                    let expected: f64 = (0..n).map(|i| left[k * n + i] * at(&gradient, i, j)).sum();
                    assert_eq!(at(&back, k, j), expected, "{n} x {m}: right {k} {j}");
                }
            }
            let mut product = vec![7.0; n * m];
            take_product(&mut sum, &left, &right, 1.0, &mut product, m);
            for i in 0..n {
                for j in 0..m {
                    let expected: f64 =
                        (0..ranks).map(|k| left[k * n + i] * at(&right, k, j)).sum();
                    assert_eq!(at(&product, i, j), expected, "{n} x {m}: product {i} {j}");
                    assert_eq!(at(&sum, i, j), at(&gradient, i, j) - expected);
                }
            }
        }
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
                let product = dot(a, b);
                assert!((product - expected).abs() < 1e-6, "{i} {j}: {rows:?}");
            }
        }
    }
}
