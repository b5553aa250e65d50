#!/usr/bin/env bash
# Tests and lint, on a CPU, without a network after the installation.
#
#   bash runs/test.sh              the quick suite: a minute on 2 slow cores
#   bash runs/test.sh --all        and what is slow: kills, damaged files, two processes, the course
#                                  kit, and hf/, which needs 700 MB of other libraries
#   bash runs/test.sh -k rope      further words go to pytest
set -euo pipefail
case "${1:-}" in --help | -h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;; esac
. "$(dirname "$0")/setup.sh"
install tests/requirements.txt "pytest and its helpers, 50 MB; half a minute"
install_gpt2
if [[ " $* " == *" --all "* ]]; then
    install hf/requirements.txt "transformers, TRL, lm-eval, 700 MB; 2 to 10 minutes"
    install tests/requirements-all.txt "a browser's driver and notebooks, 150 MB; a minute"
fi
"$python" -m pytest -q -n 2 "$@"
ruff check .
ruff format --check .
