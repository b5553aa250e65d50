#!/usr/bin/env bash
# The paper's figure 5: a trained model that is to read further, without more training (YaRN, position interpolation) and
# with a quarter more training at twice the length.
#
#   bash runs/extrapolate.sh                tiny models on a CPU: about 20 minutes on 2 slow cores, for 3 seeds
#   SIZE=20M bash runs/extrapolate.sh       the paper's 20M (or 60M) models on one GPU, from data/c4 (see the README for the hours)
#
# Perplexity alone. In the second figure 1x is the new training length.
# SEEDS=1 is quicker. What is finished is skipped, also what another of these scripts has made in runs_out/$SIZE.
set -euo pipefail
size=${SIZE:-tiny} seeds=${SEEDS:-3}
out=runs_out/$size
. "$(dirname "$0")/common.sh"

prepare_data
for ((seed = 0; seed < seeds; seed++)); do
    for pos in rope fope; do model perplexity "${pos}_s$seed" "" --pos "$pos" --seed "$seed"; done
done
wait_for_all

for ((seed = 0; seed < seeds; seed++)); do
    for scale in 4 16; do
        again perplexity "rope_yarn${scale}_s$seed" "RoPE, YaRN x$scale" "rope_s$seed" --yarn_scale "$scale"
        again perplexity "fope_yarn${scale}_s$seed" "FoPE, YaRN x$scale" "fope_s$seed" --yarn_scale "$scale"
    done
    again perplexity "rope_warm_s$seed" "RoPE, YaRN x4, temperature" "rope_s$seed" --yarn_scale 4 --pos_args yarn_temperature=true
    again perplexity "rope_pi4_s$seed" "RoPE, interpolation x4" "rope_s$seed" --pi_scale 4
done
for ((seed = 0; seed < seeds; seed++)); do
    continued() { # name, label, the run to start from, flags
        model perplexity "$1_s$seed" "$2" --init_from "$(run_of perplexity "$3_s$seed")" --seed "$seed" "${twice_as_long[@]}" "${@:4}"
    }
    continued rope_rope "RoPE to RoPE" rope
    continued rope_yarn "RoPE to RoPE + YaRN" rope --yarn_scale 2
    continued rope_fope "RoPE to FoPE" rope --pos fope
    continued fope_fope "FoPE to FoPE" fope
    continued fope_yarn "FoPE to FoPE + YaRN" fope --yarn_scale 2
done
wait_for_all
draw extrapolate {rope,fope}{,_yarn4,_yarn16}_s[0-9]*_perplexity rope_{pi4,warm}_s[0-9]*_perplexity
draw continued {rope_rope,rope_yarn,rope_fope,fope_fope,fope_yarn}_s[0-9]*_perplexity
