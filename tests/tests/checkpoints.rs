//! Checkpoints of real ranks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::store::ModuleRecord;
use burn_ddp::{
    Ddp,
    data::DistributedLoader,
    group::host::Rendezvous,
    train::{CheckpointManager, Snapshot},
};
use burn_ddp_tests::{
    Ending,
    models::{Mlp, Scalar},
    oracle::{assert_same_bits, batch, device, fingerprint, parameters, square},
    ranks,
};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Serialize, Serializer};
use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Where the ranks of a test keep their files.
const DIR: &str = "BURN_DDP_TEST_DIR";

fn root() -> PathBuf {
    std::env::var_os(DIR).unwrap().into()
}

/// One directory per transport.
fn directory(ddp: &Ddp) -> PathBuf {
    root().join(ddp.group().transport())
}

/// Does something when it is written.
struct When<F: Fn()>(F);

impl<F: Fn()> Serialize for When<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.0)();
        serializer.serialize_u8(7)
    }
}

#[test]
fn ddp_07_a_all_wait_for_a_slow_writer() {
    const SLOW: Duration = Duration::from_secs(2);
    let dir = tempfile::tempdir().unwrap();
    // The operation time-out is shorter than the save.
    let runs = ranks(2)
        .env(DIR, dir.path().to_str().unwrap())
        .timeout(1)
        .run("ddp_07_a_all_wait_for_a_slow_writer", |ddp: Ddp| {
            let model = ddp.wrap(Mlp::new(&device())).unwrap();
            let checkpoints = ddp.checkpoints(directory(&ddp));
            let slow = When(|| thread::sleep(SLOW));
            let snapshot = Snapshot::new().value("slow", &slow).model("model", &model);
            let start = Instant::now();
            checkpoints.save(1, snapshot).unwrap();
            let published = directory(&ddp).join("step-1/manifest.json").exists();
            (start.elapsed() >= SLOW, published)
        });
    for run in runs {
        assert_eq!(run, [(true, true); 2]);
    }
}

#[test]
fn ddp_07_b_a_save_that_was_killed_leaves_the_step_before() {
    let test = "ddp_07_b_a_save_that_was_killed_leaves_the_step_before";
    let dir = tempfile::tempdir().unwrap();
    let start = || ranks(2).env(DIR, dir.path().to_str().unwrap());
    let killed = start().named("killed").run_raw(test, || {
        let ddp = Ddp::from_env().unwrap();
        let checkpoints = ddp.checkpoints(directory(&ddp));
        let model = ddp.wrap(Mlp::new(&device())).unwrap();
        checkpoints
            .save(1, Snapshot::new().model("model", &model))
            .unwrap();
        let die = When(|| kill_process(getpid(), Signal::KILL).unwrap());
        // The model's file is complete when rank 0 dies.
        let snapshot = Snapshot::new().model("model", &model).value("die", &die);
        checkpoints.save(2, snapshot).unwrap_err().to_string()
    });
    let loaded = start().named("loaded").watch(test, || {
        let ddp = Ddp::from_env().unwrap();
        let checkpoints = ddp.checkpoints(directory(&ddp));
        let saved = checkpoints.load().unwrap().unwrap();
        let model = saved.model("model", Mlp::new(&device())).unwrap();
        let first = (saved.step(), fingerprint(&model));
        checkpoints
            .save(2, Snapshot::new().model("model", &model))
            .unwrap();
        (first, checkpoints.load().unwrap().unwrap().step())
    });
    for run in killed {
        assert_eq!(run[0].0, Ending::Signal(9));
        let error = run[1].1.as_ref().unwrap();
        assert!(error.contains("lost rank 0"), "{error}");
    }
    for run in loaded {
        let found = run[0].finished();
        assert_eq!(found.0.0, 1);
        assert_eq!(found.1, 2);
        assert_eq!(run[1].finished(), found);
        let warning = &run[0].stderr;
        assert!(
            warning.contains("saves that did not end: .step-2.tmp-"),
            "{warning}"
        );
    }
    for transport in fs::read_dir(dir.path()).unwrap() {
        let entries = fs::read_dir(transport.unwrap().path()).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, [".lock", "latest", "step-1", "step-2"]);
    }
}

