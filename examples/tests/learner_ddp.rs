//! The example of Burn's learner as a user runs it, on one rank and on two.
#![cfg(all(feature = "ddp", feature = "flex"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::fs;
use std::path::Path;

fn learner_ddp(out: &Path, arguments: &[&str]) -> common::Run {
    common::run("learner_ddp", arguments, out)
}

/// What a run that must succeed wrote to stdout.
#[track_caller]
fn stdout(run: common::Run) -> String {
    run.succeeded().stdout
}

/// The value of a metric over an epoch: the last line of its file.
fn metric(out: &Path, split: &str, epoch: usize, name: &str) -> f64 {
    let path = out.join(format!("{split}/epoch-{epoch}/{name}.log"));
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let last = text.lines().next_back().unwrap();
    last.strip_suffix(",final").unwrap().parse().unwrap()
}

/// Number of epochs that have metrics.
fn epochs(out: &Path) -> usize {
    fs::read_dir(out.join("valid")).unwrap().count()
}

#[test]
fn two_ranks_have_the_metrics_of_one() {
    let [one, two] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let run = |out: &Path, nproc, batch| {
        let arguments = ["--epochs", "2", "--nproc", nproc, "--batch-size", batch];
        stdout(learner_ddp(out, &arguments))
    };
    run(one.path(), "1", "64");
    let shown = run(two.path(), "2", "32");
    for epoch in [1, 2] {
        for split in ["train", "valid"] {
            let of = |out: &tempfile::TempDir, name| metric(out.path(), split, epoch, name);
            let loss = [of(&one, "Loss"), of(&two, "Loss")];
            // Two ranks see one image of the last batch twice.
            assert!(
                (loss[0] - loss[1]).abs() < 5e-3,
                "{split} {epoch}: {loss:?}"
            );
            let accuracy = [of(&one, "Accuracy"), of(&two, "Accuracy")];
            assert!(
                (accuracy[0] - accuracy[1]).abs() < 1.0,
                "{split} {epoch}: {accuracy:?}"
            );
        }
        // Of 364 images, each once.
        let right = metric(two.path(), "valid", epoch, "Accuracy") * 3.64;
        assert!((right - right.round()).abs() < 1e-2, "{right}");
    }
    assert!(metric(two.path(), "valid", 2, "Accuracy") > 60.0);
    // One dashboard and one summary.
    for text in ["Starting training for 2 epochs.", "Learner Summary"] {
        assert_eq!(shown.matches(text).count(), 1, "{shown}");
    }
}

#[test]
fn a_training_continues_from_its_checkpoint() {
    let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    stdout(learner_ddp(whole.path(), &["--epochs", "2"]));
    stdout(learner_ddp(parts.path(), &["--epochs", "1"]));
    stdout(learner_ddp(
        parts.path(),
        &["--epochs", "2", "--resume", "1"],
    ));
    for split in ["train", "valid"] {
        let loss = [&whole, &parts].map(|out| metric(out.path(), split, 2, "Loss"));
        assert_eq!(loss[0].to_bits(), loss[1].to_bits(), "{split}: {loss:?}");
    }
}

/// A rate at which nothing is learned for long.
#[test]
fn early_stopping_ends_all_ranks_at_the_same_epoch() {
    let [one, two] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let common = ["--epochs", "12", "--patience", "1", "--lr", "0.02"];
    stdout(learner_ddp(
        one.path(),
        &[&common[..], &["--nproc", "1", "--batch-size", "64"]].concat(),
    ));
    stdout(learner_ddp(two.path(), &common));
    let [one, two] = [one, two].map(|out| epochs(out.path()));
    assert!(one < 12, "it did not stop");
    assert_eq!(one, two);
}

#[test]
fn a_resume_without_anything_to_resume_is_told_once_and_before_any_rank_starts() {
    let out = tempfile::tempdir().unwrap();
    let mistake = |arguments: &[&str]| learner_ddp(out.path(), arguments).mistake();
    let absent = mistake(&["--resume", "7"]);
    assert!(
        absent.starts_with("error: --resume 7: there is no "),
        "{absent}"
    );
    assert_eq!(
        mistake(&["--resume", "2", "--epochs", "2"]),
        "error: --resume 2 leaves nothing to train of --epochs 2, which is the number of the last epoch"
    );
}
