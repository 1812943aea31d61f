"""The same run on other numbers of devices."""

import dataclasses
from typing import Dict, List, Optional, Sequence, Tuple

from mindlora.errors import LoraError
from mindlora.plan.division import Division
from mindlora.plan.memory import memory_of
from mindlora.plan.run import Run


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a run needs on each of a number of devices, divided in several ways.

    Attributes:
        devices (int): How many devices.
        data (int): Bytes with data parallelism: each has rows of its own, and everything else whole.
        optimizer (int): Bytes with optimizer parallelism: parameters are divided too, and gathered where they are used;
            None if they cannot be.
        model (int): Bytes with model parallelism: each layer is divided; None if it cannot be.
        yaml (int): Bytes if layers are divided as parallel_config says, and the rows among what remains; None if the
            devices cannot be divided so, or parallel_config divides no layer.
        notes (tuple of str): Why something is None.
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
    own, notes = run.division, []
    several, experts = count > 1, count if own.experts > 1 else 1
    ways: Dict[str, Optional[Division]] = {
        "data": Division(data=count),
        "optimizer": Division(data=count, sharded=several, optimizer=several, gathers_again=True, experts=experts),
        "model": Division(
            model=count, sharded=several, sequence=own.sequence, whole_vocabulary=own.whole_vocabulary, experts=experts
        ),
        "yaml": None,
    }
    unit = own.model * own.pipeline * own.context
    if unit > 1 and count % unit == 0:
        ways["yaml"] = dataclasses.replace(own, data=count // unit)
    found = {}
    for name, division in ways.items():
        found[name], note = _needed(run, division) if division else (None, "")
        notes += [f"{count} devices, {_NAMES[name]}: {note}"] if note else []
    return Layout(count, found["data"], found["optimizer"], found["model"], found["yaml"], tuple(notes))


def _needed(run: Run, division: Division) -> Tuple[Optional[int], str]:
    problem = division.problem(run.model) or division.refusal(run.lora)
    if problem:
        return None, problem
    try:
        return memory_of(dataclasses.replace(run, division=division)).total, ""
    except LoraError as error:
        return None, str(error)
