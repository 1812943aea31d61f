"""Reads MindSpore's strategy files without MindSpore: how a parallel run divides each parameter among its devices.

A run writes one to ``strategy_ckpt_save_file``: a protobuf message, ParallelStrategyMap in MindSpore's
node_strategy.proto, or the same as JSON. Each pipeline stage has its own file, and merge_pipeline_strategys joins
them into one, in which the number of the stage precedes each name ("1-model.norm.weight").
"""

import os
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from mindlora.core.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.core.formats import protobuf
from mindlora.core.json_files import parse_object, write_json

# Field numbers of ParallelStrategyMap, and of the messages in it.
_STRATEGY_ITEM, _LAYOUT_ITEM = 2, 3
_NAME, _CONTENT = 1, 2
_STAGE = 1
_DEV_MATRIX, _TENSOR_MAP, _SPLIT_SHAPE, _FIELD, _OPT_STEP, _OPT_SIZE = 1, 2, 3, 5, 6, 7
_DIM = 1

_MERGED = re.compile(r"(\d+)-(.+)", re.S)
_ENDINGS = (".ckpt", ".json")


class Layout(NamedTuple):
    """The division of one parameter.

    Attributes:
        dev_matrix (tuple of int): The devices of a pipeline stage as an array of this shape, in the order of the ranks.
        tensor_map (tuple of tuple of int): For each axis of the tensor the axes of dev_matrix that cut it, counted from
            the right, the coarsest cut first; an axis that nothing cuts has none.
        opt_shard_step (int): With optimizer parallelism, the distance of the ranks that share a slice; else 0.
        opt_shard_size (int): Number of parts into which they cut it along its first axis; 0 or 1 if they do not.
        uneven (bool): Whether the slices are cut by a list of sizes (field slices), which mindlora cannot join.
    """

    dev_matrix: Tuple[int, ...]
    tensor_map: Tuple[Tuple[int, ...], ...]
    opt_shard_step: int = 0
    opt_shard_size: int = 0
    uneven: bool = False


# Pipeline stage -> parameter -> Layout.
Stages = Dict[int, Dict[str, Layout]]


def read(path: str) -> Stages:
    """Returns the layouts in one strategy file, .json or protobuf, of one pipeline stage or of several merged.

    Raises AdapterError if it is not a strategy file, is cut off, holds no layout, or has a parameter twice.
    """
    with open(path, "rb") as file:
        content = file.read()
    if not content:
        raise TruncatedAdapterError(f"{path} is truncated: this strategy file is empty. Copy or save it again.")
    stage, layouts = _from_json(content, path) if path.endswith(".json") else _from_protobuf(content, path)
    if not layouts:
        raise AdapterFormatError(
            f"{path} holds no layout of a parameter, so it is not a strategy file of a run. Name the file or the "
            "folder that strategy_ckpt_save_file named."
        )
    stages: Stages = {}
    for name, layout in layouts:
        merged = _MERGED.fullmatch(name)
        stage_of_layout, name = (int(merged[1]), merged[2]) if merged else (stage, name)
        if name in stages.setdefault(stage_of_layout, {}):
            raise AdapterFormatError(f"{path} has the layout of {name} twice: give the strategy of one run.")
        stages[stage_of_layout][name] = layout
    return stages


def read_all(path: str) -> Stages:
    """Returns the layouts of all pipeline stages.

    ``path`` is one file, or a folder of them: one for each rank, one for each stage, or one merged. Raises
    AdapterError as ``read`` does, and if there is no file or two of the same stage differ.
    """
    if not os.path.exists(path):
        raise AdapterFormatError(f"{path} does not exist: it must be the strategy file of a run, or a folder of them.")
    folder = os.path.isdir(path)
    files = (
        [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(_ENDINGS)] if folder else [path]
    )
    if not files:
        raise AdapterFormatError(
            f"{path} holds no strategy file: none of its files ends in .ckpt or .json. Give the folder that the run "
            "wrote its strategies to."
        )
    stages: Stages = {}
    first: Dict[int, str] = {}
    for file in files:
        for stage, layouts in read(file).items():
            if stages.setdefault(stage, layouts) != layouts:
                raise AdapterFormatError(
                    f"{file} and {first[stage]} are strategies of pipeline stage {stage} and differ: they are of two "
                    "runs. Keep those of one run in the folder."
                )
            first.setdefault(stage, file)
    return stages


