#!/usr/bin/env bash
# Builds the CPU operators for aarch64, the processor of most NPU hosts, and runs the tests of their kernels under QEMU,
# against the same NumPy references. MindSpore itself runs natively and takes no part in them.
#   bash scripts/test_aarch64.sh               all of it: one minute on 2 cores
#   bash scripts/test_aarch64.sh -k paged      arguments go to pytest
# The cross compiler and QEMU are installed with apt-get if they are missing and the user is root.
set -eu
cd "$(dirname "$0")/.."

if [ "$(uname -m)" = aarch64 ]; then
    echo "This machine is aarch64: nothing is emulated."
    exec bash scripts/test.sh tests/ops "$@"
fi

PACKAGES="g++-aarch64-linux-gnu qemu-user"
present() { command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; } > /dev/null
if ! present && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "Installing $PACKAGES ..."
    apt-get update --quiet=2
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends $PACKAGES > /dev/null
fi
if ! present; then
    echo "error: aarch64-linux-gnu-g++ or qemu-aarch64 is missing: install the packages $PACKAGES" \
        "(apt-get install $PACKAGES)." >&2
    exit 1
fi

# MindSpore's own tests load a library for this machine, which is built with the environment.
(
    # shellcheck source=scripts/environment.sh
    source scripts/environment.sh
    make_tests_environment
)
export CXX=aarch64-linux-gnu-g++
export MINDLORA_TEST_EMULATOR="qemu-aarch64 -L /usr/aarch64-linux-gnu"
export OMP_NUM_THREADS=2
# Contexts of hundreds of tokens are tested only natively: the emulator takes a minute for them.
BITS=tests/ops/test_paged_attention_bits.py
exec bash scripts/test.sh tests/ops --ignore-glob='tests/ops/*ascend*' --ignore=tests/ops/test_backend.py \
    --deselect="$BITS::test_in_a_batch_as_alone" --deselect="$BITS::test_on_any_number_of_threads" \
    --deselect="$BITS::test_token_by_token_after_a_long_context" "$@"
