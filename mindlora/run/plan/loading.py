"""The bytes that a process takes of its host while the base is loaded: on a CPU, of the memory in which it trains."""

import os
from typing import List

from mindlora.models.weights import Weight
from mindlora.run.checks.base_weights import loads_by_tensor
from mindlora.run.plan.memory import ARITHMETIC, Line, memory_of
from mindlora.run.plan.run import Run
from mindlora.run.plan.units import bytes_of

# Bytes of a number in the checkpoint, where its dtype is not known: published bases are in bfloat16.
_STORED = 2


def loading_of(run: Run) -> Line:
    """Returns the peak while the base is loaded: its parameters, and what is held beside them.

    Beside them are the largest tensor if BaseWeights loads it, the whole checkpoint if MindFormers does.
    """
    base = [weight for weight in run.weights if not weight.adapter]
    if loads_by_tensor(run.yaml):
        size = sum(weight.size for weight in base) + max(map(_converted, base))
        return Line("as the base is loaded by tensor", size, ARITHMETIC)
    device = memory_of(run)
    parameters = sum(line.size for line in device.lines if line.name == "base")
    return Line("as MindFormers loads the base", parameters + _stored(run, base), ARITHMETIC)


def needed_by(run: Run) -> int:
    """Returns the most that a run takes of a device at a time: in a step, or on a CPU while the base is loaded."""
    needed = memory_of(run).total
    return max(needed, loading_of(run).size) if run.yaml.on_cpu else needed


def _converted(weight: Weight) -> int:
    """Returns the bytes that a tensor takes beside its parameter: as it is stored, and as float32 on its way."""
    if weight.dtype == "uint8":
        return weight.size
    return weight.elements * (_STORED + (0 if weight.dtype == "float32" else bytes_of("float32")))


def _stored(run: Run, base: List[Weight]) -> int:
    """Returns the bytes of the checkpoint's tensors."""
    path = run.yaml.base[1]
    if not path or not os.path.exists(path):
        return sum(weight.size if weight.dtype == "uint8" else _STORED * weight.elements for weight in base)
    if os.path.isfile(path):
        return os.path.getsize(path)
    files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    return sum(os.path.getsize(file) for file in files if file.endswith((".safetensors", ".ckpt")))
