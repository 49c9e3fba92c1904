//! Replicas start equal, stay equal, and are stored like a plain model.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::module::Module;
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_ddp::{BufferPolicy, Ddp, Error, WrapConfig, try_backward};
use burn_ddp_tests::{Ending, models::*, oracle::*, ranks};
use std::path::PathBuf;

#[test]
fn ddp_06_ranks_with_other_seeds_start_equal() {
    ranks(2).run("ddp_06_ranks_with_other_seeds_start_equal", |ddp: Ddp| {
        let device = device();
        device.seed(1 + ddp.rank() as u64);
        let model = NormMlp::new(&device);
        assert!(!model.mlp.a.weight.is_initialized(), "the weights are lazy");
        // Momentum 0.1: the running mean becomes 1 on rank 0 and 2 on rank 1.
        let x = Tensor::<2>::full([8, 4], 10.0 * (1 + ddp.rank()) as f32, &device);
        let _ = model.norm.forward(x);
        let early = model.clone();

        let wrapped = ddp.wrap(model).unwrap();
        assert_same_bits(&ddp, &wrapped);
        assert_eq!(
            floats(wrapped.norm.running_mean.value_sync()),
            [1.0; 4],
            "rank 0's statistics"
        );
        // The clone took its own values at the same time, and the wrapped model did not follow it.
        let own = ddp.param_hashes(&early).unwrap();
        assert_ne!(own[0], own[1], "the seeds do make a difference");
        assert_eq!(
            own[0],
            ddp.param_hashes(&wrapped).unwrap()[1],
            "rank 0's weights"
        );
    });
}

#[test]
fn ddp_06_every_rank_draws_its_own_dropout_masks() {
    let body = |ddp: Ddp| {
        let device = device();
        device.seed(1 + ddp.rank() as u64);
        let config = WrapConfig::new().buffers(BufferPolicy::Off);
        let mut model = ddp.wrap_with(NormMlp::new(&device), config).unwrap();
        device.seed(ddp.rank_seed(42));
        let mask = floats(model.dropout.forward(Tensor::<2>::ones([1, 1000], &device)));
        assert!(mask.iter().all(|x| *x == 0.0 || *x == 2.0));
        let mut optim = SgdConfig::new().init();
        for step in 0..3 {
            let x = batch(step, 0..8, [0, 8], &device);
            let grads =
                GradientsParams::from_grads(square(model.forward(x) - 0.5).backward(), &model);
            model = optim.step(0.1, model, grads);
        }
        // The masks are the ranks' own and so are the running statistics, the weights are not.
        assert_same_bits(&ddp, &ddp.average_buffers(model).unwrap());
        mask.iter().map(|x| *x > 0.0).collect::<Vec<bool>>()
    };
    let runs = ranks(2).run("ddp_06_every_rank_draws_its_own_dropout_masks", body);
    let again = ranks(2)
        .named("again")
        .run("ddp_06_every_rank_draws_its_own_dropout_masks", body);
    assert_eq!(runs, again, "the same (seed, rank) draws the same masks");
    for run in runs {
        // Of two independent masks about half of the places differ.
        let differing = run[0].iter().zip(&run[1]).filter(|(a, b)| a != b).count();
        assert!((400..600).contains(&differing), "{differing}");
    }
}

#[test]
fn ddp_11_rank_0_evaluates_alone() {
    ranks(2).run("ddp_11_rank_0_evaluates_alone", |ddp: Ddp| {
        let mut model = ddp.wrap(SmallResNet::new(&device())).unwrap();
        let mut optim = SgdConfig::new().init();
        let mut step = |model: SmallResNet, step: u64| {
            let x = batch(
                step,
                ddp.rank() * 4..ddp.rank() * 4 + 4,
                [0, 1, 8, 8],
                &device(),
            );
            let loss = square(model.forward(x, false) - 0.5);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            optim.step(0.1, model, grads)
        };
        model = step(model, 0);
        if ddp.is_main() {
            let before = ddp.stats();
            let x: Tensor<4> = batch(7, 0..4, [0, 1, 8, 8], &Device::flex());
            let scores = [0, 1].map(|_| floats(model.valid().forward(x.clone(), false)));
            assert_eq!(scores[0], scores[1]);
            // The plain model scores alike, from the same weights and running statistics.
            let plain = ddp.unwrap(model.clone());
            assert_eq!(floats(plain.valid().forward(x, false)), scores[0]);
            assert_eq!(ddp.stats(), before, "nothing was sent");
        }
        ddp.barrier().unwrap();
        model = step(model, 1);
        // The running statistics too.
        assert_same_bits(&ddp, &model);
    });
}

