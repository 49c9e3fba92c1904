//! Ranks as processes, with a hard time limit.

use burn_ddp::{
    Ddp,
    group::host::{LISTEN_FD, SECRET, TIMEOUT, TRANSPORT},
};
use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fs,
    net::TcpListener,
    os::{fd::AsRawFd, unix::process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

/// Set in a rank: where it writes its result.
const RESULT: &str = "BURN_DDP_TEST_RESULT";
/// Set in a rank: which run of the test it belongs to.
const RUN: &str = "BURN_DDP_TEST_RUN";

/// Held while rank 0 is started, so that no other child inherits its socket.
static SPAWNING: Mutex<()> = Mutex::new(());

/// How one rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By itself, with an exit code.
    Exit(i32),
    /// By a signal.
    Signal(i32),
    /// The harness killed it at the limit.
    TimedOut,
}

/// Ranks to start for a test.
#[derive(Clone, Debug)]
#[must_use]
pub struct Ranks {
    count: usize,
    limit: Duration,
    env: Vec<(String, String)>,
    transports: &'static [&'static str],
    run: Option<&'static str>,
}

/// `count` ranks, over shared memory and then over TCP, 60 seconds each at the most.
pub fn ranks(count: usize) -> Ranks {
    Ranks {
        count,
        limit: Duration::from_secs(60),
        env: Vec::new(),
        transports: &["shm", "tcp"],
        run: None,
    }
}

impl Ranks {
    /// One transport only.
    pub fn over(mut self, transport: &'static str) -> Self {
        self.transports = match transport {
            "shm" => &["shm"],
            "tcp" => &["tcp"],
            other => panic!("no transport {other}"),
        };
        self
    }

    /// Another hard limit.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// A variable for every rank.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// The operation time-out, in seconds.
    pub fn timeout(self, seconds: u64) -> Self {
        self.env(TIMEOUT, &seconds.to_string())
    }

    /// Names this run, where one test makes several.
    pub fn named(mut self, run: &'static str) -> Self {
        self.run = Some(run);
        self
    }

    /// Runs `body` on every rank of the test function `test` and returns what the ranks returned, in rank order, for each transport.
    ///
    /// `test` is the path of the test function in its file. In a rank this never returns.
    pub fn run<T: Serialize + DeserializeOwned>(
        self,
        test: &str,
        body: impl FnOnce(Ddp) -> T,
    ) -> Vec<Vec<T>> {
        self.run_rank(|| {
            let ddp = Ddp::from_env().unwrap();
            let result = body(ddp.clone());
            // All ranks have finished before any leaves.
            ddp.barrier().unwrap();
            result
        });
        let mut runs = Vec::new();
        for transport in self.transports {
            let run = self.start(test, transport);
            for (rank, ending) in run.endings.iter().enumerate() {
                assert_eq!(
                    *ending,
                    Ending::Exit(0),
                    "rank {rank} over {transport}; its output is above"
                );
            }
            runs.push(run.results());
        }
        runs
    }

    /// Runs `body`, which joins by itself and may fail or die, on every rank; returns how each ended and what it returned, if anything.
    pub fn run_raw<T: Serialize + DeserializeOwned>(
        self,
        test: &str,
        body: impl FnOnce() -> T,
    ) -> Vec<Vec<(Ending, Option<T>)>> {
        self.run_rank(body);
        let mut runs = Vec::new();
        for transport in self.transports {
            let run = self.start(test, transport);
            let result = |rank: usize| {
                let bytes = fs::read(result_path(run.directory.path(), rank)).ok()?;
                serde_json::from_slice(&bytes).ok()
            };
            runs.push(
                run.endings
                    .iter()
                    .cloned()
                    .enumerate()
                    .map(|(rank, e)| (e, result(rank)))
                    .collect(),
            );
        }
        runs
    }

    /// In a rank of this run: runs `body`, leaves the result and ends the process.
    fn run_rank<T: Serialize>(&self, body: impl FnOnce() -> T) {
        let Some(path) = std::env::var_os(RESULT) else {
            return;
        };
        if std::env::var(RUN).unwrap_or_default() != self.run.unwrap_or_default() {
            return;
        }
        let result = body();
        let path = PathBuf::from(path);
        let temporary = path.with_extension("part");
        fs::write(&temporary, serde_json::to_vec(&result).unwrap()).unwrap();
        fs::rename(temporary, path).unwrap();
        std::process::exit(0);
    }

    fn start(&self, test: &str, transport: &str) -> Run {
        let directory = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let secret = format!(
            "{:032x}",
            u128::from(std::process::id()) << 64 | u128::from(port)
        );
        let command = |rank: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command
                .args(["--exact", test, "--nocapture", "--test-threads=1"])
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("WORLD_SIZE", self.count.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .env("RAYON_NUM_THREADS", "1")
                .env(SECRET, &secret)
                .env(TRANSPORT, transport)
                .env(TIMEOUT, "20")
                .env(RUN, self.run.unwrap_or_default())
                .env(RESULT, result_path(directory.path(), rank))
                .envs(self.env.iter().cloned())
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            command
        };
        let mut children = Vec::new();
        {
            let _alone = SPAWNING.lock().unwrap_or_else(|e| e.into_inner());
            fcntl_setfd(&listener, FdFlags::empty()).unwrap();
            let rank_0 = command(0)
                .env(LISTEN_FD, listener.as_raw_fd().to_string())
                .spawn()
                .unwrap();
            fcntl_setfd(&listener, FdFlags::CLOEXEC).unwrap();
            children.push(rank_0);
            children.extend((1..self.count).map(|rank| command(rank).spawn().unwrap()));
        }
        drop(listener);
        let endings = wait(&mut children, self.limit);
        Run { directory, endings }
    }
}

struct Run {
    directory: tempfile::TempDir,
    endings: Vec<Ending>,
}

impl Run {
    fn results<T: DeserializeOwned>(&self) -> Vec<T> {
        let result = |rank: usize| {
            serde_json::from_slice(&fs::read(result_path(self.directory.path(), rank)).unwrap())
                .unwrap()
        };
        (0..self.endings.len()).map(result).collect()
    }
}

fn result_path(directory: &Path, rank: usize) -> PathBuf {
    directory.join(format!("rank-{rank}.json"))
}

fn wait(children: &mut [Child], limit: Duration) -> Vec<Ending> {
    let end = Instant::now() + limit;
    let mut endings: Vec<Option<Ending>> = vec![None; children.len()];
    while endings.iter().any(Option::is_none) {
        let late = Instant::now() > end;
        for (child, ending) in children
            .iter_mut()
            .zip(&mut endings)
            .filter(|(_, e)| e.is_none())
        {
            if let Some(status) = child.try_wait().unwrap() {
                let code = || Ending::Exit(status.code().unwrap_or(-1));
                *ending = Some(status.signal().map_or_else(code, Ending::Signal));
            } else if late {
                let _ = child.kill();
                let _ = child.wait();
                *ending = Some(Ending::TimedOut);
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
    endings.into_iter().flatten().collect()
}
