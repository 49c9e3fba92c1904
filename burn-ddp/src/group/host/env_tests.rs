//! The parser against tables of environments.
#![allow(clippy::unwrap_used)]

use super::*;

fn parse(
    overrides: Overrides,
    environment: &[(&str, &str)],
) -> Result<Option<Rendezvous>, SettingsError> {
    Rendezvous::resolve_with(overrides, &|name| {
        environment
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).to_owned())
    })
}

const WHOLE: [(&str, &str); 6] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node-0"),
    ("MASTER_PORT", "29500"),
];

fn with(name: &'static str, value: &'static str) -> Vec<(&'static str, &'static str)> {
    let mut environment: Vec<_> = WHOLE
        .iter()
        .copied()
        .filter(|(key, _)| *key != name)
        .collect();
    environment.push((name, value));
    environment
}

fn without(name: &str) -> Vec<(&'static str, &'static str)> {
    WHOLE
        .iter()
        .copied()
        .filter(|(key, _)| *key != name)
        .collect()
}

/// Each environment is refused with a text that contains the expected one.
fn assert_refused<'a>(cases: impl IntoIterator<Item = (Vec<(&'a str, &'a str)>, &'a str)>) {
    for (environment, expected) in cases {
        let error = parse(Overrides::default(), &environment)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(expected),
            "{error:?} should say {expected:?}"
        );
    }
}

#[test]
fn ddp_26_a_whole_family() {
    let settings = parse(Overrides::default(), &WHOLE).unwrap().unwrap();
    assert_eq!((settings.rank, settings.world_size.get()), (3, 4));
    assert_eq!(
        (settings.local_rank, settings.local_world_size),
        (Some(1), Some(2))
    );
    assert_eq!(
        (settings.master_addr.as_str(), settings.master_port),
        ("node-0", 29500)
    );
    assert_eq!(
        (settings.generation, settings.secret, settings.transport),
        (0, None, Transport::Auto)
    );
    assert_eq!(settings.rendezvous_timeout, Duration::from_secs(300));
    assert_eq!(settings.operation_timeout, Duration::from_secs(600));
}

#[test]
fn ddp_26_no_family_is_no_launcher() {
    assert!(parse(Overrides::default(), &[]).unwrap().is_none());
    let strays = [
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "x"),
        ("SLURM_PROCID", "1"),
    ];
    assert!(parse(Overrides::default(), &strays).unwrap().is_none());
}

#[test]
fn ddp_26_wrong_environments_name_variable_and_value() {
    let cases = [
        (
            without("RANK"),
            "RANK is not set, but WORLD_SIZE, MASTER_ADDR and MASTER_PORT are. Set all of them",
        ),
        (
            without("WORLD_SIZE"),
            "WORLD_SIZE is not set, but RANK, MASTER_ADDR and MASTER_PORT are.",
        ),
        (
            vec![("RANK", "0"), ("WORLD_SIZE", "2")],
            "MASTER_ADDR and MASTER_PORT are not set, but RANK and WORLD_SIZE are.",
        ),
        (
            without("MASTER_ADDR"),
            "MASTER_ADDR is not set, but RANK, WORLD_SIZE and MASTER_PORT are.",
        ),
        (
            without("MASTER_PORT"),
            "MASTER_PORT is not set, but RANK, WORLD_SIZE and MASTER_ADDR are.",
        ),
        (with("RANK", ""), "RANK is set but empty"),
        (with("RANK", "  "), "RANK is set but empty"),
        (with("MASTER_ADDR", ""), "MASTER_ADDR is set but empty"),
        (
            with("WORLD_SIZE", "1(x2)"),
            "WORLD_SIZE is \"1(x2)\", which is not a whole number",
        ),
        (
            with("RANK", "-1"),
            "RANK is \"-1\", which is not a whole number",
        ),
        (
            with("RANK", "1.0"),
            "RANK is \"1.0\", which is not a whole number",
        ),
        (
            with("RANK", "4"),
            "RANK is 4, but WORLD_SIZE is 4: ranks count from 0 to 3",
        ),
        (with("WORLD_SIZE", "0"), "RANK is 3, but WORLD_SIZE is 0"),
        (
            with("LOCAL_RANK", "2"),
            "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2",
        ),
        (with("LOCAL_RANK", "x"), "LOCAL_RANK is \"x\""),
        (
            with("MASTER_PORT", "0"),
            "MASTER_PORT is \"0\", which is not a port number",
        ),
        (
            with("MASTER_PORT", "65536"),
            "MASTER_PORT is \"65536\", which is not a port number",
        ),
        (
            with(GENERATION, "first"),
            "BURN_DDP_GENERATION is \"first\"",
        ),
        (with(LISTEN_FD, "1"), "BURN_DDP_LISTEN_FD is \"1\""),
        (
            with(TIMEOUT, "0"),
            "BURN_DDP_TIMEOUT is \"0\", which is not a number of seconds above 0",
        ),
        (with(TIMEOUT, "NaN"), "BURN_DDP_TIMEOUT is \"NaN\""),
        // Above 0, and no nanosecond.
        (with(TIMEOUT, "1e-10"), "BURN_DDP_TIMEOUT is \"1e-10\""),
        (
            with(RENDEZVOUS_TIMEOUT, "inf"),
            "BURN_DDP_RENDEZVOUS_TIMEOUT is \"inf\"",
        ),
        (
            with(NSOCKS, "17"),
            "BURN_DDP_NSOCKS is \"17\", which is not a number from 1 to 16",
        ),
        (
            with(TRANSPORT, "rdma"),
            "BURN_DDP_TRANSPORT is \"rdma\", which is not auto, shm or tcp",
        ),
        (with(SECRET, ""), "BURN_DDP_SECRET is set but empty"),
        (
            with(SECRET, " fifteen bytes.. "),
            "BURN_DDP_SECRET: a secret of 15 bytes is too short",
        ),
    ];
    assert_refused(cases);
}

