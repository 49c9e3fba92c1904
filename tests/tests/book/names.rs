//! The `use` lines of the pages, which name the places of what the pages show. That they compile is the test.

#![allow(unused_imports)]

mod batch_norm {
    // ANCHOR: batch_norm
    use burn_ddp::{BufferPolicy, WrapConfig, train::SyncBatchNorm};
    // ANCHOR_END: batch_norm
}
mod checkpoints {
    // ANCHOR: checkpoints
    use burn_ddp::train::Snapshot;
    // ANCHOR_END: checkpoints
}
mod data {
    // ANCHOR: data
    use burn_ddp::data::Tail;
    // ANCHOR_END: data
}
mod errors {
    // ANCHOR: errors
    use burn_ddp::{Error, try_backward};
    // ANCHOR_END: errors
}
mod evaluation {
    // ANCHOR: evaluation
    use burn_ddp::data::{MarkedBatch, Tail};
    use burn_ddp::train::Mean;
    // ANCHOR_END: evaluation
}
mod hooks {
    // ANCHOR: hooks
    use burn_ddp::{CompressHook, PowerSgdHook, WrapConfig};
    use std::sync::Arc;
    // ANCHOR_END: hooks
}
mod own_hook {
    // ANCHOR: own_hook
    use burn_ddp::{CommHook, GradBucket, ReduceOp, group::GroupError};
    // ANCHOR_END: own_hook
}
mod freezing {
    // ANCHOR: freezing
    use burn::module::{Lora, Module, ModuleMapper, Param};
    // ANCHOR_END: freezing
}
mod learner {
    // ANCHOR: learner
    use burn_ddp::{Ddp, Launcher, data::Tail};
    // ANCHOR_END: learner
}
mod output {
    // ANCHOR: output
    use burn_ddp::train::learner::{GatherOutput, Pack, Unpack, UnpackError};
    // ANCHOR_END: output
}
mod optimizers {
    // ANCHOR: optimizers
    use burn_ddp::train::{LinearScaling, LossScaler, Norm, Snapshot, ZeroRedundancyOptimizer};
    // ANCHOR_END: optimizers
}
mod saving {
    // ANCHOR: saving
    use burn_ddp::data::LoaderState;
    // ANCHOR_END: saving
}
mod static_graph {
    // ANCHOR: static_graph
    use burn_ddp::WrapConfig;
    // ANCHOR_END: static_graph
}
mod uneven {
    // ANCHOR: uneven
    use burn_ddp::{NonFinitePolicy, Reduction, WrapConfig};
    // ANCHOR_END: uneven
}
mod starting {
    // ANCHOR: starting
    use burn_ddp::{Ddp, Launcher, group::host::Rendezvous};
    // ANCHOR_END: starting
}
