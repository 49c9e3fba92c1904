//! Gradients into the slots of a bucket.

use super::{
    Bucket, DType, KernelError, Source,
    blocking::blocking,
    copy::launch_copy,
    launch::{Launch, buffer, vectors},
    layout::Slot,
    pack_many::{TOGETHER, launch_pack_many},
    source::Read,
    support,
};
use cubecl::{future, prelude::*};

/// Up to so many elements it is the launch that takes the time, and not the copy.
const SMALL: usize = 1 << 16;

impl Bucket {
    /// Writes a tensor into its slot: each value in logical order, times `scale`, cast to the bucket's type. f64 is multiplied
    /// in f64, everything else in f32. One launch, which is not waited for; only a tensor of another stream is, so that its values are there.
    ///
    /// # Errors
    ///
    /// The slot has another length or does not exist, the tensor is on another device, of a type that the device lacks or that is
    /// not cast to the bucket's, or its shape and strides lead out of its memory. A launch that fails shows at [`check`](Self::check)
    /// and wherever the values are read.
    pub fn pack(&mut self, slot: usize, tensor: &Source, scale: f64) -> Result<(), KernelError> {
        let (place, read) = self.accept(slot, tensor)?;
        self.launch_pack(place, &read, tensor.dtype, scale);
        self.set_written(slot);
        Ok(())
    }

    /// [`pack`](Self::pack) for several slots. Small contiguous tensors of the same type share launches.
    ///
    /// # Errors
    ///
    /// Those of [`pack`](Self::pack), before anything is written.
    pub fn pack_all(&mut self, tensors: &[(usize, Source)], scale: f64) -> Result<(), KernelError> {
        let accepted: Vec<_> = tensors
            .iter()
            .map(|(slot, tensor)| Ok((tensor.dtype, self.accept(*slot, tensor)?)))
            .collect::<Result<_, KernelError>>()?;
        let bindings = self.client.properties().hardware.max_bindings as usize;
        let (small, rest): (Vec<_>, Vec<_>) = accepted.into_iter().partition(|(_, (_, read))| {
            // One more for the bucket and one for the numbers.
            bindings >= TOGETHER + 2
                && read.contiguous()
                && read.shift == 0
                && (1..=SMALL).contains(&read.len)
        });
        for (dtype, (place, read)) in rest {
            self.launch_pack(place, &read, dtype, scale);
        }
        for dtype in DType::ALL {
            let of_type: Vec<_> = small
                .iter()
                .filter(|(d, _)| *d == dtype)
                .map(|(_, accepted)| accepted)
                .collect();
            for several in of_type.chunks(TOGETHER) {
                self.on_stream(|| launch_pack_many(self, several, dtype, scale));
            }
        }
        for (slot, _) in tensors {
            self.set_written(*slot);
        }
        Ok(())
    }

    /// Writes zeros into a slot: what a parameter contributes that was not used. One launch, which is not waited for.
    ///
    /// # Errors
    ///
    /// The bucket has no such slot.
    pub fn zero(&mut self, slot: usize) -> Result<(), KernelError> {
        let place = self.slot(slot)?;
        if place.padded > 0 {
            let dtype = self.dtype();
            let vector = vectors(&self.client, dtype.size(), place.padded);
            let launch = Launch::new(&self.client, place.padded, vector);
            self.on_stream(|| {
                fill_zeros::launch(
                    &self.client,
                    launch.count,
                    launch.dim,
                    launch.address,
                    vector,
                    buffer(self.part(place.offset, place.padded), place.padded),
                    dtype.elem(),
                );
            });
        }
        self.set_written(slot);
        Ok(())
    }

    fn accept(&self, slot: usize, tensor: &Source) -> Result<(Slot, Read), KernelError> {
        let place = self.slot(slot)?;
        support::require_cast(&self.client, tensor.dtype, self.dtype())?;
        let read = tensor.read(&self.client)?;
        if read.len != place.len {
            return Err(KernelError::WrongLength {
                slot,
                expected: place.len,
                found: read.len,
            });
        }
        if tensor.handle.stream != self.stream() {
            // The runtime would wait for the allocation only.
            tensor.handle.stream.executes(|| {
                blocking("waiting for a tensor of another stream", || {
                    future::block_on(self.client.sync_buffers([tensor.handle]))
                })
            })?;
        }
        Ok((place, read))
    }

    fn launch_pack(&self, place: Slot, read: &Read, dtype: DType, scale: f64) {
        let output = self.part(place.offset, place.padded);
        self.on_stream(|| {
            launch_copy(
                &self.client,
                read,
                dtype,
                (output, place.padded),
                self.dtype(),
                scale,
            );
        });
    }
}

#[cube(launch, address_type = "dynamic")]
fn fill_zeros<O: Numeric, N: Size>(output: &mut [Vector<O, N>], #[define(O)] _dtype: ElemType) {
    if ABSOLUTE_POS < output.len() {
        output[ABSOLUTE_POS] = Vector::<O, N>::from_int(0);
    }
}
