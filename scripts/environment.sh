# shellcheck shell=bash
# Sourced by the other scripts: creates the project's virtual environment if it is missing and sets $PYTHON.
#
#   MINDLORA_VENV    where the environment stands         (default: .venv in the checkout)
#   MINDLORA_STACK   ms29: MindSpore 2.9.0 + MindFormers 1.9.0 (default); ms27: 2.7.2 + 1.8.0;
#                    ms210: 2.10.0 + 2.1.0; ms210-mf20: 2.10.0 + 2.0.0, only for graph mode
#   MINDLORA_PYTHON  the Python to make it with           (default: the first of python3.11 ... python3 that fits)
#
# For tests/peers a second environment holds PyTorch and PEFT:
#
#   MINDLORA_PEERS_VENV    where it stands                (default: .venv-peers in the checkout)
#   MINDLORA_PEERS_PYTHON  a Python that has what tests/peers/requirements.txt names; then nothing is made
#
# For tests/clients another one holds clients of OpenAI's API:
#
#   MINDLORA_CLIENTS_VENV    where it stands              (default: .venv-clients in the checkout)
#   MINDLORA_CLIENTS_PYTHON  a Python that has what tests/clients/requirements.txt names; then nothing is made
#
# For tests/trackers another one holds trackers of runs, on top of the environment of the stack:
#
#   MINDLORA_TRACKERS_VENV    where it stands             (default: the stack's environment with -trackers at the end)
#   MINDLORA_TRACKERS_PYTHON  a Python that has the stack and what tests/trackers/requirements.txt names; then nothing is
#                             made
#
# For scripts/lint.sh and the documentation one more holds linters and mkdocs:
#
#   MINDLORA_LINT_VENV     where it stands                (default: .venv-lint in the checkout)

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
STACK=${MINDLORA_STACK:-ms29}
if [ "$STACK" = ms29 ]; then DEFAULT_VENV=$ROOT/.venv; else DEFAULT_VENV=$ROOT/.venv-$STACK; fi
VENV=${MINDLORA_VENV:-$DEFAULT_VENV}
PEERS_VENV=${MINDLORA_PEERS_VENV:-$ROOT/.venv-peers}
CLIENTS_VENV=${MINDLORA_CLIENTS_VENV:-$ROOT/.venv-clients}
TRACKERS_VENV=${MINDLORA_TRACKERS_VENV:-$VENV-trackers}
LINT_VENV=${MINDLORA_LINT_VENV:-$ROOT/.venv-lint}

# On few cores, worker threads that spin between kernels cost more than they gain.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-0}
# MindSpore's own log: only errors.
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

# Prints a stack's MindFormers if pip cannot resolve it, because no registry has its requirements.
mindformers_without_dependencies() {
    case $STACK in
        ms210) echo mindformers==2.1.0 ;;
        ms210-mf20) echo mindformers==2.0.0 ;;
    esac
}

# Installs the checkout, editable, with the given extras; does nothing if that was done before.
make_environment() {
    local wanted python installed extras=
    wanted="$STACK $(cat "$ROOT/setup.py" "$ROOT/pyproject.toml" "$ROOT"/scripts/ms210*-requirements.txt | cksum)"
    PYTHON=$VENV/bin/python
    installed=$(cat "$VENV/mindlora-installed" 2>/dev/null || true)
    if [ "${installed%: *}" = "$wanted" ]; then extras=${installed##*: }; fi
    if has_all "$extras" "$1"; then return; fi
    python=$(find_python) || return 1
    echo "Making the environment $VENV with $("$python" --version) (MindSpore is a download of about 1 GB) ..."
    "$python" -m venv "$VENV" || return 1
    pip_install --upgrade pip setuptools wheel || return 1
    if [ -n "$(mindformers_without_dependencies)" ]; then
        install_without_dependencies "$1" || return 1
    else
        pip_install --editable "${ROOT}[$STACK,$1]" || return 1
    fi
    echo "$wanted: $extras,$1" > "$VENV/mindlora-installed"
    echo "Environment ready."
}

# has_all LIST NAMES: returns whether a comma-separated list holds all the names.
has_all() {
    local name
    for name in ${2//,/ }; do
        case ",$1," in *",$name,"*) ;; *) return 1 ;; esac
    done
}

# The environment in which tests run; tests/peers need a second one.
make_tests_environment() { make_environment test,plot,data; }

# Installs into the environment, without setuptools' warning about editable installations.
pip_install() {
    PYTHONWARNINGS=ignore "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@"
}

