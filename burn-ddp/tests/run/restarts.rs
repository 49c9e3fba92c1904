//! Training under `--max-restarts` that goes on from its last checkpoint, whatever was killed and when.

use super::{Ended, Run, borrowed, marked::SCRATCH, program};
use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_ddp::{Ddp, Error, train::Snapshot, try_backward};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use rustix::process::{Pid, Signal, getpid, kill_process};
use std::{
    collections::BTreeMap,
    env,
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    process, thread,
    time::Duration,
};

/// How many kills; the default suits the gate.
const COUNT: &str = "BURN_DDP_TEST_KILLS";
/// A directory that several runs use after one another.
const SHARED: &str = "SHARED";
const RANKS: &str = "3";

#[derive(Module, Debug)]
struct Net {
    a: Linear,
    dropout: Dropout,
    b: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            a: LinearConfig::new(4, 8).init(device),
            dropout: DropoutConfig::new(0.5).init(),
            b: LinearConfig::new(8, 2).init(device),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let hidden = self.dropout.forward(self.a.forward(x).tanh());
        self.b.forward(hidden).powf_scalar(2.0).mean()
    }
}

/// A row for each item.
struct Rows;

impl Batcher<u32, Tensor<2>> for Rows {
    fn batch(&self, items: Vec<u32>, device: &Device) -> Tensor<2> {
        let value = |i: u32, k: u32| (i * 7 + k * 3) as f32 % 11.0 / 5.0 - 1.0;
        let values: Vec<f32> = items
            .iter()
            .flat_map(|i| (0..4).map(|k| value(*i, k)))
            .collect();
        Tensor::from_data(TensorData::new(values, [items.len(), 4]), device)
    }
}

/// Everything that a resumed run could lose: momentum, a schedule, the position in a shuffled epoch that ranks do not divide, and dropout.
fn train(ddp: &Ddp, scratch: &Path, until: u64) -> Result<(), Error> {
    let device = Device::flex().autodiff();
    let loader = ddp
        .loader(InMemDataset::new((0..50).collect()), Rows)
        .batch_size(2)
        .shuffle(1)
        .device(device.clone())
        .build()?;
    device.seed(1);
    let mut model = Net::new(&device);
    let mut optim = AdamConfig::new().init();
    let schedule = CosineAnnealingLrSchedulerConfig::new(0.01, until as usize);
    let mut schedule = schedule.init().unwrap();
    let mut step = 0;
    let checkpoints = ddp
        .checkpoints(scratch.join("checkpoints"))
        .every(2)
        .keep_last(2);
    if let Some(saved) = checkpoints.load()? {
        model = saved.model("model", model)?;
        optim = saved.optimizer("optimizer", optim)?;
        schedule = saved.scheduler("schedule", schedule)?;
        saved.loader("loader", &loader)?;
        step = saved.step();
    }
    let mut model = ddp.wrap(model)?;
    while step < until {
        for batch in loader.iter() {
            device.seed(ddp.step_seed(9, step));
            let grads = try_backward(&model.loss(batch?))?;
            let grads = GradientsParams::from_grads(grads, &model);
            model = optim.step(schedule.step(), model, grads);
            step += 1;
            if ddp.is_main() {
                append(&scratch.join(progress(&generation())), "step");
            }
            if checkpoints.is_due(step) {
                let snapshot = Snapshot::new()
                    .model("model", &model)
                    .optimizer("optimizer", &optim)
                    .scheduler("schedule", &schedule)
                    .loader("loader", &loader);
                checkpoints.save(step, snapshot)?;
            }
            if step == until {
                break;
            }
        }
    }
    let weights = [model.a.weight.val(), model.b.weight.val()];
    let weights = weights.map(|w| w.into_data().try_to_vec::<f32>().unwrap());
    let bits: Vec<u32> = weights.iter().flatten().map(|x| x.to_bits()).collect();
    fs::write(
        scratch.join(format!("note-final-{}", ddp.rank())),
        format!("{bits:x?}"),
    )
    .unwrap();
    ddp.barrier()
}

/// The gradient of the weight is the mean of the items.
#[derive(Module, Debug)]
struct Scalar {
    w: Param<Tensor<1>>,
}

/// The items themselves.
struct Items;

impl Batcher<u32, Vec<u32>> for Items {
    fn batch(&self, items: Vec<u32>, _: &Device) -> Vec<u32> {
        items
    }
}

