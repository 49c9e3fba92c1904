//! The promise that all backward passes are alike.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::{
    optim::{GradientsParams, SgdConfig},
    prelude::*,
};
use burn_ddp::{Ddp, Error, ReducerError, WrapConfig, try_backward};
use burn_ddp_tests::{
    models::{Rnn, Scalar, TwoHeads},
    oracle::*,
    ranks,
};

fn promised() -> WrapConfig {
    WrapConfig::new().static_graph(true)
}

fn heads(model: &TwoHeads, step: u64, rank: usize, a: bool) -> Tensor<1> {
    let x = batch(step, rank * 4..(rank + 1) * 4, [0, 8], &device());
    square(model.forward(x, a))
}

#[test]
fn what_nobody_uses_is_not_sent() {
    let runs = ranks(2).run("what_nobody_uses_is_not_sent", |ddp: Ddp| {
        let mut model = ddp.wrap_with(TwoHeads::new(&device()), promised()).unwrap();
        let start = parameters(&model);
        let mut optim = SgdConfig::new().init();
        let mut bytes = Vec::new();
        for step in 0..4 {
            // A look at a parameter that never reaches the loss.
            let _ = model.b.weight.val().dims();
            let loss = heads(&model, step, ddp.rank(), true);
            // Windows of two passes.
            let grads = match step % 2 {
                0 => ddp.without_sync(|| loss.backward()),
                _ => loss.backward(),
            };
            let grads = GradientsParams::from_grads(grads, &model);
            model = optim.step(0.1, model, grads);
            bytes.push(ddp.stats().gradient_bytes_per_step);
            assert_same_bits(&ddp, &model);
        }
        (start, parameters(&model), bytes)
    });
    for (start, ours, bytes) in runs.iter().flatten() {
        let mut model = load(TwoHeads::new(&device()), start);
        let head = at(start, "b.weight").unwrap().len() + at(start, "b.bias").unwrap().len();
        // Its two used flags are gone too.
        assert_eq!(bytes[1] - bytes[3], (head + 2) * 4);
        let mut optim = SgdConfig::new().init();
        for step in [0, 2] {
            let losses = [0, 1].map(|rank| heads(&model, step, rank, true));
            let second = [0, 1].map(|rank| heads(&model, step + 1, rank, true));
            let [a, b, c, d] = [losses, second]
                .map(|[a, b]| [a, b])
                .concat()
                .try_into()
                .unwrap();
            let loss: Tensor<1> = (a + b + c + d) / 2.0;
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(0.1, model, grads);
        }
        assert_close(ours, &parameters(&model), 1e-6);
    }
}

#[test]
fn parameters_that_are_used_several_times() {
    ranks(2).run("parameters_that_are_used_several_times", |ddp: Ddp| {
        let start = ddp.unwrap(ddp.wrap(Rnn::new(&device())).unwrap());
        let train = |config: WrapConfig| {
            let mut model = ddp.wrap_with(start.clone(), config).unwrap();
            let mut optim = SgdConfig::new().init();
            for step in 0..3 {
                let x = batch(
                    step,
                    ddp.rank() * 4..(ddp.rank() + 1) * 4,
                    [0, 8],
                    &device(),
                );
                let grads = square(model.forward(x, 5)).backward();
                let grads = GradientsParams::from_grads(grads, &model);
                model = optim.step(0.1, model, grads);
            }
            fingerprint(&model)
        };
        assert_eq!(train(promised()), train(WrapConfig::new()));
    });
}

