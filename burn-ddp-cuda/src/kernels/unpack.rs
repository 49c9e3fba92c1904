//! Slots of a bucket as tensors.

use super::{Bucket, DType, KernelError, Source, copy::launch_copy, support};
use cubecl::server::Handle;

impl Bucket {
    /// The values of a slot, times `scale`, as the memory of a contiguous tensor of type `dtype`.
    ///
    /// Where neither a cast nor a factor is asked for, this is the slot itself: nothing is launched, and the bucket's memory lives for as long as
    /// the tensor does. Do not pack that slot again then. Otherwise it is fresh memory, filled by one launch, which is not
    /// waited for.
    ///
    /// The tensor belongs to the bucket's stream; read it there.
    ///
    /// # Errors
    ///
    /// The slot does not exist or has no values yet, the device lacks the type or gives less memory at once than it needs, or
    /// the bucket's type is not cast to it. A launch that fails shows where the values are read.
    pub fn unpack(&self, slot: usize, dtype: DType, scale: f64) -> Result<Handle, KernelError> {
        let place = self.slot(slot)?;
        self.require_written(slot)?;
        support::require_cast(&self.client, self.dtype(), dtype)?;
        let view = self.part(place.offset, place.len);
        if place.len == 0 || (dtype == self.dtype() && scale == 1.0) {
            return Ok(view);
        }
        let bytes = place.len * dtype.size();
        support::require_size(&self.client, bytes as u64)?;
        let read = Source {
            handle: &view,
            shape: &[place.len],
            strides: &[1],
            dtype: self.dtype(),
        }
        .read(&self.client)?;
        Ok(self.on_stream(|| {
            let tensor = self.client.empty(bytes);
            launch_copy(
                &self.client,
                &read,
                self.dtype(),
                (tensor.clone(), place.len),
                dtype,
                scale,
            );
            tensor
        }))
    }
}
