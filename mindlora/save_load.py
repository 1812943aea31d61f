"""save_lora and load_lora: the adapter of a network alone, written atomically, loaded strictly."""

import logging
import warnings
from typing import Dict, Optional

import numpy as np
from mindspore import Tensor, nn

from mindlora import initialize
from mindlora.adapters import files as adapter_files
from mindlora.adapters.adapter import Adapter, is_finite, listed_parts
from mindlora.adapters.fingerprint import base_difference, forms_that_differ
from mindlora.adapters.pair_kinds import SHARED
from mindlora.apply import put_lora
from mindlora.common.text import listed
from mindlora.config import LoraConfig
from mindlora.errors import (
    BaseMismatchError,
    LoraError,
    NotFiniteError,
    ShapeMismatchError,
    TargetError,
    UnexpectedTensorsError,
)
from mindlora.models import names
from mindlora.models.targets import ALL_LINEAR, select_targets
from mindlora.nn import matching
from mindlora.nn.fingerprint import base_fingerprint, fingerprint_of
from mindlora.nn.registry import adaptable_linear_types, adaptable_types
from mindlora.nn.tensors import to_array
from mindlora.nn.tree import adapter_path, lora_cells, mark_saved_module, saved_module_parameters
from mindlora.numerics.dtypes import dtype_name, to_float32

logger = logging.getLogger("mindlora")


def save_lora(network: nn.Cell, path: str, format: str = "peft", base_model: Optional[str] = None) -> None:
    """Writes the adapter of ``network``, and nothing else of it, in one atomic step.

    Args:
        network (nn.Cell): A network with LoRADense cells.
        path (str): Where to write: a folder with format "peft" or "slora", a .ckpt file with "ckpt", a .safetensors
            file with "mindformers". What stands there is replaced.
        format (str): "peft" for a folder with adapter_config.json and adapter_model.safetensors, which PEFT and vLLM
            load; "ckpt" or "mindformers" for one file under MindFormers' names; "slora" for what MindFormers serves
            adapters from. Default: "peft".
        base_model (str): Name or path of the base model, noted in adapter_config.json. Default: None.

    Raises:
        LoraError: The network holds no LoRADense cell or is merged, or ``format`` is unknown or does not fit ``path``.
        NotFiniteError: A tensor holds NaN or infinity; nothing is written.
    """
    adapter_files.check_adapter_output(str(path), format)
    cells = dict(lora_cells(network))
    if not cells:
        raise LoraError("The network holds no LoRADense cell, so there is no adapter to save. Call apply_lora first.")
    adapter = adapter_of(network)
    adapter.base_model = base_model
    if format == "peft":
        matching.split_joined(adapter, matching.matched_cells(network, cells))
        adapter.selection = {"target_modules": _target_modules(network, cells, adapter)}
    bad = [place for place, array in adapter.tensors.items() if not is_finite(array)]
    if bad:
        raise NotFiniteError(
            f"The network holds LoRA tensors with NaN or infinity, so nothing was saved: {listed_parts(bad)}."
        )
    adapter_files.write(adapter, str(path), format)


def adapter_of(network: nn.Cell) -> Adapter:
    """Returns the adapter of ``network`` as arrays in the dtypes of its parameters, fit for the base as it was loaded.

    Raises:
        LoraError: The adapter is merged into the base, or its start has not been carried out.
    """
    cells = dict(lora_cells(network))
    _check_not_merged(cells)
    for cell in cells.values():
        cell.prepare()
    tensors = {
        (path, part): to_array(parameter) for path, cell in cells.items() for part, parameter in cell.parts().items()
    }
    # Of one cell: the others have the same.
    common = next(iter(cells.values())).shared_parts()
    tensors |= {SHARED[part]: to_array(parameter) for part, parameter in common.items()}
    whole = {parameter.name: to_array(parameter) for parameter in saved_module_parameters(network)}
    rslora = {cell.use_rslora for cell in cells.values()}
    if len(rslora) > 1:
        raise LoraError(
            "Some cells of the network scale with use_rslora and some without. One adapter has one of them."
        )
    adapter = Adapter(
        tensors,
        {path: float(cell.lora_alpha) for path, cell in cells.items()},
        rslora.pop(),
        max(cell.dropout_rate for cell in cells.values()),
        whole,
        fingerprint=base_fingerprint(network),
        dialect="network",
        embeddings={path for path, cell in cells.items() if cell.embeds},
        projection_key=max(cell.projection_key for cell in cells.values()),
    )
    adapter.take_shared_projection("The network")
    initialize.make_plain(adapter, cells)
    return adapter


