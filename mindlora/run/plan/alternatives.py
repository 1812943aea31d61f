"""Alternatives for a run: other numbers of devices, the smallest change with which it fits, longer rows."""

import dataclasses
import re
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import yaml

from mindlora.core.errors import LoraError
from mindlora.core.yaml_file import merged
from mindlora.run.plan.division import Division
from mindlora.run.plan.memory import memory_of, needed_while_loading
from mindlora.run.plan.run import Run, read_run
from mindlora.run.plan.units import GIB
from mindlora.run.yaml_run import WRAPPER

# Memory left for uncounted use: on a CPU for the frameworks, the compiled graph and buffers that live longer; of
# an NPU, the sixteenth that MindSpore leaves to communication and the runtime by default.
_LEFT_ON_CPU = 1 / 10
_LEFT_ON_NPU = 1 / 16
_LIMIT = "context.max_device_memory"
# The longest row is a multiple of the first, and without a limit of the model, at most the second.
_TOKENS, _MOST_POSITIONS = 256, 2**17
Keys = Dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The bytes that a run needs on each of a number of devices, divided in several ways.

    Attributes:
        devices (int): Number of devices.
        data (int): Bytes with data parallelism: each has its own rows, and everything else undivided.
        optimizer (int): Bytes with optimizer parallelism: parameters are divided too, and gathered where they are used;
            None if they cannot be.
        model (int): Bytes with model parallelism: each layer is divided; None if it cannot be.
        yaml (int): Bytes if layers are divided by parallel_config, and the rows among the remaining devices; None if
            the devices cannot be divided so, or parallel_config divides no layer.
        notes (tuple of str): Reasons for fields that are None.
    """

    devices: int
    data: Optional[int]
    optimizer: Optional[int]
    model: Optional[int]
    yaml: Optional[int]
    notes: Tuple[str, ...]


_NAMES = {"data": "data parallel", "optimizer": "optimizer parallel", "model": "model parallel", "yaml": "as the YAML"}


def layouts_of(run: Run, counts: Sequence[int]) -> List[Layout]:
    """Returns the layouts of a run on the given numbers of devices."""
    return [_layout(run, count) for count in counts]


def _layout(run: Run, count: int) -> Layout:
    current = run.division
    several = count > 1
    experts = count if current.experts > 1 else 1
    ways = {
        "data": Division(data=count),
        "optimizer": Division(data=count, sharded=several, optimizer=several, gathers_again=True, experts=experts),
        "model": Division(
            model=count,
            sharded=several,
            sequence=current.sequence,
            whole_vocabulary=current.whole_vocabulary,
            experts=experts,
        ),
    }
    unit = current.model * current.pipeline * current.context
    if unit > 1 and count % unit == 0:
        ways["yaml"] = dataclasses.replace(current, data=count // unit)
    sizes: Dict[str, Optional[int]] = dict.fromkeys(_NAMES)
    notes = []
    for name, division in ways.items():
        problem = division.problem(run.model)
        if not problem:
            try:
                sizes[name] = memory_of(dataclasses.replace(run, division=division)).total
            except LoraError as error:
                problem = str(error)
        if problem:
            notes.append(f"{count} devices, {_NAMES[name]}: {problem}")
    return Layout(count, notes=tuple(notes), **sizes)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A description of one or more changes, with the bytes that the run then needs on a device."""

    change: str
    needed: int
    fits: bool


