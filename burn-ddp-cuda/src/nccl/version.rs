//! NCCL's version numbers.

use std::{ffi::c_int, fmt};

/// The oldest NCCL that works here: the first whose abort, called on another thread, also ends a call that is still being
/// enqueued. Before it, the state of such a call belongs to the thread that made it, and abort frees the communicator
/// while that call runs on.
pub const MINIMUM: Version = Version::new(2, 19, 0);

/// A version of NCCL, as `ncclGetVersion` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// As in 2.27.3: 2.
    pub major: u32,
    /// 27.
    pub minor: u32,
    /// 3.
    pub patch: u32,
}

impl Version {
    /// `major.minor.patch`.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    /// Of NCCL's number for it: 22703 is 2.27.3. Up to 2.8 the numbers had a digit less: 2804 is 2.8.4.
    pub const fn from_code(code: c_int) -> Self {
        let code = code.unsigned_abs();
        let scale = if code < 10_000 { 1000 } else { 10_000 };
        Self::new(code / scale, code % scale / 100, code % 100)
    }

    /// The inverse of [`from_code`](Self::from_code), for 2.9 and later.
    pub(super) const fn code(self) -> u32 {
        self.major * 10_000 + self.minor * 100 + self.patch
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_old_and_new_versions() {
        assert_eq!(Version::from_code(22703).to_string(), "2.27.3");
        assert_eq!(Version::from_code(21900), MINIMUM);
        assert_eq!(Version::from_code(20908).to_string(), "2.9.8");
        assert_eq!(Version::from_code(2804).to_string(), "2.8.4");
        assert_eq!(Version::new(2, 30, 7).code(), 23007);
        assert!(Version::from_code(2804) < MINIMUM && Version::from_code(23007) > MINIMUM);
    }
}
