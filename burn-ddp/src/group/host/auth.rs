//! Mutual proof that both ends of a connection know the job's secret.
//!
//! Runs before any other byte of a connection is looked at, on messages of fixed size:
//!
//! 1. the acceptor sends `MAGIC ‖ nonce_a`;
//! 2. the caller sends `MAGIC ‖ nonce_c ‖ HMAC(secret, "caller" ‖ purpose ‖ nonce_a ‖ nonce_c)`;
//! 3. the acceptor checks it and sends `1 ‖ HMAC(secret, "acceptor" ‖ …)`, or `0` and zeros.
//!
//! Both nonces are fresh, so a recording proves nothing later, and each end's proof is over its
//! own role's name, so a proof cannot be sent back to where it came from. The acceptor computes
//! nothing for a caller that has not proved itself. This is challenge and response as in
//! ISO/IEC 9798-4 (mutual, three passes), with HMAC-SHA256 (RFC 2104). It authenticates, it does not encrypt.

use super::{secret::Secret, wire};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::{io, net::TcpStream, time::Instant};

type HmacSha256 = Hmac<Sha256>;

/// The last byte is the protocol's version.
const MAGIC: [u8; 8] = *b"burnddp\x02";
const NONCE: usize = 32;
const PROOF: usize = 32;

/// What the connection will be used for; a proof for one purpose does not open another.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    Control,
    Data,
}

