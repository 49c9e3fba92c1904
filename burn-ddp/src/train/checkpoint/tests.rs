//! One process with a directory, and two ranks as threads where that is the point. What a file can hold is tried here.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::{CheckpointError, CheckpointManager, Snapshot, manifest::Manifest};
use crate::{Ddp, Error, group::thread::ThreadGroup};
use burn::lr_scheduler::{
    cosine::CosineAnnealingLrSchedulerConfig, exponential::ExponentialLrSchedulerConfig,
    step::StepLrSchedulerConfig,
};
use burn::module::{Module, Param};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use proptest::prelude::*;
use serde::{Serialize, Serializer, ser};
use std::{fs, path::Path, sync::Arc, thread};

fn ranks(count: usize) -> Vec<Ddp> {
    let join = |(rank, group)| {
        thread::spawn(move || Ddp::from_group(Arc::new(group), rank, count).unwrap())
    };
    let joining: Vec<_> = ThreadGroup::new(count)
        .into_iter()
        .enumerate()
        .map(join)
        .collect();
    joining.into_iter().map(|t| t.join().unwrap()).collect()
}

fn alone() -> Ddp {
    ranks(1).remove(0)
}

/// What each of `count` ranks returns.
fn on<T: Send + 'static>(count: usize, body: impl Fn(Ddp) -> T + Send + Sync + 'static) -> Vec<T> {
    let body = Arc::new(body);
    let start = |ddp| {
        let body = body.clone();
        thread::spawn(move || body(ddp))
    };
    let running: Vec<_> = ranks(count).into_iter().map(start).collect();
    running.into_iter().map(|t| t.join().unwrap()).collect()
}

/// Saves `value` at each of `steps`.
fn save(checkpoints: &CheckpointManager, steps: &[u64]) {
    for &step in steps {
        let value = step * 10;
        checkpoints
            .save(step, Snapshot::new().value("x", &value))
            .unwrap();
    }
}

/// The newest step and its value.
fn newest(checkpoints: &CheckpointManager) -> Option<(u64, u64)> {
    let saved = checkpoints.load().unwrap()?;
    Some((saved.step(), saved.value("x").unwrap()))
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn text<T>(result: Result<T, Error>) -> String {
    match result {
        Err(error) => error.to_string(),
        Ok(_) => panic!("no error"),
    }
}

#[test]
fn the_last_steps_and_every_nth_stay() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/b");
    let checkpoints = alone()
        .checkpoints(&path)
        .keep_last(2)
        .keep_every(4)
        .every(2);
    assert!(checkpoints.load().unwrap().is_none());
    let due: Vec<u64> = (0..9).filter(|step| checkpoints.is_due(*step)).collect();
    assert_eq!(due, [2, 4, 6, 8]);
    save(&checkpoints, &[2, 4, 6, 8, 10]);
    let expected = [".lock", "latest", "step-10", "step-4", "step-8"];
    assert_eq!(names(&path), expected);
    assert_eq!(
        fs::read_to_string(path.join("latest")).unwrap(),
        "step-10\n"
    );
    assert_eq!(newest(&checkpoints), Some((10, 100)));
}

#[test]
fn a_run_that_goes_back_replaces_the_steps_of_the_one_before() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = alone().checkpoints(dir.path()).keep_last(1).keep_every(1);
    save(&checkpoints, &[1, 2, 3]);
    assert_eq!(checkpoints.load_step(1).unwrap().step(), 1);
    checkpoints
        .save(2, Snapshot::new().value("x", &7u64))
        .unwrap();
    // Step 3 is of the run that was given up.
    assert_eq!(newest(&checkpoints), Some((2, 7)));
    checkpoints
        .save(3, Snapshot::new().value("x", &8u64))
        .unwrap();
    assert_eq!(newest(&checkpoints), Some((3, 8)));
    assert_eq!(
        names(dir.path()),
        [".lock", "latest", "step-1", "step-2", "step-3"]
    );
    let error = text(checkpoints.load_step(4));
    assert!(
        error.contains("step-4") && error.contains("manifest.json"),
        "{error}"
    );
}

