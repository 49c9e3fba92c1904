//! Processes that find together, or say why they cannot.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn_ddp::{
    Ddp,
    group::host::{RENDEZVOUS_TIMEOUT, SECRET},
};
use burn_ddp_tests::{Ranks, assert_says, free_port, listening_addresses, log_to_stderr, ranks};
use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

/// What each process is told when it joins, and after how long.
fn join(ranks: Ranks, test: &str) -> Vec<Vec<String>> {
    let runs = ranks.watch(test, || {
        let start = Instant::now();
        let error = Ddp::from_env().unwrap_err().to_string();
        (error, start.elapsed())
    });
    let told = |(error, elapsed): &(String, Duration)| {
        assert!(*elapsed < Duration::from_secs(5), "{elapsed:?}: {error}");
        error.clone()
    };
    runs.iter()
        .map(|traces| traces.iter().map(|trace| told(trace.finished())).collect())
        .collect()
}

#[test]
fn ddp_26_duplicate_rank() {
    for run in join(ranks(3).rank_env(2, "RANK", "1"), "ddp_26_duplicate_rank") {
        for error in run {
            assert_says(
                &error,
                &[
                    "do not fit together: two processes say they are rank 1: ",
                    " and ",
                ],
            );
        }
    }
}

#[test]
fn ddp_26_world_sizes_that_differ() {
    for run in join(
        ranks(3).rank_env(2, "WORLD_SIZE", "4"),
        "ddp_26_world_sizes_that_differ",
    ) {
        for error in run {
            assert_says(
                &error,
                &[
                    "do not fit together: rank 0",
                    "says the world size is 3, rank 2",
                    "says 4",
                ],
            );
        }
    }
}

#[test]
fn ddp_26_too_large_rank() {
    let ranks = ranks(2)
        .rank_env(1, "RANK", "5")
        .env(RENDEZVOUS_TIMEOUT, "1");
    for run in join(ranks, "ddp_26_too_large_rank") {
        assert_says(
            &run[0],
            &[
                "rank 0: rendezvous timed out after ",
                "rank(s) [1] did not come",
            ],
        );
        assert_says(
            &run[1],
            &["RANK is 5, but WORLD_SIZE is 2: ranks count from 0 to 1"],
        );
    }
}

#[test]
fn another_secret() {
    let ranks = ranks(2)
        .rank_env(1, SECRET, "not the same as the others have")
        .env(RENDEZVOUS_TIMEOUT, "2");
    for run in join(ranks, "another_secret") {
        assert_says(
            &run[0],
            &["rank(s) [1] did not come", "rejected", "different secrets"],
        );
        assert_says(
            &run[1],
            &[
                "refused this process (rank 1): another secret",
                "need the same BURN_DDP_SECRET",
            ],
        );
    }
}

#[test]
fn ddp_27_no_peer_within_the_time_out() {
    for (name, there) in [("rank 0 alone", 0), ("rank 1 alone", 1)] {
        let ranks = ranks(2).named(name).env(RENDEZVOUS_TIMEOUT, "1");
        let runs = ranks.watch("ddp_27_no_peer_within_the_time_out", || {
            let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
            (rank == there).then(|| Ddp::from_env().unwrap_err().to_string())
        });
        for traces in runs {
            let error = traces[there].finished().as_ref().unwrap();
            assert_says(
                error,
                &[
                    &format!("rank {there}: rendezvous timed out after "),
                    "no firewall is in between; BURN_DDP_RENDEZVOUS_TIMEOUT",
                ],
            );
            // At half of the limit, without any log.
            let stderr = &traces[there].stderr;
            match there {
                0 => {
                    assert_says(
                        error,
                        &["rank(s) [1] did not come; rank 0 listened on 127.0.0.1:"],
                    );
                    assert_says(
                        stderr,
                        &[
                            "burn-ddp: rank 0 listens on 127.0.0.1:",
                            "still waits for rank(s) [1]",
                        ],
                    );
                }
                _ => {
                    assert_says(
                        error,
                        &["cannot join rank 0 at 127.0.0.1:", "Tried 127.0.0.1:"],
                    );
                    assert_says(
                        stderr,
                        &["burn-ddp: rank 1 still looks for rank 0 at 127.0.0.1:"],
                    );
                }
            }
        }
    }
}

