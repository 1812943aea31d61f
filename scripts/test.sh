#!/usr/bin/env bash
# Runs all tests, in an environment that is created if missing. Arguments go to pytest.
#   bash scripts/test.sh                       everything, in two processes side by side
#   bash scripts/test.sh -m quick              quick tests, while making a change (tests/conftest.py lists them)
#   bash scripts/test.sh tests/network -x          one folder, stop at the first failure
#   bash scripts/test.sh --without-peers       everything except tests/peers, whose PyTorch is a download of several GB,
#                                              tests/clients and tests/trackers
#   bash scripts/test.sh tests/peers           against PyTorch's PEFT, in a second environment that it makes
#   bash scripts/test.sh tests/clients         with clients of OpenAI's API, in another environment that it makes
#   bash scripts/test.sh tests/trackers        with trackers of runs, in one more environment that it makes
#   MINDLORA_STACK=ms27 bash scripts/test.sh   with an older pair of MindSpore and MindFormers; ms210: with a newer one
set -eu
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"

# Returns whether the arguments after NAME select tests/NAME: they name it or a folder around it, or name no tests at all.
selects() {
    local name=$1 argument elsewhere=no
    shift
    for argument; do
        case $argument in
            -*) ;;
            . | ./ | tests | tests/ | ./tests | ./tests/ | */tests | */tests/ | *tests/"$name"*) return 0 ;;
            *tests/*) elsewhere=yes ;;
        esac
    done
    [ $elsewhere = no ]
}

OTHERS=(peers clients trackers)
if [ "${1:-}" = --without-peers ]; then
    shift
    OTHERS=()
elif [ "$*" = "-m quick" ]; then
    OTHERS=()
fi
make_tests_environment
LEFT_OUT=(--ignore=tests/peers --ignore=tests/clients --ignore=tests/trackers)
for place in "${!OTHERS[@]}"; do
    if selects "${OTHERS[place]}" "$@"; then
        "make_${OTHERS[place]}_environment"
        unset "LEFT_OUT[place]"
    fi
done
cd "$ROOT"
if [ $# -eq 0 ] || [ "$*" = "-m quick" ]; then set -- -n 2 "$@" tests; fi
exec "$PYTHON" -m pytest --durations=8 "${LEFT_OUT[@]}" "$@"
