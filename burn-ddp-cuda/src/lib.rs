//! The GPU half of burn-ddp: what touches devices and nothing else.
//!
//! This crate does not depend on `burn-ddp`: the process-group trait and the reducer stay there and adapt what this crate offers, so that a
//! build without a GPU never compiles it. It does not link NCCL or CUDA either, so it builds, and says what is missing, on any machine.
//!
//! # Kernels
//!
//! The module `kernels` (with the feature `kernels`, which each of `wgpu`, `cpu` and `cuda` brings with its runtime) holds gradients in
//! buckets on the device: packed with a factor and a cast, measured, added and given back, on any device that cubecl knows.
//!
//! # NCCL
//!
//! [`nccl`] is a small binding to NCCL 2.19 or later, loaded at run time:
//!
//! | what | where |
//! |---|---|
//! | find the library, its version, the identity of a communicator | [`Library`](nccl::Library) |
//! | one rank's communicator: all_reduce, reduce, broadcast, all_gather, reduce_scatter, send, recv, groups of them | [`Communicator`](nccl::Communicator) |
//! | limits | [`Settings`](nccl::Settings) |
//! | what happened, on which rank, in which operation, what to do | [`NcclError`](nccl::NcclError) |
//!
//! The library is the one that `BURN_DDP_NCCL_LIB` names, else `libnccl.so.2` where the loader finds it: from the pip wheels
//! `nvidia-nccl-cu12` and `nvidia-nccl-cu13` (the file is in `nvidia/nccl/lib`), or from Debian's `libnccl2`. All ranks need the same
//! version. NCCL's own variables (`NCCL_SOCKET_IFNAME`, `NCCL_DEBUG` and so on) work as usual.
//!
//! Every wait has a deadline, and [`abort`](nccl::Communicator::abort) ends any of them, from any thread. The data are addresses of device
//! memory, the stream is CUDA's; who makes and orders them is the caller. On every rank, with the device current on the thread:
//!
//! ```no_run
//! use burn_ddp_cuda::nccl::{Communicator, DType, DevicePtr, Library, ReduceOp, Settings, Stream, UniqueId};
//!
//! # fn from_rank_0(id: Option<UniqueId>) -> UniqueId { unimplemented!() }
//! # fn has_passed(stream: Stream) -> bool { unimplemented!() }
//! fn average(rank: usize, world_size: usize, gradients: DevicePtr, count: usize, stream: Stream) -> Result<(), burn_ddp_cuda::nccl::NcclError> {
//!     let nccl = Library::load()?;
//!     // Rank 0 makes the identity; any channel will do to send its 128 bytes to the others.
//!     let id = from_rank_0((rank == 0).then(|| nccl.unique_id()).transpose()?);
//!     let communicator = Communicator::init(&nccl, &id, rank, world_size, Settings::default())?;
//!     println!("{}", communicator.describe());
//!
//!     // SAFETY: `gradients` are `count` f32 on this rank's device, and nothing else uses them until the stream has passed the operation.
//!     unsafe { communicator.all_reduce_in_place(gradients, count, DType::F32, ReduceOp::Sum, stream)? };
//!     communicator.wait("the gradients", || has_passed(stream))?;
//!     communicator.close()
//! }
//! ```
//!
//! A rank that dies is often no error for NCCL: its peers' GPUs just wait. So have a limit that fits the step, a thread that calls
//! [`check`](nccl::Communicator::check), and a way to tell the other ranks to abort when one fails.
//!
//! # Tests
//!
//! The tests need no GPU: the kernels run on Mesa's software Vulkan (`cargo test -p burn-ddp-cuda --features wgpu`), and a library that stands in for NCCL (`tests/mock-nccl` of the repository) does the same work between processes on
//! host memory, checks that NCCL's rules for callers are kept, and fails on demand.

#[cfg(feature = "kernels")]
pub mod kernels;
pub mod nccl;
