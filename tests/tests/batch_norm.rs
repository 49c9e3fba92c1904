//! Running statistics over ranks, and batch norm over the batches of all ranks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::{
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig, momentum::MomentumConfig},
    prelude::*,
};
use burn_ddp::{
    BufferPolicy, Ddp, Error, NonFinitePolicy, Reduction, WrapConfig, train::SyncBatchNorm,
};
use burn_ddp_tests::{oracle::*, ranks};
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
    let linear = |n, m| LinearConfig::new(n, m).init(&device());
    Net {
        a: linear(8, 6),
        norm: BatchNormConfig::new(6).init(&device()),
        b: linear(6, 4),
        last: BatchNormConfig::new(4).init(&device()),
    }
}

fn synced(ddp: &Ddp) -> Synced {
    let Net { a, norm, b, last } = plain();
    let sync = |norm| SyncBatchNorm::new(norm, ddp).unwrap();
    Net {
        a,
        norm: sync(norm),
        b,
        last: sync(last),
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
                let mut model = ddp.wrap_with(synced(&ddp), config).unwrap();
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
            let mut model = ddp.wrap_with(synced(&ddp), config).unwrap();
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
            let norm = ddp.wrap(SyncBatchNorm::new(norm, &ddp).unwrap()).unwrap();
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
                let tolerance = if offset == 0.0 { 2e-6 } else { 5e-4 };
                assert_close(&named(ours), &named(whole), tolerance);
            }
        }
    }
}

#[test]
fn evaluation_and_records_are_those_of_the_plain_layer() {
    ranks(2).run(
        "evaluation_and_records_are_those_of_the_plain_layer",
        |ddp: Ddp| {
            let trained = ddp.wrap(synced(&ddp)).unwrap();
            loss(trained.forward(rows(0, 0..4))).backward();
            let start = everything(&trained);
            let loaded = plain().load_record(trained.clone().into_record());
            assert_eq!(everything(&loaded), start);
            let back = synced(&ddp).load_record(loaded.clone().into_record());
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
        let model = ddp.wrap(synced(&ddp)).unwrap();
        let same = load(plain(), &everything(&model));
        let x = rows(0, 0..4);
        assert_eq!(floats(model.forward(x.clone())), floats(same.forward(x)));
        assert_eq!(everything(&model), everything(&same));
    });
}

#[test]
fn layers_that_differ_are_an_error_on_both_ranks() {
    let runs = ranks(2).run_raw("layers_that_differ_are_an_error_on_both_ranks", || {
        let ddp = Ddp::from_env().unwrap();
        let channels = 3 + ddp.rank();
        let norm = BatchNormConfig::new(channels).init(&device());
        let norm = SyncBatchNorm::new(norm, &ddp).unwrap();
        let x = Tensor::<2>::ones([4, channels], &device());
        let error = norm.try_forward(x).unwrap_err();
        assert!(matches!(error, Error::Group(_)), "{error}");
        error.to_string()
    });
    for run in runs {
        for (_, text) in run {
            let text = text.unwrap();
            assert!(
                text.contains("40") && text.contains("48"),
                "bytes of both: {text}"
            );
        }
    }
}