/// The error of rank 1, which uses the other head in its third pass, and what rank 0 hears of it.
#[test]
fn a_broken_promise_is_an_error_on_all_ranks() {
    let runs = ranks(2).run_raw("a_broken_promise_is_an_error_on_all_ranks", || {
        let ddp = Ddp::from_env().unwrap();
        let model = ddp.wrap_with(TwoHeads::new(&device()), promised()).unwrap();
        let pass = |step: u64| -> Result<(), Error> {
            let a = ddp.is_main() || step < 2;
            try_backward(&heads(&model, step, ddp.rank(), a)).map(|_| ())
        };
        pass(0).unwrap();
        pass(1).unwrap();
        pass(2).unwrap_err().to_string()
    });
    for run in runs {
        let texts: Vec<String> = run.into_iter().map(|(_, text)| text.unwrap()).collect();
        let own = &texts[1];
        assert!(own.starts_with("rank 1: `b."), "{own}");
        assert!(
            own.contains("has 1 gradient contribution(s) in this backward pass and had 0"),
            "{own}"
        );
        assert!(own.contains("static_graph(true)"), "{own}");
        assert!(texts[0].contains("`b."), "{}", texts[0]);
    }
}

#[test]
fn fewer_uses_than_promised() {
    let runs = ranks(2).run_raw("fewer_uses_than_promised", || {
        let ddp = Ddp::from_env().unwrap();
        let model = ddp.wrap_with(Rnn::new(&device()), promised()).unwrap();
        let pass = |steps: usize| -> Result<(), Error> {
            let x = batch(0, 0..4, [0, 8], &device());
            try_backward(&square(model.forward(x, steps))).map(|_| ())
        };
        pass(5).unwrap();
        let short = if ddp.is_main() { 4 } else { 5 };
        pass(short).unwrap_err().to_string()
    });
    for run in runs {
        for (_, text) in run {
            let text = text.unwrap();
            assert!(
                text.contains("in this backward pass and had 5 in the first"),
                "{text}"
            );
        }
    }
}

#[test]
fn one_rank_keeps_its_promise_too() {
    ranks(1).run("one_rank_keeps_its_promise_too", |ddp: Ddp| {
        let model = ddp.wrap_with(TwoHeads::new(&device()), promised()).unwrap();
        try_backward(&heads(&model, 0, 0, true)).unwrap();
        let error = try_backward(&heads(&model, 1, 0, false))
            .map(|_| ())
            .unwrap_err();
        assert!(
            matches!(
                &error,
                Error::Reducer(ReducerError::StaticGraph { rank: 0, path, expected: 0, fired: 1 })
                    if path.starts_with("b.")
            ),
            "{error}"
        );
    });
}

/// Rank 1 has no data in the first epoch. In the second it uses what rank 0 has used, and then what nobody has.
#[test]
fn a_rank_without_data_has_its_first_pass_later() {
    let runs = ranks(2).run_raw("a_rank_without_data_has_its_first_pass_later", || {
        let ddp = Ddp::from_env().unwrap();
        let mut model = ddp.wrap_with(TwoHeads::new(&device()), promised()).unwrap();
        if ddp.is_main() {
            heads(&model, 0, 0, true).backward();
        }
        model = ddp.join(model, |model, _| model).unwrap();
        heads(&model, 1, ddp.rank(), true).backward();
        model = ddp.join(model, |model, _| model).unwrap();
        let last = heads(&model, 2, ddp.rank(), ddp.is_main());
        try_backward(&last).map(|_| ()).unwrap_err().to_string()
    });
    for run in runs {
        for (_, text) in run {
            let text = text.unwrap();
            assert!(text.contains("`b.") && text.contains("and had 0"), "{text}");
        }
    }
}

#[test]
fn the_promise_is_the_same_on_all_ranks() {
    let runs = ranks(2).run_raw("the_promise_is_the_same_on_all_ranks", || {
        let ddp = Ddp::from_env().unwrap();
        let config = WrapConfig::new().static_graph(ddp.is_main());
        let wrapped = ddp.wrap_with(Scalar::new(1.0, &device()), config);
        wrapped.unwrap_err().to_string()
    });
    for run in runs {
        for (_, text) in run {
            let text = text.unwrap();
            assert!(
                text.contains("static_graph: true") && text.contains("static_graph: false"),
                "{text}"
            );
        }
    }
}
