//! A link with delay and loss, for kernels that have no `netem`: the frames between two TAP devices go through this process.

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    ioctl::{Setter, ioctl},
};
use std::{
    fs::File,
    io::{Read, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Runs until it is dropped.
#[derive(Debug)]
pub(crate) struct Relay {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Relay {
    /// Passes frames between two devices, each `delay` later, and drops `loss` hundredths of them, the same ones in every run of
    /// the same frames.
    pub(crate) fn start(ends: [File; 2], delay: Duration, loss: u32) -> std::io::Result<Self> {
        let [a, b] = ends;
        let ways = [(a.try_clone()?, b.try_clone()?), (b, a)];
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for (mut from, mut to) in ways {
            let (sender, frames) = mpsc::channel::<(Instant, Vec<u8>)>();
            let stop = stop.clone();
            threads.push(thread::spawn(move || {
                let mut frame = [0; 1 << 16];
                let mut random = 1u32;
                while !stop.load(Ordering::Relaxed) {
                    let mut fds = [PollFd::new(&from, PollFlags::IN)];
                    let slice = Timespec {
                        tv_sec: 0,
                        tv_nsec: 50_000_000,
                    };
                    if poll(&mut fds, Some(&slice)).unwrap_or(0) == 0 {
                        continue;
                    }
                    let Ok(bytes) = from.read(&mut frame) else {
                        continue;
                    };
                    // Numerical Recipes' generator; its high bits are good enough for a lottery.
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    if (random >> 8) % 100 >= loss {
                        let _ = sender.send((Instant::now() + delay, frame[..bytes].to_vec()));
                    }
                }
            }));
            threads.push(thread::spawn(move || {
                for (due, frame) in frames {
                    thread::sleep(due.saturating_duration_since(Instant::now()));
                    // The device is gone at the end of the test.
                    let _ = to.write(&frame);
                }
            }));
        }
        Ok(Self { stop, threads })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// `struct ifreq` as far as `TUNSETIFF` uses it.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: i16,
    rest: [u8; 22],
}

const TUNSETIFF: rustix::ioctl::Opcode = 0x4004_54ca;
const IFF_TAP: i16 = 0x0002;
/// Frames alone, without a header.
const IFF_NO_PI: i16 = 0x1000;

/// A new TAP device of this name (15 bytes at most), which lives as long as the file.
pub(crate) fn tap(name: &str) -> std::io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    let mut request = Request {
        name: [0; 16],
        flags: IFF_TAP | IFF_NO_PI,
        rest: [0; 22],
    };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: TUNSETIFF reads one `struct ifreq`, which `Request` is as long as and laid out like, and its name ends with a 0.
    unsafe { ioctl(&file, Setter::<TUNSETIFF, Request>::new(request)) }?;
    Ok(file)
}