#[test]
fn burn_ddps_own_variables() {
    let mut environment = without("RANK");
    environment.extend([
        ("RANK", " 0 "),
        (GENERATION, "2"),
        (SECRET, "s3cret-s3cret-s3"),
        (LISTEN_FD, "9"),
        (RENDEZVOUS_TIMEOUT, "1.5"),
        (TIMEOUT, "20"),
        (TRANSPORT, "tcp"),
        (NSOCKS, "4"),
    ]);
    let settings = parse(Overrides::default(), &environment).unwrap().unwrap();
    assert_eq!(
        (settings.rank, settings.generation, settings.listen_fd),
        (0, 2, Some(9))
    );
    assert_eq!(
        settings.secret,
        Some(Secret::new(*b"s3cret-s3cret-s3").unwrap())
    );
    assert_eq!(settings.rendezvous_timeout, Duration::from_millis(1500));
    assert_eq!(settings.operation_timeout, Duration::from_secs(20));
    assert_eq!(settings.transport, Transport::Tcp);
    assert_eq!(settings.sockets.get(), 4);
    assert!(!format!("{settings:?}").contains("s3cret"));
    // The descriptor is rank 0's.
    assert_eq!(
        parse(Overrides::default(), &with(LISTEN_FD, "9"))
            .unwrap()
            .unwrap()
            .listen_fd,
        None
    );
}

#[test]
fn ddp_26_arguments_beat_the_environment() {
    let overrides = Overrides {
        rank: Some(1),
        world_size: Some(2),
        master_addr: Some("::1".into()),
        master_port: Some(7),
        ..Overrides::default()
    };
    let settings = parse(overrides.clone(), &WHOLE).unwrap().unwrap();
    assert_eq!(
        (
            settings.rank,
            settings.world_size.get(),
            settings.local_rank
        ),
        (1, 2, None)
    );
    assert_eq!(
        Endpoint(&settings.master_addr, settings.master_port).to_string(),
        "[::1]:7"
    );
    // A broken variable that is not asked for does no harm.
    assert!(parse(overrides, &with("RANK", "x")).unwrap().is_some());

    let one = Overrides {
        rank: Some(0),
        ..Overrides::default()
    };
    assert_eq!(
        parse(one.clone(), &WHOLE)
            .unwrap()
            .unwrap()
            .world_size
            .get(),
        4
    );
    assert_eq!(
        parse(one, &[]).unwrap_err(),
        SettingsError::Missing {
            missing: vec!["WORLD_SIZE"],
            present: vec!["the argument rank"]
        }
    );
    assert!(matches!(
        Rendezvous::new(2, 2, "x", 1),
        Err(SettingsError::RankTooLarge {
            rank: 2,
            size: 2,
            ..
        })
    ));
    assert!(matches!(
        Rendezvous::new(0, 0, "x", 1),
        Err(SettingsError::RankTooLarge { size: 0, .. })
    ));
}

#[test]
fn one_process_needs_no_address() {
    let settings = parse(Overrides::default(), &[("RANK", "0"), ("WORLD_SIZE", "1")])
        .unwrap()
        .unwrap();
    assert_eq!((settings.rank, settings.world_size.get()), (0, 1));
}

/// The place of a process: rank, world size, local rank, local world size, address and port of rank 0.
type Place<'a> = (usize, usize, Option<usize>, Option<usize>, &'a str, u16);

#[track_caller]
fn assert_place(environment: &[(&str, &str)], expected: Place<'_>) {
    let found = parse(Overrides::default(), environment).unwrap().unwrap();
    let place = (
        found.rank,
        found.world_size.get(),
        found.local_rank,
        found.local_world_size,
        found.master_addr.as_str(),
        found.master_port,
    );
    assert_eq!(place, expected);
}

