//! Rank 0 and its callers as threads over loopback, and what hostile callers do to them.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::{
    super::{
        poll::Waker, rendezvous_error::RendezvousError, secret::Secret, settings::Rendezvous, wire,
    },
    *,
};
use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

const SECRET: &[u8] = b"a secret of the tests";

fn settings(rank: usize, world_size: usize, address: SocketAddr) -> Rendezvous {
    Rendezvous::new(rank, world_size, address.ip().to_string(), address.port())
        .unwrap()
        .secret(Secret::new(SECRET).unwrap())
        .rendezvous_timeout(Duration::from_secs(20))
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn serve_with(mut settings: Rendezvous) -> Result<Joined, RendezvousError> {
    serve(&mut settings, &Arc::new(Waker::new().unwrap()))
}

/// Runs rank 0 over `zero` and each of `others` in a thread; results in that order.
fn meet(zero: Rendezvous, others: Vec<Rendezvous>) -> Vec<Result<Joined, RendezvousError>> {
    thread::scope(|scope| {
        let zero = scope.spawn(move || serve_with(zero));
        let others: Vec<_> = others
            .into_iter()
            .map(|settings| scope.spawn(move || join(&settings)))
            .collect();
        std::iter::once(zero)
            .chain(others)
            .map(|rank| rank.join().unwrap())
            .collect()
    })
}

#[test]
fn all_ranks_learn_the_job_and_the_peers() {
    let (listener, address) = listener();
    let zero = settings(0, 3, address).listener(listener);
    let joined: Vec<Joined> = meet(zero, vec![settings(2, 3, address), settings(1, 3, address)])
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert!(
        joined
            .iter()
            .all(|one| one.job == joined[0].job && one.peers == joined[0].peers)
    );
    let peers: Vec<_> = joined[0]
        .peers
        .iter()
        .map(|peer| (peer.rank, peer.pid))
        .collect();
    let pid = std::process::id();
    assert_eq!(peers, [(0, pid), (1, pid), (2, pid)]);
    let far_ends: Vec<usize> = joined[0].links.iter().map(|(rank, _)| *rank).collect();
    assert_eq!(far_ends, [1, 2]);
    assert_eq!(joined[1].links[0].0, 0);
}

#[test]
fn ddp_10_ranks_meet_under_every_name_of_this_machine() {
    for master in ["localhost", "127.0.0.1", "::1"] {
        // A port that was free a moment ago; the ranks bind it themselves here.
        let port =
            TcpListener::bind((master, 0)).map(|listener| listener.local_addr().unwrap().port());
        let Ok(port) = port else {
            assert_eq!(
                master, "::1",
                "this machine has no IPv6, which only this name needs"
            );
            continue;
        };
        let of = |rank| {
            Rendezvous::new(rank, 2, master, port)
                .unwrap()
                .secret(Secret::new(SECRET).unwrap())
        };
        for result in meet(of(0), vec![of(1)]) {
            result.unwrap();
        }
    }
}

#[test]
fn ddp_10_a_caller_tries_every_address() {
    let (listener, address) = listener();
    let zero = settings(0, 2, address).listener(listener);
    thread::scope(|scope| {
        scope.spawn(|| serve_with(zero).unwrap());
        let v6_first = move |_: &str, port| {
            Ok(vec![
                SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], port)),
                SocketAddr::from(([127, 0, 0, 1], port)),
            ])
        };
        join::join_with(&settings(1, 2, address), &v6_first).unwrap();
    });
}

#[test]
fn a_caller_waits_for_rank_0_to_come_up_and_says_what_it_tried() {
    let (listener, address) = listener();
    drop(listener);
    let late = thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        serve_with(settings(0, 2, address))
    });
    join(&settings(1, 2, address)).unwrap();
    drop(late.join().unwrap().unwrap());

    let error =
        join(&settings(1, 2, address).rendezvous_timeout(Duration::from_millis(100))).unwrap_err();
    assert!(matches!(error, RendezvousError::Timeout { rank: 1, .. }));
    let text = error.to_string();
    assert!(
        text.contains(&address.to_string()) && text.contains("refused"),
        "{text}"
    );
}

#[test]
fn a_time_out_names_the_missing_ranks_on_all_that_came() {
    let (listener, address) = listener();
    let zero = settings(0, 4, address)
        .listener(listener)
        .rendezvous_timeout(Duration::from_millis(600));
    for (rank, result) in meet(zero, vec![settings(2, 4, address)])
        .into_iter()
        .enumerate()
    {
        let text = result.unwrap_err().to_string();
        assert!(
            text.contains("rank(s) [1, 3] did not come"),
            "{rank}: {text}"
        );
    }
}

