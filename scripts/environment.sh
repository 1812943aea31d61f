# Sourced by the other scripts: makes the project's virtual environment where it is missing and sets $PYTHON.
#
#   MINDLORA_VENV    where the environment stands         (default: .venv in the checkout)
#   MINDLORA_STACK   ms29: MindSpore 2.9.0 + MindFormers 1.9.0 (default); ms27: 2.7.2 + 1.8.0
#   MINDLORA_PYTHON  the Python to make it with           (default: the first of python3.11 ... python3 that fits)

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
STACK=${MINDLORA_STACK:-ms29}
if [ "$STACK" = ms29 ]; then DEFAULT_VENV=$ROOT/.venv; else DEFAULT_VENV=$ROOT/.venv-$STACK; fi
VENV=${MINDLORA_VENV:-$DEFAULT_VENV}

# Worker threads that spin between kernels cost more than they gain on few cores.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-0}
# MindSpore's own log: errors alone.
export GLOG_v=${GLOG_v:-3}

find_python() {
    local candidate
    for candidate in "${MINDLORA_PYTHON:-}" python3.11 python3.12 python3.10 python3.9 python3; do
        if [ -n "$candidate" ] && "$candidate" -c \
            'import sys; sys.exit(not (3, 9) <= sys.version_info < (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.9 to 3.12 was found (MindSpore has no wheels for others). Install one, or name it in" \
         "MINDLORA_PYTHON." >&2
    return 1
}

# Installs the checkout, editable, with the extras that are named; does nothing where that was done before.
make_environment() {
    local extras="$STACK,$1" wanted python
    wanted="$extras $(cksum < "$ROOT/setup.py")"
    PYTHON=$VENV/bin/python
    if [ "$(cat "$VENV/mindlora-installed" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    python=$(find_python) || return 1
    echo "Making the environment $VENV with $("$python" --version) (MindSpore is a download of about 1 GB) ..."
    "$python" -m venv "$VENV" || return 1
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --upgrade pip setuptools wheel || return 1
    # Without setuptools' word of caution about editable installations.
    PYTHONWARNINGS=ignore "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable "$ROOT[$extras]" \
        || return 1
    echo "$wanted" > "$VENV/mindlora-installed"
    echo "Environment ready."
}
