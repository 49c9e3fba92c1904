//! Giving a communicator back to NCCL, on a thread of its own: both ways of it can wait for the device.

use super::{ffi::SUCCESS, shared::Shared};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
};

/// How.
#[derive(Clone, Copy, Debug)]
pub(super) enum How {
    /// Ends what is under way, on this rank.
    Abort,
    /// After ncclCommFinalize.
    Destroy,
}

/// Returns at once. From here on nothing else calls NCCL for this communicator, because it has ended.
pub(super) fn start(shared: &Arc<Shared>, how: How) {
    let thread = thread::Builder::new().name("nccl-release".into());
    let mine = shared.clone();
    if thread.spawn(move || run(&mine, how, true)).is_err() {
        // No more threads: then this one waits.
        run(shared, how, false);
    }
}

/// A call that never returns keeps the communicator, and this thread, until the end of the process: freeing it under that call would
/// be worse.
fn run(shared: &Shared, how: How, own_thread: bool) {
    if let Some(prepare) = &shared.settings.on_thread_start
        && own_thread
    {
        // A panic has been printed; the communicator must go all the same.
        let _ = catch_unwind(AssertUnwindSafe(|| prepare()));
    }
    let comm = shared.take_comm();
    let nccl = shared.library.functions();
    let function = match how {
        How::Abort => nccl.abort,
        How::Destroy => nccl.destroy,
    };
    // Without a communicator its start failed at once.
    let code = if comm.is_null() {
        SUCCESS
    } else {
        // SAFETY: this thread has the only copy of the pointer, and no other is in a call.
        unsafe { function(comm) }
    };
    shared.released(code);
}
