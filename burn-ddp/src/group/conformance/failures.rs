//! Time-outs, aborts, wrong arguments.

use super::{
    super::{DType, GroupError, ReduceOp},
    Group, LONG, Make, SHORT, bytes, ranks,
};
use std::time::Duration;

pub(crate) fn timeout_names_all_missing(make: Make<'_>) {
    for missing in missing_of_timeouts(make) {
        assert_eq!(missing, [1, 3]);
    }
}

pub(crate) fn timeout_names_missing(make: Make<'_>) {
    for missing in missing_of_timeouts(make) {
        assert!(!missing.is_empty() && missing.iter().all(|rank| [1, 3].contains(rank)));
    }
}

/// Ranks 0 and 2 of four come to an operation. Whom they miss, of those that are here and give up first.
fn missing_of_timeouts(make: Make<'_>) -> Vec<Vec<usize>> {
    let groups = make(4, SHORT);
    let everyone = groups.len() == 4;
    let (early, late): (Vec<Group>, Vec<Group>) =
        groups.into_iter().partition(|g| g.rank().is_multiple_of(2));
    let errors = ranks(&early, |g| {
        g.all_reduce(&mut [0; 8], DType::F32, ReduceOp::Sum)
            .unwrap_err()
    });
    let mut first = Vec::new();
    for error in errors {
        match error {
            GroupError::Timeout {
                elapsed,
                missing,
                operation,
                ..
            } => {
                first.push(missing);
                assert!(elapsed >= SHORT);
                assert!(
                    operation.starts_with("all_reduce(sum) of 2 x f32"),
                    "{operation}"
                );
            }
            GroupError::Aborted { .. } => assert!(error.to_string().contains("timed out")),
            other => panic!("{other}"),
        }
    }
    assert!(
        !first.is_empty() || !everyone,
        "one rank is the first to give up"
    );
    // Who comes late learns it at once.
    if early.is_empty() {
        std::thread::sleep(4 * SHORT);
    }
    for g in late {
        let rank = g.rank();
        let error = g
            .all_reduce(&mut [0; 8], DType::F32, ReduceOp::Sum)
            .unwrap_err();
        assert!(
            matches!(error, GroupError::Aborted { rank: reporter, .. } if reporter == rank),
            "{error}"
        );
        assert!(error.to_string().contains("timed out"), "{error}");
    }
    first
}

pub(crate) fn a_monitored_barrier_outlasts_the_limit(make: Make<'_>) {
    let groups = make(3, SHORT);
    ranks(&groups, |g| {
        if g.rank() == 0 {
            std::thread::sleep(SHORT * 3);
        }
        g.monitored_barrier().unwrap();
        // And ends with the job. Not at once: the others may not be out of the first yet.
        if g.rank() == 1 {
            std::thread::sleep(SHORT);
            g.abort("enough");
        }
        let error = g.monitored_barrier().unwrap_err();
        assert!(
            matches!(&error, GroupError::Aborted { origin: 1, reason, .. } if reason == "enough"),
            "{error}"
        );
    });
}

pub(crate) fn abort_ends_every_wait(make: Make<'_>) {
    let groups = make(3, LONG);
    let errors = ranks(&groups, |g| {
        if g.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
            g.abort("the disk is full");
            g.abort("not this one");
        }
        g.barrier().unwrap_err()
    });
    for (g, error) in groups.iter().zip(&errors) {
        let GroupError::Aborted {
            rank: reporter,
            origin: 1,
            reason,
            ..
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!((*reporter, reason.as_str()), (g.rank(), "the disk is full"));
    }
    for g in &groups {
        assert!(g.failure().is_some());
        g.all_gather(&[0], &mut [0; 3], DType::U8).unwrap_err();
        g.buffer(64).unwrap_err();
        g.new_group().unwrap_err();
    }
}

pub(crate) fn invalid_arguments_leave_the_group_usable(make: Make<'_>) {
    ranks(&make(2, LONG), |g| {
        let mut buffer = g.buffer(64).unwrap();
        for refused in [
            g.all_reduce(&mut [0; 6], DType::F32, ReduceOp::Sum),
            g.all_reduce(&mut [0; 8], DType::I32, ReduceOp::Mean),
            g.broadcast(&mut [0; 8], DType::I32, 2),
            g.all_gather(&[0; 4], &mut [0; 4], DType::F32),
            g.reduce_scatter(&[0; 8], &mut [0; 8], DType::F32, ReduceOp::Sum),
            g.reduce_scatter(&[0; 4], &mut [0; 2], DType::F32, ReduceOp::Sum),
            buffer.all_reduce(68, DType::F32, ReduceOp::Sum),
            buffer.all_reduce(usize::MAX - 3, DType::F32, ReduceOp::Sum),
        ] {
            let error = refused.unwrap_err();
            assert!(
                matches!(error, GroupError::InvalidArgument { .. }),
                "{error}"
            );
        }
        assert_eq!(g.failure(), None);
        let mut x = [1.5f32];
        g.all_reduce(bytes(&mut x), DType::F32, ReduceOp::Sum)
            .unwrap();
        assert_eq!(x, [3.0]);
    });
}
