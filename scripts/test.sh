#!/usr/bin/env bash
# Runs all tests, in an environment that is made where it is missing. Arguments go to pytest.
#   bash scripts/test.sh                       everything
#   bash scripts/test.sh tests/nn -x           one folder, stop at the first failure
#   MINDLORA_STACK=ms27 bash scripts/test.sh   with the older pair of MindSpore and MindFormers
set -eu
source "$(dirname "$0")/environment.sh"
make_environment test,plot,data
cd "$ROOT"
if [ $# -eq 0 ]; then set -- tests; fi
exec "$PYTHON" -m pytest --durations=8 "$@"
