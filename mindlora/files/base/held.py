"""The tensors of a checkpoint, with quantized weights held in their own bits, under a network's names."""

from typing import Callable, Collection, Dict, Mapping, NamedTuple, Optional

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.integers import TENSOR_NAMES, IntegerForm, tensor_name
from mindlora.files.base.convert import in_mindformers_names
from mindlora.files.base.joined import add_joined
from mindlora.files.base.quantized.stored import HOLD_ADVICE
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.files.base.writer import OutputTensor

Renamed = Callable[[BaseCheckpoint], Mapping[str, OutputTensor]]


class HeldTensors(NamedTuple):
    """The result of held_tensors.

    Attributes:
        tensors (dict): Name -> OutputTensor; three of them hold each weight in integers.
        forms (dict): Name of such a weight -> its form.
        base (BaseCheckpoint): The checkpoint that they are read from, for its notes.
    """

    tensors: Dict[str, OutputTensor]
    forms: Dict[str, IntegerForm]
    base: BaseCheckpoint


def held_forms(path: str, parameters: Collection[str], kv_heads: Optional[int]) -> Dict[str, IntegerForm]:
    """Returns name -> form of the quantized weights of a checkpoint that are held in their own bits.

    Args:
        path (str): The checkpoint.
        parameters (collection of str): MindFormers' names of a network's parameters.
        kv_heads (int): Key-value heads, for the joined cells of a legacy Llama.

    Raises CheckpointError as held_tensors does.
    """

    def renamed(base: BaseCheckpoint) -> Dict[str, OutputTensor]:
        tensors = {tensor.name: tensor for tensor in in_mindformers_names(base)[0]}
        if base.architecture.legacy:
            add_joined(parameters, tensors, kv_heads)
        return {name: tensor for name, tensor in tensors.items() if name in parameters}

    with BaseCheckpoint(path, decode_to=np.dtype(np.float32)) as base:
        return held_tensors(base, renamed).forms


def held_tensors(base: BaseCheckpoint, renamed: Renamed) -> HeldTensors:
    """Returns the tensors of a quantized checkpoint, with its weights in their own bits.

    Args:
        base (BaseCheckpoint): The checkpoint.
        renamed (callable): Takes a checkpoint; returns new name -> OutputTensor.

    Raises CheckpointError if a weight cannot be held so, or joined weights differ in their forms.
    """
    columns = {name: tensor.shape[-1] for name, tensor in renamed(base).items() if tensor.shape}
    views = {field: base.holding(field) for field in TENSOR_NAMES}
    try:
        by_field = {field: renamed(view) for field, view in views.items()}
    except CheckpointError as error:
        # In float they could be joined.
        raise CheckpointError(
            f"{error} quantize_base (--quantize-base) is as_stored, but the weights of a joined cell must be in one "
            f"form. {HOLD_ADVICE}"
        ) from error
    tensors = dict(by_field["codes"])
    forms = {}
    for name, codes in by_field["codes"].items():
        if codes.dtype != np.uint8:
            continue
        held = {field: by_name[name] for field, by_name in by_field.items()}
        tensors.update(
            {tensor_name(name, field): held[field]._replace(name=tensor_name(name, field)) for field in held}
        )
        bits = 8 * codes.shape[1] // columns[name]
        forms[name] = IntegerForm(bits, held["scales"].shape[1], held["scales"].dtype)
    if any(name.rpartition(".mlp.experts.")[1] for name in forms):
        raise CheckpointError(
            f"{base.path} holds routed experts in a quantized form, but quantize_base: as_stored holds linear cells "
            f"alone. {HOLD_ADVICE}"
        )
    return HeldTensors(tensors, forms, views["codes"])
