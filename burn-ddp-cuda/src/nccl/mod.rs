//! NCCL, loaded at run time: communicators whose every wait has a deadline and that any thread can abort.
//!
//! A small binding of its own over `libloading`, with NCCL 2.19 or later. NCCL is called in its non-blocking mode only: each call returns
//! at once, and this module asks for its end until a deadline. That is also what makes an abort possible at any time.

mod communicator;
mod deadline;
mod error;
mod ffi;
mod library;
mod operation;
mod release;
mod settings;
mod shared;
mod types;
mod unique_id;
mod version;

pub use communicator::Communicator;
pub use error::{NcclError, Result, ResultCode};
pub use library::{LIBRARY, Library};
pub use operation::Operation;
pub use settings::Settings;
pub use types::{DType, DevicePtr, ReduceOp, Stream};
pub use unique_id::UniqueId;
pub use version::{MINIMUM, Version};

/// Whether NCCL's code means that something failed.
const fn is_error(code: std::ffi::c_int) -> bool {
    code != ffi::SUCCESS && code != ffi::IN_PROGRESS
}
