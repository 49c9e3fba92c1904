//! Between Burn's element types and those of the groups.

use crate::group::DType;
use burn::tensor::DType as BurnDType;

impl From<DType> for BurnDType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => BurnDType::F32,
            DType::F64 => BurnDType::F64,
            DType::F16 => BurnDType::F16,
            DType::BF16 => BurnDType::BF16,
            DType::U8 => BurnDType::U8,
            DType::I32 => BurnDType::I32,
            DType::I64 => BurnDType::I64,
            DType::U64 => BurnDType::U64,
        }
    }
}

/// The group's name for a float type, `None` for what gradients cannot have.
pub(crate) fn float(dtype: BurnDType) -> Option<DType> {
    match dtype {
        // Flex32 is stored as f32.
        BurnDType::F32 | BurnDType::Flex32 => Some(DType::F32),
        BurnDType::F64 => Some(DType::F64),
        BurnDType::F16 => Some(DType::F16),
        BurnDType::BF16 => Some(DType::BF16),
        _ => None,
    }
}
