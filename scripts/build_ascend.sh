#!/usr/bin/env bash
# Builds the Ascend C kernels into an operator package of CANN and installs it. Needs CANN 8.3 or newer and cmake;
# neither an NPU nor a driver. docs/ascend/build.md has the steps around it.
#   bash scripts/build_ascend.sh                              for Atlas A2 and A3
#   bash scripts/build_ascend.sh --soc ascend910b             for Atlas A2 alone
#   bash scripts/build_ascend.sh --install-path /opt/mindlora into another folder than mindlora/ops/lib/ascend
#   bash scripts/build_ascend.sh --kernel-options "-g -sanitizer"   options for the kernels' compiler, for CANN's tools
#   bash scripts/build_ascend.sh --missing                    names what this machine lacks for it, a line each
set -eu

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BUILD=$ROOT/build/ascend
LOG=$BUILD/build.log
SOCS="ascend910b,ascend910_93"
INSTALL_PATH=$ROOT/mindlora/ops/lib/ascend
KERNEL_OPTIONS=
OLDEST=8.3
# Packages that CANN's installation guide and its own packages (te) require of python3: module -> pip's name.
CANN_PACKAGES="attrs=attr cython=Cython numpy=numpy decorator=decorator sympy=sympy cffi=cffi pyyaml=yaml \
pathlib2=pathlib2 psutil=psutil protobuf=google.protobuf scipy=scipy requests=requests absl-py=absl \
cloudpickle=cloudpickle ml-dtypes=ml_dtypes tornado=tornado jinja2=jinja2"
# shellcheck source=scripts/cann.sh
source "$ROOT/scripts/cann.sh"

check_socs() {
    local soc
    [ -n "${SOCS//[, ]/}" ] || fail "--soc names no NPU: it must be ascend910b (Atlas A2), ascend910_93 (Atlas A3), or" \
        "both with a comma."
    for soc in ${SOCS//,/ }; do
        case $soc in
            ascend910b | ascend910_93) ;;
            ascend310p)
                fail "no kernel of mindlora can be built for ascend310p: it has no DataCopyPad, no bfloat16 and no" \
                    "flags between cores. mindlora uses MindSpore's own operators there; see docs/ascend.md." ;;
            *)
                fail "--soc names $soc: it must be ascend910b (Atlas A2), ascend910_93 (Atlas A3), or both with a" \
                    "comma." ;;
        esac
    done
}

# Prints the version in the toolkit's files, or nothing.
cann_version() {
    local file
    for file in "$CANN"/*/ascend_toolkit_install.info "$CANN"/ascend_toolkit_install.info "$CANN"/version.info \
        "$CANN"/compiler/version.info "$CANN"/runtime/version.info "$CANN"/version.cfg; do
        [ -f "$file" ] || continue
        # version=8.3.RC1, or of version.cfg version=[package version:CANN version]
        sed -nE 's/^[[:space:]]*(\w*_)?[Vv]ersion[[:space:]]*=[[:space:]]*\[?([0-9A-Za-z._:+-]+).*/\2/p' "$file" |
            head -n 1 | sed 's/.*://' | grep . && return
    done
    return 0
}

check_version() {
    local version
    version=$(cann_version)
    [ -n "$version" ] || fail "no file below $CANN names the version of CANN: is the toolkit complete? It must be" \
        "$OLDEST or newer."
    [ "$(printf '%s\n%s\n' "$OLDEST" "$version" | sort -V | head -n 1)" = "$OLDEST" ] ||
        fail "CANN $version was found at $CANN: the kernels need $OLDEST or newer. Install it, source its set_env.sh" \
            "and run this again."
    echo "CANN $version at $CANN"
}

