//! The example as a user runs it: its own processes, its own report, its own checkpoints.
#![cfg(all(feature = "ddp", feature = "flex"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::module::Module;
use burn::tensor::Device;
use burn::tensor::activation::log_softmax;
use burn_ddp_examples::data::text::{Text, WindowBatcher};
use burn_ddp_examples::gpt::GptConfig;
use common::Run;
use serde_json::Value;
use std::path::Path;

/// A model of 8,000 parameters.
const SMALL: &str = "--layers 2 --width 16 --heads 2 --context 16 --sample 0 --json";

fn char_lm_ddp(arguments: &str, out: &Path) -> Run {
    let arguments: Vec<_> = arguments.split_whitespace().collect();
    common::run("char_lm_ddp", &arguments, out)
}

#[track_caller]
fn report(arguments: &str, out: &Path) -> Value {
    char_lm_ddp(arguments, out).report()
}

fn number(report: &Value, name: &str) -> f64 {
    report[name].as_f64().unwrap()
}

fn losses(report: &Value) -> Vec<f64> {
    let losses = report["losses"].as_array().unwrap();
    losses.iter().map(|loss| loss.as_f64().unwrap()).collect()
}

/// Windows by position in the data set's order of one seed: four batches of three on one rank are two batches on each of two, or one of six.
#[test]
fn a_step_is_the_same_however_its_windows_are_divided() {
    let dir = tempfile::tempdir().unwrap();
    let run = |division: &str| {
        let arguments = format!("{SMALL} --steps 8 --hook none {division}");
        report(&arguments, &dir.path().join(division))
    };
    let one = run("--nproc 1 --batch-size 3 --accumulate 4");
    let (expected, norm) = (losses(&one), number(&one, "gradient_norm"));
    assert_eq!(expected.len(), 8);
    assert!(expected[7] < expected[0] - 0.1, "no training: {expected:?}");
    // Half as many batches in a step, each twice as large: twice the rate for one.
    for division in [
        "--nproc 2 --batch-size 3 --accumulate 2",
        "--nproc 2 --batch-size 6 --accumulate 1 --lr 2e-3",
    ] {
        let run = run(division);
        let found = losses(&run);
        assert_eq!(found.len(), 8);
        for (step, (one, other)) in expected.iter().zip(&found).enumerate() {
            let close = (one - other).abs() < 1e-4;
            assert!(close, "{division}, step {step}: {one} and {other}");
        }
        // Adam makes the same step of a gradient and of its double; the norm tells them apart.
        let other = number(&run, "gradient_norm");
        assert!((norm - other).abs() < 1e-3 * norm, "{norm} and {other}");
    }
}

#[test]
fn a_run_that_was_interrupted_ends_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    for hook in ["bf16", "power-sgd --power-sgd-rank 2"] {
        let run = |more: &str, out: &str| {
            let arguments = format!(
                "{SMALL} --steps 6 --batch-size 2 --dropout 0.1 --checkpoint-every 2 --hook {hook} {more}"
            );
            report(&arguments, &dir.path().join(hook).join(out))
        };
        let whole = run("", "whole");
        let begun = run("--stop-after 3", "parts");
        let resumed = run("", "parts");
        assert_eq!([&begun["step"], &resumed["first_step"]], [3, 3], "{hook}");
        assert_eq!([&whole["step"], &resumed["step"]], [6, 6], "{hook}");
        let parts = [losses(&begun), losses(&resumed)].concat();
        assert_eq!(losses(&whole), parts, "{hook}");
        let hashes = whole["param_hashes"].as_array().unwrap();
        assert_eq!(hashes.len(), 2);
        assert_eq!(hashes[0], hashes[1], "{hook}");
        assert_eq!(resumed["param_hashes"], whole["param_hashes"], "{hook}");
        assert_ne!(begun["param_hashes"], whole["param_hashes"], "{hook}");

        // Started once more there is nothing to do but to measure and to report.
        let again = run("", "whole");
        assert_eq!(again["param_hashes"], whole["param_hashes"], "{hook}");
        assert_eq!(again["validation_loss"], whole["validation_loss"], "{hook}");
        assert!(losses(&again).is_empty());
    }
}

/// What a run says at its start, but for the checkpoint's folder.
fn first_lines(arguments: &str, out: &Path) -> Vec<String> {
    let run = char_lm_ddp(&format!("{SMALL} --hook none {arguments}"), out).succeeded();
    let lines = run.stderr.lines().filter(|line| {
        line.starts_with("going on") || line.starts_with("warning") || line.starts_with("no step")
    });
    let out = out.to_str().unwrap();
    lines.map(|line| line.replace(out, "OUT")).collect()
}

