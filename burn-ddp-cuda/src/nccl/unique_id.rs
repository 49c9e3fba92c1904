//! The identity of a communicator.

/// What the ranks of one communicator have in common: made on rank 0 by [`Library::unique_id`](super::Library::unique_id), carried to
/// the others by the caller.
///
/// Good for one communicator; it holds the address at which the ranks meet, so treat it like a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub(super) [u8; UniqueId::BYTES]);

impl UniqueId {
    /// Size in bytes.
    pub const BYTES: usize = 128;

    /// Of the bytes that rank 0 sent.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// To be sent to the other ranks.
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId(..)")
    }
}
