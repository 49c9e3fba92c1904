//! The example as a user runs it: its own processes, its own report, its own checkpoints.
#![cfg(all(feature = "ddp", feature = "flex"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::module::Module;
use burn::tensor::Device;
use burn::tensor::activation::log_softmax;
use burn_ddp_examples::data::text::{Text, WindowBatcher};
use burn_ddp_examples::gpt::GptConfig;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// No run here takes longer, however busy the machine is.
const LIMIT: Duration = Duration::from_secs(120);

/// A model of 8,000 parameters.
const SMALL: &str = "--layers 2 --width 16 --heads 2 --context 16 --sample 0 --json";

fn char_lm_ddp(arguments: &str, out: &Path) -> Output {
    let test = std::env::current_exe().unwrap();
    let program: PathBuf = (test.ancestors().nth(2).unwrap()).join("examples/char_lm_ddp");
    let program = program.with_extension(std::env::consts::EXE_EXTENSION);
    let mut child = Command::new(&program)
        .args(arguments.split_whitespace())
        .arg("--out")
        .arg(out)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{}: {e}; build the examples first", program.display()));
    // What it writes fits into a pipe, so it need not be read before the end.
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > LIMIT {
            child.kill().unwrap(); // its ranks end with it
            let output = child.wait_with_output().unwrap();
            panic!("{arguments}: {}", String::from_utf8_lossy(&output.stderr));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

fn report(arguments: &str, out: &Path) -> Value {
    let run = char_lm_ddp(arguments, out);
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{arguments}: {stderr}");
    let stdout = String::from_utf8(run.stdout).unwrap();
    serde_json::from_str(stdout.lines().next_back().unwrap()).unwrap()
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
        let run = char_lm_ddp(arguments, out.path());
        assert_eq!(run.status.code(), Some(1), "{arguments}");
        let stderr = String::from_utf8(run.stderr).unwrap();
        assert_eq!(stderr, format!("error: {text}\n"));
    }
}
