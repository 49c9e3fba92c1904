//! Running statistics over ranks, and batch norm over the batches of all ranks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::{
    module::{Param, RunningState},
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig, momentum::MomentumConfig},
    prelude::*,
    tensor::DType,
};
use burn_ddp::{
    BufferPolicy, Ddp, Error, NonFinitePolicy, Reduction, WrapConfig, train::SyncBatchNorm,
    try_backward,
};
use burn_ddp_tests::{Ending, oracle::*, ranks};
use std::ops::Range;

/// Four channels of mean `mean` and variance 1, in six samples.
fn data(mean: f32, device: &Device) -> Tensor<2> {
    let rows = (0..6).flat_map(|row| [mean + if row % 2 == 0 { 1.0 } else { -1.0 }; 4]);
    Tensor::from_data(TensorData::new(rows.collect(), [6, 4]), device)
}

fn statistics(norm: &BatchNorm) -> (Vec<f32>, Vec<f32>) {
    let norm = norm.valid();
    (
        floats(norm.running_mean.value()),
        floats(norm.running_var.value()),
    )
}

/// 20 steps on data of mean 0 on rank 0 and 10 on rank 1; the running mean and variance, and what it makes of a 3.
fn run(ddp: &Ddp, policy: BufferPolicy) -> (f32, f32, f32) {
    let config = WrapConfig::new().buffers(policy);
    let norm = BatchNormConfig::new(4).init(&device());
    let mut norm = ddp.wrap_with(norm, config).unwrap();
    let mut optim = SgdConfig::new().init();
    let x = data(10.0 * ddp.rank() as f32, &device());
    for _ in 0..20 {
        let grads = square(norm.forward(x.clone())).backward();
        let grads = GradientsParams::from_grads(grads, &norm);
        norm = optim.step(0.0, norm, grads);
    }
    let (mean, var) = statistics(&norm);
    assert!(mean.iter().all(|x| *x == mean[0]) && var.iter().all(|x| *x == var[0]));
    let x = Tensor::<2>::full([1, 4], 3.0, &device().inner());
    (mean[0], var[0], floats(norm.valid().forward(x))[0])
}

#[test]
fn ddp_14_running_statistics_by_policy() {
    let runs = ranks(2).run("ddp_14_running_statistics_by_policy", |ddp: Ddp| {
        let policies = [
            BufferPolicy::Average,
            BufferPolicy::Broadcast,
            BufferPolicy::Off,
        ];
        policies.map(|policy| run(&ddp, policy))
    });
    for run in runs {
        let mean = 5.0 * (1.0 - 0.9_f32.powi(20));
        for (rank, [average, broadcast, off]) in run.iter().enumerate() {
            assert!((average.0 - mean).abs() < 1e-5, "{average:?}: about 4.39");
            assert!((average.1 - 1.0).abs() < 1e-5, "{average:?}");
            assert!((average.2 - (3.0 - mean)).abs() < 1e-4, "{average:?}");
            assert!(broadcast.0.abs() < 1e-6, "rank 0's: {broadcast:?}");
            let own = 2.0 * mean * rank as f32;
            assert!((off.0 - own).abs() < 1e-5, "{off:?}");
        }
        assert_eq!(run[0][..2], run[1][..2], "the same bits");
    }
}

#[test]
fn ddp_14_two_forwards_and_one_backward() {
    ranks(2).run("ddp_14_two_forwards_and_one_backward", |ddp: Ddp| {
        let norm = ddp.wrap(BatchNormConfig::new(4).init(&device())).unwrap();
        let kept = norm.running_mean.value();
        let x = |mean| data(mean + 10.0 * ddp.rank() as f32, &device());
        // The running mean after the first forward pass is part of the second's graph.
        let first = norm.forward(x(0.0));
        let used = norm.running_mean.value_sync();
        let second = norm.forward(x(1.0)) * norm.gamma.val().unsqueeze::<2>();
        let loss = square(first) + square(second) + (norm.beta.val() * used.clone()).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &norm);
        // The mean over ranks of 0.1 * (0 or 10).
        let beta = floats(grads.get::<1>(norm.beta.id).unwrap());
        assert!((beta[0] - 0.5).abs() < 1e-6, "{beta:?}");
        assert_eq!(floats(used), [0.1 * 10.0 * ddp.rank() as f32; 4]);
        assert_eq!(floats(kept), [0.0; 4]);
        // 0.9 * 0.5 + 0.1 * 6.
        let (mean, _) = statistics(&norm);
        assert!((mean[0] - 1.05).abs() < 1e-6, "{mean:?}");
    });
}

