//! What the benchmark programs measure with.

pub mod all_reduce;
pub mod memory;
pub mod sync_cost;
pub mod timeline;
pub mod zero_cost;
