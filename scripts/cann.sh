# shellcheck shell=bash
# Sourced by build_ascend.sh and check_aclnn.sh: finds the CANN toolkit.

fail() {
    echo "error: $*" >&2
    exit 1
}

# Sets CANN to the folder of the toolkit, with its environment. MINDLORA_CANN_FOLDERS: where it may be otherwise. $1: the
# oldest version that will do.
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
            # CANN's script may end in a test that is false: with -e that would end this one without a word.
            # shellcheck disable=SC1090
            if [ -f "$script" ]; then set +eu; source "$script"; set -eu; break; fi
        done
        export ASCEND_HOME_PATH=${ASCEND_HOME_PATH:-$CANN}
    fi
}
