#!/usr/bin/env bash
# The paper's table 2: does normalising queries and keys, or aligning frequencies, help to read further? Loss in nats.
#
#   bash runs/qk_norm.sh                tiny models on a CPU: about 20 minutes on 2 slow cores, for 3 seeds
#   SIZE=20M bash runs/qk_norm.sh       the paper's 20M (or 60M) models on one GPU, from data/c4 (see the README for the hours)
#
# RoPE, RoPE-A and NoPE, each without and with QK-norm, and FoPE, which the paper's table leaves out.
# SEEDS=1 is quicker. What is finished is skipped, also what another of these scripts has made in runs_out/$SIZE.
set -euo pipefail
size=${SIZE:-tiny} seeds=${SEEDS:-3}
out=runs_out/$size
. "$(dirname "$0")/common.sh"

prepare_data
for ((seed = 0; seed < seeds; seed++)); do
    for pos in rope rope_a nope fope; do
        model perplexity "${pos}_s$seed" "" --pos "$pos" --seed "$seed"
        model perplexity "${pos}_qk_s$seed" "" --pos "$pos" --seed "$seed" --qk_norm
    done
done
wait_for_all
draw qk_norm {rope,rope_a,nope,fope}{,_qk}_s[0-9]*_perplexity --loss
