//! Signalling and reaping a rank's process and its process group.

use super::error::Outcome;
use std::process::{Child, ExitStatus};

#[cfg(unix)]
fn outcome(status: ExitStatus) -> Outcome {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => Outcome::Exit(code),
        (None, Some(signal)) => Outcome::Signal(signal),
        (None, None) => Outcome::Exit(1),
    }
}

#[cfg(not(unix))]
fn outcome(status: ExitStatus) -> Outcome {
    Outcome::Exit(status.code().unwrap_or(1))
}

/// The child's outcome if it has ended, after killing what is left of its process group. That comes first:
/// until a child is reaped, its process id, which names the group, cannot be given to anybody else. So does what the caller has to do `before`.
#[cfg(unix)]
pub(super) fn reap(child: &mut Child, before: impl FnOnce()) -> Option<Outcome> {
    use rustix::{
        io::Errno,
        process::{WaitId, WaitIdOptions, waitid},
    };
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    match waitid(WaitId::Pid(pid(child)?), ended) {
        Ok(Some(_)) => kill(child),
        // Not to be signalled any more: the id may be somebody else's by now.
        Err(Errno::CHILD) => return Some(Outcome::Unknown),
        Ok(None) | Err(_) => return None,
    }
    before();
    Some(child.wait().map_or(Outcome::Unknown, outcome))
}

#[cfg(not(unix))]
pub(super) fn reap(child: &mut Child, _before: impl FnOnce()) -> Option<Outcome> {
    child.try_wait().ok().flatten().map(outcome)
}

/// Whether a signal or a debugger has stopped the process, where that can be seen.
pub(super) fn is_stopped(child: &Child) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    // The name before the state is in brackets and may hold anything.
    let state = status
        .rsplit(')')
        .next()
        .and_then(|rest| rest.trim_start().chars().next());
    matches!(state, Some('T' | 't'))
}

#[cfg(unix)]
fn pid(child: &Child) -> Option<rustix::process::Pid> {
    rustix::process::Pid::from_raw(i32::try_from(child.id()).ok()?)
}

/// Sends to the group of a child that has not been reaped. The group may be gone; that is no error.
#[cfg(unix)]
fn send(child: &Child, signal: rustix::process::Signal) {
    if let Some(group) = pid(child) {
        let _ = rustix::process::kill_process_group(group, signal);
    }
}

#[cfg(unix)]
pub(super) fn forward(child: &mut Child, signal: i32) {
    use rustix::process::Signal;
    let signal = [Signal::INT, Signal::HUP]
        .into_iter()
        .find(|known| known.as_raw() == signal);
    send(child, signal.unwrap_or(Signal::TERM));
}

#[cfg(unix)]
pub(super) fn terminate(child: &mut Child) {
    send(child, rustix::process::Signal::TERM);
}

/// There is no polite way there.
#[cfg(not(unix))]
pub(super) fn terminate(child: &mut Child) {
    kill(child);
}

/// Kills a child that has not been reaped, and all in its process group.
#[cfg(unix)]
pub(super) fn kill(child: &mut Child) {
    send(child, rustix::process::Signal::KILL);
}

#[cfg(not(unix))]
pub(super) fn kill(child: &mut Child) {
    let _ = child.kill();
}
