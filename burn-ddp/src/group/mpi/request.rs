//! Messages on their way: the only part that calls MPI's functions.
//!
//! MPI reads and writes a message's memory until its request is complete, which for a peer that hangs is never. So a
//! request owns its memory, and one that is dropped before it is complete leaves both to the process ([`reap`]).

use super::{MpiError, library::Mpi};
use crate::group::GroupError;
use mpi::{
    environment, ffi,
    topology::Communicator,
    traits::{AsRaw, CommunicatorCollectives, Root},
};
use std::{
    ffi::c_int,
    mem::{self, MaybeUninit},
    sync::{Arc, Mutex, PoisonError},
};

/// A communicator of our own: no message of the program's own MPI calls can meet ours.
///
/// Never freed: `MPI_Comm_free` is collective. A job needs one.
#[derive(Debug)]
pub(super) struct Comm {
    raw: ffi::MPI_Comm,
    pub(super) rank: usize,
    pub(super) size: usize,
}

// SAFETY: a handle that any thread may use as long as the calls take turns, for which `Mpi` stands.
unsafe impl Send for Comm {}
// SAFETY: as above; the handle is never written.
unsafe impl Sync for Comm {}

/// What MPI said to a call.
#[derive(Debug)]
pub(super) struct Refusal {
    call: &'static str,
    cause: String,
}

impl Refusal {
    pub(super) fn on(self, rank: usize) -> GroupError {
        GroupError::Transport {
            rank,
            operation: self.call.to_owned(),
            cause: self.cause,
        }
    }
}

impl From<Refusal> for MpiError {
    fn from(Refusal { call, cause }: Refusal) -> Self {
        MpiError::Call { call, cause }
    }
}

fn check(call: &'static str, code: c_int) -> Result<(), Refusal> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length = 0;
    // SAFETY: the text has the room that the standard asks for.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(text.len());
    let cause = String::from_utf8_lossy(&text[..length]).into_owned();
    Err(Refusal { call, cause })
}

impl Comm {
    /// A duplicate of `parent` that reports errors instead of ending the job. Collective, and blocks.
    pub(super) fn duplicate(_: &Mpi, parent: &impl Communicator) -> Result<Self, MpiError> {
        let duplicate = parent.duplicate();
        let raw = duplicate.as_raw();
        // SAFETY: the communicator is live; the handler is a constant of the library.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN) };
        check("MPI_Comm_set_errhandler", code)?;
        let number = |n: c_int| usize::try_from(n).unwrap_or(0);
        let (rank, size) = (number(duplicate.rank()), number(duplicate.size()));
        // Dropping it would free the communicator.
        mem::forget(duplicate);
        Ok(Self { raw, rank, size })
    }

    /// Each rank's machine, by the lowest rank on it. Collective, and blocks.
    pub(super) fn machines(_: &Mpi, parent: &impl Communicator) -> Vec<usize> {
        let machine = parent.split_shared(parent.rank());
        let mut first = parent.rank();
        machine.process_at_rank(0).broadcast_into(&mut first);
        let mut all = vec![0; usize::try_from(parent.size()).unwrap_or(0)];
        parent.all_gather_into(&first, &mut all);
        let number = |n: c_int| usize::try_from(n).unwrap_or(0);
        all.into_iter().map(number).collect()
    }

    /// Each rank's name of its machine, cut to 64 bytes. Collective, and blocks.
    pub(super) fn hosts(_: &Mpi, parent: &impl Communicator) -> Vec<String> {
        const NAME: usize = 64;
        let name = environment::processor_name().unwrap_or_default();
        let mut bytes = name.into_bytes();
        bytes.resize(NAME, 0);
        let mut all = vec![0; NAME * usize::try_from(parent.size()).unwrap_or(0)];
        parent.all_gather_into(&bytes[..], &mut all[..]);
        let text = |name: &[u8]| {
            let name = String::from_utf8_lossy(name);
            name.trim_end_matches('\0').to_owned()
        };
        all.chunks_exact(NAME).map(text).collect()
    }

    /// Rank 0's number on every rank. Collective, and blocks.
    pub(super) fn share(_: &Mpi, parent: &impl Communicator, mut number: u64) -> u64 {
        parent.process_at_rank(0).broadcast_into(&mut number);
        number
    }
}

#[derive(Debug)]
struct Handle(ffi::MPI_Request);

// SAFETY: as for `Comm`.
unsafe impl Send for Handle {}

/// A message that is being sent.
#[derive(Debug)]
pub(super) struct Sending {
    handle: Handle,
    /// `None` once MPI does not need it any more.
    memory: Option<Arc<Vec<u8>>>,
}

/// A message that is expected.
#[derive(Debug)]
pub(super) struct Receiving {
    handle: Handle,
    /// `None` once the message is there.
    memory: Option<Vec<u8>>,
    cancelled: bool,
}

/// A message that has come.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) source: usize,
    pub(super) data: Vec<u8>,
}

/// What the memory of an incomplete request is kept in.
#[derive(Debug)]
enum Orphan {
    Sending(Sending),
    Receiving(Receiving),
}

static ORPHANS: Mutex<Vec<Orphan>> = Mutex::new(Vec::new());

fn leave(orphan: Orphan) {
    let mut orphans = ORPHANS.lock().unwrap_or_else(PoisonError::into_inner);
    orphans.push(orphan);
}

