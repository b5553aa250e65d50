#!/usr/bin/env bash
# Gradescope runs this once, as root, when the image is built: Python 3.11 or newer, the packages.
set -euo pipefail
apt-get update
apt-get install -y python3.12 python3.12-venv || apt-get install -y python3.11 python3.11-venv
python=$(command -v python3.12 || command -v python3.11)
"$python" -m venv /autograder/venv
/autograder/venv/bin/pip install -r /autograder/source/requirements.txt
