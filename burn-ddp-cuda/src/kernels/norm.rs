//! Whether all values of a bucket are finite, and their norm.

use super::{
    Bucket, DType, KernelError,
    blocking::blocking,
    launch::{buffer, vectors},
};
use cubecl::{
    ir::{FloatKind, UIntKind},
    prelude::*,
};

/// At most so many cubes, each of which leaves two numbers to be read back.
const CUBES: usize = 1024;

/// What [`Bucket::norm`] found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// No value is infinite or not a number.
    pub finite: bool,
    /// Sum of the squares of all values. Not finite if a value is not, nor where squares exceed what the device sums in: f32, and f64 for f64.
    pub sum_of_squares: f64,
}

impl Bucket {
    /// Looks at every value once. The squares are added in f32 by the units of the device (in f64 for f64), and the partial sums in
    /// f64 here. Padding does not count, because it is zeros.
    ///
    /// Waits for the device: one launch, and at most 8 KiB (16 KiB for f64) that are read back.
    ///
    /// # Errors
    ///
    /// A slot has no values yet, or something that was started on the bucket failed, or the read-back.
    pub fn norm(&self) -> Result<Norm, KernelError> {
        self.require_all_written()?;
        let (dtype, len) = (self.dtype(), self.layout().len());
        if len == 0 {
            return Ok(Norm {
                finite: true,
                sum_of_squares: 0.0,
            });
        }
        // Where the exponent is: all ones in what is not finite.
        let (sum, bits, mantissa, ones) = match dtype {
            DType::F64 => (FloatKind::F64, UIntKind::U64, 52, 0x7ff),
            _ => (FloatKind::F32, UIntKind::U32, 23, 0xff),
        };
        let size = if dtype == DType::F64 { 8 } else { 4 };
        let vector = vectors(&self.client, dtype.size().max(size), len);
        let dim = CubeDim::new(&self.client, len / vector);
        let units = dim.num_elems() as usize;
        let cubes = (len / vector).div_ceil(units).clamp(1, CUBES);
        let bytes = 2 * cubes * size;
        let partials = self.on_stream(|| {
            let partials = self.client.empty(bytes);
            sum_squares::launch(
                &self.client,
                CubeCount::Static(cubes as u32, 1, 1),
                dim,
                AddressType::from_len(len),
                vector,
                buffer(self.whole(), len / vector),
                buffer(partials.clone(), 2 * cubes),
                mantissa,
                ones,
                units,
                [dtype.elem(), ElemType::Float(sum), ElemType::UInt(bits)],
            );
            blocking("reading the norm of a bucket", || {
                self.client.read_one(partials)
            })
        })?;
        if partials.len() != bytes {
            return Err(KernelError::ReadBack {
                operation: "reading the norm of a bucket",
                expected: bytes,
                found: partials.len(),
            });
        }
        let number = |bytes: &[u8]| match *bytes {
            [a, b, c, d] => f64::from(f32::from_ne_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => f64::from_ne_bytes([a, b, c, d, e, f, g, h]),
            _ => f64::NAN,
        };
        let numbers: Vec<f64> = partials.chunks(size).map(number).collect();
        let (sums, others) = numbers.split_at(cubes);
        Ok(Norm {
            finite: others.iter().all(|&not_finite| not_finite == 0.0),
            sum_of_squares: sums.iter().sum(),
        })
    }
}

/// Leaves each cube's sum of squares in the first half of `partials`, and whether it met a value that is not finite in the second.
#[cube(launch, address_type = "dynamic")]
fn sum_squares<E: Numeric, A: Numeric, B: Int, N: Size>(
    input: &[Vector<E, N>],
    partials: &mut [A],
    mantissa: u32,
    ones: u32,
    #[comptime] units: usize,
    #[define(E, A, B)] _dtypes: [ElemType; 3],
) {
    let shift = Vector::<B, N>::new(B::cast_from(mantissa));
    let mask = Vector::<B, N>::new(B::cast_from(ones));
    let mut sum = Vector::<A, N>::from_int(0);
    let mut not_finite = A::from_int(0);
    let mut pos = CUBE_POS * CUBE_DIM as usize + UNIT_POS as usize;
    let step = CUBE_COUNT * CUBE_DIM as usize;
    while pos < input.len() {
        let x = Vector::<A, N>::cast_from(input[pos]);
        sum += x * x;
        // A compiler may take for granted that floats are numbers, but not that bits are.
        let exponents = (Vector::<B, N>::reinterpret(x) >> shift) & mask;
        #[unroll]
        for lane in 0..N::value() {
            if exponents.extract(lane) == B::cast_from(ones) {
                not_finite = A::from_int(1);
            }
        }
        pos += step;
    }
    let mut total = A::from_int(0);
    #[unroll]
    for lane in 0..N::value() {
        total += sum.extract(lane);
    }
    let mut sums = Shared::<[A]>::new_slice(units);
    let mut flags = Shared::<[A]>::new_slice(units);
    sums[UNIT_POS as usize] = total;
    flags[UNIT_POS as usize] = not_finite;
    sync_cube();
    if UNIT_POS == 0 {
        let mut cube_sum = A::from_int(0);
        let mut cube_flag = A::from_int(0);
        for unit in 0..units {
            cube_sum += sums[unit];
            cube_flag += flags[unit];
        }
        partials[CUBE_POS] = cube_sum;
        partials[CUBE_COUNT + CUBE_POS] = cube_flag;
    }
}
