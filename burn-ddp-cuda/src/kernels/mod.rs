//! Gradients into buckets on the device, and out of them again.
//!
//! A [`Bucket`] is one allocation of device memory with a slot for each gradient. [`Bucket::pack`] writes a gradient into
//! its slot, scaled and cast; a collective reduces the whole bucket; [`Bucket::unpack`] hands each slot out as a tensor.
//! [`Bucket::norm`] tells whether all values are finite and how large they are, and [`Bucket::add`] sums two buckets.
//!
//! Everything runs on any of cubecl's runtimes, in the order of one stream, and nothing waits for the device unless its
//! documentation says so.

mod add;
mod blocking;
mod bucket;
mod copy;
mod dtype;
mod error;
mod launch;
mod layout;
mod norm;
mod pack;
mod pack_many;
mod source;
mod support;
mod unpack;

pub use bucket::Bucket;
pub use dtype::DType;
pub use error::KernelError;
pub use layout::{BucketLayout, SLOT_ALIGNMENT};
pub use norm::Norm;
pub use source::Source;
pub use support::supports;
