#!/usr/bin/env bash
# Calls each Ascend C operator through CANN alone, without MindSpore, on golden files that NumPy computed; prints PASS or
# the first wrong index. Needs CANN, an NPU, g++, a Python with NumPy, and the package of scripts/build_ascend.sh.
#   bash scripts/check_aclnn.sh                          all operators, all dtypes
#   bash scripts/check_aclnn.sh lora_delta nf4_dequantize
#   bash scripts/check_aclnn.sh --repeat 1000            each file so often; every round must have the same bits
#   bash scripts/check_aclnn.sh --build-only --small     programs and few files, for CANN's tools: docs/ascend_tools.md
#   --device N, --timeout SECONDS (of one call, 60; -1 for none), --acl FILE (for aclInit)   go to the programs
#   --package FOLDER   the operator package, if it is neither on ASCEND_CUSTOM_OPP_PATH nor where build_ascend.sh puts it
# Programs and files are in build/aclnn_check. It uses python or python3 on PATH, or the program that PYTHON names.
set -eu

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BUILD=$ROOT/build/aclnn_check
# shellcheck source=scripts/cann.sh
source "$ROOT/scripts/cann.sh"

find_package() {
    local folder looked="" folders
    IFS=: read -ra folders <<< "${ASCEND_CUSTOM_OPP_PATH:-}"
    folders+=("$ROOT/mindlora/ops/lib/ascend/vendors/mindlora")
    if [ -n "$PACKAGE" ]; then folders=("$PACKAGE"); fi
    PACKAGE=
    for folder in "${folders[@]}"; do
        [ -n "$folder" ] || continue
        if [ -f "$folder/op_api/include/aclnn_lora_delta.h" ]; then PACKAGE=$folder; break; fi
        looked="$looked $folder"
    done
    [ -n "$PACKAGE" ] || fail "no operator package of mindlora was found (looked" \
        "for op_api/include/aclnn_lora_delta.h in$looked). Run scripts/build_ascend.sh first."
    PACKAGE=$(cd "$PACKAGE" && pwd)
    export ASCEND_CUSTOM_OPP_PATH=$PACKAGE${ASCEND_CUSTOM_OPP_PATH:+:$ASCEND_CUSTOM_OPP_PATH}
    export LD_LIBRARY_PATH=$PACKAGE/op_api/lib:$CANN/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

compile() {
    g++ -std=c++17 -I"$CANN/include" -I"$PACKAGE/op_api/include" -I"$ROOT/ops" "$@" ||
        fail "the programs do not compile against $PACKAGE and $CANN: what g++ printed says why."
}

# The driver's libraries are located when a program runs, not when it is linked.
build() {
    local op libraries=(-lcust_opapi -lnnopbase -lascendcl)
    # From CANN 8.5 on, this library has the functions aclrt...
    if [ -e "$CANN/lib64/libacl_rt.so" ]; then libraries+=(-lacl_rt); fi
    compile -c "$ROOT/ops/ascendc_check/check.cc" -o "$BUILD/check.o"
    for op; do
        compile "$ROOT/ops/$op/ascendc/check.cpp" "$BUILD/check.o" -o "$BUILD/$op" -L"$PACKAGE/op_api/lib" \
            -L"$CANN/lib64" "${libraries[@]}" -Wl,--allow-shlib-undefined
    done
}

OPERATORS=()
GIVEN=()
SMALL=()
BUILD_ONLY=
PACKAGE=
while [ $# -gt 0 ]; do
    case $1 in
        --repeat | --device | --timeout | --acl)
            [ $# -gt 1 ] || fail "$1 needs a value."; GIVEN+=("$1" "$2"); shift 2 ;;
        --package) [ $# -gt 1 ] || fail "--package needs a folder."; PACKAGE=$2; shift 2 ;;
        --small) SMALL=(--small); shift ;;
        --build-only) BUILD_ONLY=yes; shift ;;
        -h | --help) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
        -*) fail "$1 is not an option. --help names them." ;;
        *) [ -f "$ROOT/ops/$1/ascendc/check.cpp" ] || fail "$1 is not an operator with a kernel."; OPERATORS+=("$1"); shift ;;
    esac
done
if [ ${#OPERATORS[@]} -eq 0 ]; then
    for program in "$ROOT"/ops/*/ascendc/check.cpp; do OPERATORS+=("$(basename "${program%/ascendc/check.cpp}")"); done
fi

find_python
find_cann 8.3
find_package
command -v g++ > /dev/null || fail "g++ was not found: install it."
rm -rf "$BUILD"
mkdir -p "$BUILD"
"$PYTHON" "$ROOT/ops/ascendc_check/golden.py" "$BUILD/golden" "${OPERATORS[@]}" ${SMALL[@]+"${SMALL[@]}"}
build "${OPERATORS[@]}"
if [ -n "$BUILD_ONLY" ]; then
    echo "The programs are in $BUILD. Before they run: export ASCEND_CUSTOM_OPP_PATH=$ASCEND_CUSTOM_OPP_PATH" \
        "LD_LIBRARY_PATH=$LD_LIBRARY_PATH"
    exit
fi

missing=$(ldd "$BUILD/${OPERATORS[0]}" | sed -n 's/ => not found//p' | tr -d '\t' | paste -sd ' ')
[ -z "$missing" ] || fail "the programs need $missing, which the NPU's driver brings: there is none here. They are in" \
    "$BUILD, and can run on a machine with an NPU."
failed=
for op in "${OPERATORS[@]}"; do
    code=0
    "$BUILD/$op" ${GIVEN[@]+"${GIVEN[@]}"} "$BUILD/golden/$op"/*.golden || code=$?
    # The program has printed why it cannot run: no device, or a wrong option.
    [ $code -ne 2 ] || exit 2
    [ $code -eq 0 ] || failed="$failed $op"
done
[ -z "$failed" ] || fail "these do not hold:$failed."
echo "All ${#OPERATORS[@]} operators hold."
