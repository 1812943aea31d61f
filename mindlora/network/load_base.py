"""load_base and hold_base: fill a network from a checkpoint of its base, and refuse incomplete checkpoints."""

import functools
import logging
import os
from typing import Dict, List, Set, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, nn

from mindlora.core.errors import CheckpointError, ConfigError, UnsupportedCellError
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32, to_float32
from mindlora.core.numerics.integers import IntegerForm, tensor_name
from mindlora.core.numerics.nf4 import TENSOR_NAMES
from mindlora.core.text import listed
from mindlora.files.base.convert import in_hugging_face_names, in_mindformers_names
from mindlora.files.base.held import held_tensors
from mindlora.files.base.joined import add_joined
from mindlora.files.base.quantized.stored import HOLD_ADVICE
from mindlora.files.base.reader import WORLDS, BaseCheckpoint
from mindlora.files.base.writer import OutputTensor
from mindlora.models import names
from mindlora.models.architectures.architecture import HF, LEGACY, Architecture
from mindlora.network.cells.linear_base import parallel_linear_types, plain_linear_types
from mindlora.network.cells.parallel_linear import IntegerParallelLinear
from mindlora.network.cells.score import score_of
from mindlora.network.cells.stacked import StackedLoRADense
from mindlora.network.quantized.quantized_dense import IntegerDense
from mindlora.network.tensors import as_tensor
from mindlora.network.tree import Tree, adapter_path, lora_cells, refusal, refusals, replace_in, saved_module_parameters

logger = logging.getLogger("mindlora")

_NUMPY = {"Float32": np.dtype("<f4"), "Float16": np.dtype("<f2"), "BFloat16": BFLOAT16}
# Parameters of a network for serving besides the base's weights.
CACHES = (".key_cache", ".value_cache")
_ZEROS = tensor_name("", "zeros")
_OF_GROUPS = tuple(TENSOR_NAMES[field] for field in ("scales", "offsets"))


def load_base(network: nn.Cell, path: str, mapped: bool = False) -> List[str]:
    """Fills the parameters of a network from a checkpoint of its base.

    One tensor at a time is read and cast to the parameter's dtype, so that the host holds one copy of the base and one
    tensor more. Parameters of adapters, caches, saved modules that already have values, and a classifier's head that
    the checkpoint lacks are unchanged.

    Args:
        network (nn.Cell): A model of MindFormers, its linear cells quantized if the checkpoint's are; or a
            network whose ``parameter_names`` are "hf", Hugging Face's. Best built under
            mindspore.nn.utils.no_init_parameters, so that no values are drawn only to be replaced here.
        path (str): A file or folder with MindFormers' or Hugging Face's names.
        mapped (bool): Whether parameters that need no conversion stay in their safetensors file, on a CPU: their pages
            come into memory when they are used, and processes share them. Writes to a parameter stay in this
            process. The file must not be written to while the network is used. Default: False.

    Returns:
        list of str, notes for users: which weights were quantized in the file, and what holds them now.

    Raises:
        ConfigError: The path is empty or does not exist.
        CheckpointError: The file cannot be read or lacks parameters, or one has another shape or kind of dtype.
    """
    if not path:
        raise ConfigError(
            "load_checkpoint is empty: a model with random weights has nothing to say. Name the base with "
            "--load_checkpoint."
        )
    if not os.path.exists(path):
        raise ConfigError(f"load_checkpoint: {path} does not exist. Correct the path (--load_checkpoint).")
    parameters = _parameters_of_base(network)
    # A weight in a quantized form is rounded once, to the parameter's dtype.
    with BaseCheckpoint(path, mapped, decode_to=np.dtype(np.float32)) as base:
        tensors, base = _read(network, parameters, base)
        new = _new_heads(network) - set(tensors)
        computed = set(filter(names.is_computed, parameters))
        missing = sorted(set(parameters) - set(tensors) - new - computed)
        if missing:
            raise CheckpointError(
                f"{path} lacks {len(missing)} parameters of the network: {listed(missing)}. Name the checkpoint of the "
                "model that the YAML describes."
            )
        _check_biases(network, set(tensors) - set(parameters), path)
        filled = {name: parameter for name, parameter in parameters.items() if name in tensors}
        for name, parameter in filled.items():
            _check(parameter, tensors[name], path)
        for name, parameter in filled.items():
            _fill(parameter, tensors[name])
        return base.decoded.notes(_dtypes_of_linear(filled, base.architecture)) if base.decoded else []


