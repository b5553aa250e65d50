#!/usr/bin/env bash
# The whole experiment on a CPU: NoPE, ALiBi, RoPE and FoPE, trained on the same text and passkeys,
# measured at 1x to 16x the training length, drawn. About 16 minutes on 2 slow cores.
#
#   bash runs/demo.sh              everything, into runs_out/tiny
#   bash runs/demo.sh --seeds 3    three seeds of each model: figures with a spread
#   bash runs/demo.sh --quick      the same path with next to no training: 2 minutes
#   bash runs/demo.sh --out DIR    somewhere else; further words go to python -m paper figure1
#
# Run again, it skips what is finished and continues what is not.
set -euo pipefail
case "${1:-}" in --help | -h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;; esac
from=$PWD
. "$(dirname "$0")/setup.sh"
install requirements.txt
install paper/requirements.txt
export PYTHONPATH=$PWD
cd "$from" # where relative folders are meant
exec python -m paper figure1 ${@+"${@/#--quick/--size=quick}"}
