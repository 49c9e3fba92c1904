//! The star over loopback sockets, without a rendezvous.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::{frame::Frame, *};
use crate::group::recorder::Report;
use std::{net::TcpListener, time::Instant};

fn member(rank: usize, world_size: usize) -> Membership {
    Membership {
        rank,
        world_size,
        job: 7,
        generation: 0,
        operation_timeout: Duration::from_secs(20),
        heartbeat: Heartbeat::default(),
    }
}

fn socket_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

fn control(member: Membership, links: Vec<(usize, TcpStream)>) -> TcpControl {
    let hosts = (0..member.world_size).map(|rank| format!("node{rank}"));
    let waker = Arc::new(Waker::new().unwrap());
    TcpControl::over(member, hosts.collect(), links, None, waker).unwrap()
}

/// Rank 0 and the raw far ends of its links, for tests that play the other ranks.
fn rank_zero(world_size: usize, change: impl Fn(&mut Membership)) -> (TcpControl, Vec<TcpStream>) {
    let (mut links, mut far) = (Vec::new(), Vec::new());
    for peer in 1..world_size {
        let (near, end) = socket_pair();
        links.push((peer, near));
        far.push(end);
    }
    let mut member = member(0, world_size);
    change(&mut member);
    (control(member, links), far)
}

/// All ranks of a job, for the tests of what is built on a control plane.
pub(in super::super) fn star_with(
    world_size: usize,
    change: impl Fn(&mut Membership),
) -> Vec<TcpControl> {
    let (zero, far) = rank_zero(world_size, &change);
    let mut all = vec![zero];
    all.extend(far.into_iter().enumerate().map(|(i, stream)| {
        let mut member = member(i + 1, world_size);
        change(&mut member);
        control(member, vec![(0, stream)])
    }));
    all
}

fn star(world_size: usize) -> Vec<TcpControl> {
    star_with(world_size, |_| {})
}

/// What `check` comes to say within ten seconds.
fn trouble(control: &TcpControl, missing: &[usize]) -> GroupError {
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        if let Err(error) = control.check(&|| missing.to_vec(), &|| "in a test".into()) {
            return error;
        }
        thread::sleep(Duration::from_millis(2));
    }
    panic!("rank {} noticed nothing", control.rank());
}

fn abort(control: &TcpControl, reason: &str) {
    let rank = control.rank();
    control.fail(GroupError::aborted(rank, rank, reason));
}

/// The reason of an abort by `origin`, as `rank` sees it.
fn reason(error: &GroupError, rank: usize, origin: usize) -> &str {
    match error {
        GroupError::Aborted {
            rank: by,
            origin: from,
            host,
            reason,
            ..
        } if (*by, *from) == (rank, origin) && *host == format!("node{origin}") => reason,
        other => panic!("{other:?}"),
    }
}

fn hear(stream: &TcpStream) -> Frame {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match super::super::wire::receive(stream, frame::limit(4), deadline).unwrap() {
            Frame::Heartbeat => {}
            frame => return frame,
        }
    }
}

fn say(stream: &TcpStream, frame: &Frame) {
    let deadline = Instant::now() + Duration::from_secs(10);
    super::super::wire::send(stream, frame, frame::limit(4), deadline).unwrap();
}

#[test]
fn exchange_gathers_in_rank_order_by_tag() {
    let all = star(3);
    thread::scope(|scope| {
        for control in &all {
            for tag in [5u64, 6] {
                scope.spawn(move || {
                    for round in 0..20u8 {
                        let mine = [control.rank() as u8, tag as u8, round];
                        let expected: Vec<Vec<u8>> =
                            (0..3).map(|rank| vec![rank, tag as u8, round]).collect();
                        assert_eq!(control.exchange(tag, &mine).unwrap(), expected);
                    }
                });
            }
        }
    });
    assert!(all.iter().all(|control| control.shared.pending() == 0));
    let error = all[1]
        .exchange(5, &vec![0; EXCHANGE_LIMIT + 1])
        .unwrap_err();
    assert!(
        matches!(error, GroupError::InvalidArgument { rank: 1, .. }),
        "{error}"
    );
}

