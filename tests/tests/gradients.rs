//! What backward returns on every rank.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::lr_scheduler::step::StepLrSchedulerConfig;
use burn::module::Param;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::{DType, FloatDType};
use burn_ddp::{Ddp, Reduction, WrapConfig};
use burn_ddp_tests::{Ending, models::*, oracle::*, ranks};

/// Rank `rank`'s loss through head `a` or `b`.
fn head_loss(model: &TwoHeads, step: u64, rank: usize, a: bool) -> Tensor<1> {
    let x = batch(step, rank * 4..rank * 4 + 4, [0, 8], &device());
    square(model.forward(x, a) - 0.5)
}

/// Whether `rank` uses head `a` in `step`: one each, swapped, then both `a`.
fn uses_a(step: u64, rank: usize) -> bool {
    match step {
        0 => rank == 0,
        1 => rank == 1,
        _ => true,
    }
}

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

#[test]
fn ddp_02_one_head_per_rank() {
    let device = device();
    let runs = ranks(2).run("ddp_02_one_head_per_rank", |ddp: Ddp| {
        let mut model = ddp.wrap(TwoHeads::new(&device)).unwrap();
        let start = parameters(&model);
        let mut optim = adamw();
        for step in 0..3 {
            // What each rank has by itself, from a plain model with the same weights.
            let plain = load(TwoHeads::new(&device), &parameters(&model));
            let local = [0, 1].map(|rank| {
                let loss = head_loss(&plain, step, rank, uses_a(step, rank));
                gradients(
                    &plain,
                    &GradientsParams::from_grads(loss.backward(), &plain),
                )
            });
            let loss = head_loss(&model, step, ddp.rank(), uses_a(step, ddp.rank()));
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let ours = gradients(&model, &grads);
            let half = |values: &[f32]| values.iter().map(|x| x / 2.0).collect::<Vec<_>>();
            for path in ["a.weight", "a.bias", "b.weight", "b.bias"] {
                match (at(&local[0], path), at(&local[1], path)) {
                    (Some(one), None) | (None, Some(one)) => {
                        assert_eq!(at(&ours, path), Some(&half(one)[..]), "{path}")
                    }
                    (None, None) => assert_eq!(at(&ours, path), None, "{path} in step {step}"),
                    (Some(_), Some(_)) => assert_eq!((step, &path[..1]), (2, "a")),
                }
            }
            let before = parameters(&model);
            model = optim.step(0.01, model, grads);
            let after = parameters(&model);
            for (path, values) in &after {
                let still = step == 2 && path.starts_with("b.");
                assert_eq!(
                    at(&before, path) == Some(values),
                    still,
                    "{path} in step {step}"
                );
            }
            assert_same_bits(&ddp, &model);
        }
        (start, parameters(&model))
    });
    for run in &runs {
        let (start, end) = &run[0];
        let mut one = load(TwoHeads::new(&device), start);
        let mut optim = adamw();
        for step in 0..3 {
            let loss = [0, 1].map(|rank| head_loss(&one, step, rank, uses_a(step, rank)));
            let [a, b] = loss;
            let grads = GradientsParams::from_grads(((a + b) / 2.0).backward(), &one);
            one = optim.step(0.01, one, grads);
        }
        assert_close(end, &parameters(&one), 1e-6);
    }
}

#[test]
fn ddp_08_mean_by_default_and_sum_on_request() {
    let after_one_step = |ddp: &Ddp, config: WrapConfig| {
        let model = ddp.wrap_with(Scalar::new(0.0, &device()), config).unwrap();
        let grads = GradientsParams::from_grads(model.loss(1.0).backward(), &model);
        floats(SgdConfig::new().init().step(0.1, model, grads).w.val())[0]
    };
    for (count, name) in [(1, "one"), (2, "two"), (4, "four")] {
        let runs = ranks(count).named(name).run(
            "ddp_08_mean_by_default_and_sum_on_request",
            |ddp: Ddp| {
                let sum = WrapConfig::new().reduction(Reduction::Sum);
                (
                    after_one_step(&ddp, WrapConfig::new()),
                    after_one_step(&ddp, sum),
                )
            },
        );
        for (mean, sum) in runs.into_iter().flatten() {
            assert_eq!(mean, -0.1);
            assert_eq!(sum, -0.1 * count as f32);
        }
    }
}

#[test]
fn ddp_08_a_schedule_steps_once_per_optimizer_step() {
    for (count, name) in [(1, "one"), (2, "two")] {
        let runs = ranks(count).named(name).run(
            "ddp_08_a_schedule_steps_once_per_optimizer_step",
            |ddp: Ddp| {
                let mut model = ddp.wrap(Scalar::new(0.0, &device())).unwrap();
                let mut optim = SgdConfig::new().init();
                let mut schedule = StepLrSchedulerConfig::new(1.0, 2)
                    .with_gamma(0.5)
                    .init()
                    .unwrap();
                let mut rates = Vec::new();
                for _ in 0..6 {
                    let grads = GradientsParams::from_grads(model.loss(1.0).backward(), &model);
                    let rate = schedule.step();
                    rates.push(rate.base());
                    model = optim.step(rate, model, grads);
                }
                (rates, floats(model.w.val())[0])
            },
        );
        for (rates, w) in runs.into_iter().flatten() {
            assert_eq!(rates, [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]);
            assert_eq!(w, -3.5);
        }
    }
}

#[test]
fn ddp_22_ready_order_differs_between_ranks() {
    let runs = ranks(2).run("ddp_22_ready_order_differs_between_ranks", |ddp: Ddp| {
        // One bucket each.
        let config = WrapConfig::new()
            .first_bucket_bytes(1)
            .bucket_bytes(1)
            .learn_uses(false);
        let model = ddp
            .wrap_with(Vectors::new(2, 4, &device()), config)
            .unwrap();
        let mut orders = Vec::new();
        for step in 0..4 {
            let [a, b] = [0, 1].map(|i| model.w[i].val());
            // A value that never reaches the loss makes its parameter the last one to be ready.
            let _unused = model.w[(step + ddp.rank()) % 2].val();
            let (a, b) = (a.sum(), b.sum() * 10.0);
            let loss = if ddp.is_main() { a + b } else { b + a };
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let expected = [
                ("w.0".to_string(), vec![1.0; 4]),
                ("w.1".to_string(), vec![10.0; 4]),
            ];
            assert_eq!(gradients(&model, &grads), expected);
            let ready = ddp.traces().swap_remove(0).ready;
            orders.push(ready.into_iter().map(|(path, _)| path).collect::<Vec<_>>());
        }
        orders
    });
    for run in runs {
        assert!(
            run[0].iter().zip(&run[1]).all(|(a, b)| a != b),
            "the ranks' orders differ: {run:?}"
        );
    }
}

#[test]
fn ddp_22_one_layer_more_on_rank_1() {
    let runs = ranks(2).run_raw("ddp_22_one_layer_more_on_rank_1", || {
        let ddp = Ddp::from_env().unwrap();
        let model = Deep::new(2 + ddp.rank(), &device());
        ddp.wrap(model).unwrap_err().to_string()
    });
    for run in runs {
        for (rank, (ending, text)) in run.into_iter().enumerate() {
            assert_eq!(ending, Ending::Exit(0));
            let sides = [
                "nothing (the model ends here)",
                "`layers.2.weight` [16, 16] f32",
            ];
            let (ours, theirs) = (sides[rank], sides[1 - rank]);
            let text = text.unwrap();
            let expected = format!("rank {rank} has {ours}, rank {} has {theirs}", 1 - rank);
            assert!(text.contains(&expected), "{text}");
        }
    }
}

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