class LongestRow(NamedTuple):
    """The longest rows with which a run fits.

    Attributes:
        batch_size (int): Rows on each device at a time.
        seq_length (int): Their tokens, a multiple of 256; 0 if no row fits.
        is_the_models (bool): Whether the model's positions are the limit.
    """

    batch_size: int
    seq_length: int
    is_the_models: bool


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether a run fits, and what would make it fit.

    Attributes:
        memory (int): Bytes of a device.
        usable (int): The part of it that the plan fills.
        reason (str): Why it fills no more.
        tried (tuple of Trial): The changes in the order in which they were tried; the last one fits, if any does.
        lines (str): The YAML's lines for the last change; empty if no change is needed or none
            fits.
        longest_rows (tuple of LongestRow): With the YAML's batch_size, and with 1; empty if the run does not train.
    """

    memory: int
    usable: int
    reason: str
    fits: bool
    tried: Tuple[Trial, ...]
    lines: str
    longest_rows: Tuple[LongestRow, ...]


class _Change(NamedTuple):
    words: str
    keys: Dict[str, Any]


def fit(run: Run, memory: int, devices: Sequence[int]) -> Fit:
    """Returns whether a run fits a device of ``memory`` bytes, and the first change with which it would.

    ``devices`` is the number of devices among which the run may be divided.
    """
    usable, reason = _usable(run, memory)
    longest = _longest_rows(run, usable)
    if needed_while_loading(run) <= usable:
        return Fit(memory, usable, reason, True, (), "", longest)
    tried: List[Trial] = []
    for variants in _ladder(run, devices):
        trial = None
        for change in variants:
            needed_then = _needed_with(run, change.keys)
            if needed_then is None:
                continue
            trial = Trial(change.words, needed_then, needed_then <= usable)
            if trial.fits:
                lines = str(yaml.safe_dump(change.keys, sort_keys=False, default_flow_style=False)).rstrip()
                return Fit(memory, usable, reason, False, (*tried, trial), lines, longest)
        # If several variants do not fit, the last one needs least.
        tried += [trial] if trial else []
    return Fit(memory, usable, reason, False, tuple(tried), "", longest)


def _longest_rows(run: Run, usable: int) -> Tuple[LongestRow, ...]:
    if not run.yaml.trains:
        return ()
    return tuple(_longest_row(run, size, usable) for size in sorted({run.yaml.rows, 1}, reverse=True))


def _longest_row(run: Run, batch_size: int, usable: int) -> LongestRow:
    positions = run.model.get("max_position_embeddings") or run.model.get("max_position_embedding")
    # In units: a length that fits, and one that does not.
    fitting, too_long = 0, (positions or _MOST_POSITIONS) // _TOKENS + 1
    while fitting + 1 < too_long:
        middle = (fitting + too_long) // 2
        if needed_while_loading(run.with_rows(batch_size, middle * _TOKENS)) <= usable:
            fitting = middle
        else:
            too_long = middle
    return LongestRow(batch_size, fitting * _TOKENS, positions is not None and fitting == positions // _TOKENS)


def _usable(run: Run, memory: int) -> Tuple[int, str]:
    """Returns the bytes of a device that a run can fill, and why it fills no more."""
    if run.yaml.on_cpu:
        return int(memory * (1 - _LEFT_ON_CPU)), "a tenth is left for the frameworks and the compiled graph"
    asked = run.yaml.at(_LIMIT)
    # MindSpore's GB are 1024^3 bytes.
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*GB\s*", str(asked))
    limit = int(float(match[1]) * GIB) if match else memory
    if limit < memory:
        return limit, f"MindSpore takes no more with {_LIMIT}: {asked}"
    return int(memory * (1 - _LEFT_ON_NPU)), "MindSpore leaves a sixteenth to communication and the runtime"


def _ladder(run: Run, devices: Sequence[int]) -> Iterator[List[_Change]]:
    """Yields the changes in order; the first of several variants in a step that fits counts."""
    recompute = _recomputation(run)
    batches = _batches(run)
    quantized = _quantization(run)
    yield [_Change("parallel_mode 0, data parallel with mindlora's train step", keys) for keys in data_parallel(run)]
    yield recompute
    yield batches
    yield _joined(recompute, batches)
    yield quantized
    yield _joined(quantized, recompute)
    yield _joined(quantized, _joined(recompute, batches) or batches)
    for count in devices:
        if count > 1:
            divided = _model_parallel(run, count)
            yield divided
            yield _joined(divided, recompute)
            yield _joined(divided, _joined(recompute, batches) or batches)
            yield _joined(_optimizer_parallel(run, count), batches)


def data_parallel(run: Run) -> List[Keys]:
    """Returns the keys of mindlora's train step on each device, for a run whose devices share only the rows.

    It avoids computing the logits of all tokens. Empty for other runs.
    """
    division = run.division
    if not run.head.run:
        return []
    shares = division.model * division.pipeline * division.context * division.experts > 1 or division.optimizer
    if not run.yaml.trains or not division.sharded or shares:
        return []
    keys: Keys = {"parallel": {"parallel_mode": 0, "full_batch": False}}
    if run.yaml.train_step != WRAPPER:
        keys["runner_wrapper"] = {"type": WRAPPER}
    return [keys]


def _recomputation(run: Run) -> List[_Change]:
    if not run.yaml.trains or run.yaml.at("recompute_config.recompute") is True:
        return []
    return [_Change("recompute all layers", {"recompute_config": {"recompute": True}})]


def _batches(run: Run) -> List[_Change]:
    """Returns smaller batches with correspondingly more micro-batches, so that a step keeps its number of rows."""
    size = run.yaml.setting("runner_config.batch_size")
    changes = []
    factor = 2
    while run.yaml.trains and isinstance(size, int) and size % factor == 0:
        steps = run.yaml.accumulation * factor
        words = f"batch_size {size // factor}, gradient_accumulation_steps {steps}"
        keys: Keys = {"runner_config": {"batch_size": size // factor, "gradient_accumulation_steps": steps}}
        if not run.division.sharded:
            # mindlora's train step accumulates on one device and in data parallel.
            if run.yaml.train_step != WRAPPER:
                keys["runner_wrapper"] = {"type": WRAPPER}
            if run.yaml.at("train_dataset.drop_remainder") is not True:
                keys["train_dataset"] = {"drop_remainder": True}
        changes.append(_Change(words, keys))
        factor *= 2
    return changes


def _quantization(run: Run) -> List[_Change]:
    if run.lora is None or run.lora.quantize_base or run.division.sharded:
        return []
    return [
        _Change("QLoRA (quantize_base: nf4)", {"model": {"model_config": {"pet_config": {"quantize_base": "nf4"}}}})
    ]


def _model_parallel(run: Run, count: int) -> List[_Change]:
    others = run.division.pipeline * run.division.context
    data = max(run.division.devices // (count * others), 1)
    if run.division.model >= count or run.lora and run.lora.quantize_base:
        return []
    keys = {
        "use_parallel": True,
        "parallel": {"parallel_mode": 1, "full_batch": True},
        "parallel_config": {"data_parallel": data, "model_parallel": count},
    }
    return [_Change(f"model_parallel {count} on {data * count * others} devices", keys)]


def _optimizer_parallel(run: Run, count: int) -> List[_Change]:
    division = run.division
    if division.optimizer or division.model * division.pipeline * division.context > 1:
        return []
    data = max(division.data, count)
    recompute = {"recompute": True, "parallel_optimizer_comm_recompute": True}
    keys = {
        "use_parallel": True,
        "parallel": {"parallel_mode": 1, "full_batch": True, "enable_parallel_optimizer": True},
        "parallel_config": {"data_parallel": data, "model_parallel": 1},
        "recompute_config": recompute,
    }
    words = f"enable_parallel_optimizer and recomputation on {data} devices"
    return [] if run.lora and run.lora.quantize_base else [_Change(words, keys)]


def _joined(first: List[_Change], second: List[_Change]) -> List[_Change]:
    return [_Change(f"{a.words}; {b.words}", merged(a.keys, b.keys)) for a in first for b in second]


def _needed_with(run: Run, keys: Dict[str, Any]) -> Optional[int]:
    """Returns the bytes that a run needs with a change, or None if it cannot be made."""
    try:
        return needed_while_loading(read_run(merged(run.yaml.config, keys)))
    except LoraError:
        return None
