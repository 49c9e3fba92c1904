//! The reducer over threads as ranks, without autodiff.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::{config::Reduction, group::thread::ThreadGroup};
use burn::tensor::{bf16, f16};
use std::thread;

const CAPS: BucketCaps = BucketCaps { first: 4, rest: 8 };

fn layout(shapes: &[(&str, usize, DType)]) -> Layout {
    let spec = |&(path, n, dtype): &(&str, usize, DType)| ParamSpec {
        path: path.into(),
        shape: vec![n],
        dtype,
        trainable: true,
    };
    Layout {
        params: shapes.iter().map(spec).collect(),
    }
}

/// Runs `rank` on every rank and returns what each gave, in rank order.
fn ranks<T: Send>(
    world: usize,
    layout: &Layout,
    reduction: Reduction,
    body: impl Fn(usize, Reducer) -> T + Sync,
) -> Vec<T> {
    let body = &body;
    thread::scope(|scope| {
        let run = |group: ThreadGroup| {
            let layout = layout.clone();
            scope.spawn(move || {
                let rank = group.rank();
                let rule = Rule {
                    reduction,
                    check_finite: false,
                    hook: None,
                    views: false,
                };
                body(
                    rank,
                    Reducer::new(Arc::new(group), layout, CAPS, rule).unwrap(),
                )
            })
        };
        let handles: Vec<_> = ThreadGroup::new(world).into_iter().map(run).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

/// A rank that closes a window of so many passes.
fn window(window: u32) -> Contribution {
    Contribution {
        active: true,
        window,
        samples: 1,
        ..Default::default()
    }
}

fn data(values: &[f32]) -> TensorData {
    TensorData::new(values.to_vec(), [values.len()])
}

fn values(data: &Option<TensorData>) -> Option<Vec<f32>> {
    data.as_ref().map(|d| d.try_to_vec().unwrap())
}

/// One round in which this rank has `gradients` (slot, value of all its elements), in that order.
fn round(reducer: &mut Reducer, gradients: &[(usize, f32)]) -> Vec<Option<Vec<f32>>> {
    reducer.begin(window(1), 1.0).unwrap();
    for &(slot, value) in gradients {
        let n = reducer.layout.params[slot].elements();
        reducer.pack(slot, data(&vec![value; n])).unwrap();
    }
    reducer.launch_rest().unwrap();
    reducer
        .wait()
        .unwrap()
        .gradients
        .iter()
        .map(values)
        .collect()
}

#[test]
fn ddp_22_ranks_that_finish_in_another_order_do_not_mix_gradients() {
    // Two equal-shaped parameters, one bucket each; rank 0 has a first, rank 1 has b first.
    let l = layout(&[("a", 2, DType::F32), ("b", 2, DType::F32)]);
    let all = ranks(2, &l, Reduction::Mean, |rank, mut reducer| {
        assert_eq!(reducer.totals().buckets, 2);
        let order = if rank == 0 {
            [(0, 1.0), (1, 10.0)]
        } else {
            [(1, 10.0), (0, 1.0)]
        };
        round(&mut reducer, &order)
    });
    for gradients in all {
        assert_eq!(gradients, [Some(vec![1.0, 1.0]), Some(vec![10.0, 10.0])]);
    }
}

#[test]
fn ddp_02_unused_on_some_ranks_counts_as_zero_and_on_all_as_none() {
    let l = layout(&[
        ("trunk", 3, DType::F32),
        ("a", 1, DType::F32),
        ("b", 2, DType::F32),
        ("c", 1, DType::F32),
    ]);
    let all = ranks(3, &l, Reduction::Mean, |rank, mut reducer| {
        let mut own = vec![(0, 3.0 * (rank + 1) as f32)];
        if rank == 1 {
            own.push((1, 9.0));
        } else {
            own.push((2, 3.0));
        }
        round(&mut reducer, &own)
    });
    for gradients in all {
        assert_eq!(
            gradients,
            [
                Some(vec![6.0; 3]),
                Some(vec![3.0]),
                Some(vec![2.0; 2]),
                None
            ]
        );
    }
}

#[test]
fn ddp_08_the_mean_is_the_default_and_the_sum_a_choice() {
    let l = layout(&[("w", 1, DType::F32)]);
    for (op, expected) in [(Reduction::Mean, 2.0), (Reduction::Sum, 6.0)] {
        let all = ranks(3, &l, op, |rank, mut reducer| {
            round(&mut reducer, &[(0, (rank + 1) as f32)])
        });
        assert_eq!(all, vec![vec![Some(vec![expected])]; 3]);
    }
}

#[test]
fn halves_are_reduced_in_their_own_type() {
    let l = layout(&[
        ("h", 1, DType::F16),
        ("b", 1, DType::BF16),
        ("d", 1, DType::F64),
    ]);
    let all = ranks(4, &l, Reduction::Mean, |_, mut reducer| {
        reducer.begin(window(1), 1.0).unwrap();
        // The sum of four would be infinite in f16; the mean is not.
        reducer
            .pack(0, TensorData::new(vec![f16::from_f32(30000.0)], [1]))
            .unwrap();
        reducer
            .pack(1, TensorData::new(vec![bf16::from_f32(0.5)], [1]))
            .unwrap();
        reducer
            .pack(2, TensorData::new(vec![1e300f64], [1]))
            .unwrap();
        reducer.launch_rest().unwrap();
        reducer.wait().unwrap().gradients
    });
    for gradients in all {
        assert_eq!(
            gradients[0].as_ref().unwrap().try_to_vec::<f16>().unwrap(),
            [f16::from_f32(30000.0)]
        );
        assert_eq!(
            gradients[1].as_ref().unwrap().try_to_vec::<bf16>().unwrap(),
            [bf16::from_f32(0.5)]
        );
        assert_eq!(
            gradients[2].as_ref().unwrap().try_to_vec::<f64>().unwrap(),
            [1e300]
        );
    }
}

#[test]
fn buckets_are_launched_as_soon_as_they_and_those_before_them_are_full() {
    let l = layout(&[
        ("a", 1, DType::F32),
        ("b", 1, DType::F32),
        ("c", 1, DType::F32),
    ]);
    ranks(1, &l, Reduction::Mean, |_, mut reducer| {
        // Reverse registration order: c alone (first cap 4 bytes), then b and a.
        reducer.begin(window(1), 1.0).unwrap();
        reducer.pack(1, data(&[1.0])).unwrap();
        reducer.pack(0, data(&[1.0])).unwrap();
        assert!(
            !reducer.has_launched(),
            "the second bucket waits for the first"
        );
        reducer.pack(2, data(&[1.0])).unwrap();
        assert_eq!(
            reducer.current.buckets.len(),
            2,
            "both went out without waiting for the closing"
        );
        reducer.launch_rest().unwrap();
        reducer.wait().unwrap();
    });
}

#[test]
fn a_gradient_after_its_bucket_was_launched_names_the_parameter() {
    let l = layout(&[("early", 1, DType::F32), ("other", 1, DType::F32)]);
    ranks(1, &l, Reduction::Mean, |_, mut reducer| {
        reducer.begin(window(1), 1.0).unwrap();
        reducer.pack(1, data(&[1.0])).unwrap();
        let error = reducer.pack(1, data(&[1.0])).unwrap_err();
        assert!(
            matches!(&error, ReducerError::LateGradient { path, .. } if path == "other"),
            "{error}"
        );
    });
}

#[test]
fn a_contribution_to_a_packed_gradient_is_added_while_its_bucket_is_here() {
    let l = layout(&[("a", 2, DType::F32), ("b", 1, DType::F32)]);
    let all = ranks(2, &l, Reduction::Mean, |rank, mut reducer| {
        reducer.begin(window(1), 1.0).unwrap();
        // `b` is in the first bucket, so that `a` cannot be launched before it.
        reducer.pack(0, data(&[1.0, 2.0])).unwrap();
        reducer.pack(0, data(&[10.0, 20.0 * rank as f32])).unwrap();
        reducer.pack(1, data(&[1.0])).unwrap();
        reducer.launch_rest().unwrap();
        values(&reducer.wait().unwrap().gradients[0])
    });
    assert_eq!(all, [Some(vec![11.0, 12.0]), Some(vec![11.0, 12.0])]);
}

#[test]
fn wrong_type_and_size_name_the_parameter() {
    let l = layout(&[("w", 2, DType::F32)]);
    ranks(1, &l, Reduction::Mean, |_, mut reducer| {
        reducer.begin(window(1), 1.0).unwrap();
        let error = reducer
            .pack(0, TensorData::new(vec![1.0f64; 2], [2]))
            .unwrap_err();
        assert!(
            error
                .to_string()
                .contains("the gradient of `w` is F64, the parameter was f32"),
            "{error}"
        );
        let error = reducer.pack(0, data(&[1.0])).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("has 4 bytes, the parameter had 8"),
            "{error}"
        );
    });
}

#[test]
fn ddp_04_windows_of_different_length_are_an_error() {
    let l = layout(&[("w", 1, DType::F32)]);
    for op in [Reduction::Mean, Reduction::Sum] {
        // The mean of all is rank 1's own.
        let all = ranks(3, &l, op, |rank, mut reducer| {
            reducer.begin(window([3, 4, 5][rank]), 1.0).unwrap();
            reducer.pack(0, data(&[1.0])).unwrap();
            reducer.launch_rest().unwrap();
            reducer.wait().map(|_| ()).unwrap_err().to_string()
        });
        for error in all {
            let counts = "3 backward pass(es) on rank(s) [0], 4 on [1], 5 on [2]";
            assert!(error.contains(counts), "{error}");
        }
    }
}

#[test]
fn ddp_04_windows_are_compared_exactly_in_every_element_type() {
    // 127 / 3 is no bf16 number: the mean of the ranks' window lengths is rounded.
    let l = layout(&[("w", 1, DType::BF16)]);
    for op in [Reduction::Mean, Reduction::Sum] {
        for (last, equal) in [(127, true), (126, false)] {
            ranks(3, &l, op, |rank, mut reducer| {
                reducer
                    .begin(window(if rank == 2 { last } else { 127 }), 1.0)
                    .unwrap();
                let one = TensorData::new(vec![bf16::from_f32(1.0)], [1]);
                reducer.pack(0, one).unwrap();
                reducer.launch_rest().unwrap();
                assert_eq!(reducer.wait().is_ok(), equal);
            });
        }
    }
}

#[test]
fn ddp_22_the_order_of_rank_0_decides_the_new_buckets() {
    let l = layout(&[
        ("a", 1, DType::F32),
        ("b", 1, DType::F32),
        ("c", 1, DType::F32),
    ]);
    let all = ranks(2, &l, Reduction::Mean, |rank, mut reducer| {
        round(&mut reducer, &[(0, 1.0), (1, 1.0), (2, 1.0)]);
        let first_use = if rank == 0 { &[1, 2, 0] } else { &[0, 1, 2] };
        reducer.rebuild(first_use).unwrap();
        let order: Vec<usize> = reducer.order().collect();
        let slots = |b: &BucketPlan| b.placements.iter().map(|p| p.slot).collect::<Vec<_>>();
        let buckets: Vec<_> = reducer.plans().map(slots).collect();
        (
            order,
            buckets,
            round(&mut reducer, &[(0, 1.0), (1, 2.0), (2, 4.0)]),
        )
    });
    for (order, buckets, gradients) in all {
        assert_eq!(order, [1, 2, 0]);
        assert_eq!(buckets, [vec![0], vec![2, 1]], "reverse order of first use");
        assert_eq!(
            gradients,
            [Some(vec![1.0]), Some(vec![2.0]), Some(vec![4.0])]
        );
    }
}

#[test]
fn ddp_38_gradients_that_were_handed_out_are_not_overwritten() {
    let l = layout(&[("w", 2, DType::F32)]);
    ranks(2, &l, Reduction::Mean, |rank, mut reducer| {
        let mut kept = Vec::new();
        for step in 0..3 {
            reducer.begin(window(1), 1.0).unwrap();
            reducer
                .pack(0, data(&[(step * 2 + rank) as f32; 2]))
                .unwrap();
            reducer.launch_rest().unwrap();
            kept.push(reducer.wait().unwrap().gradients.remove(0));
        }
        let kept: Vec<_> = kept.iter().map(values).collect();
        assert_eq!(
            kept,
            [Some(vec![0.5; 2]), Some(vec![2.5; 2]), Some(vec![4.5; 2])]
        );
    });
}
