"""Dialect: the interface of a form of adapter files; reading a file is the same for all forms."""

import abc
import dataclasses
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import AdapterFormatError, MissingTensorsError, RankMismatchError, UnexpectedTensorsError
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.numerics.dtypes import FLOATS, dtype_name
from mindlora.core.text import listed, shown
from mindlora.files.adapters import matching, parts
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects.peft_config import NO_EXTRAS, Extras, PeftConfig
from mindlora.models import names
from mindlora.models.variants.registry import STORED
from mindlora.models.variants.variant import PartKey

_MAX_NAME = 1000
_ONE_SAVE = "Use the tensors and the configuration of one save."


@dataclasses.dataclass
class File:
    """A file of tensors that is open for reading, and the facts that are known before they are read.

    Attributes:
        fetch (callable): Takes a key; returns the array.
        metadata (dict): mindlora's metadata in it, as adapters.metadata.parse returns it.
        header (mapping): The strings in its header.
        source (str): The adapter for messages: the file, or the folder that it is in.
        extras (Extras): Features of PEFT that the caller supports besides plain pairs.
        config (PeftConfig): The adapter_config.json beside it.
    """

    path: str
    keys: List[str]
    fetch: Callable[[str], np.ndarray]
    metadata: Dict[str, Any]
    header: Mapping[str, str] = dataclasses.field(default_factory=dict)
    source: str = ""
    wanted: parts.Wanted = parts.ALL
    extras: Extras = NO_EXTRAS
    config: Optional[PeftConfig] = None

    def __post_init__(self) -> None:
        self.source = self.source or self.path


class Keys(NamedTuple):
    """The keys of a file by kind: LoRA's tensors, saved modules, rows of an embedding's table."""

    part_keys: Dict[str, PartKey]
    saved_modules: Mapping[str, str] = MappingProxyType({})
    token_rows: Mapping[str, str] = MappingProxyType({})


class Dialect(abc.ABC):
    """One form of adapter files. Each is an entry of dialects.registry.DIALECTS; none depends on another.

    Attributes:
        name (str): For messages.
        form (str): Its name where users choose what to write; "" for a form that is only read.
        ending (str): The ending of the file that is written; "" for a folder.
        world (str): The origin of its names of cells, one of models.architecture.WORLDS; "" for a diffusion model's.
        holds_modules (bool): Whether it has a place for saved modules.
        stacks_experts (bool): Whether it holds pairs of a layer's experts only as stacks.
        weights (tuple of str): Names of the file with the tensors in a folder of this form.
        number_parts (tuple of str): Parts that are single numbers, of any dtype.
    """

    name = ""
    form = ""
    ending = ""
    world = ""
    holds_modules = False
    stacks_experts = False
    weights: Tuple[str, ...] = ()
    number_parts: Tuple[str, ...] = ()

    @abc.abstractmethod
    def matches(self, file: File) -> bool:
        """Returns whether a file, which no earlier form of the registry matches, is in this form."""

    @abc.abstractmethod
    def sort(self, file: File) -> Keys:
        """Returns the keys of a file by kind; raises AdapterError if it holds tensors that cannot be read."""

    def write(self, adapter: Adapter, path: str) -> None:
        """Writes an adapter with complete, finite pairs and a known scale in one atomic step.

        Raises AdapterError if the form has no place for some part of it.
        """
        raise NotImplementedError(f"{self.name} is only read.")

    def prepared(self, adapter: Adapter) -> Adapter:
        """Returns an adapter as the form can hold it, if the form allows fewer ranks or scales than adapters have."""
        return adapter

    def weights_in(self, folder: str, names: List[str]) -> Optional[str]:
        """Returns the name of the file in a folder that holds the tensors, or None if the folder is not in this form.

        "" stands for the folder itself, if several files hold them.
        """
        return next((name for name in self.weights if name in names), None)

    def is_embedding(self, key: str, path: str) -> bool:
        """Returns whether the tensor under ``key``, of the cell at ``path``, belongs to an embedding."""
        return names.is_embedding(path)

    def parts_of(self, key: str, part_key: PartKey, array: np.ndarray) -> Dict[PartKey, np.ndarray]:
        """Returns the parts of cells that the tensor under ``key`` holds."""
        return {part_key: array}

    def complete(self, adapter: Adapter, file: File) -> None:  # noqa: B027 - most forms say nothing else
        """Gives an adapter that has its tensors the other contents of the file."""

    def configure(self, adapter: Adapter, config: PeftConfig, file: File) -> None:
        """Gives an adapter its scales, and checks its ranks, by the adapter_config.json beside it.

        In any form but PEFT's it is the configuration that slora reads: lora_alpha / r is the scale of all cells,
        whatever their ranks, and r is the largest rank; any other r raises RankMismatchError.
        """
        adapter.check_pairs(file.source)
        rank = max(adapter.rank(path) for path in adapter.paths)
        if rank != config.rank:
            raise RankMismatchError(
                f"{file.source}: the configuration declares rank {config.rank} and the tensors have {rank}. Use the "
                "configuration that was saved with the tensors."
            )
        for path in adapter.paths:
            adapter.alphas[path] = config.alpha * adapter.alpha_growth(adapter.rank(path) / config.rank)

    def read(self, file: File) -> Adapter:
        """Returns the adapter in a file, complete and of the declared ranks; raises as adapters.files.read does."""
        keys = self.sort(file)
        adapter = adapter_metadata.empty_adapter(file.metadata, self.name)
        for key, part_key in keys.part_keys.items():
            self._read_parts(adapter, file, key, part_key)
        adapter.complete_pairs(file.path)
        for key, parameter in keys.saved_modules.items():
            array = file.fetch(key)
            _check_tensor(file, key, parameter, array)
            if parameter in adapter.saved_modules:
                raise AdapterFormatError(
                    f"{file.path} holds {parameter} twice, under two names. Remove one of the two."
                )
            adapter.saved_modules[parameter] = array
        for key, path in keys.token_rows.items():
            rows = file.fetch(key)
            _check_tensor(file, key, path, rows)
            # The configuration says which rows these are.
            adapter.token_rows[path] = np.empty(0, np.int64), rows
        self.complete(adapter, file)
        adapter_metadata.complete(adapter, file.metadata, file.path)
        self._settle(adapter, file)
        # Patterns of ranks refer to the names in the file.
        matching.complete_bare_names(adapter)
        return adapter

    def _read_parts(self, adapter: Adapter, file: File, key: str, part_key: PartKey) -> None:
        array = file.fetch(key)
        path, part = part_key
        if self.is_embedding(key, path):
            adapter.embeddings.add(path)
        for (path, part), matrix in self.parts_of(key, part_key, array).items():
            _check_tensor(file, key, path, matrix, any_dtype=part in self.number_parts)
            if (path, part) in adapter.tensors:
                raise AdapterFormatError(
                    f"{file.path} holds the {part} of {path} twice, under two names. Remove one of the two."
                )
            adapter.tensors[path, part] = matrix

    def _settle(self, adapter: Adapter, file: File) -> None:
        """Gives an adapter the settings in the files beside it, and checks its pairs."""
        config = file.config
        if config is None:
            adapter.check_pairs(file.source)
            if adapter.token_rows:
                raise AdapterFormatError(
                    f"{file.source} holds rows of {listed(adapter.token_rows)}, but which rows they are is in the "
                    "adapter_config.json beside it: give the folder of both."
                )
            return
        adapter.use_rslora = config.use_rslora
        adapter.dropout = config.dropout
        adapter.base_model = config.base_model
        adapter.projection_key = config.projection_key
        _check_variant(adapter, config, file.source)
        self.configure(adapter, config, file)


