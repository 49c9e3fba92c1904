//! What the transports over TCP have in common: non-blocking streams, watched beside the control plane.

use super::control::Control;
use crate::group::{GroupError, OpDescriptor};
use socket2::SockRef;
use std::{
    io::{self, ErrorKind},
    net::TcpStream,
    time::Duration,
};

/// Between two looks at the control plane.
pub(super) const SLICE: Duration = Duration::from_millis(50);
/// A closed data connection is only the trace of something; the control plane gets this long to say what it was.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// What may be on its way to a rank under the same kernel, as the system counts it (it takes twice this, overhead included).
///
/// Between network namespaces or on the loopback there is no wire to keep busy: what is sent lies in the receiver's
/// queue at once, and the longer the queue, the surer its bytes have left the cache by the time they are copied out. Nor
/// does a queue below the congestion window ever leave bytes for the acknowledgement's handler to send, which
/// runs on the other core, so that segments overtake each other and are sent again. Wires are left to the
/// system's own tuning.
const QUEUE: usize = 64 << 10;

/// Sets up a stream for collectives; `one_kernel` if its two ends are under one.
pub(super) fn set_up(stream: &TcpStream, one_kernel: bool) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    if one_kernel {
        SockRef::from(stream).set_send_buffer_size(QUEUE)?;
    }
    Ok(())
}

/// Bytes that a read or write moved; `None` if the connection has come to its end.
pub(super) fn moved(result: io::Result<usize>) -> Option<usize> {
    match result {
        Ok(0) => None,
        Ok(bytes) => Some(bytes),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Some(0)
        }
        Err(_) => None,
    }
}

/// The connection to `peer` has closed and [`GRACE`] is over.
pub(super) fn lost(control: &dyn Control, ours: &OpDescriptor, peer: usize) -> GroupError {
    GroupError::PeerLost {
        rank: control.rank(),
        peer,
        host: control.host(peer),
        cause: "its data connection closed".into(),
        operation: ours.to_string(),
        elapsed: Duration::ZERO,
    }
}

/// The system refused something in operation `ours`, or a peer sent what no rank sends.
pub(super) fn failed(control: &dyn Control, ours: &OpDescriptor, cause: String) -> GroupError {
    GroupError::Transport {
        rank: control.rank(),
        operation: ours.to_string(),
        cause,
    }
}
