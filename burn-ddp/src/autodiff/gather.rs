//! Statistics of all ranks inside a graph: gathered in forward; in backward their gradients are summed over the ranks.

use super::sessions::{Sessions, SyncSwitch, lock};
use crate::{
    dtype,
    error::BackwardPanic,
    group::{DType, GroupError, ProcessGroup, ReduceOp},
    reducer::aligned,
};
use burn::backend::{
    Autodiff, Backend, Dispatch, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::{Tensor, TensorData};
use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock, Weak, atomic::Ordering},
};

/// A collective of a training step, as a rank without data repeats it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// Of so many bytes of a layer's statistics.
    Gather { layer: u64, bytes: usize },
    /// Of so many bytes of gradients, all ranks'.
    Sum {
        layer: u64,
        bytes: usize,
        dtype: DType,
    },
}

impl Step {
    fn layer(self) -> u64 {
        match self {
            Step::Gather { layer, .. } | Step::Sum { layer, .. } => layer,
        }
    }
}

/// Behind the statistics of a rank: the layer, and 1 more than the number of samples that they are of, or 0 from a rank that has run out of data.
const TRAILER: usize = 2 * size_of::<u64>();
/// Steps between two synchronised passes that are noted at most: what has so many has no end.
const MOST_STEPS: usize = 1 << 16;

/// Exchanges statistics, in an ordering domain of its own: on the thread that runs forward and backward, in the order of the graph.
#[derive(Clone, Debug)]
pub(crate) struct Gather {
    /// Of the layer, by the order in which they were made; the same on all ranks.
    layer: u64,
    group: Arc<dyn ProcessGroup>,
    switch: Arc<SyncSwitch>,
    /// Weak, because it holds this one.
    sessions: Weak<Sessions>,
}

impl Gather {
    pub(crate) fn new(
        group: Arc<dyn ProcessGroup>,
        switch: Arc<SyncSwitch>,
        sessions: &Arc<Sessions>,
    ) -> Self {
        Self {
            layer: 0,
            group,
            switch,
            sessions: Arc::downgrade(sessions),
        }
    }

    /// The same for the next layer.
    pub(crate) fn next(&self) -> Self {
        let sessions = self.sessions.upgrade();
        let layer = sessions.map_or(0, |all| all.layers.fetch_add(1, Ordering::Relaxed));
        Self {
            layer,
            ..self.clone()
        }
    }

    pub(crate) fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// The `statistics` (of equal length on all ranks) of all ranks, a row each, and of how many samples they are. Collective, as is the backward pass through
    /// it. The gradient of a rank's statistics is that of the sum of all ranks' losses, each weighted as in [`Ddp::weighted`](crate::Ddp::weighted), over
    /// its own weight.
    pub(crate) fn statistics(
        &self,
        statistics: Tensor<1>,
        samples: u64,
    ) -> Result<(Tensor<2>, Vec<u64>), GroupError> {
        let call = Call {
            gather: self.clone(),
            samples,
            outcome: Arc::default(),
        };
        let rows = <Dispatch as GatherOps>::ddp_gather(statistics.into_dispatch(), call.clone());
        match call.outcome.get().cloned() {
            Some(outcome) => Ok((Tensor::from_dispatch(rows), outcome?)),
            None => Err(self.cannot("exchanging statistics", "the backend has not run it")),
        }
    }

    fn cannot(&self, operation: &str, cause: impl ToString) -> GroupError {
        GroupError::Transport {
            rank: self.group.rank(),
            operation: operation.into(),
            cause: cause.to_string(),
        }
    }

    fn read<B: Backend>(&self, tensor: FloatTensor<B>) -> Result<(TensorData, DType), GroupError> {
        let operation = "reading statistics";
        let data = burn::tensor::try_read_sync(B::float_into_data(tensor));
        let data = data.ok_or_else(|| self.cannot(operation, "the device cannot be read"))?;
        let data = data.map_err(|error| self.cannot(operation, error))?;
        let dtype = dtype::float(data.dtype());
        let dtype = dtype.ok_or_else(|| self.cannot(operation, "they are no floats"))?;
        Ok((data, dtype))
    }

