# Sourced by the other scripts: goes to the repository's root and into its .venv, which it makes.
#
#   install FILE    install a requirements file, unless that has been done
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv/bin/python ]; then
    echo "== making .venv"
    "${PYTHON:-python3}" -m venv .venv
fi
. .venv/bin/activate
install() {
    local done=".venv/${1//\//_}"
    if cmp -s "$1" "$done"; then return; fi
    echo "== installing $1"
    python -m pip install -q --disable-pip-version-check -r "$1"
    cp "$1" "$done"
}