/// What is done to a step's directory.
type Damage = (&'static str, fn(&Path));

/// Step 2 damaged in one way after the other: step 1 is loaded.
#[test]
fn ddp_07_damaged_steps_are_passed_over() {
    let damages: [Damage; 9] = [
        ("cut short", |step| {
            let file = fs::File::options()
                .write(true)
                .open(step.join("x.postcard"));
            file.unwrap().set_len(0).unwrap();
        }),
        ("one bit", |step| {
            let mut bytes = fs::read(step.join("x.postcard")).unwrap();
            bytes[0] ^= 1;
            fs::write(step.join("x.postcard"), bytes).unwrap();
        }),
        ("a lost file", |step| {
            fs::remove_file(step.join("x.postcard")).unwrap()
        }),
        ("a directory for a file", |step| {
            fs::remove_file(step.join("x.postcard")).unwrap();
            fs::create_dir(step.join("x.postcard")).unwrap();
        }),
        ("no manifest", |step| {
            fs::remove_file(step.join("manifest.json")).unwrap()
        }),
        ("half a manifest", |step| {
            let bytes = fs::read(step.join("manifest.json")).unwrap();
            fs::write(step.join("manifest.json"), &bytes[..bytes.len() / 2]).unwrap();
        }),
        ("another step", |step| {
            fs::copy(
                step.with_file_name("step-1/manifest.json"),
                step.join("manifest.json"),
            )
            .unwrap();
        }),
        ("a file for the directory", |step| {
            fs::remove_dir_all(step).unwrap();
            fs::write(step, "").unwrap();
        }),
        ("a newer format", |step| {
            let manifest = fs::read_to_string(step.join("manifest.json")).unwrap();
            let newer = manifest.replace("\"format\": 1", "\"format\": 2");
            assert_ne!(newer, manifest);
            fs::write(step.join("manifest.json"), newer).unwrap();
        }),
    ];
    for (name, damage) in damages {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = alone().checkpoints(dir.path());
        save(&checkpoints, &[1, 2]);
        assert_eq!(newest(&checkpoints), Some((2, 20)));
        damage(&dir.path().join("step-2"));
        assert_eq!(newest(&checkpoints), Some((1, 10)), "{name}");
        // And the next save mends it.
        save(&checkpoints, &[2]);
        assert_eq!(newest(&checkpoints), Some((2, 20)), "{name}");
    }
}

#[test]
fn nothing_intact_is_an_error_and_leftovers_are_not_steps() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = alone().checkpoints(dir.path());
    let leftover = dir.path().join(".step-9.tmp-0123456789abcdef");
    fs::create_dir(&leftover).unwrap();
    fs::write(leftover.join("manifest.json"), "{}").unwrap();
    fs::write(dir.path().join("latest"), [0xff, 0xfe]).unwrap();
    fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    assert!(checkpoints.load().unwrap().is_none());
    save(&checkpoints, &[1]);
    assert_eq!(
        names(dir.path()),
        [".lock", "latest", "notes.txt", "step-1"]
    );
    fs::remove_file(dir.path().join("step-1/x.postcard")).unwrap();
    let error = text(checkpoints.load());
    assert!(
        error.contains("all steps in ") && error.contains("step-1"),
        "{error}"
    );
}

/// A manifest that points out of its directory, or counts ranks that it does not have.
#[test]
fn a_manifest_is_checked_before_it_is_followed() {
    let entry = |name: &str, rank: &str| {
        format!(r#"{{"name":"{name}","kind":"value","rank":{rank},"bytes":0,"sha256":""}}"#)
    };
    let manifest = |entries: &str| {
        let text = format!(
            r#"{{"format":1,"burn_ddp":"0","step":1,"world_size":2,"entries":[{entries}]}}"#
        );
        Manifest::from_text(text.as_bytes())
    };
    assert!(manifest(&entry("x", "null")).is_ok());
    let both = [entry("x", "1"), entry("x", "0")].join(",");
    assert!(manifest(&both).is_ok());
    for bad in ["../x", "/etc/passwd", "", "a.b", "..", "a\\\\b", "\\u0000"] {
        let error = manifest(&entry(bad, "null")).unwrap_err();
        assert!(error.contains("cannot name an entry"), "{bad}: {error}");
    }
    for bad in [
        entry("x", "0"),
        [entry("x", "0"), entry("x", "2")].join(","),
        [entry("x", "0"), entry("x", "0")].join(","),
        [entry("x", "null"), entry("x", "null")].join(","),
        [entry("x", "null"), entry("x", "0")].join(","),
        entry("x", "18446744073709551615"),
    ] {
        let error = manifest(&bad).unwrap_err();
        assert!(error.contains("for each of 2 ranks"), "{bad}: {error}");
    }
}

proptest! {
    #[test]
    fn no_manifest_makes_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), at in 0usize..400, with: u8) {
        let _ = Manifest::from_text(&bytes);
        let mut text = Manifest::new(3, 2).to_text().unwrap().into_bytes();
        let at = at % text.len();
        text[at] = with;
        let _ = Manifest::from_text(&text);
    }
}