/// Rank 1 is given a directory that does not exist, which is how a disk of another machine looks.
#[test]
fn ddp_07_c_rank_0_decides_what_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let runs = ranks(3).env(DIR, dir.path().to_str().unwrap()).run(
        "ddp_07_c_rank_0_decides_what_is_loaded",
        |ddp: Ddp| {
            let (mine, hidden) = (directory(&ddp), directory(&ddp).join("hidden"));
            let checkpoints = ddp.checkpoints([&mine, &hidden, &mine][ddp.rank()]);
            assert!(checkpoints.load().unwrap().is_none());
            let model = ddp.wrap(Mlp::new(&device())).unwrap();
            let seen = ddp.rank() as u32 * 100;
            let snapshot = Snapshot::new().model("model", &model);
            checkpoints
                .save(5, snapshot.rank_value("seen", &seen))
                .unwrap();
            let saved = checkpoints.load().unwrap().unwrap();
            let loaded = saved.model("model", Mlp::new(&device())).unwrap();
            assert_eq!(fingerprint(&loaded), fingerprint(&model));
            assert!(!hidden.exists());
            // Broken for rank 0 is broken for all.
            ddp.barrier().unwrap();
            if ddp.is_main() {
                fs::remove_file(mine.join("step-5/model.bpk")).unwrap();
            }
            let error = checkpoints.load().unwrap_err().to_string();
            let own: Option<u32> = saved.rank_value("seen").unwrap();
            (saved.step(), own, error)
        },
    );
    for run in runs {
        for (rank, (step, own, error)) in run.into_iter().enumerate() {
            assert_eq!((step, own), (5, Some(rank as u32 * 100)));
            assert!(error.starts_with(&format!("rank {rank}: ")), "{error}");
            assert!(error.contains("are damaged"), "{error}");
        }
    }
}

/// Two jobs of one rank each that know nothing of each other save the same steps over and over, while each loads what is there.
#[test]
fn ddp_07_d_two_savers_and_one_winner() {
    let test = "ddp_07_d_two_savers_and_one_winner";
    let dir = tempfile::tempdir().unwrap();
    let runs = ranks(2)
        .env(DIR, dir.path().to_str().unwrap())
        .over("shm")
        .run(test, |ddp: Ddp| {
            let alone = Rendezvous::new(0, 1, "127.0.0.1", 0).unwrap();
            let job = Ddp::connect(alone).unwrap();
            let checkpoints = job.checkpoints(directory(&ddp)).keep_last(2);
            let mine = ddp.rank();
            ddp.barrier().unwrap();
            let mut loads = 0;
            for step in (0..30).map(|i| 1 + i / 3) {
                let snapshot = Snapshot::new()
                    .value("a", &mine)
                    .bytes("large", || Ok::<_, String>(vec![mine as u8; 100_000]))
                    .value("b", &mine);
                checkpoints.save(step, snapshot).unwrap();
                let saved = checkpoints.load().unwrap().unwrap();
                // The other may replace it between the look and the read; then that is an error and nothing mixed.
                let read = || -> Result<[usize; 3], burn_ddp::Error> {
                    let large = saved.bytes("large")?;
                    assert!(large.iter().all(|byte| *byte == large[0]));
                    let [a, b] = [saved.value("a")?, saved.value("b")?];
                    Ok([a, large[0].into(), b])
                };
                match read() {
                    Ok([a, large, b]) => assert!(a == large && large == b),
                    Err(error) => assert!(error.to_string().contains("no checkpoint was loaded")),
                }
                loads += 1;
            }
            ddp.barrier().unwrap();
            let saved = checkpoints.load().unwrap().unwrap();
            let winner: [usize; 2] = ["a", "b"].map(|name| saved.value(name).unwrap());
            (loads, saved.step(), winner)
        });
    for run in runs {
        let (loads, step, [a, b]) = run[0];
        assert_eq!((loads, step), (30, 10));
        assert!(a == b && a < 2);
        assert_eq!(run[1], run[0]);
    }
    let names = fs::read_dir(dir.path().join("shm")).unwrap();
    let mut names: Vec<_> = names.map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [".lock", "latest", "step-10", "step-9"]);
}

