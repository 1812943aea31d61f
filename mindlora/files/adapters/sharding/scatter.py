"""scatter_adapter: one adapter becomes the slices of all ranks of a sharded run."""

import dataclasses
import os
from typing import Dict, Mapping, Optional, Tuple

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import AdapterError, LoraError, MissingTensorsError, UnexpectedTensorsError
from mindlora.core.formats import ckpt_file
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.text import listed
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads, check_free
from mindlora.files.adapters.dialects import mindformers
from mindlora.files.adapters.matching import CellShape, arrange
from mindlora.files.adapters.sharding.run_settings import NOTHING_KNOWN, RunSettings
from mindlora.files.adapters.sharding.strategy import Strategy, cut, read_strategy
from mindlora.models import names
from mindlora.models.variants.variant import PartKey

FORMS = ("safetensors", "ckpt")


@dataclasses.dataclass(frozen=True)
class ScatterReport:
    """The result of scatter_adapter: the numbers of ranks, pipeline stages and parameters, and each rank's bytes."""

    source: str
    output: str
    ranks: int
    stages: int
    parameters: int
    bytes_by_rank: Tuple[int, ...]

    def __str__(self) -> str:
        low, high = (f"{count / 2**20:.2f}" for count in (min(self.bytes_by_rank), max(self.bytes_by_rank)))
        return (
            f"{self.source} -> {self.output}: {self.parameters} parameters for {self.ranks} ranks in {self.stages} "
            f"pipeline stages, {low if low == high else f'{low} to {high}'} MiB each. Start a run from it with "
            f"pet_config.adapter_path: {self.output}"
        )


def scatter_adapter(
    source: str,
    output: str,
    strategy: str,
    form: str = "safetensors",
    settings: RunSettings = NOTHING_KNOWN,
    allow_pickle: bool = False,
    overwrite: bool = False,
) -> ScatterReport:
    """Cuts an adapter into the slices of the ranks of a sharded run, bit for bit: the inverse of gather_adapter.

    Args:
        source (str): An adapter in any form that adapter_files.read takes.
        output (str): The folder to write; it gets rank_0, rank_1, ..., with one file each.
        strategy (str): The strategy file, or a folder of them, of the run that is to start from the adapter.
        form (str): "safetensors" or "ckpt". Default: "safetensors".
        settings (RunSettings): lora_alpha, if the source does not state it; the sizes of the attention, if pairs have
            to be joined or split. Default: nothing.
        allow_pickle (bool): Whether a .bin may be read. Default: False.
        overwrite (bool): Whether ``output`` may be replaced. Default: False.

    Raises:
        LoraError: ``output`` exists, or ``form`` is unknown.
        MissingTensorsError, UnexpectedTensorsError: The strategy has other adapter parameters than the adapter.
        ShapeMismatchError: A tensor cannot be cut as the strategy says.
        AdapterError: The adapter or the strategy cannot be read, or lora_alpha is not known.
    """
    if form not in FORMS:
        raise LoraError(f"format is {form!r}: scatter writes {' or '.join(FORMS)}.")
    check_free(source, output, overwrite)
    adapter = adapter_files.read(source, allow_pickle)
    adapter.check_finite(source)
    settings.complete(adapter, source)
    known = read_strategy(strategy)
    tensors = _named(adapter, known, source, settings)
    sizes = []
    with atomic.replace_folder(output) as folder:
        for rank in range(known.ranks):
            layouts = known.layouts(rank)
            slices = {
                name: cut(array, layouts[name], rank % known.devices, name)
                for name, array in tensors.items()
                if name in layouts
            }
            _write(os.path.join(folder, f"rank_{rank}"), rank, slices, adapter_metadata.text_of(adapter), form)
            sizes.append(sum(array.nbytes for array in slices.values()))
    return ScatterReport(source, output, known.ranks, len(known.stages), len(tensors), tuple(sizes))


def _write(folder: str, rank: int, slices: Dict[str, np.ndarray], text: str, form: str) -> None:
    os.mkdir(folder)
    path = os.path.join(folder, f"adapter_rank_{rank}-trainable_params-0_0.{form}")
    if form == "ckpt":
        ckpt_file.write(path, slices, text)
    else:
        write_arrays(path, slices, {"format": "ms", adapter_metadata.KEY: text})