# Without a driver, as in a container, CANN's tools find stubs of its libraries here. The stubs come last, after a
# driver's libraries.
add_stub_libraries() {
    local stubs
    stubs=$CANN/$(uname -m)-linux/devlib
    [ ! -d "$stubs" ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$stubs"
}

# Prints the CANN_PACKAGES that python3 lacks; not all versions of CANN need all of them. CANN's compiler runs
# on the python3 of PATH, which is often MindSpore's and not the one for which CANN was installed.
missing_packages() {
    # shellcheck disable=SC2086
    python3 - $CANN_PACKAGES <<'END' || true
import importlib.util
import sys

def missing(module):
    try:
        return importlib.util.find_spec(module) is None
    except ImportError:
        return True

pairs = [word.split("=") for word in sys.argv[1:]]
print(*(name for name, module in pairs if missing(module)))
END
}

# Prints the build requirements that this machine lacks, one per line.
print_missing() {
    local packages
    if ! (find_cann "$OLDEST") > /dev/null 2>&1; then
        echo "CANN: install $OLDEST or newer and source its set_env.sh"
    fi
    if ! command -v cmake > /dev/null; then echo "cmake: install it (3.16 or newer)"; fi
    packages=$(missing_packages)
    if [ -n "$packages" ]; then
        echo "Python packages that CANN's compiler may need: python3 -m pip install $packages"
    fi
}

# Runs a command of the build, and keeps its output.
logged() {
    "$@" 2>&1 | tee -a "$LOG"
    return "${PIPESTATUS[0]}"
}

# Prints the first error in the build's output, CMake's with its explanation.
first_error() {
    awk '
        !hit && !/^-- / && /(CMake Error|[Ee]rror:|ERROR|[Nn]ot found|No such file)/ {
            hit = 1
            line = $0
            if (!/^CMake Error/) exit
            next
        }
        hit && (/^  / || /^$/) { gsub(/^ +/, ""); line = line (NF ? " " $0 : ""); next }
        hit { exit }
        END {
            sub(/\.+$/, "", line)
            print hit ? substr(line, 1, 600) : "what CANN printed above says why"
        }
    ' "$LOG"
}

# Builds PyNative's own path to the kernels, a module for python3's MindSpore. Without it, ops.Custom serves PyNative
# too.
build_pynative_module() {
    if ! python3 -c 'import importlib.util as util, sys; sys.exit(util.find_spec("mindspore") is None)'; then
        echo "note: python3 has no MindSpore"
        return 1
    fi
    (cd "$ROOT" && python3 -m mindlora.ops.build_pynative)
}

while [ $# -gt 0 ]; do
    case $1 in
        --soc) [ $# -gt 1 ] || fail "--soc needs a name, or several with commas."; SOCS=$2; shift 2 ;;
        --install-path) [ $# -gt 1 ] || fail "--install-path needs a folder."; INSTALL_PATH=$2; shift 2 ;;
        --kernel-options) [ $# -gt 1 ] || fail "--kernel-options needs a text."; KERNEL_OPTIONS=$2; shift 2 ;;
        --missing) print_missing; exit ;;
        -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
        *) fail "$1 is not an option. The options are --soc, --install-path, --kernel-options, --missing and --help." ;;
    esac
done

check_socs
find_cann "$OLDEST"
check_version
add_stub_libraries
command -v cmake > /dev/null || fail "cmake was not found: install it (3.16 or newer)."
command -v "${CXX:-g++}" > /dev/null || fail "${CXX:-g++} was not found: install g++ for the host side of the kernels."
# Checked before the build, which takes minutes.
mkdir -p "$INSTALL_PATH" && [ -w "$INSTALL_PATH" ] ||
    fail "$INSTALL_PATH cannot be written to: name another folder with --install-path."

missing=$(missing_packages)
advice=""
if [ -n "$missing" ]; then
    advice=" If that does not say it: CANN's compiler runs on $(command -v python3), which lacks packages that CANN's"
    advice="$advice installation guide names: python3 -m pip install $missing"
    echo "note: python3 lacks $missing, which CANN's compiler may need"
fi
rm -rf "$BUILD"
mkdir -p "$BUILD"
logged cmake -S "$ROOT/ops" -B "$BUILD" -DASCEND_CANN_PACKAGE_PATH="$CANN" -DASCEND_COMPUTE_UNIT="${SOCS//,/;}" \
    -DMINDLORA_KERNEL_OPTIONS="${KERNEL_OPTIONS// /;}" || fail "the build was not configured: $(first_error).$advice"
logged cmake --build "$BUILD" --target binary package -j"$(nproc)" || fail "the build failed: $(first_error).$advice"

package=$(find "$BUILD" -maxdepth 1 -name 'custom_opp_*.run' | head -n 1)
[ -n "$package" ] || fail "the build made no package (custom_opp_*.run in $BUILD): $(first_error).$advice"
INSTALL_PATH=$(cd "$INSTALL_PATH" && pwd)
bash "$package" --quiet --install-path="$INSTALL_PATH"

vendor=$INSTALL_PATH/vendors/mindlora
[ -f "$vendor/bin/set_env.bash" ] || fail "$package did not install into $vendor: what it printed above says why."
build_pynative_module || echo "note: no module for PyNative was built: ops.Custom will call the kernels there."
cat <<END
Built for ${SOCS//,/ and } and installed in $vendor. None of it has run on an NPU before: test it first.
    bash scripts/check_aclnn.sh          calls every kernel through CANN alone, on an NPU
    source $vendor/bin/set_env.bash      before each Python that uses it
    mindlora doctor                      says which operators are taken from it
    pip install -e '.[test]' && MINDLORA_BACKEND=ascend python -m pytest tests/ops      in a checkout
END
