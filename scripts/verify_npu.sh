#!/usr/bin/env bash
# One command for the owner of an Atlas A2 or A3: tests everything that docs/ascend.md lists as untested on an NPU, and
# leaves one folder to send back, with report.md as its page. Steps that cannot run on this machine say so.
#   bash scripts/verify_npu.sh                      all of it
#   bash scripts/verify_npu.sh --quick              few shapes
#   bash scripts/verify_npu.sh --only build operators --soc ascend910b
#   bash scripts/verify_npu.sh --device CPU         the same comparisons on a CPU, to try the script itself
# It needs a Python with MindSpore and MindFormers, installed by `pip install .` or beside this checkout. It uses python
# or python3 on PATH, or the program that PYTHON names, and the NPUs that npu-smi shows without a process, or those that
# ASCEND_RT_VISIBLE_DEVICES names. MINDLORA_CANN_FOLDERS: other folders to search for CANN.
set -eu

SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/cann.sh
source "$SCRIPTS/cann.sh"

if [ -z "${ASCEND_OPP_PATH:-}" ]; then
    for folder in "${ASCEND_HOME_PATH:-}" ${MINDLORA_CANN_FOLDERS-/usr/local/Ascend/cann \
        /usr/local/Ascend/ascend-toolkit "$HOME/Ascend/cann" "$HOME/Ascend/ascend-toolkit"}; do
        # shellcheck disable=SC1091
        if [ -n "$folder" ] && [ -f "$folder/set_env.sh" ]; then set +eu; source "$folder/set_env.sh"; set -eu; break; fi
    done
fi
find_python
exec "$PYTHON" "$SCRIPTS/verify_npu.py" "$@"
