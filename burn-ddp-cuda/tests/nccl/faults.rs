//! Everything that goes wrong is the right error on every rank, in time.

use crate::common::{LONG, Rank, SHORT, STREAM, kind, post, ranks, settings, sum};
use burn_ddp_cuda::nccl::Settings;
use std::time::Duration;

/// The start is what fails, so it has little time.
fn hasty() -> Settings {
    let mut settings = settings(SHORT);
    settings.init_timeout = Duration::from_millis(500);
    settings
}

/// Starts with `settings` and adds up once; returns the error, and that the next call returns because of it.
fn first_sum(rank: &Rank, settings: Settings) -> String {
    let communicator = match rank.init("id", settings) {
        Ok(communicator) => communicator,
        Err(error) => {
            rank.mock.assert_clean();
            return kind(error);
        }
    };
    let error = sum(&rank.mock, &communicator, 1.0).unwrap_err();
    let text = error.to_string();
    // What was on the stream has ended.
    rank.mock.synchronize(STREAM);
    let (rank_, world) = (rank.rank, rank.world);
    let aborted = format!("rank {rank_} of {world}: check aborted: {text}");
    assert_eq!(kind(communicator.check().unwrap_err()), aborted);
    let again = post(&communicator, vec![0.0; 3].leak()).unwrap_err();
    let sum = "all_reduce of 3 f32 (sum)";
    let aborted = format!("rank {rank_} of {world}: {sum} aborted: {text}");
    assert_eq!(kind(again), aborted);
    rank.mock.assert_clean();
    kind(error)
}

#[test]
fn a_rank_that_hangs_at_the_start() {
    let test = "faults::a_rank_that_hangs_at_the_start";
    let results = ranks(2)
        .fault("init-hang@1")
        .run(test, |rank| first_sum(&rank, hasty()));
    assert_eq!(
        results,
        ["rank 0 of 2: init timed out", "rank 1 of 2: init timed out"]
    );
}

#[test]
fn a_rank_that_does_not_come() {
    let test = "faults::a_rank_that_does_not_come";
    let results = ranks(4).run(test, |rank| match rank.rank {
        2 => "not there".into(),
        _ => first_sum(&rank, hasty()),
    });
    assert_eq!(
        results,
        [
            "rank 0 of 4: init timed out",
            "rank 1 of 4: init timed out",
            "not there",
            "rank 3 of 4: init timed out"
        ]
    );
}

#[test]
fn a_start_that_fails_in_the_background() {
    let test = "faults::a_start_that_fails_in_the_background";
    let results = ranks(2)
        .fault("init-error@1")
        .run(test, |rank| first_sum(&rank, hasty()));
    assert_eq!(
        results,
        [
            "rank 0 of 2: init timed out",
            "rank 1 of 2: init failed: ncclSystemError (2): mock: the start was made to fail"
        ]
    );
}

#[test]
fn a_start_that_is_refused() {
    let test = "faults::a_start_that_is_refused";
    let results = ranks(2)
        .fault("init-refused@0")
        .run(test, |rank| first_sum(&rank, hasty()));
    assert_eq!(
        results,
        [
            "rank 0 of 2: init failed: ncclSystemError (2): mock: the start was refused",
            "rank 1 of 2: init timed out"
        ]
    );
}

/// One rank fails in the call; the other finds nobody on its stream.
fn one_fails(test: &str, fault: &str, expected: &str) {
    let results = ranks(2)
        .fault(fault)
        .run(test, |rank| first_sum(&rank, settings(SHORT)));
    assert_eq!(results, ["rank 0 of 2: the stream timed out", expected]);
}

#[test]
fn a_call_that_fails() {
    one_fails(
        "faults::a_call_that_fails",
        "call-error@1",
        "rank 1 of 2: all_reduce of 3 f32 (sum) failed: ncclInvalidUsage (5): mock: ncclAllReduce was made to fail",
    );
}

#[test]
fn a_result_that_is_newer_than_this_crate() {
    one_fails(
        "faults::a_result_that_is_newer_than_this_crate",
        "call-unknown@1",
        "rank 1 of 2: all_reduce of 3 f32 (sum) failed: an unknown result (99): ",
    );
}

#[test]
fn an_operation_that_never_gets_to_the_stream() {
    one_fails(
        "faults::an_operation_that_never_gets_to_the_stream",
        "enqueue-hang@1",
        "rank 1 of 2: all_reduce of 3 f32 (sum) timed out",
    );
}

#[test]
fn an_operation_that_never_ends() {
    one_fails(
        "faults::an_operation_that_never_ends",
        "hang@1",
        "rank 1 of 2: the stream timed out",
    );
}

const BROKEN: &str =
    "failed: ncclRemoteError (6): mock: the connection to another rank was made to break";

/// Whether it is seen by the operation or by the wait for it is a matter of time.
#[test]
fn an_error_while_the_operation_runs() {
    let test = "faults::an_error_while_the_operation_runs";
    let results = ranks(2)
        .fault("async-error@1")
        .run(test, |rank| first_sum(&rank, settings(SHORT)));
    assert_eq!(results[0], "rank 0 of 2: the stream timed out");
    let seen = ["the stream", "all_reduce of 3 f32 (sum)"];
    let seen = seen.map(|operation| format!("rank 1 of 2: {operation} {BROKEN}"));
    assert!(seen.contains(&results[1]), "{results:?}");
}

/// Two operations are right; the third one breaks, and nobody is waiting for it.
#[test]
fn a_watchdog_sees_an_error() {
    let test = "faults::a_watchdog_sees_an_error";
    let results = ranks(2).fault("async-error:2").run(test, |rank| {
        let communicator = rank.init("id", settings(LONG)).unwrap();
        for value in [1.0, 2.0] {
            communicator.check().unwrap();
            let sum = sum(&rank.mock, &communicator, value).unwrap();
            assert_eq!(sum, [2.0 * value; 3]);
        }
        // It may break before this has returned, too.
        let mut result = post(&communicator, vec![0.0; 3].leak());
        while result.is_ok() {
            result = communicator.check();
        }
        rank.mock.synchronize(STREAM);
        rank.mock.assert_clean();
        kind(result.unwrap_err())
    });
    for (rank, result) in results.iter().enumerate() {
        let seen = ["check", "all_reduce of 3 f32 (sum)"];
        let seen = seen.map(|operation| format!("rank {rank} of 2: {operation} {BROKEN}"));
        assert!(seen.contains(result), "{results:?}");
    }
}

/// The process of rank 1 has gone; for NCCL that is no error.
#[test]
fn a_rank_that_dies() {
    let test = "faults::a_rank_that_dies";
    let results = ranks(2).run(test, |rank| {
        let communicator = rank.init("id", settings(SHORT)).unwrap();
        match rank.rank {
            // Leaves without an abort.
            1 => {
                std::mem::forget(communicator);
                "gone".into()
            }
            _ => {
                let error = sum(&rank.mock, &communicator, 1.0).unwrap_err();
                assert!(error.to_string().contains("A rank that died"), "{error}");
                rank.mock.synchronize(STREAM);
                kind(error)
            }
        }
    });
    assert_eq!(results, ["rank 0 of 2: the stream timed out", "gone"]);
}
