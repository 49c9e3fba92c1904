//! The interception in a world of one, where every value can be compared with plain Burn.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::{Ddp, Error, group::thread::ThreadGroup, try_backward};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig, Relu};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Held by each test that runs a backward pass: passes on the other threads of the test harness can take gradients from one another
/// (tracel-ai/burn#5573), and what then looks like it is an error.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn alone() -> Ddp {
    let group = ThreadGroup::new(1).remove(0);
    Ddp::from_group(Arc::new(group), 0, 1).unwrap()
}

#[derive(Module, Debug)]
struct Scalar {
    w: Param<Tensor<1>>,
}

impl Scalar {
    fn new(w: f32, device: &Device) -> Self {
        Self {
            w: Param::from_tensor(Tensor::from_data([w], device)),
        }
    }

    fn loss(&self, x: f32) -> Tensor<1> {
        self.w.val() * x
    }
}

fn value(tensor: Tensor<1>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

fn gradient(model: &Scalar, loss: &Tensor<1>) -> Option<f32> {
    let grads = GradientsParams::from_grads(try_backward(loss).unwrap(), model);
    grads.get::<1>(model.w.id).map(|g| value(g)[0])
}

#[derive(Module, Debug)]
struct Net {
    a: Linear,
    b: Linear,
    act: Relu,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            a: LinearConfig::new(8, 16).init(device),
            b: LinearConfig::new(16, 4).init(device),
            act: Relu::new(),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.b.forward(self.act.forward(self.a.forward(x)))
    }
}

#[test]
fn a_wrapped_model_trains_to_the_bits_of_the_plain_one() {
    let _turn = one_at_a_time();
    let device = Device::flex().autodiff();
    let plain = Net::new(&device);
    let mut wrapped = alone().wrap(plain.clone()).unwrap();
    let mut plain = plain;
    assert_eq!(wrapped.num_params(), plain.num_params());
    let (mut left, mut right) = (SgdConfig::new().init(), SgdConfig::new().init());
    for _ in 0..3 {
        let x = Tensor::<2>::random([4, 8], burn::tensor::Distribution::Default, &device);
        let step = |model: &Net| {
            GradientsParams::from_grads(model.forward(x.clone()).sum().backward(), model)
        };
        let grads = step(&plain);
        plain = left.step(0.1, plain, grads);
        let grads = step(&wrapped);
        wrapped = right.step(0.1, wrapped, grads);
    }
    assert_eq!(
        plain.a.weight.base().into_data(),
        wrapped.a.weight.base().into_data()
    );
    assert_eq!(
        plain.b.bias.unwrap().base().into_data(),
        wrapped.b.bias.unwrap().base().into_data()
    );
}

#[test]
fn no_sync_returns_nothing_and_the_closing_pass_the_whole_window() {
    let _turn = one_at_a_time();
    let device = Device::flex().autodiff();
    let ddp = alone();
    let model = ddp.wrap(Scalar::new(1.0, &device)).unwrap();
    for window in [&[1.0, 2.0][..], &[5.0], &[1.0, 2.0, 4.0]] {
        let (last, first) = window.split_last().unwrap();
        for x in first {
            let _guard = ddp.no_sync();
            assert_eq!(gradient(&model, &model.loss(*x)), None);
        }
        assert_eq!(
            gradient(&model, &model.loss(*last)),
            Some(window.iter().sum())
        );
    }
}

#[test]
fn guards_nest_and_survive_panics() {
    let _turn = one_at_a_time();
    let device = Device::flex().autodiff();
    let ddp = alone();
    let model = ddp.wrap(Scalar::new(1.0, &device)).unwrap();
    let outer = ddp.no_sync();
    drop(ddp.no_sync());
    assert_eq!(
        gradient(&model, &model.loss(1.0)),
        None,
        "the outer guard is still alive"
    );
    drop(outer);
    let caught = catch_unwind(AssertUnwindSafe(|| {
        ddp.without_sync(|| panic!("expected by the test"))
    }));
    assert!(caught.is_err());
    assert_eq!(gradient(&model, &model.loss(2.0)), Some(3.0));
}

#[test]
fn several_uses_and_several_forwards_add_up() {
    let _turn = one_at_a_time();
    let device = Device::flex().autodiff();
    let model = alone().wrap(Scalar::new(3.0, &device)).unwrap();
    for _ in 0..3 {
        // d/dw (w*2 + w*w + w*5) = 2 + 2w + 5
        let loss = model.loss(2.0) + model.w.val() * model.w.val() + model.loss(5.0);
        assert_eq!(gradient(&model, &loss), Some(13.0));
    }
}

#[test]
fn a_value_that_never_reaches_the_loss_changes_nothing() {
    let _turn = one_at_a_time();
    let device = Device::flex().autodiff();
    let model = alone().wrap(Scalar::new(3.0, &device)).unwrap();
    for _ in 0..3 {
        assert_eq!(model.w.val().dims(), [1]);
        let _unused_head = model.w.val() * 7.0;
        assert_eq!(gradient(&model, &model.loss(2.0)), Some(2.0));
    }
}

#[derive(Module, Debug)]
struct Tied {
    embed: Param<Tensor<1>>,
    head: Param<Tensor<1>>,
}

