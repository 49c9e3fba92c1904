//! The element types, and what they are accumulated in.

use half::{bf16, f16, slice::HalfFloatSliceExt};

/// Elements of the accumulator block: 4 to 8 KiB, and as much again for the conversion of 16-bit floats.
pub(super) const BLOCK: usize = 1024;

/// What elements are accumulated in.
pub(super) trait Number: Copy + Default {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    /// A true division, not a multiplication by the rounded reciprocal.
    fn divide(self, ranks: usize) -> Self;
}

macro_rules! float {
    ($($t:ty)*) => {$(
        impl Number for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn mul(self, other: Self) -> Self { self * other }
            // `f32::min` would drop a NaN. If `other` is NaN the comparison is false and it is taken.
            #[inline(always)]
            fn min(self, other: Self) -> Self { if self < other || self.is_nan() { self } else { other } }
            #[inline(always)]
            fn max(self, other: Self) -> Self { if self > other || self.is_nan() { self } else { other } }
            #[inline(always)]
            fn divide(self, ranks: usize) -> Self { self / ranks as $t }
        }
    )*};
}
float!(f32 f64);

macro_rules! integer {
    ($($t:ty)*) => {$(
        impl Number for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn min(self, other: Self) -> Self { Ord::min(self, other) }
            #[inline(always)]
            fn max(self, other: Self) -> Self { Ord::max(self, other) }
            // Never reached: `ops` refuses a mean of integers.
            #[inline(always)]
            fn divide(self, _: usize) -> Self { self }
        }
    )*};
}
integer!(u8 i32 i64 u64);

/// An element of `N` bytes.
pub(super) trait Element<const N: usize> {
    type Acc: Number;
    /// Whether loading is free, so that a block of accumulators would only cost.
    const IN_REGISTERS: bool;

    fn load(bytes: &[u8; N]) -> Self::Acc;
    fn store(value: Self::Acc) -> [u8; N];

    fn load_block(bytes: &[u8], values: &mut [Self::Acc]) {
        for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = Self::load(bytes);
        }
    }

    fn store_block(values: &[Self::Acc], bytes: &mut [u8]) {
        for (value, bytes) in values.iter().zip(bytes.as_chunks_mut().0) {
            *bytes = Self::store(*value);
        }
    }
}

macro_rules! native {
    ($($t:ty, $n:literal;)*) => {$(
        impl Element<$n> for $t {
            type Acc = $t;
            const IN_REGISTERS: bool = true;
            #[inline(always)]
            fn load(bytes: &[u8; $n]) -> $t { <$t>::from_ne_bytes(*bytes) }
            #[inline(always)]
            fn store(value: $t) -> [u8; $n] { value.to_ne_bytes() }
        }
    )*};
}
native!(f32, 4; f64, 8; u8, 1; i32, 4; i64, 8; u64, 8;);

impl Element<2> for bf16 {
    type Acc = f32;
    const IN_REGISTERS: bool = true;

    #[inline(always)]
    fn load(bytes: &[u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_ne_bytes(*bytes)) << 16)
    }

    // `bf16::from_f32` without its branch, so that the loop is vectorised. Adding 0x7fff plus the
    // last bit kept rounds to nearest even; a NaN stays one because its quiet bit is set.
    #[inline(always)]
    fn store(value: f32) -> [u8; 2] {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let nan = bits >> 16 | 0x40;
        let bits = if value.is_nan() { nan } else { rounded };
        (bits as u16).to_ne_bytes()
    }
}

impl Element<2> for f16 {
    type Acc = f32;
    // The conversion in software is a tree of branches; whole slices go through F16C or its like.
    const IN_REGISTERS: bool = false;

    fn load(bytes: &[u8; 2]) -> f32 {
        f16::from_ne_bytes(*bytes).to_f32()
    }

    fn store(value: f32) -> [u8; 2] {
        f16::from_f32(value).to_ne_bytes()
    }

    fn load_block(bytes: &[u8], values: &mut [f32]) {
        let mut halves = [f16::ZERO; BLOCK];
        let halves = &mut halves[..values.len()];
        bytemuck::cast_slice_mut::<f16, u8>(halves).copy_from_slice(bytes);
        halves.convert_to_f32_slice(values);
    }

    fn store_block(values: &[f32], bytes: &mut [u8]) {
        let mut halves = [f16::ZERO; BLOCK];
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(values);
        bytes.copy_from_slice(bytemuck::cast_slice(halves));
    }
}