#[test]
fn an_exchange_at_its_limit_fits_its_frame() {
    let all = star(3);
    thread::scope(|scope| {
        for control in &all {
            scope.spawn(move || {
                let parts = control
                    .exchange(0, &vec![control.rank() as u8; EXCHANGE_LIMIT])
                    .unwrap();
                assert!(
                    parts
                        .iter()
                        .zip(0u8..)
                        .all(|(part, rank)| *part == vec![rank; EXCHANGE_LIMIT])
                );
            });
        }
    });
}

#[test]
fn ddp_03_a_closed_connection_is_the_loss_of_its_rank_on_all() {
    let (zero, mut far) = rank_zero(3, |_| {});
    let two = control(member(2, 3), vec![(0, far.pop().unwrap())]);
    drop(far);
    for control in [&zero, &two] {
        let GroupError::PeerLost {
            rank,
            peer: 1,
            operation,
            ..
        } = trouble(control, &[])
        else {
            panic!()
        };
        assert_eq!((rank, operation.as_str()), (control.rank(), "in a test"));
    }
}

#[test]
fn ddp_03_the_loss_of_rank_0_is_seen_by_all() {
    let (near, far) = socket_pair();
    let one = control(member(1, 2), vec![(0, near)]);
    drop(far);
    assert!(matches!(
        trouble(&one, &[]),
        GroupError::PeerLost {
            rank: 1,
            peer: 0,
            ..
        }
    ));
}

#[test]
fn a_silent_peer_is_lost_and_a_beating_one_is_not() {
    let heartbeat = Heartbeat {
        interval: Duration::from_millis(50),
        limit: Duration::from_millis(400),
    };
    let (zero, far) = rank_zero(3, |member| member.heartbeat = heartbeat);
    // Rank 1 is alive, rank 2 is a process that was stopped.
    let one = thread::spawn({
        let stream = far[0].try_clone().unwrap();
        move || {
            let mut rounds = 0;
            // Ends when rank 0 says that the job failed.
            loop {
                say(&stream, &Frame::Heartbeat);
                let frame = super::super::wire::receive::<Frame>(
                    &stream,
                    frame::limit(3),
                    Instant::now() + Duration::from_secs(10),
                );
                rounds += 1;
                match frame.unwrap() {
                    Frame::Heartbeat => {}
                    frame => return (rounds, frame),
                }
            }
        }
    });
    let error = trouble(&zero, &[]);
    assert!(
        matches!(&error, GroupError::PeerLost { peer: 2, cause, .. } if cause.contains("no sign of life")),
        "{error}"
    );
    let (rounds, frame) = one.join().unwrap();
    assert!(
        matches!(frame, Frame::Failed(Failure::Lost { peer: 2, .. })),
        "{frame:?}"
    );
    assert!(rounds > 1);
}

#[test]
fn the_first_failure_wins_and_reaches_all() {
    let all = star(3);
    abort(&all[2], "bad loss");
    abort(&all[2], "later");
    for control in &all {
        let rank = control.rank();
        assert_eq!(reason(&trouble(control, &[]), rank, 2), "bad loss");
        // And it ends exchanges.
        let error = control.exchange(1, b"x").unwrap_err();
        assert_eq!(reason(&error, rank, 2), "bad loss");
        let error = error.to_string();
        assert!(error.contains(" into control exchange 0x1"), "{error}");
    }
}

#[test]
fn a_failure_right_before_the_end_still_reaches_the_peers() {
    for _ in 0..20 {
        let mut all = star(2);
        let one = all.pop().unwrap();
        abort(&one, "last words");
        drop(one);
        assert_eq!(reason(&trouble(&all[0], &[]), 0, 1), "last words");
    }
}

