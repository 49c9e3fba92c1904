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
        (
            with(RENDEZVOUS_TIMEOUT, "inf"),
            "BURN_DDP_RENDEZVOUS_TIMEOUT is \"inf\"",
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
