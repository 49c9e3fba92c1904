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
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long the end of the process waits for other threads to let go of their groups.
const LAST_HANDLES: Duration = Duration::from_secs(1);
/// How long a process of a failed job waits for its peers to return their errors: the first to exit has mpirun kill the others.
const GOODBYE: Duration = Duration::from_secs(3);
/// By how much a process that has no error to return exits later than those that have one: the exit code of MPICH's mpiexec is that of
/// the first.
const LAST: Duration = Duration::from_millis(300);

/// Time between two looks at the peers.
const LOOK: Duration = Duration::from_millis(1);

/// The lock around MPI. Holds what ends MPI when it is dropped; `None` if the program has started MPI, and ends it, itself.
static LIBRARY: Mutex<Option<Universe>> = Mutex::new(None);
/// The jobs that this process is in, and, if burn-ddp ends MPI, those that it has left: its peers may still be in them.
static JOBS: Mutex<Vec<Job>> = Mutex::new(Vec::new());
static REGISTER: Once = Once::new();
/// One of them has failed: a peer may never come to the end.
static FAILED: AtomicBool = AtomicBool::new(false);

struct Job {
    control: Arc<Control>,
    /// This process has not left it.
    open: bool,
}

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

fn jobs() -> MutexGuard<'static, Vec<Job>> {
    JOBS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn job_begins(control: &Arc<Control>) {
    jobs().push(Job {
        control: control.clone(),
        open: true,
    });
}

/// This process has left the job. If the program ends MPI itself, nobody knows when, MPI is not called for the job any more.
pub(super) fn job_ends(control: &Arc<Control>) {
    let ours = lock().is_some();
    if !ours {
        control.close();
    }
    let mut jobs = jobs();
    if let Some(at) = jobs
        .iter()
        .position(|job| Arc::ptr_eq(&job.control, control))
    {
        if ours {
            jobs[at].open = false;
        } else {
            jobs.swap_remove(at);
        }
    }
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
            return say_goodbye();
        }
        let open: Vec<_> = jobs()
            .iter()
            .filter(|job| job.open)
            .map(|job| job.control.clone())
            .collect();
        if mpi.universe.is_none() && open.is_empty() {
            return;
        }
        // MPI_Finalize waits for all ranks as well, but does not hear of one that fails: Open MPI 4.1's mpirun can hang when some
        // processes end while another is in it.
        let done = open.is_empty() && jobs().iter().all(|job| job.control.all_done(&mpi));
        drop(mpi);
        if done {
            // Not while the list is locked: it is locked after the turn to call MPI.
            let left: Vec<_> = jobs().drain(..).collect();
            left.iter().for_each(|job| job.control.close());
            return end();
        }
        if Instant::now() > deadline {
            open.iter().for_each(|control| control.exits());
        }
        thread::sleep(LOOK);
    }
}

/// Waits until the peers of the failed job have returned their errors, too.
fn say_goodbye() {
    let deadline = Instant::now() + GOODBYE;
    let jobs: Vec<_> = jobs().drain(..).map(|job| job.control).collect();
    while let Some(mpi) = enter() {
        jobs.iter().for_each(|control| control.say_done(&mpi));
        if jobs.iter().all(|control| control.all_done(&mpi)) || Instant::now() > deadline {
            break;
        }
        drop(mpi);
        thread::sleep(LOOK);
    }
    if !jobs.iter().any(|control| control.has_suffered()) {
        thread::sleep(LAST);
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
