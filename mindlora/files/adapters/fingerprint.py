"""A short fingerprint of the base weights under an adapter, to detect that an adapter is loaded onto another base."""

import hashlib
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from mindlora.core.errors import LoraError
from mindlora.core.numerics.dtypes import BFLOAT16, FLOATS, dtype_name, from_float32, to_float32
from mindlora.core.numerics.pair_shapes import Shape
from mindlora.files.adapters.joined_pairs import joined_weight
from mindlora.models import names
from mindlora.models.architectures.joined_rows import PartAfterPart, QueryKeyValueInTurn, RowLayout

# Reactions of load_lora and a YAML to an adapter that was trained on another base.
ON_BASE_MISMATCH = ("error", "warn", "ignore")
# Reading every weight of a 7B base back from the device takes seconds; a few, evenly spread, identify it.
_SAMPLED_WEIGHTS = 8
_SAMPLES_PER_WEIGHT = 1024
# If two copies of a base differ in dtype, one of them was rounded to one of these.
_ROUNDED = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16}


def sampled_paths(paths: Iterable[str]) -> List[str]:
    """Returns the paths whose weights are sampled."""
    ordered = sorted(paths)
    count = min(_SAMPLED_WEIGHTS, len(ordered))
    indices = {round(index) for index in np.linspace(0, len(ordered) - 1, count)}
    return [ordered[index] for index in sorted(indices)]


def sampled_elements(weight: np.ndarray) -> np.ndarray:
    """Returns the sampled elements of a weight, or of its codes if it is quantized."""
    # Not of reshape(-1), which would copy a transposed weight.
    return weight[np.unravel_index(_sampled_places(weight.size), weight.shape)]


def sampled_elements_of_rows(parts: Sequence[np.ndarray], order: np.ndarray) -> np.ndarray:
    """Returns sampled_elements of the weight with the rows of ``parts`` in another order, without building it.

    ``order`` holds, for each of its rows, the row's number in the parts, counted one part after the other.
    """
    rows, columns = np.divmod(_sampled_places(len(order) * parts[0].shape[1]), parts[0].shape[1])
    rows = order[rows]
    sampled = np.empty(len(rows), parts[0].dtype)
    begin = 0
    for part in parts:
        inside = (rows >= begin) & (rows < begin + len(part))
        sampled[inside] = part[rows[inside] - begin, columns[inside]]
        begin += len(part)
    return sampled


def _sampled_places(size: int) -> np.ndarray:
    return np.linspace(0, size - 1, min(_SAMPLES_PER_WEIGHT, size)).astype(np.int64)


def fingerprint_from(shapes: Dict[str, Tuple[int, ...]], samples: Dict[str, np.ndarray]) -> Dict[str, str]:
    """Returns the fingerprint of the shapes of all adapted weights by path, and of the elements of sampled ones.

    Returns:
        dict of "shapes" and "values", each the first 16 digits of a SHA-256. If all samples are of one float dtype,
        also "dtype", its name, and hashes "float16" and "bfloat16" of the samples rounded to these.
    """
    structure = hashlib.sha256()
    for path in sorted(shapes):
        structure.update(f"{path}{tuple(shapes[path])};".encode())
    arrays = [to_float32(samples[path]) for path in sorted(samples)]
    fingerprint = {"shapes": _digits(structure), "values": _hash_of(arrays)}
    dtypes = {array.dtype for array in samples.values()}
    if len(dtypes) == 1 and dtypes <= set(FLOATS):
        fingerprint["dtype"] = dtype_name(dtypes.pop())
        # Numbers that overflow become infinity in both copies.
        with np.errstate(over="ignore"):
            for name, dtype in _ROUNDED.items():
                fingerprint[name] = _hash_of([to_float32(from_float32(array, dtype)) for array in arrays])
    return fingerprint


def _hash_of(arrays):
    values = hashlib.sha256()
    for array in arrays:
        values.update(np.ascontiguousarray(array).tobytes())
    return _digits(values)


def _digits(value):
    return value.hexdigest()[:16]


def forms_that_differ(stored: dict, current: dict) -> Optional[Tuple[str, str]]:
    """Returns the quantization of the two bases ("float": none) if their values cannot be compared, or None.

    ``stored`` is the adapter's fingerprint and ``current`` that of this base. LoftQ changes the base itself, so an
    adapter trained on LoftQ's base suits no other base; then values are compared.
    """
    forms = forms_of(stored, current)
    return None if forms[0] == forms[1] or "loftq" in forms else forms


