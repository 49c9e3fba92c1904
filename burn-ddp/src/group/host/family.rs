//! The variables by which launchers say who a process is.

use super::{
    env::{
        LOCAL_RANK, LOCAL_WORLD_SIZE, Lookup, MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, optional,
        port_of, text_of, usize_of,
    },
    settings::SettingsError,
    slurm,
};

/// Names under which a launcher says who a process is.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) name: &'static str,
    pub(super) rank: &'static str,
    pub(super) world_size: &'static str,
    /// Those of one machine; the first that is set counts.
    local_rank: &'static [&'static str],
    local_world_size: &'static [&'static str],
    /// May run in a step of Slurm's, whose variables then say where rank 0 is.
    in_slurm: bool,
}

/// In order of precedence. A process manager's own numbers come before those of the scheduler that it runs in.
const FAMILIES: [Family; 4] = [
    // torchrun, Kubeflow's operators and burn-ddp's own launchers.
    Family {
        name: "RANK/WORLD_SIZE",
        rank: RANK,
        world_size: WORLD_SIZE,
        local_rank: &[LOCAL_RANK],
        local_world_size: &[LOCAL_WORLD_SIZE],
        in_slurm: false,
    },
    // Open MPI's mpirun.
    Family {
        name: "OMPI_COMM_WORLD_*",
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_world_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        in_slurm: false,
    },
    // Hydra, which is the mpiexec of MPICH and Intel MPI; `srun --mpi=pmi2`; PALS.
    Family {
        name: "PMI_*",
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_world_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        in_slurm: true,
    },
    SLURM,
];

const SLURM: Family = Family {
    name: "a Slurm step",
    rank: slurm::PROCID,
    world_size: slurm::STEP_NUM_TASKS,
    local_rank: &[slurm::LOCALID],
    local_world_size: &[],
    in_slurm: true,
};

impl Family {
    /// The one that this process was started with.
    pub(super) fn find(lookup: Lookup<'_>) -> Option<&'static Self> {
        const ALL: &[Family] = &FAMILIES;
        ALL.iter().find(|family| family.is_present(lookup))
    }

    /// Half of a family counts, so that it becomes an error.
    fn is_present(&self, lookup: Lookup<'_>) -> bool {
        if self.is_slurm() {
            return slurm::is_task(lookup);
        }
        lookup(self.rank).is_some() || lookup(self.world_size).is_some()
    }

    fn is_slurm(&self) -> bool {
        self.name == SLURM.name
    }

    pub(super) fn rank(&self, lookup: Lookup<'_>) -> Result<Option<usize>, SettingsError> {
        optional(lookup, self.rank, usize_of)
    }

    pub(super) fn world_size(&self, lookup: Lookup<'_>) -> Result<Option<usize>, SettingsError> {
        if self.is_slurm() {
            return slurm::tasks(lookup);
        }
        optional(lookup, self.world_size, usize_of)
    }

    pub(super) fn local_rank(&self, lookup: Lookup<'_>) -> Result<Option<usize>, SettingsError> {
        first(lookup, self.local_rank)
    }

    pub(super) fn local_world_size(
        &self,
        lookup: Lookup<'_>,
    ) -> Result<Option<usize>, SettingsError> {
        if self.is_slurm() {
            return slurm::local_tasks(lookup);
        }
        first(lookup, self.local_world_size)
    }

    /// Whether Slurm knows the machine of rank 0.
    fn has_slurm(&self, lookup: Lookup<'_>) -> bool {
        self.in_slurm && slurm::is_task(lookup)
    }

    pub(super) fn master_addr(&self, lookup: Lookup<'_>) -> Result<Option<String>, SettingsError> {
        match optional(lookup, MASTER_ADDR, text_of)? {
            None if self.has_slurm(lookup) => slurm::master_addr(lookup),
            addr => Ok(addr),
        }
    }

    pub(super) fn master_port(&self, lookup: Lookup<'_>) -> Result<Option<u16>, SettingsError> {
        match optional(lookup, MASTER_PORT, port_of)? {
            None if self.has_slurm(lookup) => slurm::master_port(lookup),
            port => Ok(port),
        }
    }
}

fn first(lookup: Lookup<'_>, names: &[&'static str]) -> Result<Option<usize>, SettingsError> {
    let name = names.iter().find(|name| lookup(name).is_some());
    name.map_or(Ok(None), |name| optional(lookup, name, usize_of))
}
