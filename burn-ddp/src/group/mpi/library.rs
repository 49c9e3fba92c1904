//! The process's MPI library: started once, called by one thread at a time, ended once.
//!
//! Every call goes through [`enter`], which is a lock. All calls return at once (none waits for a peer), so threads
//! hardly notice each other; and MPI's thread level `SERIALIZED` is enough, which every usual build grants.

use super::{MpiError, control::Control, request};
use mpi::environment::{self, Threading, Universe};
use std::{
    ffi::c_int,
    panic::catch_unwind,
    sync::{
        Arc, Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long the end of the process waits for other threads to let go of their groups.
const LAST_HANDLES: Duration = Duration::from_secs(1);
/// How long a process of a failed job stays after it has said why: the first to end has mpirun kill the others,
/// which want to say it, too.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Time between two looks at the peers.
const LOOK: Duration = Duration::from_millis(1);

/// The lock around MPI. Holds what ends MPI when it is dropped; `None` if the program has started MPI, and ends it, itself.
static LIBRARY: Mutex<Option<Universe>> = Mutex::new(None);
/// Jobs that this process is in.
static JOBS: AtomicUsize = AtomicUsize::new(0);
/// Of the jobs that this process has left: its peers may still be in them.
static KEPT: Mutex<Vec<Arc<Control>>> = Mutex::new(Vec::new());
static REGISTER: Once = Once::new();
/// One of them has failed: a peer may never come to the end.
static FAILED: AtomicBool = AtomicBool::new(false);

/// The turn to call MPI, which is running.
pub(super) struct Mpi {
    universe: MutexGuard<'static, Option<Universe>>,
}

fn lock() -> MutexGuard<'static, Option<Universe>> {
    // Every change is a single assignment, so a panic elsewhere leaves nothing half-way.
    LIBRARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts MPI unless it runs. Blocks as long as `MPI_Init_thread` does.
pub(super) fn start() -> Result<(), MpiError> {
    let mut ours = lock();
    if environment::is_finalized() {
        return Err(MpiError::Finalized);
    }
    // More than burn-ddp needs, so that the program's own threads may call MPI beside it.
    let provided = match environment::initialize_with_threading(Threading::Multiple) {
        Some((universe, provided)) => {
            *ours = Some(universe);
            provided
        }
        None => environment::threading_support(),
    };
    // A refusal (no memory) leaves MPI without its end, which mpirun reports.
    REGISTER.call_once(|| {
        let _ = atexit(at_exit);
    });
    if provided < Threading::Serialized {
        return Err(MpiError::ThreadLevel { provided });
    }
    Ok(())
}

/// Waits for the turn to call MPI. `None` once MPI has ended.
pub(super) fn enter() -> Option<Mpi> {
    let universe = lock();
    let running = environment::is_initialized() && !environment::is_finalized();
    running.then_some(Mpi { universe })
}

pub(super) fn job_begins() {
    JOBS.fetch_add(1, Ordering::Relaxed);
}

/// MPI is not called for that job any more.
pub(super) fn job_ends() {
    JOBS.fetch_sub(1, Ordering::Release);
}

/// Keeps the control plane of a job that this process has left until its end. `false` if the program ends MPI itself,
/// nobody knows when.
pub(super) fn keep(control: &Arc<Control>) -> bool {
    let ours = lock().is_some();
    if ours {
        kept().push(control.clone());
    }
    ours
}

fn kept() -> MutexGuard<'static, Vec<Arc<Control>>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on MPI is not ended in good order: that would wait for all peers, without a limit.
pub(super) fn job_failed() {
    FAILED.store(true, Ordering::Release);
}

// SAFETY: the declaration is C's (C11 7.22.4.2); any function that does not unwind may be registered, at any time.
unsafe extern "C" {
    safe fn atexit(handler: extern "C" fn()) -> c_int;
}

/// Ends MPI when the process exits, and not when the last group is dropped: that may happen on a communication thread
/// which `main` does not wait for, and MPI wants to be ended by the thread that started it.
extern "C" fn at_exit() {
    // A panic must not leave a C function; it has been printed.
    let _ = catch_unwind(finish);
}

fn finish() {
    let deadline = Instant::now() + LAST_HANDLES;
    loop {
        let Some(mpi) = enter() else { return };
        // The launcher sees a process that ends without MPI_Finalize, and ends the job.
        if FAILED.load(Ordering::Acquire) {
            drop(mpi);
            return thread::sleep(LAST_WORDS);
        }
        let open = JOBS.load(Ordering::Acquire) > 0;
        if mpi.universe.is_none() || open && Instant::now() > deadline {
            return;
        }
        // MPI_Finalize waits for all ranks as well, but does not hear of one that fails: Open MPI 4.1's mpirun can hang when some
        // processes end while another is in it.
        if !open && kept().iter().all(|control| control.all_done(&mpi)) {
            drop(mpi);
            kept().drain(..).for_each(|control| control.close());
            return end();
        }
        drop(mpi);
        thread::sleep(LOOK);
    }
}

fn end() {
    let deadline = Instant::now() + LAST_HANDLES;
    while let Some(mut mpi) = enter() {
        if request::reap(&mpi) {
            *mpi.universe = None;
        } else if Instant::now() > deadline {
            return;
        }
        drop(mpi);
        thread::sleep(LOOK);
    }
}
