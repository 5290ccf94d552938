#!/usr/bin/env bash
# Make the environment .venv with everything that the commands of the Makefile need. Does nothing, quickly, where
# nothing has changed. PYTHON=python3.12 chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH=torch==$(sed -n 's/^torch==//p' constraints.txt)
STAMP=.venv/.stamp

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: error: %s\n' "$*" >&2; exit 2; }

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" && { echo "$PYTHON"; return; }
        fail "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13 ($("$PYTHON" --version 2>&1 | head -n 1)); name one"
    fi
    # The environment that is there already stays; else the plain python3, else the newest that fits.
    for python in .venv/bin/python python3 python3.13 python3.12 python3.11; do
        fits "$python" && { echo "$python"; return; }
    done
    fail "no Python 3.11, 3.12 or 3.13 found; install one, or name it: PYTHON=/path/to/python make setup"
}

# An environment serves one interpreter and one place: its scripts hold absolute paths.
is_usable() {
    .venv/bin/python -m pip --version >/dev/null 2>&1 &&
        [ "$(version .venv/bin/python)" = "$(version "$1")" ] && grep -qF "$PWD/.venv" .venv/pyvenv.cfg
}

version() { "$1" -c 'import sys; print(*sys.version_info[:3], sep=".")'; }

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# torch goes in first: plain pip would bring gigabytes of CUDA to machines without a GPU.
install_torch() {
    if [ "$(.venv/bin/python -c 'from importlib.metadata import version as v; print(v("torch").split("+")[0])' \
        2>/dev/null)" = "${TORCH#torch==}" ]; then
        return
    fi
    # Only find-links folders that pip's settings name; answers at once.
    if pip install -qq --no-compile --no-index --no-deps "$TORCH" 2>/dev/null; then
        say "$TORCH: a local wheel"
        return
    fi
    say "$TORCH: no local wheel fits"
    if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
        say "$TORCH: no GPU here, trying PyTorch's CPU index"
        # Other indexes are left out, so that the CUDA build does not win.
        if PIP_EXTRA_INDEX_URL='' PIP_FIND_LINKS='' pip install -qq --no-deps --retries 1 --timeout 20 \
            --index-url https://download.pytorch.org/whl/cpu "$TORCH"; then
            return
        fi
        say "$TORCH: the CPU index does not bring it (see above); trying PyPI, whose build is large"
    fi
    pip install "$TORCH"
}

python=$(choose_python)
wanted="$(version "$python") $PWD $(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)"
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then
    exit 0
fi
start=$SECONDS
if ! is_usable "$python"; then
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv ||
        fail "$python cannot make environments; on Debian and Ubuntu: apt-get install python3-venv"
fi
install_torch
say "installing specdrafters and what it needs"
# -qq: no word on indexes of this machine that lack a package. Bytecode is made on first import, where it is needed.
pip install -qq --no-compile --constraint constraints.txt --editable '.[demo,report,dev]'
PYTHONPATH=scripts .venv/bin/python -c 'import console; console.warn()'
printf '%s\n' "$wanted" >"$STAMP"
say "done in $((SECONDS - start)) s; .venv/bin/python is $(.venv/bin/python --version)"
