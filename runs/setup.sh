# Sourced by the other scripts: goes to the repository's root and into its .venv, which it makes.
#
#   install FILE    install a requirements file, unless that has been done
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
if [ ! -e .venv/bin/activate ]; then
    python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: $python is not Python 3.11 or later; PYTHON=python3.12 bash ... names another" >&2
        exit 1
    fi
    echo "== making .venv"
    "$python" -m venv .venv
fi
. .venv/bin/activate
install() {
    local done=".venv/${1//\//_}"
    if cmp -s "$1" "$done"; then return; fi
    echo "== installing $1"
    python -m pip install -q --disable-pip-version-check -r "$1"
    cp "$1" "$done"
}