def forms_of(stored: dict, current: dict) -> Tuple[str, str]:
    """Returns the forms of the weights under two fingerprints: "float", "nf4" or "loftq"."""
    return stored.get("quantization", "float"), current.get("quantization", "float")


def base_difference(stored: dict, current: dict, exact: bool = False) -> str:
    """Returns a sentence on how two fingerprints differ, or "" if they agree.

    With ``exact``, a copy in another dtype is another base.
    """
    if stored.get("shapes") != current["shapes"]:
        return "the adapted weights have other paths or shapes"
    if stored.get("values") == current["values"] or (not exact and _are_copies(stored, current)):
        return ""
    return "the adapted weights have other values (another checkpoint, or another dtype)"


def _are_copies(stored, current):
    """Returns whether the two are one base in two dtypes: equal once the wider one is rounded like the narrower one."""
    dtypes = {stored.get("dtype"), current.get("dtype")}
    return None not in dtypes and len(dtypes) == 2 and any(stored.get(name) == current.get(name) for name in _ROUNDED)


# Fingerprints of a base with separate cells, as networks had it in training that join some of them.

# The orders of rows in which MindFormers' mcore models train, as use_contiguous_weight_layout_attention and
# use_interleaved_weight_layout_mlp select them: name of a joined cell -> its layout, if not its record's.
_QKV, _GATE_UP = {"linear_qkv": QueryKeyValueInTurn()}, {"linear_fc1": PartAfterPart()}
ROW_ORDERS: Tuple[Mapping[str, RowLayout], ...] = ({}, _QKV, _GATE_UP, {**_QKV, **_GATE_UP})


def mcore_path(path: str) -> str:
    """Returns the path of mcore's cell for the one at ``path``."""
    legacy = names.to_mindformers(path)
    return names.to_mcore(names.joined_path(legacy) or legacy)


def sample_of_joined(
    path: str, parts: Sequence[np.ndarray], kv_heads: Optional[int], layouts: Mapping[str, RowLayout]
) -> np.ndarray:
    """Returns sampled_elements of the joined cell's weight at ``path``, in mcore, from its parts' elements."""
    if len(parts) == 1:
        return sampled_elements(parts[0])
    rows = [len(part) for part in parts]
    numbers = np.split(np.arange(sum(rows)), np.cumsum(rows)[:-1])
    order = joined_weight(path, numbers, kv_heads, layouts.get(path.rpartition(".")[2]))
    return sampled_elements_of_rows(parts, order)


def fingerprints_of_checkpoint(
    paths: Sequence[str], shapes: Mapping[str, Shape], read: Callable[[str], np.ndarray], kv_heads: Optional[int]
) -> Iterator[dict]:
    """Yields the fingerprints of a base in files under an adapter, one for each possible form in training.

    These are the fingerprints of the cells as in the files, of the legacy models' joined cells, and of mcore's in each
    order of rows, except forms for which the base lacks a weight or whose rows cannot be joined.

    Args:
        paths (sequence of str): The adapted cells (MindFormers' names).
        shapes (mapping): Path -> shape of the base's weight there.
        read (callable): Takes a path, and returns the weight. It is called only for sampled weights.
        kv_heads (int): Key-value heads, if known.
    """
    yield from _fingerprints({path: [path] for path in paths}, shapes, read, kv_heads)
    legacy: Dict[str, List[str]] = {}
    mcore: Dict[str, List[str]] = {}
    for path in paths:
        joined = names.joined_path(path)
        legacy[joined or path] = mcore[mcore_path(path)] = names.joined_parts(joined) if joined else [path]
    yield from _fingerprints(legacy, shapes, read, kv_heads)
    yield from _fingerprints(mcore, shapes, read, kv_heads, ROW_ORDERS)


def _fingerprints(
    cells: Mapping[str, List[str]],
    shapes: Mapping[str, Shape],
    read: Callable[[str], np.ndarray],
    kv_heads: Optional[int],
    orders: Sequence[Mapping[str, RowLayout]] = ({},),
) -> Iterator[dict]:
    """Yields the base's fingerprint for each order of rows that its joined cells may have.

    ``cells`` is the path of each trained cell -> the paths of its parts in the base.
    """
    if not all(part in shapes for parts in cells.values() for part in parts):
        return
    sizes = {}
    for path, parts in cells.items():
        sizes[path] = (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:])
    weights = {path: list(map(read, cells[path])) for path in sampled_paths(cells)}
    for layouts in orders:
        try:
            samples = {path: sample_of_joined(path, parts, kv_heads, layouts) for path, parts in weights.items()}
        except LoraError:
            # The rows of a joined cell need sizes of the base that are unknown.
            continue
        yield fingerprint_from(sizes, samples)
