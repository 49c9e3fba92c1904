//! The element types of gradients and buckets.

use cubecl::ir::{ElemType, FloatKind};
use std::fmt;

/// An element type of gradients and buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit floats.
    F32,
    /// 64-bit floats. They go into buckets of their own type only, and never through another.
    F64,
    /// IEEE half precision.
    F16,
    /// The upper half of a 32-bit float.
    BF16,
}

impl DType {
    /// Every type there is.
    pub const ALL: [Self; 4] = [Self::F32, Self::F64, Self::F16, Self::BF16];

    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// Whether values can be cast between the two types on their way into or out of a bucket: always, unless just one of
    /// them is [`F64`](Self::F64).
    pub fn casts_to(self, other: Self) -> bool {
        (self == Self::F64) == (other == Self::F64)
    }

    pub(super) fn elem(self) -> ElemType {
        ElemType::Float(match self {
            Self::F32 => FloatKind::F32,
            Self::F64 => FloatKind::F64,
            Self::F16 => FloatKind::F16,
            Self::BF16 => FloatKind::BF16,
        })
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        })
    }
}
