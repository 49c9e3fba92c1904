//! Ranks as processes, with a hard time limit.

use crate::{Hosts, PORT};
use burn_ddp::{
    Ddp,
    group::host::{LISTEN_FD, RENDEZVOUS_TIMEOUT, SECRET, TIMEOUT, TRANSPORT},
};
use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fmt::Debug,
    fs::{self, File},
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

/// What is left of one rank.
#[derive(Debug)]
pub struct Trace<T> {
    /// How it ended.
    pub ending: Ending,
    /// When that was seen, since the ranks were started.
    pub after: Duration,
    /// What its body returned, if it came to that.
    pub result: Option<T>,
    /// What it wrote to stderr.
    pub stderr: String,
}

impl<T: Debug> Trace<T> {
    /// The result of a rank that ended in good order.
    #[track_caller]
    pub fn finished(&self) -> &T {
        assert_eq!(self.ending, Ending::Exit(0), "{self:#?}");
        self.result.as_ref().unwrap()
    }
}

/// Ranks to start for a test.
#[derive(Clone, Debug)]
#[must_use]
pub struct Ranks<'a> {
    count: usize,
    /// Where each rank runs.
    hosts: Option<(&'a Hosts, &'a [usize])>,
    limit: Duration,
    env: Vec<(String, String)>,
    /// For one rank each; they win over `env`.
    rank_env: Vec<(usize, String, String)>,
    /// Rank 0 binds this port itself.
    port: Option<u16>,
    transports: &'static [&'static str],
    run: Option<&'static str>,
}

/// Whether this process is a rank, in which a test's code before and between its runs is executed too.
pub fn in_rank() -> bool {
    std::env::var_os(RESULT).is_some()
}

/// `count` ranks, over shared memory and then over TCP, 60 seconds each at the most.
pub fn ranks<'a>(count: usize) -> Ranks<'a> {
    Ranks {
        count,
        hosts: None,
        limit: Duration::from_secs(60),
        env: Vec::new(),
        rank_env: Vec::new(),
        port: None,
        transports: &["shm", "tcp"],
        run: None,
    }
}

impl<'a> Ranks<'a> {
    /// One transport only; `auto` leaves the choice to the group.
    pub fn over(mut self, transport: &'static str) -> Self {
        self.transports = match transport {
            "auto" => &["auto"],
            "shm" => &["shm"],
            "tcp" => &["tcp"],
            other => panic!("no transport {other}"),
        };
        self
    }