/// A directory that all ranks know.
fn shared_directory(ddp: &Ddp) -> (Option<tempfile::TempDir>, PathBuf) {
    let directory = ddp.is_main().then(|| tempfile::tempdir().unwrap());
    let path = directory
        .as_ref()
        .map(|d| d.path().to_path_buf())
        .unwrap_or_default();
    (directory, ddp.broadcast(path).unwrap())
}

/// Stores a plain model, loads it wrapped, stores that, loads it plain: the same all the way. Returns
/// the wrapped model and the two files.
fn there_and_back<M: Module + 'static>(ddp: &Ddp, new: impl Fn(&Device) -> M) -> (M, [Vec<u8>; 2]) {
    let (_guard, directory) = shared_directory(ddp);
    let (plain_file, wrapped_file) = (directory.join("plain.bpk"), directory.join("wrapped.bpk"));
    let device = device();
    let plain = new(&device);
    // Lazy parameters take their values when they are first read.
    let saved = parameters(&plain);
    ddp.save_on_main(|| plain.clone().save_file(&plain_file))
        .unwrap();
    let saved = ddp.broadcast(saved).unwrap();

    let wrapped = ddp.wrap(new(&device)).unwrap();
    assert_ne!(parameters(&wrapped), saved);
    let wrapped = wrapped.load_file(&plain_file);
    assert_same_bits(ddp, &wrapped);
    assert_eq!(
        parameters(&wrapped),
        saved,
        "names and values of the plain model"
    );

    ddp.save_on_main(|| wrapped.clone().save_file(&wrapped_file))
        .unwrap();
    assert_eq!(parameters(&new(&device).load_file(&wrapped_file)), saved);
    let files = [&plain_file, &wrapped_file].map(|file| std::fs::read(file).unwrap());
    // And without a file.
    let record = wrapped.clone().into_record();
    assert_eq!(parameters(&new(&device).load_record(record)), saved);
    // Nobody removes the directory before all have read.
    ddp.barrier().unwrap();
    (wrapped, files)
}

#[test]
fn ddp_34_records_are_those_of_the_plain_model() {
    ranks(2).run("ddp_34_records_are_those_of_the_plain_model", |ddp: Ddp| {
        // Burn gives running statistics a new id in every process, so that of these two files only the second is equal
        // to the last byte.
        there_and_back(&ddp, SmallResNet::new);
        let (_, [plain, wrapped]) = there_and_back(&ddp, Mlp::new);
        assert!(plain == wrapped);
    });
}

/// A backward pass in which each rank uses one head, so that each needs the other's gradient for the head
/// that it does not use.
fn one_head_each(ddp: &Ddp, model: &TwoHeads, step: u64) -> Result<GradientsParams, Error> {
    let x = batch(step, ddp.rank() * 4..ddp.rank() * 4 + 4, [0, 8], &device());
    let loss = square(model.forward(x, ddp.is_main()) - 0.5);
    Ok(GradientsParams::from_grads(try_backward(&loss)?, model))
}

#[test]
fn ddp_34_a_loaded_model_trains_on() {
    ranks(2).run("ddp_34_a_loaded_model_trains_on", |ddp: Ddp| {
        // Every rank uses everything: loading after `wrap` changes nothing.
        let (mut model, _) = there_and_back(&ddp, Mlp::new);
        for step in 0..3 {
            let loss =
                |m: &Mlp, _, rows| square(m.forward(batch(step, rows, [0, 8], &device())) - 0.5);
            model = train(model, (1, 8, 0.1), (ddp.rank(), 2), loss);
            assert_same_bits(&ddp, &model);
        }
        // Otherwise the model is wrapped again.
        let (model, _) = there_and_back(&ddp, TwoHeads::new);
        let mut model = ddp.wrap(ddp.unwrap(model)).unwrap();
        let mut optim = SgdConfig::new().init();
        for step in 0..3 {
            let grads = one_head_each(&ddp, &model, step).unwrap();
            assert_eq!(grads.len(), 8, "both heads have a gradient");
            let before = parameters(&model);
            model = optim.step(0.1, model, grads);
            assert_same_bits(&ddp, &model);
            for (path, values) in parameters(&model) {
                assert_ne!(at(&before, &path), Some(&values[..]), "{path} was stepped");
            }
        }
    });
}

