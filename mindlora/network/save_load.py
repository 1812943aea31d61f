"""save_lora and load_lora: the adapter of a network without the base, written atomically and loaded strictly."""

import functools
import logging
import warnings
from typing import List, Mapping, Optional, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindlora.core.errors import AdapterError, LoraError, NotFiniteError, ShapeMismatchError, UnexpectedTensorsError
from mindlora.core.numerics.dtypes import dtype_name, to_float32
from mindlora.core.numerics.pair_shapes import EMBEDDING
from mindlora.core.text import listed
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import matching, parts, tied_embeddings
from mindlora.files.adapters.adapter import Adapter, is_finite, listed_parts
from mindlora.files.adapters.dialects.peft_config import Extras
from mindlora.files.adapters.dialects.registry import FORMS
from mindlora.files.adapters.expert_pairs import stacked_paths
from mindlora.files.adapters.fingerprint import ON_BASE_MISMATCH
from mindlora.models import names
from mindlora.models.lora_config import LoraConfig
from mindlora.models.variants.registry import SHARED
from mindlora.network import initialize
from mindlora.network.adapter_matching import (
    NetworkCells,
    cell_shapes,
    check_invocation,
    check_rank_and_scale,
    selection_of,
    split_joined,
)
from mindlora.network.apply import put_lora
from mindlora.network.base_fingerprint import base_fingerprint, fingerprint_of
from mindlora.network.cells.score import score_of
from mindlora.network.registry import without_adapter
from mindlora.network.tensors import to_array
from mindlora.network.tree import Tree, adapter_path, lora_cells, mark_saved_module, saved_module_parameters

logger = logging.getLogger("mindlora")


def save_lora(
    network: nn.Cell,
    path: str,
    format: str = "peft",
    base_model: Optional[str] = None,
    part: Optional[str] = None,
    values: Optional[Mapping[str, np.ndarray]] = None,
) -> None:
    """Writes the adapter of ``network`` alone, in one atomic step.

    Args:
        network (nn.Cell): A network with LoRADense cells.
        path (str): Where to write: a folder with format "peft", "slora" or "diffusers", a .ckpt file with "ckpt", a
            .safetensors file with "mindformers" or "kohya". An adapter already there is replaced.
        format (str): "peft" for a folder with adapter_config.json and adapter_model.safetensors, which PEFT and vLLM
            load; "ckpt" or "mindformers" for one file under MindFormers' names; "slora" for the folder from which
            MindFormers serves adapters; "diffusers" for a folder with pytorch_lora_weights.safetensors and "kohya" for
            one file, both for a UNet or a text encoder of Stable Diffusion. Default: "peft".
        base_model (str): Name or path of the base model, written into adapter_config.json. Default: None.
        part (str): With "diffusers" and "kohya", the network's part of Stable Diffusion: "unet", "text_encoder"
            or "text_encoder_2". Default: None, by its paths.
        values (mapping): As for ``adapter_of``. Default: None.

    Raises:
        LoraError: The network holds no LoRADense cell or is merged; ``format`` is unknown or does not suit ``path``;
            ``path`` is a folder that holds more than an adapter.
        NotFiniteError: A tensor holds NaN or infinity; nothing is written.
    """
    adapter_files.check_adapter_output(str(path), format)
    parts.check_part(part)
    if part and FORMS[format].world:
        raise LoraError(f"part is {part!r}, but format {format!r} has no parts: it is for 'diffusers' and 'kohya'.")
    cells = dict(lora_cells(network))
    if not cells:
        raise LoraError("The network holds no LoRADense cell, so there is no adapter to save. Call apply_lora first.")
    adapter = adapter_of(network, values)
    if adapter.invocation_tokens and format != "peft":
        raise LoraError(
            f"The adapter acts from its invocation tokens on (alora_invocation_tokens), for which {format!r} has no "
            "place. Save it with format 'peft'."
        )
    adapter.base_model = base_model
    if format == "peft":
        split_joined(adapter, network, cells)
        adapter.selection = selection_of(adapter, network, cells)
        for embedding, head, _ in _tied_tables(network):
            tied_embeddings.add_head(adapter, embedding, head)
    bad = [key for key, array in adapter.tensors.items() if not is_finite(array)]
    if bad:
        raise NotFiniteError(
            f"The network holds LoRA tensors with NaN or infinity, so nothing was saved: {listed_parts(bad)}. Load an "
            "earlier checkpoint, and lower the learning rate."
        )
    parts.take(adapter, part, "The network")
    adapter_files.write(adapter, str(path), format)


