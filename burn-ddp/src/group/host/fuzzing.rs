//! See [`fuzzing`](crate::group::fuzzing).

#![allow(clippy::unwrap_used)]

use super::{
    auth::{self, Purpose},
    control_tcp, rendezvous,
    secret::Secret,
    settings::{Overrides, Rendezvous},
    tcp,
};
use std::{
    io::Write,
    net::{Shutdown, TcpListener, TcpStream},
    time::{Duration, Instant},
};

pub(in crate::group) use control_tcp::fuzzing::{control_frame_seeds, control_frames};
pub(in crate::group) use rendezvous::fuzzing::{hello, hello_seeds};
pub(in crate::group) use tcp::mesh::fuzzing::{data_hello, data_hello_seeds};

/// Nobody gets through a handshake without the secret, on either side of it.
pub(in crate::group) fn handshake(input: &[u8]) {
    // Longer than all messages of a handshake, and sure to fit the socket's buffer.
    let input = &input[..input.len().min(1000)];
    let secret = Secret::new(*b"the secret that is kept from it").unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    let meet = |end: fn(&TcpStream, &Secret, Purpose, Instant) -> Result<(), auth::AuthError>| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut foreign = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ours = listener.accept().unwrap().0;
        foreign.write_all(input).unwrap();
        foreign.shutdown(Shutdown::Write).unwrap();
        assert!(end(&ours, &secret, Purpose::Control, deadline).is_err());
        assert!(Instant::now() < deadline, "it waited for what never comes");
    };
    meet(auth::accept);
    meet(auth::call);
}

pub(in crate::group) fn handshake_seeds() -> Vec<Vec<u8>> {
    let magic = b"burnddp\x02";
    let answer = [&magic[..], &[7; 64]].concat();
    let verdict = [&magic[..], &[7; 32], &[1], &[7; 32]].concat();
    vec![answer, verdict, magic.to_vec(), b"burnddp\x01".to_vec()]
}

const VARIABLES: [&str; 32] = [
    super::RANK,
    super::WORLD_SIZE,
    super::LOCAL_RANK,
    super::LOCAL_WORLD_SIZE,
    super::MASTER_ADDR,
    super::MASTER_PORT,
    super::GENERATION,
    super::SECRET,
    super::LISTEN_FD,
    super::RENDEZVOUS_TIMEOUT,
    super::TIMEOUT,
    super::TRANSPORT,
    super::SOCKET_IFNAME,
    super::NSOCKS,
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_STEP_ID",
    "SLURM_JOB_ID",
    "SLURM_NODEID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_NNODES",
];

/// Any environment is understood as a rank within its world, or refused. Values are separated by line ends, in the order of the table.
pub(in crate::group) fn environment(input: &[u8]) {
    let values: Vec<_> = input.split(|byte| *byte == b'\n').collect();
    let lookup = |name: &str| {
        let index = VARIABLES.iter().position(|variable| *variable == name)?;
        let value = values.get(index).filter(|value| **value != b"-")?;
        Some(String::from_utf8_lossy(value).into_owned())
    };
    match Rendezvous::resolve_with(Overrides::default(), &lookup) {
        Ok(Some(settings)) => {
            assert!(settings.rank() < settings.world_size());
            assert!(settings.operation_timeout > Duration::ZERO);
            let local = settings.local_rank.zip(settings.local_world_size);
            assert!(local.is_none_or(|(rank, size)| rank < size));
        }
        Ok(None) => assert!(lookup("RANK").is_none() && lookup("WORLD_SIZE").is_none()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

pub(in crate::group) fn environment_seeds() -> Vec<Vec<u8>> {
    vec![
        b"3\n4\n1\n2\nnode-0\n29500\n1\nsixteen bytes it is\n-\n60\n0.5\ntcp\n^docker,lo\n4"
            .to_vec(),
        b"0\n1\n-\n-\n-\n-".to_vec(),
        b"-\n-".to_vec(),
        // Open MPI; a step of five tasks on two nodes.
        [&b"-\n".repeat(14)[..], b"1\n2\n0"].concat(),
        [
            &b"-\n".repeat(20)[..],
            b"3\n1\n5\n9\n0\n77\n1\n2\n2(x2),1\ngpu[03-07,12],login1\nn[1-2]",
        ]
        .concat(),
    ]
}
