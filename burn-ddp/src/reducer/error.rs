//! Why a round of gradient reduction failed.

use crate::group::{DType, GroupError, QueueClosed};
use std::collections::BTreeMap;

/// Why gradients could not be averaged.
///
/// Any of these poisons the job's process groups: the replicas can no longer be kept equal.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReducerError {
    /// A collective failed.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// A contribution to a gradient came after the gradient had been sent.
    #[error(
        "rank {rank}: a gradient of `{path}` arrived after its bucket was launched: this backward used \
         the parameter in another way than the one before. Set `WrapConfig::learn_uses(false)` to wait for \
         every use"
    )]
    LateGradient {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
    },
    /// A backward pass is not as the first one was, though that was promised.
    #[error(
        "rank {rank}: `{path}` has {fired} gradient contribution(s) in this backward pass and had {expected} in the first one: the model is wrapped with \
         `WrapConfig::static_graph(true)`, which promises that this does not change. Wrap it without"
    )]
    StaticGraph {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
        /// Contributions in the first pass; 0 also for a parameter that no rank used in the first synchronised one.
        expected: usize,
        /// Contributions in this pass when it was noticed.
        fired: usize,
    },
    /// The ranks closed accumulation windows of different lengths.
    #[error(
        "rank {rank}: accumulation windows differ: {} (counted modulo 128). Every rank must leave `no_sync` after the same \
         number of backward passes",
        by_length(windows)
    )]
    UnequalWindows {
        /// The rank that reports.
        rank: usize,
        /// Backward passes in the window of each rank, in rank order, modulo 128; `None` for a rank that has run out of data.
        windows: Vec<Option<u32>>,
    },
    /// The gradient has another element type than the parameter had at wrap.
    #[error(
        "rank {rank}: the gradient of `{path}` is {actual}, the parameter was {expected} when it was wrapped: wrap the model again after changing its element type"
    )]
    WrongType {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
        /// Element type at wrap.
        expected: DType,
        /// What arrived, in Burn's words.
        actual: String,
    },
    /// The gradient has another number of elements than the parameter had at wrap.
    #[error(
        "rank {rank}: the gradient of `{path}` has {actual} bytes, the parameter had {expected} when it was wrapped: wrap the model again after replacing a parameter"
    )]
    WrongSize {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
        /// Bytes at wrap.
        expected: usize,
        /// Bytes that arrived.
        actual: usize,
    },
    /// A parameter was loaded from a record after `wrap`, and its gradient can no longer be given to it.
    #[error(
        "rank {rank}: `{path}` (or a copy of it) was loaded from a record after `wrap`, so that its identity is no longer known, and its gradient \
         cannot be given to it: it is tied to another field, or this rank did not use it in this backward pass. Load before \
         `wrap`, or wrap again after loading: `ddp.wrap(ddp.unwrap(model).load_file(..))`"
    )]
    Reloaded {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
    },
    /// Two values of one parameter take part in one backward pass.
    #[error(
        "rank {rank}: two values of `{path}` take part in one backward pass (a clone of the model from before an optimizer step, such as a \
         target or teacher network): use `valid()`, `no_grad()` or `detach` for the one that is not trained, or wrap it as a model of its own"
    )]
    TwoLeaves {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
    },
    /// Two threads run backward through one model at the same time.
    #[error(
        "rank {rank}: two threads run backward through the model of `{path}` at the same time: use one process per rank and one thread per model"
    )]
    Concurrent {
        /// The rank that reports.
        rank: usize,
        /// Module path of a parameter.
        path: String,
    },
    /// A gradient is missing, and Burn loses gradients of threads that run backward at the same time.
    #[error(
        "rank {rank}: `{path}` has {fired} gradient contribution(s) in this backward pass where {expected} were due, and another thread of this process was in a \
         backward pass meanwhile: Burn's autodiff can lose gradients that way (tracel-ai/burn#5573). Use one process per rank, and one thread of it that trains"
    )]
    LostGradient {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
        /// Contributions in the last pass that had as many uses of the parameter; its uses in forward if there was none.
        expected: usize,
        /// Contributions in this pass.
        fired: usize,
    },
    /// A backward pass was left by a panic after it had sent gradients or packed an accumulated window.
    #[error(
        "rank {rank}: an earlier backward pass was interrupted by a panic after it had sent gradients or packed an accumulated window; the ranks can no longer be kept equal: restart the job"
    )]
    Interrupted {
        /// The rank that reports.
        rank: usize,
    },
    /// A backward pass of a model whose gradients are a mean over samples, without the number of this rank's samples.
    #[error(
        "rank {rank}: the model of `{path}` is wrapped with `Reduction::WeightedMean`, and this backward pass does not say how many samples this rank has: \
         run it as `ddp.weighted(samples, || loss.backward())`"
    )]
    NoWeight {
        /// The rank that reports.
        rank: usize,
        /// Module path of a parameter.
        path: String,
    },
    /// A number of samples was given for a model whose gradients are a plain mean or sum over ranks.
    #[error(
        "rank {rank}: `ddp.weighted` gives the number of samples to the model of `{path}`, which is wrapped with another reduction and would ignore it: \
         wrap it with `WrapConfig::reduction(Reduction::WeightedMean)`"
    )]
    UnexpectedWeight {
        /// The rank that reports.
        rank: usize,
        /// Module path of a parameter.
        path: String,
    },
    /// Some ranks train a parameter that others have frozen.
    #[error(
        "rank {rank}: `{path}` is trained on {} and frozen on rank(s) {frozen:?}: freeze and unfreeze on all ranks before the same step",
        some_ranks(trained)
    )]
    TrainableDiffers {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
        /// Ranks that are known to train it; empty when others do.
        trained: Vec<usize>,
        /// Ranks known to have frozen it.
        frozen: Vec<usize>,
    },
    /// A parameter of the wrapped model is gone, and what is in its place is not averaged.
    #[error(
        "rank {rank}: `{path}` is no longer in the model that was wrapped: it was replaced, or dropped with a part of the model, and what is in its place trains on this rank alone. \
         Wrap the model again after changing it: `ddp.wrap(ddp.unwrap(model))`"
    )]
    Replaced {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
    },
    /// `join` was given something else than one wrapped model.
    #[error(
        "rank {rank}: `join` takes one model as `wrap` returned it, and this one {found}: join two wrapped models by `join_pair`, more by a call each"
    )]
    NotOneModel {
        /// The rank that reports.
        rank: usize,
        /// What is wrong.
        found: &'static str,
    },
    /// `join_pair` was called in a process that has synchronised batch-norm layers.
    #[error(
        "rank {rank}: `join_pair` cannot answer for two models where there is a `SyncBatchNorm`, whose exchanges have one order for both: give the ranks as many batches of both, or use \
         plain batch norm"
    )]
    PairWithSyncBatchNorm {
        /// The rank that reports.
        rank: usize,
    },
    /// `join` was called while gradients of this rank were still waiting for the end of their window.
    #[error(
        "rank {rank}: `join` was called with {passes} backward pass(es) accumulated under `no_sync`, which would be lost: close the window with a backward pass that synchronises first"
    )]
    JoinedInWindow {
        /// The rank that reports.
        rank: usize,
        /// Accumulated passes.
        passes: u32,
    },
    /// A tensor's data could not be read from its device.
    #[error("rank {rank}: cannot read the gradient of `{path}`: {cause}")]
    Read {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
        /// The backend's words.
        cause: String,
    },
    /// The communication thread is gone.
    #[error(transparent)]
    Queue(#[from] QueueClosed),
}

fn some_ranks(ranks: &[usize]) -> String {
    match ranks {
        [] => "another rank".into(),
        ranks => format!("rank(s) {ranks:?}"),
    }
}

/// "3 backward pass(es) on rank(s) [0, 2], 4 on [1]".
fn by_length(windows: &[Option<u32>]) -> String {
    let mut ranks = BTreeMap::<u32, Vec<usize>>::new();
    for (rank, window) in windows.iter().enumerate() {
        if let Some(window) = window {
            ranks.entry(*window).or_default().push(rank);
        }
    }
    let each = ranks
        .iter()
        .enumerate()
        .map(|(i, (window, ranks))| match i {
            0 => format!("{window} backward pass(es) on rank(s) {ranks:?}"),
            _ => format!("{window} on {ranks:?}"),
        });
    each.collect::<Vec<_>>().join(", ")
}

impl ReducerError {
    /// Whether this is the consequence of another rank's failure.
    pub fn is_secondary(&self) -> bool {
        matches!(self, ReducerError::Group(error) if error.is_secondary())
    }
}