    /// Runs rank `k` on host `hosts[k]`, over what the group chooses.
    pub fn on(mut self, hosts: &'a Hosts, of_rank: &'a [usize]) -> Self {
        assert_eq!(of_rank.len(), self.count);
        self.hosts = Some((hosts, of_rank));
        self.over("auto")
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

    /// A variable for one process. `RANK` among them makes it another rank than the harness counts.
    pub fn rank_env(mut self, rank: usize, name: &str, value: &str) -> Self {
        self.rank_env.push((rank, name.into(), value.into()));
        self
    }

    /// As without a launcher: `MASTER_PORT` is `port`, which rank 0 binds itself, and there is no secret but the user's key.
    pub fn port(mut self, port: u16) -> Self {
        self.port = Some(port);
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
    /// `test` is the path of the test function in its file. In a rank of this run this never returns; in a rank of
    /// another run of the same test it returns nothing at once.
    pub fn run<T: Serialize + DeserializeOwned>(
        self,
        test: &str,
        body: impl FnOnce(Ddp) -> T,
    ) -> Vec<Vec<T>> {
        let other = self.run_rank(|| {
            let ddp = Ddp::from_env().unwrap();
            let result = body(ddp.clone());
            // All ranks have finished before any leaves.
            ddp.barrier().unwrap();
            result
        });
        let mut runs = Vec::new();
        if other {
            return runs;
        }
        for transport in self.transports {
            let run = self.start(test, transport, false);
            for (rank, (ending, _)) in run.endings.iter().enumerate() {
                assert_eq!(
                    *ending,
                    Ending::Exit(0),
                    "rank {rank} over {transport}; its output is above"
                );
            }
            runs.push(
                run.traces()
                    .into_iter()
                    .map(|trace| trace.result.unwrap())
                    .collect(),
            );
        }
        runs
    }

    /// Runs `body`, which joins by itself and may fail or die, on every rank; returns how each ended and what it returned, if anything.
    pub fn run_raw<T: Serialize + DeserializeOwned>(
        self,
        test: &str,
        body: impl FnOnce() -> T,
    ) -> Vec<Vec<(Ending, Option<T>)>> {
        self.start_raw(test, body, false, |trace| (trace.ending, trace.result))
    }

    /// Like [`run_raw`](Self::run_raw), with all that is left of each rank, its stderr too.
    pub fn watch<T: Serialize + DeserializeOwned>(
        self,
        test: &str,
        body: impl FnOnce() -> T,
    ) -> Vec<Vec<Trace<T>>> {
        self.start_raw(test, body, true, |trace| trace)
    }

    fn start_raw<T: Serialize + DeserializeOwned, R>(
        self,
        test: &str,
        body: impl FnOnce() -> T,
        capture: bool,
        show: impl Fn(Trace<T>) -> R,
    ) -> Vec<Vec<R>> {
        if self.run_rank(body) {
            return Vec::new();
        }
        let run = |transport: &&str| {
            self.start(test, transport, capture)
                .traces()
                .into_iter()
                .map(&show)
                .collect()
        };
        self.transports.iter().map(run).collect()
    }

    /// In a rank of this run: runs `body`, leaves the result and ends the process. Else whether this is a rank of another run.
    fn run_rank<T: Serialize>(&self, body: impl FnOnce() -> T) -> bool {
        let Some(path) = std::env::var_os(RESULT) else {
            return false;
        };
        if std::env::var(RUN).unwrap_or_default() != self.run.unwrap_or_default() {
            return true;
        }
        let result = body();
        let path = PathBuf::from(path);
        let temporary = path.with_extension("part");
        fs::write(&temporary, serde_json::to_vec(&result).unwrap()).unwrap();
        fs::rename(temporary, path).unwrap();
        std::process::exit(0);
    }

    fn start(&self, test: &str, transport: &str, capture: bool) -> Run {
        let directory = tempfile::tempdir().unwrap();
        let listener = (self.port.is_none() && self.hosts.is_none())
            .then(|| TcpListener::bind("127.0.0.1:0").unwrap());
        let port = self
            .port
            .or_else(|| Some(listener.as_ref()?.local_addr().ok()?.port()))
            .unwrap_or(PORT);
        let secret = format!(
            "{:032x}",
            u128::from(std::process::id()) << 64 | u128::from(port)
        );
        let command = |rank: usize| {
            let program = std::env::current_exe().unwrap();
            let (mut command, master, local_rank) = match self.hosts {
                None => (Command::new(program), "127.0.0.1".to_owned(), rank),
                Some((hosts, of_rank)) => {
                    let before = of_rank[..rank]
                        .iter()
                        .filter(|host| **host == of_rank[rank]);
                    let command = hosts.command(of_rank[rank], program);
                    (command, hosts.address(of_rank[0]), before.count())
                }
            };
            command
                .args(["--exact", test, "--nocapture", "--test-threads=1"])
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", local_rank.to_string())
                .env("WORLD_SIZE", self.count.to_string())
                .env("MASTER_ADDR", master)
                .env("MASTER_PORT", port.to_string())
                .env("RAYON_NUM_THREADS", "1")
                .env(SECRET, &secret)
                .env(TRANSPORT, transport)
                .env(TIMEOUT, "20")
                .env(RENDEZVOUS_TIMEOUT, "20")
                .env(RUN, self.run.unwrap_or_default())
                .env(RESULT, result_path(directory.path(), rank))
                .envs(self.env.iter().cloned())
                .envs(
                    self.rank_env
                        .iter()
                        .filter(|(of, ..)| *of == rank)
                        .map(|(_, name, value)| (name, value)),
                )
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            if self.port.is_some() {
                command
                    .env_remove(SECRET)
                    .env("XDG_RUNTIME_DIR", directory.path());
            }
            if capture {
                command.stderr(File::create(stderr_path(directory.path(), rank)).unwrap());
            }
            command
        };
        let mut children = Vec::new();
        let start = Instant::now();
        {
            let _alone = SPAWNING.lock().unwrap_or_else(|e| e.into_inner());
            let mut rank_0 = command(0);
            if let Some(listener) = &listener {
                fcntl_setfd(listener, FdFlags::empty()).unwrap();
                rank_0.env(LISTEN_FD, listener.as_raw_fd().to_string());
            }
            children.push(rank_0.spawn().unwrap());
            if let Some(listener) = &listener {
                fcntl_setfd(listener, FdFlags::CLOEXEC).unwrap();
            }
            children.extend((1..self.count).map(|rank| command(rank).spawn().unwrap()));
        }
        drop(listener);
        let endings = wait(&mut children, start, self.limit);
        Run { directory, endings }
    }
}

struct Run {
    directory: tempfile::TempDir,
    endings: Vec<(Ending, Duration)>,
}

impl Run {
    fn traces<T: DeserializeOwned>(&self) -> Vec<Trace<T>> {
        let directory = self.directory.path();
        let trace = |(rank, (ending, after)): (usize, &(Ending, Duration))| Trace {
            ending: ending.clone(),
            after: *after,
            result: fs::read(result_path(directory, rank))
                .ok()
                .map(|bytes| serde_json::from_slice(&bytes).unwrap()),
            stderr: fs::read_to_string(stderr_path(directory, rank)).unwrap_or_default(),
        };
        self.endings.iter().enumerate().map(trace).collect()
    }
}

fn result_path(directory: &Path, rank: usize) -> PathBuf {
    directory.join(format!("rank-{rank}.json"))
}

fn stderr_path(directory: &Path, rank: usize) -> PathBuf {
    directory.join(format!("rank-{rank}.stderr"))
}

fn wait(children: &mut [Child], start: Instant, limit: Duration) -> Vec<(Ending, Duration)> {
    let mut endings: Vec<Option<(Ending, Duration)>> = vec![None; children.len()];
    while endings.iter().any(Option::is_none) {
        let late = start.elapsed() > limit;
        for (child, ending) in children
            .iter_mut()
            .zip(&mut endings)
            .filter(|(_, e)| e.is_none())
        {
            if let Some(status) = child.try_wait().unwrap() {
                let code = || Ending::Exit(status.code().unwrap_or(-1));
                *ending = Some((
                    status.signal().map_or_else(code, Ending::Signal),
                    start.elapsed(),
                ));
            } else if late {
                let _ = child.kill();
                let _ = child.wait();
                *ending = Some((Ending::TimedOut, start.elapsed()));
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
    endings.into_iter().flatten().collect()
}
