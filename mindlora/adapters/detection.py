"""Whose form a file of tensors is in, told by its keys: for each key the cell and the part that it is."""

import functools
import re
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from mindlora.adapters import parts, unreadable
from mindlora.adapters.adapter import Adapter
from mindlora.adapters.dialects import diffusers, kohya, mindformers, mlx, peft, peft_megatron
from mindlora.config.variants.variant import PartKey
from mindlora.errors import AdapterFormatError, UnexpectedTensorsError
from mindlora.models import names
from mindlora.numerics.pair_layouts import Shape


class File(NamedTuple):
    """What is known about a file of tensors before they are read.

    Attributes:
        path (str): The file.
        keys (list of str): The keys of its tensors.
        shape_of (callable): Takes a key; returns the tensor's shape.
        header (dict): The strings in its header.
        saved_modules (tuple of str): Parameters of saved modules that mindlora's metadata names.
        mlx (dict): mlx-lm's configuration beside it, or None.
        wanted (Wanted): What is to be read of a Stable Diffusion adapter.
        refusals (list of str): If given, what is not known in PEFT's form is added to it in words, and left out.
    """

    path: str
    keys: List[str]
    shape_of: Callable[[str], Shape]
    header: Mapping[str, str]
    saved_modules: Tuple[str, ...]
    mlx: Optional[Dict[str, Any]]
    wanted: parts.Wanted
    refusals: Optional[List[str]] = None


class Sorted(NamedTuple):
    """The keys of a file, sorted.

    Attributes:
        dialect (str): Whose form it is.
        part_keys (dict): Key -> PartKey, for LoRA's tensors.
        parameters (dict): Key -> parameter, for saved modules.
        token_rows (dict): Key -> path of an embedding, for rows of its table.
        complete (callable): Takes the adapter with its tensors and gives it what else this form says.
    """

    dialect: str
    part_keys: Dict[str, PartKey]
    parameters: Dict[str, str]
    complete: Callable[[Adapter], None] = lambda adapter: None
    token_rows: Mapping[str, str] = MappingProxyType({})


def sort_keys(file: File) -> Sorted:
    """Returns the keys of a file, sorted by what they are.

    Raises:
        AdapterFormatError: No known form fits, or two do.
        UnexpectedTensorsError: Some keys are of another form than the others.
    """
    if any(peft.parse_key(key) for key in file.keys):
        return _peft(file)
    if file.mlx and file.keys:
        return Sorted(
            mlx.NAME,
            mlx.sort(file.keys, file.path),
            {},
            functools.partial(mlx.complete, content=file.mlx, source=file.path),
        )
    if any(map(kohya.is_key, file.keys)):
        unreadable.refuse_keys(file.keys, file.path)
        part_keys, unknown = kohya.sort(file.keys, file.wanted, file.path)
        _refuse_unknown(unknown, file.path)
        return Sorted(kohya.NAME, part_keys, {}, functools.partial(kohya.complete, source=file.path))
    if any(map(diffusers.parse_key, file.keys)):
        unreadable.refuse_keys(file.keys, file.path)
        part_keys, unknown = diffusers.sort(file.keys, file.wanted, file.path)
        _refuse_unknown(unknown, file.path)
        settings = functools.partial(diffusers.settings_of, header=file.header, source=file.path)
        return Sorted(diffusers.NAME, part_keys, {}, settings)
    return _mindformers(file)


def _peft(file: File) -> Sorted:
    part_keys = {key: found for key in file.keys if (found := peft.parse_key(key))}
    parameters = {key: name for key in file.keys if key not in part_keys and (name := peft.parse_saved_module_key(key))}
    rows = {key: path for key in file.keys if (path := peft.parse_token_rows_key(key))}
    _refuse_unknown(sorted(set(file.keys) - set(part_keys) - set(parameters) - set(rows)), file.path, file.refusals)
    reorder = functools.partial(peft_megatron.reorder, keys=file.keys)
    return Sorted(peft.NAME, part_keys, parameters, reorder, rows)


def _mindformers(file: File) -> Sorted:
    dialect = mindformers.detect(file.keys)
    if not dialect:
        unreadable.refuse_without_adapter(file.keys, file.path)
    if dialect is mindformers.SLORA and _is_mlx(file):
        return Sorted(mlx.NAME, mlx.sort(file.keys, file.path), {}, functools.partial(mlx.transpose, source=file.path))
    part_keys = mindformers.sort(file.keys, dialect)
    if any(map(mindformers.is_adalora_key, file.keys)):
        raise AdapterFormatError(
            f"{file.path} is a checkpoint of a run with use_adalora, which keeps Lambda apart from A. Take the folder "
            "that LoraCheckpoint wrote at this step, or call save_lora on the network with this checkpoint loaded."
        )
    unknown = sorted(key for key in set(file.keys) - set(part_keys) if mindformers.is_adapter_key(key))
    if unknown:
        raise UnexpectedTensorsError(
            f"{file.path} holds LoRA tensors of {dialect.name}, and others in another form: "
            f"{unreadable.listed_keys(unknown)}. Keep one form in a file."
        )
    return Sorted(dialect.name, part_keys, {name: name for name in file.saved_modules if name in file.keys})


def _is_mlx(file: File) -> bool:
    """Tells whether a file of ``...lora_a`` is mlx-lm's, without its configuration, and not MindFormers' slora's.

    The names decide. Names that both could have are mlx-lm's if only that can be, by the shapes of all pairs.

    Raises:
        AdapterFormatError: Both can be.
    """
    part_keys = {key: found for key in file.keys if (found := mindformers.parse_key(key, mindformers.SLORA))}
    raw = {re.sub(r"\.?lora_[ab]$", "", key) for key in part_keys}
    if file.path.endswith(".ckpt") or not all(names.to_mindformers(path) != path for path in raw):
        return False
    pairs: Dict[str, Dict[str, Shape]] = {}
    for key, (path, part) in part_keys.items():
        pairs.setdefault(path, {})[part] = tuple(file.shape_of(key))
    transposed = mlx.is_transposed(pairs)
    if transposed is None:
        raise AdapterFormatError(
            f"{file.path} can be mlx-lm's (A [in, r]) or MindFormers' slora's (A [r, in]): names and shapes fit both. "
            "Put the adapter_config.json that it was saved with beside it."
        )
    return transposed


def _refuse_unknown(keys: Iterable[str], path: str, refusals: Optional[List[str]] = None) -> None:
    unknown = list(keys)
    if not unknown:
        return
    message = f"{path} holds tensors that are not LoRA's: {unreadable.listed_keys(unknown)}."
    if refusals is None:
        raise UnexpectedTensorsError(message)
    refusals.append(message)
