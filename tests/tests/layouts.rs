//! Gradients of any memory layout, element type and shape.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::module::Param;
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::{DType, FloatDType};
use burn_ddp::Ddp;
use burn_ddp_tests::{oracle::*, ranks};

/// Parameters whose gradients have unusual layouts.
#[derive(Module, Debug)]
struct Layouts {
    transposed: Param<Tensor<2>>,
    expanded: Param<Tensor<1>>,
    sliced: Param<Tensor<2>>,
}

impl Layouts {
    fn new(device: &Device) -> Self {
        let param = |seed, shape: [usize; 2]| {
            let values = numbers(seed, shape[0] * shape[1]);
            Param::from_tensor(Tensor::from_data(TensorData::new(values, shape), device))
        };
        Self {
            transposed: param(1, [4, 6]),
            expanded: Param::from_tensor(Tensor::from_data([0.1, 0.2, 0.3, 0.4], device)),
            sliced: param(2, [5, 4]),
        }
    }

    fn loss(&self, step: u64, rows: std::ops::Range<usize>) -> Tensor<1> {
        let share = rows.len() as f32;
        let x: Tensor<2> = batch(step, rows, [0, 6], &device());
        let y = x.matmul(self.transposed.val().transpose());
        let y = y + self
            .expanded
            .val()
            .unsqueeze::<2>()
            .expand([share as i64, 4]);
        let y = y * self.sliced.val().slice([2..3, 0..4]);
        // The gradient of the sum of a parameter is one number, expanded to its shape.
        square(y) + self.expanded.val().sum() * 0.5
    }
}

#[test]
fn ddp_38_any_layout_and_no_gradient_overwritten() {
    const RUN: (u64, usize, f64) = (5, 8, 0.05);
    let runs = ranks(2).run(
        "ddp_38_any_layout_and_no_gradient_overwritten",
        |ddp: Ddp| {
            let model = ddp.wrap(Layouts::new(&device())).unwrap();
            let rows = ddp.rank() * 4..ddp.rank() * 4 + 4;
            let backward = |step| {
                GradientsParams::from_grads(model.loss(step, rows.clone()).backward(), &model)
            };
            let kept = backward(0);
            let copy = gradients(&model, &kept);
            let second = gradients(&model, &backward(1));
            assert_ne!(copy, second);
            assert_eq!(
                copy,
                gradients(&model, &kept),
                "step 2 left the gradients of step 1 alone"
            );

            let start = parameters(&model);
            let model = train(model, RUN, (ddp.rank(), 2), Layouts::loss);
            assert_same_bits(&ddp, &model);
            (start, copy, parameters(&model))
        },
    );
    for run in runs {
        let (start, first, end) = &run[0];
        let one = load(Layouts::new(&device()), start);
        let grads = GradientsParams::from_grads(one.loss(0, 0..8).backward(), &one);
        assert_close(first, &gradients(&one, &grads), 1e-6);
        assert_close(
            end,
            &parameters(&train(one, RUN, (0, 1), Layouts::loss)),
            1e-6,
        );
    }
}

/// Every trainable element type, ranks 1 to 4, and a parameter without elements.
#[derive(Module, Debug)]
struct Shapes {
    f64: Param<Tensor<1>>,
    f16: Param<Tensor<2>>,
    bf16: Param<Tensor<3>>,
    f32: Param<Tensor<4>>,
    empty: Param<Tensor<2>>,
}

fn filled<const D: usize>(shape: [usize; D], dtype: DType) -> Param<Tensor<D>> {
    Param::from_tensor(Tensor::zeros(shape, (&device(), dtype)))
}

/// A loss whose gradient is `value + i` for element `i`.
fn ramp<const D: usize>(param: &Param<Tensor<D>>, value: f32) -> Tensor<1> {
    let w = param.val();
    let slopes = (0..w.dims().iter().product())
        .map(|i| value + i as f32)
        .collect();
    let slopes = TensorData::new::<f32, _>(slopes, w.dims()).convert_dtype(w.dtype());
    let slopes = Tensor::from_data(slopes, (&w.device(), w.dtype()));
    (w * slopes).cast(FloatDType::F32).sum()
}

#[test]
fn every_float_type_and_shape_is_averaged() {
    ranks(2).run("every_float_type_and_shape_is_averaged", |ddp: Ddp| {
        let model = Shapes {
            f64: filled([3], DType::F64),
            f16: filled([2, 3], DType::F16),
            bf16: filled([2, 2, 3], DType::BF16),
            f32: filled([2, 2, 2, 3], DType::F32),
            empty: filled([0, 3], DType::F32),
        };
        let model = ddp.wrap(model).unwrap();
        // Rank 0 has 1 and rank 1 has 4, the mean is 2.5; exact in every type.
        for _ in 0..2 {
            let x = if ddp.is_main() { 1.0 } else { 4.0 };
            let loss = ramp(&model.f64, x)
                + ramp(&model.f16, x)
                + ramp(&model.bf16, x)
                + ramp(&model.f32, x);
            let loss = loss + model.empty.val().sum();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let types = [
                grads.get::<1>(model.f64.id).unwrap().dtype(),
                grads.get::<2>(model.f16.id).unwrap().dtype(),
                grads.get::<3>(model.bf16.id).unwrap().dtype(),
                grads.get::<4>(model.f32.id).unwrap().dtype(),
            ];
            assert_eq!(types, [DType::F64, DType::F16, DType::BF16, DType::F32]);
            assert_eq!(grads.get::<2>(model.empty.id).unwrap().dims(), [0, 3]);
            let ramp = |count| (0..count).map(|i| 2.5 + i as f32).collect::<Vec<_>>();
            let expected = [
                ("f64", 3),
                ("f16", 6),
                ("bf16", 12),
                ("f32", 24),
                ("empty", 0),
            ];
            let expected = expected.map(|(path, count)| (path.to_string(), ramp(count)));
            assert_eq!(gradients(&model, &grads), expected);
        }
    });
}
