//! Parts of parameters as a module that an optimizer can step.

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    Param,
};
use burn::tensor::{Device, Tensor};

/// One flat part each of some parameters, under the ids and paths of the parameters.
#[derive(Clone, Debug, Default)]
pub(super) struct Pieces {
    pub(super) parts: Vec<(String, Param<Tensor<1>>)>,
}

impl Pieces {
    fn with(self, f: impl FnMut(Param<Tensor<1>>) -> Param<Tensor<1>>) -> Self {
        let (paths, params): (Vec<_>, Vec<_>) = self.parts.into_iter().unzip();
        Self {
            parts: paths.into_iter().zip(params.into_iter().map(f)).collect(),
        }
    }
}

impl Module for Pieces {
    fn collect_devices(&self, devices: Devices) -> Devices {
        let parts = self.parts.iter();
        parts.fold(devices, |devices, (_, param)| {
            param.collect_devices(devices)
        })
    }

    fn fork(self, device: &Device) -> Self {
        self.with(|param| param.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.with(|param| Module::to_device(param, device))
    }

    fn train(self) -> Self {
        self.with(Module::train)
    }

    fn valid(&self) -> Self {
        self.clone().with(|param| param.valid())
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        for (path, param) in &self.parts {
            path.split('.')
                .for_each(|name| visitor.enter_module(name, ""));
            param.visit(visitor);
            path.rsplit('.')
                .for_each(|name| visitor.exit_module(name, ""));
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let map = |(path, param): (String, Param<Tensor<1>>)| {
            path.split('.')
                .for_each(|name| mapper.enter_module(name, ""));
            let param = Module::map(param, mapper);
            path.rsplit('.')
                .for_each(|name| mapper.exit_module(name, ""));
            (path, param)
        };
        Self {
            parts: self.parts.into_iter().map(map).collect(),
        }
    }
}

impl ModuleDisplayDefault for Pieces {
    fn content(&self, content: Content) -> Option<Content> {
        content.optional()
    }
}

impl ModuleDisplay for Pieces {}
