//! Float elements in bytes.

use crate::group::DType;
use half::{bf16, f16, slice::HalfFloatSliceExt};

/// Rounds f32 or f64 elements to 16-bit ones. Both slices are aligned for their elements, as group memory is.
pub(super) fn narrow(from: &[u8], dtype: DType, to: &mut [u8], to_dtype: DType) {
    fn each<H: bytemuck::Pod>(from: &[u8], dtype: DType, to: &mut [u8])
    where
        [H]: HalfFloatSliceExt,
    {
        let to: &mut [H] = bytemuck::cast_slice_mut(to);
        match dtype {
            DType::F64 => to.convert_from_f64_slice(bytemuck::cast_slice(from)),
            _ => to.convert_from_f32_slice(bytemuck::cast_slice(from)),
        }
    }
    match to_dtype {
        DType::F16 => each::<f16>(from, dtype, to),
        _ => each::<bf16>(from, dtype, to),
    }
}

/// The inverse of [`narrow`].
pub(super) fn widen(from: &[u8], dtype: DType, to: &mut [u8], to_dtype: DType) {
    fn each<H: bytemuck::Pod>(from: &[u8], to: &mut [u8], to_dtype: DType)
    where
        [H]: HalfFloatSliceExt,
    {
        let from: &[H] = bytemuck::cast_slice(from);
        match to_dtype {
            DType::F64 => from.convert_to_f64_slice(bytemuck::cast_slice_mut(to)),
            _ => from.convert_to_f32_slice(bytemuck::cast_slice_mut(to)),
        }
    }
    match dtype {
        DType::F16 => each::<f16>(from, to, to_dtype),
        _ => each::<bf16>(from, to, to_dtype),
    }
}

/// Multiplies every element. Through f32 for 16-bit types, rounded once.
pub(super) fn scale(bytes: &mut [u8], dtype: DType, factor: f64) {
    macro_rules! each {
        ($float:ty, $x:ident => $scaled:expr) => {
            for element in bytes.as_chunks_mut::<{ size_of::<$float>() }>().0 {
                let $x = <$float>::from_ne_bytes(*element);
                *element = <$float>::to_ne_bytes($scaled);
            }
        };
    }
    let single = factor as f32;
    match dtype {
        DType::F64 => each!(f64, x => x * factor),
        DType::F16 => each!(f16, x => f16::from_f32(x.to_f32() * single)),
        DType::BF16 => each!(bf16, x => bf16::from_f32(x.to_f32() * single)),
        _ => each!(f32, x => x * single),
    }
}

/// Whether no element is a NaN or an infinity.
pub(super) fn all_finite(bytes: &[u8], dtype: DType) -> bool {
    // An exponent of all ones; `fold` and not `all`, so that the loop has no branches.
    macro_rules! each {
        ($bits:ty, $exponent:expr) => {
            bytes
                .as_chunks::<{ size_of::<$bits>() }>()
                .0
                .iter()
                .fold(true, |finite, element| {
                    finite & (<$bits>::from_ne_bytes(*element) & $exponent != $exponent)
                })
        };
    }
    match dtype {
        DType::F64 => each!(u64, 0x7ff0_0000_0000_0000),
        DType::F16 => each!(u16, 0x7c00),
        DType::BF16 => each!(u16, 0x7f80),
        _ => each!(u32, 0x7f80_0000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float_type_is_scaled_and_scanned() {
        macro_rules! check {
            ($float:ty, $dtype:expr, $from:expr) => {
                let bytes = |values: &[f32]| -> Vec<u8> {
                    let values = values.iter().map(|x| <$float>::to_ne_bytes($from(*x)));
                    values.flatten().collect()
                };
                let mut data = bytes(&[1.0, -3.0, 0.0]);
                scale(&mut data, $dtype, 1.5);
                assert_eq!(data, bytes(&[1.5, -4.5, 0.0]));
                assert!(all_finite(&data, $dtype));
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    assert!(!all_finite(&bytes(&[0.0, bad, 1.0]), $dtype), "{bad}");
                }
            };
        }
        check!(f32, DType::F32, |x| x);
        check!(f64, DType::F64, f64::from);
        check!(f16, DType::F16, f16::from_f32);
        check!(bf16, DType::BF16, bf16::from_f32);
    }
}