def _named(adapter: Adapter, strategy: Strategy, source: str, settings: RunSettings) -> Dict[str, np.ndarray]:
    """Returns the adapter's tensors under the strategy's names."""
    keys = _keys(strategy)
    known_paths = names.canonical({path for path, _ in keys.values()} - {""}, among=strategy.cells())
    _take_form(adapter, known_paths, settings.heads)
    stored = adapter.stored_tensors()
    lost = set(keys.values()) - set(stored)
    extra = set(stored) - set(keys.values())
    if lost:
        raise MissingTensorsError(
            f"{source} lacks {listed(sorted({path for path, _ in lost}))}, which the strategy in {strategy.source} "
            "has. Give an adapter of the same target_modules, or the strategy of its run."
        )
    if extra:
        raise UnexpectedTensorsError(
            f"{source} holds {listed(sorted({path for path, _ in extra}))}, and the strategy in {strategy.source} has "
            "no such adapter. Give the strategy of a run with the same target_modules."
        )
    full_names = {names.parameter_in_adapters(name): name for name in strategy.names()}
    modules = {names.parameter_in_adapters(name): array for name, array in adapter.saved_modules.items()}
    unknown = sorted(set(modules) - set(full_names))
    if unknown:
        raise UnexpectedTensorsError(
            f"{source} holds {listed(unknown)} of modules_to_save, and the strategy in {strategy.source} has no such "
            "parameter. Give the strategy of a run of the same model."
        )
    tensors = {name: stored[key] for name, key in keys.items()}
    return {**tensors, **{full_names[name]: array for name, array in modules.items()}}


def _keys(strategy: Strategy) -> Dict[str, PartKey]:
    """Returns parameter -> (path, part) for the adapter's parameters in a strategy."""
    parameters = [name for name in strategy.names() if mindformers.is_adapter_key(name)]
    key_names = mindformers.detect(parameters)
    keys = {name: key for name in parameters if key_names and (key := mindformers.parse_key(name, key_names))}
    if not keys:
        raise MissingTensorsError(
            f"{strategy.source} has no adapter: it is the strategy of a run without LoRA. Start the run with its "
            "pet_config once (only_save_strategy: True ends it when the strategy is written)."
        )
    return keys


def _take_form(adapter: Adapter, known: Mapping[str, str], heads: Heads) -> None:
    """Gives ``adapter`` the paths and the joined cells of the run, as load_lora does for a network.

    ``known`` maps the run's own path to the cell's path in adapters.
    """
    head_dim = heads.head_dim or _head_dim(adapter, heads)
    shapes = {
        path: CellShape(
            None,
            _rows(adapter, name, heads),
            heads.kv_heads,
            head_dim,
            layout=heads.layouts.get(name.rpartition(".")[2]),
            name=name,
        )
        for path, name in known.items()
    }
    arrange(adapter, shapes)


def _head_dim(adapter: Adapter, heads: Heads) -> Optional[int]:
    """Returns the size of a head by the rows of a joined cell of the adapter, or None."""
    if not heads.heads or not heads.kv_heads:
        return None
    for path in adapter.paths:
        if names.joined_parts(path) and names.joined_cell(path).layout.needs_heads:
            return len(adapter.tensors[path, "B"]) // (heads.heads + 2 * heads.kv_heads)
    return None


def _rows(adapter: Adapter, path: str, heads: Heads) -> Optional[int]:
    """Returns the rows of a joined cell whose members the adapter has; for other cells, the sizes for splitting."""
    present = names.canonical(adapter.paths)
    rows = {name: len(adapter.tensors[own, "B"]) for own, name in present.items() if (own, "B") in adapter.tensors}
    members = names.joined_parts(path)
    if not set(members) & set(rows):
        return heads.q_rank
    counts = [rows.get(member) for member in members]
    total = names.joined_cell(path).layout.total(counts, heads.heads, heads.kv_heads, heads.head_dim)
    if total is None:
        raise AdapterError(
            f"{path} joins {', '.join(members)}, and the adapter lacks some of these, so that their rows are not "
            "known. Name the model's folder or YAML (--base)."
        )
    return total
