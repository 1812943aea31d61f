"""The reference of preference training: the initial network, and its log-probabilities in the data.

The network shares the base's parameters. The data also holds the reference's fingerprint.
"""

import hashlib
import itertools
from typing import Dict, Iterator, Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.core.errors import ConfigError, DataError
from mindlora.data.mindrecord import first_rows, replace_mindrecord, write_rows
from mindlora.files.adapters.fingerprint import sampled_elements, sampled_paths
from mindlora.models.names import TRANSIENT
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.embedding import NoisyEmbedding
from mindlora.network.cells.stacked import StackedLoRADense
from mindlora.network.tensors import to_array
from mindlora.network.tree import copy_cells, lora_cells, replace_children
from mindlora.run.checks.data_rows import Row
from mindlora.training.preference.settings import REFERENCE, REFERENCE_FINGERPRINT

# MindFormers reads columns as int32. The unit is 2^-22 nats, as fine as float32 at 2 to 4 nats.
_STEPS = 1 << 22


def reference_network(network: nn.Cell) -> nn.Cell:
    """Returns a network that keeps computing what ``network`` computes now, however it is trained.

    It shares the frozen parameters of ``network``, so the base is in memory once. A new adapter, which adds nothing
    yet, is left out. Other trainable parameters, such as a loaded adapter, are copied.

    Raises ConfigError if the adapters have yet to be initialized from the base (lora_init: pissa and similar).
    """
    waiting = [path for path, cell in lora_cells(network) if cell.will_change_base]
    if waiting:
        raise ConfigError(
            f"preference compares with the network as training finds it, and the adapter of {waiting[0]} takes its "
            "part out of the base when training begins (lora_init). Compute the reference before training (mindlora "
            "reference, precomputed_reference: True), use another lora_init, or a loss without a reference: simpo, "
            "orpo or cpo."
        )
    new = [cell for _, cell in lora_cells(network) if adds_nothing(cell)]
    # Several adapters always begin as new ones.
    new += [cell for _, cell in network.cells_and_names() if isinstance(cell, StackedLoRADense)]
    left_out = {id(parameter) for cell in new for parameter in cell.lora_parameters()}
    trained = [p for p in network.get_parameters() if p.requires_grad and id(p) not in left_out]
    reference, copies = copy_cells(network, {id(parameter): _copy(parameter) for parameter in trained})
    replacements: Dict[int, nn.Cell] = {id(copies[id(cell)]): copies[id(cell)].plain_cell() for cell in new}
    for _, cell in reference.cells_and_names():
        if isinstance(cell, NoisyEmbedding):
            replacements[id(cell)] = cell.embedding
    replace_children(reference, replacements)
    reference.set_train(network.training)
    return reference


def adds_nothing(cell: LoRACell) -> bool:
    """Returns whether an adapter is new and so leaves the base's output unchanged."""
    zero_part = cell.parts()[cell.variant.zero_part]
    return bool(zero_part.has_init) or not np.any(zero_part.asnumpy())


def _copy(parameter):
    return Parameter(parameter.asnumpy().copy(), name=f"{TRANSIENT}reference.{parameter.name}", requires_grad=False)


def to_column(log_probabilities: np.ndarray) -> np.ndarray:
    """Returns log-probabilities of tokens, float32, in nats, as int32 of the same shape.

    Raises DataError if one is not finite, or below -512.
    """
    if not (log_probabilities > -(2**31) / _STEPS).all():
        raise DataError(
            f"The reference gives a token the log-probability {log_probabilities.min()}: the base is not the model "
            "that the YAML describes, or its values are not finite. Name another load_checkpoint."
        )
    return np.rint(log_probabilities.astype(np.float64) * _STEPS).astype(np.int32)


def from_column(column: Tensor) -> Tensor:
    """Returns the log-probabilities given to to_column, as a float32 tensor."""
    return column.astype(mstype.float32) * (1 / _STEPS)


def reference_fingerprint(network: nn.Cell) -> np.ndarray:
    """Returns a hash that identifies a reference, the network with which training begins: int32 [8].

    The base must be loaded, and a lora_init that changes the base not yet carried out: its settings are hashed, which
    together with the base determine it. It hashes samples of the base and all trainable values that were loaded.
    """
    content = hashlib.sha256()
    of_adapters = set()
    for path, cell in lora_cells(network):
        of_adapters.update(id(parameter) for parameter in cell.lora_parameters())
        if cell.will_change_base:
            content.update(f"{path} {cell.lora_init} {cell.lora_rank} {cell.scale};".encode())
        elif not adds_nothing(cell):
            # Settings that change what the same tensors compute.
            content.update(f"{path} {cell.variant.name} {cell.scale} {cell.invocation_tokens};".encode())
            loaded = [*cell.lora_parameters(), *cell.shared_parts().values()]
            _add(content, {parameter.name: parameter for parameter in loaded}, _all_elements)
    others = {p.name: p for p in network.get_parameters() if id(p) not in of_adapters}
    trained = {name: parameter for name, parameter in others.items() if parameter.requires_grad}
    content.update(str(sorted((name, tuple(parameter.shape)) for name, parameter in others.items())).encode())
    _add(content, {name: others[name] for name in sampled_paths(others)}, sampled_elements)
    _add(content, trained, _all_elements)
    return np.frombuffer(content.digest(), np.int32)


def _add(content, parameters, elements_of):
    for name in sorted(parameters):
        array = to_array(parameters[name])
        content.update(f"{name} {array.dtype};".encode())
        content.update(np.ascontiguousarray(elements_of(array)).tobytes())


def _all_elements(array):
    return array


def add_reference(paths: Sequence[str], network: nn.Cell, fingerprint: np.ndarray, batch_size: int) -> Dict[str, int]:
    """Adds the reference's columns to each MindRecord, replacing the file; returns path -> number of rows.

    Args:
        paths (sequence of str): The MindRecords.
        network (Cell): The reference, which returns the log-probabilities of labels in the form that PreferenceLoss
            takes.
        fingerprint (np.ndarray): The reference's reference_fingerprint.
        batch_size (int): Rows that are computed at once.

    Raises LoraError if a file cannot be read or written, which leaves the file unchanged.
    """
    counts = {}
    for path in dict.fromkeys(paths):
        with replace_mindrecord(path) as written:
            counts[path] = write_rows(_with_reference(path, network, fingerprint, batch_size), written)
    return counts


def _with_reference(path: str, network: nn.Cell, fingerprint: np.ndarray, batch_size: int) -> Iterator[Row]:
    """Yields the rows of a MindRecord with the reference's columns."""
    rows = first_rows(path, None)
    while batch := list(itertools.islice(rows, batch_size)):
        # The last batch is as large as the others, so that it needs no compilation.
        full = batch + batch[-1:] * (batch_size - len(batch))
        tokens = np.stack([row["input_ids"] for row in full])
        columns = _reference(network, tokens, np.stack([row["labels"] for row in full]))
        for row, column in zip(batch, columns):
            yield {**row, REFERENCE: column, REFERENCE_FINGERPRINT: fingerprint}


def _reference(network: nn.Cell, tokens: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the column ``reference`` of a batch, in the shape of its labels; no position predicts a first token."""
    width = tokens.shape[-1]
    found = network(*(Tensor(array.reshape(-1, width).astype(np.int32)) for array in (tokens, labels)))
    column = np.zeros((labels.size // width, width), np.int32)
    column[:, 1:] = to_column(found.asnumpy()).reshape(-1, width - 1)
    return column.reshape(labels.shape)