#[test]
fn ddp_41_leaving_is_no_failure_until_the_rank_is_needed() {
    for leaver in 0..3 {
        let mut all = star(3);
        drop(all.remove(leaver));
        for control in &all {
            let deadline = Instant::now() + Duration::from_secs(10);
            while control.shared.left_ranks() != [leaver] {
                assert!(
                    Instant::now() < deadline,
                    "rank {} did not hear of {leaver}",
                    control.rank()
                );
                thread::sleep(Duration::from_millis(2));
            }
            let others: Vec<usize> = (0..3).filter(|rank| *rank != leaver).collect();
            control
                .check(&|| others.clone(), &|| "in a test".into())
                .unwrap();
        }
        for control in &all {
            let error = control.exchange(3, b"x").unwrap_err();
            assert!(
                matches!(error, GroupError::PeerLeft { peer, .. } if peer == leaver),
                "{error}"
            );
            // Poisoned from here on.
            assert!(
                matches!(trouble(control, &[]), GroupError::PeerLeft { peer, .. } if peer == leaver)
            );
        }
    }
}

#[test]
fn ddp_41_all_may_leave_at_once_in_any_order() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
        let mut all: Vec<_> = star(3).into_iter().map(Some).collect();
        let start = Instant::now();
        for rank in order {
            all[rank] = None;
        }
        // Each goodbye is answered; only an unanswered one takes its whole limit.
        assert!(start.elapsed() < monitor::GOODBYE, "{order:?}");
    }
}

#[test]
fn an_exchange_that_a_rank_does_not_come_to_names_it() {
    let (zero, far) = rank_zero(3, |member| {
        member.operation_timeout = Duration::from_millis(200)
    });
    // Rank 1 comes, rank 2 does not.
    say(
        &far[0],
        &Frame::Give {
            tag: 9,
            sequence: 0,
            data: vec![1],
        },
    );
    let error = zero.exchange(9, b"x").unwrap_err();
    let GroupError::Timeout {
        rank: 0, missing, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(*missing, [2]);
    let report = Report {
        cause: "",
        hosts: &[],
        tails: &[Some(zero.recorder().tail())],
    };
    let report = report.to_string();
    assert!(
        report.contains("control exchange 0x9.0, failed after "),
        "{report}"
    );
    assert!(matches!(
        hear(&far[1]),
        Frame::Failed(Failure::Other { origin: 0, .. })
    ));
}

#[test]
fn an_exchange_that_rank_0_does_not_come_to_ends_too() {
    let heartbeat = Heartbeat {
        interval: Duration::from_millis(20),
        limit: Duration::from_secs(10),
    };
    let (_zero, far) = rank_zero(2, |member| {
        member.operation_timeout = Duration::from_millis(100);
        member.heartbeat = heartbeat;
    });
    say(
        &far[0],
        &Frame::Give {
            tag: 9,
            sequence: 0,
            data: vec![1],
        },
    );
    let Frame::Failed(Failure::Other {
        error: GroupError::Timeout { missing, .. },
        ..
    }) = hear(&far[0])
    else {
        panic!()
    };
    assert_eq!(missing, [0]);
}

#[test]
fn nonsense_on_a_control_connection_is_the_loss_of_its_rank() {
    let foreign = Frame::All {
        tag: 0,
        sequence: 0,
        parts: vec![Vec::new(); 2],
    };
    let bodies = [
        u32::MAX.to_le_bytes().to_vec(),
        vec![1, 0, 0, 0, 99],
        super::super::wire::encode(&foreign, 100).unwrap(),
    ];
    for bytes in bodies {
        let (zero, far) = rank_zero(2, |_| {});
        super::super::wire::write_all(&far[0], &bytes, Instant::now() + Duration::from_secs(10))
            .unwrap();
        let error = trouble(&zero, &[]);
        assert!(
            matches!(&error, GroupError::PeerLost { peer: 1, cause, .. } if cause.contains("message")),
            "{error}"
        );
    }
}

#[test]
fn a_panic_is_told_as_a_loss() {
    let mut all = star(2);
    let one = all.pop().unwrap();
    let result = thread::spawn(move || {
        let _one = one;
        panic!("on purpose");
    })
    .join();
    assert!(result.is_err());
    let error = trouble(&all[0], &[]);
    assert!(
        matches!(&error, GroupError::PeerLost { peer: 1, cause, .. } if cause == "it panicked"),
        "{error}"
    );
}