/// Plain to wrapped and back, by Burn's own files.
#[test]
fn ddp_34_records_are_those_of_the_plain_model() {
    let test = "ddp_34_records_are_those_of_the_plain_model";
    let dir = tempfile::tempdir().unwrap();
    let plain = dir.path().join("plain.bpk");
    let runs = ranks(2).env(DIR, dir.path().to_str().unwrap());
    let runs = if burn_ddp_tests::in_rank() {
        runs
    } else {
        Mlp::new(&device()).save_file(&plain).unwrap();
        runs
    };
    let runs = runs.run(test, |ddp: Ddp| {
        let plain = root().join("plain.bpk");
        let model = match ddp.is_main() {
            true => Mlp::new(&device()).load_file(&plain),
            false => Mlp::new(&device()),
        };
        let model = ddp.wrap(model).unwrap();
        let checkpoints = ddp.checkpoints(directory(&ddp));
        checkpoints
            .save(1, Snapshot::new().model("model", &model))
            .unwrap();
        let file = directory(&ddp).join("step-1/model.bpk");
        let same = fs::read(&file).unwrap() == fs::read(&plain).unwrap();
        let back = Mlp::new(&device()).load_file(&file);
        let names = |model| parameters(model).into_iter().map(|(path, _)| path);
        let saved = checkpoints.load().unwrap().unwrap();
        let loaded = saved.model("model", Mlp::new(&device())).unwrap();
        // On the device that each rank has given it, autodiff included.
        assert_eq!(loaded.a.weight.device(), device());
        assert!(loaded.a.weight.is_require_grad());
        let ids = [&back, &loaded].map(|m| m.a.weight.id.to_string());
        (
            same,
            names(&back).collect::<Vec<_>>(),
            fingerprint(&back) == fingerprint(&model),
            ids,
        )
    });
    let record = ModuleRecord::load(&plain).unwrap();
    for (same, names, equal, [back, loaded]) in runs.into_iter().flatten() {
        assert!(same && equal);
        assert_eq!(names, ["a.weight", "a.bias", "b.weight", "b.bias"]);
        assert_eq!(names.len(), record.len());
        assert_eq!(back, loaded);
    }
}

struct Rows;

impl Batcher<u64, Tensor<2>> for Rows {
    fn batch(&self, items: Vec<u64>, device: &Device) -> Tensor<2> {
        let rows = items.iter().map(|item| batch(*item, 0..1, [0, 8], device));
        Tensor::cat(rows.collect(), 0)
    }
}

/// All that a run consists of.
struct Run {
    checkpoints: CheckpointManager,
    model: Mlp,
    optim: ModuleOptimizer,
    loader: DistributedLoader<Tensor<2>>,
    step: u64,
}

impl Run {
    /// The batch of a step has 12 rows, however many ranks share it.
    fn start(ddp: &Ddp, directory: &Path) -> Self {
        let checkpoints = ddp.checkpoints(directory);
        let momentum = MomentumConfig::new().with_momentum(0.9);
        let mut optim = SgdConfig::new().with_momentum(Some(momentum)).init();
        let loader = ddp
            .loader(InMemDataset::new((0..60u64).collect()), Rows)
            .batch_size(12 / ddp.world_size())
            .shuffle(3)
            .device(device())
            .build()
            .unwrap();
        let (mut model, mut step) = (Mlp::new(&device()), 0);
        if let Some(saved) = checkpoints.load().unwrap() {
            model = saved.model("model", model).unwrap();
            optim = saved.optimizer("optimizer", optim).unwrap();
            saved.loader("loader", &loader).unwrap();
            step = saved.step();
        }
        Self {
            model: ddp.wrap(model).unwrap(),
            checkpoints,
            optim,
            loader,
            step,
        }
    }