#[derive(Module, Debug)]
struct Vector {
    w: Param<Tensor<1>>,
}

/// A vector and an optimizer after one step on it.
fn trained(mut optim: ModuleOptimizer) -> (Vector, ModuleOptimizer) {
    let _turn = crate::autodiff::tests::one_at_a_time();
    let device = Device::flex().autodiff();
    let w = Param::from_tensor(Tensor::from_data([1.0, -2.0], &device));
    let model = Vector { w };
    let grads = GradientsParams::from_grads((model.w.val() * 2.0).sum().backward(), &model);
    let model = optim.step(0.5, model, grads);
    (model, optim)
}

fn values(model: &Vector) -> Vec<f32> {
    model.w.val().into_data().try_to_vec().unwrap()
}

#[test]
fn an_entry_is_loaded_as_what_it_is_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = alone().checkpoints(dir.path());
    let (model, optim) = trained(AdamConfig::new().init());
    let mut cosine = CosineAnnealingLrSchedulerConfig::new(0.5, 10)
        .init()
        .unwrap();
    let rates: Vec<f64> = (0..3).map(|_| cosine.step().base()).collect();
    assert!(rates[2] < 0.5);
    let exact = [0.1f64, f64::NEG_INFINITY, 1.0 / 3.0, 5e-324];
    let snapshot = Snapshot::new()
        .model("model", &model)
        .optimizer("optimizer", &optim)
        .scheduler("scheduler", &cosine)
        .value("exact", &exact)
        .bytes("raw", || Ok::<_, Error>(vec![1, 2, 3]));
    checkpoints.save(1, snapshot).unwrap();

    let saved = checkpoints.load().unwrap().unwrap();
    let fresh = trained(SgdConfig::new().init()).0;
    let loaded = saved.model("model", fresh).unwrap();
    assert_eq!(loaded.w.id, model.w.id);
    assert_eq!(values(&loaded), values(&model));
    let resumed = saved
        .optimizer("optimizer", AdamConfig::new().init())
        .unwrap();
    assert_eq!(
        resumed.into_bytes().unwrap()[..],
        optim.into_bytes().unwrap()[..]
    );
    let again = CosineAnnealingLrSchedulerConfig::new(0.5, 10)
        .init()
        .unwrap();
    let mut again = saved.scheduler("scheduler", again).unwrap();
    assert_eq!(
        again.step().base().to_bits(),
        cosine.step().base().to_bits()
    );
    assert_eq!(saved.value::<[f64; 4]>("exact").unwrap(), exact);
    assert_eq!(saved.bytes("raw").unwrap(), [1, 2, 3]);

    // Without a check Burn would begin with an empty state.
    let error = text(saved.optimizer("optimizer", SgdConfig::new().init()));
    assert!(error.contains("takes 0 of its 2 tensors"), "{error}");
    let other = ExponentialLrSchedulerConfig::new(0.5, 0.9).init().unwrap();
    let error = text(saved.scheduler("scheduler", other));
    assert!(error.contains("another kind of scheduler"), "{error}");
    let step = StepLrSchedulerConfig::new(0.5, 3).init().unwrap();
    assert!(saved.scheduler("scheduler", step).is_err());
    let device = Device::flex();
    let short = Vector {
        w: Param::from_tensor(Tensor::from_data([1.0], &device)),
    };
    let error = text(saved.model("model", short));
    let expected = "rank 0: `model` of the checkpoint of step 1 cannot be used here: `w` is [1] in this model and [2] in the checkpoint. \
        Build the model with the settings it was saved with, or name another directory for this one";
    assert_eq!(error, expected);
    assert!(text(saved.value::<u64>("exact")).contains("left over"));
    let error = text(saved.value::<u64>("model"));
    assert!(error.contains("no value named `model`"), "{error}");
    assert!(error.contains("optimizer `optimizer`"), "{error}");
}

