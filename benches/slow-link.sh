#!/usr/bin/env bash
# Training over a slow link with gradients sent as they are, in 16 bits and by PowerSGD: the example char_lm_ddp on two hosts, which are network namespaces
# of this machine joined by a veth pair. Steps per second, and the losses side by side. Needs root, iproute2 and python3.
#
#   cargo build --release --workspace --example char_lm_ddp
#   benches/slow-link.sh [RATE [ARGUMENTS OF char_lm_ddp...]]      RATE as tc takes it, 1gbit without it
#
# Compare numbers of one run only: the hooks take turns, ROUNDS times (2).
set -euo pipefail
cd "$(dirname "$0")/.."

rate=${1:-1gbit} rounds=${ROUNDS:-2}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- --width 512 --layers 4 --heads 8 --context 16 --batch-size 1 --accumulate 1 --steps 30 --lr 1e-3
program=${CHAR_LM:-target/release/examples/char_lm_ddp}
. benches/hosts.sh
two_hosts "$rate"
export WORLD_SIZE=2 MASTER_PORT=29500 RAYON_NUM_THREADS=1

for round in $(seq "$rounds"); do
    for hook in none bf16 power-sgd; do
        arguments=(--json --sample 0 --evaluate-every 1000000 --checkpoint-every 1000000 --hook "$hook" "$@")
        RANK=1 ip netns exec "$b" "$program" "${arguments[@]}" --out "$out/$round-$hook-1" >/dev/null 2>"$out/error" &
        RANK=0 ip netns exec "$a" "$program" "${arguments[@]}" --out "$out/$round-$hook-0" 2>>"$out/error" | tail -n 1 >"$out/$round-$hook.json" ||
            { cat "$out/error"; exit 1; }
        wait
    done
done

python3 - "$out" "$rounds" "$rate" <<'EOF'
import json, sys
out, rounds, rate = sys.argv[1], int(sys.argv[2]), sys.argv[3]
hooks = ["none", "bf16", "power-sgd"]
runs = {h: [json.load(open(f"{out}/{r}-{h}.json")) for r in range(1, rounds + 1)] for h in hooks}
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