#[test]
fn ddp_17_a_taken_port() {
    let port = free_port();
    let _taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let runs = ranks(2).port(port).watch("ddp_17_a_taken_port", || {
        let start = Instant::now();
        let error = Ddp::from_env().unwrap_err().to_string();
        (error, start.elapsed())
    });
    for trace in runs.iter().flatten() {
        let (error, elapsed) = trace.finished();
        assert!(
            error.contains(&port.to_string()) && error.contains("another MASTER_PORT"),
            "{error}"
        );
        assert!(*elapsed < Duration::from_secs(5), "{elapsed:?}: {error}");
    }
    let owner = format!("port {port} is in use by process {}", std::process::id());
    for run in runs {
        assert!(run[0].finished().0.contains(&owner), "{run:#?}");
    }
}

#[test]
fn ddp_17_the_same_port_again_at_once() {
    let port = free_port();
    for name in ["first", "second", "third"] {
        ranks(2)
            .port(port)
            .named(name)
            .run("ddp_17_the_same_port_again_at_once", |ddp| {
                assert_eq!(ddp.sum(1.0).unwrap(), 2.0);
            });
    }
}

/// What somebody else says to rank 0's port before rank 1 comes; each is refused with one line of log.
fn hostile_messages() -> Vec<Vec<u8>> {
    let magic = b"burnddp\x02";
    vec![
        Vec::new(),
        vec![b'x'],
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        [&u32::MAX.to_le_bytes()[..], &[1; 100]].concat(),
        // Nonce and proof of somebody who does not have the secret.
        [&magic[..], &[7; 64]].concat(),
    ]
}

#[test]
fn ddp_36_callers_that_do_not_belong() {
    let runs = ranks(2)
        .port(free_port())
        .watch("ddp_36_callers_that_do_not_belong", || {
            let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
            let port: u16 = std::env::var("MASTER_PORT").unwrap().parse().unwrap();
            log_to_stderr();
            let before = peak_memory();
            let mut silent = None;
            if rank == 1 {
                silent = Some(call(port));
                assert_eq!(listening_addresses(port), [Ipv4Addr::LOCALHOST.to_string()]);
                for bytes in hostile_messages() {
                    let mut stream = call(port);
                    stream.write_all(&bytes).unwrap();
                    // Until rank 0 hangs up, which it may have done by now.
                    let _ = stream.shutdown(Shutdown::Write);
                    let _ = stream.read_to_end(&mut Vec::new());
                }
            }
            let ddp = Ddp::from_env().unwrap();
            let sum = ddp.sum(1.0).unwrap();
            let grown = peak_memory() - before;
            ddp.barrier().unwrap();
            drop(silent);
            (sum, grown)
        });
    for run in runs {
        for trace in &run {
            let (sum, grown) = trace.finished();
            assert_eq!(*sum, 2.0);
            // Memory for a length of 4 GiB would show.
            assert!(*grown < 2 << 20, "{grown} KiB");
        }
        let refusals = run[0].stderr.matches("rank 0 rejected 127.0.0.1:").count();
        assert!(refusals >= hostile_messages().len(), "{}", run[0].stderr);
        for cause in ["does not speak burn-ddp's protocol", "different secrets"] {
            assert!(run[0].stderr.contains(cause), "{}", run[0].stderr);
        }
    }
}

/// A connection to `port` as soon as somebody listens there.
fn call(port: u16) -> TcpStream {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) if stream.local_addr().unwrap() != stream.peer_addr().unwrap() => {
                return stream;
            }
            result => assert!(Instant::now() < end, "{result:?}"),
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Peak virtual memory of this process in KiB.
fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmPeak:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