/// Every rank fails, with these words.
fn contradiction(zero: Rendezvous, others: Vec<Rendezvous>, words: &[&str]) {
    let start = Instant::now();
    for result in meet(zero, others) {
        let error = result.unwrap_err();
        assert!(
            matches!(error, RendezvousError::Inconsistent { .. }),
            "{error}"
        );
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
    // The case's own limit; the rendezvous time-out of these ranks is 20 s.
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn ddp_26_two_processes_with_one_rank() {
    let (listener, address) = listener();
    let zero = settings(0, 3, address).listener(listener);
    contradiction(
        zero,
        vec![settings(1, 3, address), settings(1, 3, address)],
        &["two processes say they are rank 1"],
    );
}

#[test]
fn ddp_26_a_second_rank_0() {
    let (listener, address) = listener();
    let zero = settings(0, 2, address).listener(listener);
    contradiction(
        zero,
        vec![settings(0, 2, address)],
        &["two processes say they are rank 0"],
    );
}

#[test]
fn ddp_26_world_sizes_that_differ() {
    let (listener, address) = listener();
    let zero = settings(0, 3, address).listener(listener);
    let others = vec![settings(1, 3, address), settings(2, 4, address)];
    contradiction(zero, others, &["says the world size is 3", "says 4"]);
}

#[test]
fn ranks_that_ask_for_different_transports() {
    let (listener, address) = listener();
    let zero = settings(0, 2, address)
        .listener(listener)
        .transport(super::super::Transport::Tcp);
    contradiction(zero, vec![settings(1, 2, address)], &["Tcp", "Auto"]);
}

#[test]
fn a_rank_beyond_the_size_and_another_version_contradict() {
    let (_, address) = listener();
    let us = Hello::new(&settings(0, 2, address));
    let verdict = |change: &dyn Fn(&mut Hello)| {
        let mut hello = Hello::new(&settings(1, 2, address));
        change(&mut hello);
        us.contradiction_with(&hello)
    };
    assert_eq!(verdict(&|_| {}), None);
    assert!(
        verdict(&|hello| hello.peer.rank = 2)
            .unwrap()
            .contains("says it is rank 2, but the world size is 2")
    );
    let text = verdict(&|hello| hello.version = "9.9.9".into()).unwrap();
    assert!(text.contains("9.9.9") && text.contains(VERSION), "{text}");
}

#[test]
fn another_secret_is_final_and_disturbs_nobody() {
    let (listener, address) = listener();
    let zero = settings(0, 2, address).listener(listener);
    thread::scope(|scope| {
        let zero = scope.spawn(move || serve_with(zero));
        let error = join(
            &settings(1, 2, address).secret(Secret::new(*b"another secret of the tests").unwrap()),
        )
        .unwrap_err();
        assert!(
            matches!(error, RendezvousError::WrongSecret { rank: 1, .. }),
            "{error}"
        );
        assert!(error.to_string().contains("another secret"), "{error}");
        join(&settings(1, 2, address)).unwrap();
        zero.join().unwrap().unwrap();
    });
}

#[test]
fn ddp_33_generations_do_not_mix() {
    let (listener, address) = listener();
    let zero = settings(0, 2, address).listener(listener).generation(2);
    thread::scope(|scope| {
        let zero = scope.spawn(move || serve_with(zero));
        let error = join(&settings(1, 2, address).generation(1))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("stale generation 1") && error.contains("generation 2"),
            "{error}"
        );
        join(&settings(1, 2, address).generation(2)).unwrap();
        zero.join().unwrap().unwrap();
    });
}

#[test]
fn ddp_33_a_rank_0_that_is_left_behind_gives_up() {
    let (listener, address) = listener();
    let zero = settings(0, 3, address).listener(listener).generation(2);
    thread::scope(|scope| {
        let zero = scope.spawn(move || serve_with(zero));
        let request = settings(1, 3, address)
            .generation(2)
            .rendezvous_timeout(Duration::from_secs(2));
        let request = scope.spawn(move || join(&request));
        // One that is ahead waits for its own rank 0.
        let ahead = settings(2, 3, address)
            .generation(5)
            .rendezvous_timeout(Duration::from_millis(500));
        let error = join(&ahead).unwrap_err();
        assert!(matches!(&error, RendezvousError::Timeout { .. }), "{error}");
        let error = zero.join().unwrap().unwrap_err();
        assert_eq!(error.later_generation(), Some(5), "{error}");
        // It was there or came too late.
        let error = request.join().unwrap().unwrap_err();
        assert!(
            matches!(
                &error,
                RendezvousError::Stale { generation: 5, .. }
                    | RendezvousError::Timeout { .. }
                    | RendezvousError::PeerLost { .. }
            ),
            "{error}"
        );
    });
}

#[test]
fn ddp_36_hostile_callers_do_not_disturb_the_group() {
    let (listener, address) = listener();
    let zero = settings(0, 2, address).listener(listener);
    thread::scope(|scope| {
        let zero = scope.spawn(move || serve_with(zero));
        let strange = |bytes: &[u8]| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(bytes).unwrap();
            stream
        };
        let magic_and_nonsense = [b"burnddp\x02".as_slice(), &[7; 64]].concat();
        // Held open: nothing, one byte, a request, a length of 4 GiB, the right magic with a wrong proof.
        let open = [
            strange(b""),
            strange(b"b"),
            strange(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
            strange(&[0xff; 4]),
            strange(&magic_and_nonsense),
        ];
        // One that proves the secret and then announces a hello of 4 GiB.
        let huge = TcpStream::connect(address).unwrap();
        let deadline = Instant::now() + Duration::from_secs(5);
        super::super::auth::call(
            &huge,
            &Secret::new(SECRET).unwrap(),
            super::super::auth::Purpose::Control,
            deadline,
        )
        .unwrap();
        wire::write_all(&huge, &u32::MAX.to_le_bytes(), deadline).unwrap();
        let mut rest = Vec::new();
        (&huge).read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty());

        join(&settings(1, 2, address)).unwrap();
        zero.join().unwrap().unwrap();
        drop(open);
    });
}

