#!/usr/bin/env bash
# From nothing to an adapter on a tiny Qwen3 with random weights, on a CPU: with MindFormers' graph-mode Trainer and,
# under MindFormers 2, also with its PyNative Trainer, where plain operators replace kernels that a CPU lacks.
#   bash scripts/tiny_qwen3.sh
set -eu
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"
make_tests_environment
exec "$PYTHON" "$ROOT/scripts/tiny_qwen3.py" "$@"
