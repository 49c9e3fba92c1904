//! N ranks reach the weights of one process on the concatenated batch (O1), all ranks the same bits (O2), and
//! a rerun the same bits again.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::module::Module;
use burn::prelude::*;
use burn_ddp::Ddp;
use burn_ddp_tests::{models::*, oracle::*, ranks};

/// Steps, rows of the global batch, learning rate.
const RUN: (u64, usize, f64) = (20, 8, 0.05);

/// Runs the comparison for one model on 2 and 4 ranks, over both transports, twice over the first.
fn compare<M: Module + 'static>(
    test: &'static str,
    new: impl Fn(&Device) -> M,
    loss: impl Fn(&M, u64, std::ops::Range<usize>) -> Tensor<1>,
) {
    let device = device();
    let body = |ddp: Ddp| -> (Weights, Weights, u64) {
        device.seed(7 + ddp.rank() as u64);
        let model = ddp.wrap(new(&device)).unwrap();
        let start = parameters(&model);
        let model = train(model, RUN, (ddp.rank(), ddp.world_size()), &loss);
        assert_same_bits(&ddp, &model);
        (start, parameters(&model), fingerprint(&model))
    };
    let two = ranks(2).named("two").run(test, body);
    let again = ranks(2).over("shm").named("again").run(test, body);
    let four = ranks(4).named("four").run(test, body);
    assert_eq!(two[0][0].2, again[0][0].2, "a rerun gives the same bits");
    for run in [&two[0], &two[1], &four[0], &four[1]] {
        assert_eq!(run[0].2, run[1].2);
        let (start, end, _) = &run[0];
        // One plain process, from the same start.
        let one = train(load(new(&device), start), RUN, (0, 1), &loss);
        assert_close(end, &parameters(&one), 1e-6);
    }
    assert_eq!(
        two[0][0].2, two[1][0].2,
        "both transports give the same bits"
    );
    assert_eq!(
        four[0][0].2, four[1][0].2,
        "both transports give the same bits"
    );
}

#[test]
fn mlp() {
    compare("mlp", Mlp::new, |model, step, rows| {
        square(model.forward(batch(step, rows, [0, 8], &device())) - 0.5)
    });
}

#[test]
fn small_resnet_with_frozen_batch_norm() {
    compare(
        "small_resnet_with_frozen_batch_norm",
        SmallResNet::new,
        |model, step, rows| {
            square(model.forward(batch(step, rows, [0, 1, 8, 8], &device()), true) - 0.5)
        },
    );
}

#[test]
fn ddp_13_rnn_with_shared_weights() {
    compare(
        "ddp_13_rnn_with_shared_weights",
        Rnn::new,
        |model, step, rows| square(model.forward(batch(step, rows, [0, 8], &device()), 5) - 0.5),
    );
}

#[test]
fn ddp_13_tied_embedding_and_output() {
    compare(
        "ddp_13_tied_embedding_and_output",
        TiedLm::new,
        |model, step, rows| {
            let words = rows
                .clone()
                .flat_map(|row| (0..3).map(move |i| ((row as u64 * 5 + i * 7 + step) % 12) as i32));
            let words = TensorData::new(words.collect::<Vec<i32>>(), [rows.len(), 3]);
            square(model.forward(Tensor::from_data(words, &device())) - 0.5)
        },
    );
}

#[test]
fn ddp_02_branches_used_by_different_ranks() {
    compare(
        "ddp_02_branches_used_by_different_ranks",
        TwoHeads::new,
        |model, step, rows| {
            // Rows 0..2 of every four use head a in even steps and b in odd ones, so that on 2 and on 4 ranks
            // the ranks differ in what they use.
            let parts = rows.clone().step_by(2).map(|row| {
                let x = batch(step, row..row + 2, [0, 8], &device());
                let a = (row / 2 + step as usize).is_multiple_of(2);
                model.forward(x, a) - 0.5
            });
            square(Tensor::cat(parts.collect(), 0))
        },
    );
}
