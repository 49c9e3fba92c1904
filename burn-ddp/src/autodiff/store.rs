//! Local gradients as tensors, between their ready step and their bucket.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use std::any::Any;

type Erased = Box<dyn Any + Send>;

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
    /// Device of the last gradient.
    device: Option<Erased>,
}

impl GradientStore {
    pub(super) fn new(slots: usize) -> Self {
        let empty = || std::iter::repeat_with(|| None).take(slots).collect();
        Self {
            current: empty(),
            window: empty(),
            device: None,
        }
    }

    /// Adds a contribution of the current pass.
    pub(super) fn add<B: Backend>(
        &mut self,
        slot: usize,
        gradient: FloatTensor<B>,
    ) -> Result<(), BackendChanged> {
        self.device = Some(Box::new(gradient.device()));
        add::<B>(&mut self.current[slot], gradient)
    }

    /// Ends a pass that does not synchronise.
    pub(super) fn keep<B: Backend>(&mut self) -> Result<(), BackendChanged> {
        for (current, window) in self.current.iter_mut().zip(&mut self.window) {
            if let Some(gradient) = current.take() {
                add::<B>(window, downcast::<B>(gradient)?)?;
            }
        }
        Ok(())
    }

    /// Takes the sum over the window and the current pass.
    pub(super) fn take<B: Backend>(
        &mut self,
        slot: usize,
    ) -> Result<Option<FloatTensor<B>>, BackendChanged> {
        let mut sum = self.window[slot].take();
        if let Some(gradient) = self.current[slot].take() {
            add::<B>(&mut sum, downcast::<B>(gradient)?)?;
        }
        sum.map(downcast::<B>).transpose()
    }

    /// Forgets the current pass.
    pub(super) fn discard_pass(&mut self) {
        self.current.fill_with(|| None);
    }

    /// Where the gradients of this pass live; `None` before the first.
    pub(super) fn device<B: Backend>(&self) -> Option<B::Device> {
        self.device.as_ref()?.downcast_ref::<B::Device>().cloned()
    }
}

fn downcast<B: Backend>(gradient: Erased) -> Result<FloatTensor<B>, BackendChanged> {
    gradient
        .downcast::<FloatTensor<B>>()
        .map(|g| *g)
        .map_err(|_| BackendChanged)
}

fn add<B: Backend>(
    sum: &mut Option<Erased>,
    gradient: FloatTensor<B>,
) -> Result<(), BackendChanged> {
    let new = match sum.take() {
        Some(old) => B::float_add(downcast::<B>(old)?, gradient),
        None => gradient,
    };
    *sum = Some(Box::new(new));
    Ok(())
}
