//! What a device can compute with.

use super::{DType, KernelError};
use cubecl::{
    client::Client,
    features::TypeUsage,
    ir::{ElemType, UIntKind},
};

/// Whether the device behind `client` can hold and compute with values of this type.
pub fn supports(client: &Client, dtype: DType) -> bool {
    let usage = client.properties().type_usage(dtype.elem());
    // Half precision is only ever converted from and to f32.
    let conversion = usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion);
    match dtype {
        // The check for values that are not finite looks at the bits.
        DType::F64 => {
            let bits = ElemType::UInt(UIntKind::U64);
            conversion
                && usage.contains(TypeUsage::Arithmetic)
                && client
                    .properties()
                    .type_usage(bits)
                    .contains(TypeUsage::Arithmetic)
        }
        _ => conversion,
    }
}

pub(super) fn require(client: &Client, dtype: DType) -> Result<(), KernelError> {
    match supports(client, dtype) {
        true => Ok(()),
        false => Err(KernelError::UnsupportedDType {
            dtype,
            runtime: client.name(),
        }),
    }
}

pub(super) fn require_cast(client: &Client, from: DType, to: DType) -> Result<(), KernelError> {
    require(client, from)?;
    require(client, to)?;
    match from.casts_to(to) {
        true => Ok(()),
        false => Err(KernelError::UnsupportedCast { from, to }),
    }
}

pub(super) fn require_size(client: &Client, bytes: u64) -> Result<(), KernelError> {
    let limit = client.properties().memory.max_page_size;
    match bytes <= limit {
        true => Ok(()),
        false => Err(KernelError::Allocation { bytes, limit }),
    }
}
