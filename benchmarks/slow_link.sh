#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$PWD/.venv/bin/python
ends=("slow-link-$$-a" "slow-link-$$-b")
device=slow0

die() {
    echo "slow_link.sh: $*" >&2
    exit 1
}

# up: joins both ends by a link as fast as the machine.
# up RATE MS: by one of this rate (as tc writes it) and this time for a round trip.
up() {
    local rate=${1-} round_trip=${2-} end
    for i in 0 1; do
        end=${ends[i]}
        mkdir -p "/etc/netns/$end"
        # gloo binds to what the host name resolves to.
        printf '%s\n' "127.0.0.1 localhost" "10.99.0.$((i + 1)) $HOSTNAME" >"/etc/netns/$end/hosts"
        ip netns add "$end"
        ip -n "$end" link set lo up
        ip netns exec "$end" sysctl -qw \
            net.ipv4.tcp_rmem="4096 131072 67108864" net.ipv4.tcp_wmem="4096 131072 67108864"
    done
    if [[ -z $rate ]]; then
        ip -n "${ends[0]}" link add $device type veth peer name $device netns "${ends[1]}"
    else
        delay=$(awk "BEGIN { print $round_trip / 2000 }")
        ip netns exec "${ends[0]}" \
            "$python" benchmarks/delay_line.py "$delay" $device "${ends[@]}" &
        until ip -n "${ends[1]}" link show $device &>/dev/null; do
            kill -0 $! || die "no delay line"
            sleep 0.1
        done
    fi
    for i in 0 1; do
        end=${ends[i]}
        ip -n "$end" address add "10.99.0.$((i + 1))/24" dev $device
        ip -n "$end" link set $device up
        # Room for one round trip, as routers have; a burst no shorter than TCP's 64 KB bundles.
        [[ -z $rate ]] || tc -n "$end" qdisc add dev $device root \
            tbf rate "$rate" burst 128kb latency "${round_trip}ms"
    done
}

down() {
    local end
    for end in "${ends[@]}"; do
        if [[ -e /run/netns/$end ]]; then
            # KILL, because JAX traps TERM.
            ip netns pids "$end" | xargs -r kill -KILL
            ip netns delete "$end"
        fi
        rm -rf "/etc/netns/$end"
    done
    wait
}
