//! The surroundings of shared memory.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn_ddp::Ddp;
use burn_ddp_tests::{Ending, in_rank, log_to_stderr, ranks, skip};
use rustix::process::{Signal, getpid, kill_process};
use std::{fs, path::Path, process::Command};

/// Two ranks that cannot share memory in `directory` train over TCP, with one warning that says why.
fn falls_back_to_tcp(test: &'static str, name: &'static str, directory: &Path) {
    let runs = ranks(2)
        .over("auto")
        .named(name)
        .env("BURN_DDP_SHM_DIR", directory.to_str().unwrap())
        .watch(test, || {
            log_to_stderr();
            let ddp = Ddp::from_env().unwrap();
            (ddp.group().transport().to_owned(), ddp.sum(1.0).unwrap())
        });
    for run in runs {
        for trace in &run {
            assert_eq!(*trace.finished(), ("tcp".to_owned(), 2.0));
        }
        let warnings: Vec<&str> = run.iter().flat_map(|trace| trace.stderr.lines()).collect();
        assert_eq!(warnings.len(), 1, "{warnings:#?}");
        assert!(
            warnings[0].contains("no shared memory, data goes through TCP"),
            "{warnings:?}"
        );
        assert!(
            warnings[0].contains(directory.to_str().unwrap()),
            "{warnings:?}"
        );
    }
}

#[test]
fn ddp_35_no_shared_memory() {
    let test = "ddp_35_no_shared_memory";
    falls_back_to_tcp(test, "missing", Path::new("/nonexistent/shm"));
    // Nobody, root included, can make a file there.
    falls_back_to_tcp(test, "read-only", Path::new("/proc/self"));
}

/// A file system in memory of 64 KiB; needs the right to mount.
struct Tiny(tempfile::TempDir);

impl Tiny {
    fn mount() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", "size=64k", "burn-ddp-test"])
            .arg(directory.path());
        mount
            .output()
            .is_ok_and(|output| output.status.success())
            .then_some(Self(directory))
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn ddp_35_tiny_shared_memory() {
    let test = "ddp_35_tiny_shared_memory";
    if in_rank() {
        return falls_back_to_tcp(test, "", Path::new(""));
    }
    match Tiny::mount() {
        Some(tiny) => falls_back_to_tcp(test, "", tiny.0.path()),
        None => skip("there is no right to mount a small file system here"),
    }
}

#[test]
fn ddp_35_nothing_is_left_of_killed_ranks() {
    let test = "ddp_35_nothing_is_left_of_killed_ranks";
    // A killed rank would leave its own behind.
    let directory = (!in_rank()).then(|| tempfile::tempdir_in("/dev/shm").unwrap());
    let shm = directory
        .as_ref()
        .map_or(Path::new(""), |directory| directory.path());
    let runs = ranks(2)
        .over("shm")
        .env("BURN_DDP_SHM_DIR", shm.to_str().unwrap())
        .watch(test, || {
            let ddp = Ddp::from_env().unwrap();
            assert_eq!(ddp.group().transport(), "shm");
            let mut buffer = ddp.group().buffer(1 << 20).unwrap();
            buffer.input().fill(1);
            // Both are in the middle of their job, with memory mapped.
            assert_eq!(ddp.sum(1.0).unwrap(), 2.0);
            kill_process(getpid(), Signal::KILL).unwrap();
        });
    for trace in runs.iter().flatten() {
        assert_eq!(trace.ending, Ending::Signal(9), "{trace:#?}");
    }
    let left: Vec<_> = fs::read_dir(shm)
        .unwrap()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    assert_eq!(left, Vec::<std::path::PathBuf>::new());
}
