"""kohya's form of a Stable Diffusion adapter: lora_unet_down_blocks_0_... .lora_down.weight, .lora_up.weight, .alpha.

The dots of a path are underscores in it, so a name is looked up among paths: the network's own if they are given, those
of Stable Diffusion 1, 2 and XL otherwise (mindlora.models.architectures.diffusion), where XL's original names are known
too. A pair without alpha has the alpha of its rank, so a scale of 1. A convolution may come as three matrices (LoCon's
CP form): lora_down [r, in, 1, 1], lora_mid [r, r, kh, kw] and lora_up [out, r, 1, 1]; A is then mid times down.
"""

import functools
import re
from typing import Dict, Iterable, Optional, Tuple

import numpy as np

from mindlora.core.errors import AdapterFormatError, MissingTensorsError, ShapeMismatchError, UnexpectedTensorsError
from mindlora.core.numerics.dtypes import from_float32, to_float32
from mindlora.core.numerics.pair_shapes import through_middle
from mindlora.core.text import shown
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters import parts
from mindlora.files.adapters.adapter import ALPHA, Adapter
from mindlora.files.adapters.dialects import foreign
from mindlora.files.adapters.dialects.dialect import Dialect, File, Keys, unknown_tensors, write_file
from mindlora.files.adapters.dialects.diffusers import refuse_others
from mindlora.models.architectures import diffusion
from mindlora.models.variants.variant import PartKey

# The prefixes of a part; the first one is written, except that XL's text encoders are te1 and te2.
_PREFIXES = {
    "lora_unet_": "unet",
    "lora_te_": "text_encoder",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
}
# The name of an alpha among the parts of a pair; it may be of any dtype.
_ALPHA = "alpha"
_ENDINGS = {".lora_down.weight": "A", ".lora_up.weight": "B", ".lora_mid.weight": "mid", ".alpha": _ALPHA}
_KEY = re.compile("^(" + "|".join(_PREFIXES) + r")([^.]+)(\.lora_(?:down|up|mid)\.weight|\.alpha)$")


class Kohya(Dialect):
    """One file for a UNet, its text encoders, or all of them."""

    name = form = "kohya"
    ending = ".safetensors"
    number_parts = (_ALPHA,)

    def matches(self, file: File) -> bool:
        return any(map(_KEY.match, file.keys))

    def sort(self, file: File) -> Keys:
        """Returns key -> (path that begins with its part, "A", "B", "mid" or "alpha").

        Raises AdapterError if a name matches no known path or several, or no tensor belongs to the requested part.
        """
        foreign.refuse_keys(file.keys, file.path)
        matches = {key: match for key in file.keys if (match := _KEY.match(key))}
        parts.check_holds(file.wanted.part, {_PREFIXES[match[1]] for match in matches.values()}, file.path)
        part_keys: Dict[str, PartKey] = {}
        unknown = []
        for key, match in matches.items():
            prefix, name, ending = match.groups()
            part = _PREFIXES[prefix]
            if file.wanted.part not in (None, part):
                continue
            path = _path(name, part, file.wanted.paths, file.path)
            if path is None:
                unknown.append(prefix + name)
            else:
                part_keys[key] = f"{part}.{path}", _ENDINGS[ending]
        if unknown:
            raise AdapterFormatError(
                f"{file.path} holds names whose paths are not known: {', '.join(dict.fromkeys(unknown))}. Give the "
                "paths of the network's cells, one in a line of a file (--target-paths)."
            )
        if len(matches) < len(file.keys):
            raise unknown_tensors(set(file.keys) - set(matches), file)
        return Keys(part_keys)

    def complete(self, adapter: Adapter, file: File) -> None:
        """Moves alphas and middle matrices from an adapter's tensors to where they belong.

        Raises AdapterError if one of them has no pair, does not fit it, or is not a number above 0.
        """
        for path in adapter.paths:
            alpha = adapter.tensors.pop((path, _ALPHA), None)
            mid = adapter.tensors.pop((path, "mid"), None)
            if mid is not None:
                _put_in(mid, adapter, path, file.path)
            halves = adapter.parts(path)
            if not halves:
                raise MissingTensorsError(
                    f"{file.path} holds an alpha or a lora_mid of {path} without its pair. Copy or save the file again."
                )
            # check_pairs names a pair without A, or with one that has no rank.
            rank = halves["A"].shape[0] if "A" in halves and halves["A"].shape else 1
            value = float(rank) if alpha is None else _number(alpha)
            if alpha is not None and value not in ALPHA:
                raise AdapterFormatError(
                    f"{file.path}: alpha of {path} is {shown(value)}; it must be one number above 0."
                )
            adapter.alphas[path] = value

    def write(self, adapter: Adapter, path: str) -> None:
        write_file(path, tensors(adapter), adapter_metadata.peft_header(adapter))


