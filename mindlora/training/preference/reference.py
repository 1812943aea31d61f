"""The reference of preference training: the network as training finds it, with the base's own parameters,
and its log-probabilities that are kept with the data: their form, and which reference they are of."""

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

# MindFormers reads columns as int32. These are steps of 2^-22 nats, which is as fine as float32 is at 2 to 4 nats.
_STEPS = 1 << 22


def reference_network(network: nn.Cell) -> nn.Cell:
    """Returns cells that compute what ``network`` computes now, whatever it is trained to.

    They have the frozen parameters of ``network``, so the base is in memory once. An adapter that is new, and adds
    nothing yet, is left out. What else trains, such as an adapter that was loaded, is copied.

    Raises ConfigError if the adapters are still to be made from the base (lora_init: pissa and its kin).
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
    # Several adapters begin as new ones.
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
    """Returns whether an adapter leaves the base's output as it is, because it is new."""
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
    """Returns what to_column was given, as a float32 tensor."""
    return column.astype(mstype.float32) * (1 / _STEPS)


def reference_fingerprint(network: nn.Cell) -> np.ndarray:
    """Returns what tells a reference from another one, int32 [8]: a hash of the network with which training begins.

    The base's weights have their values, and a lora_init that changes the base has not been carried out: then it is
    told by its settings, which with the base determine it. Of the base, samples are hashed; of what trains, all that
    was loaded.
    """
    content = hashlib.sha256()
    of_adapters = set()
    for path, cell in lora_cells(network):
        of_adapters.update(id(parameter) for parameter in cell.lora_parameters())
        if cell.will_change_base:
            content.update(f"{path} {cell.lora_init} {cell.lora_rank} {cell.scale};".encode())
        elif not adds_nothing(cell):
            # What the same tensors do depends on these.
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
    """Replaces each MindRecord by one with the columns of the reference; returns path -> number of rows.

    Args:
        paths (sequence of str): The MindRecords.
        network (Cell): The reference: it gives the log-probabilities of labels, as PreferenceLoss takes them.
        fingerprint (np.ndarray): What reference_fingerprint says of it.
        batch_size (int): Rows that are computed at once.

    Raises LoraError if a file cannot be read or written; it then stays as it is.
    """
    counts = {}
    for path in dict.fromkeys(paths):
        with replace_mindrecord(path) as written:
            counts[path] = write_rows(_with_reference(path, network, fingerprint, batch_size), written)
    return counts


def _with_reference(path: str, network: nn.Cell, fingerprint: np.ndarray, batch_size: int) -> Iterator[Row]:
    """Yields the rows of a MindRecord with the columns of the reference."""
    rows = first_rows(path, None)
    while batch := list(itertools.islice(rows, batch_size)):
        # The last batch is as large as the others, so that nothing is compiled for it.
        full = batch + batch[-1:] * (batch_size - len(batch))
        tokens = np.stack([row["input_ids"] for row in full])
        columns = _reference(network, tokens, np.stack([row["labels"] for row in full]))
        for row, column in zip(batch, columns):
            yield {**row, REFERENCE: column, REFERENCE_FINGERPRINT: fingerprint}


def _reference(network: nn.Cell, tokens: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the column ``reference`` of a batch, in the shape of its labels; nothing predicts a first token."""
    width = tokens.shape[-1]
    found = network(*(Tensor(array.reshape(-1, width).astype(np.int32)) for array in (tokens, labels)))
    column = np.zeros((labels.size // width, width), np.int32)
    column[:, 1:] = to_column(found.asnumpy()).reshape(-1, width - 1)
    return column.reshape(labels.shape)
