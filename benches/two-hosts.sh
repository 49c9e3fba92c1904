#!/usr/bin/env bash
# All-reduce between two hosts, which are network namespaces of this machine joined by a veth pair, and beside it what two
# plain TCP streams, one each way, carry over the same link. Needs root, iproute2, and iperf3 for the streams. With
# TORCH_PYTHON, a Python that has PyTorch, also gloo's all-reduce between the same two hosts.
#
#   cargo build --release --workspace --bin all-reduce
#   benches/two-hosts.sh [RANKS_PER_HOST [RATE]]      RATE as tc takes it, for example 1gbit; unlimited without it
#
# FLOW_LIMIT=60 limits each connection to 60 MB/s (nftables), as some networks do; then compare BURN_DDP_NSOCKS=1, 2 and 4.
#
# Compare numbers of one run only: they alternate, ROUNDS times (3).
set -euo pipefail
cd "$(dirname "$0")/.."

per_host=${1:-1} rate=${2:-} rounds=${ROUNDS:-3}
program=${ALL_REDUCE:-target/release/all-reduce}
. benches/hosts.sh
two_hosts "$rate"

if [ -n "${FLOW_LIMIT:-}" ]; then
    for host in "$a" "$b"; do
        ip netns exec "$host" nft -f - <<EOF
table inet policing {
    set flows { type inet_service . inet_service; size 65535; flags dynamic; }
    chain out {
        type filter hook output priority 0;
        oifname "eth0" tcp sport 1-65535 update @flows { tcp sport . tcp dport limit rate over $FLOW_LIMIT mbytes/second burst 2 mbytes } drop
    }
}
EOF
    done
fi

all_reduce() {
    export WORLD_SIZE=$((2 * per_host)) MASTER_PORT=29500
    for rank in $(seq $((WORLD_SIZE - 1)) -1 1); do
        host=$a
        [ "$rank" -lt "$per_host" ] || host=$b
        RANK=$rank ip netns exec "$host" "$program" --bytes 4096,26214400 --json >/dev/null 2>&1 &
    done
    RANK=0 ip netns exec "$a" "$program" --bytes 4096,26214400 --json 2>/dev/null
    wait
}

streams() {
    command -v iperf3 >/dev/null || return 0
    ip netns exec "$a" iperf3 --server --one-off >/dev/null &
    sleep 0.5
    ip netns exec "$b" iperf3 --client 10.99.0.1 --time 2 --bidir | grep receiver
    wait
}

gloo() {
    [ -n "${TORCH_PYTHON:-}" ] || return 0
    export WORLD_SIZE=2 MASTER_PORT=29501 GLOO_SOCKET_IFNAME=eth0
    RANK=1 ip netns exec "$b" "$TORCH_PYTHON" -c "$gloo_program" 2>/dev/null &
    RANK=0 ip netns exec "$a" "$TORCH_PYTHON" -c "$gloo_program" 2>/dev/null
    wait
}

gloo_program='
import statistics, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
for size in 4096, 26214400:
    data, times = torch.ones(size // 4), []
    for _ in range(13):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(data)
        times.append(time.perf_counter() - start)
    median = statistics.median(times[3:])
    if dist.get_rank() == 0:
        print(f"gloo ranks=2 bytes={size} median_us={median * 1e6:.1f} algbw_GBps={size / median / 1e9:.3f}", flush=True)
dist.barrier()
dist.destroy_process_group()
'

for _ in $(seq "$rounds"); do
    all_reduce
    gloo
    streams
done