def write_file(path: str, tensors: Dict[str, np.ndarray], header: Dict[str, str]) -> None:
    """Writes a .safetensors file in one atomic step."""
    with atomic.replace_file(path) as written:
        write_arrays(written, tensors, header)


def listed_keys(keys: List[str]) -> str:
    """Returns the first keys for a message; those with control characters are quoted."""
    first = ", ".join(key if key.isprintable() and len(key) <= 200 else shown(key) for key in keys[:5])
    return first + (", ..." if len(keys) > 5 else "")


def unknown_tensors(keys: Iterable[str], file: File) -> UnexpectedTensorsError:
    """Returns the error for keys that are not LoRA's."""
    return UnexpectedTensorsError(f"{file.path} holds tensors that are not LoRA's: {listed_keys(sorted(keys))}.")


def _check_variant(adapter: Adapter, config: PeftConfig, source: str) -> None:
    for variant in STORED:
        declared = config.variant is variant
        if declared and adapter.variant is not variant:
            raise MissingTensorsError(
                f"{source}: {variant.field} is True, but the adapter has no {variant.tensors}. {_ONE_SAVE}"
            )
        if not declared and adapter.variant is variant:
            raise UnexpectedTensorsError(
                f"{source}: {variant.field} is False, but the adapter has {variant.tensors}. {_ONE_SAVE}"
            )


def _check_tensor(file: File, key: str, name: str, array: np.ndarray, any_dtype: bool = False) -> None:
    """Checks the path or the parameter's name to which a tensor belongs, and its dtype."""
    # Each part of a path must look like a Python name, so that int() can read every part that str.isdigit accepts.
    is_path = all(part and f"_{part}".replace("-", "_").isidentifier() for part in name.split("."))
    if name and (len(name) > _MAX_NAME or not is_path):
        raise AdapterFormatError(
            f"{file.path} holds a tensor named {shown(key)}, which is not the path of a cell. Rename or remove it."
        )
    if not any_dtype and array.dtype not in FLOATS:
        raise AdapterFormatError(
            f"{file.path}: {key} is {dtype_name(array.dtype)}; it must be float32, float16 or bfloat16."
        )