def adapter_of(network: nn.Cell, values: Optional[Mapping[str, np.ndarray]] = None) -> Adapter:
    """Returns the adapter of ``network`` as arrays in the dtypes of its parameters, for the loaded base.

    Its paths are the network's own. In a sharded run, ``values`` is name -> whole array for each parameter of which the
    network has a slice; the adapter then has no fingerprint of the base, which is sliced as well.

    Raises LoraError if the adapter is merged into the base, its initialization from the base has not been applied,
    or its cells differ in use_rslora.
    """
    cells = dict(lora_cells(network))
    _check_not_merged(cells)
    for cell in cells.values():
        cell.prepare()
    tensors, left_out = _saved_tensors(cells)
    # All cells share these, so any one has them.
    shared = next(iter(cells.values())).shared_parts()
    tensors |= {SHARED[part]: to_array(parameter) for part, parameter in shared.items()}
    saved_modules = {parameter.name: to_array(parameter) for parameter in saved_module_parameters(network)}
    if values:
        saved_modules = {name: values.get(name, array) for name, array in saved_modules.items()}
        named = {(path, part): p.name for path, cell in cells.items() for part, p in cell.parts().items()}
        tensors = {key: values.get(named.get(key), array) for key, array in tensors.items()}
    rslora = {cell.use_rslora for cell in cells.values()}
    if len(rslora) > 1:
        raise LoraError(
            "Some cells of the network scale with use_rslora and some without, but an adapter has one setting. "
            "Apply LoRA with one setting of use_rslora."
        )
    score = score_of(network)
    adapter = Adapter(
        tensors,
        {path: float(cell.lora_alpha) for path, cell in cells.items() if path not in left_out},
        rslora.pop(),
        max(cell.dropout_rate for cell in cells.values()),
        saved_modules,
        fingerprint=base_fingerprint(network, left_out) if values is None else None,
        dialect="network",
        embeddings={path for path, cell in cells.items() if cell.layout is EMBEDDING},
        projection_key=max(cell.projection_key for cell in cells.values()),
        peft_fields={} if score is None else {"task_type": score.task.peft},
        invocation_tokens=next(iter(cells.values())).invocation_tokens,
    )
    if not all(cell.variant.in_files for cell in cells.values()):
        target = sum(cell.budget_settings.target_r for cell in cells.values())
        rank = sum(adapter.rank(path) for path in adapter.paths)
        adapter.allocation = {"rank": rank, "target": target, "left_out": left_out}
    adapter.complete_pairs("The network")
    initialize.append_initial_pairs(adapter, cells)
    return adapter


def _saved_tensors(cells):
    """Returns (path, part) -> array as in a file, and the cells without a rank, which it leaves out."""
    saved = {path: cell.saved_parts() for path, cell in cells.items()}
    if not any(saved.values()):
        # AdaLoRA before its first step: all of it adds nothing yet.
        saved = {path: cell.saved_parts(keep_zeros=True) for path, cell in cells.items()}
    tensors = {(path, part): array for path, parts in saved.items() for part, array in parts.items()}
    return tensors, [path for path, parts in saved.items() if not parts]


