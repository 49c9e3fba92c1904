//! Reductions of elements of every type.

use half::{bf16, f16};
use std::ffi::c_int;

/// Size of an `ncclDataType_t` in bytes; zero for what is none.
pub(crate) fn size(dtype: c_int) -> usize {
    match dtype {
        0 | 1 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        _ => 0,
    }
}

/// Reduces the elements of `parts` (all of the length of `out`) with an `ncclRedOp_t`: 0 is sum, 2 max, 3 min.
pub(crate) fn reduce(dtype: c_int, op: c_int, parts: &[&[u8]], out: &mut [u8]) {
    match dtype {
        0 => each::<i8, 1>(op, parts, out),
        1 => each::<u8, 1>(op, parts, out),
        2 => each::<i32, 4>(op, parts, out),
        3 => each::<u32, 4>(op, parts, out),
        4 => each::<i64, 8>(op, parts, out),
        5 => each::<u64, 8>(op, parts, out),
        6 => each::<f16, 2>(op, parts, out),
        7 => each::<f32, 4>(op, parts, out),
        8 => each::<f64, 8>(op, parts, out),
        _ => each::<bf16, 2>(op, parts, out),
    }
}

fn each<T: Element<N>, const N: usize>(op: c_int, parts: &[&[u8]], out: &mut [u8]) {
    for (i, out) in out.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        let elements = parts.iter().map(|part| T::read(part.as_chunks::<N>().0[i]));
        let result = elements.reduce(|a, b| match op {
            0 => T::add(a, b),
            2 => T::max(a, b),
            _ => T::min(a, b),
        });
        if let Some(result) = result {
            *out = T::write(result);
        }
    }
}

/// An element type, and the type in which it is added up.
trait Element<const N: usize> {
    type Sum;
    fn read(bytes: [u8; N]) -> Self::Sum;
    fn write(value: Self::Sum) -> [u8; N];
    fn add(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn max(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn min(a: Self::Sum, b: Self::Sum) -> Self::Sum;
}

macro_rules! element {
    ($($type:ty, $sum:ty, $size:literal, $in:expr, $out:expr, $add:expr;)*) => {$(
        impl Element<$size> for $type {
            type Sum = $sum;
            fn read(bytes: [u8; $size]) -> $sum { $in(<$type>::from_ne_bytes(bytes)) }
            fn write(value: $sum) -> [u8; $size] { <$type>::to_ne_bytes($out(value)) }
            fn add(a: $sum, b: $sum) -> $sum { $add(a, b) }
            fn max(a: $sum, b: $sum) -> $sum { if b > a { b } else { a } }
            fn min(a: $sum, b: $sum) -> $sum { if b < a { b } else { a } }
        }
    )*};
}

fn same<T>(value: T) -> T {
    value
}

element! {
    i8, i8, 1, same, same, i8::wrapping_add;
    u8, u8, 1, same, same, u8::wrapping_add;
    i32, i32, 4, same, same, i32::wrapping_add;
    u32, u32, 4, same, same, u32::wrapping_add;
    i64, i64, 8, same, same, i64::wrapping_add;
    u64, u64, 8, same, same, u64::wrapping_add;
    f32, f32, 4, same, same, std::ops::Add::add;
    f64, f64, 8, same, same, std::ops::Add::add;
    f16, f32, 2, f16::to_f32, f16::from_f32, std::ops::Add::add;
    bf16, f32, 2, bf16::to_f32, bf16::from_f32, std::ops::Add::add;
}
