//! Gradients sent in 16 bits.

use super::{
    comm_hook::{CommHook, GradBucket},
    elements::{narrow, widen},
};
use crate::group::{DType, GroupBuffer, GroupError, ReduceOp};
use std::sync::{Mutex, PoisonError};

/// A [`CommHook`] that sends f32 and f64 gradients in 16 bits: half the bytes (a quarter for f64).
///
/// Each rank rounds its gradients once, the ranks' sum is accumulated in 32 bits and divided before it is rounded again (between machines:
/// once a machine), so that a mean of numbers that fit never overflows. What does not fit (f16: magnitudes over 65,504) is infinite on
/// every rank. Buckets of 16-bit gradients are reduced as they are.
#[derive(Debug)]
pub struct CompressHook {
    dtype: DType,
    /// In the group's memory, as large as the largest bucket so far.
    buffer: Mutex<Option<Box<dyn GroupBuffer>>>,
}

impl CompressHook {
    /// IEEE half precision: 11 bits of precision, magnitudes from 6e-8 to 65,504; smaller ones become zero.
    pub fn f16() -> Self {
        Self::new(DType::F16)
    }

    /// bfloat16: 8 bits of precision, the range of f32. The safer choice where gradients may be large or small.
    pub fn bf16() -> Self {
        Self::new(DType::BF16)
    }

    fn new(dtype: DType) -> Self {
        Self {
            dtype,
            buffer: Mutex::default(),
        }
    }
}

impl CommHook for CompressHook {
    fn describe(&self) -> String {
        format!("send as {}", self.dtype)
    }

    fn reduce(&self, bucket: &mut GradBucket<'_>) -> Result<(), GroupError> {
        let (group, dtype) = (bucket.group(), bucket.dtype());
        if !matches!(dtype, DType::F32 | DType::F64) {
            return group.all_reduce(bucket.data_mut(), dtype, ReduceOp::Mean);
        }
        let elements = bucket.data().len() / dtype.size();
        let bytes = elements * self.dtype.size();
        let mut buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        // All ranks are here with the same bucket, so they make the same buffer.
        let large = buffer.take().filter(|buffer| buffer.bytes() >= bytes);
        let buffer = buffer.insert(match large {
            Some(buffer) => buffer,
            None => group.buffer(bytes)?,
        });
        narrow(
            bucket.data(),
            dtype,
            &mut buffer.input()[..bytes],
            self.dtype,
        );
        buffer.all_reduce(bytes, self.dtype, ReduceOp::Mean)?;
        widen(
            &buffer.output()[..bytes],
            self.dtype,
            bucket.data_mut(),
            dtype,
        );
        Ok(())
    }
}