/// With `more` in the place of variables of the same name.
fn and<'a>(base: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let kept = base
        .iter()
        .filter(|(name, _)| more.iter().all(|(other, _)| name != other));
    kept.chain(more).copied().collect()
}

const MASTER: [(&str, &str); 2] = [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];

/// All that torchrun sets, in the second process of the second of two machines.
const TORCHRUN: [(&str, &str); 14] = [
    ("LOCAL_RANK", "1"),
    ("RANK", "3"),
    ("GROUP_RANK", "1"),
    ("ROLE_RANK", "3"),
    ("ROLE_NAME", "default"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("WORLD_SIZE", "4"),
    ("GROUP_WORLD_SIZE", "2"),
    ("ROLE_WORLD_SIZE", "4"),
    ("MASTER_ADDR", "node-0"),
    ("MASTER_PORT", "29400"),
    ("TORCHELASTIC_RESTART_COUNT", "0"),
    ("TORCHELASTIC_MAX_RESTARTS", "3"),
    ("TORCHELASTIC_RUN_ID", "none"),
];

/// `mpirun -n 4 --map-by ppr:2:node`, Open MPI 5.
const OPEN_MPI: [(&str, &str); 8] = [
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_RANK", "2"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
    ("OMPI_COMM_WORLD_NODE_RANK", "0"),
    ("OMPI_UNIVERSE_SIZE", "4"),
    ("PMIX_RANK", "2"),
    ("PMIX_NAMESPACE", "prterun-head-77@1"),
];

/// `mpiexec -n 3 -ppn 2` of MPICH.
const HYDRA: [(&str, &str); 6] = [
    ("PMI_RANK", "1"),
    ("PMI_SIZE", "3"),
    ("PMI_FD", "9"),
    ("MPI_LOCALRANKID", "1"),
    ("MPI_LOCALNRANKS", "2"),
    ("GFORTRAN_UNBUFFERED_PRECONNECTED", "y"),
];

/// `srun --nodes=3 --ntasks=5` in a job of four nodes and eight tasks: task 4, alone on the step's last node.
const SRUN: [(&str, &str); 17] = [
    ("SLURM_JOB_ID", "65641"),
    ("SLURM_JOBID", "65641"),
    ("SLURM_JOB_NODELIST", "dev[06-09]"),
    ("SLURM_NODELIST", "dev[06-09]"),
    ("SLURM_JOB_NUM_NODES", "4"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_TASKS_PER_NODE", "2(x4)"),
    ("SLURM_PROCID", "4"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "2"),
    ("SLURM_STEP_ID", "1"),
    ("SLURM_STEPID", "1"),
    ("SLURM_STEP_NODELIST", "dev[07-09]"),
    ("SLURM_STEP_NUM_NODES", "3"),
    ("SLURM_STEP_NUM_TASKS", "5"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
    ("SLURM_LAUNCH_NODE_IPADDR", "10.9.9.9"),
];

/// A batch script under `sbatch --nodes=4 --ntasks=4`, before any srun.
const SBATCH: [(&str, &str); 11] = [
    ("SLURM_JOB_ID", "200505"),
    ("SLURM_JOB_NODELIST", "gnode[10,20,25,37]"),
    ("SLURM_NNODES", "4"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_NPROCS", "4"),
    ("SLURM_TASKS_PER_NODE", "1(x4)"),
    ("SLURM_PROCID", "0"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "0"),
    ("SLURM_GTIDS", "0"),
    ("SLURM_TASK_PID", "16360"),
];

#[test]
fn ddp_26_torchrun() {
    assert_place(&TORCHRUN, (3, 4, Some(1), Some(2), "node-0", 29400));
}

#[test]
fn ddp_26_kubeflow() {
    // The second worker of a PyTorchJob called `train`.
    let pod = [
        ("PYTHONUNBUFFERED", "0"),
        ("MASTER_PORT", "23456"),
        ("MASTER_ADDR", "train-master-0"),
        ("WORLD_SIZE", "4"),
        ("RANK", "2"),
    ];
    assert_place(&pod, (2, 4, None, None, "train-master-0", 23456));
}

#[test]
fn ddp_26_open_mpi_and_hydra() {
    let place = (2, 4, Some(0), Some(2), "10.0.0.1", 29500);
    assert_place(&and(&OPEN_MPI, &MASTER), place);
    let place = (1, 3, Some(1), Some(2), "10.0.0.1", 29500);
    assert_place(&and(&HYDRA, &MASTER), place);
}

#[test]
fn ddp_26_a_slurm_step_smaller_than_its_job() {
    // 10000 + (8 * 65641 + 1) mod 20000
    assert_place(&SRUN, (4, 5, Some(0), Some(1), "dev07", 15129));
    let first = [
        ("SLURM_NODEID", "1"),
        ("SLURM_PROCID", "3"),
        ("SLURM_LOCALID", "1"),
    ];
    assert_place(
        &and(&SRUN, &first),
        (3, 5, Some(1), Some(2), "dev07", 15129),
    );
    let place = (4, 5, Some(0), Some(1), "10.0.0.1", 29500);
    assert_place(&and(&SRUN, &MASTER), place);
    // On one node rank 0 is near, and needs no secret.
    let one_node = [("SLURM_STEP_NUM_NODES", "1"), ("SLURM_STEP_ID", "0")];
    let place = (4, 5, Some(0), Some(1), "127.0.0.1", 15128);
    assert_place(&and(&SRUN, &one_node), place);
    // `srun --mpi=pmi2`: MPICH's numbers, Slurm's nodes.
    let pmi2 = [("PMI_RANK", "4"), ("PMI_SIZE", "5")];
    assert_place(&and(&SRUN, &pmi2), (4, 5, None, None, "dev07", 15129));
}

#[test]
fn ddp_26_slurm_without_tasks_is_no_launcher() {
    for shell in [
        SBATCH.to_vec(),
        // A shell of `salloc`, which is an interactive step and keeps the numbers of its job.
        and(
            &SRUN,
            &[
                ("SLURM_STEP_ID", "4294967290"),
                ("SLURM_STEP_NUM_TASKS", "2"),
            ],
        ),
        // One task, which may start ranks itself.
        and(&SRUN, &[("SLURM_STEP_NUM_TASKS", "1")]),
    ] {
        assert!(
            parse(Overrides::default(), &shell).unwrap().is_none(),
            "{shell:?}"
        );
    }
}

#[test]
fn ddp_26_the_nearest_launcher_wins() {
    let all = [&SRUN[..], &HYDRA, &OPEN_MPI, &TORCHRUN].concat();
    assert_place(&all, (3, 4, Some(1), Some(2), "node-0", 29400));
    let inside = [&SRUN[..], &HYDRA, &OPEN_MPI, &MASTER].concat();
    assert_place(&inside, (2, 4, Some(0), Some(2), "10.0.0.1", 29500));
    let inside = [&SRUN[..], &HYDRA].concat();
    assert_place(&inside, (1, 3, Some(1), Some(2), "dev07", 15129));
}

#[test]
fn ddp_26_half_a_family_is_an_error() {
    let less = |all: &[(&'static str, &'static str)], name: &str| {
        let kept = all.iter().copied().filter(|(key, _)| *key != name);
        kept.collect::<Vec<_>>()
    };
    let cases = [
        (
            OPEN_MPI.to_vec(),
            "MASTER_ADDR and MASTER_PORT are not set, but OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are.",
        ),
        (
            less(&and(&OPEN_MPI, &MASTER), "OMPI_COMM_WORLD_SIZE"),
            "OMPI_COMM_WORLD_SIZE is not set, but OMPI_COMM_WORLD_RANK, MASTER_ADDR and MASTER_PORT are.",
        ),
        (
            less(&and(&HYDRA, &MASTER), "PMI_RANK"),
            "PMI_RANK is not set, but PMI_SIZE, MASTER_ADDR and MASTER_PORT are.",
        ),
        (
            less(&SRUN, "SLURM_PROCID"),
            "SLURM_PROCID is not set, but SLURM_STEP_NUM_TASKS",
        ),
        (
            less(&SRUN, "SLURM_JOB_ID"),
            "MASTER_PORT is not set, but SLURM_PROCID",
        ),
        // The rest of a whole family further down is not taken instead.
        (
            less(&[&TORCHRUN[..], &OPEN_MPI].concat(), "WORLD_SIZE"),
            "WORLD_SIZE is not set, but RANK",
        ),
        (
            and(&SRUN, &[("SLURM_STEP_NODELIST", "dev[")]),
            "SLURM_STEP_NODELIST is \"dev[\"",
        ),
        (
            and(&SRUN, &[("SLURM_STEP_TASKS_PER_NODE", "2(x")]),
            "SLURM_STEP_TASKS_PER_NODE is \"2(x\"",
        ),
        (
            and(&SRUN, &[("SLURM_STEP_NUM_TASKS", "1(x2)")]),
            "SLURM_STEP_NUM_TASKS is \"1(x2)\"",
        ),
        (
            and(&HYDRA, &[("PMI_RANK", "")]),
            "PMI_RANK is set but empty",
        ),
        (
            and(&and(&HYDRA, &MASTER), &[("PMI_RANK", "3")]),
            "PMI_RANK is 3, but PMI_SIZE is 3",
        ),
    ];
    assert_refused(cases);
}
