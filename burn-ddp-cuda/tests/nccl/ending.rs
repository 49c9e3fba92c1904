//! The end in good order.

use crate::common::{LONG, SHORT, STREAM, kind, post, ranks, settings, sum};
use burn_ddp_cuda::nccl::{DType, DevicePtr, NcclError, ReduceOp};
use std::time::Duration;

#[test]
fn close_waits_for_what_is_on_the_stream() {
    let test = "ending::close_waits_for_what_is_on_the_stream";
    let results = ranks(2).run(test, |rank| {
        let communicator = rank.init("id", settings(LONG)).unwrap();
        let data: &'static mut [f32] = vec![1.5; 1000].leak();
        let first = data.as_ptr();
        post(&communicator, data).unwrap();
        communicator.close().unwrap();
        assert!(rank.mock.is_done(STREAM));
        // SAFETY: the stream is done, and nothing else uses the data.
        assert_eq!(unsafe { first.add(999).read() }, 3.0);
        rank.mock.assert_clean();
        let closed = communicator.close().unwrap_err();
        assert!(matches!(closed, NcclError::Closed { .. }));
        kind(post(&communicator, vec![0.0; 3].leak()).unwrap_err())
    });
    assert_eq!(
        results[0],
        "rank 0 of 2: all_reduce of 3 f32 (sum) was called after the communicator was closed"
    );
}

#[test]
fn a_rank_that_hangs_at_the_end() {
    let test = "ending::a_rank_that_hangs_at_the_end";
    let results = ranks(2).fault("finalize-hang@1").run(test, |rank| {
        let communicator = rank.init("id", settings(SHORT)).unwrap();
        let error = communicator.close().unwrap_err();
        rank.mock.assert_clean();
        kind(error)
    });
    assert_eq!(
        results,
        [
            "rank 0 of 2: close timed out",
            "rank 1 of 2: close timed out"
        ]
    );
}

#[test]
fn a_destroy_that_never_returns() {
    let test = "ending::a_destroy_that_never_returns";
    let results = ranks(1).fault("destroy-hang").run(test, |rank| {
        let communicator = rank.init("id", settings(SHORT)).unwrap();
        kind(communicator.close().unwrap_err())
    });
    assert_eq!(results, ["rank 0 of 1: close timed out"]);
}

/// Wrong arguments are errors before NCCL sees them, and leave the communicator as it is.
#[test]
fn wrong_arguments() {
    let test = "ending::wrong_arguments";
    let results = ranks(1).run(test, |rank| {
        let communicator = rank.init("id", settings(LONG)).unwrap();
        let null = DevicePtr::NULL;
        // SAFETY: no memory is named.
        let errors = unsafe {
            [
                communicator.all_reduce_in_place(null, 3, DType::F32, ReduceOp::Sum, STREAM),
                communicator.broadcast(null, 0, DType::F32, 1, STREAM),
                communicator.send(null, 0, DType::U8, 4, STREAM),
            ]
        };
        let errors = errors.map(|result| result.unwrap_err().to_string());
        assert_eq!(sum(&rank.mock, &communicator, 1.0).unwrap(), [1.0; 3]);
        communicator.close().unwrap();
        let id = rank.mock.library.unique_id().unwrap();
        let outside = burn_ddp_cuda::nccl::Communicator::init(
            &rank.mock.library,
            &id,
            2,
            2,
            settings(Duration::ZERO),
        );
        rank.mock.assert_clean();
        format!("{}\n{}", errors.join("\n"), outside.unwrap_err())
    });
    assert_eq!(
        results,
        [
            "rank 0 of 1: all_reduce of 3 f32 (sum): a null pointer for 3 elements\n\
          rank 0 of 1: broadcast of 0 f32 from rank 1: root 1 is not in 0..1\n\
          rank 0 of 1: send of 0 u8 to rank 4: peer 4 is not in 0..1\n\
          rank 2 of 2: init: rank 2 is not in 0..2"
        ]
    );
}