/// What is in a file may be a record of anybody's; its hash is right.
#[test]
fn records_of_nonsense_are_errors() {
    use burn::optim::OptimizerRecord;
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = alone().checkpoints(dir.path());
    let (model, _) = trained(SgdConfig::new().init());
    let model_bytes = || model.clone().into_record().into_bytes();
    assert!(OptimizerRecord::from_bytes(model_bytes().unwrap()).is_ok());
    // The files of `bytes` entries, passed off as records.
    let snapshot = Snapshot::new()
        .bytes("m", || Ok::<_, Error>(b"BURNnonsense".to_vec()))
        .bytes("o", model_bytes)
        .bytes("s", || Ok::<_, Error>(Vec::new()));
    checkpoints.save(1, snapshot).unwrap();
    let step = dir.path().join("step-1");
    let manifest = fs::read_to_string(step.join("manifest.json")).unwrap();
    let mut kinds = ["model", "optimizer", "scheduler"].into_iter();
    let lines: Vec<_> = manifest
        .lines()
        .map(|line| match line.contains("\"bytes\",") {
            true => line.replace("bytes", kinds.next().unwrap()),
            false => line.to_owned(),
        })
        .collect();
    fs::write(step.join("manifest.json"), lines.join("\n")).unwrap();
    for name in ["m", "o", "s"] {
        fs::rename(
            step.join(format!("{name}.bin")),
            step.join(format!("{name}.bpk")),
        )
        .unwrap();
    }
    let saved = checkpoints.load().unwrap().unwrap();
    let unfit = |error: Error| matches!(error, Error::Checkpoint(CheckpointError::Unfit { .. }));
    assert!(unfit(saved.model("m", model.clone()).unwrap_err()));
    let adam = AdamConfig::new().init();
    assert!(saved.optimizer("o", adam).is_err_and(unfit));
    let cosine = CosineAnnealingLrSchedulerConfig::new(0.5, 10)
        .init()
        .unwrap();
    assert!(saved.scheduler("s", cosine).is_err_and(unfit));
}

#[test]
fn names_that_are_no_file_names_are_refused_on_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    let errors = on(2, move |ddp| {
        let checkpoints = ddp.checkpoints(&path);
        let twice = Snapshot::new().value("x", &1).value("X", &2);
        let bad = Snapshot::new().value("a/b", &1);
        [
            text(checkpoints.save(1, twice)),
            text(checkpoints.save(1, bad)),
        ]
    });
    for [twice, bad] in errors {
        assert!(twice.contains("two entries are named `X`"), "{twice}");
        assert!(bad.contains("cannot name an entry"), "{bad}");
    }
}

/// Fails to encode on the ranks of one number.
struct Fails(bool);

impl Serialize for Fails {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            true => Err(ser::Error::custom("out of luck")),
            false => serializer.serialize_unit(),
        }
    }
}

#[test]
fn a_rank_that_fails_is_named_on_all_and_leaves_nothing() {
    for failing in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        let errors = on(2, move |ddp| {
            let checkpoints = ddp.checkpoints(&path);
            let value = Fails(ddp.rank() == failing);
            let failed = checkpoints
                .save(1, Snapshot::new().rank_value("x", &value))
                .unwrap_err();
            assert_eq!(failed.is_secondary(), ddp.rank() != failing);
            checkpoints
                .save(2, Snapshot::new().rank_value("x", &ddp.rank()))
                .unwrap();
            failed.to_string()
        });
        for error in errors {
            let expected = format!("step 1 was not saved: rank {failing}: encoding `x`");
            assert!(error.contains(&expected), "{error}");
        }
        assert_eq!(names(dir.path()), [".lock", "latest", "step-2"]);
    }
}

