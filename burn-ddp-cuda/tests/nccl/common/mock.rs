//! The mock's library, and the functions that only it has.

use burn_ddp_cuda::nccl::{Library, Stream};
use std::{
    env,
    ffi::{c_int, c_void},
    fs,
    path::PathBuf,
    thread,
    time::Duration,
};

/// The library that cargo has built beside this program, because it is a dependency of these tests.
pub(crate) fn path() -> PathBuf {
    let program = env::current_exe().unwrap();
    let name = format!("{}mock_nccl", env::consts::DLL_PREFIX);
    let is_it = |path: &PathBuf| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.starts_with(&name) && file.ends_with(env::consts::DLL_SUFFIX)
    };
    program
        .ancestors()
        .skip(1)
        .take(2)
        .flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten())
        .map(|entry| entry.path())
        .find(is_it)
        .unwrap_or_else(|| panic!("no {name} beside {}", program.display()))
}

pub(crate) struct Mock {
    pub(crate) library: Library,
    synchronize: unsafe extern "C" fn(*mut c_void, u64) -> c_int,
    live: unsafe extern "C" fn() -> c_int,
    breaches: unsafe extern "C" fn() -> c_int,
}

impl Mock {
    pub(crate) fn load() -> Self {
        let library = Library::open(path()).unwrap();
        // SAFETY: the mock's, of the same source; it stays loaded, see `Library`.
        unsafe {
            let same = libloading::Library::new(path()).unwrap();
            Self {
                library,
                synchronize: *same.get(b"mockStreamSynchronize\0").unwrap(),
                live: *same.get(b"mockLiveCommunicators\0").unwrap(),
                breaches: *same.get(b"mockBreaches\0").unwrap(),
            }
        }
    }

    /// Whether everything on the stream is done.
    pub(crate) fn is_done(&self, stream: Stream) -> bool {
        // SAFETY: takes any number as a stream, and does not wait.
        unsafe { (self.synchronize)(stream.0, 0) == 0 }
    }

    /// Waits until everything on the stream is done.
    pub(crate) fn synchronize(&self, stream: Stream) {
        eventually("the stream is done", || self.is_done(stream));
    }

    /// Communicators that are neither destroyed nor aborted.
    pub(crate) fn live(&self) -> usize {
        // SAFETY: takes nothing.
        unsafe { (self.live)() as usize }
    }

    /// All communicators are gone, in time; no rule of NCCL's was broken.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        eventually("all communicators are gone", || self.live() == 0);
        // SAFETY: takes nothing.
        assert_eq!(unsafe { (self.breaches)() }, 0, "see stderr");
    }
}

/// Waits for what happens in the background, half a minute of this process's time.
#[track_caller]
pub(crate) fn eventually(what: &str, there: impl Fn() -> bool) {
    for _ in 0..6000 {
        if there() {
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("still not so: {what}");
}
