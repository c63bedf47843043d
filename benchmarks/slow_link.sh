#!/usr/bin/env bash
# Trains with two processes over a slow link: demo_scaled, the same with a delay, AdamW. Prints a table.
#
#     sudo benchmarks/slow_link.sh [STEPS [ROUND_TRIP_MS [RATE ...]]]
#     sudo KEEP=1 benchmarks/slow_link.sh         keeps the figures in benchmarks/results
#
# AdamW, whose steps are the long ones, takes a fifth of them.
# Each process has a network namespace and a CPU core of its own. The link between them is first
# as fast as the machine, then of 100 Mbit/s and of 1 Gbit/s (100mbit 1gbit), these two with a round
# trip of 50 ms unless told otherwise. Whatever the script makes it removes, however it ends.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/.."

demo_steps=${1:-100}
adamw_steps=$(((demo_steps + 4) / 5))
round_trip=${2:-50}
rates=("${@:3}")
((${#rates[@]})) || rates=(100mbit 1gbit)
warm_up=3
demo=(--optimizer demo-scaled --selection topk --topk 8 --value-coding int4)
python=$PWD/.venv/bin/python
ends=("slow-link-$$-a" "slow-link-$$-b")
device=slow0

die() {
    echo "slow_link.sh: $*" >&2
    exit 1
}

# up RATE: makes both ends and joins them; the rate is "unlimited" or as tc writes it.
up() {
    local i end
    for i in 0 1; do
        end=${ends[i]}
        ip netns add "$end"
        mkdir -p "/etc/netns/$end"
        # gloo binds to the address of the host name.
        printf '%s\n' "127.0.0.1 localhost" "10.99.0.$((i + 1)) $HOSTNAME" >"/etc/netns/$end/hosts"
        ip -n "$end" link set lo up
        # Room for many round trips' bytes: TCP must be able to fill the link.
        ip netns exec "$end" sysctl -qw net.ipv4.tcp_rmem="4096 131072 67108864" \
            net.ipv4.tcp_wmem="4096 131072 67108864"
    done
    if [[ $1 == unlimited ]] || has_netem; then
        ip -n "${ends[0]}" link add $device type veth peer name $device netns "${ends[1]}"
    else
        lay_delay_line
    fi
    for i in 0 1; do
        end=${ends[i]}
        ip -n "$end" address add "10.99.0.$((i + 1))/24" dev $device
        ip -n "$end" link set $device up
        [[ $1 == unlimited ]] || limit "$end" "$1"
    done
}

has_netem() {
    tc -n "${ends[0]}" qdisc add dev lo root netem && tc -n "${ends[0]}" qdisc delete dev lo root
} &>/dev/null

lay_delay_line() {
    local seconds
    seconds=$(awk "BEGIN { print $round_trip / 2000 }")
    ip netns exec "${ends[0]}" "$python" benchmarks/delay_line.py "$seconds" $device "${ends[@]}" &
    disown
    until ip -n "${ends[1]}" link show $device &>/dev/null; do
        kill -0 $! || die "the delay line did not start"
        sleep 0.1
    done
}

# limit END RATE
limit() {
    local parent=(root)
    if has_netem; then
        tc -n "$1" qdisc add dev $device root handle 1: \
            netem delay "$((round_trip * 500))us" limit 100000
        parent=(parent 1:)
    fi
    # The burst holds TCP's 64 KB bundles; the queue, as in a router, a round trip's bytes.
    tc -n "$1" qdisc add dev $device "${parent[@]}" \
        tbf rate "$2" burst 128kb latency "${round_trip}ms"
}

down() {
    local end
    for end in "${ends[@]}"; do
        if [[ -e /run/netns/$end ]]; then
            # All that runs there, the delay line too. JAX would survive a TERM.
            ip netns pids "$end" | xargs -r kill -KILL
            ip netns delete "$end"
        fi
        rm -rf "/etc/netns/$end"
    done
    wait
}

# train PROCESS OPTION...
train() {
    ip netns exec "${ends[$1]}" taskset -c "$1" "$python" examples/train_lm.py --preset small --workers 2 \
        --steps $((warm_up + steps + 2)) --evaluate-every $((warm_up + steps + 2)) \
        --coordinator 10.99.0.1:9911 --num-processes 2 --process-id "$@"
}

# record WORD...: behind the words, for each line of the trainer's log: the time, the bytes that
# the kernel has sent until then, and the line. Fails unless it gets enough lines.
record() {
    # shellcheck disable=SC2016
    ip netns exec "${ends[0]}" bash -ec '
        for ((i = 0; i < $1; i++)); do
            read -r line
            printf "%s\t" "${@:3}" "$EPOCHREALTIME" "$(<"/sys/class/net/$2/statistics/tx_bytes")"
            echo "$line"
        done' record $((warm_up + steps)) $device "$@"
}

# measure RATE NAME OPTION...
measure() {
    echo "$1, $2" >&2
    up "$1"
    train 1 "${@:3}" &>"$work/log1" &
    train 0 "${@:3}" --log-dir "$work/log" &>"$work/log0" &
    record "$1" "$2" <"$work/log/steps.jsonl" >>"$work/records" &
    if ! wait $!; then
        tail -n 40 "$work"/log? >&2
        die "the training ended early"
    fi
    down
}

clean_up() {
    down
    rm -rf "$work"
    [[ -n $had_etc_netns ]] || rmdir --ignore-fail-on-non-empty /etc/netns
}

[[ $EUID == 0 ]] || die "needs root, to make network namespaces"
type ip tc &>/dev/null || die "needs iproute2"
[[ -x $python ]] || die "needs .venv, which make train makes"
had_etc_netns=$([[ ! -d /etc/netns ]] || echo yes)
work=$(mktemp -d)
mkdir "$work/log"
mkfifo "$work/log/steps.jsonl"
trap clean_up EXIT
trap 'exit 130' HUP INT TERM
mkdir -p /etc/netns
for rate in unlimited "${rates[@]}"; do
    steps=$demo_steps measure $rate demo_scaled "${demo[@]}"
    steps=$demo_steps measure $rate "demo_scaled, delayed" "${demo[@]}" --delay 1
    steps=$adamw_steps measure $rate adamw --optimizer adamw
done
keep=(${KEEP:+--keep "sudo benchmarks/slow_link.sh${*:+ $*}" "$round_trip"})
"$python" benchmarks/slow_link_table.py $warm_up "${keep[@]}" <"$work/records"