def load_lora(
    network: nn.Cell,
    path: str,
    strict: bool = True,
    on_base_mismatch: str = "warn",
    allow_pickle: bool = False,
    part: Optional[str] = None,
) -> None:
    """Reads an adapter into ``network``; after any error the network is unchanged.

    If the network holds LoRADense cells, the adapter must match them. If it holds none, they are created on the cells
    that the adapter names, with its ranks, scales and dtypes; call freeze_base to train further.
    An adapter trained from an initialization that changes the base (lora_init "pissa", ...) is saved at twice the rank,
    for the original base; a network built with that lora_init and lora_rank continues where training was saved.

    Args:
        network (nn.Cell): A network of linear cells, under MindFormers' or Hugging Face's names.
        path (str): An adapter that save_lora or PEFT wrote, or any other form that adapter_files.read takes. In a .ckpt
            or .safetensors of MindFormers' own LoRA, tensors of the base and of the optimizer are ignored.
        strict (bool): With False, missing and unexpected tensors only give a warning, and the rest is loaded.
            Default: True.
        on_base_mismatch (str): What to do if the adapter was trained on another base: "warn", "error" or
            "ignore". Default: "warn".
        allow_pickle (bool): Whether PEFT's older adapter_model.bin may be read: only its tensors are read, and none of
            its code is run. Default: False.
        part (str): The network's part of a Stable Diffusion adapter: "unet", "text_encoder" or "text_encoder_2".
            Default: None, the only part in the file, or all of them for a network that has them under these names.

    Raises:
        AdapterFormatError, TruncatedAdapterError: The file cannot be read.
        MissingTensorsError, UnexpectedTensorsError: With strict, the file and the network hold different tensors.
        RankMismatchError, ScaleMismatchError, ShapeMismatchError, NotFiniteError: A tensor cannot be used.
        BaseMismatchError: The adapter was trained on another base, with on_base_mismatch "error".
        UnsupportedCellError: The adapter is for a cell that cannot carry LoRA.
        LoraError: The network is merged, on_base_mismatch is unknown, or an initialization needs weights that have no
            values yet.
    """
    if on_base_mismatch not in ON_BASE_MISMATCH:
        raise LoraError(f"on_base_mismatch is {on_base_mismatch!r}: it must be 'warn', 'error' or 'ignore'.")
    tree = Tree(network)
    tree.give_heads_their_tables()
    cells = tree.adapted()
    _check_not_merged(cells)
    parts.check_part(part)
    adapter = _read(tree, str(path), allow_pickle, part)
    load = _load_into_lora_cells if cells else _load_with_new_cells
    load(tree, adapter, str(path), strict, on_base_mismatch)


def _read(tree, path, allow_pickle=False, part=None):
    """Reads an adapter under the paths of a network."""
    cell_paths, extras = _cell_paths(tree), Extras(initial_pairs=True, token_rows=True, invocation_tokens=True)
    adapter = adapter_files.read(path, allow_pickle, parts.Wanted(part, cell_paths), extras)
    parts.for_network(adapter, cell_paths, path)
    matching.shorten_to_bare_names(adapter, cell_paths)
    return adapter


def _cell_paths(tree) -> Tuple[str, ...]:
    """Returns the paths of all cells that have an adapter or can take one."""
    plain = without_adapter(tree.modules)
    return tuple(tree.adapted()) + tuple(adapter_path(cell, name) for name, cell in plain.items())


def check_base(network: nn.Cell, path: str, on_base_mismatch: str = "error", exact: bool = False) -> None:
    """Compares the base of ``network`` with the one that an adapter was trained on, and loads nothing.

    The network has AdaLoRA's adapters, which no file can be loaded into, or those of the file, under which the base has
    been loaded since. With ``exact``, a copy of the base in another dtype is another base.

    Raises BaseMismatchError if the adapter was trained on another base, with on_base_mismatch "error".
    """
    tree = Tree(network)
    adapter = _read(tree, str(path))
    left_out = (adapter.allocation or {}).get("left_out", [])
    if not matching.arrange(adapter, cell_shapes(network, tree.adapted())):
        fingerprint = functools.partial(base_fingerprint, network, left_out)
        matching.check_base(adapter, str(path), fingerprint, on_base_mismatch, exact)