# Installs the checkout and a MindFormers that pip cannot resolve: the commands of docs/installation.md, plus the
# extras.
install_without_dependencies() {
    local extras
    pip_install --requirement "$ROOT/scripts/$STACK-requirements.txt" || return 1
    pip_install --no-deps "$(mindformers_without_dependencies)" --editable "$ROOT" || return 1
    extras=$("$PYTHON" "$ROOT/scripts/extra_requirements.py" "$1") || return 1
    echo "$extras" | pip_install --requirement /dev/stdin || return 1
    if [ "$STACK" = ms210-mf20 ]; then
        # MindFormers 2.0 cannot be imported without hyper_parallel. Graph mode does not call it: a stand-in is enough.
        echo "$ROOT/tests/support/one_device" > "$(echo "$VENV"/lib/python3.*/site-packages)/hyper_parallel.pth"
    fi
}

# Creates the environment of tests/peers and sets $MINDLORA_PEERS_PYTHON; does nothing if that was done before.
# On Linux the registry's torch may bring several GB of CUDA packages, which the tests do not use. To avoid them,
# install a CPU build of the pinned version there first, or name an index of CPU builds in PIP_EXTRA_INDEX_URL:
# which one is the user's choice.
make_peers_environment() {
    make_other_environment peers "$PEERS_VENV" MINDLORA_PEERS_PYTHON "On Linux, a registry's PyTorch brings CUDA packages \
of several GB, which the tests do not use; without them: bash scripts/test.sh --without-peers, or install a CPU build of \
torch there first ..."
}

# Creates the environment of tests/clients and sets $MINDLORA_CLIENTS_PYTHON; does nothing if that was done before.
make_clients_environment() {
    make_other_environment clients "$CLIENTS_VENV" MINDLORA_CLIENTS_PYTHON "It is a download of about 150 MB ..."
}

# Creates the environment of tests/trackers, after make_tests_environment has created the stack's, and sets
# $MINDLORA_TRACKERS_PYTHON; does nothing if that was done before. Trackers run in the training process, so packages
# that they do not bring come from the stack.
make_trackers_environment() {
    if [ -z "${MINDLORA_TRACKERS_PYTHON:-}" ] && [ ! -x "$TRACKERS_VENV/bin/python" ]; then
        "$PYTHON" -m venv "$TRACKERS_VENV" || return 1
        echo "$VENV"/lib/python3.*/site-packages > "$(echo "$TRACKERS_VENV"/lib/python3.*/site-packages)/stack.pth"
    fi
    make_other_environment trackers "$TRACKERS_VENV" MINDLORA_TRACKERS_PYTHON "It is a download of about 60 MB ..."
}

# make_other_environment NAME VENV VARIABLE NOTE: makes the environment VENV of tests/NAME, and sets VARIABLE to its Python.
make_other_environment() {
    local requirements=$ROOT/tests/$1/requirements.txt venv=$2 wanted python
    if [ -n "${!3:-}" ]; then
        return
    fi
    wanted=$(cksum < "$requirements")
    if [ "$(cat "$venv/$1-installed" 2>/dev/null)" != "$wanted" ]; then
        python=$(find_python) || return 1
        if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "note: tests/$1 is left out: its requirements.txt needs Python 3.11 or 3.12, and $python is" \
                 "$("$python" --version). Install one, or name it in MINDLORA_PYTHON." >&2
            return
        fi
        echo "Making the environment $venv with $("$python" --version) for tests/$1. $4"
        # Installed packages stay: torch may be a CPU build.
        [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || return 1
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$requirements" || return 1
        echo "$wanted" > "$venv/$1-installed"
        echo "Environment ready."
    fi
    export "$3=$venv/bin/python"
}

# Creates the environment of the linters and the documentation and sets $LINT, the folder of its programs.
make_lint_environment() {
    local wanted python
    wanted=$(cat "$ROOT/scripts/lint-requirements.txt" "$ROOT/docs/requirements.txt" | cksum)
    LINT=$LINT_VENV/bin
    if [ "$(cat "$LINT_VENV/lint-installed" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    python=$(find_python) || return 1
    echo "Making the environment $LINT_VENV with $("$python" --version) ..."
    [ -x "$LINT/python" ] || "$python" -m venv "$LINT_VENV" || return 1
    "$LINT/python" -m pip install --quiet --disable-pip-version-check \
        --requirement "$ROOT/scripts/lint-requirements.txt" --requirement "$ROOT/docs/requirements.txt" || return 1
    echo "$wanted" > "$LINT_VENV/lint-installed"
    echo "Environment ready."
}
