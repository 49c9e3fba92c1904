# Sourced by the benches that need two hosts: network namespaces of this machine, joined by a veth pair. Needs root and iproute2.
#
# two_hosts RATE: makes the hosts $a (10.99.0.1) and $b (10.99.0.2), whose link carries RATE as tc takes it each way, unlimited if that is empty. They
# are gone when the script ends, and so is the folder $out.

a=burn-ddp-a-$$ b=burn-ddp-b-$$

two_hosts() {
    out=$(mktemp -d)
    trap remove_hosts EXIT
    ip netns add "$a"
    ip netns add "$b"
    ip link add eth0 netns "$a" type veth peer name eth0 netns "$b"
    ip -n "$a" addr add 10.99.0.1/24 dev eth0
    ip -n "$b" addr add 10.99.0.2/24 dev eth0
    for host in "$a" "$b"; do
        ip -n "$host" link set eth0 up
        ip -n "$host" link set lo up
        [ -z "$1" ] || ip netns exec "$host" tc qdisc add dev eth0 root tbf rate "$1" burst 256k latency 100ms
    done
    BURN_DDP_SECRET=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
    export BURN_DDP_SECRET MASTER_ADDR=10.99.0.1
}

remove_hosts() {
    wait
    ip netns del "$a"
    ip netns del "$b"
    rm -rf "$out"
}