/// Two layers of equal width, which rank 1 takes in the other order: in forward, or (with `back`) in backward alone.
fn crossed(test: &str, back: bool) -> Vec<Vec<String>> {
    let runs = ranks(2).run_raw(test, || {
        let ddp = Ddp::from_env().unwrap();
        let layer = || {
            let norm = BatchNormConfig::new(3).init(&device());
            SyncBatchNorm::new(norm, &ddp).unwrap()
        };
        let mut layers = [layer(), layer()];
        let x = batch::<2>(0, 0..4, [0, 3], &device()).require_grad();
        if ddp.rank() == 1 && !back {
            layers.reverse();
        }
        let outputs = layers.iter().map(|layer| layer.try_forward(x.clone()));
        let outputs: Result<Vec<_>, Error> = outputs.collect();
        let error = match outputs {
            Err(error) => error,
            Ok(outputs) => {
                // The deeper one runs first.
                let [mut a, mut b] = <[_; 2]>::try_from(outputs).unwrap();
                let deep = if ddp.rank() == 1 { &mut a } else { &mut b };
                for _ in 0..3 {
                    *deep = deep.clone().tanh();
                }
                let loss = square(a) + square(b);
                burn_ddp::try_backward(&loss).map(|_| ()).unwrap_err()
            }
        };
        error.to_string()
    });
    let text = |rank: (_, Option<String>)| rank.1.unwrap();
    runs.into_iter()
        .map(|run| run.into_iter().map(text).collect())
        .collect()
}

#[test]
fn layers_of_equal_width_are_not_confused() {
    for run in crossed("layers_of_equal_width_are_not_confused", false) {
        for text in run {
            assert!(text.contains("batch-norm layer"), "{text}");
        }
    }
}

#[test]
fn layers_of_equal_width_are_not_confused_in_backward() {
    for run in crossed("layers_of_equal_width_are_not_confused_in_backward", true) {
        for text in run {
            assert!(text.contains("batch-norm layer"), "{text}");
        }
    }
}

/// Rank 1 has no rows; and once both make a forward pass that has no backward pass, before rank 1 joins.
#[test]
fn an_empty_batch_and_an_abandoned_forward_pass() {
    let runs = ranks(2).run(
        "an_empty_batch_and_an_abandoned_forward_pass",
        |ddp: Ddp| {
            let config = WrapConfig::new().reduction(Reduction::WeightedMean);
            let mut model = ddp.wrap_with(synced(&ddp), config).unwrap();
            let start = everything(&model);
            let mut optim = momentum();
            for step in 0..3 - ddp.rank() {
                let own = match (step, ddp.rank()) {
                    (0, 1) => 0..0,
                    (1, 1) => 4..6,
                    _ => 0..4,
                };
                let samples = own.len();
                let x = match samples {
                    0 => Tensor::<2>::zeros([0, 8], &device()),
                    _ => rows(step as u64, own),
                };
                if step == 1 {
                    let _ = model.forward(x.clone());
                }
                let loss = match samples {
                    0 => model.forward(x).sum(),
                    _ => loss(model.forward(x)),
                };
                let grads = ddp.weighted(samples, || loss.backward());
                let grads = GradientsParams::from_grads(grads, &model);
                model = optim.step(0.1, model, grads);
            }
            model = ddp
                .join(model, |model, grads| optim.step(0.1, model, grads))
                .unwrap();
            (start, everything(&model))
        },
    );
    for (start, ours) in runs.iter().flatten() {
        let oracle = oracle(start, 3, |model, step| {
            let all = if step == 1 { 0..6 } else { 0..4 };
            if step == 1 {
                let _ = model.forward(rows(step, all.clone()));
            }
            loss(model.forward(rows(step, all)))
        });
        assert_close(ours, &oracle, 5e-6);
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

#[test]
fn a_rank_that_does_not_come_is_named() {
    let runs = ranks(2)
        .timeout(2)
        .run_raw("a_rank_that_does_not_come_is_named", || {
            let ddp = Ddp::from_env().unwrap();
            let model = ddp.wrap(synced(&ddp)).unwrap();
            let x = rows(0, 0..4);
            if ddp.rank() == 1 {
                // Backward alone is left out.
                let _ = model.forward(x);
                std::thread::sleep(std::time::Duration::from_secs(4));
                return String::new();
            }
            let loss = loss(model.forward(x));
            let error = burn_ddp::try_backward(&loss).map(|_| ()).unwrap_err();
            error.to_string()
        });
    for run in runs {
        let text = run[0].1.clone().unwrap();
        assert!(text.contains("rank 1") || text.contains("[1]"), "{text}");
    }
}
