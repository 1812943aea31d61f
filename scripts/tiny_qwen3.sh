#!/usr/bin/env bash
# From nothing to an adapter on a tiny Qwen3 with random weights, on a CPU: by MindFormers' graph-mode Trainer, and with
# MindFormers 2 by its PyNative Trainer too, where plain operators stand in for kernels that a CPU lacks.
#   bash scripts/tiny_qwen3.sh
set -eu
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"
make_tests_environment
exec "$PYTHON" "$ROOT/scripts/tiny_qwen3.py" "$@"
