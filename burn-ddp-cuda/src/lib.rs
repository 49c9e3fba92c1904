//! x
pub mod nccl;
