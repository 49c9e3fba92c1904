#![allow(clippy::unwrap_used)]

use super::*;
use crate::group::{GroupError, ReduceOp};

fn descriptor(group: u32, sequence: u64, kind: OpKind, count: u64) -> OpDescriptor {
    OpDescriptor {
        job: 7,
        generation: 0,
        group,
        sequence,
        kind,
        dtype: DType::F32,
        count,
        buffer: 0,
    }
}

fn barrier(group: u32, sequence: u64) -> OpDescriptor {
    descriptor(group, sequence, OpKind::Barrier, 0)
}

/// Sequence numbers in a tail, by age, and whether each still runs.
fn shape(recorder: &Recorder) -> Vec<(u32, u64, bool)> {
    let records = recorder.tail().records.into_iter();
    records
        .map(|r| {
            let Operation::Collective {
                group, sequence, ..
            } = r.operation
            else {
                unreachable!()
            };
            (group, sequence, r.state == State::Pending)
        })
        .collect()
}

#[test]
fn the_last_operations_stay_and_those_that_run() {
    let recorder = Recorder::new();
    let hanging = recorder.begin(&barrier(9, 0));
    for sequence in 0..600 {
        recorder.begin(&barrier(1, sequence)).end(Ok(())).unwrap();
    }
    let tail = shape(&recorder);
    assert_eq!(tail.len(), CAPACITY);
    assert_eq!(tail[0], (9, 0, true));
    // 255 places are left for the others.
    assert_eq!((tail[1], tail[255]), ((1, 345, false), (1, 599, false)));
    hanging.end(Ok(())).unwrap();
    assert_eq!(shape(&recorder)[0], (9, 0, false));
}

#[test]
fn an_end_does_not_touch_what_has_taken_its_place() {
    let recorder = Recorder::new();
    let running: Vec<_> = (0..CAPACITY as u64 + 1)
        .map(|sequence| recorder.begin(&barrier(1, sequence)))
        .collect();
    // All run, so the oldest lost its place to the newest.
    for (sequence, running) in running.into_iter().enumerate() {
        running.end(Ok(())).unwrap();
        let pending = shape(&recorder)
            .iter()
            .filter(|(.., pending)| *pending)
            .count();
        assert_eq!(pending, CAPACITY - sequence);
    }
}

#[test]
fn an_error_learns_how_long_its_operation_ran() {
    let recorder = Recorder::new();
    let running = recorder.begin(&barrier(1, 0));
    let error: Result<()> = running.end(Err(GroupError::aborted(0, 1, "enough")));
    let GroupError::Aborted { elapsed, .. } = error.unwrap_err() else {
        unreachable!()
    };
    assert!(elapsed > Duration::ZERO);
    assert!(matches!(recorder.tail().records[0].state, State::Failed(_)));
}

fn record(d: OpDescriptor, age: u64, state: State) -> Record {
    Record {
        operation: Operation::from(&d),
        age: age * 1_000_000,
        state,
    }
}

#[test]
fn the_report_names_who_is_behind_and_where_ranks_differ() {
    const SECOND: u64 = 1_000_000;
    let sum = |sequence| descriptor(1, sequence, OpKind::AllReduce(ReduceOp::Sum), 8);
    let tail = |records| Some(Tail { records });
    let tails = [
        tail(vec![
            record(sum(4), 25, State::Completed(SECOND)),
            record(sum(5), 20, State::Failed(20 * SECOND)),
        ]),
        tail(vec![record(sum(4), 25, State::Completed(2 * SECOND))]),
        None,
        // Took another branch, long ago.
        tail(vec![
            record(
                descriptor(1, 4, OpKind::Broadcast { root: 0 }, 8),
                25,
                State::Completed(SECOND),
            ),
            record(sum(5), 20, State::Pending),
        ]),
    ];
    let hosts = ["a", "a", "node7", "node7"].map(str::to_owned);
    let report = Report {
        cause: "a barrier timed out",
        hosts: &hosts,
        tails: &tails,
    };
    assert_eq!(
        report.to_string(),
        "the job failed: a barrier timed out\n\
         rank  host   last completed                               pending\n\
         0     a      1.4 all_reduce(sum) of 8 x f32, 24.0s ago    1.5 all_reduce(sum) of 8 x f32, failed after 20.0s\n\
         1     a      1.4 all_reduce(sum) of 8 x f32, 23.0s ago    none\n\
         2     node7  did not answer\n\
         3     node7  1.4 broadcast(root 0) of 8 x f32, 24.0s ago  1.5 all_reduce(sum) of 8 x f32, for 20.0s\n\
         behind in group 1, where 1.5 all_reduce(sum) of 8 x f32 is due:\n  \
           rank 1 is at 1.4 all_reduce(sum) of 8 x f32, 23.0s ago\n\
         first difference in group 1:\n  \
           1.4 all_reduce(sum) of 8 x f32 on rank(s) [0, 1]\n  \
           1.4 broadcast(root 0) of 8 x f32 on rank(s) [3]\n"
    );
}

#[test]
fn the_report_names_who_has_not_come_to_the_set_up_of_a_group() {
    let waits = Recorder::new();
    // In an order that has nothing to tell: it must not take the place of one that has.
    for tag in 0..100 {
        waits.begin_exchange(tag, 0).end(Ok(())).unwrap();
    }
    let _first = waits.begin_exchange(0x7463_7072_0000_0002, 0);
    let elsewhere = Recorder::new();
    for tag in 0..100 {
        elsewhere.begin_exchange(tag, 0).end(Ok(())).unwrap();
    }
    let report = Report {
        cause: "x",
        hosts: &[],
        tails: &[Some(waits.tail()), Some(elsewhere.tail())],
    }
    .to_string();
    assert!(
        report.ends_with(
            "behind in control exchanges 0x7463707200000002, where control exchange 0x7463707200000002.0 is due:\n  \
             rank 1 has no operation there\n"
        ),
        "{report}"
    );
}

#[test]
fn ranks_that_all_wait_in_the_same_operation_are_not_behind() {
    let tail = || {
        Some(Tail {
            records: vec![record(barrier(0, 3), 1, State::Pending)],
        })
    };
    let report = Report {
        cause: "x",
        hosts: &[],
        tails: &[tail(), tail()],
    };
    assert_eq!(
        report.to_string(),
        "the job failed: x\n\
         rank  host  last completed  pending\n\
         0           none            0.3 barrier, for 1.0s\n\
         1           none            0.3 barrier, for 1.0s\n"
    );
}
