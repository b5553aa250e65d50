#!/usr/bin/env bash
# The paper's figure 1 with all seven position embeddings: perplexity and passkeys at 1x to 16x the training length.
#
#   bash runs/baselines.sh                tiny models on a CPU: about 60 minutes on 2 slow cores, for 3 seeds
#   SIZE=20M bash runs/baselines.sh       the paper's 20M (or 60M) models on one GPU, from data/c4 (see the README for the hours)
#
# NoPE, ALiBi, RoPE, FoPE, KERPLE, FIRE and RoPE-A.
# SEEDS=1 is quicker. What is finished is skipped, also what another of these scripts has made in runs_out/$SIZE.
set -euo pipefail
size=${SIZE:-tiny} seeds=${SEEDS:-3}
out=runs_out/$size
. "$(dirname "$0")/common.sh"

prepare_data
plain_models nope alibi rope fope kerple fire rope_a
wait_for_all
draw baselines {nope,alibi,rope,fope,kerple,fire,rope_a}_s[0-9]*_{perplexity,passkey}
