//! A process that ends the ranks of a launcher which has been killed.
//!
//! A rank that runs [`launch`](super::launch()) watches its launcher itself. Any other program does not, and a parent-death signal
//! would reach the program alone and not what it has started. So the `burn-ddp` command starts itself once more, as a process that knows the ranks' process
//! groups and kills them when its standard input, which only the launcher holds open, comes to an end.

use rustix::process::{Pid, Signal, kill_process_group};
use std::{
    collections::BTreeSet,
    io::{self, BufRead, Write},
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Mutex, PoisonError},
};

/// The launcher's end.
#[derive(Debug)]
pub(super) struct Guard {
    child: Child,
    /// `None` once the guard is told to end.
    pipe: Mutex<Option<ChildStdin>>,
}

impl Guard {
    /// Starts this executable with `argument`, on which it must call [`serve`].
    pub(super) fn start(argument: &str) -> io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(argument)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Out of reach of what is sent to the launcher's group.
            .process_group(0)
            .spawn()?;
        let pipe = Mutex::new(child.stdin.take());
        Ok(Self { child, pipe })
    }

    /// From now on the group that `leader` leads is killed when the launcher dies.
    pub(super) fn watch(&self, leader: u32) {
        self.say(&format!("+{leader}\n"));
    }

    /// Before the leader is waited for, after which its number may name another process.
    pub(super) fn forget(&self, leader: u32) {
        self.say(&format!("-{leader}\n"));
    }

    /// A guard that has been killed guards nothing; that is no reason to end the job.
    fn say(&self, line: &str) {
        let mut pipe = self.pipe.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipe) = pipe.as_mut() {
            let _ = pipe.write_all(line.as_bytes());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(
            self.pipe
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        let _ = self.child.wait();
    }
}

/// The guard's own work; returns when the launcher has ended.
pub(super) fn serve(input: impl BufRead) {
    for leader in left(input) {
        let _ = kill_process_group(leader, Signal::KILL);
    }
}

/// The groups that are left at the end of the input.
fn left(input: impl BufRead) -> Vec<Pid> {
    let mut leaders = BTreeSet::<i32>::new();
    for line in input.lines().map_while(Result::ok) {
        let Some(leader) = line.get(1..).and_then(|pid| pid.parse().ok()) else {
            continue;
        };
        match line.as_bytes() {
            [b'+', ..] => leaders.insert(leader),
            [b'-', ..] => leaders.remove(&leader),
            _ => false,
        };
    }
    leaders.into_iter().filter_map(Pid::from_raw).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_was_forgotten_is_not_killed() {
        let input = "+101\n+102\nnonsense\n+\n-101\n+103\n-104\n+0\n";
        assert_eq!(
            left(input.as_bytes()),
            [102, 103].map(|pid| Pid::from_raw(pid).unwrap())
        );
    }
}
