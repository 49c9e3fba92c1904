//! What the threads that use one communicator share: whose turn it is to call NCCL, and how the communicator ended.
//!
//! NCCL lets one thread at a time call it for a communicator, and frees the communicator in abort. So two things are kept apart: an
//! *operation* lasts from its first call until NCCL is done with it, and others wait for its end; a *call* is one C function, which returns at
//! once. Abort waits for the end of a call only, and so can end an operation that hangs.

use super::{
    Library, NcclError, Result, ResultCode, Settings,
    deadline::Deadline,
    ffi::{IN_PROGRESS, RawComm, SUCCESS},
    is_error,
    library::Functions,
    release::{self, How},
};
use std::{
    ffi::c_int,
    ptr,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// How long an operation that failed waits until the communicator is aborted, beyond its own limit. Then its stream moves on; and up to
/// NCCL 2.26 the thread that made a call must live until NCCL has let go of it.
const GRACE: Duration = Duration::from_secs(2);
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

    pub(super) fn has_ended(&self) -> bool {
        self.lock().end.is_some()
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
            return Err(self.ended(end, deadline));
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

    /// The error of an operation whose time is over; aborts.
    pub(super) fn late(self: &Arc<Self>, deadline: &Deadline) -> NcclError {
        self.fail(self.timeout(deadline), deadline)
    }

    fn timeout(&self, deadline: &Deadline) -> NcclError {
        NcclError::TimedOut {
            rank: self.rank,
            world_size: self.world_size,
            operation: deadline.operation.clone(),
            elapsed: deadline.elapsed(),
            limit: deadline.limit,
            message: self.library.last_message(),
        }
    }

    /// The error of an operation for which NCCL said `code`; aborts.
    pub(super) fn failed(self: &Arc<Self>, code: c_int, deadline: &Deadline) -> NcclError {
        self.fail(self.failure(code, deadline), deadline)
    }

    fn failure(&self, code: c_int, deadline: &Deadline) -> NcclError {
        NcclError::Failed {
            rank: self.rank,
            world_size: self.world_size,
            operation: deadline.operation.clone(),
            elapsed: deadline.elapsed(),
            code: ResultCode(code),
            message: self.library.last_message(),
        }
    }

    /// Aborts because of `error`, and returns it, unless the communicator has ended before.
    fn fail(self: &Arc<Self>, error: NcclError, deadline: &Deadline) -> NcclError {
        if !self.abort(&error.to_string()) {
            return self.interrupted(deadline);
        }
        drop(self.wait_released(GRACE));
        error
    }

    /// The error of an operation that finds its communicator at its end.
    pub(super) fn interrupted(&self, deadline: &Deadline) -> NcclError {
        let state = self.wait_released(GRACE);
        let end = state.end.clone().unwrap_or(End::Closed);
        self.ended(&end, deadline)
    }

    /// Ends the communicator, unless it has ended. Returns at once.
    pub(super) fn abort(self: &Arc<Self>, reason: &str) -> bool {
        self.end(End::Aborted(reason.to_owned()), How::Abort)
    }

    /// Destroys the communicator, which NCCL has finalised.
    pub(super) fn destroy(self: &Arc<Self>, deadline: &Deadline) -> Result<()> {
        if !self.end(End::Closed, How::Destroy) {
            return Err(self.interrupted(deadline));
        }
        let code = self.wait_released(deadline.left()).released;
        match code {
            Some(code) if is_error(code) => Err(self.failure(code, deadline)),
            Some(_) => Ok(()),
            // The thread that destroys it goes on.
            None => Err(self.timeout(deadline)),
        }
    }

    fn end(self: &Arc<Self>, end: End, how: How) -> bool {
        let first = self.change(|state| {
            let first = state.end.is_none();
            state.end.get_or_insert(end);
            first
        });
        if first {
            release::start(self, how);
        }
        first
    }

    fn wait_released(&self, limit: Duration) -> MutexGuard<'_, State> {
        self.wait_until(limit, |state| state.released.is_some())
    }

    /// Waits until no thread is in a call, and takes the communicator out of everybody's reach.
    pub(super) fn take_comm(&self) -> RawComm {
        let state = self.changed.wait_while(self.lock(), |state| state.calling);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut state.comm.0, ptr::null_mut())
    }

    pub(super) fn released(&self, code: c_int) {
        self.change(|state| state.released = Some(code));
    }

    fn ended(&self, end: &End, deadline: &Deadline) -> NcclError {
        let (rank, world_size, operation) =
            (self.rank, self.world_size, deadline.operation.clone());
        match end {
            End::Closed => NcclError::Closed {
                rank,
                world_size,
                operation,
            },
            End::Aborted(reason) => NcclError::Aborted {
                rank,
                world_size,
                operation,
                elapsed: deadline.elapsed(),
                reason: reason.clone(),
            },
        }
    }
}

/// ncclCommGetAsyncError, in a call.
fn ask(nccl: &Functions, comm: RawComm) -> c_int {
    let mut code = SUCCESS;
    // SAFETY: the communicator lives, and no other thread uses it, while this one is in a call; `code` is writable.
    let result = unsafe { (nccl.get_async_error)(comm, &mut code) };
    if result == SUCCESS { code } else { result }
}
