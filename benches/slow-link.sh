#!/usr/bin/env bash
# Training over a slow link with gradients sent as they are, in 16 bits and by PowerSGD: the example char_lm_ddp on two hosts, which are network namespaces
# of this machine joined by a veth pair. Steps per second, and the losses side by side. Needs root, iproute2 and python3.
#
#   cargo build --release --workspace --example char_lm_ddp
#   benches/slow-link.sh [RATE [ARGUMENTS OF char_lm_ddp...]]      RATE as tc takes it, 1gbit without it
#
# Compare numbers of one run only: the hooks take turns, ROUNDS times (2). The first line tells what a step costs without communication, of one rank alone and
# of two at once. Where two are slower, the hosts share a processor core or its memory, which the hosts of a cluster do not: all hooks then look
# closer to each other than they are there.
set -euo pipefail
cd "$(dirname "$0")/.."

rate=${1:-1gbit} rounds=${ROUNDS:-2}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- --width 512 --layers 4 --heads 8 --context 16 --batch-size 1 --accumulate 1 --steps 30 --lr 1e-3
program=${CHAR_LM:-target/release/examples/char_lm_ddp}
. benches/hosts.sh
two_hosts "$rate"
export MASTER_PORT=29500 RAYON_NUM_THREADS=1
# Memory that a step frees stays with the process, in large pages: see "On the CPU" in book/src/static-graph.md.
export GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456}

# run HOST WORLD_SIZE RANK HOOK NAME ARGUMENTS...: trains, and leaves the report in $out/NAME.json.
run() {
    local host=$1 name=$5
    local arguments=(--json --sample 0 --evaluate-every 1000000 --checkpoint-every 1000000 --hook "$4" --out "$out/$name")
    WORLD_SIZE=$2 RANK=$3 ip netns exec "$host" "$program" "${arguments[@]}" "${@:6}" 2>"$out/$name.error" | tail -n 1 >"$out/$name.json" ||
        { cat "$out/$name.error"; exit 1; }
}

run "$a" 1 0 none alone "$@"
run "$a" 1 0 none beside-a "$@" &
run "$b" 1 0 none beside-b "$@"
wait
for round in $(seq "$rounds"); do
    for hook in none bf16 power-sgd; do
        run "$b" 2 1 "$hook" "$round-$hook-1" "$@" &
        run "$a" 2 0 "$hook" "$round-$hook-0" "$@"
        wait
    done
done

python3 - "$out" "$rounds" "$rate" <<'EOF'
import json, sys
out, rounds, rate = sys.argv[1], int(sys.argv[2]), sys.argv[3]
hooks = ["none", "bf16", "power-sgd"]
report = lambda name: json.load(open(f"{out}/{name}.json"))
alone, a, b = (report(name)["steps_per_second"] for name in ("alone", "beside-a", "beside-b"))
print(f"without communication, steps per second: one rank alone {alone:.2f}, two at once {a:.2f} and {b:.2f}")
runs = {h: [report(f"{r}-{h}-0") for r in range(1, rounds + 1)] for h in hooks}
for r in range(rounds):
    speeds = [runs[h][r]["steps_per_second"] for h in hooks]
    words = [f"{h} {s:.2f} ({s / speeds[0]:.2f} x)" for h, s in zip(hooks, speeds)]
    print(f"{rate}, round {r + 1}, steps per second: " + ", ".join(words))
print("step  " + "".join(f"{h:>11}" for h in hooks))
losses = [runs[h][0]["losses"] for h in hooks]
count = len(losses[0])
for step in sorted({0, count - 1, *range(0, count, max(1, count // 10))}):
    print(f"{step + 1:4}  " + "".join(f"{l[step]:11.3f}" for l in losses))
EOF
