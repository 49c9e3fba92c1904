//! The sum of two buckets.

use super::{
    Bucket, DType, KernelError,
    launch::{Launch, buffer, vectors},
};
use cubecl::prelude::*;

impl Bucket {
    /// Adds another bucket of the same layout to this one. f16 and bf16 are added in f32 and rounded once. One launch, which is not waited
    /// for; only a bucket of another stream is.
    ///
    /// # Errors
    ///
    /// The buckets have different layouts or are on different devices, or one has slots without values. A launch that fails shows at
    /// [`check`](Self::check) and wherever the values are read.
    pub fn add(&mut self, other: &Self) -> Result<(), KernelError> {
        if self.layout() != other.layout() {
            return Err(KernelError::DifferentLayouts);
        }
        if self.client.service_id() != other.client.service_id() {
            return Err(KernelError::OtherDevice {
                what: "other bucket",
            });
        }
        self.require_all_written()?;
        other.require_all_written()?;
        if other.stream() != self.stream() {
            other.wait()?;
        }
        let (dtype, len) = (self.dtype(), self.layout().len());
        if len == 0 {
            return Ok(());
        }
        let vector = vectors(&self.client, dtype.size(), len);
        let launch = Launch::new(&self.client, len, vector);
        let sum = buffer(self.whole(), len / vector);
        let term = buffer(other.whole(), len / vector);
        self.on_stream(|| {
            if dtype == DType::F64 {
                add_f64::launch(
                    &self.client,
                    launch.count,
                    launch.dim,
                    launch.address,
                    vector,
                    sum,
                    term,
                );
            } else {
                add::launch(
                    &self.client,
                    launch.count,
                    launch.dim,
                    launch.address,
                    vector,
                    sum,
                    term,
                    dtype.elem(),
                );
            }
        });
        Ok(())
    }
}

#[cube(launch, address_type = "dynamic")]
fn add<E: Numeric, N: Size>(
    sum: &mut [Vector<E, N>],
    term: &[Vector<E, N>],
    #[define(E)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < sum.len() {
        let x = Vector::<f32, N>::cast_from(sum[ABSOLUTE_POS])
            + Vector::<f32, N>::cast_from(term[ABSOLUTE_POS]);
        sum[ABSOLUTE_POS] = Vector::<E, N>::cast_from(x);
    }
}

#[cube(launch, address_type = "dynamic")]
fn add_f64<N: Size>(sum: &mut [Vector<f64, N>], term: &[Vector<f64, N>]) {
    if ABSOLUTE_POS < sum.len() {
        sum[ABSOLUTE_POS] += term[ABSOLUTE_POS];
    }
}