def tensors(adapter: Adapter) -> Dict[str, np.ndarray]:
    """Returns the tensors under kohya's keys, with alphas that give the scales of the pairs as alpha / r.

    Raises AdapterError if the form has no place for a part, or two cells share a name.
    """
    refuse_others(adapter, Kohya.form)
    cells = parts.with_parts(adapter, Kohya.form)
    xl = any(part == "text_encoder_2" or part == "unet" and diffusion.is_xl(path) for _, part, path in cells)
    prefixes = {part: prefix for prefix, part in reversed(_PREFIXES.items())}
    if xl:
        prefixes["text_encoder"] = "lora_te1_"
    written: Dict[str, np.ndarray] = {}
    owners: Dict[str, str] = {}
    for cell, part, path in cells:
        name = prefixes[part] + flat(path)
        if name in owners:
            raise UnexpectedTensorsError(
                f"{owners[name]} and {cell} are both {name} in kohya's form. Write format 'diffusers'."
            )
        owners[name] = cell
        a = adapter.tensors[cell, "A"]
        alpha = adapter.scale(cell) * len(a) if adapter.use_rslora else adapter.alphas[cell]
        written[f"{name}.lora_down.weight"] = a
        written[f"{name}.lora_up.weight"] = adapter.tensors[cell, "B"]
        written[f"{name}.alpha"] = _scalar(alpha, a.dtype)
    return written


def flat(path: str) -> str:
    """Returns a path in kohya's spelling."""
    return path.replace(".", "_")


def _path(name: str, part: str, paths: Tuple[str, ...], source: str) -> Optional[str]:
    """Returns the path that a name stands for, or None if it is not known."""
    for by_name in (_network_paths(part, paths), _stable_diffusion_paths(part)):
        candidates = by_name.get(name, ())
        if len(candidates) > 1:
            raise UnexpectedTensorsError(
                f"{source} holds {name}, which can be {' and '.join(candidates)}: kohya's form does not tell them "
                "apart. Name the paths of the network that it was trained on (--target-paths)."
            )
        if candidates:
            return candidates[0]
    return None


@functools.lru_cache(maxsize=8)
def _network_paths(part: str, paths: Tuple[str, ...]) -> Dict[str, Tuple[str, ...]]:
    """Returns kohya's name -> the network's paths with this name, for one part."""
    by_part = [parts.split(path) for path in paths]
    return _by_name((path, path) for owner, path in by_part if owner in (None, part))


@functools.lru_cache(maxsize=None)
def _stable_diffusion_paths(part: str) -> Dict[str, Tuple[str, ...]]:
    """Returns kohya's name -> the paths with this name, for the known cells of a part."""
    return _by_name(diffusion.known_paths(part).items())


def _by_name(pairs: Iterable[Tuple[str, str]]) -> Dict[str, Tuple[str, ...]]:
    paths: Dict[str, Tuple[str, ...]] = {}
    for name, path in pairs:
        others = paths.get(flat(name), ())
        if path not in others:
            paths[flat(name)] = (*others, path)
    return paths


def _put_in(mid: np.ndarray, adapter: Adapter, path: str, source: str) -> None:
    """Replaces A of the pair at ``path`` by mid times A, one convolution that equals the two."""
    halves = adapter.parts(path)
    pair = through_middle(halves["A"], mid, halves["B"]) if len(halves) == 2 else None
    if pair is None:
        shapes = {name: list(array.shape) for name, array in {**halves, "lora_mid": mid}.items()}
        raise ShapeMismatchError(
            f"{source}: lora_mid of {path} must be [r, r, kh, kw] between lora_down [r, in, 1, 1] and lora_up "
            f"[out, r, 1, 1], but the shapes are {shapes}."
        )
    adapter.tensors[path, "A"], adapter.tensors[path, "B"] = pair


def _number(array: np.ndarray) -> float:
    """Returns the number in an array of one, or NaN for any other."""
    if array.size != 1:
        return np.nan
    # bfloat16 is the only dtype here that is made of fields.
    return float(to_float32(array).reshape(()) if array.dtype.names else array.reshape(()))


def _scalar(value: float, dtype: np.dtype) -> np.ndarray:
    """Returns a number in the dtype of the pair, or in a wider one if that cannot hold it exactly."""
    for narrow in (dtype, np.dtype("<f4")):
        with np.errstate(over="ignore"):
            stored = from_float32(np.array(value, np.float32), narrow)
        if float(to_float32(stored)) == value:
            return stored
    return np.array(value, "<f8")
