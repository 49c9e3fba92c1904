//! The scripts and manifests for clusters: replayed on this machine, with the variables that the cluster's software sets.

use super::pages::{read, root};
use burn_ddp::Ddp;
use burn_ddp_tests::free_port;
use std::{
    env, fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command},
};
use tempfile::TempDir;
use yaml_rust2::{Yaml, YamlLoader};

/// Where the ranks of a replayed job leave what they found. Set, it makes this process such a rank.
const FOUND: &str = "BURN_DDP_TEST_BOOK";

#[test]
fn a_rank_of_a_job() {
    let Some(found) = env::var_os(FOUND) else {
        return;
    };
    let ddp = Ddp::from_env().unwrap();
    let sum = ddp.sum(ddp.rank() as f64 + 1.0).unwrap();
    let text = format!("{} {} {sum}", ddp.world_size(), ddp.local_rank());
    fs::write(Path::new(&found).join(ddp.rank().to_string()), text).unwrap();
}

/// A job that is replayed: a folder for programs that stand in for the cluster's, and one for what the ranks find.
struct Replay(TempDir);

impl Replay {
    /// With a program `train` that is a rank.
    fn new() -> Self {
        let replay = Self(tempfile::tempdir().unwrap());
        for folder in ["bin", "found"] {
            fs::create_dir(replay.folder(folder)).unwrap();
        }
        let this = env::current_exe().unwrap();
        replay.program(
            "train",
            &format!(
                "exec '{}' --exact cluster::a_rank_of_a_job --nocapture >/dev/null",
                this.display()
            ),
        );
        replay
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Puts a stand-in in front of the programs of that name.
    fn program(&self, name: &str, body: &str) {
        let path = self.folder("bin").join(name);
        fs::write(&path, format!("#!/usr/bin/env bash\n{body}\n")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// `program` and all that it starts, for a minute at the most.
    fn start(&self, program: &[&str], variables: &[(&str, &str)]) -> Child {
        let path = env::var("PATH").unwrap();
        Command::new("timeout")
            .args(["--kill-after=5", "60"])
            .args(program)
            .env("PATH", format!("{}:{path}", self.folder("bin").display()))
            .env(FOUND, self.folder("found"))
            .env("BURN_DDP_TIMEOUT", "20")
            .env("BURN_DDP_RENDEZVOUS_TIMEOUT", "20")
            .envs(variables.iter().copied())
            .current_dir(root())
            .spawn()
            .unwrap()
    }

    fn run(&self, program: &[&str], variables: &[(&str, &str)]) {
        let status = self.start(program, variables).wait().unwrap();
        assert!(status.success(), "{program:?}: {status}");
    }

    /// World size, local rank and sum of all ranks' numbers from 1, of each rank.
    fn found(&self) -> Vec<String> {
        let mut found: Vec<_> = fs::read_dir(self.folder("found"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        found.sort();
        let text = |path: &PathBuf| fs::read_to_string(path).unwrap();
        found.iter().map(text).collect()
    }
}

#[test]
fn the_scripts_have_no_syntax_errors() {
    let mut checked = 0;
    for entry in fs::read_dir(root().join("examples/cluster")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end != "yaml") {
            let status = Command::new("bash").arg("-n").arg(&path).status().unwrap();
            assert!(status.success(), "{}", path.display());
            checked += 1;
        }
    }
    assert_eq!(checked, 3);
}

/// The value of an option in a batch script.
fn directive(script: &str, option: &str) -> usize {
    let prefix = format!("#SBATCH --{option}=");
    let value = script.lines().find_map(|line| line.strip_prefix(&prefix));
    value.unwrap().parse().unwrap()
}

/// Runs a batch script on two machines, which are both this one, with the variables that srun gives its tasks. `port` is
/// what the script, or burn-ddp for it, makes of the job's number.
fn slurm(script: &str, replay: &Replay, port: impl Fn(u16) -> u16) {
    let option = |name| directive(&read(script), name);
    let (machines, each) = (option("nodes"), option("ntasks-per-node"));
    assert_eq!(machines, 2);
    replay.program(
        "scontrol",
        r#"[ "$*" = "show hostnames 127.0.0.1,b" ] && printf '127.0.0.1\nb\n'"#,
    );
    replay.program(
        "srun",
        &format!(
            r#"
            while [[ $1 == -* ]]; do shift; done
            export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$(({machines} * {each})) SLURM_STEP_NUM_NODES={machines}
            export SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST SLURM_STEP_TASKS_PER_NODE="{each}(x{machines})"
            for ((i = 0; i < {machines} * {each}; i++)); do
                SLURM_PROCID=$i SLURM_LOCALID=$((i % {each})) SLURM_NODEID=$((i / {each})) "$@" & pids+=($!)
            done
            for pid in "${{pids[@]}}"; do wait "$pid" || exit 1; done"#
        ),
    );
    let free = |job: &u16| TcpListener::bind(("127.0.0.1", port(*job))).is_ok();
    let job = (1..2000).find(free).unwrap().to_string();
    let variables = [
        ("SLURM_JOB_NODELIST", "127.0.0.1,b"),
        ("SLURM_JOB_ID", &job),
        ("SLURM_NNODES", &machines.to_string()),
        ("SLURM_CPUS_PER_TASK", &option("cpus-per-task").to_string()),
    ];
    replay.run(&["bash", script, "train", "--epochs", "30"], &variables);
}

#[test]
fn slurm_starts_the_ranks() {
    let replay = Replay::new();
    slurm("examples/cluster/slurm.sbatch", &replay, |job| {
        10_000 + 8 * job
    });
    assert_eq!(replay.found(), ["4 0 10", "4 1 10", "4 0 10", "4 1 10"]);
}

#[test]
fn slurm_starts_the_command() {
    let replay = Replay::new();
    replay.program(
        "burn-ddp",
        r#"
        [ "$1 $2 $4 $6 $8 ${10}" = "run --nnodes --node-rank --nproc --max-restarts --log-dir" ] || exit 2
        export WORLD_SIZE=$(($3 * $7))
        for ((i = 0; i < $7; i++)); do
            RANK=$(($5 * $7 + i)) LOCAL_RANK=$i "${@:12}" & pids+=($!)
        done
        for pid in "${pids[@]}"; do wait "$pid" || exit 1; done"#,
    );
    slurm("examples/cluster/slurm-restarts.sbatch", &replay, |job| {
        10_000 + job
    });
    assert_eq!(replay.found(), ["4 0 10", "4 1 10", "4 0 10", "4 1 10"]);
}

#[test]
fn mpirun() {
    let replay = Replay::new();
    replay.program(
        "mpirun",
        r#"
        [ "$1" = --oversubscribe ] || exit 2
        shift
        while [[ $1 == -* ]]; do
            case $1 in
                -n) ranks=$2 ;;
                -x) [ -n "${!2}" ] || exit 2 ;;
                *) exit 2 ;;
            esac
            shift 2
        done
        for ((i = 0; i < ranks; i++)); do
            OMPI_COMM_WORLD_SIZE=$ranks OMPI_COMM_WORLD_RANK=$i OMPI_COMM_WORLD_LOCAL_RANK=$i "$@" & pids+=($!)
        done
        for pid in "${pids[@]}"; do wait "$pid" || exit 1; done"#,
    );
    let variables = [
        ("MASTER_PORT", &*free_port().to_string()),
        ("MPIRUN_OPTIONS", "--oversubscribe"),
    ];
    let command = ["examples/cluster/mpirun.sh", "3", "train", "--epochs", "30"];
    replay.run(&command, &variables);
    assert_eq!(replay.found(), ["3 0 6", "3 1 6", "3 2 6"]);
}

fn text(yaml: &Yaml) -> &str {
    yaml.as_str().unwrap_or_else(|| panic!("no text: {yaml:?}"))
}

fn texts(yaml: &Yaml) -> Vec<&str> {
    yaml.as_vec().into_iter().flatten().map(text).collect()
}

/// A container's variables, with this machine in the place of the cluster.
fn variables(container: &Yaml) -> Vec<(&str, &str)> {
    let each = container["env"].as_vec().into_iter().flatten();
    each.map(|variable| {
        let (value, from) = (&variable["value"], &variable["valueFrom"]);
        let value = if !value.is_badvalue() {
            text(value)
        } else if !from["fieldRef"].is_badvalue() {
            assert_eq!(text(&from["fieldRef"]["fieldPath"]), "status.podIP");
            "127.0.0.1"
        } else {
            let secret = &from["secretKeyRef"];
            assert_eq!(
                (text(&secret["name"]), text(&secret["key"])),
                ("burn-ddp", "secret")
            );
            "sixteen bytes or more"
        };
        (text(&variable["name"]), value)
    })
    .collect()
}

/// As `setPodEnv` of Kubeflow's training operator 1.9 sets them. A cluster's name service is not at hand, so only the master,
/// which must not need it, gets the name.
#[test]
fn kubernetes() {
    let documents = YamlLoader::load_from_str(&read("examples/cluster/pytorchjob.yaml")).unwrap();
    let [job] = &documents[..] else {
        panic!("one document")
    };
    assert_eq!(
        (text(&job["apiVersion"]), text(&job["kind"])),
        ("kubeflow.org/v1", "PyTorchJob")
    );
    assert_eq!(text(&job["spec"]["nprocPerNode"]), "1");
    let replicas = |kind: &str| -> &Yaml { &job["spec"]["pytorchReplicaSpecs"][kind] };
    let count = |kind| replicas(kind)["replicas"].as_i64().unwrap();
    let (world_size, port) = (
        (count("Master") + count("Worker")).to_string(),
        free_port().to_string(),
    );

    let replay = Replay::new();
    let mut pods = Vec::new();
    for (kind, first, master) in [("Master", 0, "train-master-0"), ("Worker", 1, "127.0.0.1")] {
        let containers = &replicas(kind)["template"]["spec"]["containers"];
        let [container] = &containers.as_vec().unwrap()[..] else {
            panic!("one container")
        };
        assert_eq!(text(&container["name"]), "pytorch");
        let command = [texts(&container["command"]), texts(&container["args"])].concat();
        for index in 0..count(kind) {
            let rank = (first + index).to_string();
            let operator = [
                ("MASTER_PORT", &*port),
                ("MASTER_ADDR", master),
                ("WORLD_SIZE", &*world_size),
                ("RANK", &*rank),
                ("PET_NODE_RANK", &*rank),
                ("PET_NPROC_PER_NODE", "1"),
            ];
            pods.push(replay.start(
                &command,
                &[variables(container), operator.to_vec()].concat(),
            ));
        }
    }
    for mut pod in pods {
        assert!(pod.wait().unwrap().success());
    }
    // One machine here, so that the ranks count as neighbours.
    assert_eq!(replay.found(), ["4 0 10", "4 1 10", "4 2 10", "4 3 10"]);
}
