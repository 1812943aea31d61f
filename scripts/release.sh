#!/usr/bin/env bash
# Builds the files of a release into dist/: the source distribution, and wheels for x86-64 and aarch64 with the library
# of the CPU operators. Checks each of them, and publishes nothing (CONTRIBUTING.md says how).
#   bash scripts/release.sh            builds and checks; MindSpore is installed five times, a download of about 1 GB each
#   bash scripts/release.sh --check    only says whether the checkout can be released
#
#   MINDLORA_RELEASE_PYTHONS   the Pythons on PATH to install with (default: python3.9 python3.10 python3.11 python3.12)
set -eu
cd "$(dirname "$0")/.."
ROOT=$PWD
WORK=$ROOT/build/release
TOOLS=$WORK/tools/bin
DIST=$ROOT/dist
read -ra PYTHONS <<< "${MINDLORA_RELEASE_PYTHONS:-python3.9 python3.10 python3.11 python3.12}"
# Ubuntu 18.04's glibc. A wheel that needs a newer one was built with a newer compiler than Debian 12's.
OLDEST_GLIBC=2.27

fail() {
    echo "error: $*" >&2
    exit 1
}
step() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

# Fails unless HEAD can become the release of its version.
check_checkout() {
    local tagged other
    [ -z "$(git status --porcelain)" ] ||
        fail "the checkout has changes that are not committed: $(git status --porcelain | head -n 3 | tr '\n' ';')" \
            "commit or stash them."
    VERSION=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' mindlora/__init__.py)
    tagged=$(git rev-parse --quiet --verify "refs/tags/v$VERSION^{commit}" || true)
    [ -z "$tagged" ] || [ "$tagged" = "$(git rev-parse HEAD)" ] ||
        fail "version $VERSION is released: the tag v$VERSION is on ${tagged:0:10}. Raise __version__ in" \
            "mindlora/__init__.py."
    other=$(git tag --points-at HEAD 'v*' | grep -vx "v$VERSION" | head -n 1 || true)
    [ -z "$other" ] || fail "this commit is tagged $other, and __version__ in mindlora/__init__.py is $VERSION: correct one."
    mkdir -p "$WORK"
    awk -v heading="## [$VERSION]" '/^## / { inside = index($0, heading) == 1; next } inside' CHANGELOG.md > "$WORK/notes.md"
    grep -q '[^[:space:]]' "$WORK/notes.md" ||
        fail "CHANGELOG.md has no section \"## [$VERSION]\", or nothing in it: name there what \"Unreleased\" holds."
}

check_tools() {
    local python compiler
    [ "$(uname -m)" = x86_64 ] || fail "this machine is $(uname -m): the wheel for x86-64 is installed and run, so take one."
    for python in "${PYTHONS[@]}"; do
        "$python" -c "" 2> /dev/null ||
            fail "$python does not start: put it on PATH, or name others in MINDLORA_RELEASE_PYTHONS."
    done
    for compiler in x86_64-linux-gnu-g++ aarch64-linux-gnu-g++; do
        command -v $compiler > /dev/null ||
            fail "$compiler is missing: install it (apt-get install g++ g++-aarch64-linux-gnu on x86-64)."
    done
    "${PYTHONS[-1]}" -m venv "$WORK/tools"
    "$TOOLS/pip" install --quiet --disable-pip-version-check --requirement scripts/release-requirements.txt
}

# From git's own files, so that no ignored file of the checkout gets in.
build_sdist() {
    rm -rf "$WORK/checkout"
    mkdir "$WORK/checkout"
    git archive HEAD | tar -x -C "$WORK/checkout"
    "$TOOLS/python" -m build --sdist --outdir "$DIST" "$WORK/checkout" > "$WORK/sdist.log" 2>&1 ||
        fail "the source distribution cannot be built: $(tail -n 5 "$WORK/sdist.log")"
}

