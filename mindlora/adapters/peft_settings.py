"""What an adapter_config.json says, put into the adapter whose tensors lie beside it and checked against them."""

from typing import List, Optional

import numpy as np

from mindlora.adapters.adapter import Adapter
from mindlora.adapters.dialects import peft, peft_config, peft_experts, slora
from mindlora.common.text import listed
from mindlora.config.variants.registry import STORED
from mindlora.errors import AdapterFormatError, MissingTensorsError, ShapeMismatchError, UnexpectedTensorsError
from mindlora.models import names

# PEFT adds both to modules_to_save of every classifier, and a model has one of them.
_CLASSIFIERS = ("classifier", "score")


def apply(adapter: Adapter, config: peft_config.PeftConfig, path: str, refusals: Optional[List[str]] = None) -> None:
    """Puts the content of adapter_config.json into ``adapter``, and checks its pairs against it.

    Args:
        adapter (Adapter): With its tensors; changed in place.
        config (PeftConfig): What lies beside them.
        path (str): The adapter, for messages.
        refusals (list of str): If given, what cannot be loaded is added to it in words. Default: None, it is raised.

    Raises:
        AdapterFormatError: Biases of the base were trained, or the file lacks the rows of trained tokens.
        MissingTensorsError, UnexpectedTensorsError: The two are of different kinds, a saved module is missing, or there
            are tensors of which the configuration says nothing.
        RankMismatchError, ShapeMismatchError: A pair does not have the declared rank.
    """
    adapter.use_rslora, adapter.dropout, adapter.base_model = config.use_rslora, config.dropout, config.base_model
    for variant in STORED:
        declared = getattr(config, variant.field)
        if declared != (adapter.variant is variant):
            error, found = (MissingTensorsError, "no ") if declared else (UnexpectedTensorsError, "")
            raise error(f"{path}: {variant.field} is {declared}, but the adapter has {found}{variant.tensors}.")
    adapter.projection_key = config.projection_key
    if adapter.dialect != peft.NAME:
        adapter.check_pairs(path)
        slora.check_rank(adapter, config, path)
        adapter.alphas = slora.alphas(adapter, config)
        return
    peft_experts.restore(adapter, config, path)
    adapter.check_pairs(path, {cell: config.rank_of(cell) for cell in adapter.paths})
    adapter.alphas = {cell: config.alpha_of(cell) for cell in adapter.paths}
    adapter.selection, adapter.peft_fields = dict(config.selection), dict(config.kept)
    adapter.initializer = config.initializer
    _take_token_rows(adapter, config, path)
    _check_saved_modules(adapter, list(config.modules_to_save), path, config.bias != "none")
    biases = [name for name in adapter.saved_modules if name.endswith(".bias")]
    if config.bias != "none" and biases:
        message = (
            f"{path}: bias is {config.bias!r}, so biases of the base were trained ({listed(biases)}), which is not "
            "supported: it must be 'none'."
        )
        if refusals is None:
            raise AdapterFormatError(message)
        refusals.append(message)


def _take_token_rows(adapter: Adapter, config: peft_config.PeftConfig, path: str) -> None:
    """Joins the rows of embeddings in the file and their indices in the configuration."""
    found = {}
    for module, indices in config.token_rows.items():
        cells = [cell for cell in adapter.token_rows if f".{names.to_hugging_face(cell)}".endswith(f".{module}")]
        for cell in cells:
            rows = adapter.token_rows[cell][1]
            if len(rows.shape) != 2 or len(rows) != len(indices):
                raise ShapeMismatchError(
                    f"{path}: trainable_token_indices names {len(indices)} rows of {module}, and the file holds "
                    f"{list(rows.shape)} for it. Save the adapter with PEFT again."
                )
            found[cell] = np.asarray(indices, np.int64), rows
        # PEFT saves the rows of tied embeddings once.
        is_tied = any(other != module and same == indices for other, same in config.token_rows.items())
        if not cells and not is_tied:
            raise MissingTensorsError(
                f"{path}: trainable_token_indices names rows of {module}, and the file holds none of it. Save the "
                "adapter with PEFT again."
            )
    if set(found) != set(adapter.token_rows):
        raise UnexpectedTensorsError(
            f"{path} holds rows of {listed(sorted(set(adapter.token_rows) - set(found)))}, of which "
            "trainable_token_indices says nothing. Save the adapter with PEFT again."
        )
    adapter.token_rows = found


def _check_saved_modules(adapter: Adapter, modules: List[str], path: str, has_biases: bool) -> None:
    present = [module for module in modules if any(peft.is_of_module(name, module) for name in adapter.saved_modules)]
    one_suffices = any(module in _CLASSIFIERS for module in present)
    for module in modules:
        if module not in present and not (one_suffices and module in _CLASSIFIERS):
            raise MissingTensorsError(f"{path}: modules_to_save names {module!r}, but the file holds no tensor of it.")
    own = {*adapter.paths, *names.embeddings(), *names.output_heads()}
    unknown = sorted(
        name
        for name in adapter.saved_modules
        if not any(peft.is_of_module(name, module) for module in modules)
        and name.rpartition(".")[0] not in own
        and not (has_biases and name.endswith(".bias"))
    )
    if unknown:
        raise UnexpectedTensorsError(
            f"{path} holds tensors that are neither LoRA's nor of modules_to_save: {listed(unknown)}."
        )
