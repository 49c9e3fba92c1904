//! What one process would do.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_ddp::Ddp;
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    ops::Range,
};

/// Float values with the module path of each tensor, in registration order.
pub type Weights = Vec<(String, Vec<f32>)>;

/// Every float parameter and buffer with its path, in f32.
pub fn parameters<M: Module>(model: &M) -> Weights {
    #[derive(Default)]
    struct Reader(Vec<String>, Weights);
    impl ModuleVisitor for Reader {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = floats(param.base());
            self.1.push((self.0.join("."), values));
        }
    }
    let mut reader = Reader::default();
    model.visit(&mut reader);
    reader.1
}

/// The gradient of each trainable parameter with its path, in f32; parameters without a gradient are absent.
pub fn gradients<M: Module>(model: &M, grads: &GradientsParams) -> Weights {
    struct Reader<'a>(&'a GradientsParams, Vec<String>, Weights);
    impl ModuleVisitor for Reader<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.1.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.1.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.0.get::<D>(param.id) {
                self.2.push((self.1.join("."), floats(gradient)));
            }
        }
    }
    let mut reader = Reader(grads, Vec::new(), Vec::new());
    model.visit(&mut reader);
    reader.2
}

/// The values under `path`, `None` when there are none.
pub fn at<'a>(weights: &'a Weights, path: &str) -> Option<&'a [f32]> {
    let found = weights.iter().find(|(p, _)| p == path);
    found.map(|(_, values)| values.as_slice())
}

/// The values of a tensor, in f32.
pub fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec_as::<f32>().unwrap()
}

/// `model` with the values of `weights`, which are [`parameters`] of a model of the same structure.
pub fn load<M: Module>(model: M, weights: &Weights) -> M {
    struct Loader<'a>(std::slice::Iter<'a, (String, Vec<f32>)>);
    impl ModuleMapper for Loader<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let values = self.0.next().unwrap().1.clone();
            param.map(|old| {
                let new =
                    Tensor::<D>::from_data(TensorData::new(values, old.dims()), &old.device());
                new.set_require_grad(old.is_require_grad())
            })
        }
    }
    model.map(&mut Loader(weights.iter()))
}

/// Trains with plain SGD on batches of `rows` rows in all; `loss(model, step, rows)` is the mean loss over the
/// given rows of the global batch, of which rank `rank` of `world` takes its share.
pub fn train<M: Module>(
    mut model: M,
    (steps, rows, rate): (u64, usize, f64),
    (rank, world): (usize, usize),
    loss: impl Fn(&M, u64, Range<usize>) -> Tensor<1>,
) -> M {
    let mut optim = SgdConfig::new().init();
    let share = rows / world;
    for step in 0..steps {
        let loss = loss(&model, step, rank * share..(rank + 1) * share);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(rate, model, grads);
    }
    model
}

/// Mean of the squares.
pub fn square(x: Tensor<2>) -> Tensor<1> {
    x.powf_scalar(2.0).mean()
}

/// The device on which the tests train.
pub fn device() -> Device {
    Device::flex().autodiff()
}

/// O2: asserts that all ranks hold the same bits; collective.
#[track_caller]
pub fn assert_same_bits<M: Module>(ddp: &Ddp, model: &M) {
    let hashes = ddp.param_hashes(model).unwrap();
    assert!(hashes.iter().all(|h| *h == hashes[0]), "O2: {hashes:?}");
}

/// A number that differs when any bit of any parameter or buffer does (but for one chance in 2^64).
pub fn fingerprint<M: Module>(model: &M) -> u64 {
    let mut hasher = DefaultHasher::new();
    for (path, values) in parameters(model) {
        path.hash(&mut hasher);
        values.iter().for_each(|x| x.to_bits().hash(&mut hasher));
    }
    hasher.finish()
}

/// O1: asserts that two models have the same parameters within `tolerance`, relative to the largest value of each tensor.
#[track_caller]
pub fn assert_close(ours: &Weights, oracle: &Weights, tolerance: f32) {
    assert_eq!(ours.len(), oracle.len());
    for ((path, a), (other, b)) in ours.iter().zip(oracle) {
        assert_eq!(path, other);
        assert_eq!(a.len(), b.len(), "{path}");
        let scale = b.iter().fold(1e-3f32, |m, x| m.max(x.abs()));
        for (i, (x, y)) in a.iter().zip(b).enumerate() {
            assert!(
                (x - y).abs() <= tolerance * scale,
                "{path}[{i}]: {x} is not {y} (scale {scale})"
            );
        }
    }
}

/// Numbers that look random and are the same in every process: a multiplicative congruential generator
/// (Park and Miller, CACM 1988), scaled to -1..1.
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed % 0x7fff_fffe + 1;
    let mut next = || {
        state = state * 48271 % 0x7fff_ffff;
        state as f32 / 0x3fff_ffff as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Rows `rank * rows ..` of step `step`'s batch, so that the batches of `world` ranks are the whole batch in rank order.
pub fn batch<const D: usize>(
    step: u64,
    rows: Range<usize>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D> {
    let width: usize = shape[1..].iter().product();
    let all = numbers(step + 1, rows.end * width);
    let mut shape = shape;
    shape[0] = rows.len();
    Tensor::from_data(
        TensorData::new(all[rows.start * width..].to_vec(), shape),
        device,
    )
}
