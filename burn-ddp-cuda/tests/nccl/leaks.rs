//! Nothing stays behind.

use crate::common::{LONG, Rank, STREAM, mock::eventually, ranks, settings, sum};
use burn_ddp_cuda::nccl::{Communicator, NcclError};
use std::fs;

/// Open files, threads, mapped files of communicators.
fn held() -> [usize; 3] {
    let entries = |folder| fs::read_dir(folder).unwrap().count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.contains("/mock-nccl-"));
    [
        entries("/proc/self/fd"),
        entries("/proc/self/task"),
        mapped.count(),
    ]
}

/// Memory of this process, in pages.
fn pages() -> usize {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse().unwrap()
}

/// A communicator with one operation, which ends in one of four ways.
fn one(rank: &Rank, number: usize) {
    let id = format!("id-{number}");
    let communicator = rank.init(&id, settings(LONG)).unwrap();
    assert_eq!(sum(&rank.mock, &communicator, 1.0).unwrap(), [2.0; 3]);
    match number % 4 {
        0 => communicator.close().unwrap(),
        1 => communicator.abort("so that nothing stays"),
        2 => drop(communicator),
        // A start that fails.
        _ => {
            let mut settings = settings(LONG);
            settings.init_timeout = std::time::Duration::ZERO;
            let id = rank.mock.library.unique_id().unwrap();
            let late = Communicator::init(&rank.mock.library, &id, rank.rank, 2, settings);
            assert!(matches!(late, Err(NcclError::TimedOut { .. })));
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn two_hundred_communicators() {
    let results = ranks(2).run("leaks::two_hundred_communicators", |rank| {
        // What stays for good is there after these: the threads of a stream, of the allocator.
        (0..8).for_each(|number| one(&rank, number));
        rank.mock.synchronize(STREAM);
        rank.mock.assert_clean();
        eventually("the first threads have ended", || held()[1] <= 4);
        let (before, memory) = (held(), pages());
        (8..208).for_each(|number| one(&rank, number));
        rank.mock.assert_clean();
        eventually("files, threads and mappings are as before", || {
            held() == before
        });
        assert_eq!(before[2], 0);
        eventually("no file of a communicator is left", || rank.files() == 0);
        // Mappings are counted above; this is for the heap, ten KiB a communicator.
        let more = pages().saturating_sub(memory);
        assert!(more < 512, "{more} pages more");
        "done".into()
    });
    assert_eq!(results, ["done", "done"]);
}