/// Takes the items 0 to 29, logs which rank had which at which step, and saves at every second step and at the last. Rank 1 dies at step 3 of generation
/// 0 (`once`), or at the first step of every generation (`always`).
fn consume(ddp: &Ddp, scratch: &Path, until: u64, fate: &str) -> Result<(), Error> {
    let shared = PathBuf::from(env::var(SHARED).unwrap());
    let device = Device::flex().autodiff();
    let loader = ddp
        .loader(InMemDataset::new((0..30).collect()), Items)
        .shuffle(4)
        .build()?;
    let mut model = Scalar {
        w: Param::from_tensor(Tensor::zeros([1], &device)),
    };
    let mut optim = AdamConfig::new().init();
    let mut step = 0;
    let checkpoints = ddp.checkpoints(&shared).every(2);
    if let Some(saved) = checkpoints.load()? {
        model = saved.model("model", model)?;
        optim = saved.optimizer("optimizer", optim)?;
        saved.loader("loader", &loader)?;
        step = saved.step();
    }
    let mut model = ddp.wrap(model)?;
    let name = format!("note-{}-{}", generation(), ddp.rank());
    for items in loader.iter() {
        step += 1;
        let items = items?;
        append(&scratch.join(&name), &format!("{step} {}", items[0]));
        let dies = match fate {
            "once" => step == 3 && generation() == "0",
            "always" => true,
            _ => false,
        };
        if dies {
            // Not before all have their item in the log.
            ddp.barrier()?;
        }
        if dies && ddp.rank() == 1 {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        let loss = model.w.val() * items[0] as f32;
        let grads = GradientsParams::from_grads(try_backward(&loss)?, &model);
        model = optim.step(0.1, model, grads);
        if checkpoints.is_due(step) || step == until {
            let snapshot = Snapshot::new()
                .model("model", &model)
                .optimizer("optimizer", &optim)
                .loader("loader", &loader);
            checkpoints.save(step, snapshot)?;
        }
        if step == until {
            break;
        }
    }
    let hashes = ddp.param_hashes(&model)?;
    assert!(
        hashes.iter().all(|hash| *hash == hashes[0]),
        "O2: {hashes:?}"
    );
    ddp.barrier()
}

/// Not a test by itself: a rank.
#[test]
fn a_training_rank() {
    let Ok(part) = env::var("PART") else {
        return;
    };
    let scratch = PathBuf::from(env::var(SCRATCH).unwrap());
    let mut words = part.split(' ');
    let (what, until) = (
        words.next().unwrap(),
        words.next().unwrap().parse().unwrap(),
    );
    let result = burn_ddp::launch(|ddp: Ddp| match what {
        "train" => train(&ddp, &scratch, until),
        _ => consume(&ddp, &scratch, until, words.next().unwrap()),
    });
    if let Err(error) = &result {
        eprintln!("{error}");
    }
    process::exit(result.is_err().into());
}

fn generation() -> String {
    env::var("BURN_DDP_GENERATION").unwrap()
}

fn progress(generation: &str) -> String {
    format!("progress-{generation}")
}

fn append(path: &Path, line: &str) {
    let file = OpenOptions::new().create(true).append(true).open(path);
    writeln!(file.unwrap(), "{line}").unwrap();
}

fn start(nproc: &str, restarts: usize, part: &str, variables: &[(&str, &str)]) -> Run {
    let restarts = restarts.to_string();
    let options = ["--nproc", nproc, "--max-restarts", &restarts];
    let words = program("restarts::a_training_rank", part);
    let variables = [variables, &[("RAYON_NUM_THREADS", "1")]].concat();
    Run::start(&options, &borrowed(&words), &variables)
}

/// The items of each step, in order, from the logs of one generation.
fn steps(ended: &Ended, generation: u32) -> BTreeMap<u64, Vec<u32>> {
    let mut steps: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for (name, note) in ended.notes() {
        if name.starts_with(&format!("note-{generation}-")) {
            for line in note.lines() {
                let (step, item) = line.split_once(' ').unwrap();
                let items = steps.entry(step.parse().unwrap()).or_default();
                items.push(item.parse().unwrap());
            }
        }
    }
    steps.values_mut().for_each(|items| items.sort_unstable());
    steps
}

#[test]
fn ddp_30_each_item_once_over_a_crash_and_other_numbers_of_ranks() {
    let shared = tempfile::tempdir().unwrap();
    let variables = [(SHARED, shared.path().to_str().unwrap())];
    let run = |nproc, restarts, part| start(nproc, restarts, part, &variables).wait();

    let crashed = run("3", 1, "consume 4 once");
    assert_eq!(crashed.code, Some(0), "{crashed:#?}");
    crashed.says(&["rank 1 of 3 failed first", "restart 1 of 1, generation 1"]);
    let (before, after) = (steps(&crashed, 0), steps(&crashed, 1));
    assert_eq!(before.keys().copied().collect::<Vec<_>>(), [1, 2, 3]);
    // Step 3 had no checkpoint: it is done again, with the same items.
    assert_eq!(after.keys().copied().collect::<Vec<_>>(), [3, 4]);
    assert_eq!(before[&3], after[&3]);

    let shrunk = run("2", 0, "consume 7 never");
    assert_eq!(shrunk.code, Some(0), "{shrunk:#?}");
    let grown = run("3", 0, "consume 11 never");
    assert_eq!(grown.code, Some(0), "{grown:#?}");
    // 2 * 3 + 2 * 3 + 3 * 2 + 4 * 3 items.
    let once = before.range(..=2).chain(&after);
    let (shrunk, grown) = (steps(&shrunk, 0), steps(&grown, 0));
    let mut items: Vec<u32> = once
        .chain(&shrunk)
        .chain(&grown)
        .flat_map(|(_, items)| items.clone())
        .collect();
    items.sort_unstable();
    assert_eq!(items, (0..30).collect::<Vec<_>>());

    // Every generation begins with all three ranks, and dies at its first step, which the next does again.
    let failed = run("3", 1, "consume 15 always");
    assert_eq!(failed.code, Some(128 + 9), "{failed:#?}");
    failed.says(&["restart 1 of 1, generation 1"]);
    let names: Vec<_> = failed.notes().into_iter().map(|(name, _)| name).collect();
    let expected = ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"].map(|id| format!("note-{id}"));
    assert_eq!(names, expected);
    assert_eq!(steps(&failed, 0), steps(&failed, 1));
}

/// The ranks of one generation.
fn ranks_of(run: &Run, generation: usize) -> Vec<Pid> {
    let of_generation = |pid: &Pid| {
        let path = format!("/proc/{}/environ", pid.as_raw_nonzero());
        let environment = fs::read(path).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        let generation = format!("BURN_DDP_GENERATION={generation}");
        variables.any(|variable| variable == generation.as_bytes())
    };
    run.0.alive().into_iter().filter(of_generation).collect()
}

/// Kills a random rank, or all, of a generation that has come to a random step, at a random moment of it.
fn kill(run: &Run, generation: usize, random: &mut ChaCha8Rng) {
    let mut below = |bound: u64| random.next_u64() % bound;
    let (step, micros, everyone, victim) = (below(5), 1 << below(14), below(4) == 0, below(3));
    let progress = run.0.scratch.path().join(progress(&generation.to_string()));
    let done = || fs::read_to_string(&progress).map_or(0, |text| text.lines().count() as u64);
    while done() < step || ranks_of(run, generation).len() < 3 {
        let launched = generation + 1;
        run.0
            .check_limit(&format!("step {step} of generation {launched}"));
    }
    thread::sleep(Duration::from_micros(micros));
    let ranks = ranks_of(run, generation);
    let chosen = |i: usize| everyone || i as u64 == victim;
    let victims: Vec<_> = (0..ranks.len()).filter(|i| chosen(*i)).collect();
    assert!(
        !victims.is_empty(),
        "generation {generation} has ended by itself"
    );
    for i in victims {
        let _ = kill_process(ranks[i], Signal::KILL);
    }
}

/// SIGKILL at random moments, the start and the saves among them: the weights are those of a run that nobody disturbed, bit for bit.
#[test]
fn ddp_30_killed_at_random_moments_and_finished() {
    let count: usize = env::var(COUNT).map_or(4, |count| count.parse().unwrap());
    // More than all kills can see, at 4 steps and some 30 ms each.
    let part = format!("train {}", 20 + 40 * count);
    let finish = |ended: Ended| -> Vec<_> {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        let notes = ended.notes();
        assert_eq!(notes.len(), 3, "{notes:?}");
        notes
    };
    let undisturbed = finish(start(RANKS, 0, &part, &[]).wait());
    for (_, weights) in &undisturbed {
        assert_eq!(*weights, undisturbed[0].1);
    }

    let mut run = start(RANKS, count, &part, &[]);
    run.0.limit = Duration::from_secs(60 + 20 * count as u64);
    let mut random = ChaCha8Rng::seed_from_u64(count as u64);
    for generation in 0..count {
        kill(&run, generation, &mut random);
    }
    let ended = run.wait();
    ended.says(&[&format!("restart {count} of {count}, generation {count}")]);
    assert_eq!(finish(ended), undisturbed);
}
