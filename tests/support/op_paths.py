"""The paths that the tests of the operators judge: on an NPU, MINDLORA_BACKEND=ascend names the Ascend kernels."""

import os

PATHS = ["ascend"] if os.environ.get("MINDLORA_BACKEND") == "ascend" else ["cpu", "composed"]
