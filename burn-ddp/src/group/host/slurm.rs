//! Slurm's variables in the tasks of a step (`srun`).
//!
//! Names and forms are those of srun's manual page, "Output environment variables".

use super::{
    env::{Lookup, optional, usize_of},
    settings::SettingsError,
};

pub(super) const PROCID: &str = "SLURM_PROCID";
pub(super) const LOCALID: &str = "SLURM_LOCALID";
pub(super) const STEP_NUM_TASKS: &str = "SLURM_STEP_NUM_TASKS";
const NTASKS: &str = "SLURM_NTASKS";
const STEP_ID: &str = "SLURM_STEP_ID";
const JOB_ID: &str = "SLURM_JOB_ID";
const NODEID: &str = "SLURM_NODEID";
const STEP_NUM_NODES: &str = "SLURM_STEP_NUM_NODES";
const STEP_TASKS_PER_NODE: &str = "SLURM_STEP_TASKS_PER_NODE";
const STEP_NODELIST: &str = "SLURM_STEP_NODELIST";
const JOB_NODELIST: &str = "SLURM_JOB_NODELIST";

/// From here on the numbers of steps mean something else (`slurm.h`): a batch script, a shell of `salloc`.
const NO_STEP: u64 = 0xffff_fff0;

/// Whether srun has started this process as one of several tasks. Variables of the job alone, which a batch script has too, say nothing about tasks.
pub(super) fn is_task(lookup: Lookup<'_>) -> bool {
    let step =
        lookup(STEP_ID).is_some_and(|id| id.trim().parse().map_or(true, |id: u64| id < NO_STEP));
    // One task may start ranks itself.
    step && !matches!(tasks(lookup), Ok(Some(1)))
}

/// Number of tasks of this step, which may be fewer than the job's.
pub(super) fn tasks(lookup: Lookup<'_>) -> Result<Option<usize>, SettingsError> {
    Ok(match optional(lookup, STEP_NUM_TASKS, usize_of)? {
        Some(tasks) => Some(tasks),
        // Inside of a step it is the step's number too; versions before 2.3 have no other.
        None => optional(lookup, NTASKS, usize_of)?,
    })
}

/// Number of tasks on this machine, where Slurm says so.
pub(super) fn local_tasks(lookup: Lookup<'_>) -> Result<Option<usize>, SettingsError> {
    let Some(node) = optional(lookup, NODEID, usize_of)? else {
        return Ok(None);
    };
    let counts = optional(lookup, STEP_TASKS_PER_NODE, counts_of)?;
    Ok(counts.and_then(|counts| nth(&counts, node)))
}

/// The machine of task 0: the step's first.
pub(super) fn master_addr(lookup: Lookup<'_>) -> Result<Option<String>, SettingsError> {
    if optional(lookup, STEP_NUM_NODES, usize_of)? == Some(1) {
        return Ok(Some("127.0.0.1".to_owned()));
    }
    Ok(match optional(lookup, STEP_NODELIST, first_host)? {
        Some(host) => Some(host),
        None => optional(lookup, JOB_NODELIST, first_host)?,
    })
}

/// A port that steps on one machine are unlikely to share: below those that systems hand out by themselves, from the numbers of job and step.
pub(super) fn master_port(lookup: Lookup<'_>) -> Result<Option<u16>, SettingsError> {
    let number = |name| optional(lookup, name, usize_of);
    let (Some(job), step) = (number(JOB_ID)?, number(STEP_ID)?.unwrap_or(0)) else {
        return Ok(None);
    };
    let offset = job.wrapping_mul(8).wrapping_add(step) % 20_000;
    Ok(u16::try_from(10_000 + offset).ok())
}

/// The first host of a list such as `gpu[03-07,12],login1`.
fn first_host(list: &str) -> Result<String, &'static str> {
    const EXPECTED: &str = "a list of hosts such as gpu[03-07,12]";
    let mut host = String::new();
    let mut rest = list.chars();
    while let Some(c) = rest.next() {
        match c {
            ',' => break,
            '[' => {
                let group: String = rest.by_ref().take_while(|c| *c != ']').collect();
                let first = group.split([',', '-']).next().unwrap_or_default();
                let is_number = !first.is_empty() && first.bytes().all(|b| b.is_ascii_digit());
                if !is_number {
                    return Err(EXPECTED);
                }
                host.push_str(first);
            }
            ']' => return Err(EXPECTED),
            c if c.is_whitespace() => return Err(EXPECTED),
            c => host.push(c),
        }
    }
    if host.is_empty() {
        return Err(EXPECTED);
    }
    Ok(host)
}

/// A list of counts such as `2(x3),1`: each with the number of machines in a row that have it.
fn counts_of(list: &str) -> Result<Vec<(usize, usize)>, &'static str> {
    let count = |item: &str| {
        let (count, times) = match item.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (item, 1),
        };
        Some((count.parse().ok()?, times))
    };
    let counts: Option<Vec<_>> = list.split(',').map(count).collect();
    counts.ok_or("a list of counts such as 2(x3),1")
}

fn nth(counts: &[(usize, usize)], mut index: usize) -> Option<usize> {
    for (count, times) in counts {
        match index.checked_sub(*times) {
            Some(left) => index = left,
            None => return Some(*count),
        }
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ddp_26_the_first_host_of_a_list() {
        for (list, host) in [
            ("gpu[03-07,12]", "gpu03"),
            ("gnode[10,20,25,37]", "gnode10"),
            ("node1", "node1"),
            ("login1,gpu[1-2]", "login1"),
            ("rack[2-3]n[01-16]-ib,x", "rack2n01-ib"),
            ("dev[7-10]", "dev7"),
            ("10.0.0.5,10.0.0.6", "10.0.0.5"),
        ] {
            assert_eq!(first_host(list).as_deref(), Ok(host));
        }
        for wrong in [
            ",a", "gpu[", "gpu[]", "gpu[-3]", "gpu]1", "gpu[a-b]", "a b", "[", "(null) x",
        ] {
            assert!(first_host(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ddp_26_compressed_counts() {
        let at = |list: &str, node| nth(&counts_of(list).unwrap(), node);
        assert_eq!(
            [0, 1, 2, 3].map(|node| at("2(x3),1", node)),
            [2, 2, 2, 1].map(Some)
        );
        assert_eq!(at("2(x3),1", 4), None);
        assert_eq!(at("4", 0), Some(4));
        for wrong in [
            "", "2(x", "2(x3", "(x3)", "2x3", "a", "2,,1", "-1", "1(x-2)",
        ] {
            assert!(counts_of(wrong).is_err(), "{wrong}");
        }
    }
}
