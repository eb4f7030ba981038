#!/bin/sh
# Train a network on images of digits twice, with gradients of 32 bits and of 1 bit, and compare.
#
#   examples/demo.sh [FOLDER]     FOLDER: where parallel-sgd is, such as .venv/mpich/bin
#
# As root, each of the four ranks is on a host that this machine emulates, with a link of 100 Mbit/s.
set -eu
parallel_sgd=${1:+$1/}parallel-sgd
runs=runs/demo-$(date +%Y-%m-%d-%H%M%S)
mkdir -p "$runs"

if "$parallel_sgd" cluster --hosts 2 --rate 100mbit -- true 2>"$runs/cluster.log"; then
    on_hosts="$parallel_sgd cluster --hosts 4 --rate 100mbit --hostfile $runs/hosts --"
    hostfile="--hostfile $runs/hosts"
else
    on_hosts= hostfile=
    echo "No hosts can be emulated here: $(tail -n 1 "$runs/cluster.log")"
    echo "The ranks share this machine's memory, so the runs below differ in bytes, not in speed."
fi

for bits in 32 1; do
    # Without quotes: each of the two may be empty, or several words.
    $on_hosts "$parallel_sgd" run -n 4 $hostfile train.py --gradient-bits $bits \
        --hidden 2048 --epochs 10 --lr 0:0.3,10000:0.05 --output "$runs/$bits-bit"
done

echo
"$parallel_sgd" compare "$runs/32-bit" "$runs/1-bit" --html "$runs/compared.html"