def _load_into_lora_cells(tree, adapter, source, strict, on_base_mismatch):
    """Loads an adapter into the LoRADense cells of a network, which must match it."""
    network, cells = tree.network, tree.adapted()
    if not all(cell.variant.in_files for cell in cells.values()):
        raise LoraError(
            f"The network was built with AdaLoRA, whose ranks are not those of a file, so {source} cannot be "
            "loaded into its cells. Load it into a network without adapters, which gets the adapter's ranks."
        )
    weight_of = initialize.base_weights(adapter, cells, source)
    rearranged = matching.match(adapter, NetworkCells(network, cells), source, strict, weight_of)
    initial_pairs = initialize.split_initial_pairs(adapter, network, source)
    check_rank_and_scale(adapter, cells, source)
    initialize.check_frozen(adapter, cells, source)
    check_invocation(adapter, cells, source)
    saved_modules = _saved_module_parameters(adapter, source, network, cells, strict)
    adapter.check_finite(source)
    if not rearranged:
        matching.check_base(adapter, source, lambda: base_fingerprint(network), on_base_mismatch)
    _set_values(network, cells, adapter, saved_modules, initial_pairs)


def _load_with_new_cells(tree, adapter, source, strict, on_base_mismatch):
    """Puts the LoRADense cells that the adapter describes on a network without any, and loads it into them."""
    network = tree.network
    cells = {adapter_path(cell, name): cell for name, cell in without_adapter(tree.cells).items()}
    weight_of = initialize.base_weights(adapter, cells, source)
    rearranged = matching.match(adapter, NetworkCells(network, cells), source, strict, weight_of)
    saved_modules = _saved_module_parameters(adapter, source, network, cells, strict)
    adapter.check_finite(source)
    adapted = {path: cell for path, cell in cells.items() if (path, "A") in adapter.tensors}
    if not rearranged:
        matching.check_base(adapter, source, lambda: fingerprint_of(adapted), on_base_mismatch)
    cells = put_lora(tree, {path: adapted[path] for path in adapter.paths}, lambda path: _config(adapter, path))
    _set_values(network, cells, adapter, saved_modules, {})


def _set_values(network, cells, adapter, saved_modules, initial_pairs):
    """Sets the cells with an adapter, and the parameters of its saved modules, to the adapter's values."""
    for (path, part), array in adapter.tensors.items():
        cells[path].load_part(part, to_float32(array))
    initialize.subtract_initial_pairs(network, adapter, initial_pairs)
    if (adapter.fingerprint or {}).get("quantization") == "loftq":
        # Training from here on is also for LoftQ's base alone.
        for path in adapter.paths:
            cells[path].lora_init = "loftq" if cells[path].quantization else cells[path].lora_init
    for parameter, array in saved_modules:
        parameter.set_data(Tensor(np.ascontiguousarray(to_float32(array)), parameter.dtype))
        mark_saved_module(parameter)


