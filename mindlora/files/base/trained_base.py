"""Checks whether a base in files is the one that an adapter was trained on, as load_lora does for networks."""

from typing import Callable, List, Mapping, Optional

import numpy as np

from mindlora.core.errors import BaseMismatchError
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.nf4 import dequantize, quantize
from mindlora.core.numerics.pair_shapes import LINEAR, Shape
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.fingerprint import (
    base_difference,
    fingerprints_of_checkpoint,
    forms_that_differ,
    sampled_paths,
)
from mindlora.files.adapters.matching import check_base


def check_trained_base(
    adapter: Adapter,
    source: str,
    shapes: Mapping[str, Shape],
    read: Callable[[str], np.ndarray],
    kv_heads: Optional[int],
    on_base_mismatch: str,
) -> List[str]:
    """Compares a base with the one that an adapter says it was trained on; returns notes.

    ``adapter`` has its pairs as trained, neither joined nor split; ``shapes``, ``read`` and ``kv_heads``
    are as in fingerprints_of_checkpoint. An adapter that was trained on the base in NF4 gets a note that says how
    much the products with its weights differ; one trained on the base in integers, whose decoded values these are, a
    note on that.

    Raises BaseMismatchError if the bases differ, with on_base_mismatch "error".
    """
    stored = adapter.fingerprint
    if stored is None or on_base_mismatch == "ignore":
        return []
    comparable = []
    for fingerprint in fingerprints_of_checkpoint(adapter.paths, shapes, read, kv_heads):
        if fingerprint["shapes"] == stored.get("shapes"):
            comparable.append(fingerprint)
    if not comparable:
        # As elsewhere, bases cannot be compared for pairs that are joined or split here.
        return []
    current = next((each for each in comparable if not base_difference(stored, each)), comparable[0])
    forms = forms_that_differ(stored, current)
    if forms and forms[0].startswith("int"):
        return [
            f"The adapter was trained on its base as it is stored, in {forms[0]}, and this one is in float: only paths "
            "and shapes were compared. Check that both are one model."
        ]
    if forms:
        return [_nf4_note(adapter, shapes, read)]
    try:
        check_base(adapter, source, lambda: current, "error")
    except BaseMismatchError as mismatch:
        if on_base_mismatch == "error":
            raise
        return [str(mismatch)]
    return []


def _nf4_note(adapter: Adapter, shapes: Mapping[str, Shape], read: Callable[[str], np.ndarray]) -> str:
    """Returns how far the products with the sampled weights are from those with the same weights in NF4."""
    rng = np.random.default_rng(0)
    paths = [path for path in adapter.paths if adapter.layout(path) is LINEAR and path in shapes]
    sampled = sampled_paths(paths)
    squares = {"product": 0.0, "rounding": 0.0, "adapter": 0.0}
    for path in sampled:
        weight = to_float32(read(path))
        probe = rng.choice(np.array([-1, 1], np.float32), weight.shape[1])
        a, b = adapter.pair(path)
        results = {
            "product": weight @ probe,
            "rounding": weight @ probe - dequantize(quantize(weight, path)) @ probe,
            "adapter": adapter.scale(path) * (b @ (a @ probe)),
        }
        for name, result in results.items():
            squares[name] += float(np.square(result, dtype=np.float64).sum())
    size = squares["product"] or 1.0
    parts = {name: np.sqrt(square / size) for name, square in squares.items()}
    return (
        f"The adapter was trained on its base in NF4, but this one is in float: on a random probe the products with "
        f"{len(sampled)} of its {len(paths)} weights differ by {parts['rounding']:.1%}, where what the adapter adds is "
        f"{parts['adapter']:.1%}. Measure the merged model (mindlora eval), or serve the adapter on the base in NF4."
    )
