#!/bin/sh
# Train a network on images of digits twice, with gradients of 32 bits and of 1 bit, and compare.
#
#   examples/demo.sh [FOLDER]     FOLDER: where parallel-sgd is, such as .venv/mpich/bin
#
# As root, each of the four ranks is on a host that this machine emulates, with a link of 100 Mbit/s.
set -eu
[ $# -eq 0 ] || PATH=$(cd "$1" && pwd):$PATH
cd "$(dirname "$0")/.."
runs=runs/demo-$(date +%Y-%m-%d-%H%M%S)
hosts=$runs/hosts
mkdir -p "$runs"

# train LAUNCHER…: start both runs by this command.
train() {
    for bits in 32 1; do
        "$@" train.py --gradient-bits $bits --hidden 2048 --epochs 10 --lr 0:0.3,10000:0.05 \
            --output "$runs/$bits-bit"
    done
}

if parallel-sgd cluster --hosts 2 --rate 100mbit --hostfile "$hosts" -- true 2>"$runs/cluster.log"; then
    train parallel-sgd cluster --hosts 4 --rate 100mbit --hostfile "$hosts" -- \
        parallel-sgd run -n 4 --hostfile "$hosts"
else
    echo "No hosts can be emulated here: $(tail -n 1 "$runs/cluster.log")"
    echo "The ranks share this machine's memory, so the runs below differ in bytes, not in speed."
    train parallel-sgd run -n 4
fi

echo
parallel-sgd compare "$runs/32-bit" "$runs/1-bit" --html "$runs/compared.html"