    fn gather<B: Backend>(
        &self,
        own: FloatTensor<B>,
        samples: u64,
    ) -> Result<(FloatTensor<B>, Vec<u64>), GroupError> {
        let device = own.device();
        let (data, dtype) = self.read::<B>(own)?;
        let mut row = data.as_bytes().to_vec();
        if samples == 0 {
            // The mean of nothing is no number.
            row.fill(0);
        }
        row.extend_from_slice(&self.layer.to_ne_bytes());
        row.extend_from_slice(&(samples + 1).to_ne_bytes());
        let rows = self.exchange(&row)?;
        let (statistics, trailers) = split(&rows, row.len());
        let others = trailers.iter().enumerate();
        let mut others = others.filter(|(_, [layer, marker])| *marker > 0 && *layer != self.layer);
        if let Some((rank, [layer, _])) = others.next() {
            return Err(self.other_layer(&format!("rank {rank} is in layer {layer}")));
        }
        let counts: Vec<u64> = trailers
            .iter()
            .map(|[_, marker]| marker.saturating_sub(1))
            .collect();
        let shape = [counts.len(), data.num_elements()];
        let statistics = aligned(&statistics, dtype);
        let data = TensorData::from_bytes(statistics, shape, data.dtype());
        Ok((B::float_from_data(data, &device), counts))
    }

    fn other_layer(&self, found: &str) -> GroupError {
        let cause = format!(
            "this rank is in batch-norm layer {} (from 0, in the order of `SyncBatchNorm::new`), {found}: all ranks must come through the same layers in the same order",
            self.layer
        );
        self.cannot("exchanging statistics", cause)
    }

    fn note(&self, step: Step) {
        if let Some(sessions) = self.sessions.upgrade() {
            sessions.note_exchange(step);
        }
    }

    fn exchange(&self, row: &[u8]) -> Result<Vec<u8>, GroupError> {
        self.note(Step::Gather {
            layer: self.layer,
            bytes: row.len(),
        });
        let mut rows = vec![0; row.len() * self.world_size()];
        self.group.all_gather(row, &mut rows, DType::U8)?;
        Ok(rows)
    }

    /// This rank's row of the sum of all ranks' gradients.
    fn sum<B: Backend>(&self, rows: FloatTensor<B>) -> Result<FloatTensor<B>, GroupError> {
        let weight = self.switch.samples().map_or(1.0, |samples| samples as f64);
        let device = rows.device();
        let rows = match weight {
            1.0 => rows,
            weight => B::float_mul_scalar(rows, weight.into()),
        };
        let (data, dtype) = self.read::<B>(rows)?;
        let mut bytes = data.as_bytes().to_vec();
        if weight == 0.0 {
            // The loss over no sample is no number.
            bytes.fill(0);
        }
        let length = bytes.len();
        self.note(Step::Sum {
            layer: self.layer,
            bytes: length,
            dtype,
        });
        self.sum_over_ranks(&mut bytes, dtype)?;
        let own = length / self.world_size();
        let own = &bytes[self.group.rank() * own..][..own];
        let shape = [own.len() / dtype.size()];
        let own = TensorData::from_bytes(aligned(own, dtype), shape, data.dtype());
        let own = B::float_from_data(own, &device);
        Ok(match weight {
            0.0 | 1.0 => own,
            weight => B::float_div_scalar(own, weight.into()),
        })
    }

    /// With the layer as a last element: its sum is a multiple of this rank's, on all ranks, only where all are in the same layer.
    fn sum_over_ranks(&self, bytes: &mut Vec<u8>, dtype: DType) -> Result<(), GroupError> {
        let length = bytes.len();
        let write = |bytes: &mut Vec<u8>, x: f64| match dtype {
            DType::F64 => bytes.extend_from_slice(&x.to_ne_bytes()),
            _ => bytes.extend_from_slice(&(x as f32).to_ne_bytes()),
        };
        write(bytes, self.layer as f64);
        self.group.all_reduce(bytes, dtype, ReduceOp::Sum)?;
        let mut expected = Vec::new();
        write(
            &mut expected,
            (self.layer * self.world_size() as u64) as f64,
        );
        match bytes.split_off(length) == expected {
            true => Ok(()),
            false => Err(self.other_layer("and another rank in another layer")),
        }
    }

    /// Takes part in what the ranks that have data exchange in a step, which is what this rank has exchanged in its last; `false` once none of them has any. Collective.
    pub(super) fn repeat(&self, steps: &[Step]) -> Result<bool, GroupError> {
        for step in steps {
            match *step {
                Step::Gather { bytes, .. } => {
                    let mut rows = vec![0; bytes * self.world_size()];
                    self.group
                        .all_gather(&vec![0; bytes], &mut rows, DType::U8)?;
                    let (_, trailers) = split(&rows, bytes);
                    if trailers.iter().all(|[_, marker]| *marker == 0) {
                        return Ok(false);
                    }
                }
                Step::Sum {
                    bytes,
                    dtype,
                    layer,
                } => {
                    let layer = Self {
                        layer,
                        ..self.clone()
                    };
                    layer.sum_over_ranks(&mut vec![0; bytes], dtype)?;
                }
            }
        }
        Ok(true)
    }
}