/// A rank that has run out of data gets the others' statistics and does not count.
#[test]
fn running_statistics_and_join() {
    ranks(3).run("running_statistics_and_join", |ddp: Ddp| {
        let mut norm = ddp.wrap(BatchNormConfig::new(4).init(&device())).unwrap();
        let mut optim = SgdConfig::new().init();
        for _ in 0..=ddp.rank().min(1) {
            let x = data(ddp.rank() as f32, &device());
            let grads = square(norm.forward(x)).backward();
            let grads = GradientsParams::from_grads(grads, &norm);
            norm = optim.step(0.0, norm, grads);
        }
        let norm = ddp
            .join(norm, |norm, grads| optim.step(0.0, norm, grads))
            .unwrap();
        // All: 0.1 * 1; then ranks 1 and 2: 0.09 + 0.1 * 1.5.
        let (mean, _) = statistics(&norm);
        assert!((mean[0] - 0.24).abs() < 1e-6, "{mean:?}");
        assert_same_bits(&ddp, &norm);
    });
}

#[derive(Module, Debug)]
struct Net<N: Module> {
    a: Linear,
    norm: N,
    b: Linear,
    last: N,
}

type Plain = Net<BatchNorm>;
type Synced = Net<SyncBatchNorm>;

fn plain() -> Plain {
    plain_on(&device())
}

/// The same weights in every run: how far rounding goes depends on them.
fn plain_on(device: &Device) -> Plain {
    device.seed(7);
    let linear = |n, m| LinearConfig::new(n, m).init(device);
    Net {
        a: linear(8, 6),
        norm: BatchNormConfig::new(6).init(device),
        b: linear(6, 4),
        last: BatchNormConfig::new(4).init(device),
    }
}

fn synced() -> Synced {
    synced_on(&device())
}

fn synced_on(device: &Device) -> Synced {
    let Net { a, norm, b, last } = plain_on(device);
    Net {
        a,
        norm: SyncBatchNorm::new(norm),
        b,
        last: SyncBatchNorm::new(last),
    }
}

/// A loss that batch norm does not make constant.
fn loss(y: Tensor<2>) -> Tensor<1> {
    square(y.tanh() + 0.3)
}

impl Plain {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.norm.forward(self.a.forward(x)).tanh();
        self.last.forward(self.b.forward(x))
    }
}

impl Synced {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.norm.forward(self.a.forward(x)).tanh();
        self.last.forward(self.b.forward(x))
    }
}

fn rows(step: u64, rows: Range<usize>) -> Tensor<2> {
    batch(step, rows, [0, 8], &device())
}

