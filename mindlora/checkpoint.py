"""save_lora and load_lora: LoRA tensors alone, written atomically, loaded strictly."""
import logging
import os
import warnings
from typing import Dict, Tuple

import numpy as np
from mindspore import Tensor, nn

from mindlora import adapter_file, names
from mindlora.adapt import lora_cells
from mindlora.adapter_file import Adapter
from mindlora.dialects import peft
from mindlora.errors import (BaseMismatchError, LoraError, MissingTensorsError, NotFiniteError,
                             RankMismatchError, ScaleMismatchError, ShapeMismatchError, UnexpectedTensorsError)
from mindlora.fingerprint import base_difference, base_fingerprint
from mindlora.nn.dense import linear_types

logger = logging.getLogger("mindlora")

Place = Tuple[str, str]


def save_lora(network: nn.Cell, path: str, format: str = "peft", base_model: str = None) -> None:
    """Writes the LoRA tensors of ``network``, and nothing else of it, in one atomic step.

    Args:
        network (nn.Cell): A network with LoRADense cells.
        path (str): Where to write: a folder, or a .ckpt file with format "ckpt". What stands there is replaced.
        format (str): "peft" for a folder with adapter_config.json and adapter_model.safetensors, "ckpt" for one
            MindSpore checkpoint under MindFormers' names. Default: "peft".
        base_model (str): Name or path of the base model, noted in adapter_config.json. Default: None.

    Raises:
        LoraError: The network holds no LoRADense cell, or ``format`` is unknown or does not fit ``path``.
        NotFiniteError: A tensor holds NaN or infinity; nothing is written.
    """
    if format not in ("peft", "ckpt"):
        raise LoraError(f"format is {format!r}: it must be 'peft' or 'ckpt'.")
    if (format == "ckpt") != str(path).endswith(".ckpt"):
        raise LoraError(f"path is {path!r}: format 'ckpt' writes a file that ends in .ckpt, format 'peft' a folder.")
    if os.path.isdir(path) if format == "ckpt" else os.path.isfile(path):
        raise LoraError(f"path is {path!r}, where a {'folder' if format == 'ckpt' else 'file'} stands, which an "
                        f"adapter with format {format!r} cannot replace. Remove it, or give another path.")
    cells = _cells_by_path(network)
    tensors = {place: parameter.asnumpy() for place, parameter in _parameters(cells).items()}
    _check_finite(tensors, "The network holds LoRA tensors with NaN or infinity, so nothing was saved")
    first = next(iter(cells.values()))
    ranks = {(cell.lora_rank, cell.lora_alpha) for cell in cells.values()}
    if len(ranks) > 1:
        raise LoraError(f"The adapters have different (rank, alpha): {sorted(ranks)}. One file holds one of each.")
    adapter = Adapter(tensors, first.lora_rank, first.lora_alpha, base_fingerprint(network))
    if format == "ckpt":
        adapter_file.write_ckpt(adapter, str(path))
    else:
        adapter_file.write_folder(adapter, str(path), peft.adapter_config(
            first.lora_rank, first.lora_alpha, first.dropout_rate, _target_modules(network, cells), base_model))


def load_lora(network: nn.Cell, path: str, strict: bool = True, on_base_mismatch: str = "warn") -> None:
    """Reads an adapter into the LoRADense cells of ``network``; on any error nothing of the network has changed.

    Args:
        network (nn.Cell): A network on which apply_lora was called with the adapter's rank, alpha and targets.
        path (str): What save_lora wrote, or a .ckpt or .safetensors of MindFormers' own LoRA, in which tensors of the
            base and of the optimizer are passed over.
        strict (bool): With False, missing and unexpected tensors are only warned of and what fits is loaded.
            Default: True.
        on_base_mismatch (str): What to do where the adapter was trained on another base: "warn", "error" or
            "ignore". Default: "warn".

    Raises:
        AdapterFormatError, TruncatedAdapterError: The file cannot be read.
        MissingTensorsError, UnexpectedTensorsError: With strict, the file and the network differ in tensors.
        RankMismatchError, ScaleMismatchError, ShapeMismatchError, NotFiniteError: A tensor cannot be used.
        BaseMismatchError: Another base, with on_base_mismatch "error".
        LoraError: The network holds no LoRADense cell, or on_base_mismatch is unknown.
    """
    if on_base_mismatch not in ("warn", "error", "ignore"):
        raise LoraError(f"on_base_mismatch is {on_base_mismatch!r}: it must be 'warn', 'error' or 'ignore'.")
    cells = _cells_by_path(network)
    adapter = adapter_file.read(str(path))
    adapter.tensors = _under_own_names(adapter.tensors, cells)
    parameters = _parameters(cells)
    _check_names(adapter, parameters, path, strict)
    _check_rank_and_scale(adapter, cells, path)
    usable = {place: array for place, array in adapter.tensors.items() if place in parameters}
    wrong = [f"{_name(place)} is {list(array.shape)}, the network's is {list(parameters[place].shape)}"
             for place, array in usable.items() if array.shape != tuple(parameters[place].shape)]
    if wrong:
        raise ShapeMismatchError(f"{path}: {len(wrong)} tensors have another shape: {'; '.join(wrong)}.")
    _check_finite(usable, f"{path} holds LoRA tensors with NaN or infinity, so nothing was loaded")
    _check_base(adapter, network, path, on_base_mismatch)
    for place, array in usable.items():
        parameter = parameters[place]
        parameter.set_data(Tensor(np.ascontiguousarray(array), parameter.dtype))


