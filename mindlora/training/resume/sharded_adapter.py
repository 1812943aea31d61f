"""The adapter of a network whose parameters are slices: gathered from all ranks, or written as slices.

MindSpore's ``parameter_layout_dict`` records how each parameter of this rank's pipeline stage was cut.
"""

import binascii
import contextlib
import json
import os
import shutil
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindformers.tools.utils import get_real_rank
from mindspore import Parameter, nn
from mindspore.communication import get_group_size, get_process_group_ranks, get_rank
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core import atomic
from mindlora.core.errors import BackendError, LoraError
from mindlora.core.formats import strategy_file
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.formats.strategy_file import Layout
from mindlora.core.numerics.dtypes import dtype_name, named_dtype
from mindlora.core.text import listed
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters.sharding.strategy import Piece, Slice, join, slice_of
from mindlora.network.save_load import adapter_of
from mindlora.network.tensors import to_array
from mindlora.network.tree import lora_cells, saved_module_parameters
from mindlora.training.log import logger
from mindlora.training.model.network import base_of
from mindlora.training.resume import collectives, training_state

# AllGather moves every rank's slice, AllReduce a complete tensor about twice. So AllReduce is for tensors with copies
# on many ranks.
_GATHERED_WHOLES = 4


class _Entry(NamedTuple):
    """One rank's slice of a parameter, in the table shared by all ranks."""

    rank: int
    part: Slice
    dtype: str
    checksum: int


def adapter_parameters(network: nn.Cell) -> Dict[str, Parameter]:
    """Returns name -> parameter for everything in an adapter file of ``network``."""
    parameters = [p for _, cell in lora_cells(network) for p in (*cell.parts().values(), *cell.shared_parts().values())]
    return {p.name: p for p in (*parameters, *saved_module_parameters(network))}


def is_sharded(network: nn.Cell, layouts: Mapping[str, tuple]) -> bool:
    """Returns whether this rank holds only a part of the adapter: of its tensors, or of its cells.

    ``layouts`` is the training network's parameter_layout_dict; empty if nothing was recorded.
    """
    if ms.get_auto_parallel_context("pipeline_stages") > 1:
        return True
    parameters = adapter_parameters(network)
    if any(part.shape != part.whole for part in _parts(parameters, layouts).values()):
        return True
    for _, cell in lora_cells(network):
        shapes = type(cell).part_shapes(cell, cell.lora_rank)
        if any(tuple(parameter.shape) != tuple(shapes[part]) for part, parameter in cell.parts().items()):
            return True
    return False


def gather(network: nn.Cell, layouts: Mapping[str, tuple], step: int) -> Dict[str, np.ndarray]:
    """Returns the joined tensors of a sharded adapter, bit for bit, on every rank; all ranks must call this.

    ``step``, which has just ended, must be the same everywhere; ``layouts`` is as in ``is_sharded``. Raises
    BackendError if a parameter's layout was not recorded or the device has no collective operator, and LoraError if the
    ranks are at different steps or their slices do not form a tensor exactly.
    """
    parameters = adapter_parameters(network)
    parts = _parts(parameters, layouts)
    arrays = {name: np.ascontiguousarray(to_array(parameters[name])) for name in parts}
    table = _shared_table(parts, arrays, step)
    lost = sorted(set(parameters) - set(table))
    if lost:
        raise BackendError(
            f"MindSpore has not recorded how {listed(lost)} is cut: it does so in graph mode, when it compiles the "
            "network itself and not from a cache"
        )
    return {name: _gathered(name, table[name], arrays.get(name)) for name in sorted(table)}


def write_slices(folder: str, network: nn.Cell, layouts: Mapping[str, tuple], at: str) -> None:
    """Writes this rank's slices, and their layouts if known, in the form that ``mindlora adapter gather`` reads.

    They go into rank_R and strategy in the folder; ``at`` is epoch and step, such as "1_20".
    """
    rank = get_rank()
    parameters = adapter_parameters(network)
    recorded = {name: _layout(layouts[name]) for name in parameters if name in layouts}
    arrays = {name: to_array(parameter) for name, parameter in parameters.items() if name in recorded or not recorded}
    text = adapter_metadata.text_of(adapter_of(network, {}))
    name = f"adapter_rank_{rank}-trainable_params-{at}.safetensors"
    with atomic.replace_file(os.path.join(folder, f"rank_{rank}", name)) as path:
        write_arrays(path, arrays, {"format": "ms", adapter_metadata.KEY: text})
    if recorded:
        stages = ms.get_auto_parallel_context("pipeline_stages") or 1
        stage = rank // max(get_group_size() // stages, 1)
        with atomic.replace_file(os.path.join(folder, "strategy", f"strategy_rank_{rank}.json")) as path:
            strategy_file.write(path, stage, recorded)


