//! Local gradients as tensors, between their ready step and their bucket.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use std::any::Any;

pub(super) type Erased = Box<dyn Any + Send>;

/// The gradients of a slot live on another backend than the ones kept for it: the model moved to
/// another kind of device in the middle of an accumulation window.
#[derive(Debug)]
pub(super) struct BackendChanged;

/// Sums contributions per slot, within a pass and over an accumulation window.
///
/// The backend is only known inside a backward step, so tensors are kept erased.
#[derive(Debug)]
pub(super) struct GradientStore {
    /// Contributions of the current pass.
    current: Vec<Option<Erased>>,
    /// Sums of the passes before it in the window.
    window: Vec<Option<Erased>>,
    /// Devices of the last gradient of each slot, and of any.
    devices: Vec<Option<Erased>>,
    last_device: Option<Erased>,
}

impl GradientStore {
    pub(super) fn new(slots: usize) -> Self {
        let empty = || std::iter::repeat_with(|| None).take(slots).collect();
        Self {
            current: empty(),
            window: empty(),
            devices: empty(),
            last_device: None,
        }
    }

    /// Adds a contribution of the current pass.
    pub(super) fn add<B: Backend>(
        &mut self,
        slot: usize,
        gradient: FloatTensor<B>,
    ) -> Result<(), BackendChanged> {
        self.locate::<B>(slot, &gradient);
        let sum = &mut self.current[slot];
        *sum = join::<B>(sum.take(), Some(Box::new(gradient)))?;
        Ok(())
    }

    /// Notes where the gradients of a slot live.
    pub(super) fn locate<B: Backend>(&mut self, slot: usize, gradient: &FloatTensor<B>) {
        let device = gradient.device();
        for place in [&mut self.devices[slot], &mut self.last_device] {
            if read_device::<B>(place).as_ref() != Some(&device) {
                *place = Some(Box::new(device.clone()));
            }
        }
    }

    /// Ends a pass that does not synchronise.
    pub(super) fn keep<B: Backend>(&mut self) -> Result<(), BackendChanged> {
        for (current, window) in self.current.iter_mut().zip(&mut self.window) {
            *window = join::<B>(window.take(), current.take())?;
        }
        Ok(())
    }

    /// Takes the sum over the window and the current pass.
    pub(super) fn take<B: Backend>(
        &mut self,
        slot: usize,
    ) -> Result<Option<FloatTensor<B>>, BackendChanged> {
        self.take_erased::<B>(slot)?.map(downcast::<B>).transpose()
    }

    /// [`take`](Self::take), the sum left as it is kept.
    pub(super) fn take_erased<B: Backend>(
        &mut self,
        slot: usize,
    ) -> Result<Option<Erased>, BackendChanged> {
        join::<B>(self.window[slot].take(), self.current[slot].take())
    }

    /// Forgets the current pass.
    pub(super) fn discard_pass(&mut self) {
        self.current.fill_with(|| None);
    }

    /// Where the last gradient of a slot was; `None` before the first.
    pub(super) fn device<B: Backend>(&self, slot: usize) -> Option<B::Device> {
        read_device::<B>(&self.devices[slot])
    }

    /// Where the last gradient of any slot was.
    pub(super) fn last_device<B: Backend>(&self) -> Option<B::Device> {
        read_device::<B>(&self.last_device)
    }
}

fn read_device<B: Backend>(device: &Option<Erased>) -> Option<B::Device> {
    device.as_ref()?.downcast_ref::<B::Device>().cloned()
}

pub(super) fn downcast<B: Backend>(gradient: Erased) -> Result<FloatTensor<B>, BackendChanged> {
    gradient
        .downcast::<FloatTensor<B>>()
        .map(|g| *g)
        .map_err(|_| BackendChanged)
}

/// The sum of two gradients; one that is alone stays in its box.
fn join<B: Backend>(
    a: Option<Erased>,
    b: Option<Erased>,
) -> Result<Option<Erased>, BackendChanged> {
    match (a, b) {
        (Some(a), Some(b)) => {
            let sum = B::float_add(downcast::<B>(a)?, downcast::<B>(b)?);
            Ok(Some(Box::new(sum)))
        }
        (a, b) => Ok(a.or(b)),
    }
}