def _cells_by_path(network) -> Dict[str, nn.Cell]:
    cells = dict(lora_cells(network))
    if not cells:
        raise LoraError("The network holds no LoRADense cell. Call apply_lora, with the adapter's configuration, "
                        "first.")
    return cells


def _parameters(cells) -> Dict[Place, object]:
    return {(path, half): parameter for path, cell in cells.items()
            for half, parameter in zip("AB", cell.lora_parameters())}


def _under_own_names(tensors, cells):
    """Renames tensors to the network's own paths, which may be Hugging Face's where the reader gives MindFormers'."""
    own = {names.to_mindformers(path): path for path in cells}
    return {(own.get(names.to_mindformers(path), path), half): array for (path, half), array in tensors.items()}


def _target_modules(network, cells):
    """Returns the leaf names of the adapted cells under Hugging Face names, or full paths where a leaf is not whole."""
    plain = {path.rpartition(".")[2] for path, cell in network.cells_and_names() if isinstance(cell, linear_types())}
    whole = not plain & {path.rpartition(".")[2] for path in cells}
    paths = [names.to_hugging_face(path) for path in cells]
    return {path.rpartition(".")[2] for path in paths} if whole else set(paths)


def _check_names(adapter, parameters, path, strict):
    missing = [place for place in parameters if place not in adapter.tensors]
    unexpected = [place for place in adapter.tensors if place not in parameters]
    problems = []
    if unexpected:
        problems.append((UnexpectedTensorsError, f"{path} holds {len(unexpected)} LoRA tensors that the network has no "
                         f"place for: {_listed(unexpected)}. Check target_modules."))
    if missing:
        problems.append((MissingTensorsError, f"{path} lacks {len(missing)} LoRA tensors of the network: "
                         f"{_listed(missing)}. Check target_modules."))
    if not strict:
        for _, message in problems:
            logger.warning("%s Loading the rest, as strict is False.", message)
        if len(missing) == len(parameters):
            raise MissingTensorsError(f"{path} shares no LoRA tensor with the network. {problems[0][1]}")
    elif problems:
        # Both kinds are said at once: they are usually two sides of one mistake.
        raise problems[-1][0](" ".join(message for _, message in problems))


def _check_rank_and_scale(adapter, cells, path):
    ranks = {place: array.shape[0 if place[1] == "A" else -1] for place, array in adapter.tensors.items()
             if place[0] in cells and array.ndim == 2}
    wrong = {place: rank for place, rank in ranks.items() if rank != cells[place[0]].lora_rank}
    expected = sorted({cell.lora_rank for cell in cells.values()})
    if wrong and len(set(wrong.values())) == 1 and len(wrong) == len(ranks):
        raise RankMismatchError(f"{path} has rank {next(iter(wrong.values()))}, the network was built with lora_rank "
                                f"{expected[0]}: set lora_rank to {next(iter(wrong.values()))}. "
                                f"Tensors: {_listed(wrong)}.")
    if adapter.rank is not None and expected != [adapter.rank]:
        raise RankMismatchError(f"{path} declares rank {adapter.rank}, the network was built with lora_rank "
                                f"{expected[0]}: set lora_rank to {adapter.rank}.")
    alphas = sorted({cell.lora_alpha for cell in cells.values()})
    if adapter.alpha is not None and any(alpha != adapter.alpha for alpha in alphas):
        raise ScaleMismatchError(f"{path} was trained with lora_alpha {adapter.alpha:g}, the network was built with "
                                 f"{alphas[0]:g}: set lora_alpha to {adapter.alpha:g}, or its effect is scaled "
                                 "wrongly.")


def _check_finite(tensors, message):
    bad = [place for place, array in tensors.items() if not np.isfinite(array.astype(np.float32, copy=False)).all()]
    if bad:
        raise NotFiniteError(f"{message}: {_listed(bad)}.")


def _check_base(adapter, network, path, on_base_mismatch):
    if adapter.fingerprint is None or on_base_mismatch == "ignore":
        return
    found = base_fingerprint(network)
    if found is None:
        logger.warning("%s: the base has no values yet, so whether it is the one the adapter was trained on was not "
                       "checked.", path)
        return
    difference = base_difference(adapter.fingerprint, found)
    if difference:
        message = f"{path} was trained on another base: {difference}. Load the base checkpoint it was trained on."
        if on_base_mismatch == "error":
            raise BaseMismatchError(message)
        warnings.warn(message, stacklevel=3)


def _name(place):
    return f"{place[0]} {place[1]}".strip()


def _listed(places):
    return ", ".join(names.collapse_numbers([_name(place) for place in places]))