def held_forms(network: nn.Cell, path: str) -> Dict[str, IntegerForm]:
    """Returns parameter name -> form of the quantized weights of a checkpoint that are held in their own bits.

    Args:
        network (nn.Cell): A model of MindFormers in float, or one under Hugging Face's names, as for load_base.
        path (str): The checkpoint.

    Raises CheckpointError if it holds no such weights, or one cannot be held so.
    """
    parameters = _parameters_of_base(network)
    with BaseCheckpoint(path, decode_to=np.dtype(np.float32)) as base:
        forms = held_tensors(base, functools.partial(_tensors_for, network, parameters)).forms
    # A network with a joined weight does not have its parts.
    return {name: form for name, form in forms.items() if name in parameters}


def _read(
    network: nn.Cell, parameters: Dict[str, Parameter], base: BaseCheckpoint
) -> Tuple[Dict[str, OutputTensor], BaseCheckpoint]:
    """Returns the tensors for a network, in their own bits where it holds weights so, and their checkpoint."""
    if not any(name.endswith(_ZEROS) for name in parameters):
        return _tensors_for(network, parameters, base), base
    held = held_tensors(base, functools.partial(_tensors_for, network, parameters))
    return held.tensors, held.base


def _dtypes_of_linear(filled: Dict[str, Parameter], architecture: Architecture) -> str:
    """Returns the dtype of the weights of linear cells, or their dtypes if they differ."""
    tables = [table(world) for table in (architecture.embedding_table, architecture.head_weight) for world in WORLDS]
    weights = [parameter for name, parameter in filled.items() if parameter.ndim > 1 and name not in tables]
    return " and ".join(sorted({str(parameter.dtype).lower() for parameter in weights}))


def _parameters_of_base(network: nn.Cell) -> Dict[str, Parameter]:
    others = {parameter.name for parameter in saved_module_parameters(network) if not parameter.has_init}
    cells = [cell for _, cell in lora_cells(network)]
    for cell in cells:
        others.update(parameter.name for parameter in cell.shared_parts().values())
    cells += [cell for _, cell in network.cells_and_names() if isinstance(cell, StackedLoRADense)]
    for cell in cells:
        others.update(parameter.name for parameter in cell.lora_parameters())
    return {
        parameter.name: parameter
        for parameter in network.get_parameters()
        if parameter.name not in others and not parameter.name.endswith(CACHES)
    }


def _new_heads(network: nn.Cell) -> Set[str]:
    """Returns the parameters that a checkpoint of the base may lack: those of the head of a classifier."""
    score = score_of(network)
    return set() if score is None else {parameter.name for parameter in score.get_parameters()}


def _tensors_for(network: nn.Cell, parameters: Dict[str, Parameter], base: BaseCheckpoint) -> Dict[str, OutputTensor]:
    """Returns the tensors of a checkpoint under the names of the network's parameters, with its joined ones."""
    config = network.config
    if getattr(network, "parameter_names", LEGACY) == HF:
        kv_heads = config.n_kv_heads or config.num_heads
        return {tensor.name: tensor for tensor in in_hugging_face_names(base, config.num_heads, kv_heads)}
    tensors = {tensor.name: tensor for tensor in in_mindformers_names(base)[0]}
    # In mcore's names the cells are joined already.
    if base.architecture.legacy:
        # An mcore network, which lacks both, is refused for the names of its parameters.
        kv_heads = getattr(config, "n_kv_heads", None) or getattr(config, "num_heads", None)
        add_joined(parameters, tensors, kv_heads)
    return tensors


def _check_biases(network: nn.Cell, others: Set[str], path: str) -> None:
    """Raises CheckpointError if a network under Hugging Face's names has no place for biases of the checkpoint.

    A key of the YAML decides whether an mcore model has them; its default does not suit every checkpoint.
    """
    biases = sorted(name for name in others if name.endswith("_proj.bias"))
    if getattr(network, "parameter_names", LEGACY) == HF and biases:
        raise CheckpointError(
            f"{path} has biases that the network lacks: {listed(biases)}. Set model.model_config.attention_bias: True."
        )


