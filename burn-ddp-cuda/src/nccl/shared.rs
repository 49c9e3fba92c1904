//! What the threads that use one communicator share: whose turn it is to call NCCL, and how the communicator ended.
//!
//! NCCL lets one thread at a time call it for a communicator, and frees the communicator in abort. So two things are kept apart: an
//! *operation* lasts from its first call until NCCL is done with it, and others wait for its end; a *call* is one C function, which returns at
//! once. Abort waits for the end of a call only, and so can end an operation that hangs.

mod ending;

use super::{
    Library, Result, Settings,
    deadline::Deadline,
    ffi::{IN_PROGRESS, RawComm, SUCCESS},
    is_error,
    library::Functions,
};
use std::{
    ffi::c_int,
    ptr,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The first pause between two looks at NCCL; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

pub(super) struct Shared {
    pub(super) library: Library,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) settings: Settings,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    comm: Raw,
    /// A thread is in a C function.
    calling: bool,
    /// A thread is in an operation.
    operating: bool,
    /// All ranks have met.
    ready: bool,
    /// Nothing is called any more.
    end: Option<End>,
    /// NCCL has freed the communicator, and said this.
    released: Option<c_int>,
}

/// Why a communicator is not used any more.
#[derive(Clone)]
pub(super) enum End {
    Aborted(String),
    Closed,
}

struct Raw(RawComm);

// SAFETY: NCCL allows calls from any thread, one at a time, which `State::calling` sees to.
unsafe impl Send for Raw {}

/// The time between two looks at NCCL.
pub(super) struct Pause(Duration);

impl Pause {
    pub(super) fn new() -> Self {
        Self(FIRST_PAUSE)
    }

    fn next(&mut self, left: Duration) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(LONGEST_PAUSE);
        pause.min(left)
    }
}

/// The right to run an operation.
pub(super) struct Turn<'a>(&'a Shared);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.change(|state| state.operating = false);
    }
}

/// The right to be in a C function.
struct Calling<'a>(&'a Shared);

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        self.0.change(|state| state.calling = false);
    }
}

impl Shared {
    pub(super) fn new(
        library: &Library,
        rank: usize,
        world_size: usize,
        settings: Settings,
    ) -> Arc<Self> {
        Arc::new(Self {
            library: library.clone(),
            rank,
            world_size,
            settings,
            state: Mutex::new(State {
                comm: Raw(ptr::null_mut()),
                calling: false,
                operating: false,
                ready: false,
                end: None,
                released: None,
            }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is a single assignment, so a panic elsewhere leaves nothing half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Waits until `there` holds, for `limit` at most. Whether it holds is for the caller to see.
    fn wait_until(&self, limit: Duration, there: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let waiting = |state: &mut State| !there(state);
        self.changed
            .wait_timeout_while(self.lock(), limit, waiting)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    pub(super) fn set_comm(&self, comm: RawComm) {
        self.change(|state| state.comm = Raw(comm));
    }

    pub(super) fn set_ready(&self) {
        self.change(|state| state.ready = true);
    }

    /// Waits for the end of the operation that another thread is in.
    pub(super) fn begin(self: &Arc<Self>, deadline: &Deadline) -> Result<Turn<'_>> {
        self.turn(deadline, |_| false)?
            .ok_or_else(|| self.late(deadline))
    }

    /// The same for the meeting of all ranks; nothing if they have met.
    pub(super) fn begin_init(self: &Arc<Self>, deadline: &Deadline) -> Result<Option<Turn<'_>>> {
        let turn = self.turn(deadline, |state| state.ready)?;
        if turn.is_none() && !self.lock().ready {
            return Err(self.late(deadline));
        }
        Ok(turn)
    }

    /// Nothing if `needless` holds, or another thread is in an operation when the time is over.
    fn turn(
        &self,
        deadline: &Deadline,
        needless: impl Fn(&State) -> bool,
    ) -> Result<Option<Turn<'_>>> {
        let free = |state: &State| !state.operating || state.end.is_some() || needless(state);
        let mut state = self.wait_until(deadline.left(), free);
        if let Some(end) = &state.end {
            return Err(self.refusal(end, deadline));
        }
        if state.operating || needless(&state) {
            return Ok(None);
        }
        state.operating = true;
        Ok(Some(Turn(self)))
    }

    /// Runs one C function of NCCL, after the one that another thread is in.
    pub(super) fn call<R>(
        self: &Arc<Self>,
        deadline: &Deadline,
        function: impl FnOnce(&Functions, RawComm) -> R,
    ) -> Result<R> {
        let called = self.call_within(deadline.left(), deadline, function)?;
        called.ok_or_else(|| self.late(deadline))
    }

    /// The same, if the other thread is out of it in time.
    fn call_within<R>(
        &self,
        limit: Duration,
        deadline: &Deadline,
        function: impl FnOnce(&Functions, RawComm) -> R,
    ) -> Result<Option<R>> {
        let free = |state: &State| !state.calling || state.end.is_some();
        let mut state = self.wait_until(limit, free);
        if state.end.is_some() {
            drop(state);
            return Err(self.interrupted(deadline));
        }
        if state.calling {
            return Ok(None);
        }
        state.calling = true;
        let comm = state.comm.0;
        drop(state);
        let _calling = Calling(self);
        Ok(Some(function(self.library.functions(), comm)))
    }

    /// What NCCL says of the communicator.
    pub(super) fn poll(self: &Arc<Self>, deadline: &Deadline) -> Result<c_int> {
        self.call(deadline, ask)
    }

    /// [`poll`](Self::poll), unless another thread is in a call: that thread sees the error.
    pub(super) fn poll_now(&self, deadline: &Deadline) -> Result<c_int> {
        let code = self.call_within(Duration::ZERO, deadline, ask)?;
        Ok(code.unwrap_or(IN_PROGRESS))
    }

    /// Waits until NCCL is done with the call that returned `code`.
    pub(super) fn settle(self: &Arc<Self>, code: c_int, deadline: &Deadline) -> Result<()> {
        let mut code = code;
        let mut pause = Pause::new();
        loop {
            if is_error(code) {
                return Err(self.failed(code, deadline));
            }
            code = self.poll(deadline)?;
            match code {
                SUCCESS => return Ok(()),
                IN_PROGRESS if deadline.left().is_zero() => return Err(self.late(deadline)),
                IN_PROGRESS => self.pause(&mut pause, deadline),
                _ => {}
            }
        }
    }

    /// A pause, which ends with the communicator.
    pub(super) fn pause(&self, pause: &mut Pause, deadline: &Deadline) {
        let ended = |state: &State| state.end.is_some();
        drop(self.wait_until(pause.next(deadline.left()), ended));
    }
}

/// ncclCommGetAsyncError, in a call.
fn ask(nccl: &Functions, comm: RawComm) -> c_int {
    let mut code = SUCCESS;
    // SAFETY: the communicator lives, and no other thread uses it, while this one is in a call; `code` is writable.
    let result = unsafe { (nccl.get_async_error)(comm, &mut code) };
    if result == SUCCESS { code } else { result }
}
