//! Ranks as processes, with a hard time limit: this program again, with one test only.

use super::Mock;
use burn_ddp_cuda::nccl::{Communicator, Result, Settings, UniqueId};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{self, Child, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

/// Set in a rank: the folder that its run shares.
const FOLDER: &str = "BURN_DDP_CUDA_TEST_FOLDER";
const RANK: &str = "BURN_DDP_CUDA_TEST_RANK";
/// The hard limit of a run, counted in looks at its ranks: a machine that stands still for a minute is no hang.
const LOOKS: usize = 20_000;
const LOOK: Duration = Duration::from_millis(5);

/// One rank, in its process.
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) mock: Mock,
    folder: PathBuf,
}

impl Rank {
    /// The identity `name`, which rank 0 makes.
    pub(crate) fn id(&self, name: &str) -> UniqueId {
        let path = self.folder.join(name);
        if self.rank == 0 {
            let id = self.mock.library.unique_id().unwrap();
            write(&path, id.as_bytes());
            return id;
        }
        loop {
            if let Ok(bytes) = fs::read(&path) {
                return UniqueId::from_bytes(bytes.try_into().unwrap());
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// A communicator of all ranks.
    pub(crate) fn init(&self, name: &str, settings: Settings) -> Result<Communicator> {
        let id = self.id(name);
        Communicator::init(&self.mock.library, &id, self.rank, self.world, settings)
    }

    /// The same, not waiting.
    pub(crate) fn start(&self, name: &str, settings: Settings) -> Result<Communicator> {
        let id = self.id(name);
        Communicator::start(&self.mock.library, &id, self.rank, self.world, settings)
    }

    /// The files of communicators that not all ranks have come to.
    pub(crate) fn files(&self) -> usize {
        let entries = fs::read_dir(&self.folder).unwrap().flatten();
        entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("mock-nccl"))
            .count()
    }
}

/// Whole or not at all.
fn write(path: &Path, bytes: &[u8]) {
    let temporary = path.with_extension("part");
    fs::write(&temporary, bytes).unwrap();
    fs::rename(temporary, path).unwrap();
}

#[must_use]
pub(crate) struct Ranks {
    count: usize,
    env: Vec<(String, String)>,
}

pub(crate) fn ranks(count: usize) -> Ranks {
    Ranks {
        count,
        env: Vec::new(),
    }
}

impl Ranks {
    pub(crate) fn env(mut self, name: &str, value: impl AsRef<str>) -> Self {
        self.env.push((name.into(), value.as_ref().into()));
        self
    }

    /// What the mock does wrong.
    pub(crate) fn fault(self, fault: &str) -> Self {
        self.env("MOCK_NCCL_FAULT", fault)
    }

    /// Runs `body` on every rank of the test function `test` (its path in this program) and returns what the ranks returned, in rank order.
    ///
    /// In a rank this never returns.
    pub(crate) fn run(self, test: &str, body: impl FnOnce(Rank) -> String) -> Vec<String> {
        if let Some(folder) = env::var_os(FOLDER) {
            let folder = PathBuf::from(folder);
            let rank: usize = env::var(RANK).unwrap().parse().unwrap();
            let path = result_path(&folder, rank);
            let result = body(Rank {
                rank,
                world: self.count,
                mock: Mock::load(),
                folder,
            });
            write(&path, result.as_bytes());
            process::exit(0);
        }
        let folder = tempfile::tempdir().unwrap();
        let mut children: Vec<_> = (0..self.count)
            .map(|rank| {
                Command::new(env::current_exe().unwrap())
                    .args(["--exact", test, "--nocapture", "--test-threads=1"])
                    .env(FOLDER, folder.path())
                    .env(RANK, rank.to_string())
                    .env("MOCK_NCCL_DIR", folder.path())
                    .envs(self.env.iter().cloned())
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        let mut looks = LOOKS;
        let endings: Vec<_> = children
            .iter_mut()
            .map(|child| wait(child, &mut looks))
            .collect();
        for (rank, ending) in endings.iter().enumerate() {
            let good = ending.is_some_and(|status| status.success());
            assert!(
                good,
                "rank {rank} ended with {ending:?} (None: killed at the limit); its output is above"
            );
        }
        (0..self.count)
            .map(|rank| fs::read_to_string(result_path(folder.path(), rank)).unwrap())
            .collect()
    }
}

fn result_path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("result-{rank}"))
}

/// How the process ended; nothing if it had to be killed.
fn wait(child: &mut Child, looks: &mut usize) -> Option<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if *looks == 0 {
            child.kill().unwrap();
            child.wait().unwrap();
            return None;
        }
        *looks -= 1;
        thread::sleep(LOOK);
    }
}
