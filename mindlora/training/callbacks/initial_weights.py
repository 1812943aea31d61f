"""Callbacks that load, compare and initialize what a run begins with: the base, and the adapters on it."""

import os
from typing import Dict

import numpy as np
from mindformers.tools.utils import get_real_rank
from mindspore import Callback, Parameter
from mindspore.train import RunContext

from mindlora.core.errors import MissingTensorsError, ScaleMismatchError, ShapeMismatchError, UnexpectedTensorsError
from mindlora.core.text import listed
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters.sharding import gather
from mindlora.models import names
from mindlora.network.initialize import initialize_adapters
from mindlora.network.load_base import load_base
from mindlora.network.tensors import to_tensor
from mindlora.network.tree import lora_cells
from mindlora.training.callbacks.common import register
from mindlora.training.callbacks.lora_checkpoint import LoraCheckpoint
from mindlora.training.log import logger
from mindlora.training.model.network import base_of, check_loaded_base
from mindlora.training.resume import sharded_adapter


@register
class BaseWeights(Callback):
    """Loads load_checkpoint instead of MindFormers, which holds the complete file beside the network while it loads.

    mindlora-run adds it where plugin.launching.base_loading takes over loading the base. A tensor that the checkpoint
    lacks is an error here; MindFormers would initialize it at random.

    Args:
        path (str): The base, as for load_base.
    """

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    def on_train_begin(self, run_context: RunContext) -> None:
        """Loads the base, and initializes everything else: the adapter and the optimizer's states."""
        network = run_context.original_args().train_network
        for note in load_base(base_of(network), self.path):
            logger.info("%s: %s", self.path, note)
        network.init_parameters_data()
        # When the Trainer called set_train, there was no base yet from which to compute DoRA's magnitudes.
        for _, cell in lora_cells(base_of(network)):
            cell.prepare()


@register
class BaseCheck(Callback):
    """Compares the base that pet_config.adapter_path was trained on with the one that MindFormers has loaded.

    mindlora-run adds it to a training or evaluation run with adapter_path; LoraCheckpoint makes the same comparison.
    (In a prediction run, the network compares the bases before its first answer.)
    """

    def on_train_begin(self, run_context: RunContext) -> None:
        """Compares the two bases before the first step; raises BaseMismatchError if on_base_mismatch says so."""
        check_loaded_base(run_context.original_args().train_network)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Compares the two bases before the first batch, as on_train_begin does."""
        check_loaded_base(run_context.original_args().network)


@register
class LoraInitialization(Callback):
    """Initializes adapters whose lora_init is computed from the base (pissa, olora, mica), once the base is loaded.

    LoraCheckpoint does this too, so only a run without it needs this callback. mindlora-run adds it automatically.
    """

    def on_train_begin(self, run_context: RunContext) -> None:
        """Initializes the adapters."""
        params = run_context.original_args()
        # LoraCheckpoint resumes the run or initializes the adapters itself.
        if not any(isinstance(callback, LoraCheckpoint) for callback in params.list_callback):
            initialize_adapters(base_of(params.train_network))


@register
class AdapterSlices(Callback):
    """Loads this rank's slices of an adapter when training begins; by then, MindSpore has cut the network.

    mindlora-run adds this callback where pet_config.adapter_path is a folder that ``mindlora adapter scatter`` wrote.

    Args:
        path (str): The folder; it holds rank_0, rank_1, ...
    """

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    def on_train_begin(self, run_context: RunContext) -> None:
        """Loads the slices.

        Raises:
            MissingTensorsError, UnexpectedTensorsError: The rank's parameters differ from those in the file.
            ShapeMismatchError: A slice's shape differs from the parameter's: it was cut by another strategy, or the
                network is not cut yet.
            ScaleMismatchError: The adapter was trained with another lora_alpha.
        """
        params = run_context.original_args()
        network = base_of(params.train_network)
        layouts = params.train_network.parameter_layout_dict
        parameters = sharded_adapter.adapter_parameters(network)
        rank = get_real_rank()
        file = gather.rank_file_of(os.path.join(self.path, f"rank_{rank}"), rank)
        content = gather.read_rank_file(file, lambda name: True)
        slices = {name: p for name, p in parameters.items() if name in layouts} or parameters
        _check_names(content.tensors, slices, file.path)
        _check_shapes(content.tensors, slices, file.path)
        _check_scale(network, adapter_metadata.parse(content.text, file.path), file.path)
        for name, array in content.tensors.items():
            value = to_tensor(array).astype(slices[name].dtype)
            # Otherwise, MindSpore would cut it again at the next compilation.
            slices[name].set_data(value, slice_shape=True)
        logger.info("Slices of an adapter loaded from %s.", file.path)


def _check_names(tensors: Dict[str, np.ndarray], parameters: Dict[str, Parameter], path: str) -> None:
    lost = sorted(set(parameters) - set(tensors))
    extra = sorted(set(tensors) - set(parameters))
    if lost:
        raise MissingTensorsError(
            f"{path} lacks {listed(lost)}, which this rank has. Scatter the adapter again, with the strategy of this "
            "run."
        )
    if extra:
        raise UnexpectedTensorsError(
            f"{path} holds {listed(extra)}, which this rank does not have. Scatter the adapter again, with the "
            "strategy of this run."
        )


def _check_shapes(tensors: Dict[str, np.ndarray], parameters: Dict[str, Parameter], path: str) -> None:
    for name, array in tensors.items():
        if array.shape != tuple(parameters[name].shape):
            raise ShapeMismatchError(
                f"{path}: {name} is a slice {list(array.shape)}, but this rank's parameter is "
                f"{list(parameters[name].shape)}: the adapter was cut by another strategy, or, if load_checkpoint is "
                "empty, the network is not cut yet. Scatter it again with the strategy of this run, or name the whole "
                "adapter in adapter_path."
            )


def _check_scale(network, metadata, path: str) -> None:
    """Raises ScaleMismatchError unless the adapter's lora_alpha values equal those of the cells."""
    built = {names.to_mindformers(cell_path): cell for cell_path, cell in lora_cells(network)}
    for cell_path, alpha in metadata.get("alphas", {}).items():
        cell = built.get(names.to_mindformers(cell_path))
        if cell is not None and (cell.lora_alpha, cell.use_rslora) != (alpha, metadata.get("use_rslora", False)):
            raise ScaleMismatchError(
                f"{path} was trained with lora_alpha {alpha:g} and use_rslora {metadata.get('use_rslora', False)} at "
                f"{cell_path}, but the network was built with {cell.lora_alpha:g} and {cell.use_rslora}. Set both in "
                "pet_config as they were."
            )
