//! How `wrap` reaches the synchronised layers of a model.

use super::exchange::Exchange;
use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::Device;
use std::{cell::RefCell, sync::Arc};

/// A synchronised layer's link to the other ranks, one of its fields.
///
/// As a [`Module`] it has no parameters, but traversals pass through it, and two of `wrap`'s leave something here or take something away.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    channels: usize,
    bound: Option<Bound>,
}

/// Of a layer in a wrapped model.
#[derive(Clone, Debug)]
pub(crate) struct Bound {
    pub(crate) exchange: Arc<Exchange>,
    /// Position among the model's synchronised layers.
    pub(crate) layer: usize,
}

/// What a traversal on this thread wants of the links that it passes. A visitor or mapper is shown parameters only.
enum Traversal {
    /// The channels of the one that was passed last.
    Find(Option<usize>),
    /// Links are bound to this, in order.
    Bind {
        exchange: Arc<Exchange>,
        next: usize,
    },
}

thread_local! {
    static TRAVERSAL: RefCell<Option<Traversal>> = const { RefCell::new(None) };
}

impl Link {
    pub(crate) fn new(channels: usize) -> Self {
        Self {
            channels,
            bound: None,
        }
    }

    /// `None` before `wrap` and in a world of one.
    pub(crate) fn bound(&self) -> Option<&Bound> {
        self.bound.as_ref()
    }
}

/// Shows `model` to `visitor`, which may ask for the link that it has just passed.
pub(super) fn find<M: Module, V: ModuleVisitor>(model: &M, visitor: &mut V) {
    TRAVERSAL.set(Some(Traversal::Find(None)));
    model.visit(visitor);
    TRAVERSAL.set(None);
}

/// The channels of the layer whose link [`find`] has just passed.
pub(super) fn last_found() -> Option<usize> {
    TRAVERSAL.with_borrow_mut(|traversal| match traversal {
        Some(Traversal::Find(channels)) => channels.take(),
        _ => None,
    })
}

/// The model with all its links bound to `exchange`, in the order in which [`find`] meets them.
pub(super) fn bind<M: Module>(model: M, exchange: Arc<Exchange>) -> M {
    struct Nothing;
    impl ModuleMapper for Nothing {}
    TRAVERSAL.set(Some(Traversal::Bind { exchange, next: 0 }));
    let model = model.map(&mut Nothing);
    TRAVERSAL.set(None);
    model
}

impl Module for Link {
    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, _: &Device) -> Self {
        self
    }

    fn to_device(self, _: &Device) -> Self {
        self
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        Self::new(self.channels)
    }

    fn visit<V: ModuleVisitor>(&self, _: &mut V) {
        TRAVERSAL.with_borrow_mut(|traversal| {
            if let Some(Traversal::Find(channels)) = traversal {
                *channels = Some(self.channels);
            }
        });
    }

    fn map<M: ModuleMapper>(mut self, _: &mut M) -> Self {
        TRAVERSAL.with_borrow_mut(|traversal| {
            if let Some(Traversal::Bind { exchange, next }) = traversal {
                self.bound = Some(Bound {
                    exchange: exchange.clone(),
                    layer: *next,
                });
                *next += 1;
            }
        });
        self
    }
}

impl ModuleDisplayDefault for Link {
    fn content(&self, content: Content) -> Option<Content> {
        content.optional()
    }
}

impl ModuleDisplay for Link {}
