//! Ranks that start, meet and end: the launcher, ports, strangers, shared memory.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn_ddp::{Ddp, Error, Launcher};
use burn_ddp_tests::{
    Ending, Launched,
    dying::{self, Moment},
    free_port, in_rank, launched, log_to_stderr, ranks,
};
use rustix::process::{Signal, getpid, kill_process};
use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// `main` of a program that launches `nproc` ranks.
fn launch(nproc: usize, train: impl FnOnce(Ddp) -> Result<(), Error>) {
    let launcher = Launcher::new()
        .nproc(nproc)
        .grace(Duration::from_secs(2))
        .secondary(Error::is_secondary);
    match launcher.run(train) {
        Ok(()) => std::process::exit(0),
        Err(Error::Launch(error)) => error.exit(),
        Err(_) => std::process::exit(1),
    }
}

/// The launcher's report.
fn summary(launched: &Launched) -> &str {
    let start = launched
        .stderr
        .rfind(" failed first ")
        .unwrap_or_else(|| panic!("no report: {launched:#?}"));
    let line = launched.stderr[..start]
        .rfind('\n')
        .map_or(0, |end| end + 1);
    &launched.stderr[line..]
}

#[test]
fn ddp_03_the_launcher_ends_the_survivors() {
    let ways = ["abort", "panic", "exit", "kill"];
    let ended = launched("ddp_03_the_launcher_ends_the_survivors", &ways, |way| {
        launch(4, |ddp| dying::train(&ddp, Moment::During, dying::way(way)));
    });
    for (way, ended) in ways.iter().zip(&ended) {
        assert!(ended.left.is_empty(), "{way}: {ended:#?}");
        let code = ended.code.unwrap_or_else(|| panic!("{way}: {ended:#?}"));
        match *way {
            "abort" => assert_eq!(code, 128 + 6),
            "panic" => assert_eq!(code, 101),
            "kill" => assert_eq!(code, 128 + 9),
            // The victim itself says 0.
            _ => assert_ne!(code, 0),
        }
        assert!(summary(ended).contains("lost rank 2"), "{way}: {ended:#?}");
    }
}

#[test]
fn ddp_17_four_launches_at_once() {
    let ended = launched(
        "ddp_17_four_launches_at_once",
        &["a", "b", "c", "d"],
        |_| {
            launch(2, |ddp| {
                assert_eq!(ddp.sum(ddp.rank() as f64 + 1.0)?, 3.0);
                Ok(())
            });
        },
    );
    for ended in ended {
        assert_eq!(
            (ended.code, &ended.left[..]),
            (Some(0), &[][..]),
            "{ended:#?}"
        );
    }
}

#[test]
fn ddp_20_the_first_cause_is_reported() {
    let ended = launched(
        "ddp_20_the_first_cause_is_reported",
        &["panic", "kill"],
        |variant| {
            launch(3, |ddp| {
                for step in 0..10 {
                    match (step, ddp.rank(), variant) {
                        (3, 1, "panic") => panic!("boom-{}", 42),
                        (3, 2, "kill") => kill_process(getpid(), Signal::KILL).unwrap(),
                        _ => {}
                    }
                    ddp.sum(1.0)?;
                }
                Ok(())
            });
        },
    );
    let report = summary(&ended[0]);
    let at = |text: &str| {
        report
            .find(text)
            .unwrap_or_else(|| panic!("no {text:?}: {:#?}", ended[0]))
    };
    assert!(at("rank 1 of 3 failed first") < at("boom-42"), "{report}");
    assert!(at("boom-42") < at("lost rank 1"), "{report}");
    let report = summary(&ended[1]);
    assert!(
        report.starts_with("rank 2 of 3 failed first") && report.contains("signal 9 (SIGKILL)"),
        "{report}"
    );
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

/// What a stranger says to rank 0's port before rank 1 comes; each is refused with one line of log.
fn strangers() -> Vec<Vec<u8>> {
    let magic = b"burnddp\x01";
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
fn ddp_36_strangers_at_the_door() {
    let runs = ranks(2)
        .port(free_port())
        .watch("ddp_36_strangers_at_the_door", || {
            let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
            let port: u16 = std::env::var("MASTER_PORT").unwrap().parse().unwrap();
            log_to_stderr();
            let before = peak_memory();
            let mut silent = None;
            if rank == 1 {
                silent = Some(call(port));
                assert_eq!(listening_addresses(port), [Ipv4Addr::LOCALHOST.to_string()]);
                for bytes in strangers() {
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
        let refusals = run[0]
            .stderr
            .matches("rank 0 turned away 127.0.0.1:")
            .count();
        assert!(refusals >= strangers().len(), "{}", run[0].stderr);
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

/// The IPv4 addresses, and the tables of IPv6 ones, on which somebody listens at `port`.
fn listening_addresses(port: u16) -> Vec<String> {
    let listening = |path: &str| {
        let table = fs::read_to_string(path).unwrap_or_default();
        let address = |line: &str| {
            let columns: Vec<&str> = line.split_whitespace().collect();
            let (address, local) = columns[1].rsplit_once(':').unwrap();
            let here = u16::from_str_radix(local, 16) == Ok(port) && columns[3] == "0A";
            here.then(|| address.to_owned())
        };
        table
            .lines()
            .skip(1)
            .filter_map(address)
            .collect::<Vec<_>>()
    };
    let v4 = listening("/proc/net/tcp").into_iter();
    let v4 = v4.map(|hex| {
        Ipv4Addr::from(u32::from_str_radix(&hex, 16).unwrap().to_ne_bytes()).to_string()
    });
    v4.chain(listening("/proc/net/tcp6")).collect()
}

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
        None => eprintln!("{test}: no right to mount a small file system here; not tested"),
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
