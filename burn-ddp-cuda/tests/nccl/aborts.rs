//! Abort from any thread at any time.

use crate::common::{LONG, Mock, Rank, STREAM, kind, mock, post, ranks, settings, sum};
use burn_ddp_cuda::nccl::Communicator;
use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

/// Time for the other thread to get to where it hangs; the test is right without it, too.
const A_WHILE: Duration = Duration::from_millis(200);

/// Runs `hangs` on this thread and aborts from another.
fn aborted_in(rank: &Rank, communicator: &Communicator, hangs: impl FnOnce() -> String) -> String {
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(A_WHILE);
            communicator.abort("rank 7 has failed");
        });
        hangs()
    });
    rank.mock.synchronize(STREAM);
    rank.mock.assert_clean();
    result
}

fn expected(operation: &str) -> Vec<String> {
    let on = |rank| format!("rank {rank} of 2: {operation} aborted: rank 7 has failed");
    vec![on(0), on(1)]
}

#[test]
fn while_an_operation_hangs_on_the_stream() {
    let test = "aborts::while_an_operation_hangs_on_the_stream";
    let results = ranks(2).fault("hang@1").run(test, |rank| {
        let communicator = rank.init("id", settings(LONG)).unwrap();
        aborted_in(&rank, &communicator, || {
            kind(sum(&rank.mock, &communicator, 1.0).unwrap_err())
        })
    });
    assert_eq!(results, expected("the stream"));
}

#[test]
fn while_an_operation_is_in_progress() {
    let test = "aborts::while_an_operation_is_in_progress";
    let results = ranks(2).fault("enqueue-hang").run(test, |rank| {
        let communicator = rank.init("id", settings(LONG)).unwrap();
        aborted_in(&rank, &communicator, || {
            kind(sum(&rank.mock, &communicator, 1.0).unwrap_err())
        })
    });
    assert_eq!(results, expected("all_reduce of 3 f32 (sum)"));
}

#[test]
fn during_the_start() {
    let test = "aborts::during_the_start";
    let results = ranks(2).fault("init-hang").run(test, |rank| {
        let communicator = rank.start("id", settings(LONG)).unwrap();
        aborted_in(&rank, &communicator, || {
            kind(communicator.ready().unwrap_err())
        })
    });
    assert_eq!(results, expected("init"));
}

#[test]
fn during_the_close() {
    let test = "aborts::during_the_close";
    let results = ranks(2).fault("finalize-hang").run(test, |rank| {
        let communicator = rank.init("id", settings(LONG)).unwrap();
        aborted_in(&rank, &communicator, || {
            kind(communicator.close().unwrap_err())
        })
    });
    assert_eq!(results, expected("close"));
}

/// A thread waits for its turn while another's operation hangs: abort ends both.
#[test]
fn while_a_thread_waits_for_its_turn() {
    let test = "aborts::while_a_thread_waits_for_its_turn";
    let results = ranks(2).fault("enqueue-hang").run(test, |rank| {
        let communicator = rank.init("id", settings(LONG)).unwrap();
        aborted_in(&rank, &communicator, || {
            let run = || kind(post(&communicator, vec![0.0; 3].leak()).unwrap_err());
            thread::scope(|scope| {
                let other = scope.spawn(run);
                let mine = run();
                assert_eq!(mine, other.join().unwrap());
                mine
            })
        })
    });
    assert_eq!(results, expected("all_reduce of 3 f32 (sum)"));
}

/// NCCL itself does not return. The communicator cannot be freed then, but nobody else hangs.
#[test]
fn while_a_call_never_returns() {
    let test = "aborts::while_a_call_never_returns";
    let results = ranks(1).fault("call-hang").run(test, |rank| {
        // Outlives this function, as the thread that hangs does.
        let communicator: &Communicator =
            Box::leak(Box::new(rank.init("id", settings(LONG)).unwrap()));
        let called = Box::leak(Box::new(AtomicBool::new(false)));
        thread::spawn(|| {
            called.store(true, Ordering::Release);
            post(communicator, vec![0.0; 3].leak())
        });
        mock::eventually("the call has begun", || called.load(Ordering::Acquire));
        thread::sleep(A_WHILE);
        // A watchdog is not held up either.
        communicator.check().unwrap();
        communicator.abort("enough");
        communicator.abort("once more");
        assert_eq!(rank.mock.live(), 1);
        kind(sum(&rank.mock, communicator, 1.0).unwrap_err())
    });
    assert_eq!(
        results,
        ["rank 0 of 1: all_reduce of 3 f32 (sum) aborted: enough"]
    );
}

/// ncclCommAbort itself does not return.
#[test]
fn that_never_returns() {
    let test = "aborts::that_never_returns";
    let results = ranks(1).fault("abort-hang,hang").run(test, |rank| {
        let communicator = rank
            .init("id", settings(Duration::from_millis(300)))
            .unwrap();
        let error = sum(&rank.mock, &communicator, 1.0).unwrap_err();
        assert!(!rank.mock.is_done(STREAM));
        drop(communicator);
        kind(error)
    });
    assert_eq!(results, ["rank 0 of 1: the stream timed out"]);
}

/// The thread that aborts is prepared first; that it panics does not keep the communicator.
#[test]
fn on_a_thread_that_the_caller_prepares() {
    let test = "aborts::on_a_thread_that_the_caller_prepares";
    let results = ranks(1).run(test, |rank| {
        let (sender, receiver) = mpsc::channel();
        let mut settings = settings(LONG);
        settings.on_thread_start = Some(Arc::new(move || {
            let name = thread::current().name().map(str::to_owned);
            sender.send(name).unwrap();
            panic!("this is part of the test");
        }));
        let communicator = rank.init("id", settings).unwrap();
        communicator.abort("no reason");
        rank.mock.assert_clean();
        drop(communicator);
        let names: Vec<_> = receiver.iter().flatten().collect();
        names.join(" ")
    });
    assert_eq!(results, ["nccl-release"]);
}

/// Threads run operations and look for errors while others abort, at every moment of a communicator's life.
#[test]
fn at_every_moment() {
    let test = "aborts::at_every_moment";
    let results = ranks(1).run(test, |rank| {
        for round in 0..150 {
            one_round(&rank.mock, round);
        }
        rank.mock.assert_clean();
        "done".into()
    });
    assert_eq!(results, ["done"]);
}

fn one_round(mock: &Mock, round: u64) {
    let id = mock.library.unique_id().unwrap();
    let communicator = Communicator::start(&mock.library, &id, 0, 1, settings(LONG)).unwrap();
    let together = Barrier::new(4);
    let aborted = |error| {
        let error = kind(error);
        assert!(error.ends_with("aborted: now"), "{error}");
    };
    thread::scope(|scope| {
        let work = || {
            together.wait();
            loop {
                if let Err(error) = sum(mock, &communicator, 1.0) {
                    return aborted(error);
                }
            }
        };
        scope.spawn(work);
        scope.spawn(work);
        scope.spawn(|| {
            together.wait();
            loop {
                if let Err(error) = communicator.check() {
                    return aborted(error);
                }
            }
        });
        together.wait();
        thread::sleep(Duration::from_micros(round * 40));
        communicator.abort("now");
        communicator.abort("later");
    });
    mock.synchronize(STREAM);
}