fn length(bytes: usize, call: &'static str) -> Result<c_int, Refusal> {
    c_int::try_from(bytes).map_err(|_| Refusal {
        call,
        cause: format!("{bytes} bytes in one message"),
    })
}

impl Mpi {
    /// Starts to send `data` to rank `peer`.
    pub(super) fn send(
        &self,
        comm: &Comm,
        data: Arc<Vec<u8>>,
        peer: usize,
        tag: i32,
    ) -> Result<Sending, Refusal> {
        const CALL: &str = "MPI_Isend";
        let count = length(data.len(), CALL)?;
        let mut raw = MaybeUninit::uninit();
        // SAFETY: `data` is not written while it is shared, and the request that keeps it is freed only when it is
        // complete. MPI runs, and no other thread is in it (`self`).
        let code = unsafe {
            ffi::MPI_Isend(
                data.as_ptr().cast(),
                count,
                ffi::RSMPI_UINT8_T,
                peer as c_int,
                tag,
                comm.raw,
                raw.as_mut_ptr(),
            )
        };
        check(CALL, code)?;
        Ok(Sending {
            // SAFETY: set by a call that has succeeded.
            handle: Handle(unsafe { raw.assume_init() }),
            memory: Some(data),
        })
    }

    /// Starts to receive a message of at most `memory.len()` bytes, from any rank if `peer` is `None`.
    pub(super) fn receive(
        &self,
        comm: &Comm,
        mut memory: Vec<u8>,
        peer: Option<usize>,
        tag: i32,
    ) -> Result<Receiving, Refusal> {
        const CALL: &str = "MPI_Irecv";
        let count = length(memory.len(), CALL)?;
        let mut raw = MaybeUninit::uninit();
        // SAFETY: the request owns the memory, whose place on the heap does not change, touches it only when it
        // is complete, and frees it only then. MPI runs, and no other thread is in it (`self`).
        let code = unsafe {
            ffi::MPI_Irecv(
                memory.as_mut_ptr().cast(),
                count,
                ffi::RSMPI_UINT8_T,
                peer.map_or(ffi::RSMPI_ANY_SOURCE, |peer| peer as c_int),
                tag,
                comm.raw,
                raw.as_mut_ptr(),
            )
        };
        check(CALL, code)?;
        Ok(Receiving {
            // SAFETY: set by a call that has succeeded.
            handle: Handle(unsafe { raw.assume_init() }),
            memory: Some(memory),
            cancelled: false,
        })
    }

    /// The status of the request if it is complete.
    fn test(&self, handle: &mut Handle) -> Result<Option<ffi::MPI_Status>, Refusal> {
        let (mut complete, mut status) = (0, MaybeUninit::zeroed());
        // SAFETY: the request is live, or null after it was complete, which MPI allows. No other thread is in MPI.
        let code = unsafe { ffi::MPI_Test(&mut handle.0, &mut complete, status.as_mut_ptr()) };
        check("MPI_Test", code)?;
        // SAFETY: a status consists of integers, for which zeros are valid, whatever the call has set of it.
        Ok((complete != 0).then(|| unsafe { status.assume_init() }))
    }

    /// Asks the message to be given up; it is then complete soon whatever the peer does.
    fn cancel(&self, message: &mut Receiving) {
        if mem::replace(&mut message.cancelled, true) {
            return;
        }
        // SAFETY: the request is live. A refusal shows in that it does not complete.
        unsafe { ffi::MPI_Cancel(&mut message.handle.0) };
    }
}

impl Sending {
    /// The memory, as soon as MPI does not need it any more.
    pub(super) fn poll(&mut self, mpi: &Mpi) -> Result<Option<Arc<Vec<u8>>>, Refusal> {
        Ok(match mpi.test(&mut self.handle)? {
            Some(_) => self.memory.take(),
            None => None,
        })
    }
}

impl Receiving {
    /// The message, as soon as it is there. Not to be called again after that.
    pub(super) fn poll(&mut self, mpi: &Mpi) -> Result<Option<Received>, Refusal> {
        let Some(status) = mpi.test(&mut self.handle)? else {
            return Ok(None);
        };
        let Some(mut data) = self.memory.take() else {
            return Ok(None);
        };
        let mut count = 0;
        // SAFETY: the status is that of a complete receive of this type.
        let code = unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count) };
        check("MPI_Get_count", code)?;
        data.truncate(usize::try_from(count).unwrap_or(0));
        let source = usize::try_from(status.MPI_SOURCE).unwrap_or(usize::MAX);
        Ok(Some(Received { source, data }))
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            leave(Orphan::Sending(Sending {
                handle: Handle(self.handle.0),
                memory: Some(memory),
            }));
        }
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            leave(Orphan::Receiving(Receiving {
                handle: Handle(self.handle.0),
                memory: Some(memory),
                cancelled: self.cancelled,
            }));
        }
    }
}

/// Gives up what was left. Whether nothing is pending any more; else call it again, or never end MPI.
pub(super) fn reap(mpi: &Mpi) -> bool {
    let take = || mem::take(&mut *ORPHANS.lock().unwrap_or_else(PoisonError::into_inner));
    for orphan in take() {
        match orphan {
            Orphan::Sending(mut message) => drop(message.poll(mpi)),
            Orphan::Receiving(mut message) => {
                mpi.cancel(&mut message);
                drop(message.poll(mpi));
            }
        }
        // What is still incomplete is left again as it is dropped here.
    }
    let orphans = ORPHANS.lock().unwrap_or_else(PoisonError::into_inner);
    orphans.is_empty()
}