def _parts(parameters: Mapping[str, Parameter], layouts: Mapping[str, tuple]) -> Dict[str, Slice]:
    """Returns this rank's part of each parameter whose layout was recorded."""
    parts = {}
    for name, parameter in parameters.items():
        if name in layouts:
            layout = _layout(layouts[name])
            group = layouts[name][5]
            devices = int(np.prod(layout.dev_matrix, dtype=np.int64))
            # The optimizer's group itself knows which part it gave to this rank.
            part = slice_of(layout._replace(opt_shard_size=0), get_rank() % devices, tuple(parameter.shape), name)
            parts[name] = _cut_again(part, layout.opt_shard_size, get_rank(group)) if group else part
    return parts


def _cut_again(part: Slice, size: int, number: int) -> Slice:
    """Returns one of ``size`` parts along the first axis; ``part`` has the cut shape but the uncut offset."""
    whole = part.whole[0] * size
    begin = part.begin[0] * size + number * part.shape[0]
    return Slice((whole, *part.whole[1:]), (begin, *part.begin[1:]), part.shape)


def _layout(recorded: tuple) -> Layout:
    """Parses the layout that MindSpore records as (dev_matrix, tensor_map, slice shape, field, even, group, ...)."""
    tensor_map = []
    for axis in recorded[1]:
        device_axes = axis if isinstance(axis, (list, tuple)) else [axis]
        tensor_map.append(tuple(number for number in device_axes if number != -1))
    group = recorded[5]
    step = size = 0
    if group:
        ranks = get_process_group_ranks(group)
        step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        size = len(ranks)
    return Layout(tuple(recorded[0]), tuple(tensor_map), step, size, bool(recorded[3]) or not recorded[4])


def _shared_table(parts: Mapping[str, Slice], arrays: Mapping[str, np.ndarray], step: int) -> Dict[str, List[_Entry]]:
    """Returns the ranks' slices of each parameter."""
    slices = {name: [*part, dtype_name(arrays[name].dtype), _checksum(arrays[name])] for name, part in parts.items()}
    ranks = [json.loads(text) for text in collectives.share(json.dumps([step, slices]).encode())]
    steps = [step_of_rank for step_of_rank, _ in ranks]
    if len(set(steps)) > 1:
        raise LoraError(
            f"The ranks are at different steps, {listed(map(str, steps))}, so their slices are not joined. Resume all "
            "ranks from one step."
        )
    table: Dict[str, List[_Entry]] = {}
    for rank, (_, slices_of_rank) in enumerate(ranks):
        for name, (*part, dtype, checksum) in slices_of_rank.items():
            table.setdefault(name, []).append(_Entry(rank, Slice(*map(tuple, part)), dtype, checksum))
    return table


def _gathered(name: str, entries: List[_Entry], array: Any) -> np.ndarray:
    """Returns a joined parameter; ``array`` is this rank's slice, or None if it has none."""
    first = entries[0]
    dtype = named_dtype(first.dtype)
    sizes = [int(np.prod(entry.part.shape, dtype=np.int64)) * dtype.itemsize for entry in entries]
    _, ranks = collectives.rank_and_count()
    whole_size = int(np.prod(first.part.whole, dtype=np.int64)) * dtype.itemsize
    if ranks * max(sizes) <= _GATHERED_WHOLES * whole_size:
        pieces = _by_all_gather(entries, array, dtype, max(sizes))
    else:
        pieces = _by_all_reduce(entries, array, dtype, whole_size)
    wrong = [entry.rank for entry, piece in zip(entries, pieces) if _checksum(piece.array) != entry.checksum]
    if wrong:
        raise LoraError(
            f"{name} arrived from rank {listed(map(str, wrong))} with other values than it has there: copies of one "
            "slice differ, or the exchange failed. Nothing was saved. Resume from the step that was saved last."
        )
    return join(name, pieces)


