//! The example as a user runs it: its own processes, its own report, its own file.
#![cfg(all(feature = "ddp", feature = "flex"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_ddp_examples::data::{ImageBatcher, digits};
use burn_ddp_examples::model::ResNetConfig;
use common::Run;
use std::path::Path;

fn resnet_ddp(arguments: &[&str], out: &Path) -> Run {
    common::run("resnet_ddp", arguments, out)
}

/// Share of the test images that the model in `path` gets right, in one process without DDP.
fn plain_accuracy(path: &Path) -> f64 {
    let device = Device::flex();
    let task = digits::load();
    let model = ResNetConfig::new(1, 10)
        .with_widths(task.recipe.widths)
        .init(&device)
        .try_load_file(path)
        .unwrap();
    let images = (0..task.test.len())
        .map(|index| task.test.get(index).unwrap())
        .collect();
    let batch = ImageBatcher::new(task.shape, task.normalization).batch(images, &device);
    let guess: Tensor<1, Int> = model.forward(batch.images).argmax(1).squeeze_dim(1);
    let correct: i64 = guess.equal(batch.labels).int().sum().into_scalar();
    correct as f64 / task.test.len() as f64
}

#[test]
fn two_ranks_train_one_model() {
    let out = tempfile::tempdir().unwrap();
    let run = resnet_ddp(&["--epochs", "2", "--json"], out.path());
    let stderr = run.stderr.clone();
    let report = run.report();
    assert_eq!(report["world_size"], 2);
    assert_eq!(report["epochs"], 2);
    // 1,433 images in batches of 2 x 32 make 23 steps, the last of them short.
    assert_eq!(report["steps"], 46);

    let hashes = report["param_hashes"].as_array().unwrap();
    assert_eq!(hashes.len(), 2);
    assert_eq!(hashes[0], hashes[1]);

    // 701,178 trainable f32, and a control tail of less than a KiB.
    let bytes = report["gradient_bytes_per_step"].as_u64().unwrap();
    assert!(
        (4 * 701_178..4 * 701_178 + 1024).contains(&bytes),
        "{bytes}"
    );
    assert!(report["buckets"].as_u64().unwrap() >= 2);

    // The file is the model that was measured: every image once over both ranks, with the
    // statistics of both.
    let path = Path::new(report["model_path"].as_str().unwrap());
    assert_eq!(path, out.path().join("resnet.bpk"));
    let accuracy = report["test_accuracy"].as_f64().unwrap();
    assert!((plain_accuracy(path) - accuracy).abs() < 1e-12);
    assert!(accuracy > 0.3, "chance is 0.1: {accuracy}");

    // Not a terminal, so one line an epoch, from rank 0 alone.
    let lines = stderr.lines().filter(|line| line.starts_with("epoch "));
    assert_eq!(lines.count(), 2, "{stderr}");
}

#[test]
fn a_batch_larger_than_the_data_is_one_step_an_epoch_and_a_warning() {
    let out = tempfile::tempdir().unwrap();
    let arguments = ["--epochs", "1", "--batch-size", "5000", "--json"];
    let run = resnet_ddp(&arguments, out.path());
    let stderr = run.stderr.clone();
    let report = run.report();
    assert_eq!(report["steps"], 1);
    // 1,433 images on two ranks, one of them twice.
    let warning = "warning: a batch of 5000 images is more than the 717 that each rank has: every epoch is one step with 717";
    assert_eq!(stderr.matches(warning).count(), 1, "{stderr}");
}

#[test]
fn an_output_folder_that_cannot_be_written_to_is_noticed_at_the_start() {
    // Nobody can, not even root.
    let mistake = resnet_ddp(&[], Path::new("/proc")).mistake();
    assert!(mistake.contains("cannot write to the output folder /proc"));
}

#[test]
fn a_mistake_is_reported_once() {
    let out = tempfile::tempdir().unwrap();
    let mistake = resnet_ddp(&["--data", "/no/such/folder"], out.path()).mistake();
    assert!(mistake.contains("data_batch_1.bin is missing (expected 30730000 bytes)"));
}

#[test]
fn a_wrong_option_is_told_once_and_before_any_rank_starts() {
    let out = tempfile::tempdir().unwrap();
    for (option, value, text) in [
        (
            "--lr",
            "nan",
            "--lr is NaN, but must be above 0 and at most 1",
        ),
        (
            "--lr",
            "-1",
            "--lr is -1, but must be above 0 and at most 1",
        ),
        (
            "--lr",
            "1.5",
            "--lr is 1.5, but must be above 0 and at most 1",
        ),
        ("--epochs", "0", "--epochs must be at least 1"),
        ("--batch-size", "0", "--batch-size must be at least 1"),
    ] {
        let mistake = resnet_ddp(&[option, value], out.path()).mistake();
        assert_eq!(mistake, format!("error: {text}"));
    }
}
