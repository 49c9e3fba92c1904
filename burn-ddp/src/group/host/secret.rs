//! The secret that the processes of a job share.

use rustix::{
    fs::{AtFlags, Mode, OFlags},
    process::geteuid,
};
use std::{
    env, fmt,
    fs::{DirBuilder, File},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
};

const KEY_BYTES: usize = 32;
const KEY_FILE: &str = "key";
/// 128 bits if they are random: whoever sees a handshake can try secrets offline.
const SHORTEST: usize = 16;

/// Proves that a process belongs to the job; never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    bytes: Arc<[u8]>,
    shared_by_user: bool,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// A secret that all processes of the job were given. 16 random bytes are enough; a phrase that
    /// can be guessed is not a secret, however long it is.
    ///
    /// # Errors
    ///
    /// If it has fewer than 16 bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, ShortSecret> {
        let bytes = bytes.into();
        if bytes.len() < SHORTEST {
            return Err(ShortSecret { bytes: bytes.len() });
        }
        Ok(Self::given(bytes))
    }

    fn given(bytes: impl Into<Arc<[u8]>>) -> Self {
        Self {
            bytes: bytes.into(),
            shared_by_user: false,
        }
    }

    /// A fresh one, for a launcher to hand to its processes.
    ///
    /// # Errors
    ///
    /// If the system has no randomness to give.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; KEY_BYTES];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        Ok(Self::given(bytes))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether it is the key file's, which reaches no other machine.
    pub(super) fn is_of_this_user(&self) -> bool {
        self.shared_by_user
    }

    /// The key that all processes of this user on this machine share, made on first use.
    pub(super) fn of_this_user() -> Result<Self, KeyFileError> {
        let directory = key_directory(|name| env::var_os(name).map(PathBuf::from));
        Self::from_directory(&directory)
    }

    fn from_directory(directory: &Path) -> Result<Self, KeyFileError> {
        let failed = |cause: io::Error| KeyFileError {
            path: directory.join(KEY_FILE),
            cause,
        };
        let bytes = read_or_create(directory).map_err(failed)?;
        Ok(Self {
            bytes: bytes.into(),
            shared_by_user: true,
        })
    }
}

/// A secret that can be guessed for its length alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a secret of {bytes} bytes is too short: at least {SHORTEST} are needed, and they must be random. \
     `openssl rand -hex 32` makes one; all processes of the job need the same"
)]
pub struct ShortSecret {
    /// Its length.
    pub bytes: usize,
}

/// The key file could not be made or is not safe to use.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot use the key file {}: {cause}. Set BURN_DDP_SECRET to the same random text in all \
     processes of the job instead",
    path.display()
)]
pub struct KeyFileError {
    path: PathBuf,
    #[source]
    cause: io::Error,
}

/// The runtime directory belongs to the user by the XDG specification; the last choice carries the
/// user's number, and its owner is checked like that of the others.
fn key_directory(lookup: impl Fn(&str) -> Option<PathBuf>) -> PathBuf {
    let absolute = |name| lookup(name).filter(|path| path.is_absolute());
    if let Some(runtime) = absolute("XDG_RUNTIME_DIR").filter(|path| path.is_dir()) {
        return runtime.join("burn-ddp");
    }
    if let Some(home) = absolute("HOME").filter(|path| owned(path)) {
        return home.join(".cache").join("burn-ddp");
    }
    env::temp_dir().join(format!("burn-ddp-{}", geteuid().as_raw()))
}

fn owned(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == geteuid().as_raw())
}

fn read_or_create(directory: &Path) -> io::Result<[u8; KEY_BYTES]> {
    if let Some(parent) = directory.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Everything below goes through this descriptor, so that the directory that was checked is
    // the one that is used.
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    let directory = File::from(rustix::fs::open(directory, flags, Mode::empty())?);
    private(&directory, "its directory")?;

    match read_key(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        result => return result,
    }
    create_key(&directory)?;
    read_key(&directory)
}

fn read_key(directory: &File) -> io::Result<[u8; KEY_BYTES]> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(
        directory,
        KEY_FILE,
        flags,
        Mode::empty(),
    )?);
    private(&file, "it")?;
    let mut key = [0; KEY_BYTES];
    file.read_exact(&mut key)?;
    Ok(key)
}

