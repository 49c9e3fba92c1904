//! A communicator: one rank's end of a group of GPUs.

mod collectives;

use super::{
    Library, NcclError, Operation, Result, Settings, Stream, UniqueId,
    deadline::Deadline,
    ffi::{Config, IN_PROGRESS, RawComm, RawUniqueId},
    is_error,
    shared::{Pause, Shared},
};
use std::{env, ffi::c_int, fmt, ptr, sync::Arc};

/// The environment variable that overrules the configuration.
const BLOCKING: &str = "NCCL_COMM_BLOCKING";

/// What tells NCCL how to reach the other ranks.
const ROUTES: [&str; 8] = [
    "NCCL_SOCKET_IFNAME",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_IB_HCA",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
];

/// One rank's end of a group of GPUs.
///
/// Operations are put on a CUDA stream: a method returns when NCCL has put it there, and the stream does it later, in order. All ranks must
/// call the same operations in the same order. Operations from several threads of a rank wait for each other, in no particular order, and
/// that counts as their time.
///
/// When an operation fails or its time is over, the communicator is aborted: what is under way on this rank's device ends, with unusable data, and
/// every later call returns [`NcclError::Aborted`]. Other ranks do not hear of it; they need to be told to abort, too. An operation that failed
/// returns at most two seconds after its limit.
///
/// Dropping a communicator aborts it, in the background. Use [`close`](Self::close) to leave in good order.
pub struct Communicator {
    shared: Arc<Shared>,
    /// For the meeting of all ranks.
    init: Deadline,
}

impl Communicator {
    /// Joins the group that `id` stands for, and waits until all ranks have, or [`Settings::init_timeout`] is over.
    ///
    /// Call it on each rank. The device that is current on this thread is the communicator's. NCCL reads its `NCCL_*` environment variables
    /// as usual, but `NCCL_COMM_BLOCKING=1` is an error.
    pub fn init(
        library: &Library,
        id: &UniqueId,
        rank: usize,
        world_size: usize,
        settings: Settings,
    ) -> Result<Self> {
        let communicator = Self::start(library, id, rank, world_size, settings)?;
        communicator.ready()?;
        Ok(communicator)
    }

    /// [`init`](Self::init) without the waiting, so that another thread can [`abort`](Self::abort) it. Call [`ready`](Self::ready) then.
    ///
    /// The first call in a process sets up CUDA and loads NCCL's plugins, which takes seconds, and no limit applies to it.
    pub fn start(
        library: &Library,
        id: &UniqueId,
        rank: usize,
        world_size: usize,
        settings: Settings,
    ) -> Result<Self> {
        if let Some(value) = env::var_os(BLOCKING).filter(|value| value != "0") {
            return Err(NcclError::Blocking {
                value: value.to_string_lossy().into_owned(),
            });
        }
        if rank >= world_size || c_int::try_from(world_size).is_err() {
            return Err(NcclError::InvalidArgument {
                rank,
                world_size,
                operation: "init".into(),
                cause: format!("rank {rank} is not in 0..{world_size}"),
            });
        }
        let init = Deadline::new("init", settings.init_timeout);
        let shared = Shared::new(library, rank, world_size, settings);
        let mut comm: RawComm = ptr::null_mut();
        let mut config = Config::non_blocking();
        // SAFETY: `comm` and `config` are writable, the configuration is as NCCL wants it (see `ffi`), and NCCL copies it. Both numbers fit
        // into a c_int.
        let code = unsafe {
            (library.functions().init_rank_config)(
                &mut comm,
                world_size as c_int,
                RawUniqueId(*id.as_bytes()),
                rank as c_int,
                &mut config,
            )
        };
        shared.set_comm(comm);
        let communicator = Self { shared, init };
        if is_error(code) {
            return Err(communicator.shared.failed(code, &communicator.init));
        }
        Ok(communicator)
    }

    /// Waits until all ranks have joined, or [`Settings::init_timeout`] after the start is over. Operations do it by themselves.
    pub fn ready(&self) -> Result<()> {
        if let Some(_turn) = self.shared.begin_init(&self.init)? {
            self.shared.settle(IN_PROGRESS, &self.init)?;
            self.shared.set_ready();
        }
        Ok(())
    }

    /// The start of an operation: waits for the other ranks if it is the first, which is not its own time. Its name is in the error of a
    /// communicator that has ended.
    fn prepare(&self, operation: String) -> Result<Deadline> {
        let limit = self.shared.settings.timeout;
        let deadline = Deadline::new(operation.as_str(), limit);
        if let Some(error) = self.shared.refused(&deadline) {
            return Err(error);
        }
        self.ready()?;
        Ok(Deadline::new(operation, limit))
    }