/// Why a connection was not authenticated.
#[derive(Debug, thiserror::Error)]
pub(super) enum AuthError {
    /// The bytes are not those of this protocol.
    #[error("the other end does not speak burn-ddp's protocol")]
    Foreign,
    /// A burn-ddp of another protocol version.
    #[error("the other end speaks protocol version {theirs}, this one {}", MAGIC[7])]
    Version {
        /// The peer's version.
        theirs: u8,
    },
    /// The peer, or this process in the peer's eyes, has another secret.
    #[error("the two processes have different secrets")]
    WrongSecret,
    /// The connection broke or fell silent.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The end that called `connect`.
pub(super) fn call(
    stream: &TcpStream,
    secret: &Secret,
    purpose: Purpose,
    deadline: Instant,
) -> Result<(), AuthError> {
    let mut challenge = [0; MAGIC.len() + NONCE];
    wire::read_exact(stream, &mut challenge, deadline)?;
    let (magic, theirs) = challenge.split_at(MAGIC.len());
    check_magic(magic)?;
    let ours = nonce()?;
    let proof = mac(secret, b"caller", purpose, theirs, &ours)?
        .finalize()
        .into_bytes();
    let answer = [&MAGIC[..], &ours, &proof].concat();
    wire::write_all(stream, &answer, deadline)?;

    let mut verdict = [0; 1 + PROOF];
    wire::read_exact(stream, &mut verdict, deadline)?;
    if verdict[0] != 1 {
        return Err(AuthError::WrongSecret);
    }
    verify(
        mac(secret, b"acceptor", purpose, theirs, &ours)?,
        &verdict[1..],
    )
}

/// The end that called `accept`.
pub(super) fn accept(
    stream: &TcpStream,
    secret: &Secret,
    purpose: Purpose,
    deadline: Instant,
) -> Result<(), AuthError> {
    let ours = nonce()?;
    wire::write_all(stream, &[&MAGIC[..], &ours].concat(), deadline)?;

    let mut answer = [0; MAGIC.len() + NONCE + PROOF];
    // The magic first: a foreign peer that sends less than a whole answer is told apart at once.
    let (magic, rest) = answer.split_at_mut(MAGIC.len());
    wire::read_exact(stream, magic, deadline)?;
    check_magic(magic)?;
    wire::read_exact(stream, rest, deadline)?;
    let (theirs, proof) = rest.split_at(NONCE);
    let mut verdict = [0; 1 + PROOF];
    let result = verify(mac(secret, b"caller", purpose, &ours, theirs)?, proof);
    if result.is_ok() {
        verdict[0] = 1;
        let proof = mac(secret, b"acceptor", purpose, &ours, theirs)?
            .finalize()
            .into_bytes();
        verdict[1..].copy_from_slice(&proof);
    }
    wire::write_all(stream, &verdict, deadline)?;
    result
}

fn check_magic(magic: &[u8]) -> Result<(), AuthError> {
    let (name, version) = magic.split_at(MAGIC.len() - 1);
    if name != &MAGIC[..MAGIC.len() - 1] {
        return Err(AuthError::Foreign);
    }
    if version != &MAGIC[MAGIC.len() - 1..] {
        return Err(AuthError::Version { theirs: version[0] });
    }
    Ok(())
}

fn nonce() -> io::Result<[u8; NONCE]> {
    let mut nonce = [0; NONCE];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

fn mac(
    secret: &Secret,
    role: &[u8],
    purpose: Purpose,
    acceptor: &[u8],
    caller: &[u8],
) -> io::Result<HmacSha256> {
    let purpose: &[u8] = match purpose {
        Purpose::Control => b" control ",
        Purpose::Data => b" data ",
    };
    // HMAC takes keys of any length; the error type is there for other constructions.
    let mut mac = HmacSha256::new_from_slice(secret.bytes()).map_err(io::Error::other)?;
    for part in [&MAGIC[..], role, purpose, acceptor, caller] {
        mac.update(part);
    }
    Ok(mac)
}

/// In constant time.
fn verify(mac: HmacSha256, proof: &[u8]) -> Result<(), AuthError> {
    mac.verify_slice(proof).map_err(|_| AuthError::WrongSecret)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use std::{
        io::{Read, Write},
        net::TcpListener,
        thread,
        time::Duration,
    };

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (caller, listener.accept().unwrap().0)
    }

    fn secret(text: &str) -> Secret {
        Secret::new(text.repeat(16)).unwrap()
    }

    /// Both ends' results.
    fn meet(
        a: (&str, Purpose),
        b: (&str, Purpose),
    ) -> (Result<(), AuthError>, Result<(), AuthError>) {
        let (caller, acceptor) = pair();
        thread::scope(|scope| {
            let far = scope.spawn(|| accept(&acceptor, &secret(b.0), b.1, soon()));
            (
                call(&caller, &secret(a.0), a.1, soon()),
                far.join().unwrap(),
            )
        })
    }

    #[test]
    fn the_same_secret_opens() {
        let (caller, acceptor) = meet(("s", Purpose::Data), ("s", Purpose::Data));
        caller.unwrap();
        acceptor.unwrap();
    }

    #[test]
    fn another_secret_or_purpose_is_seen_on_both_ends() {
        for (a, b) in [
            (("s", Purpose::Data), ("t", Purpose::Data)),
            (("s", Purpose::Data), ("s", Purpose::Control)),
        ] {
            let (caller, acceptor) = meet(a, b);
            assert!(matches!(caller, Err(AuthError::WrongSecret)), "{caller:?}");
            assert!(
                matches!(acceptor, Err(AuthError::WrongSecret)),
                "{acceptor:?}"
            );
        }
    }

    #[test]
    fn foreign_peers_are_told_apart() {
        type Case = (&'static [u8], fn(&AuthError) -> bool);
        let cases: [Case; 4] = [
            (b"GET / HTTP/1.1\r\n", |error| {
                matches!(error, AuthError::Foreign)
            }),
            (b"burnddp\x07", |error| {
                matches!(error, AuthError::Version { theirs: 7 })
            }),
            (
                b"b",
                |error| matches!(error, AuthError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof),
            ),
            (&[0xff; 8], |error| matches!(error, AuthError::Foreign)),
        ];
        for (bytes, expected) in cases {
            let (mut caller, acceptor) = pair();
            caller.write_all(bytes).unwrap();
            caller.shutdown(std::net::Shutdown::Write).unwrap();
            let error = accept(&acceptor, &secret("s"), Purpose::Control, soon()).unwrap_err();
            assert!(expected(&error), "{error:?}");
        }
        let (_silent, acceptor) = pair();
        let error = accept(
            &acceptor,
            &secret("s"),
            Purpose::Control,
            Instant::now() + Duration::from_millis(20),
        );
        assert!(
            matches!(error, Err(AuthError::Io(error)) if error.kind() == io::ErrorKind::TimedOut)
        );
    }

    #[test]
    fn a_recorded_answer_is_worth_nothing_later() {
        // A relay that records what an honest caller says…
        let (caller, relay_near) = pair();
        let (relay_far, acceptor) = pair();
        let recorded = thread::scope(|scope| {
            scope.spawn(|| accept(&acceptor, &secret("s"), Purpose::Control, soon()).unwrap());
            scope.spawn(|| call(&caller, &secret("s"), Purpose::Control, soon()).unwrap());
            let mut challenge = [0; 40];
            (&relay_far).read_exact(&mut challenge).unwrap();
            (&relay_near).write_all(&challenge).unwrap();
            let mut answer = [0; 72];
            (&relay_near).read_exact(&mut answer).unwrap();
            (&relay_far).write_all(&answer).unwrap();
            let mut verdict = [0; 33];
            (&relay_far).read_exact(&mut verdict).unwrap();
            (&relay_near).write_all(&verdict).unwrap();
            answer
        });
        // …and plays it to a new connection.
        let (mut thief, acceptor) = pair();
        thief.write_all(&recorded).unwrap();
        let result = accept(&acceptor, &secret("s"), Purpose::Control, soon());
        assert!(matches!(result, Err(AuthError::WrongSecret)), "{result:?}");
    }

    #[test]
    fn an_impostor_acceptor_is_refused() {
        let (caller, mut impostor) = pair();
        let result = thread::scope(|scope| {
            scope.spawn(move || {
                impostor
                    .write_all(&[&MAGIC[..], &[7; NONCE]].concat())
                    .unwrap();
                let mut answer = [0; 72];
                impostor.read_exact(&mut answer).unwrap();
                // The caller's own proof, reflected.
                impostor.write_all(&[&[1], &answer[40..]].concat()).unwrap();
            });
            call(&caller, &secret("s"), Purpose::Control, soon())
        });
        assert!(matches!(result, Err(AuthError::WrongSecret)), "{result:?}");
    }
}
