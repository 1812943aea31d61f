"""The comparisons of scripts/verify_npu_operators.py in one mode, for all operators in one process.

operators.py graph|pynative DTYPE,DTYPE.. [MODULE] prints a line of JSON for each operator and dtype: both, how many
cases, and those that failed. MODULE is where the module is built first by which PyNative calls the kernels.
"""

import argparse
import json
import os
import pathlib
import sys

os.environ["MINDLORA_BACKEND"] = "ascend"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[4] / "scripts"))

import mindspore as ms
import verify_npu_operators as operators

from mindlora.ops import ascend, build_pynative
from mindlora.ops.build import LIBRARY

mode, dtypes = sys.argv[1], sys.argv[2].split(",")
ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
if len(sys.argv) > 3:
    build_pynative.PYNATIVE_PATH = ascend.PYNATIVE_PATH = sys.argv[3]
    build_pynative.build()
print("@called", json.dumps(ascend.describe(LIBRARY)), flush=True)
for operator in operators.OPERATORS:
    for dtype in dtypes:
        asked = argparse.Namespace(operator=operator, dtype=dtype, device="Ascend", quick=True, json=None)
        result = {"cases": 0, "worst": 0.0, "failures": []}
        operators.run_cases(asked, mode, result)
        print("@compared", json.dumps([operator, dtype, result["cases"], result["failures"]]), flush=True)
