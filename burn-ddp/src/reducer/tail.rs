//! Numbers in the control tail of a bucket, in the bucket's own element type.

use crate::group::DType;
use half::{bf16, f16};

/// Writes small whole numbers (exact in every float type up to 256) as elements of `dtype`.
pub(super) fn write(tail: &mut [u8], dtype: DType, values: impl Iterator<Item = u8>) {
    for (element, value) in tail.chunks_exact_mut(dtype.size()).zip(values) {
        match dtype {
            DType::F64 => element.copy_from_slice(&f64::from(value).to_ne_bytes()),
            DType::F16 => element.copy_from_slice(&f16::from(value).to_ne_bytes()),
            DType::BF16 => element.copy_from_slice(&bf16::from(value).to_ne_bytes()),
            _ => element.copy_from_slice(&f32::from(value).to_ne_bytes()),
        }
    }
}

/// Reads elements of `dtype`.
pub(super) fn read(tail: &[u8], dtype: DType) -> impl Iterator<Item = f64> {
    tail.chunks_exact(dtype.size())
        .map(move |e| match (dtype, e) {
            (DType::F64, &[a, b, c, d, e, f, g, h]) => f64::from_ne_bytes([a, b, c, d, e, f, g, h]),
            (DType::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f64(),
            (DType::BF16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f64(),
            (_, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]).into(),
            _ => f64::NAN,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_in_every_float_type() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let mut tail = vec![0; 4 * dtype.size()];
            write(&mut tail, dtype, [0, 1, 127, 255].into_iter());
            assert_eq!(
                read(&tail, dtype).collect::<Vec<_>>(),
                [0.0, 1.0, 127.0, 255.0],
                "{dtype}"
            );
        }
    }
}
