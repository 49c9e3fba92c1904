//! Rank 0 and its callers as threads over loopback.
#![allow(clippy::unwrap_used, clippy::panic)]
