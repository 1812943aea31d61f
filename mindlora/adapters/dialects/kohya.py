"""kohya's form of a Stable Diffusion adapter: lora_unet_down_blocks_0_... .lora_down.weight, .lora_up.weight, .alpha.

The dots of a path are underscores in it, so a name is looked up among paths: the network's own if they are given, those
of Stable Diffusion 1, 2 and XL otherwise (mindlora.models.diffusion), where XL's original names are known too. A pair
without alpha has the alpha of its rank, so a scale of 1. A convolution may come as three matrices (LoCon's CP form):
lora_down [r, in, 1, 1], lora_mid [r, r, kh, kw] and lora_up [out, r, 1, 1]; A is then mid times down.
"""

import functools
import re
from typing import Dict, Iterable, List, Optional, Tuple

import numpy as np

from mindlora.adapters import metadata as adapter_metadata
from mindlora.adapters import parts
from mindlora.adapters.adapter import Adapter, is_alpha
from mindlora.adapters.dialects.diffusers import refuse_others
from mindlora.common.text import shown
from mindlora.config.variants.variant import PartKey
from mindlora.errors import AdapterFormatError, MissingTensorsError, ShapeMismatchError, UnexpectedTensorsError
from mindlora.models import diffusion
from mindlora.numerics.dtypes import from_float32, to_float32
from mindlora.numerics.pair_layouts import through_middle

NAME = "kohya"

# The prefix of a part; the first of a part's is written, except that XL's text encoders are te1 and te2.
_PREFIXES = {
    "lora_unet_": "unet",
    "lora_te_": "text_encoder",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
}
# The name of an alpha among the parts of a pair; it may be of any dtype.
ALPHA = "alpha"
_ENDINGS = {".lora_down.weight": "A", ".lora_up.weight": "B", ".lora_mid.weight": "mid", ".alpha": ALPHA}
_KEY = re.compile("^(" + "|".join(_PREFIXES) + r")([^.]+)(\.lora_(?:down|up|mid)\.weight|\.alpha)$")


def is_key(key: str) -> bool:
    """Tells whether ``key`` is of a pair in kohya's form."""
    return bool(_KEY.match(key))


def sort(keys: List[str], wanted: parts.Wanted, source: str) -> Tuple[Dict[str, PartKey], List[str]]:
    """Returns key -> (path that begins with its part, "A", "B", "mid" or "alpha"), and the keys that are not kohya's.

    Args:
        keys (list of str): The keys of the file.
        wanted (Wanted): Which part to read, and the paths that the names belong to.
        source (str): The file, for messages.

    Raises:
        AdapterFormatError: A name is none of the known paths'.
        AdapterError: There is nothing of the wanted part.
        UnexpectedTensorsError: A name is that of two paths.
    """
    matches = {key: match for key in keys if (match := _KEY.match(key))}
    parts.check_holds(wanted.part, {_PREFIXES[match[1]] for match in matches.values()}, source)
    found, unknown = {}, []
    for key, match in matches.items():
        part, name = _PREFIXES[match[1]], match[2]
        if wanted.part not in (None, part):
            continue
        path = _path(name, part, wanted.paths, source)
        if path is None:
            unknown.append(match[1] + name)
        else:
            found[key] = (f"{part}.{path}", _ENDINGS[match[3]])
    if unknown:
        raise AdapterFormatError(
            f"{source} holds names whose paths are not known: {', '.join(dict.fromkeys(unknown))}. Give the paths of "
            "the network's cells, one in a line of a file (--target-paths)."
        )
    return found, sorted(set(keys) - set(matches))


def complete(adapter: Adapter, source: str) -> None:
    """Takes alphas and middle matrices out of an adapter's tensors and puts them where they belong.

    Raises:
        AdapterFormatError: An alpha is not one number above 0.
        MissingTensorsError: There is an alpha or a middle matrix without a pair.
        ShapeMismatchError: A middle matrix does not belong between its pair.
    """
    for path in adapter.paths:
        alpha, mid = (adapter.tensors.pop((path, part), None) for part in (ALPHA, "mid"))
        if mid is not None:
            _put_in(mid, adapter, path, source)
        half = adapter.parts(path)
        if not half:
            raise MissingTensorsError(f"{source} holds an alpha or a lora_mid of {path}, and no pair that it is of.")
        # check_pairs names a pair without A, or with one that has no rank.
        rank = half["A"].shape[0] if "A" in half and half["A"].shape else 1
        value = float(rank) if alpha is None else _number(alpha)
        if alpha is not None and not is_alpha(value):
            raise AdapterFormatError(f"{source}: alpha of {path} is {shown(value)}; it must be one number above 0.")
        adapter.alphas[path] = value