#[test]
fn tied_fields_get_the_sum_of_both_and_stay_equal() {
    let _turn = one_at_a_time();
    let device = Device::flex().autodiff();
    let embed = Param::from_tensor(Tensor::<1>::from_data([2.0], &device));
    let model = Tied {
        head: embed.clone(),
        embed,
    };
    let mut model = alone().wrap(model).unwrap();
    let mut optim = SgdConfig::new().init();
    for expected in [2.0 - 0.125 * 7.0, 2.0 - 0.25 * 7.0] {
        let loss = model.embed.val() * 3.0 + model.head.val() * 4.0;
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(0.125, model, grads);
        assert_eq!(value(model.embed.val()), [expected]);
        assert_eq!(value(model.head.val()), [expected]);
    }
}

/// Counts what a traversal sees.
#[derive(Default)]
struct Count(usize);

impl ModuleVisitor for Count {
    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        self.0 += 1;
    }
}

#[test]
fn a_window_reaches_a_parameter_that_the_closing_pass_does_not_use() {
    let _turn = one_at_a_time();
    let device = Device::flex().autodiff();
    let ddp = alone();
    let model = Tied {
        embed: Param::from_tensor(Tensor::<1>::from_data([2.0], &device)),
        head: Param::from_tensor(Tensor::<1>::from_data([2.0], &device)),
    };
    let mut model = ddp.wrap(model).unwrap();
    let mut optim = SgdConfig::new().init();
    for step in 1..=2 {
        ddp.without_sync(|| (model.head.val() * 4.0).backward());
        let grads = GradientsParams::from_grads((model.embed.val() * 3.0).backward(), &model);
        assert_eq!(grads.len(), 2);
        // Taken once: a second traversal sees the plain model.
        let mut count = Count::default();
        model.visit(&mut count);
        assert_eq!(count.0, 2);
        model = optim.step(0.25, model, grads);
        assert_eq!(value(model.head.val()), [2.0 - step as f32]);
        assert_eq!(value(model.embed.val()), [2.0 - 0.75 * step as f32]);
    }
}

#[test]
fn evaluation_and_frozen_models_record_nothing() {
    let _turn = one_at_a_time();
    let device = Device::flex().autodiff();
    let ddp = alone();
    let model = ddp.wrap(Scalar::new(3.0, &device)).unwrap();
    assert_eq!(value(model.valid().loss(2.0)), [6.0]);
    let x = Tensor::<1>::from_data([2.0], &device).require_grad();
    let loss = model.clone().no_grad().w.val() * x.clone();
    let grads = loss.backward();
    assert_eq!(value(x.grad(&grads).unwrap()), [3.0]);
    assert_eq!(ddp.stats().rounds, 0);
}

#[test]
fn records_and_printed_form_are_those_of_the_plain_model() {
    let _turn = one_at_a_time();
    let device = Device::flex().autodiff();
    let plain = Net::new(&device);
    let wrapped = alone().wrap(plain.clone()).unwrap();
    assert_eq!(format!("{plain}"), format!("{wrapped}"));
    let other = Net::new(&device).load_record(wrapped.clone().into_record());
    assert_eq!(
        other.a.weight.val().into_data(),
        plain.a.weight.val().into_data()
    );
    let reloaded = wrapped.load_record(Net::new(&device).into_record());
    assert_ne!(
        reloaded.a.weight.val().into_data(),
        plain.a.weight.val().into_data()
    );
    assert!(
        reloaded
            .a
            .weight
            .reparameterization::<super::hook::ParamHook>()
            .is_some()
    );
    let unwrapped = alone().unwrap(reloaded);
    assert!(
        unwrapped
            .a
            .weight
            .reparameterization::<super::hook::ParamHook>()
            .is_none()
    );
}

#[test]
fn a_second_wrap_and_a_model_without_autodiff_are_plain_errors() {
    let _turn = one_at_a_time();
    let ddp = alone();
    let device = Device::flex();
    let error = ddp.wrap(Scalar::new(1.0, &device)).unwrap_err();
    assert!(
        matches!(error, Error::NothingToTrain { rank: 0 }),
        "{error}"
    );
    let model = ddp.wrap(Scalar::new(1.0, &device.autodiff())).unwrap();
    let error = ddp.wrap(model).unwrap_err();
    assert!(
        matches!(&error, Error::ForeignReparameterization { path, .. } if path == "w"),
        "{error}"
    );
}

#[test]
fn lora_with_a_frozen_base_is_wrapped_through_its_factors() {
    let _turn = one_at_a_time();
    let device = Device::flex().autodiff();
    let ddp = alone();
    let adapted = Net::new(&device).apply_lora(burn::module::Lora::new(2, 4.0));
    let model = ddp.wrap(adapted).unwrap();
    let x = Tensor::<2>::ones([1, 8], &device);
    let grads = GradientsParams::from_grads(model.forward(x).sum().backward(), &model);
    assert!(!grads.is_empty());
}

#[test]
fn gradient_checkpointing_gives_the_same_gradients() {
    let _turn = one_at_a_time();
    let device = Device::flex().autodiff();
    let balanced = Device::flex().autodiff().gradient_checkpointing();
    let plain = Net::new(&device);
    let copy = Net::new(&balanced).load_record(plain.clone().into_record());
    let wrapped = alone().wrap(copy).unwrap();
    let x = |device: &Device| Tensor::<2>::ones([2, 8], device);
    let a = GradientsParams::from_grads(plain.forward(x(&device)).sum().backward(), &plain);
    let b = GradientsParams::from_grads(wrapped.forward(x(&balanced)).sum().backward(), &wrapped);
    let (a, b) = (
        a.get::<2>(plain.a.weight.id).unwrap(),
        b.get::<2>(wrapped.a.weight.id).unwrap(),
    );
    assert_eq!(a.into_data(), b.into_data());
}
