"""Compares one operator in one dtype with its reference.py, case by case.

    python scripts/verify_npu_operators.py lora_delta float16 --device Ascend --json lora_delta.json

scripts/verify_npu.sh runs it for all operators. The path is forced: the kernels on Ascend, the C++ library on a CPU. A
case is printed before it runs, so that the last line names it after a crash or a hang. The exit code is 1 if a case
failed.
"""

import argparse
import json
import os
import sys
from typing import Any, Dict, List, Optional

PATHS = {"Ascend": "ascend", "CPU": "cpu"}
DTYPES = ("float32", "float16", "bfloat16")
OPERATORS = ("lora_delta", "lora_linear", "nf4_linear", "multi_lora_delta", "multi_lora_slot_write")
MODES = ("graph", "pynative")


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operator", choices=OPERATORS)
    parser.add_argument("dtype", choices=DTYPES)
    parser.add_argument("--device", choices=list(PATHS), default="Ascend", help="default: Ascend")
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--json", metavar="FILE", help="write the result to this file, anew after each case")
    return parser.parse_args()


def main() -> int:
    """Runs all cases; returns the exit code."""
    given = arguments()
    os.environ.setdefault("GLOG_v", "3")
    os.environ["MINDLORA_BACKEND"] = PATHS[given.device]
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import mindspore as ms

    result: Dict[str, Any] = {"operator": given.operator, "dtype": given.dtype, "device": given.device}
    result.update(cases=0, worst=0.0, failures=[], running=None)
    for mode in MODES:
        ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE, device_target=given.device)
        run_cases(given, mode, result)
    result["running"] = None
    write(given.json, result)
    print(f"{result['cases']} cases, {len(result['failures'])} failed, worst error / allowed {result['worst']:.3f}")
    return 1 if result["failures"] else 0


def run_cases(given: argparse.Namespace, mode: str, result: Dict[str, Any]) -> None:
    """Runs the cases in one mode and updates ``result``. An exception counts as a failure of its case."""
    from verify_npu_cases import CASES, QUICK, Sizes

    for case in CASES[given.operator](given.dtype, QUICK if given.quick else Sizes(), given.device == "Ascend"):
        title = f"{mode}: {case.title}"
        print(title, flush=True)
        result.update(cases=result["cases"] + 1, running=title)
        write(given.json, result)
        try:
            share, problem = compare(case, case.run())
        except Exception as error:  # A device may raise anything.
            share, problem = 0.0, f"{type(error).__name__}: {first_words(error)}"
        result["worst"] = max(result["worst"], share)
        if problem:
            result["failures"].append({"case": title, "problem": problem})
            print(f"    FAILED: {problem}", flush=True)


def first_words(error: Exception) -> str:
    """Returns the first meaningful line of an error: MindSpore prints lines of dashes."""
    return next((line for line in map(str.strip, str(error).splitlines()) if line.strip("-")), "")


def compare(case: Any, found: List[Any]) -> "tuple[float, Optional[str]]":
    """Returns the largest error as a share of the allowed error, and the fault with the first wrong index, or None.

    ops/ascendc_check/bounds.py defines the allowed error.
    """
    import numpy as np
    from verify_npu_cases import bounds

    worst = 0.0
    for number, (actual, span) in enumerate(zip(found, case.spans)):
        lowest, highest = span
        if actual.shape != lowest.shape:
            return worst, f"result {number} has shape {actual.shape}, not {lowest.shape}"
        wrong = bounds.wrong(actual, span)
        if case.may_spoil is not None:
            wrong &= ~(case.may_spoil & ~np.isfinite(actual))
        if wrong.any():
            at = tuple(map(int, np.argwhere(wrong)[0]))
            return worst, (
                f"result {number} differs in {int(wrong.sum())} of {wrong.size} numbers, first at {at}: "
                f"{actual[at]:.7g}, not {bounds.text(span, at)}"
            )
        known = np.isfinite(actual) & np.isfinite(lowest) & (lowest < highest)
        off = np.abs(actual[known] - (lowest[known] + highest[known]) / 2)
        worst = max(worst, float((2 * off / (highest[known] - lowest[known])).max(initial=0)))
    return worst, None


def write(path: Optional[str], result: Dict[str, Any]) -> None:
    """Writes the result so far, if a path is given."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    sys.exit(main())