def load_lora(
    network: nn.Cell, path: str, strict: bool = True, on_base_mismatch: str = "warn", allow_pickle: bool = False
) -> None:
    """Reads an adapter into ``network``; on any error nothing of the network has changed.

    Where the network holds LoRADense cells, the adapter must be what they were built for. Where it holds none, it gets
    them: on the cells that the adapter names, with its ranks, its scales and its dtypes; call freeze_base to train on.
    An adapter that was trained from a start which changes the base (lora_init "pissa", ...) fits the base as it was, at
    twice the rank; a network that was built with that start and lora_rank goes on where the adapter was saved.

    Args:
        network (nn.Cell): A network of linear cells, under MindFormers' or Hugging Face's names.
        path (str): What save_lora or PEFT wrote, or any other form that adapter_files.read takes; in a .ckpt or
            .safetensors of MindFormers' own LoRA, tensors of the base and of the optimizer are passed over.
        strict (bool): With False, missing and unexpected tensors are only warned of and what fits is loaded.
            Default: True.
        on_base_mismatch (str): What to do where the adapter was trained on another base: "warn", "error" or
            "ignore". Default: "warn".
        allow_pickle (bool): Whether PEFT's older adapter_model.bin may be read, of which only tensors are taken and
            nothing is run. Default: False.

    Raises:
        AdapterFormatError, TruncatedAdapterError: The file cannot be read.
        MissingTensorsError, UnexpectedTensorsError: With strict, the file and the network differ in tensors.
        RankMismatchError, ScaleMismatchError, ShapeMismatchError, NotFiniteError: A tensor cannot be used.
        BaseMismatchError: Another base, with on_base_mismatch "error".
        UnsupportedCellError: The adapter is for a cell that LoRA cannot be put on.
        LoraError: The network is merged, on_base_mismatch is unknown, or a start needs weights that are not there yet.
    """
    if on_base_mismatch not in ("warn", "error", "ignore"):
        raise LoraError(f"on_base_mismatch is {on_base_mismatch!r}: it must be 'warn', 'error' or 'ignore'.")
    path = str(path)
    cells = dict(lora_cells(network))
    bare = not cells
    _check_not_merged(cells)
    adapter = adapter_files.read(path, allow_pickle)
    if bare:
        cells = {
            adapter_path(cell, name): cell
            for name, cell in network.cells_and_names()
            if name and isinstance(cell, adaptable_types())
        }
    places = matching.matched_cells(network, cells)
    relaid = matching.match_to(adapter, places)
    if not bare:
        matching.check_kind(adapter, places, path)
    matching.check_names(adapter, _selected(adapter, cells) if bare else list(cells), places, path, strict)
    matching.check_shapes(adapter, places, path)
    initial_pairs = {} if bare else initialize.take_initial_pairs(adapter, network, path)
    if not bare:
        matching.check_rank_and_scale(adapter, places, path)
    whole = _saved_module_parameters(adapter, network, path, strict)
    adapter.check_finite(path)
    if not relaid and adapter.fingerprint is not None and on_base_mismatch != "ignore":
        adapted = [name for name in cells if (name, "A") in adapter.tensors]
        found = fingerprint_of({name: cells[name] for name in adapted}) if bare else base_fingerprint(network)
        _check_base(adapter, found, path, on_base_mismatch)
    if bare:
        put_lora(network, {name: cells[name] for name in adapter.paths}, lambda name: _config(adapter, name))
        cells = dict(lora_cells(network))
    for (name, part), array in adapter.tensors.items():
        cells[name].load_part(part, to_float32(array))
    initialize.settle_initialization(network, adapter.paths, initial_pairs)
    if (adapter.fingerprint or {}).get("quantization") == "loftq":
        # What is trained on from here fits LoftQ's base alone, too.
        for name in adapter.paths:
            cells[name].lora_init = "loftq" if cells[name].quantization else cells[name].lora_init
    for parameter, array in whole:
        _set(parameter, array)
        mark_saved_module(parameter)


