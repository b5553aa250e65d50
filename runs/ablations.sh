#!/usr/bin/env bash
# The paper's figure 6: which part of FoPE does it, how much noise, how many frequencies; and the shape of the model.
#
#   bash runs/ablations.sh                tiny models on a CPU: about 60 minutes on 2 slow cores, for 3 seeds
#   SIZE=20M bash runs/ablations.sh       the paper's 20M (or 60M) models on one GPU, from data/c4 (see the README for the hours)
#
# Perplexity alone. Shapes have about equal parameters: head_dim against heads against layers; tiny alone.
# SEEDS=1 is quicker. What is finished is skipped, also what another of these scripts has made in runs_out/$SIZE.
set -euo pipefail
size=${SIZE:-tiny} seeds=${SEEDS:-3}
out=runs_out/$size
. "$(dirname "$0")/common.sh"

prepare_data
for ((seed = 0; seed < seeds; seed++)); do
    fope_with() { model perplexity "fope_$1_s$seed" "$2" --pos fope --seed "$seed" --pos_args "${@:3}"; }
    model perplexity "rope_s$seed" "" --pos rope --seed "$seed"
    model perplexity "fope_s$seed" "" --pos fope --seed "$seed"
    # halves: CF is the floor alone, FS the Fourier series alone
    fope_with cf "FoPE, CF alone" sigma=0
    fope_with fs "FoPE, FS alone" floor=false
    # noise: 0.3 is the default, 0 is CF
    for sigma in 0.1 0.2 0.4 0.5; do fope_with "sigma$sigma" "FoPE, sigma $sigma" "sigma=$sigma"; done
    # the equations to the letter, where sigma is the real standard deviation
    for sigma in 0 0.1 0.3; do fope_with "paper$sigma" "FoPE, equations, sigma $sigma" variant=paper "sigma=$sigma"; done
    # D frequencies: by default as many as lie above the floor
    for factor in 2 4; do fope_with "D$factor" "FoPE, D = ${factor}K" "n_freq=$((factor * above_the_floor))"; done
done
wait_for_all
draw ablation_halves {rope,fope,fope_cf,fope_fs}_s[0-9]*_perplexity
draw ablation_sigma fope_{cf,sigma0.[1245]}_s[0-9]*_perplexity fope_s[0-9]*_perplexity
draw ablation_variant {fope,fope_cf,fope_paper0,fope_paper0.[13]}_s[0-9]*_perplexity
draw ablation_D fope{,_D2,_D4}_s[0-9]*_perplexity

if [ "$size" = tiny ]; then # layers, heads, width; the plain runs above are 4 layers of 2 heads of 64
    for ((seed = 0; seed < seeds; seed++)); do
        for pos in rope fope; do
            name=$(echo "$pos" | sed 's/rope/RoPE/; s/fope/FoPE/')
            shape() { model perplexity "${pos}_$1_s$seed" "$name, $2" --pos "$pos" --seed "$seed" "${@:3}"; }
            shape 4x32 "4 layers, 4 x 32" --n_head 4
            shape 1x128 "4 layers, 1 x 128" --n_head 1
            shape 2layers "2 layers, 3 x 64" --n_layer 2 --n_head 3 --n_embd 192
            shape 7layers "7 layers, 2 x 48" --n_layer 7 --n_head 2 --n_embd 96
        done
    done
    wait_for_all
    draw ablation_shape {rope,fope}{,_4x32,_1x128,_2layers,_7layers}_s[0-9]*_perplexity
fi