/// Writes a whole key under a name of its own and links it to the final one: whoever links first
/// wins, and no reader ever sees half a key.
fn create_key(directory: &File) -> io::Result<()> {
    let mut random = [0; KEY_BYTES + 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let (key, suffix) = random.split_at(KEY_BYTES);
    let suffix: String = suffix.iter().map(|byte| format!("{byte:02x}")).collect();
    let draft = format!("{KEY_FILE}.{suffix}");
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(
        directory,
        &*draft,
        flags,
        Mode::RUSR | Mode::WUSR,
    )?);
    let written = file.write_all(key).and_then(|()| {
        match rustix::fs::linkat(directory, &*draft, directory, KEY_FILE, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
            Err(error) => Err(error.into()),
        }
    });
    rustix::fs::unlinkat(directory, &*draft, AtFlags::empty())?;
    written
}

fn private(file: &File, what: &str) -> io::Result<()> {
    let metadata = file.metadata()?;
    let (owner, me) = (metadata.uid(), geteuid().as_raw());
    if owner != me {
        return Err(io::Error::other(format!(
            "{what} belongs to user {owner}, not to user {me}"
        )));
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(io::Error::other(format!(
            "{what} is open to other users (mode {mode:03o})"
        )));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt, thread};

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().mode() & 0o777
    }

    #[test]
    fn the_first_use_makes_a_private_key_and_later_ones_read_it() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("cache/burn-ddp");
        let first = Secret::from_directory(&directory).unwrap();
        assert_eq!(Secret::from_directory(&directory).unwrap(), first);
        assert_eq!(first.bytes().len(), 32);
        assert_ne!(first.bytes(), [0; 32]);
        assert_eq!(
            (mode(&directory), mode(&directory.join("key"))),
            (0o700, 0o600)
        );
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
    }

    #[test]
    fn racing_processes_get_one_key() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("burn-ddp");
        let secrets: Vec<Secret> = thread::scope(|scope| {
            let handles: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| Secret::from_directory(&directory).unwrap()))
                .collect();
            handles
                .into_iter()
                .map(|handle| handle.join().unwrap())
                .collect()
        });
        assert!(secrets.iter().all(|secret| *secret == secrets[0]));
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
    }

    #[test]
    fn a_key_that_others_can_read_or_a_link_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("burn-ddp");
        Secret::from_directory(&directory).unwrap();
        fs::set_permissions(directory.join("key"), fs::Permissions::from_mode(0o644)).unwrap();
        let error = Secret::from_directory(&directory).unwrap_err().to_string();
        assert!(
            error.contains("it is open to other users (mode 644)")
                && error.contains("BURN_DDP_SECRET"),
            "{error}"
        );

        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
        let error = Secret::from_directory(&directory).unwrap_err().to_string();
        assert!(
            error.contains("its directory is open to other users (mode 755)"),
            "{error}"
        );

        let link = root.path().join("link");
        std::os::unix::fs::symlink(&directory, &link).unwrap();
        assert!(Secret::from_directory(&link).is_err());
    }

    #[test]
    fn a_short_key_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("burn-ddp");
        Secret::from_directory(&directory).unwrap();
        fs::write(directory.join("key"), b"short").unwrap();
        assert!(Secret::from_directory(&directory).is_err());
    }

    #[test]
    fn ddp_36_a_short_secret_is_refused() {
        assert_eq!(Secret::new([]).unwrap_err().bytes, 0);
        let error = Secret::new([7; 15]).unwrap_err();
        assert_eq!(error, ShortSecret { bytes: 15 });
        let text = error.to_string();
        assert!(
            text.contains("15 bytes") && text.contains("openssl rand -hex 32"),
            "{text}"
        );
        assert_eq!(Secret::new([7; 16]).unwrap().bytes(), [7; 16]);
    }

    #[test]
    fn debug_shows_nothing() {
        let secret = Secret::new(*b"hunter2 hunter2 ").unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }

    #[test]
    fn the_directory_is_the_first_that_is_the_users_own() {
        let root = tempfile::tempdir().unwrap();
        let at = |runtime: Option<&Path>, home: Option<&Path>| {
            key_directory(|name| match name {
                "XDG_RUNTIME_DIR" => runtime.map(Path::to_owned),
                _ => home.map(Path::to_owned),
            })
        };
        assert_eq!(at(Some(root.path()), None), root.path().join("burn-ddp"));
        assert_eq!(
            at(Some(&root.path().join("gone")), Some(root.path())),
            root.path().join(".cache/burn-ddp")
        );
        let last = env::temp_dir().join(format!("burn-ddp-{}", geteuid().as_raw()));
        assert_eq!(at(None, Some(Path::new("relative"))), last);
    }
}