#[test]
fn ddp_34_a_gradient_that_loading_cut_off_is_an_error() {
    let runs = ranks(2).run_raw("ddp_34_a_gradient_that_loading_cut_off_is_an_error", || {
        let ddp = Ddp::from_env().unwrap();
        let (model, _) = there_and_back(&ddp, TwoHeads::new);
        one_head_each(&ddp, &model, 0).err().unwrap().to_string()
    });
    for (ending, text) in runs.into_iter().flatten() {
        assert_eq!(ending, Ending::Exit(0));
        let text = text.unwrap();
        // Each rank's own head, or the peer's words for its.
        let named = ["`a.weight`", "`b.weight`"]
            .iter()
            .any(|path| text.contains(path));
        assert!(
            named && text.contains("was loaded from a record after `wrap`"),
            "{text}"
        );
    }
}

/// A loss whose gradients are random, of sizes between 1e-8 and 1e8, and other ones on every rank.
fn wild_loss(model: &Mlp, step: u64, rank: usize) -> (Tensor<1>, Vec<f32>) {
    let raw = numbers(step * 8 + rank as u64, 2 * 212);
    let wild: Vec<f32> = raw
        .chunks(2)
        .map(|x| x[0] * 10f32.powf(8.0 * x[1]))
        .collect();
    fn part<const D: usize>(w: Tensor<D>, slopes: &[f32]) -> Tensor<1> {
        let slopes = TensorData::new(slopes.to_vec(), w.dims());
        (w.clone() * Tensor::from_data(slopes, &w.device())).sum()
    }
    let loss = part(model.a.weight.val(), &wild[..128])
        + part(model.a.bias.as_ref().unwrap().val(), &wild[128..144])
        + part(model.b.weight.val(), &wild[144..208])
        + part(model.b.bias.as_ref().unwrap().val(), &wild[208..]);
    (loss, wild)
}

#[test]
fn ddp_39_replicas_do_not_drift() {
    for (count, name) in [(3, "three"), (4, "four")] {
        let runs = ranks(count).named(name).run("ddp_39_replicas_do_not_drift", |ddp: Ddp| {
            device().seed(7);
            let mut model = ddp.wrap(Mlp::new(&device())).unwrap();
            let mut optim = AdamConfig::new().init();
            let mut prints = Vec::new();
            for step in 0..500 {
                let (loss, _) = wild_loss(&model, step, ddp.rank());
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                if step == 0 {
                    assert_mean(&gradients(&model, &grads), &model, count);
                }
                model = optim.step(0.01, model, grads);
                prints.push(fingerprint(&model));
                if step == 100 {
                    ddp.check_replicas(&model).unwrap();
                    let flipped = flip_one_bit(&model, ddp.rank() == 2);
                    let error = ddp.check_replicas(&flipped).unwrap_err();
                    assert!(matches!(&error, Error::ReplicasDiffer { peer: 2, path, .. } if path == "b.weight"), "{error}");
                }
            }
            ddp.check_replicas(&model).unwrap();
            prints
        });
        for run in &runs {
            assert_eq!(run[0].len(), 500);
            assert!(
                run[0].windows(2).all(|w| w[0] != w[1]),
                "every step changes the weights"
            );
            for (rank, prints) in run.iter().enumerate() {
                let first = prints.iter().zip(&run[0]).position(|(a, b)| a != b);
                assert_eq!(first, None, "rank {rank} differs from this step on");
            }
            assert_eq!(run[0], runs[0][0], "both transports give the same bits");
        }
    }
}

/// The gradients of the first step are the mean over `count` ranks, within f32 rounding of the largest term.
fn assert_mean(ours: &Weights, model: &Mlp, count: usize) {
    let terms: Vec<Vec<f32>> = (0..count).map(|rank| wild_loss(model, 0, rank).1).collect();
    let ours = ours.iter().flat_map(|(_, values)| values);
    for (i, x) in ours.enumerate() {
        let of_ranks = terms.iter().map(|t| f64::from(t[i]));
        let mean = of_ranks.clone().sum::<f64>() / count as f64;
        let largest = of_ranks.fold(0.0, |m: f64, x| m.max(x.abs()));
        assert!(
            (f64::from(*x) - mean).abs() <= 1e-6 * largest,
            "[{i}]: {x} is not {mean}"
        );
    }
}

/// A copy of `model`; with `flip` the lowest bit of one element of `b.weight` is another.
fn flip_one_bit(model: &Mlp, flip: bool) -> Mlp {
    let mut weights = parameters(model);
    let (_, values) = weights
        .iter_mut()
        .find(|(path, _)| path == "b.weight")
        .unwrap();
    values[17] = f32::from_bits(values[17].to_bits() ^ u32::from(flip));
    load(model.clone(), &weights)
}