    /// This process's position, `0..world_size`.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.shared.world_size
    }

    /// The library behind it.
    pub fn library(&self) -> &Library {
        &self.shared.library
    }

    /// One line for a log: version, rank, and what the environment says about interfaces and transports.
    ///
    /// NCCL chooses the rest, a pair of ranks at a time, and tells it only to its own log (`NCCL_DEBUG=INFO`).
    pub fn describe(&self) -> String {
        let set: Vec<_> = ROUTES
            .iter()
            .filter_map(|name| Some(format!("{name}={}", env::var(name).ok()?)))
            .collect();
        let routes = if set.is_empty() {
            "interface and transport chosen by NCCL".to_owned()
        } else {
            set.join(" ")
        };
        let (rank, world_size) = (self.rank(), self.world_size());
        format!("{}, rank {rank} of {world_size}, {routes}", self.library())
    }

    /// Puts `operation` on `stream`. Returns when NCCL has put it there, or [`Settings::timeout`] is over.
    ///
    /// The first operation also connects the ranks, so it waits for them.
    ///
    /// # Safety
    ///
    /// The buffers are memory of the communicator's device, of the sizes that [`Operation`] names, and stay valid, and without another use
    /// that conflicts, until `stream` has passed the operation: after an error, too. `stream` is a stream of that device.
    pub unsafe fn enqueue(&self, operation: Operation, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.hand_in(&[operation], operation.to_string(), stream) }
    }

    /// Puts several operations on `stream` as one; sends and receives among them run at the same time. Same limits as
    /// [`enqueue`](Self::enqueue). None is started when the arguments of one are wrong.
    ///
    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue), for each operation.
    pub unsafe fn group(&self, operations: &[Operation], stream: Stream) -> Result<()> {
        let [first, rest @ ..] = operations else {
            return Ok(());
        };
        let name = match rest.len() {
            0 => first.to_string(),
            more => format!("group of {first} and {more} more"),
        };
        // SAFETY: the caller's promise.
        unsafe { self.hand_in(operations, name, stream) }
    }

    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue), for each operation.
    unsafe fn hand_in(&self, operations: &[Operation], name: String, stream: Stream) -> Result<()> {
        let shared = &self.shared;
        for operation in operations {
            operation
                .check(shared.rank, shared.world_size)
                .map_err(|cause| NcclError::InvalidArgument {
                    rank: shared.rank,
                    world_size: shared.world_size,
                    operation: operation.to_string(),
                    cause,
                })?;
        }
        let deadline = self.prepare(name)?;
        let _turn = shared.begin(&deadline)?;
        let code = shared.call(&deadline, |nccl, comm| {
            // SAFETY: the communicator lives, and no other thread uses it, while this one is in a call; the arguments were checked; the
            // buffers and the stream are the caller's promise.
            unsafe {
                match operations {
                    [one] => one.enqueue(nccl, comm, stream),
                    several => Operation::enqueue_group(several, nccl, comm, stream),
                }
            }
        })?;
        shared.settle(code, &deadline)
    }

    /// Waits until `done` returns true (an event of the stream, say), an error of NCCL's, an abort, or [`Settings::timeout`].
    ///
    /// `what` names the wait in errors. `done` is called again and again on this thread, at intervals of up to a millisecond, and must not
    /// block. An abort also makes streams move on: after one this is an error even when `done` says true, because the data are not
    /// usable.
    pub fn wait(&self, what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
        let deadline = Deadline::new(what, self.shared.settings.timeout);
        let mut pause = Pause::new();
        loop {
            // Before the look at NCCL, so that an error or an abort which made it true is seen.
            let done = done();
            let code = self.shared.poll(&deadline)?;
            if is_error(code) {
                return Err(self.shared.failed(code, &deadline));
            }
            if done {
                return Ok(());
            }
            if deadline.left().is_zero() {
                return Err(self.shared.late(&deadline));
            }
            self.shared.pause(&mut pause, &deadline);
        }
    }

    /// Whether the communicator still works, for a watchdog: an error that NCCL has met since the last call aborts it and is returned. Returns at
    /// once (after a failure within two seconds). A rank that died is often no error of NCCL's: it does not come, that is all.
    pub fn check(&self) -> Result<()> {
        let deadline = Deadline::new("check", self.shared.settings.timeout);
        if let Some(error) = self.shared.refused(&deadline) {
            return Err(error);
        }
        let code = self.shared.poll_now(&deadline)?;
        if is_error(code) {
            return Err(self.shared.failed(code, &deadline));
        }
        Ok(())
    }

    /// Ends what is under way and refuses what comes: operations of other threads return [`NcclError::Aborted`] with `reason`, and this
    /// rank's streams move on. Legal from any thread at any time, during [`ready`](Self::ready) too. Returns at once; NCCL's part runs on a thread of its own.
    /// Does nothing on a communicator that is aborted or closed.
    pub fn abort(&self, reason: &str) {
        self.shared.abort(reason);
    }

    /// Leaves in good order: waits until all operations are done and every rank has called it, then frees everything. [`Settings::timeout`]
    /// applies to the whole; when it is over the communicator is aborted.
    pub fn close(&self) -> Result<()> {
        let shared = &self.shared;
        let deadline = self.prepare("close".into())?;
        let _turn = shared.begin(&deadline)?;
        let code = shared.call(&deadline, |nccl, comm| {
            // SAFETY: the communicator lives, and no other thread uses it, while this one is in a call.
            unsafe { (nccl.finalize)(comm) }
        })?;
        shared.settle(code, &deadline)?;
        shared.destroy(&deadline)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.shared.abort("it was dropped");
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator({})", self.describe())
    }
}
