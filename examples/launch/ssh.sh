#!/bin/bash
# Machines that are reached by ssh without a password, with this folder at the same path on each.
#
#     HOSTS="gpu1 gpu2" GPUS=8 examples/launch/ssh.sh --config examples/recipes/70b-2-nodes.yaml
#
# The first of HOSTS is where the others find it: give names or addresses that all of them can reach.
# A rank that ends badly is started again with all others, up to three times; a machine that was cut
# off starts its launcher again, up to TRIES times. Ctrl-C ends all; the same command goes on.

set -euo pipefail
read -ra hosts <<< "${HOSTS:?the machines, as in HOSTS=\"gpu1 gpu2\"}"
flags=$(printf ' %q' "$@")

for host in "${hosts[@]}"; do
    command="torchrun --nnodes ${#hosts[@]} --nproc_per_node ${GPUS:-8} --rdzv_id ${ID:-run}
        --rdzv_backend c10d --rdzv_endpoint ${hosts[0]}:${PORT:-29400} --max_restarts 3 train.py$flags"
    again="for try in \$(seq ${TRIES:-5}); do ${command//$'\n'/ } && exit; sleep 5; done; exit 1"
    ssh -o BatchMode=yes -o ServerAliveInterval=15 "$host" \
        "cd $(printf '%q' "$PWD") && PATH=$(printf '%q' "$PATH") && $again" &
done

trap 'kill $(jobs -p) 2> /dev/null' INT TERM
code=0
for job in $(jobs -p); do wait "$job" || code=$?; done
exit "$code"