def _config(adapter, path) -> LoraConfig:
    """Returns the configuration of one cell of an adapter, in its own dtype."""
    # float64 is no dtype that a cell computes in; PEFT has no such adapters.
    dtype = dtype_name(adapter.tensors[path, "A"].dtype)
    adapter.scale(path)
    with warnings.catch_warnings():
        # A small lora_alpha was warned of when the adapter was made.
        warnings.simplefilter("ignore")
        return LoraConfig(
            lora_rank=adapter.rank(path),
            lora_alpha=adapter.alphas[path],
            lora_dropout=adapter.dropout,
            use_rslora=adapter.use_rslora,
            use_dora=adapter.use_dora,
            use_vera=adapter.use_vera,
            projection_prng_key=adapter.projection_key if adapter.use_vera else None,
            param_init_type=dtype if dtype in ("float16", "bfloat16") else "float32",
        )


def _selected(adapter, cells):
    """Returns the cells that the adapter's own configuration selects, so that a pair that is lost is noticed."""
    selection = adapter.selection
    if not selection.get("target_modules"):
        return []
    # As apply_lora.
    types = adaptable_linear_types() if selection["target_modules"] == ALL_LINEAR else adaptable_types()
    plain = [path for path, cell in cells.items() if isinstance(cell, types)]
    try:
        chosen = select_targets(plain, selection["target_modules"], selection.get("exclude_modules"))
    except TargetError:
        # PEFT takes names that match nothing where others match; which pairs there are, the tensors say.
        return []
    layers = selection.get("layers_to_transform")
    if layers is not None:
        wanted = set(layers if isinstance(layers, list) else [layers])
        chosen = [path for path in chosen if names.layer_of(path) in wanted]
    whole = {name.rpartition(".")[0] for name in adapter.saved_modules}
    return [path for path in chosen if names.to_mindformers(path) not in whole or (path, "A") in adapter.tensors]


def _saved_module_parameters(adapter, network, source, strict):
    """Returns (parameter, array) for the modules that were trained whole."""
    parameters = {names.parameter_to_mindformers(p.name) or p.name: p for p in network.get_parameters()}
    adapted = {names.to_mindformers(path) for path in adapter.paths}
    found = []
    for name, array in adapter.saved_modules.items():
        parameter = parameters.get(name)
        if parameter is None:
            # The base's own weight of an adapted output head, which a network with tied embeddings does not have.
            if name.rpartition(".")[0] in adapted.union(names.embeddings()):
                continue
            message = f"{source} holds {name}, trained whole (modules_to_save), which the network does not have."
            if strict:
                raise UnexpectedTensorsError(message)
            logger.warning("%s Loading the rest, as strict is False.", message)
        elif tuple(parameter.shape) != array.shape:
            raise ShapeMismatchError(
                f"{source}: {name}, trained whole (modules_to_save), is {list(array.shape)}, the "
                f"network's is {list(parameter.shape)}."
            )
        else:
            found.append((parameter, array))
    return found


def _target_modules(network, cells, adapter):
    """Returns the leaf names of the adapted cells under Hugging Face names, or full paths where a leaf is not whole."""
    plain = {path.rpartition(".")[2] for path, cell in network.cells_and_names() if isinstance(cell, adaptable_types())}
    whole = not plain & {path.rpartition(".")[2] for path in cells}
    paths = [names.to_hugging_face(path) for path in adapter.paths if path]
    return sorted({path.rpartition(".")[2] for path in paths} if whole else set(paths))


def _check_not_merged(cells: Dict[str, nn.Cell]):
    merged = [path for path, cell in cells.items() if cell.merged]
    if merged:
        raise LoraError(f"The adapter is merged into the base, at {listed(merged)}. Call unmerge_lora first.")


def _check_base(adapter, found, path, on_base_mismatch):
    if found is None:
        logger.warning(
            "%s: the base has no values yet, so whether it is the one the adapter was trained on was not checked.", path
        )
        return
    difference = base_difference(adapter.fingerprint, found)
    forms = forms_that_differ(adapter.fingerprint, found)
    if difference and forms and adapter.fingerprint.get("shapes") == found["shapes"]:
        logger.warning(
            "%s was trained on a base in %s and this one is in %s: of the two, paths and shapes alone were compared.",
            path,
            *forms,
        )
    elif difference:
        message = f"{path} was trained on another base: {difference}. Load the base checkpoint it was trained on."
        if on_base_mismatch == "error":
            raise BaseMismatchError(message)
        warnings.warn(message, stacklevel=3)


def _set(parameter, array):
    parameter.set_data(Tensor(np.ascontiguousarray(to_float32(array)), parameter.dtype))