#[test]
fn a_run_that_goes_on_says_what_is_not_as_before() {
    let dir = tempfile::tempdir().unwrap();
    let lines = |arguments: &str| first_lines(arguments, dir.path());
    assert!(lines("--steps 4 --stop-after 2 --nproc 1").is_empty());
    let going_on =
        |step| format!("going on after step {step} of OUT; for a new run name another --out");
    // A part of the same run.
    assert_eq!(lines("--steps 4 --stop-after 3 --nproc 1"), [going_on(2)]);
    let expected = [
        going_on(3),
        "no step is left to make: --stop-after is 1".into(),
    ];
    assert_eq!(lines("--steps 4 --stop-after 1 --nproc 1"), expected);
    let expected = [
        going_on(3),
        "warning: the run that saved it had other settings: --nproc 1 and not 2, --steps 4 and not 5, \
         --batch-size 2 and not 4; the steps from here on have those of this one"
            .into(),
    ];
    assert_eq!(lines("--steps 5 --batch-size 4"), expected);
    let expected = [going_on(5), "no step is left to make: --steps is 5".into()];
    assert_eq!(lines("--steps 5 --batch-size 4"), expected);
}

#[test]
fn a_model_of_another_size_is_told_in_a_line() {
    let dir = tempfile::tempdir().unwrap();
    report(&format!("{SMALL} --steps 1 --nproc 1"), dir.path());
    let larger = SMALL.replace("--width 16", "--width 32");
    let mistake = char_lm_ddp(&format!("{larger} --steps 1 --nproc 1"), dir.path()).mistake();
    let expected = "error: rank 0: `model` of the checkpoint of step 1 cannot be used here: `tokens.weight` is [61, 32] in this model and [61, 16] in the \
        checkpoint, and 19 more parameters differ. Build the model with the settings it was saved with, or name another directory for this one";
    assert_eq!(mistake, expected);
}

/// The validation text's loss under the frequencies of the training text's characters: what a model reaches that sees no context.
fn unigram_loss(text: &Text) -> f64 {
    // One more of each, for those that the training text has not.
    let mut counts = vec![1.0; text.vocabulary.size()];
    for &token in text.train_tokens() {
        counts[token as usize] += 1.0;
    }
    let total: f64 = counts.iter().sum();
    let validation = text.validation_tokens();
    let losses = validation
        .iter()
        .map(|&token| -(counts[token as usize] / total).ln());
    losses.sum::<f64>() / validation.len() as f64
}

/// Of the model in `path`, window by window in one process without DDP.
fn plain_loss(text: &Text, config: &GptConfig, path: &Path) -> f64 {
    let device = Device::flex();
    let model = config.init(&device).try_load_file(path).unwrap();
    let windows = text.validation(config.context);
    let mut sum = 0.0;
    for index in 0..windows.len() {
        let batch = WindowBatcher.batch(vec![windows.get(index).unwrap()], &device);
        let logs = log_softmax(model.forward(batch.tokens), 2);
        let picked = logs.gather(2, batch.next.unsqueeze_dim(2));
        sum -= picked.sum().into_scalar::<f64>();
    }
    sum / (windows.len() * config.context) as f64
}

#[test]
fn the_model_learns_from_context_and_writes() {
    let out = tempfile::tempdir().unwrap();
    let run = report(
        "--layers 1 --width 64 --heads 2 --context 16 --steps 150 --batch-size 8 --accumulate 1 --lr 2e-3 --sample 40 --json",
        out.path(),
    );
    let text = Text::coriolanus();
    let (loss, bound) = (number(&run, "validation_loss"), unigram_loss(&text) - 0.3);
    assert!((2.9..3.1).contains(&bound), "{bound}");
    assert!(loss < bound, "{loss}, and {bound} is the bound");

    // The file is the model that was measured, each character once over both ranks.
    let path = Path::new(run["model_path"].as_str().unwrap());
    assert_eq!(path, out.path().join("step-150/model.bpk"));
    let config = GptConfig::new(text.vocabulary.size(), 16).with_layers(1);
    let plain = plain_loss(&text, &config.with_width(64).with_heads(2), path);
    assert!((plain - loss).abs() < 1e-5, "{plain} and {loss}");

    let sample = run["sample"].as_str().unwrap();
    let written = sample.strip_prefix("MENENIUS:\n").unwrap();
    assert_eq!(written.chars().count(), 40);
    assert!(number(&run, "steps_per_second") > 0.0);
}

#[test]
fn a_mistake_is_told_once_and_before_any_rank_starts() {
    let out = tempfile::tempdir().unwrap();
    for (arguments, text) in [
        ("--lr 1.5", "--lr is 1.5, but must be above 0 and at most 1"),
        ("--clip nan", "--clip is NaN, but must be above 0"),
        (
            "--dropout 1",
            "--dropout is 1, but must be at least 0 and below 1",
        ),
        (
            "--temperature -1",
            "--temperature is -1, but must be 0 or above",
        ),
        (
            "--width 100 --heads 3",
            "--width 100 is no multiple of --heads 3",
        ),
        (
            "--context 20000",
            "--context is 20000, but the text has windows of at most 15446 characters",
        ),
        ("--prompt 1", "--prompt has '1', which is not in the text"),
    ] {
        let mistake = char_lm_ddp(arguments, out.path()).mistake();
        assert_eq!(mistake, format!("error: {text}"), "{arguments}");
    }
}
