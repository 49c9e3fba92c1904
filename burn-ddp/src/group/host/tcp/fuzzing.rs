//! See [`fuzzing`](crate::group::fuzzing). A child of `mesh`, whose messages are its own.

#![allow(clippy::unwrap_used)]

use super::{Contact, DataHello, HELLO_LIMIT, wire};
use std::{net::SocketAddr, num::NonZeroUsize};

/// What opens a data connection, and where a rank says it can be reached.
pub(in crate::group) fn data_hello(input: &[u8]) {
    if let Ok(hello) = wire::decode_frame::<DataHello>(input) {
        let again = wire::encode(&hello, HELLO_LIMIT).unwrap();
        assert_eq!(wire::decode_frame::<DataHello>(&again).unwrap(), hello);
    }
    if let Ok(contact) = wire::decode_frame::<Contact>(input) {
        assert!(wire::encode(&contact, HELLO_LIMIT).is_ok());
    }
}

pub(in crate::group) fn data_hello_seeds() -> Vec<Vec<u8>> {
    let hello = DataHello {
        job: u64::MAX,
        generation: 1,
        group: 2,
        rank: 3,
        index: 4,
    };
    let contact = |address: &str| Contact {
        address: address.parse::<SocketAddr>().unwrap(),
        group: u32::MAX,
        kernel: "0".repeat(36),
        sockets: NonZeroUsize::MAX,
    };
    let contacts = ["127.0.0.1:65535", "[fe80::1]:1"].map(contact);
    let contacts = contacts.map(|contact| wire::encode(&contact, HELLO_LIMIT).unwrap());
    let hello = wire::encode(&hello, HELLO_LIMIT).unwrap();
    [hello].into_iter().chain(contacts).collect()
}
