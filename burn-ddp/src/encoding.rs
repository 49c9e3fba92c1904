//! Values that travel between ranks.

use crate::{
    error::Error,
    group::{ProcessGroup, objects},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Every rank's `value`, in rank order. Collective.
pub(crate) fn all_gather<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    operation: &str,
    value: &T,
) -> Result<Vec<T>, Error> {
    let bytes = encode(group, operation, value)?;
    let all = objects::gather(group, &bytes)?;
    all.iter()
        .map(|bytes| decode(group, operation, bytes))
        .collect()
}

/// For a message of `operation`. Local.
pub(crate) fn encode<T: Serialize>(
    group: &dyn ProcessGroup,
    operation: &str,
    value: &T,
) -> Result<Vec<u8>, Error> {
    postcard::to_stdvec(value).map_err(|cause| failed(group, operation, &cause))
}

/// The inverse of [`encode`]. Local.
pub(crate) fn decode<'a, T: Deserialize<'a>>(
    group: &dyn ProcessGroup,
    operation: &str,
    bytes: &'a [u8],
) -> Result<T, Error> {
    postcard::from_bytes(bytes).map_err(|cause| failed(group, operation, &cause))
}

fn failed(group: &dyn ProcessGroup, operation: &str, cause: &postcard::Error) -> Error {
    Error::Encoding {
        rank: group.rank(),
        operation: operation.into(),
        cause: cause.to_string(),
    }
}