def _config(adapter, path) -> LoraConfig:
    """Returns the configuration of one cell of an adapter, in a dtype that can hold all values of its parts."""
    # float32 holds float16 and bfloat16. float64 becomes float32 too: cells do not compute in it.
    dtypes = {dtype_name(array.dtype) for array in adapter.parts(path).values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    adapter.scale(path)
    with warnings.catch_warnings():
        # The warning about a small lora_alpha was given when the adapter was made.
        warnings.simplefilter("ignore")
        return LoraConfig(
            lora_rank=adapter.rank(path),
            lora_alpha=adapter.alphas[path],
            # In a form with one pair for each expert, PEFT's older adapters have a dropout, which stacked ones cannot.
            lora_dropout=0.0 if path in stacked_paths(adapter) else adapter.dropout,
            use_rslora=adapter.use_rslora,
            param_init_type=dtype if dtype in ("float16", "bfloat16") else "float32",
            alora_invocation_tokens=list(adapter.invocation_tokens) or None,
            **adapter.variant.fields_for(adapter),
        )


def _saved_module_parameters(adapter, source, network, cells, strict):
    """Returns (parameter, array) for the adapter's saved modules."""
    parameters = {names.parameter_in_adapters(p.name): p for p in network.get_parameters()}
    adapted = {names.to_mindformers(path) for path in adapter.paths}
    values = {name: parameter for name, parameter in parameters.items() if not parameter.has_init}
    tied_embeddings.drop_copies(adapter, lambda name: to_array(values[name]) if name in values else None)
    tied = _tied_tables(network)
    for _, _, weight in tied:
        table = None if weight.has_init else functools.partial(to_array, weight)
        tied_embeddings.settle(adapter, source, "the network", AdapterError, table)
    found = []
    for name, array in adapter.saved_modules.items():
        parameter = parameters.get(names.parameter_in_adapters(name))
        if parameter is None:
            # The base's own weight of an adapted output head; a network with tied embeddings does not have it.
            if name.rpartition(".")[0] in adapted.union(names.embeddings()):
                continue
            reason, advice = _no_place(cells, name, [head for _, head, _ in tied])
            if strict:
                raise UnexpectedTensorsError(
                    f"{source} holds {name}, a saved module (modules_to_save), which the network does not "
                    f"have{reason}. {advice}"
                )
            logger.warning(
                "%s holds %s, a saved module (modules_to_save), which the network does not have%s. Check "
                "modules_to_save. Loading the rest, as strict is False.",
                source,
                name,
                reason,
            )
        elif tuple(parameter.shape) != array.shape:
            tied_embeddings.check_vocabulary(name, array.shape, tuple(parameter.shape), source)
            raise ShapeMismatchError(
                f"{source}: {name}, a saved module (modules_to_save), is {list(array.shape)}, the "
                f"network's is {list(parameter.shape)}. Load it into the model it was trained on."
            )
        else:
            found.append((parameter, array))
    return found + [_with_token_rows(parameters, path, *rows, source) for path, rows in adapter.token_rows.items()]


def _no_place(cells, name, tied_heads) -> Tuple[str, str]:
    """Returns the end of a sentence on why a network has no such parameter, and what to do."""
    joined = names.joined_path(name.rpartition(".")[0])
    if joined in map(names.to_mindformers, cells):
        return f": it is a part of {joined} there", "Build the model with qkv_concat: False."
    if name in tied_heads:
        return ": its embeddings are tied", tied_embeddings.WAY_OUT
    return "", "Load it into the model it was trained on."


def _with_token_rows(parameters, path, indices, rows, source):
    """Returns (parameter, array) for an embedding with some rows replaced (PEFT's trainable_token_indices)."""
    parameter = next((p for name, p in parameters.items() if name.rpartition(".")[0] == path), None)
    if parameter is None or tuple(parameter.shape[1:]) != rows.shape[1:] or indices.max() >= parameter.shape[0]:
        shape = "no such table" if parameter is None else f"one of {list(parameter.shape)}"
        raise ShapeMismatchError(
            f"{source} holds {list(rows.shape)} for rows {listed(map(str, indices))} of {path}, but the network has "
            f"{shape}. Load it into the model it was trained on."
        )
    if parameter.has_init:
        raise LoraError(
            f"{source} holds rows of {path}, whose table has no values yet: load the base before the adapter."
        )
    array = to_float32(to_array(parameter)).copy()
    array[indices] = to_float32(rows)
    return parameter, array


def _tied_tables(network) -> List[Tuple[str, str, Parameter]]:
    """Returns (embedding, head, table), under MindFormers' names, for output heads whose weight is an embedding's."""
    heads, tables, tied = names.output_heads(), names.embeddings(), []
    for path, cell in network.cells_and_names():
        weight = getattr(cell, "weight", None)
        head = names.to_mindformers(path)
        if head in heads and isinstance(weight, Parameter):
            embedding = names.parameter_to_mindformers(weight.name) or weight.name
            tied += [(embedding, f"{head}.weight", weight)] if embedding.rpartition(".")[0] in tables else []
    return tied


def _check_not_merged(cells):
    merged = [path for path, cell in cells.items() if cell.merged]
    if merged:
        raise LoraError(f"The adapter is merged into the base, at {listed(merged)}. Call unmerge_lora first.")