def tensors(adapter: Adapter) -> Dict[str, np.ndarray]:
    """Returns the tensors under kohya's keys, with alphas that give the scales of the pairs as alpha / r.

    Raises:
        AdapterError: Some cell is of no known part, or the adapter holds what this form has no place for.
        UnexpectedTensorsError: Two cells have one name.
    """
    refuse_others(adapter, NAME)
    places = parts.with_parts(adapter, NAME)
    xl = any(part == "text_encoder_2" or part == "unet" and diffusion.is_xl(path) for _, part, path in places)
    prefixes = {part: prefix for prefix, part in reversed(_PREFIXES.items())}
    if xl:
        prefixes["text_encoder"] = "lora_te1_"
    written: Dict[str, np.ndarray] = {}
    owners: Dict[str, str] = {}
    for cell, part, path in places:
        name = prefixes[part] + flat(path)
        if name in owners:
            raise UnexpectedTensorsError(
                f"{owners[name]} and {cell} are both {name} in kohya's form. Write format 'diffusers'."
            )
        owners[name] = cell
        a, b = adapter.tensors[cell, "A"], adapter.tensors[cell, "B"]
        alpha = adapter.scale(cell) * len(a) if adapter.use_rslora else adapter.alphas[cell]
        stored = {".lora_down.weight": a, ".lora_up.weight": b, ".alpha": _scalar(alpha, a.dtype)}
        written.update({name + ending: array for ending, array in stored.items()})
    return written


def header(adapter: Adapter) -> Dict[str, str]:
    """Returns the header's strings."""
    return {"format": "pt", adapter_metadata.KEY: adapter_metadata.peft_text_of(adapter)}


def flat(path: str) -> str:
    """Returns a path as kohya writes it."""
    return path.replace(".", "_")


def _path(name: str, part: str, paths: Tuple[str, ...], source: str) -> Optional[str]:
    """Returns the path that a name stands for, or None if it is not known."""
    for known in (_given(part, paths), _known(part)):
        found = known.get(name, ())
        if len(found) > 1:
            raise UnexpectedTensorsError(
                f"{source} holds {name}, which can be {' and '.join(found)}: kohya's form does not tell them apart. "
                "Name the paths of the network that it was trained on (--target-paths)."
            )
        if found:
            return found[0]
    return None


@functools.lru_cache(maxsize=8)
def _given(part: str, paths: Tuple[str, ...]) -> Dict[str, Tuple[str, ...]]:
    """Returns kohya's name -> the network's paths with this name, for one part."""
    own = [parts.split(path) for path in paths]
    return _by_name((path, path) for of, path in own if of in (None, part))


@functools.lru_cache(maxsize=None)
def _known(part: str) -> Dict[str, Tuple[str, ...]]:
    """Returns the same for the cells that mindlora knows."""
    return _by_name(diffusion.known_paths(part).items())


def _by_name(pairs: Iterable[Tuple[str, str]]) -> Dict[str, Tuple[str, ...]]:
    found: Dict[str, Tuple[str, ...]] = {}
    for name, path in pairs:
        found[flat(name)] = tuple(dict.fromkeys((*found.get(flat(name), ()), path)))
    return found


def _put_in(mid: np.ndarray, adapter: Adapter, path: str, source: str) -> None:
    """Replaces A of the pair at ``path`` by mid times A: one convolution that does what the two of them did."""
    half = adapter.parts(path)
    pair = through_middle(half["A"], mid, half["B"]) if len(half) == 2 else None
    if pair is None:
        shapes = {name: list(array.shape) for name, array in {**half, "lora_mid": mid}.items()}
        raise ShapeMismatchError(
            f"{source}: lora_mid of {path} must be [r, r, kh, kw] between lora_down [r, in, 1, 1] and lora_up "
            f"[out, r, 1, 1], and the shapes are {shapes}."
        )
    adapter.tensors[path, "A"], adapter.tensors[path, "B"] = pair


def _number(array: np.ndarray) -> float:
    return (
        float(to_float32(array).reshape(()) if array.dtype.names else array.reshape(())) if array.size == 1 else np.nan
    )


def _scalar(value: float, dtype: np.dtype) -> np.ndarray:
    """Returns a number in the dtype of the pair, or in a wider one if that cannot hold it exactly."""
    for narrow in (dtype, np.dtype("<f4")):
        with np.errstate(over="ignore"):
            stored = from_float32(np.array(value, np.float32), narrow)
        if float(to_float32(stored)) == value:
            return stored
    return np.array(value, "<f8")