/// The statistics of all ranks, and what lies behind them.
fn split(rows: &[u8], length: usize) -> (Vec<u8>, Vec<[u64; 2]>) {
    let rows = rows.chunks_exact(length);
    let statistics = rows.clone().flat_map(|row| &row[..length - TRAILER]);
    let trailer = |row: &[u8]| {
        let mut trailer = [0_u64; 2];
        bytemuck::bytes_of_mut(&mut trailer).copy_from_slice(&row[length - TRAILER..]);
        trailer
    };
    (statistics.copied().collect(), rows.map(trailer).collect())
}

/// Without forward passes that had no backward pass: of layers that have one, those that no sum belongs to.
fn without_abandoned(steps: Vec<Step>) -> Vec<Step> {
    let mut due: BTreeMap<u64, usize> = BTreeMap::new();
    for step in &steps {
        if let Step::Sum { layer, .. } = step {
            *due.entry(*layer).or_default() += 1;
        }
    }
    let mut kept = Vec::new();
    for step in steps.into_iter().rev() {
        match (step, due.get_mut(&step.layer())) {
            (Step::Gather { .. }, Some(0)) => continue,
            (Step::Gather { .. }, Some(due)) => *due -= 1,
            _ => {}
        }
        kept.push(step);
    }
    kept.reverse();
    kept
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    gather: Gather,
    samples: u64,
    outcome: Arc<OnceLock<Result<Vec<u64>, GroupError>>>,
}

impl Call {
    fn run<B: Backend>(&self, own: FloatTensor<B>) -> FloatTensor<B> {
        let kept = own.clone();
        let (rows, outcome) = match self.gather.gather::<B>(own, self.samples) {
            Ok((rows, counts)) => (rows, Ok(counts)),
            Err(error) => {
                self.gather.group.abort(&error.to_string());
                (kept, Err(error))
            }
        };
        let _ = self.outcome.set(outcome);
        rows
    }
}

/// The collective as an operation of a graph.
#[backend_extension(Flex: cfg(feature = "flex"), Cube: cfg(any(feature = "wgpu", feature = "cuda")), Autodiff)]
pub(crate) trait GatherOps: Backend {
    /// Of shape `[n]` to `[ranks, n]`; on failure what was given, and an outcome that says so.
    fn ddp_gather(x: FloatTensor<Self>, call: Call) -> FloatTensor<Self> {
        call.run::<Self>(x)
    }
}

#[cfg(feature = "flex")]
impl GatherOps for burn::backend::Flex {}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl GatherOps for burn::backend::Cube {}

#[derive(Debug)]
struct SumGradients;

impl<B: Backend> Backward<B, 1> for SumGradients {
    type State = Gather;

    fn backward(self, ops: Ops<Gather, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let rows = grads.consume::<B>(&ops.node);
        match ops.state.sum::<B>(rows) {
            Ok(own) => {
                for parent in ops.parents.into_iter().flatten() {
                    grads.register::<B>(parent.id, own.clone());
                }
            }
            Err(error) => {
                ops.state.group.abort(&error.to_string());
                BackwardPanic::raise(error.into());
            }
        }
    }
}

impl<B: Backend + GatherOps, C: CheckpointStrategy> GatherOps for Autodiff<B, C> {
    fn ddp_gather(x: FloatTensor<Self>, call: Call) -> FloatTensor<Self> {
        let (value, node) = x.into_parts();
        let gather = call.gather.clone();
        let rows = call.run::<B>(value);
        match Backward::<B, 1>::prepare::<C>(SumGradients, [node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(ops) => ops.finish(gather, rows),
            OpsKind::UnTracked(ops) => ops.finish(rows),
        }
    }
}

impl Sessions {
    fn note_exchange(&self, step: Step) {
        // Without a wrapped model there is no `join`, and nobody who takes the notes away.
        let mut steps = lock(&self.exchanges);
        if steps.len() < MOST_STEPS && !self.live().is_empty() {
            steps.push(step);
        }
    }

    /// What was exchanged since the last synchronised pass.
    pub(super) fn take_exchanges(&self) -> Vec<Step> {
        without_abandoned(std::mem::take(&mut lock(&self.exchanges)))
    }
}
