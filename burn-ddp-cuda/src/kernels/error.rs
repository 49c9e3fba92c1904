//! What can go wrong with a bucket.

use super::DType;
use cubecl::server::ServerError;

/// What can go wrong with a bucket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The device has no such type.
    #[error(
        "{runtime} cannot compute with {dtype} on this device: use another type for the gradients or the bucket"
    )]
    UnsupportedDType {
        /// The type.
        dtype: DType,
        /// The runtime that was asked.
        runtime: &'static str,
    },
    /// Values are not cast between these types.
    #[error("{from} is not cast to {to}: f64 has buckets of its own type")]
    UnsupportedCast {
        /// The type of the values.
        from: DType,
        /// The type they should get.
        to: DType,
    },
    /// A bucket or a tensor is larger than what the device gives in one allocation.
    #[error(
        "{bytes} bytes are more than the {limit} bytes that this device gives in one allocation: use smaller buckets"
    )]
    Allocation {
        /// What was needed.
        bytes: u64,
        /// The device's limit.
        limit: u64,
    },
    /// The bucket has no such slot.
    #[error("there is no slot {slot}: the bucket has {slots}")]
    NoSuchSlot {
        /// The slot asked for.
        slot: usize,
        /// How many there are.
        slots: usize,
    },
    /// A tensor has another number of elements than its slot.
    #[error("slot {slot} holds {expected} elements, and the tensor has {found}")]
    WrongLength {
        /// The slot.
        slot: usize,
        /// The slot's elements.
        expected: usize,
        /// The tensor's.
        found: usize,
    },
    /// A tensor's shape and strides disagree, or lead out of its memory.
    #[error(
        "a tensor of shape {shape:?} with strides {strides:?} does not lie within its {bytes} bytes of memory"
    )]
    OutOfBounds {
        /// The tensor's shape.
        shape: Vec<usize>,
        /// The tensor's strides, in elements.
        strides: Vec<usize>,
        /// Size of the memory behind it.
        bytes: u64,
    },
    /// A tensor is on another device than the bucket.
    #[error("the {what} is on another device than the bucket")]
    OtherDevice {
        /// What is.
        what: &'static str,
    },
    /// A slot was asked for its values before it got any.
    #[error("slot {slot} has no values yet: pack or zero it first")]
    Unwritten {
        /// The slot.
        slot: usize,
    },
    /// Two buckets that should be added have different slots or types.
    #[error("buckets of different layouts cannot be added")]
    DifferentLayouts,
    /// Work on the device failed: an allocation, a launch or the device itself.
    #[error("{operation}: {source}")]
    Device {
        /// What was waited for.
        operation: &'static str,
        /// The runtime's answer.
        source: Box<ServerError>,
    },
    /// Values could not be read back to the host.
    #[error("{operation}: the read-back has {found} bytes instead of {expected}")]
    ReadBack {
        /// What was read.
        operation: &'static str,
        /// Bytes expected.
        expected: usize,
        /// Bytes that came.
        found: usize,
    },
    /// The runtime's thread of this device has panicked. The device is of no more use to this process.
    #[error("{operation}: the runtime of the device has panicked: {message}. Restart the process")]
    RuntimePanicked {
        /// What was waited for.
        operation: &'static str,
        /// What the panic said.
        message: String,
    },
}