#[test]
fn ranks_that_save_different_things_are_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    let errors = on(2, move |ddp| {
        let checkpoints = ddp.checkpoints(&path);
        let step = 4 + ddp.rank() as u64;
        let steps = text(checkpoints.save(step, Snapshot::new().value("x", &1)));
        let name = ["x", "y"][ddp.rank()];
        let names = text(checkpoints.save(4, Snapshot::new().value(name, &1)));
        [steps, names]
    });
    for (rank, [steps, names]) in errors.iter().enumerate() {
        for (error, sides) in [
            (steps, ["step 4", "step 5"]),
            (names, ["value `x`", "value `y`"]),
        ] {
            assert!(
                error.starts_with(&format!("rank {rank}: the ranks save different")),
                "{error}"
            );
            assert!(sides.iter().all(|side| error.contains(side)), "{error}");
        }
    }
    assert_eq!(names(dir.path()), [".lock"]);
}

/// A disk that refuses, after all have encoded: the directory is a file.
#[test]
fn a_directory_that_cannot_be_written_is_an_error_on_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, "").unwrap();
    let errors = on(2, move |ddp| {
        let checkpoints = ddp.checkpoints(&path);
        let saved = checkpoints.save(1, Snapshot::new().rank_value("x", &1));
        [text(saved), text(checkpoints.load())]
    });
    for error in errors.into_iter().flatten() {
        assert!(
            error.contains("rank 0: ") && error.contains("file"),
            "{error}"
        );
    }
}

#[test]
fn values_of_ranks_come_back_to_any_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    on(3, {
        let path = path.clone();
        move |ddp| {
            // Of different lengths, and none at all.
            let rank = ddp.rank();
            let value = vec![rank as u8; 2 * rank];
            let snapshot = Snapshot::new().rank_value("x", &value).value("y", &rank);
            ddp.checkpoints(&path).save(1, snapshot).unwrap();
        }
    });
    for count in [1, 2, 4] {
        let path = path.clone();
        let found = on(count, move |ddp| {
            let saved = ddp.checkpoints(&path).load().unwrap().unwrap();
            assert_eq!(saved.world_size(), 3);
            assert!(saved.contains("x") && !saved.contains("z"));
            assert_eq!(saved.value::<usize>("y").unwrap(), 0);
            let own: Option<Vec<u8>> = saved.rank_value("x").unwrap();
            (own, saved.rank_values::<Vec<u8>>("x").unwrap())
        });
        let all = [vec![], vec![1, 1], vec![2, 2, 2, 2]];
        for (rank, (own, every)) in found.into_iter().enumerate() {
            assert_eq!(own.as_ref(), all.get(rank));
            assert_eq!(every, all);
        }
    }
}

/// More than one piece travels.
#[test]
fn large_values_arrive_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    let found = on(2, move |ddp| {
        let checkpoints = ddp.checkpoints(&path);
        let value: Vec<u8> = (0..33 << 20).map(|i: u32| (i >> 8) as u8).collect();
        let snapshot = Snapshot::new().rank_value("x", &value);
        checkpoints.save(1, snapshot).unwrap();
        let saved = checkpoints.load().unwrap().unwrap();
        saved
            .rank_values::<Vec<u8>>("x")
            .unwrap()
            .iter()
            .all(|x| *x == value)
    });
    assert_eq!(found, [true, true]);
}

/// A file that changes after it was found intact.
#[test]
fn a_file_that_changes_under_a_reader_is_an_error_on_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    let errors = on(2, move |ddp| {
        let checkpoints = ddp.checkpoints(&path);
        let snapshot = Snapshot::new()
            .value("x", &1u8)
            .value("y", &1u8)
            .value("z", &1u8);
        checkpoints.save(1, snapshot).unwrap();
        let saved = checkpoints.load().unwrap().unwrap();
        if ddp.is_main() {
            let step = path.join("step-1");
            fs::write(step.join("x.postcard"), [2]).unwrap();
            fs::write(step.join("y.postcard"), []).unwrap();
            fs::remove_file(step.join("z.postcard")).unwrap();
        }
        ["x", "y", "z"].map(|name| text(saved.value::<u8>(name)))
    });
    for [changed, shorter, gone] in errors {
        assert!(changed.contains("x.postcard has changed"), "{changed}");
        assert!(
            shorter.contains("y.postcard has become shorter"),
            "{shorter}"
        );
        assert!(gone.contains("z.postcard"), "{gone}");
    }
}
