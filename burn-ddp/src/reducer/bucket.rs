//! One bucket on its way: filled on the backward thread, reduced and emptied on the communication
//! thread.

use super::{plan::BucketPlan, tail};
use crate::group::{DType, GroupBuffer, GroupError, ReduceOp, reduce::reduce_into};
use burn::tensor::{Bytes, TensorData};
use std::time::Instant;

/// A bucket that is at home: no operation is using its buffer.
#[derive(Debug)]
pub(super) struct Bucket {
    pub(super) plan: BucketPlan,
    pub(super) buffer: Box<dyn GroupBuffer>,
    /// The local gradients that were packed, kept as storage for the reduced ones.
    pub(super) gradients: Vec<Option<TensorData>>,
}

impl Bucket {
    pub(super) fn new(plan: BucketPlan, buffer: Box<dyn GroupBuffer>) -> Self {
        let gradients = plan.placements.iter().map(|_| None).collect();
        Self {
            plan,
            buffer,
            gradients,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.gradients.iter().all(Option::is_some)
    }

    /// Copies a gradient to its place.
    pub(super) fn pack(&mut self, index: usize, data: TensorData) {
        let place = self.plan.placements[index];
        self.buffer.input()[place.offset..place.offset + place.bytes]
            .copy_from_slice(data.as_bytes());
        self.gradients[index] = Some(data);
    }

    pub(super) fn is_packed(&self, index: usize) -> bool {
        self.gradients[index].is_some()
    }

    /// Adds to a gradient that has been packed.
    pub(super) fn add(&mut self, index: usize, data: &TensorData) {
        let place = self.plan.placements[index];
        let sum = &mut self.buffer.input()[place.offset..place.offset + place.bytes];
        let old = sum.to_vec();
        reduce_into(
            sum,
            &[&old, data.as_bytes()],
            self.plan.dtype,
            ReduceOp::Sum,
        );
    }

    /// Zeros for what this rank did not use, and the control tail; `windows` in the first bucket.
    pub(super) fn seal(&mut self, windows: &[u8]) {
        let input = self.buffer.input();
        for (place, gradient) in self.plan.placements.iter().zip(&self.gradients) {
            if gradient.is_none() {
                input[place.offset..place.offset + place.bytes].fill(0);
            }
        }
        let flags = self.gradients.iter().map(|g| u8::from(g.is_some()));
        let range = self.plan.data_bytes..self.plan.bytes();
        tail::write(
            &mut input[range],
            self.plan.dtype,
            flags.chain(windows.iter().copied()),
        );
    }

    /// Reduces the bucket and takes the result out of it. Runs on the communication thread.
    pub(super) fn reduce(
        mut self,
        op: ReduceOp,
        shapes: &[Vec<usize>],
    ) -> Result<Reduced, GroupError> {
        let started = Instant::now();
        let dtype = self.plan.dtype;
        self.buffer.all_reduce(self.plan.bytes(), dtype, op)?;
        let output = self.buffer.output();
        let mut tail = tail::read(&output[self.plan.data_bytes..self.plan.bytes()], dtype);
        for ((place, gradient), shape) in self
            .plan
            .placements
            .iter()
            .zip(&mut self.gradients)
            .zip(shapes)
        {
            // Unused on every rank: no gradient, so that no decay or momentum step is made on it.
            let used = tail.next().is_some_and(|flag| flag > 0.0);
            let reduced = &output[place.offset..place.offset + place.bytes];
            *gradient = match (used, gradient.take()) {
                (false, _) => None,
                (true, Some(mut own)) => {
                    TensorData::with_bytes_mut([&mut own], |mut storage| {
                        if let Some(bytes) = storage.pop() {
                            bytes.copy_from_slice(reduced);
                        }
                    });
                    Some(own)
                }
                (true, None) => Some(TensorData::from_bytes(
                    aligned(reduced, dtype),
                    shape.clone(),
                    dtype.into(),
                )),
            };
        }
        let windows = tail.collect();
        Ok(Reduced {
            bucket: self,
            windows,
            started,
            finished: Instant::now(),
        })
    }
}

/// A bucket that came back from the communication thread.
#[derive(Debug)]
pub(super) struct Reduced {
    /// Its `gradients` are the reduced ones; `None` where no rank used the parameter.
    pub(super) bucket: Bucket,
    /// The ranks' window lengths as they were reduced, in the first bucket.
    pub(super) windows: Vec<f64>,
    pub(super) started: Instant,
    pub(super) finished: Instant,
}

/// A copy of `bytes` aligned for elements of `dtype`.
fn aligned(bytes: &[u8], dtype: DType) -> Bytes {
    match dtype.size() {
        8 => Bytes::from_elems::<u64>(bytemuck::pod_collect_to_vec(bytes)),
        4 => Bytes::from_elems::<u32>(bytemuck::pod_collect_to_vec(bytes)),
        2 => Bytes::from_elems::<u16>(bytemuck::pod_collect_to_vec(bytes)),
        _ => Bytes::from_bytes_vec(bytes.to_vec()),
    }
}