# build_wheel MACHINE: from the source distribution, with the compiler for that machine.
build_wheel() {
    local folder=$WORK/$1
    rm -rf "$folder"
    mkdir "$folder"
    tar -xzf "$DIST/mindlora-$VERSION.tar.gz" -C "$folder" --strip-components 1
    CXX=$1-linux-gnu-g++ "$TOOLS/python" -m build --wheel --outdir "$folder/wheel" \
        "-C--build-option=--plat-name=linux_$1" "$folder" > "$folder.log" 2>&1 ||
        fail "the wheel for $1 cannot be built: $(tail -n 5 "$folder.log")"
    # libgomp stays the system's, which MindSpore needs too: a second copy would bring its own threads.
    PATH=$TOOLS:$PATH "$TOOLS/auditwheel" repair --exclude libgomp.so.1 --wheel-dir "$DIST" "$folder/wheel/"*.whl \
        > "$folder.log" 2>&1 || fail "the wheel for $1 fits no manylinux: $(tail -n 5 "$folder.log")"
}

# check_wheel MACHINE: the wheel has one library for this machine, and needs no newer glibc than the oldest system has.
check_wheel() {
    local wheel glibc
    wheel=$(echo "$DIST/mindlora-$VERSION-py3-none-"*"_$1.whl")
    [ -f "$wheel" ] || fail "there is no wheel for $1, for every Python: dist/ holds $(ls "$DIST")."
    glibc=$(basename "$wheel" | sed -n 's/.*manylinux_\([0-9]*\)_\([0-9]*\)_.*/\1.\2/p')
    [ "$(printf '%s\n' "$glibc" $OLDEST_GLIBC | sort -V | tail -n 1)" = $OLDEST_GLIBC ] ||
        fail "$(basename "$wheel") needs glibc $glibc, newer than $OLDEST_GLIBC: build on Debian 12, or add what it" \
            "asks for to ops/cpu_common/older_systems.cc ($TOOLS/auditwheel show --help)."
    rm -rf "$WORK/unpacked-$1"
    "$TOOLS/python" -m zipfile -e "$wheel" "$WORK/unpacked-$1"
    LIBRARY=$WORK/unpacked-$1/mindlora/ops/lib/libmindlora_cpu.so
    readelf --file-header "$LIBRARY" | grep -qi "Machine:.*${1/_/-}" ||
        fail "$(basename "$wheel") holds no library for $1: $(readelf --file-header "$LIBRARY" 2>&1 | grep Machine)"
    echo "$(basename "$wheel"): $(stat -c %s "$wheel") bytes, its library $(stat -c %s "$LIBRARY")"
}

# check_installed PYTHON PACKAGE: in an otherwise empty environment, without a compiler.
check_installed() {
    local environment=$WORK/environment
    rm -rf "$environment"
    "$TOOLS/uv" venv --quiet --python "$1" "$environment"
    "$TOOLS/uv" pip install --quiet --python "$environment/bin/python" "$2" ||
        fail "$(basename "$2") cannot be installed with $1."
    (cd "$WORK" && CXX=none GLOG_v=3 "$environment/bin/python" -I "$ROOT/scripts/release_check.py" "$2") ||
        fail "$(basename "$2") does not work with $1."
    rm -rf "$environment"
}

check_checkout
echo "mindlora $VERSION at $(git rev-parse --short HEAD) can be released."
if [ "${1:-}" = --check ]; then exit; fi
check_tools
rm -rf "$DIST"

step "build"
build_sdist
echo "mindlora-$VERSION.tar.gz: $(stat -c %s "$DIST/mindlora-$VERSION.tar.gz") bytes"
for machine in x86_64 aarch64; do
    build_wheel $machine
    check_wheel $machine
done
"$TOOLS/twine" check --strict "$DIST"/*

step "the kernels of the wheel for aarch64, under QEMU"
MINDLORA_TEST_LIBRARY=$LIBRARY bash scripts/test_aarch64.sh

for python in "${PYTHONS[@]}"; do
    step "the wheel with $python"
    check_installed "$python" "$(echo "$DIST"/*_x86_64.whl)"
done

step "the source distribution with ${PYTHONS[-1]}"
check_installed "${PYTHONS[-1]}" "$DIST/mindlora-$VERSION.tar.gz"

step "all checks passed"
ls -l "$DIST"
