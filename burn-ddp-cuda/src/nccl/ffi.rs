//! The part of NCCL's C interface that is used here: types, constants and function types.
//!
//! Everything that NCCL returns is an integer here and no Rust enum: a newer library may know more codes than this crate.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    ptr,
};

/// `ncclComm_t`.
pub(super) type RawComm = *mut c_void;

pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// `NCCL_CONFIG_UNDEF_INT`: NCCL's default, or what the environment says.
const UNDEFINED: c_int = c_int::MIN;

/// `ncclConfig_t` as it was in NCCL 2.18 to 2.25.
///
/// Later versions append fields. NCCL copies the smaller of `size` and its own size over its defaults, then puts every
/// field that is newer than `version` back to its default, so this prefix serves all of them.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    /// C's padding, within `size`. NCCL 2.26 has `trafficClass` here and takes it whatever `version` says.
    traffic_class: c_int,
}

impl Config {
    /// Calls return at once, all else is NCCL's default or what the environment says.
    pub(super) fn non_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: super::version::MINIMUM.code() as c_uint,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        }
    }
}

/// `ncclUniqueId`; goes by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawUniqueId(pub(super) [u8; 128]);

pub(super) type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
pub(super) type GetUniqueId = unsafe extern "C" fn(*mut RawUniqueId) -> c_int;
pub(super) type GetLastError = unsafe extern "C" fn(RawComm) -> *const c_char;
pub(super) type InitRankConfig =
    unsafe extern "C" fn(*mut RawComm, c_int, RawUniqueId, c_int, *mut Config) -> c_int;
pub(super) type GetAsyncError = unsafe extern "C" fn(RawComm, *mut c_int) -> c_int;
/// `ncclCommFinalize`, `ncclCommDestroy`, `ncclCommAbort`.
pub(super) type OnComm = unsafe extern "C" fn(RawComm) -> c_int;
/// `ncclGroupStart`, `ncclGroupEnd`.
pub(super) type OnThread = unsafe extern "C" fn() -> c_int;

/// Where data comes from.
pub(super) type From = *const c_void;
/// Where data goes to.
pub(super) type To = *mut c_void;
/// `cudaStream_t`.
pub(super) type RawStream = *mut c_void;

/// `ncclAllReduce`, `ncclReduceScatter`: from, to, count, type, reduction.
pub(super) type Reduction =
    unsafe extern "C" fn(From, To, usize, c_int, c_int, RawComm, RawStream) -> c_int;
/// `ncclReduce`: from, to, count, type, reduction, root.
pub(super) type RootedReduction =
    unsafe extern "C" fn(From, To, usize, c_int, c_int, c_int, RawComm, RawStream) -> c_int;
/// `ncclBroadcast`: from, to, count, type, root.
pub(super) type Broadcast =
    unsafe extern "C" fn(From, To, usize, c_int, c_int, RawComm, RawStream) -> c_int;
/// `ncclAllGather`: from, to, count, type.
pub(super) type Gather = unsafe extern "C" fn(From, To, usize, c_int, RawComm, RawStream) -> c_int;
/// `ncclSend`: from, count, type, peer.
pub(super) type Send = unsafe extern "C" fn(From, usize, c_int, c_int, RawComm, RawStream) -> c_int;
/// `ncclRecv`: to, count, type, peer.
pub(super) type Recv = unsafe extern "C" fn(To, usize, c_int, c_int, RawComm, RawStream) -> c_int;

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// What a C compiler makes of the header on a 64-bit machine.
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn config_has_the_layout_of_the_header() {
        assert_eq!(size_of::<Config>(), 48);
        let offsets = [
            offset_of!(Config, magic),
            offset_of!(Config, version),
            offset_of!(Config, blocking),
            offset_of!(Config, max_ctas),
            offset_of!(Config, net_name),
            offset_of!(Config, split_share),
            offset_of!(Config, traffic_class),
        ];
        assert_eq!(offsets, [8, 12, 16, 28, 32, 40, 44]);
        assert_eq!(Config::non_blocking().version, 21900);
    }
}