    fn train(&mut self, until: u64) {
        while self.step < until {
            for rows in self.loader.iter() {
                let loss = square(self.model.forward(rows.unwrap()));
                let grads = GradientsParams::from_grads(loss.backward(), &self.model);
                self.model = self.optim.step(0.1, self.model.clone(), grads);
                self.step += 1;
                if self.step == until {
                    break;
                }
            }
        }
    }

    fn save(&self) {
        let snapshot = Snapshot::new()
            .model("model", &self.model)
            .optimizer("optimizer", &self.optim)
            .loader("loader", &self.loader);
        self.checkpoints.save(self.step, snapshot).unwrap();
    }
}

/// In the middle of an epoch of five steps, with momentum. On as many ranks the bits are those of a run that was not interrupted; on more or
/// fewer the sums of a step are ordered differently, so the weights are compared with one process's.
#[test]
fn ddp_30_a_run_goes_on_at_the_exact_sample_on_any_number_of_ranks() {
    let test = "ddp_30_a_run_goes_on_at_the_exact_sample_on_any_number_of_ranks";
    let dir = tempfile::tempdir().unwrap();
    let on = |count, name| {
        ranks(count)
            .env(DIR, dir.path().to_str().unwrap())
            .over("tcp")
            .named(name)
    };
    let first = on(3, "3").run(test, |ddp: Ddp| {
        let dir = root();
        // One starting point for all.
        let start = Run::start(&ddp, &dir);
        start.save();
        let mut straight = Run::start(&ddp, &dir);
        straight.train(12);
        let mut first = Run::start(&ddp, &dir);
        first.train(7);
        first.save();
        let mut second = Run::start(&ddp, &dir);
        assert_eq!(second.step, 7);
        second.train(12);
        assert_same_bits(&ddp, &second.model);
        assert_eq!(fingerprint(&second.model), fingerprint(&straight.model));
        parameters(&straight.model)
    });
    let resume = |ddp: Ddp| {
        let mut run = Run::start(&ddp, &root());
        assert_eq!(run.step, 7);
        run.train(12);
        assert_same_bits(&ddp, &run.model);
        parameters(&run.model)
    };
    let others = [
        on(1, "1").run(test, resume),
        on(2, "2").run(test, resume),
        on(4, "4").run(test, resume),
    ];
    let Some(first) = first.first() else { return };
    for run in others.into_iter().flatten().flatten() {
        burn_ddp_tests::oracle::assert_close(&run, &first[0], 1e-6);
    }
}

/// The stream of a step is a function of seed, rank and step, and of nothing else.
#[test]
fn random_streams_of_steps() {
    let runs = ranks(2)
        .over("shm")
        .run("random_streams_of_steps", |ddp: Ddp| {
            let device = Device::flex();
            let draw = |step| {
                device.seed(ddp.step_seed(5, step));
                let random = Tensor::<1>::random([4], burn::tensor::Distribution::Default, &device);
                random.into_data().try_to_vec::<f32>().unwrap()
            };
            [draw(1), draw(2), draw(1)]
        });
    for run in runs {
        let [one, two] = &run[..] else {
            panic!("{run:?}")
        };
        assert_eq!(one[0], one[2]);
        assert!(one[0] != one[1] && one[0] != two[0] && one[1] != two[0] && one[0] != two[1]);
    }
}

/// Two models under two names, one of them a single number.
#[test]
fn several_models_in_one_step() {
    let dir = tempfile::tempdir().unwrap();
    let runs = ranks(2)
        .env(DIR, dir.path().to_str().unwrap())
        .over("shm")
        .run("several_models_in_one_step", |ddp: Ddp| {
            let models = [1.5, 2.5].map(|w| ddp.wrap(Scalar::new(w, &device())).unwrap());
            let checkpoints = ddp.checkpoints(directory(&ddp));
            let snapshot = Snapshot::new()
                .model("generator", &models[0])
                .model("critic", &models[1]);
            checkpoints.save(1, snapshot).unwrap();
            let saved = checkpoints.load().unwrap().unwrap();
            ["critic", "generator"].map(|name| {
                let model = saved.model(name, Scalar::new(0.0, &device())).unwrap();
                parameters(&model)[0].1[0]
            })
        });
    assert_eq!(runs, [[[2.5, 1.5]; 2]]);
}
