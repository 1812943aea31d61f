"""The paths that the tests of the operators run: on an NPU, MINDLORA_BACKEND=ascend selects the Ascend kernels."""

import os

PATHS = ["ascend"] if os.environ.get("MINDLORA_BACKEND") == "ascend" else ["cpu", "composed"]