fn momentum() -> burn::optim::ModuleOptimizer {
    let momentum = MomentumConfig::new().with_momentum(0.9);
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

/// Parameters and running statistics.
fn everything<M: Module>(model: &M) -> Weights {
    let _ = model.valid();
    parameters(model)
}

/// One process: `losses` of each step, whose mean weighted by `weights` is the loss.
fn oracle(start: &Weights, steps: u64, of: impl Fn(&Plain, u64) -> Tensor<1>) -> Weights {
    let mut model = load(plain(), start);
    let mut optim = momentum();
    for step in 0..steps {
        let grads = GradientsParams::from_grads(of(&model, step).backward(), &model);
        model = optim.step(0.1, model, grads);
    }
    everything(&model)
}

#[test]
fn training_is_that_of_one_process() {
    for world in [2, 3] {
        let runs = ranks(world).named(["", "", "two", "three"][world]).run(
            "training_is_that_of_one_process",
            |ddp: Ddp| {
                let config = WrapConfig::new().buffers(BufferPolicy::Off);
                let mut model = ddp.wrap_with(synced(), config).unwrap();
                let start = everything(&model);
                let mut optim = momentum();
                for step in 0..4 {
                    let own = rows(step, ddp.rank() * 5..(ddp.rank() + 1) * 5);
                    let grads = loss(model.forward(own)).backward();
                    let grads = GradientsParams::from_grads(grads, &model);
                    model = optim.step(0.1, model, grads);
                    // The running statistics too, without any policy.
                    assert_same_bits(&ddp, &model);
                }
                (start, everything(&model))
            },
        );
        for (start, ours) in runs.iter().flatten() {
            let oracle = oracle(start, 4, |model, step| {
                loss(model.forward(rows(step, 0..world * 5)))
            });
            assert_close(ours, &oracle, 5e-6);
        }
    }
}

/// What is recomputed in backward is not exchanged again.
#[test]
fn recomputation_is_that_of_one_process() {
    let runs = ranks(2).run("recomputation_is_that_of_one_process", |ddp: Ddp| {
        let device = device().gradient_checkpointing();
        let model = ddp.wrap(synced_on(&device)).unwrap();
        let x = batch::<2>(0, ddp.rank() * 5..(ddp.rank() + 1) * 5, [0, 8], &device);
        let start = everything(&model);
        let grads = GradientsParams::from_grads(loss(model.forward(x)).backward(), &model);
        (start, gradients(&model, &grads))
    });
    for (start, ours) in runs.iter().flatten() {
        let model = load(plain(), start);
        let grads = loss(model.forward(rows(0, 0..10))).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        // Of what is added before a normalization the gradient is 0, but for rounding.
        let others = |mut all: Weights| {
            all.retain(|(path, _)| !path.ends_with("bias"));
            all
        };
        let whole = others(gradients(&model, &grads));
        assert_eq!(whole.len(), 6);
        assert_close(&others(ours.clone()), &whole, 5e-6);
    }
}

/// Each rank's loss is a mean over its rows, and the step's one over all.
#[test]
fn batches_of_different_sizes_in_windows_and_join() {
    // Rows of each rank in the two passes of each step; rank 1 makes a step less.
    const ROWS: [[[usize; 2]; 2]; 2] = [[[3, 4], [7, 2]], [[5, 1], [2, 6]]];
    let range = |step: usize, pass: usize, rank: usize| {
        let before: usize = ROWS[step][pass][..rank].iter().sum();
        before..before + ROWS[step][pass][rank]
    };
    let runs = ranks(2).run(
        "batches_of_different_sizes_in_windows_and_join",
        |ddp: Ddp| {
            let config = WrapConfig::new().reduction(Reduction::WeightedMean);
            let mut model = ddp.wrap_with(synced(), config).unwrap();
            let start = everything(&model);
            let mut optim = momentum();
            for step in 0..3 - ddp.rank() {
                let mut grads = None;
                for pass in 0..2 {
                    let guard = (pass == 0).then(|| ddp.no_sync());
                    let own = match step {
                        2 => 0..4,
                        _ => range(step, pass, ddp.rank()),
                    };
                    let samples = own.len();
                    let x = rows((2 * step + pass) as u64, own);
                    let loss = loss(model.forward(x));
                    grads = Some(ddp.weighted(samples, || loss.backward()));
                    drop(guard);
                }
                let grads = GradientsParams::from_grads(grads.unwrap(), &model);
                model = optim.step(0.1, model, grads);
            }
            model = ddp
                .join(model, |model, grads| optim.step(0.1, model, grads))
                .unwrap();
            assert_same_bits(&ddp, &model);
            (start, everything(&model))
        },
    );
    for (start, ours) in runs.iter().flatten() {
        let oracle = oracle(start, 3, |model, step| {
            let pass = |pass: usize| {
                let whole = match step {
                    2 => 4,
                    _ => ROWS[step as usize][pass].iter().sum(),
                };
                let x = rows(2 * step + pass as u64, 0..whole);
                loss(model.forward(x)) * whole as f32
            };
            let samples = match step {
                2 => 8,
                _ => ROWS[step as usize].iter().flatten().sum::<usize>(),
            };
            (pass(0) + pass(1)) / samples as f32
        });
        assert_close(ours, &oracle, 5e-6);
    }
}

/// Output and input gradient, of four dimensions, and of numbers whose squares f32 cannot tell apart.
#[test]
fn values_of_one_layer() {
    let runs = ranks(2).run("values_of_one_layer", |ddp: Ddp| {
        let mut outputs = Vec::new();
        for offset in [0.0, 1000.0] {
            let norm = BatchNormConfig::new(3).init(&device());
            let norm = ddp.wrap(SyncBatchNorm::new(norm)).unwrap();
            let x = batch::<4>(
                0,
                ddp.rank() * 2..(ddp.rank() + 1) * 2,
                [0, 3, 4, 5],
                &device(),
            );
            let x = (x + offset).require_grad();
            let y = norm.forward(x.clone());
            let weights = batch::<4>(
                1,
                ddp.rank() * 2..(ddp.rank() + 1) * 2,
                [0, 3, 4, 5],
                &device(),
            );
            let grads = (y.clone() * weights).sum().backward();
            outputs.push((floats(y), floats(x.grad(&grads).unwrap()), {
                let norm = norm.valid();
                [
                    floats(norm.running_mean.value()),
                    floats(norm.running_var.value()),
                ]
                .concat()
            }));
        }
        outputs
    });
    for run in runs {
        for (index, offset) in [0.0, 1000.0].into_iter().enumerate() {
            let norm = BatchNormConfig::new(3).init(&device());
            let x = batch::<4>(0, 0..4, [0, 3, 4, 5], &device()) + offset;
            let x = x.require_grad();
            let y = norm.forward(x.clone());
            let grads = (y.clone() * batch::<4>(1, 0..4, [0, 3, 4, 5], &device()))
                .sum()
                .backward();
            let (mean, var) = statistics(&norm);
            let whole = [
                floats(y),
                floats(x.grad(&grads).unwrap()),
                [mean, var].concat(),
            ];
            let ours: Vec<_> = run.iter().map(|rank| rank[index].clone()).collect();
            let ours = [
                [ours[0].0.clone(), ours[1].0.clone()].concat(),
                [ours[0].1.clone(), ours[1].1.clone()].concat(),
                ours[1].2.clone(),
            ];
            for (what, (ours, whole)) in ours.into_iter().zip(whole).enumerate() {
                let named = |values: Vec<f32>| vec![(format!("{what} at {offset}"), values)];
                // At 1000 f32 has 6e-5 of the data's standard deviation.
                let tolerance = if offset == 0.0 { 1e-6 } else { 5e-4 };
                assert_close(&named(ours), &named(whole), tolerance);
            }
        }
    }
}

/// One channel, whose values are `means` of the ranks plus and minus one, in `dtype`: output and gradient of the first two rows, running mean and variance.
fn narrow_or_wide(ddp: &Ddp, dtype: DType, means: [f64; 2]) -> [f64; 6] {
    let tensor = |values: Vec<f64>| {
        let data = TensorData::new(values, [1]).convert_dtype(dtype);
        Tensor::<1>::from_data(data, (&device(), dtype))
    };
    let norm = ddp.wrap(SyncBatchNorm::new(BatchNorm {
        gamma: Param::from_tensor(tensor(vec![1.0])),
        beta: Param::from_tensor(tensor(vec![0.0])),
        training: Param::from_bool(true),
        running_mean: RunningState::new(tensor(vec![0.0])),
        running_var: RunningState::new(tensor(vec![1.0])),
        momentum: 0.1,
        epsilon: 0.0,
    }));
    let norm = norm.unwrap();
    let mean = means[ddp.rank()];
    let data = |values: Vec<f64>| {
        let data = TensorData::new(values, [2, 1]).convert_dtype(dtype);
        Tensor::<2>::from_data(data, (&device(), dtype))
    };
    let x = data(vec![mean - 1.0, mean + 1.0]).require_grad();
    let y = norm.forward(x.clone());
    // The gradient of the output: 1 and 3 on rank 0, nothing on rank 1.
    let main = f64::from(u8::from(ddp.is_main()));
    let grads = (y.clone() * data(vec![main, 3.0 * main])).sum().backward();
    let values = |x: Tensor<2>| x.try_into_vec_as::<f64>().unwrap();
    let (y, dx) = (values(y), values(x.grad(&grads).unwrap()));
    let norm = norm.valid();
    let running = |x: &RunningState<Tensor<1>>| x.value().try_into_vec_as::<f64>().unwrap()[0];
    let (mean, var) = (running(&norm.running_mean), running(&norm.running_var));
    [y[0], y[1], dx[0], dx[1], mean, var]
}

#[test]
fn statistics_of_16_bits_are_of_32_and_those_of_64_of_64() {
    let test = "statistics_of_16_bits_are_of_32_and_those_of_64_of_64";
    let runs = ranks(2).run(test, |ddp: Ddp| {
        // The mean is 1500, the variance 250001, which is no f16.
        let half = narrow_or_wide(&ddp, DType::F16, [1000.0, 2000.0]);
        // 10000001 and a variance of 2; f32 has no such number.
        let double = narrow_or_wide(&ddp, DType::F64, [1e7, 1e7 + 2.0]);
        (half, double)
    });
    let close = |ours: [f64; 6], expected: [f64; 6], tolerance: f64| {
        for (x, y) in ours.into_iter().zip(expected) {
            assert!((x - y).abs() <= tolerance * y.abs().max(1e-3), "{ours:?}");
        }
    };
    for run in runs {
        for (rank, (half, double)) in run.into_iter().enumerate() {
            let y = [[-501.0, -499.0], [499.0, 501.0]][rank].map(|x| x / 250001_f64.sqrt());
            // (dy - 1 - y * sum(dy * y) / 4) / 500.
            let along = (-501.0 - 3.0 * 499.0) / 250001_f64.sqrt() / 4.0;
            let dy = [[1.0, 3.0], [0.0, 0.0]][rank];
            let dx = [0, 1].map(|i| (dy[i] - 1.0 - y[i] * along) / 250001_f64.sqrt());
            close(half, [y[0], y[1], dx[0], dx[1], 150.0, 25001.0], 1e-3);
            // By hand: -2 0 | 0 2 around the mean.
            let root = 2_f64.sqrt();
            let (y, dx) = match rank {
                // sum(dy * y) = -root, of which a quarter along each y.
                0 => ([-root, 0.0], [(0.0 - 0.5) / root, 2.0 / root]),
                _ => ([0.0, root], [-1.0 / root, (-1.0 + 0.5) / root]),
            };
            close(double, [y[0], y[1], dx[0], dx[1], 1000000.1, 1.1], 1e-12);
        }
    }
}

#[test]
fn evaluation_and_records_are_those_of_the_plain_layer() {
    ranks(2).run(
        "evaluation_and_records_are_those_of_the_plain_layer",
        |ddp: Ddp| {
            let trained = ddp.wrap(synced()).unwrap();
            loss(trained.forward(rows(0, 0..4))).backward();
            let start = everything(&trained);
            let loaded = plain().load_record(trained.clone().into_record());
            assert_eq!(everything(&loaded), start);
            let back = synced().load_record(loaded.clone().into_record());
            assert_eq!(everything(&back), start);
            // Nothing is exchanged: rank 1 does not evaluate.
            if ddp.is_main() {
                let x = rows(1, 0..3).inner();
                let (ours, plain) = (trained.valid(), loaded.valid());
                assert_eq!(floats(ours.forward(x.clone())), floats(plain.forward(x)));
            }
        },
    );
}

#[test]
fn one_rank_is_the_plain_layer() {
    ranks(1).run("one_rank_is_the_plain_layer", |ddp: Ddp| {
        let model = ddp.wrap(synced()).unwrap();
        let same = load(plain(), &everything(&model));
        let x = rows(0, 0..4);
        assert_eq!(floats(model.forward(x.clone())), floats(same.forward(x)));
        assert_eq!(everything(&model), everything(&same));
    });
}

/// What two ranks are told that wrap different models.
fn told(test: &str, wrap: impl Fn(&Ddp) -> Error) -> Vec<[String; 2]> {
    let runs = ranks(2).run_raw(test, || {
        let error = wrap(&Ddp::from_env().unwrap());
        assert!(matches!(error, Error::ModelMismatch { .. }), "{error}");
        error.to_string()
    });
    let texts =
        |run: Vec<(Ending, Option<String>)>| [0, 1].map(|rank| run[rank].1.clone().unwrap());
    runs.into_iter().map(texts).collect()
}

#[test]
fn other_channels_are_an_error_of_wrap() {
    let wrap = |ddp: &Ddp| {
        let norm = BatchNormConfig::new(3 + ddp.rank()).init(&device());
        ddp.wrap(SyncBatchNorm::new(norm)).unwrap_err()
    };
    for texts in told("other_channels_are_an_error_of_wrap", wrap) {
        for text in texts {
            assert!(text.contains("[3]") && text.contains("[4]"), "{text}");
        }
    }
}

/// The parameters have the same names and shapes.
#[test]
fn a_layer_that_only_one_rank_synchronises_is_an_error_of_wrap() {
    let wrap = |ddp: &Ddp| match ddp.rank() {
        0 => ddp.wrap(plain()).unwrap_err(),
        _ => ddp.wrap(synced()).unwrap_err(),
    };
    let test = "a_layer_that_only_one_rank_synchronises_is_an_error_of_wrap";
    for texts in told(test, wrap) {
        for text in texts {
            assert!(text.contains("`norm` with 6 channels"), "{text}");
        }
    }
}

/// The first rank's error reaches both, and says where each is.
#[test]
fn a_layer_that_is_skipped_is_an_error_on_both_ranks() {
    let runs = ranks(2).run_raw("a_layer_that_is_skipped_is_an_error_on_both_ranks", || {
        let ddp = Ddp::from_env().unwrap();
        let layer = |_| SyncBatchNorm::new(BatchNormConfig::new(4).init(&device()));
        let layers: Vec<_> = (0..2).map(layer).collect();
        let layers = ddp.wrap(layers).unwrap();
        // Not a leaf, whose gradient would be computed after the reduction.
        let x = data(0.0, &device()).require_grad() * 2.0;
        let x = layers[0].try_forward(x).unwrap();
        let x = match ddp.rank() {
            0 => x,
            _ => layers[1].forward(x),
        };
        let error = try_backward(&loss(x)).map(|_| ()).unwrap_err();
        error.to_string()
    });
    for run in runs {
        let text = run[0].1.clone().unwrap();
        let places = ["rank 0 in backward of `0`", "rank 1 in forward of `1`"];
        assert!(places.iter().all(|place| text.contains(place)), "{text}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let runs = ranks(2)
        .timeout(2)
        .run_raw("a_rank_that_does_not_come_is_named", || {
            let ddp = Ddp::from_env().unwrap();
            let model = ddp.wrap(synced()).unwrap();
            let x = rows(0, 0..4);
            if ddp.rank() == 1 {
                // Backward alone is left out.
                let _ = model.forward(x);
                std::thread::sleep(std::time::Duration::from_secs(4));
                return String::new();
            }
            let loss = loss(model.forward(x));
            let error = try_backward(&loss).map(|_| ()).unwrap_err();
            error.to_string()
        });
    for run in runs {
        let text = run[0].1.clone().unwrap();
        assert!(text.contains("rank 1") || text.contains("[1]"), "{text}");
    }
}

/// A rank whose batch is empty takes part in everything and counts for nothing.
#[test]
fn an_empty_batch_counts_for_nothing() {
    let runs = ranks(2).run("an_empty_batch_counts_for_nothing", |ddp: Ddp| {
        let config = WrapConfig::new().reduction(Reduction::WeightedMean);
        let mut model = ddp.wrap_with(synced(), config.clone()).unwrap();
        let start = everything(&model);
        let mut optim = momentum();
        for step in 0..3 {
            // In turns: all six rows, or none.
            let own = match step as usize % 2 == ddp.rank() {
                true => 0..6,
                false => 0..0,
            };
            let samples = own.len();
            let loss = loss(model.forward(rows(step, own)));
            let grads = ddp.weighted(samples, || loss.backward());
            let grads = GradientsParams::from_grads(grads, &model);
            model = optim.step(0.1, model, grads);
        }
        assert_same_bits(&ddp, &model);

        // Burn's layer: the mean of an empty batch is no number, on one rank only.
        let norm = BatchNormConfig::new(4).init(&device());
        let norm = ddp.wrap_with(norm, config).unwrap();
        let x = data(10.0, &device());
        let x = if ddp.is_main() {
            x
        } else {
            x.slice(s![0..0, ..])
        };
        let samples = x.dims()[0];
        let loss = square(norm.forward(x));
        ddp.weighted(samples, || loss.backward());
        let (mean, _) = statistics(&norm);
        assert!((mean[0] - 1.0).abs() < 1e-6, "{mean:?}: 0.1 * 10");
        (start, everything(&model))
    });
    for (start, ours) in runs.iter().flatten() {
        let oracle = oracle(start, 3, |model, step| {
            loss(model.forward(rows(step, 0..6)))
        });
        assert_close(ours, &oracle, 5e-6);
    }
}

/// A step that is skipped because of one rank's data leaves that rank's statistics out too.
#[test]
fn statistics_of_a_skipped_step() {
    ranks(2).run("statistics_of_a_skipped_step", |ddp: Ddp| {
        let config = WrapConfig::new().non_finite(NonFinitePolicy::Skip);
        let norm = BatchNormConfig::new(4).init(&device());
        let norm = ddp.wrap_with(norm, config).unwrap();
        let x = data(if ddp.is_main() { 10.0 } else { f32::NAN }, &device());
        square(norm.forward(x)).backward();
        assert!(ddp.non_finite().is_some());
        let (mean, _) = statistics(&norm);
        assert!((mean[0] - 1.0).abs() < 1e-6, "{mean:?}: 0.1 * 10");
        assert_same_bits(&ddp, &norm);
    });
}

/// Layers of one size, in another order on each rank: nothing but their place tells them apart.
#[test]
fn layers_in_another_order_are_an_error_on_both_ranks() {
    let runs = ranks(2).run_raw("layers_in_another_order_are_an_error_on_both_ranks", || {
        let ddp = Ddp::from_env().unwrap();
        let layers: Vec<BatchNorm> = (0..2)
            .map(|_| BatchNormConfig::new(4).init(&device()))
            .collect();
        let layers: Vec<_> = layers.into_iter().map(SyncBatchNorm::new).collect();
        let layers = ddp.wrap(layers).unwrap();
        let error = layers[ddp.rank()].try_forward(data(0.0, &device()));
        error.unwrap_err().to_string()
    });
    for run in runs {
        for (_, text) in run {
            let text = text.unwrap();
            assert!(text.contains("`0`") && text.contains("`1`"), "{text}");
        }
    }
}

/// Ranks make 0, 1 and 3 steps; of one, two and then three passes, so that no step repeats the one before.
#[test]
fn sync_batch_norm_x_join_without_a_step_and_in_other_windows() {
    let runs = ranks(3).run(
        "sync_batch_norm_x_join_without_a_step_and_in_other_windows",
        |ddp: Ddp| {
            let mut model = ddp.wrap(synced()).unwrap();
            let start = everything(&model);
            let mut optim = momentum();
            for step in 0..[0, 1, 3][ddp.rank()] {
                let mut grads = None;
                for pass in 0..=step {
                    let guard = (pass < step).then(|| ddp.no_sync());
                    let own = (ddp.rank() - 1) * 4..ddp.rank() * 4;
                    let x = rows(10 * step + pass, own);
                    grads = Some(loss(model.forward(x)).backward());
                    drop(guard);
                }
                let grads = GradientsParams::from_grads(grads.unwrap(), &model);
                model = optim.step(0.1, model, grads);
            }
            model = ddp
                .join(model, |model, grads| optim.step(0.1, model, grads))
                .unwrap();
            assert_same_bits(&ddp, &model);
            // The next epoch begins alike.
            let own = ddp.rank() * 2..(ddp.rank() + 1) * 2;
            let grads = loss(model.forward(rows(99, own))).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = optim.step(0.1, model, grads);
            (start, everything(&model))
        },
    );
    for (start, ours) in runs.iter().flatten() {
        let oracle = oracle(start, 4, |model, step| {
            let pass = |pass: u64| {
                let whole = match step {
                    0 => 0..8,
                    3 => 0..6,
                    _ => 4..8,
                };
                let step = if step == 3 { 99 } else { 10 * step + pass };
                loss(model.forward(rows(step, whole)))
            };
            let passes = if step == 3 { 0..1 } else { 0..step + 1 };
            passes.map(pass).reduce(|a, b| a + b).unwrap()
        });
        assert_close(ours, &oracle, 5e-6);
    }
}

/// Of two models trained in turn each answers in its own order.
#[test]
fn sync_batch_norm_x_join_pair() {
    let runs = ranks(2).run("sync_batch_norm_x_join_pair", |ddp: Ddp| {
        let [mut g, mut d] = [(); 2].map(|()| ddp.wrap(synced()).unwrap());
        let start = [everything(&g), everything(&d)];
        let (mut of_g, mut of_d) = (momentum(), momentum());
        let train = |model: &Synced, step: u64| {
            let own = rows(step, ddp.rank() * 4..(ddp.rank() + 1) * 4);
            let grads = loss(model.forward(own)).backward();
            GradientsParams::from_grads(grads, model)
        };
        for step in 0..3 - 2 * ddp.rank() as u64 {
            let grads = train(&g, step);
            g = of_g.step(0.1, g, grads);
            let grads = train(&d, step + 50);
            d = of_d.step(0.1, d, grads);
        }
        let step_g = |g, grads| of_g.step(0.1, g, grads);
        let step_d = |d, grads| of_d.step(0.1, d, grads);
        let (g, d) = ddp.join_pair((g, d), step_g, step_d).unwrap();
        assert_same_bits(&ddp, &g);
        assert_same_bits(&ddp, &d);
        (start, [everything(&g), everything(&d)])
    });
    for (start, ours) in runs.iter().flatten() {
        for (which, (start, ours)) in start.iter().zip(ours).enumerate() {
            let oracle = oracle(start, 3, |model, step| {
                let all = if step == 0 { 8 } else { 4 };
                loss(model.forward(rows(step + 50 * which as u64, 0..all)))
            });
            assert_close(ours, &oracle, 5e-6);
        }
    }
}
/// The step is skipped; the statistics of the rank whose batch was no number do not count in it.
#[test]
fn ddp_05_running_statistics_stay_numbers() {
    ranks(2).run("ddp_05_running_statistics_stay_numbers", |ddp: Ddp| {
        let config = WrapConfig::new().non_finite(NonFinitePolicy::Skip);
        let norm = BatchNormConfig::new(4).init(&device());
        let norm = ddp.wrap_with(norm, config).unwrap();
        let pass = |mean: f32, factor: f32| {
            let x = data(mean, &device()) * factor;
            square(norm.forward(x)).backward();
            let (mean, _) = statistics(&norm);
            (mean[0], ddp.non_finite().is_some())
        };
        let close = |a: f32, b: f32| assert!((a - b).abs() < 1e-6, "{a} {b}");
        let own = 10.0 * ddp.rank() as f32;
        let spoilt = if ddp.rank() == 1 { f32::NAN } else { 1.0 };
        let (mean, skipped) = pass(own, 1.0);
        assert!(!skipped);
        close(mean, 0.5);
        // Rank 0's: 0.9 * 0.5 + 0.1 * 0.
        let (mean, skipped) = pass(own, spoilt);
        assert!(skipped);
        close(mean, 0.45);
        // Nobody's: as they were.
        close(pass(own, f32::NAN).0, 0.45);
        close(pass(own, 1.0).0, 0.905);
        assert_same_bits(&ddp, &norm);
    });
}

/// A part that is only evaluated keeps its statistics.
#[test]
fn a_teacher_keeps_its_statistics() {
    #[derive(Module, Debug)]
    struct Distill {
        student: BatchNorm,
        teacher: BatchNorm,
    }
    for world in [1, 2] {
        let run = ["", "one", "two"][world];
        ranks(world)
            .named(run)
            .run("a_teacher_keeps_its_statistics", |ddp: Ddp| {
                let new = || BatchNormConfig::new(4).init(&device());
                let teacher = new();
                teacher.forward(data(7.0, &device()));
                let teacher = teacher.valid();
                let before = floats(teacher.running_mean.value());
                let student = new();
                let model = ddp.wrap(Distill { student, teacher }).unwrap();
                square(model.student.forward(data(1.0, &device()))).backward();
                assert_eq!(floats(model.teacher.running_mean.value()), before);
                let x = data(7.0, &device().inner());
                assert_eq!(model.teacher.forward(x).dims(), [6, 4]);
            });
    }
}