def _check(parameter: Parameter, tensor: OutputTensor, path: str) -> None:
    packed = _is_packed(parameter)
    same_shape = tuple(tensor.shape) == tuple(parameter.shape) or _has_smaller_groups(parameter, tensor)
    if not same_shape or packed != (tensor.dtype == np.uint8):
        raise CheckpointError(
            f"{path}: {tensor.name} is {list(tensor.shape)} of {tensor.dtype}, but the network needs "
            f"{list(parameter.shape)} of {parameter.dtype}. Name the checkpoint of the model that the YAML describes"
            f"{'' if packed == (tensor.dtype == np.uint8) else ', and quantize_base as the checkpoint is'}."
        )


def _fill(parameter: Parameter, tensor: OutputTensor) -> None:
    array = tensor.rows(0, tensor.row_count).reshape(tensor.shape)
    if not _is_packed(parameter) and array.dtype != _NUMPY[str(parameter.dtype)]:
        array = from_float32(to_float32(array), _NUMPY[str(parameter.dtype)])
    # The tensor takes over the array's memory: it is this function's alone, mapped, or copied here.
    value = as_tensor(array)
    parameter.set_data(value, slice_shape=value.shape != parameter.shape)


def _has_smaller_groups(parameter: Parameter, tensor: OutputTensor) -> bool:
    """Returns whether these are scales or offsets of a 4-bit weight that was taken out of a joined one."""
    return parameter.name.endswith(_OF_GROUPS) and len(tensor.shape) == 1 and tensor.shape[0] > parameter.shape[0]


def _is_packed(parameter: Parameter) -> bool:
    return str(parameter.dtype) == "UInt8"


def hold_base(network: nn.Cell, path: str) -> Tuple[str, ...]:
    """Replaces each linear cell of ``network`` whose weight a checkpoint has in integers by IntegerDense.

    load_base then fills them with the file's own bits. Float weights are discarded. Apply LoRA afterwards.

    Args:
        network (nn.Cell): A model of MindFormers, or one for serving, in float; best built under
            mindspore.nn.utils.no_init_parameters.
        path (str): The checkpoint: a folder in a quantized form, such as GPTQ, AWQ or compressed-tensors.

    Returns:
        tuple of str, the paths of the cells.

    Raises:
        CheckpointError: The checkpoint holds no quantized weights, or one cannot be held in its own bits.
        ConfigError: The device is not a CPU.
        UnsupportedCellError: A cell with such a weight is of another kind, or sharded; all of them are listed.
        BackendError: The library of mindlora's CPU operators is missing.
    """
    if ms.get_context("device_target") != "CPU":
        raise ConfigError(
            f"quantize_base (--quantize-base) is as_stored, but the device is {ms.get_context('device_target')}, for "
            f"which no operator multiplies by integers. {HOLD_ADVICE}"
        )
    tree = Tree(network)
    forms = held_forms(network, path)
    parallel = parallel_linear_types()
    types = (*plain_linear_types(), *parallel)
    cells = {}
    for at, cell in tree.cells.items():
        if at and isinstance(cell, types) and getattr(cell, "weight", None) is not None:
            prefix = adapter_path(cell, at)
            if f"{prefix}.weight" in forms:
                cells[prefix] = cell
    kinds = {
        prefix: IntegerParallelLinear if isinstance(cell, parallel) else IntegerDense for prefix, cell in cells.items()
    }
    refused = refusals({prefix: refusal(kinds[prefix].check, cell) for prefix, cell in cells.items()})
    missing = [name for name in forms if name.rpartition(".")[0] not in cells]
    if refused or missing:
        if missing:
            refused.append(f"no linear cell has the name of {listed(missing)}")
        raise UnsupportedCellError(
            f"quantize_base (--quantize-base) is as_stored, but cells cannot hold their weights so. "
            f"{'; '.join(refused)}. {HOLD_ADVICE}"
        )
    made = {
        id(cell): kinds[prefix].from_dense(cell, prefix, forms[f"{prefix}.weight"]) for prefix, cell in cells.items()
    }
    replace_in(tree.modules.values(), made)
    logger.info("Held in the bits of %s: %d cells, %s.", path, len(cells), listed(cells))
    return tuple(cells)
