#!/usr/bin/env bash
# From nothing to a fine-tuned adapter on a CPU: creates an environment, trains a tiny Qwen3 on a bundled text (cached),
# fine-tunes it with LoRA on bundled dialogues, and shows the loss and answers before and after.
#   bash scripts/quickstart.sh            the whole job, some 5 minutes on 2 cores after the installation
#   bash scripts/quickstart.sh --short    a few steps only, to check an installation
set -eu
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"
make_environment plot,data
exec "$PYTHON" "$ROOT/scripts/quickstart.py" "$@"
