"""Arrays of the kernels' dtypes. NumPy has no bfloat16, so its bits are stored as uint16."""

from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

DTYPES = ("float32", "float16", "bfloat16")
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
# The largest error of rounding a result once: half a unit in the last place, relative to the result, or half of the
# smallest step between two numbers.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LEAST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


def store(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns values as they are stored in a dtype, rounded to nearest even."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype != "bfloat16":
        return values.astype(STORED[dtype])
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the values of a stored array in float64."""
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def normal(seed: int, dtype: str, *shapes: Sequence[int]) -> Any:
    """Returns stored arrays of normally distributed numbers; with several shapes, a list of them."""
    generator = np.random.default_rng(seed)
    arrays = [store(generator.standard_normal(shape), dtype) for shape in shapes]
    return arrays[0] if len(shapes) == 1 else arrays


def each_rank(dtypes: Sequence[str]) -> List[Tuple[str, int]]:
    """Returns pairs of a dtype and a rank; bfloat16, which differs from float16 in its casts alone, has few."""
    pairs = [(dtype, rank) for dtype in dtypes if dtype != "bfloat16" for rank in (1, 8, 13, 16, 64, 128, 256)]
    return [*pairs, ("bfloat16", 13), ("bfloat16", 256)]


def empty(dtype: str, *shape: int) -> np.ndarray:
    """Returns an array for a kernel to write to."""
    return np.zeros(shape, STORED[dtype])


def assert_rounded_once(got: np.ndarray, want: np.ndarray, magnitude: np.ndarray, dtype: str) -> None:
    """Asserts that a stored array is the oracle's result, summed in float32 and rounded to its dtype once.

    Args:
        got: A stored array.
        want: The oracle's result.
        magnitude: The oracle's result on the absolute values of its inputs; errors of float32 are relative to it.
        dtype: A name in DTYPES.
    """
    error = np.abs(widen(got, dtype) - want)
    allowed = 16 * 2.0**-24 * magnitude + ROUNDING[dtype] * np.abs(want) * 1.001 + LEAST[dtype]
    worst = np.argmax(error - allowed) if error.size else 0
    assert np.all(error <= allowed), (
        f"{np.sum(~(error <= allowed))} of {error.size} numbers are off, at worst {widen(got, dtype).flat[worst]} "
        f"instead of {np.asarray(want).flat[worst]} ({error.flat[worst] / allowed.flat[worst]:.3g} of what is allowed)"
    )


def moved(report: Dict[str, Any], without: Sequence[str] = ("tiling",)) -> int:
    """Returns the bytes of global memory that a kernel read and wrote, except in the buffers named in `without`."""
    return sum(traffic["read"] + traffic["written"] for name, traffic in report["gm"].items() if name not in without)


def over_the_bound(report: Dict[str, Any], least: int, vector_cores: int = 48) -> float:
    """Returns a kernel's time at best over the bound of all cores sharing its work.

    The time is the larger of bytes over bandwidth and the busiest core's repeats over clock; 889 bytes move in a
    repeat, and what is exchanged or read again moves twice as fast (kBytesPerRepeat and kCache in
    ops/ascendc_common/plan.h). The bound has the least bytes, and the vector cores' equal shares.
    """
    busiest = max(core["repeats"] for core in report["cores"])
    shared = sum(core["repeats"] for core in report["cores"] if core["name"].startswith("AIV")) / vector_cores
    bytes_at_best = (least + moved(report)) / 2
    return max(bytes_at_best, 889 * busiest) / max(least, 889 * shared)
