#!/usr/bin/env bash
# mpirun.sh RANKS PROGRAM [ARGUMENT...]
# Open MPI's mpirun starts the ranks, which talk through burn-ddp's own group. On several machines set MASTER_ADDR to an address of
# the first one, and give mpirun's options (hosts, mapping) in MPIRUN_OPTIONS.
set -euo pipefail
ranks=$1
shift

# mpirun tells each process its number, but not where rank 0 is.
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
BURN_DDP_SECRET=${BURN_DDP_SECRET:-$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')}
export BURN_DDP_SECRET

# By name alone: a value on the command line could be read by every user of the machine.
# shellcheck disable=SC2086
mpirun ${MPIRUN_OPTIONS:-} -n "$ranks" -x MASTER_ADDR -x MASTER_PORT -x BURN_DDP_SECRET "$@"