#[test]
fn ddp_36_a_time_out_counts_who_was_rejected() {
    let (listener, address) = listener();
    let zero = settings(0, 2, address)
        .listener(listener)
        .rendezvous_timeout(Duration::from_millis(700));
    thread::scope(|scope| {
        let zero = scope.spawn(move || serve_with(zero));
        for _ in 0..2 {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            // The handshake, and then the end: it was rejected.
            let mut all = Vec::new();
            let _ = stream.read_to_end(&mut all);
        }
        let text = zero.join().unwrap().unwrap_err().to_string();
        assert!(
            text.contains("2 connection(s) were rejected: 2 x the other end does not speak"),
            "{text}"
        );
    });
}

#[test]
fn a_rank_that_leaves_may_come_again_at_once() {
    let (listener, address) = listener();
    let zero = settings(0, 3, address).listener(listener);
    thread::scope(|scope| {
        let zero = scope.spawn(move || serve_with(zero));
        // Rank 1 comes and gives up before rank 2 is there.
        let hasty = settings(1, 3, address).rendezvous_timeout(Duration::from_millis(200));
        assert!(join(&hasty).is_err());
        let one = scope.spawn(move || join(&settings(1, 3, address)));
        join(&settings(2, 3, address)).unwrap();
        one.join().unwrap().unwrap();
        zero.join().unwrap().unwrap();
    });
}

#[test]
fn ddp_03_a_rank_that_is_gone_is_named_on_all() {
    let (listener, address) = listener();
    let zero = settings(0, 4, address).listener(listener);
    thread::scope(|scope| {
        let zero = scope.spawn(move || serve_with(zero));
        let hasty = settings(1, 4, address).rendezvous_timeout(Duration::from_millis(200));
        assert!(join(&hasty).is_err());
        let start = Instant::now();
        // Rank 2 waits; rank 3 comes later and learns it too.
        let two = scope.spawn(move || join(&settings(2, 4, address)).unwrap_err());
        let zero = zero.join().unwrap().unwrap_err();
        for (rank, error) in [(0, zero), (2, two.join().unwrap())] {
            let RendezvousError::PeerLost {
                rank: by,
                peer: 1,
                process,
            } = &error
            else {
                panic!("{error}")
            };
            assert_eq!(*by, rank);
            let this = format!("process {} on ", std::process::id());
            assert!(process.starts_with(&this), "{error}");
        }
        assert!(start.elapsed() < Duration::from_secs(5));
    });
}

#[test]
fn ddp_03_a_rank_0_that_is_gone_is_named() {
    let (listener, address) = listener();
    let one = thread::spawn(move || join(&settings(1, 3, address)).unwrap_err());
    // Hears rank 1 out and ends, and its listener with it.
    let start = Instant::now();
    let stream = listener.accept().unwrap().0;
    let secret = Secret::new(SECRET).unwrap();
    accept::receive_hello(&stream, &secret, start + Duration::from_secs(5)).unwrap();
    drop((stream, listener));
    let error = one.join().unwrap();
    assert!(
        matches!(
            &error,
            RendezvousError::PeerLost {
                rank: 1,
                peer: 0,
                ..
            }
        ),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn what_is_not_rank_0_is_told_apart() {
    let (foreign, address) = listener();
    let server = thread::spawn(move || {
        let (mut stream, _) = foreign.accept().unwrap();
        stream
            .write_all(b"SSH-2.0-OpenSSH_9.9 and more than a handshake has\r\n")
            .unwrap();
        stream
    });
    let error = join(&settings(1, 2, address)).unwrap_err();
    assert!(
        matches!(error, RendezvousError::NotRankZero { rank: 1, .. }),
        "{error}"
    );
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    drop(server.join().unwrap());
}
