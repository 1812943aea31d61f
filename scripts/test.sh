#!/usr/bin/env bash
# Runs all tests, in an environment that is made where it is missing. Arguments go to pytest.
#   bash scripts/test.sh                       everything, in two processes side by side
#   bash scripts/test.sh -m quick              what is quick, while a change is made (tests/conftest.py names it)
#   bash scripts/test.sh tests/nn -x           one folder, stop at the first failure
#   bash scripts/test.sh --without-peers       everything but tests/peers, whose PyTorch is a download of several GB
#   bash scripts/test.sh tests/peers           against PyTorch's PEFT, in a second environment that it makes
#   MINDLORA_STACK=ms27 bash scripts/test.sh   with an older pair of MindSpore and MindFormers; ms210: with a newer one
set -eu
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"

# Tells whether the arguments select tests/peers: they name it or a folder around it, or name no tests at all.
selects_peers() {
    local argument elsewhere=no
    for argument; do
        case $argument in
            -*) ;;
            . | ./ | tests | tests/ | ./tests | ./tests/ | */tests | */tests/ | *tests/peers*) return 0 ;;
            *tests/*) elsewhere=yes ;;
        esac
    done
    [ $elsewhere = no ]
}

PEERS=(--ignore=tests/peers)
if [ "${1:-}" = --without-peers ]; then
    shift
elif [ "$*" != "-m quick" ] && selects_peers "$@"; then
    PEERS=()
fi
make_tests_environment
if [ ${#PEERS[@]} -eq 0 ]; then make_peers_environment; fi
cd "$ROOT"
if [ $# -eq 0 ] || [ "$*" = "-m quick" ]; then set -- -n 2 "$@" tests; fi
exec "$PYTHON" -m pytest --durations=8 "${PEERS[@]}" "$@"
