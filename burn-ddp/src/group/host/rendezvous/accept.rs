//! What rank 0 does with a connection before it looks at the job.

use super::{
    super::{
        acceptor::Acceptor,
        auth::{self, Purpose},
        poll::Waker,
        secret::Secret,
        wire,
    },
    Answer, HELLO_LIMIT, Hello, answer_limit,
    verdict::Verdict,
};
use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::Instant,
};

/// A rank that has said hello and waits for its answer.
#[derive(Debug)]
pub(super) struct JoinRequest {
    pub(super) stream: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) hello: Hello,
}

/// Answers everyone with a refusal.
pub(in super::super) type LateAcceptor = Acceptor<()>;

/// Authenticates callers and hears who they are.
pub(super) fn acceptor(
    listeners: Vec<TcpListener>,
    waker: Arc<Waker>,
    secret: Secret,
) -> Acceptor<JoinRequest> {
    Acceptor::new(listeners, waker, move |stream, from, deadline| {
        let hello = receive_hello(&stream, &secret, deadline)?;
        Ok(JoinRequest {
            stream,
            from,
            hello,
        })
    })
}

pub(super) fn receive_hello(
    stream: &TcpStream,
    secret: &Secret,
    deadline: Instant,
) -> Result<Hello, String> {
    auth::accept(stream, secret, Purpose::Control, deadline).map_err(|error| error.to_string())?;
    wire::receive(stream, HELLO_LIMIT, deadline).map_err(|error| error.to_string())
}

/// After the rendezvous, whoever calls is too late or belongs elsewhere.
pub(super) fn late_acceptor(
    listeners: Vec<TcpListener>,
    waker: Arc<Waker>,
    secret: Secret,
    us: Hello,
) -> LateAcceptor {
    Acceptor::new(listeners, waker, move |stream, _, deadline| {
        let hello = receive_hello(&stream, &secret, deadline)?;
        let answer = match us.verdict(&hello) {
            Verdict::Reject(answer) => answer,
            Verdict::Ahead => us.still_here(&hello),
            Verdict::Fits | Verdict::Contradicts(_) => Answer::Refused {
                reason: format!(
                    "the job already runs with all its {} ranks; this one says it is rank {} of {}",
                    us.world_size, hello.peer.rank, hello.world_size
                ),
            },
        };
        let sent = wire::send(&stream, &answer, answer_limit(us.world_size), deadline);
        let Some(reason) = answer.rejection() else {
            return Ok(());
        };
        sent.map_err(|error| error.to_string())?;
        Err(reason)
    })
}
