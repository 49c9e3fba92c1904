//! NCCL's library: where it is, and its functions.

use super::{
    NcclError, Result, ResultCode, UniqueId, Version,
    ffi::{self, RawUniqueId, SUCCESS},
    version::MINIMUM,
};
use libloading::Library as Loaded;
use std::{
    env,
    ffi::{CStr, c_int},
    fmt, mem,
    path::{Path, PathBuf},
    ptr,
    sync::{Arc, OnceLock},
};

/// Environment variable with the path of NCCL's library. Nothing else is tried when it is set.
pub const LIBRARY: &str = "BURN_DDP_NCCL_LIB";

/// What the pip wheels and the packages call it, then the name that only development packages have.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// NCCL, loaded. Clones are cheap.
///
/// The library stays in the process once it is loaded, because NCCL has threads of its own.
#[derive(Clone)]
pub struct Library(Arc<Functions>);

pub(super) struct Functions {
    path: PathBuf,
    version: Version,
    get_unique_id: ffi::GetUniqueId,
    get_last_error: ffi::GetLastError,
    pub(super) init_rank_config: ffi::InitRankConfig,
    pub(super) get_async_error: ffi::GetAsyncError,
    pub(super) finalize: ffi::OnComm,
    pub(super) destroy: ffi::OnComm,
    pub(super) abort: ffi::OnComm,
    pub(super) group_start: ffi::OnThread,
    pub(super) group_end: ffi::OnThread,
    pub(super) all_reduce: ffi::Reduction,
    pub(super) reduce: ffi::RootedReduction,
    pub(super) reduce_scatter: ffi::Reduction,
    pub(super) broadcast: ffi::Broadcast,
    pub(super) all_gather: ffi::Gather,
    pub(super) send: ffi::Send,
    pub(super) recv: ffi::Recv,
}

impl Library {
    /// The library that the machine has: the one that [`LIBRARY`] names, else `libnccl.so.2` where the loader finds it.
    /// Looks once in a process; later calls return the same. Needs no GPU.
    pub fn load() -> Result<Self> {
        static FOUND: OnceLock<Result<Library>> = OnceLock::new();
        FOUND.get_or_init(Self::find).clone()
    }

    fn find() -> Result<Self> {
        if let Some(path) = env::var_os(LIBRARY).filter(|path| !path.is_empty()) {
            return Self::open(Path::new(&path));
        }
        let mut tried = Vec::new();
        for name in NAMES {
            match Self::open(Path::new(name)) {
                Err(NcclError::LibraryNotFound { tried: one }) => tried.extend(one),
                other => return other,
            }
        }
        Err(NcclError::LibraryNotFound { tried })
    }

    /// The library at `path`, or of that name where the loader finds it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        // SAFETY: the start-up code of a library runs here. What the user names is trusted to be a library that can be loaded;
        // NCCL's own only sets up its globals.
        let loaded = unsafe { Loaded::new(path) }.map_err(|error| NcclError::LibraryNotFound {
            tried: vec![format!("{}: {}", path.display(), text(&error))],
        })?;
        let functions = Functions::of(&loaded, path)?;
        // NCCL's threads may be running its code until the process ends, and so may its handlers at exit.
        mem::forget(loaded);
        Ok(Self(Arc::new(functions)))
    }

    /// What `ncclGetVersion` says. All ranks of a communicator need the same.
    pub fn version(&self) -> Version {
        self.0.version
    }

    /// What the library was opened as.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// A new identity for one communicator: call it on rank 0 and hand the bytes to every rank.
    ///
    /// NCCL opens a socket in this process for the ranks to meet at, so the process must live until they have met. Returns at once.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = RawUniqueId([0; UniqueId::BYTES]);
        // SAFETY: `id` is writable and has the size and the layout of ncclUniqueId.
        let code = unsafe { (self.0.get_unique_id)(&mut id) };
        match code {
            SUCCESS => Ok(UniqueId(id.0)),
            code => Err(NcclError::Call {
                function: "ncclGetUniqueId",
                code: ResultCode(code),
                message: self.last_message(),
            }),
        }
    }

    /// NCCL's last message in this process; it may be of an earlier problem.
    pub(super) fn last_message(&self) -> String {
        // SAFETY: the argument is not used by any version of NCCL, so that null outlives every communicator.
        let message = unsafe { (self.0.get_last_error)(ptr::null_mut()) };
        if message.is_null() {
            return String::new();
        }
        // SAFETY: NCCL returns a static buffer whose last byte is always zero.
        let message = unsafe { CStr::from_ptr(message) };
        message.to_string_lossy().trim().to_owned()
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.0
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} ({})", self.version(), self.path().display())
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Library({self})")
    }
}

/// Looks a function up and gives it its type.
macro_rules! function {
    ($loaded:expr, $path:expr, $name:literal) => {{
        let name = concat!($name, "\0").as_bytes();
        // SAFETY: the type is that of the field, which is NCCL's declaration of this name (see `ffi`).
        let found = unsafe { $loaded.get(name) };
        *found.map_err(|_| NcclError::SymbolMissing {
            library: $path.to_owned(),
            symbol: $name,
        })?
    }};
}

impl Functions {
    fn of(loaded: &Loaded, path: &Path) -> Result<Self> {
        // The version comes first: what an older library lacks is not the point.
        let get_version: ffi::GetVersion = function!(loaded, path, "ncclGetVersion");
        let get_last_error: ffi::GetLastError = function!(loaded, path, "ncclGetLastError");
        let mut code: c_int = 0;
        // SAFETY: `code` is writable.
        let result = unsafe { get_version(&mut code) };
        if result != SUCCESS {
            return Err(NcclError::Call {
                function: "ncclGetVersion",
                code: ResultCode(result),
                message: String::new(),
            });
        }
        let version = Version::from_code(code);
        if version < MINIMUM {
            return Err(NcclError::TooOld {
                library: path.to_owned(),
                found: version,
            });
        }
        Ok(Self {
            path: path.to_owned(),
            version,
            get_last_error,
            get_unique_id: function!(loaded, path, "ncclGetUniqueId"),
            init_rank_config: function!(loaded, path, "ncclCommInitRankConfig"),
            get_async_error: function!(loaded, path, "ncclCommGetAsyncError"),
            finalize: function!(loaded, path, "ncclCommFinalize"),
            destroy: function!(loaded, path, "ncclCommDestroy"),
            abort: function!(loaded, path, "ncclCommAbort"),
            group_start: function!(loaded, path, "ncclGroupStart"),
            group_end: function!(loaded, path, "ncclGroupEnd"),
            all_reduce: function!(loaded, path, "ncclAllReduce"),
            reduce: function!(loaded, path, "ncclReduce"),
            reduce_scatter: function!(loaded, path, "ncclReduceScatter"),
            broadcast: function!(loaded, path, "ncclBroadcast"),
            all_gather: function!(loaded, path, "ncclAllGather"),
            send: function!(loaded, path, "ncclSend"),
            recv: function!(loaded, path, "ncclRecv"),
        })
    }
}

/// The loader's own words, which `Display` of the error leaves out.
fn text(error: &libloading::Error) -> String {
    use std::error::Error;
    match error.source() {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}