def write(path: str, stage: int, layouts: Mapping[str, Layout]) -> None:
    """Writes the layouts of one pipeline stage, with even slices, to a file that ends in .json."""
    items = {}
    for name, layout in layouts.items():
        items[name] = {
            "dev_matrix": list(layout.dev_matrix),
            "tensor_map": [list(axes) if len(axes) > 1 else (*axes, -1)[0] for axes in layout.tensor_map],
            "param_split_shape": [],
            "indices_offset": [],
            "field": 0,
            "opt_weight_shard_step": layout.opt_shard_step,
            "opt_weight_shard_size": layout.opt_shard_size,
        }
    # MindSpore's own tools read the number of the stage from the first operator.
    operators = {"LoRA": {"stage": stage, "parallel_strategy": []}}
    write_json(path, {"current_stage": 1, "parallel_strategy_item": operators, "parallel_layout_item": items})


def _from_protobuf(content: bytes, path: str) -> Tuple[int, List[Tuple[str, Layout]]]:
    """Returns the stage, and (name, Layout) of each parameter."""
    stage = 0
    layouts: List[Tuple[str, Layout]] = []
    try:
        for field in protobuf.fields(memoryview(content)):
            if field.field == _STRATEGY_ITEM and not layouts:
                strategys = _messages(field.content, _CONTENT)
                stage = _number(strategys[0], _STAGE) if strategys else 0
            elif field.field == _LAYOUT_ITEM:
                names = _messages(field.content, _NAME)
                parts = _messages(field.content, _CONTENT)
                layouts.append((str(names[0], "utf-8"), _parsed(parts[0])))
    except (ValueError, IndexError) as error:
        raise TruncatedAdapterError(
            f"{path} is truncated or not a strategy file: {error}. Copy or save it again."
        ) from error
    return stage, layouts


def _parsed(message: memoryview) -> Layout:
    matrices = list(map(_dims, _messages(message, _DEV_MATRIX)))
    maps = list(map(_dims, _messages(message, _TENSOR_MAP)))
    # Several messages: one for each axis of the tensor. One: a number for each axis.
    tensor_map = [_axes(dims) for dims in maps if dims] if len(maps) > 1 else [_axes([dim]) for dim in maps[0]]
    uneven = any(map(_dims, _messages(message, _SPLIT_SHAPE))) or _number(message, _FIELD) != 0
    return Layout(
        tuple(matrices[0]), tuple(tensor_map), _number(message, _OPT_STEP), _number(message, _OPT_SIZE), uneven
    )


def _from_json(content: bytes, path: str) -> Tuple[int, List[Tuple[str, Layout]]]:
    """Returns the stage, and (name, Layout) of each parameter."""
    document = parse_object(content, path, AdapterFormatError)
    try:
        items = list((document.get("parallel_strategy_item") or {}).values())
        stage = int(items[0]["stage"]) if items else 0
        return stage, [(name, _from_item(item)) for name, item in document.get("parallel_layout_item", {}).items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AdapterFormatError(f"{path} is not a strategy file: {error!r}. Copy or save it again.") from error


def _from_item(item: Dict[str, Any]) -> Layout:
    tensor_map = [_axes(dim if isinstance(dim, list) else [dim]) for dim in item["tensor_map"]]
    uneven = bool(item.get("param_split_shape")) or int(item.get("field", 0)) != 0
    return Layout(
        tuple(map(int, item["dev_matrix"])),
        tuple(tensor_map),
        int(item.get("opt_weight_shard_step", 0)),
        int(item.get("opt_weight_shard_size", 0)),
        uneven,
    )


def _axes(dims: List[int]) -> Tuple[int, ...]:
    return tuple(int(dim) for dim in dims if dim != -1)


def _messages(message: memoryview, number: int) -> List[memoryview]:
    messages = protobuf.fields(message)
    return [field.content for field in messages if field.field == number and field.wire_type == protobuf.CONTENT]


def _number(message: memoryview, number: int) -> int:
    return next((_signed(field.value) for field in protobuf.fields(message) if field.field == number), 0)


def _dims(message: memoryview) -> List[int]:
    dims = [field for field in protobuf.fields(message) if field.field == _DIM and field.wire_type == protobuf.NUMBER]
    return [_signed(field.value) for field in dims]


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
