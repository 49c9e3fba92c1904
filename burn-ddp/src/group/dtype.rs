//! The element types and the reductions that every process group understands.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Element type of a buffer in a collective. Buffers are bytes in the host's own byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum DType {
    /// IEEE single precision.
    F32 = 1,
    /// IEEE double precision.
    F64 = 2,
    /// IEEE half precision; reductions accumulate in f32.
    F16 = 3,
    /// bfloat16; reductions accumulate in f32.
    BF16 = 4,
    /// Unsigned byte; sums wrap.
    U8 = 5,
    /// Signed 32-bit integer; sums wrap.
    I32 = 6,
    /// Signed 64-bit integer; sums wrap.
    I64 = 7,
    /// Unsigned 64-bit integer; sums wrap.
    U64 = 8,
}

impl DType {
    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }

    /// The inverse of `self as u8`, for reading a header that a peer wrote.
    pub const fn from_u8(code: u8) -> Option<Self> {
        Some(match code {
            1 => DType::F32,
            2 => DType::F64,
            3 => DType::F16,
            4 => DType::BF16,
            5 => DType::U8,
            6 => DType::I32,
            7 => DType::I64,
            8 => DType::U64,
            _ => return None,
        })
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U64 => "u64",
        })
    }
}

/// How a reduction combines the ranks' elements.
///
/// Every rank receives the same bits: each element is computed once, in rank order
/// (`((x0 + x1) + x2) + …`), and then distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum over ranks.
    Sum = 1,
    /// Sum over ranks divided by the number of ranks. f16 and bf16 divide in f32, before they
    /// round, so that a mean of f16 never overflows. Not defined for integers.
    Mean = 2,
    /// Smallest element; NaN if any rank's is NaN.
    Min = 3,
    /// Largest element; NaN if any rank's is NaN.
    Max = 4,
    /// Product over ranks.
    Product = 5,
}

impl ReduceOp {
    /// The inverse of `self as u8`, for reading a header that a peer wrote.
    pub const fn from_u8(code: u8) -> Option<Self> {
        Some(match code {
            1 => ReduceOp::Sum,
            2 => ReduceOp::Mean,
            3 => ReduceOp::Min,
            4 => ReduceOp::Max,
            5 => ReduceOp::Product,
            _ => return None,
        })
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Product => "product",
        })
    }
}
