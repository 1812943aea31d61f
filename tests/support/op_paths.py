"""What the tests of the operators run on. Paths: on an NPU, MINDLORA_BACKEND=ascend selects the Ascend kernels."""

import os

PATHS = ["ascend"] if os.environ.get("MINDLORA_BACKEND") == "ascend" else ["cpu", "composed"]
# The instruction sets of the CPU's kernels, by the numbers that mindlora_set_isa takes.
ISAS = ["plain", "avx2", "avx512", "avx512_bf16", "amx_bf16"]
