# shellcheck shell=bash
# Sourced by build_ascend.sh, check_aclnn.sh and verify_npu.sh: finds the CANN toolkit and Python.

fail() {
    echo "error: $*" >&2
    exit 1
}

# Sets CANN to the toolkit's folder, and sources its environment. MINDLORA_CANN_FOLDERS: other folders to search. $1:
# the oldest supported version.
find_cann() {
    local folder script looked=""
    CANN=
    for folder in "${ASCEND_HOME_PATH:-}" "${ASCEND_TOOLKIT_HOME:-}" ${MINDLORA_CANN_FOLDERS-/usr/local/Ascend/cann \
        /usr/local/Ascend/ascend-toolkit/latest "$HOME/Ascend/cann" "$HOME/Ascend/ascend-toolkit/latest"}; do
        [ -n "$folder" ] || continue
        if [ -d "$folder" ]; then CANN=$folder; break; fi
        looked="$looked $folder"
    done
    [ -n "$CANN" ] || fail "no CANN toolkit was found (looked for$looked). Install CANN $1 or newer and source" \
        "its set_env.sh."
    if [ -z "${ASCEND_HOME_PATH:-}" ]; then
        for script in "$CANN/set_env.sh" "$CANN/../set_env.sh"; do
            # CANN's script may end with a false test, which under -e would end this script silently.
            # shellcheck disable=SC1090
            if [ -f "$script" ]; then set +eu; source "$script"; set -eu; break; fi
        done
        export ASCEND_HOME_PATH=${ASCEND_HOME_PATH:-$CANN}
    fi
}

# Sets PYTHON to the program that it names, or to python or python3 on PATH: the first with MindSpore, else the first
# that is new enough. A host may have only python3, or a python that is Python 2.
find_python() {
    local program usable="" programs=(python python3)
    if [ -n "${PYTHON:-}" ]; then programs=("$PYTHON"); fi
    for program in "${programs[@]}"; do
        "$program" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2> /dev/null || continue
        usable=${usable:-$program}
        if "$program" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("mindspore") is None)'; then
            PYTHON=$program
            return
        fi
    done
    [ -n "$usable" ] || fail "no Python 3.9 or newer was found (tried: ${programs[*]}). Put the one with MindSpore on PATH," \
        "or name it in PYTHON."
    PYTHON=$usable
}
