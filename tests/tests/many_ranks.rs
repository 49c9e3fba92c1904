//! Many ranks on one machine.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn_ddp::Ddp;
use burn_ddp_tests::ranks;
use std::{
    collections::BTreeSet,
    fs,
    time::{Duration, Instant},
};

/// How many; the default suits the gate.
const COUNT: &str = "BURN_DDP_TEST_RANKS";
const LIMIT: Duration = Duration::from_secs(20);

/// Sockets that this process has, duplicates counted once.
fn sockets() -> usize {
    let links = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = links.filter_map(|link| fs::read_link(link.path()).ok());
    let sockets: BTreeSet<_> = targets
        .filter(|target| target.to_string_lossy().starts_with("socket:"))
        .collect();
    sockets.len()
}

#[test]
fn many_ranks_form_a_group_with_few_sockets() {
    let count: usize = std::env::var(COUNT).map_or(16, |count| count.parse().unwrap());
    let runs = ranks(count).over("shm").limit(LIMIT * 3).watch(
        "many_ranks_form_a_group_with_few_sockets",
        || {
            let start = Instant::now();
            let ddp = Ddp::from_env().unwrap();
            let elapsed = start.elapsed();
            let sockets = sockets();
            let sum = ddp.sum(ddp.rank() as f64).unwrap();
            ddp.barrier().unwrap();
            (elapsed, sockets, sum)
        },
    );
    for run in runs {
        let slowest = run.iter().map(|trace| trace.finished().0).max().unwrap();
        println!("{count} ranks formed a group in {slowest:.2?}");
        assert!(slowest < LIMIT, "{slowest:?}");
        for (rank, trace) in run.iter().enumerate() {
            let (_, sockets, sum) = *trace.finished();
            assert_eq!(sum, (count * (count - 1) / 2) as f64);
            // A connection to each other rank and the listening socket, or one to rank 0; and a pair that wakes the
            // control thread.
            let expected = if rank == 0 { count - 1 + 1 } else { 1 } + 2;
            assert_eq!(sockets, expected, "rank {rank}");
        }
    }
}
