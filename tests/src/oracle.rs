//! What one process would do.

use burn::module::{Module, ModuleVisitor, Param};
use burn::prelude::*;

/// Every float parameter and buffer with its path, in f32.
pub fn parameters<M: Module>(model: &M) -> Vec<(String, Vec<f32>)> {
    #[derive(Default)]
    struct Reader(Vec<String>, Vec<(String, Vec<f32>)>);
    impl ModuleVisitor for Reader {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.base().into_data().convert::<f32>().try_into_vec().unwrap();
            self.1.push((self.0.join("."), values));
        }
    }
    let mut reader = Reader::default();
    model.visit(&mut reader);
    reader.1
}

/// O1: asserts that two models have the same parameters within `tolerance`, relative to the largest value of each tensor.
#[track_caller]
pub fn assert_close(ours: &[(String, Vec<f32>)], oracle: &[(String, Vec<f32>)], tolerance: f32) {
    assert_eq!(ours.len(), oracle.len());
    for ((path, a), (other, b)) in ours.iter().zip(oracle) {
        assert_eq!(path, other);
        assert_eq!(a.len(), b.len(), "{path}");
        let scale = b.iter().fold(1e-3f32, |m, x| m.max(x.abs()));
        for (i, (x, y)) in a.iter().zip(b).enumerate() {
            assert!((x - y).abs() <= tolerance * scale, "{path}[{i}]: {x} is not {y} (scale {scale})");
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
pub fn batch<const D: usize>(step: u64, rows: std::ops::Range<usize>, shape: [usize; D], device: &Device) -> Tensor<D> {
    let width: usize = shape[1..].iter().product();
    let all = numbers(step + 1, rows.end * width);
    let mut shape = shape;
    shape[0] = rows.len();
    Tensor::from_data(TensorData::new(all[rows.start * width..].to_vec(), shape), device)
}
