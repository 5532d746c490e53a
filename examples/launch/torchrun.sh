#!/bin/bash
# On every machine: torchrun.sh RANK. All machines' addresses, the first machine first; then demopt train's own flags.
set -eu
: "${MACHINES:?such as MACHINES='10.0.0.1 10.0.0.2'}" "${RUN_FLAGS:?such as RUN_FLAGS='--out /shared/run --data /data/text'}"
read -ra machines <<<"$MACHINES"
read -ra flags <<<"$RUN_FLAGS"
exec torchrun --nnodes "${#machines[@]}" --node-rank "$1" --nproc-per-node "${PROCESSES:-1}" \
    --master-addr "${machines[0]}" --master-port "${PORT:-29500}" -m demopt.cli train "${flags[@]}"
