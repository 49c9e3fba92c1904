//! SIGKILL of any rank at any moment (DDP-03): the survivors name it, and nothing stays behind.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_ddp::{Ddp, Error, group::host::RENDEZVOUS_TIMEOUT, try_backward};
use burn_ddp_tests::{
    Ending, Random, free_port, in_rank, listening_addresses, models::Mlp, oracle::batch,
    processes_with, ranks,
};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use std::{fs, path::Path, thread, time::Duration};

/// What survivors have for their error and for their own end.
const SOON: Duration = Duration::from_secs(5);
/// Nobody knows of a rank that dies before it has said who it is; its absence ends the rendezvous after this.
const RENDEZVOUS: Duration = Duration::from_secs(3);
const STEPS: u64 = 4;
const PLAN: &str = "BURN_DDP_TEST_KILL";
/// How many kills; the default suits the gate.
const COUNT: &str = "BURN_DDP_TEST_KILLS";

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Phase {
    Rendezvous,
    Wrap,
    Forward,
    Backward,
    Barrier,
    Exit,
}

use Phase::{Backward, Barrier, Exit, Forward, Rendezvous, Wrap};

/// Who dies, where, and how long after it came there.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Plan {
    victim: usize,
    phase: Phase,
    micros: u64,
    /// The victim leaves a file here when it comes to the last barrier.
    progress: String,
}

impl Plan {
    fn draw(random: &mut Random, ranks: usize, progress: &Path) -> Self {
        let phases = [Rendezvous, Wrap, Forward, Backward, Barrier, Exit];
        Self {
            victim: random.below(ranks as u64) as usize,
            phase: phases[random.below(6) as usize],
            // From 1 microsecond to 32 milliseconds, as many short ones as long ones.
            micros: 1 << random.below(16),
            progress: progress.to_str().unwrap().into(),
        }
    }

    fn reach(&self, phase: Phase) {
        if std::env::var("RANK").unwrap() != self.victim.to_string() {
            return;
        }
        if phase == Barrier {
            fs::write(Path::new(&self.progress).join("barrier"), "").unwrap();
        }
        if phase == self.phase {
            let wait = Duration::from_micros(self.micros);
            thread::spawn(move || {
                thread::sleep(wait);
                kill_process(getpid(), Signal::KILL)
            });
        }
    }

    fn train(&self) -> Result<(), Error> {
        self.reach(Rendezvous);
        let ddp = Ddp::from_env()?;
        let device = Device::flex().autodiff();
        self.reach(Wrap);
        let mut model = ddp.wrap(Mlp::new(&device))?;
        let mut optim = SgdConfig::new().init();
        for step in 0..STEPS {
            if step == STEPS / 2 {
                self.reach(Forward);
            }
            let row = ddp.rank();
            let x = batch(step, row..row + 1, [0, 8], &device);
            let loss = model.forward(x).powf_scalar(2.0).mean();
            if step == STEPS / 2 {
                self.reach(Backward);
            }
            let grads = GradientsParams::from_grads(try_backward(&loss)?, &model);
            model = optim.step(0.05, model, grads);
        }
        self.reach(Barrier);
        ddp.barrier()?;
        self.reach(Exit);
        Ok(())
    }
}

/// Runs one job; how long after the kill the last survivor had ended, and whether the rendezvous time-out was part of that. Nothing if the
/// victim was faster than the kill.
fn kill(seed: u64, test: &str) -> Option<(Duration, bool)> {
    let random = &mut Random::new(seed);
    let count = 2 + random.below(3) as usize;
    let transport = ["shm", "tcp"][random.below(2) as usize];
    let progress = tempfile::tempdir().unwrap();
    let temporary = tempfile::tempdir().unwrap();
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let plan = Plan::draw(random, count, progress.path());
    let about = format!("seed {seed}: {count} ranks over {transport}, {plan:?}");

    let (port, coded) = (free_port(), serde_json::to_string(&plan).unwrap());
    let mut ranks = ranks(count)
        .over(transport)
        .port(port)
        .env(PLAN, &coded)
        .env("TMPDIR", temporary.path().to_str().unwrap())
        .env("BURN_DDP_SHM_DIR", memory.path().to_str().unwrap());
    if plan.phase == Rendezvous {
        ranks = ranks.env(RENDEZVOUS_TIMEOUT, &RENDEZVOUS.as_secs().to_string());
    }
    let mut traces = ranks.watch(test, body).remove(0);

    assert_eq!(
        processes_with(&format!("{PLAN}={coded}")),
        [0; 0],
        "{about}"
    );
    assert_eq!(listening_addresses(port), [""; 0], "{about}");
    for directory in [&memory, &temporary] {
        let left = fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(left, 0, "{about}: {directory:?}");
    }
    let victim = traces.remove(plan.victim);
    if victim.ending == Ending::Exit(0) {
        return None;
    }
    assert_eq!(victim.ending, Ending::Signal(9), "{about}: {victim:#?}");
    let mut waited = false;
    let done = progress.path().join("barrier").exists();
    for trace in &traces {
        match trace.finished() {
            // It had all it needed of the victim.
            Ok(()) => assert!(done, "{about}: {trace:#?}"),
            Err(error) => {
                let v = plan.victim;
                let lost = format!("lost rank {v} ");
                let absent = match v {
                    0 => "cannot join rank 0 at 127.0.0.1:".to_owned(),
                    _ => format!("rank(s) [{v}] did not come"),
                };
                let known = error.contains(&lost);
                let unknown = plan.phase == Rendezvous && error.contains(&absent);
                assert!(known || unknown, "{about}: {error}");
                waited |= unknown;
            }
        }
    }
    let end = traces.iter().map(|trace| trace.after).max().unwrap();
    let after = end.saturating_sub(victim.after);
    assert!(after < SOON, "{about}: {after:?}");
    Some((after, waited))
}

fn body() -> Result<(), String> {
    let plan: Plan = serde_json::from_str(&std::env::var(PLAN).unwrap()).unwrap();
    plan.train().map_err(|error| error.to_string())
}

#[test]
fn ddp_03_sigkill_at_random_moments() {
    let test = "ddp_03_sigkill_at_random_moments";
    if in_rank() {
        ranks(2).watch(test, body);
        unreachable!("a rank ends in its body");
    }
    let count = std::env::var(COUNT).map_or(10, |count| count.parse().unwrap());
    let mut kills: Vec<_> = (0..)
        .filter_map(|seed| kill(seed, test))
        .take(count)
        .collect();
    kills.sort();
    let times = |waited| {
        let kills = kills.iter().filter(move |kill| kill.1 == waited);
        kills.map(|kill| kill.0).collect::<Vec<_>>()
    };
    let (known, absent) = (times(false), times(true));
    println!(
        "{count} kills. Until the last survivor's end: median {:.1?}, at most {:.1?}; \
         and at most {:.1?} for the {} that nobody had heard of before",
        known[known.len() / 2],
        known[known.len() - 1],
        absent.last().copied().unwrap_or_default(),
        absent.len()
    );
}