def _by_all_gather(entries: List[_Entry], array: Any, dtype: np.dtype, size: int) -> List[Piece]:
    padded = np.zeros(size, np.uint8)
    if array is not None:
        padded[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    rows = collectives.all_gather(padded)
    return [_piece(entry, rows[entry.rank], dtype) for entry in entries]


def _by_all_reduce(entries: List[_Entry], array: Any, dtype: np.dtype, size: int) -> List[Piece]:
    whole = np.zeros(size, np.uint8).view(dtype).reshape(entries[0].part.whole)
    owners: Dict[Slice, int] = {}
    for entry in entries:
        owners.setdefault(entry.part, entry.rank)
    rank, _ = collectives.rank_and_count()
    for part, owner in owners.items():
        if owner == rank:
            whole[part.where] = array
    summed = collectives.all_sum(np.frombuffer(whole.tobytes(), np.uint8))
    whole = np.frombuffer(summed.tobytes(), dtype).reshape(whole.shape)
    return [Piece(f"rank {entry.rank}", entry.part, whole[entry.part.where]) for entry in entries]


def _piece(entry: _Entry, row: np.ndarray, dtype: np.dtype) -> Piece:
    count = int(np.prod(entry.part.shape, dtype=np.int64))
    array = np.frombuffer(row.tobytes(), dtype, count).reshape(entry.part.shape)
    return Piece(f"rank {entry.rank}", entry.part, array)


def _checksum(array: np.ndarray) -> int:
    return binascii.crc32(array.tobytes())


# How LoraCheckpoint saves in a sharded run: all ranks' slices are joined, or written separately.


class ShardedSaves:
    """Joins or writes the slices of a sharded run's adapter; keeps written slices of the last ``keep_last`` steps."""

    def __init__(self, directory: str, keep_last: int):
        self.folder = os.path.join(directory, training_state.SLICES)
        self.keep_last = keep_last

    def applies_to(self, params: InternalCallbackParam) -> bool:
        """Returns whether the run is sharded."""
        return is_sharded(base_of(params.train_network), params.train_network.parameter_layout_dict)

    def metric(self, value: Optional[float]) -> Optional[float]:
        """Returns the last rank's measurement: in a pipeline, only the last stage knows the loss.

        All ranks must call this. If they cannot communicate, the result is None.
        """
        try:
            agreed = collectives.value_of(-1, float("nan") if value is None else value)
        except BackendError:
            return None
        return None if value is None else agreed

    def rank_0_says(self, answer: bool) -> bool:
        """Returns rank 0's answer on all ranks; False if they cannot communicate."""
        try:
            return bool(collectives.value_of(0, float(answer)))
        except BackendError:
            return False

    def gather(self, params: InternalCallbackParam) -> Optional[Dict[str, np.ndarray]]:
        """Returns the joined tensors of the adapter, or writes this rank's slices and returns None.

        All ranks must call this. Raises LoraError if the slices do not form the tensors, or are from different steps.
        """
        network = base_of(params.train_network)
        layouts = params.train_network.parameter_layout_dict
        try:
            return gather(network, layouts, params.cur_step_num)
        except BackendError as error:
            folder = os.path.join(self.folder, f"{training_state.STEP_PREFIX}{params.cur_step_num}")
            write_slices(folder, network, layouts, f"{params.cur_epoch_num}_{params.cur_step_num}")
            if get_real_rank() == 0:
                joined = os.path.join(os.path.dirname(self.folder), os.path.basename(folder))
                where = "" if os.path.isdir(os.path.join(folder, "strategy")) else " --strategy OUTPUT/strategy"
                logger.warning(
                    "The slices of step %d were written as they are, because %s. Join them after the run: "
                    "mindlora adapter gather %s%s --output %s",
                    params.cur_step_num,
                    error,
                    folder,
                    where,
                    joined,
                )
            self._remove_old()
            return None

    def _remove_old(self):
        """Removes this rank's files of steps that are not kept."""
        for old in training_state.step_folders(self.folder)[: -self.keep_last]:
            shutil.rmtree(os.path.join(old, f"rank_{get_real_rank()}"), ignore_errors=True)
            # If ranks share a disk, another rank may have removed the rest.
            with contextlib.suppress(FileNotFoundError):
                if not any(name.startswith("rank_") for name in os.listdir(old)):
                    shutil.rmtree(old, ignore_errors=True)
