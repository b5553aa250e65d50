#!/usr/bin/env bash
# The whole experiment on a CPU: NoPE, ALiBi, RoPE and FoPE, trained on the same text and passkeys, measured at 1x to 16x
# the training length, drawn. About 13 minutes on 2 slow cores, installation included.
#
#   bash runs/demo.sh              everything, into runs_out/tiny, where the other scripts find it
#   bash runs/demo.sh --seeds 3    three seeds of each model: three times as long, figures with a spread
#   bash runs/demo.sh --quick      the same path with almost no training, to see that it works: 2 minutes
#   bash runs/demo.sh --out DIR    somewhere else
#
# Run again, it skips what is finished and continues what is not.
set -euo pipefail
help() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; }
out= seeds=1 size=tiny
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
if [ -z "$out" ]; then out=runs_out/$size; fi
start=$SECONDS
. "$(dirname "$0")/common.sh"

prepare_data
plain_models nope alibi rope fope
wait_for_all

draw results {nope,alibi,rope,fope}_s[0-9]*_{perplexity,passkey}
echo
if [ $size = quick ]; then
    echo "This was the quick path: these models have learned next to nothing."
elif [ "$seeds" = 1 ]; then
    echo "One seed: read the slopes of the perplexity; the passkey panel is an illustration (see --seeds)."
fi
echo "The figure: $out/results/length.png   ($(((SECONDS - start) / 60)) min $(((SECONDS - start) % 60)) s)"
