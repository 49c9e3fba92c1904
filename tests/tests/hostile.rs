//! A crowd at rank 0's port that does not belong there (DDP-36), while a group forms and trains.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_ddp::Ddp;
use burn_ddp_tests::{
    Random, Relay, free_port, in_rank, log_to_stderr, models::Scalar, oracle::floats, ranks,
};
use std::{
    collections::VecDeque,
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

/// How many connections; the default suits the gate.
const COUNT: &str = "BURN_DDP_TEST_CONNECTIONS";
/// Where the crowd says how far it is.
const PROGRESS: &str = "BURN_DDP_TEST_PROGRESS";
const LIMIT: Duration = Duration::from_secs(300);
const THREADS: usize = 4;
/// Silent connections that each thread holds open at a time.
const HELD: usize = 50;
const MAGIC: &[u8] = b"burnddp\x02";

/// Makes `count` connections in all.
struct Crowd {
    port: u16,
    relay: Relay,
    count: usize,
    made: AtomicUsize,
    progress: PathBuf,
}

impl Crowd {
    fn run(&self) {
        thread::scope(|scope| {
            for seed in 0..THREADS {
                scope.spawn(move || self.harass(&mut Random::new(seed as u64)));
            }
        });
        fs::write(self.progress.join("done"), "").unwrap();
    }

    fn harass(&self, random: &mut Random) {
        let mut held = VecDeque::new();
        loop {
            let made = self.made.fetch_add(1, Ordering::Relaxed);
            if made >= self.count {
                return;
            }
            if made == self.count / 4 {
                fs::write(self.progress.join("quarter"), "").unwrap();
            }
            if made >= self.count / 2 {
                // Spread over the training.
                wait_for(&self.progress.join("warm"));
                thread::sleep(Duration::from_millis(1));
            }
            let stream = call(self.port);
            if let Some(silent) = self.attack(made, stream, random) {
                held.push_back(silent);
            }
            if held.len() > HELD {
                held.pop_front();
            }
        }
    }

    /// One of the ways, in turn; what stays open is returned.
    fn attack(&self, turn: usize, mut stream: TcpStream, random: &mut Random) -> Option<TcpStream> {
        let length = 1 + random.below(300) as usize;
        let message = match turn % 8 {
            // Half-open: nothing ever comes, or only a beginning.
            0 => return Some(stream),
            1 => MAGIC[..1 + turn / 8 % 7].to_vec(),
            2 => random.bytes(length),
            3 => b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
            // A length of 4 GiB, alone and where a frame would come after an answer.
            4 => [&u32::MAX.to_le_bytes()[..], &random.bytes(length)].concat(),
            5 => [MAGIC, &random.bytes(64), &u32::MAX.to_le_bytes()].concat(),
            // Another secret: an answer to the challenge, proved with what is not the key.
            6 => {
                let mut challenge = [0; 40];
                stream.read_exact(&mut challenge).ok()?;
                [MAGIC, &challenge[8..], &random.bytes(32)].concat()
            }
            // What rank 1 said to this very port.
            _ => self.relay.heard(),
        };
        // Rank 0 may have hung up by now.
        let _ = stream.write_all(&message);
        (turn % 8 == 1).then_some(stream)
    }
}

/// A connection to `port` as soon as somebody listens there and has room.
fn call(port: u16) -> TcpStream {
    let end = Instant::now() + LIMIT;
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) if stream.local_addr().unwrap() != stream.peer_addr().unwrap() => {
                let limit = Some(Duration::from_secs(5));
                stream.set_read_timeout(limit).unwrap();
                return stream;
            }
            result => assert!(Instant::now() < end, "{result:?}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn wait_for(file: &Path) {
    let end = Instant::now() + LIMIT;
    while !file.exists() {
        assert!(Instant::now() < end, "{file:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Resident memory of this process in KiB.
fn resident() -> i64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

/// Trains until the crowd has come to its end: the weight, the steps, and how much memory grew over the last half of the crowd.
fn body() -> (f32, u32, i64) {
    let progress = PathBuf::from(std::env::var(PROGRESS).unwrap());
    log_to_stderr();
    if std::env::var("RANK").unwrap() == "1" {
        // A quarter of the crowd is before rank 1 in the queue, and another comes with it.
        wait_for(&progress.join("quarter"));
    }
    let ddp = Ddp::from_env().unwrap();
    let device = Device::flex().autodiff();
    let mut model = ddp.wrap(Scalar::new(1.0, &device)).unwrap();
    let mut optim = SgdConfig::new().init();
    let (mut steps, mut before) = (0, 0);
    // Both ranks learn of the end in the same step.
    while !ddp.any(progress.join("done").exists()).unwrap() {
        let loss = model.loss(ddp.rank() as f32 + 1.0);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(0.25, model, grads);
        steps += 1;
        if steps == 10 && ddp.is_main() {
            before = resident();
            fs::write(progress.join("warm"), "").unwrap();
        }
        thread::sleep(Duration::from_millis(5));
    }
    ddp.check_replicas(&model).unwrap();
    (floats(model.w.val())[0], steps, resident() - before)
}

fn run(test: &str, progress: &Path, count: usize) {
    let port = free_port();
    let crowd = Crowd {
        port,
        relay: Relay::to(port),
        count,
        made: AtomicUsize::new(0),
        progress: progress.into(),
    };
    let ranks = ranks(2)
        .over("shm")
        .port(port)
        .rank_env(1, "MASTER_PORT", &crowd.relay.port().to_string())
        .env(PROGRESS, progress.to_str().unwrap())
        .env("BURN_DDP_RENDEZVOUS_TIMEOUT", "120")
        .limit(LIMIT);
    let start = Instant::now();
    let traces = thread::scope(|scope| {
        scope.spawn(|| crowd.run());
        ranks.watch(test, body).remove(0)
    });
    let grown = traces[0].finished().2;
    println!(
        "{count} connections in {:.1?}; rank 0 grew by {grown} KiB while the second half came",
        start.elapsed()
    );
    for trace in &traces {
        let (weight, steps, _) = *trace.finished();
        // The mean gradient is (1 + 2) / 2, exact in every step.
        assert_eq!(weight, 1.0 - 0.375 * steps as f32, "{steps} steps");
        assert!(steps > 20);
    }
    // Stacks of the handshakes under way come and go.
    assert!(grown < 2 << 10, "{grown} KiB");
    // Nor does the log grow with the crowd.
    let lines = traces[0].stderr.lines().count();
    assert!((2..40).contains(&lines), "{}", traces[0].stderr);
    assert!(crowd.relay.heard().starts_with(MAGIC));
}

#[test]
fn ddp_36_a_crowd_of_hostile_connections() {
    let test = "ddp_36_a_crowd_of_hostile_connections";
    if in_rank() {
        ranks(2).watch(test, body);
        unreachable!("a rank ends in its body");
    }
    let count = std::env::var(COUNT).map_or(1000, |count| count.parse().unwrap());
    let progress = tempfile::tempdir().unwrap();
    run(test, progress.path(), count);
}
