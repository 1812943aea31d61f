"""The PyNative Trainer's checkpoints: checks their completeness, and adds a file of further states.

MindFormers only logs missing parameters. The file beside each checkpoint holds the callbacks' states, and more of the
adapter.
"""

import os
import zipfile
from typing import Any, Dict, Iterator, List, Mapping, MutableMapping, Sequence

import mindspore as ms
import numpy as np
from mindformers.tools.utils import get_real_rank
from mindspore import Parameter, Tensor, nn

from mindlora.core import atomic
from mindlora.core.errors import CheckpointError, ConfigError
from mindlora.core.formats import step_folder
from mindlora.core.json_files import parse_object, write_json
from mindlora.core.mindformers_version import require_mindformers
from mindlora.core.text import listed
from mindlora.models import names
from mindlora.models.architectures.classifiers import is_of_head
from mindlora.models.lora_config import AS_STORED
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.stacked import StackedLoRADense
from mindlora.network.quantized.nf4 import packed_parameters
from mindlora.network.tree import lora_cells
from mindlora.training.pynative.configuration import refuse_division
from mindlora.training.resume.training_state import callback_states, restore_callbacks

require_mindformers("2.0")
from mindformers.pynative.callback import CheckpointCallback, TrainerCallback  # noqa: E402

# The fingerprint of the base before lora_init has changed it.
_BASE = "base_fingerprint"
# The fingerprint of preference training's reference, if it comes from the data.
_REFERENCE = "reference_fingerprint"


# quantize_base under MindFormers' PyNative Trainer: weights become 4-bit between checkpoint and model.


def check_quantization(quantize_base: Any, checkpoint: Any) -> None:
    """Raises ConfigError if the current Trainer does not support quantize_base.

    Args:
        quantize_base (str): The setting in pet_config, or None.
        checkpoint (CheckpointConfig): The node of the YAML.
    """
    if quantize_base is None:
        return
    if quantize_base == AS_STORED:
        raise ConfigError(
            f"pet_config.quantize_base is {quantize_base}, and MindFormers' PyNative Trainer loads the base in float. "
            "Set quantize_base: nf4, or train in graph mode."
        )
    refuse_division(f"pet_config.quantize_base is {quantize_base!r}", ", or remove it")
    if not checkpoint.load_path and not getattr(checkpoint, "base_load_path", None):
        raise ConfigError(
            f"pet_config.quantize_base is {quantize_base!r}, but no base is loaded that could be quantized. Set "
            "checkpoint.load_path."
        )


def quantize_loaded(network: nn.Cell, loaded: MutableMapping[str, Parameter]) -> None:
    """Quantizes a checkpoint's weights that the network holds in 4 bits, in place, one after another.

    Weights that are in 4 bits already, as in a checkpoint of such a run, stay unchanged.

    Args:
        network (nn.Cell): The network into which the checkpoint is loaded.
        loaded (mapping): Name -> value of each parameter that the checkpoint has.

    Raises:
        QuantizationError: A weight holds infinity or NaN.
    """
    for _, cell in network.cells_and_names():
        if getattr(cell, "quantization", None):
            name = cell.weight.name
            if name in loaded and not is_packed(loaded[name]):
                packed = packed_parameters(loaded[name], name, name)
                loaded.update({parameter.name: parameter for parameter in packed.values()})


def is_packed(parameter: Parameter) -> bool:
    """Returns whether a parameter holds 4-bit values, two per byte."""
    return parameter.dtype == ms.uint8


def check_loaded(network: nn.Cell, loaded: Mapping[str, Any]) -> None:
    """Checks that a checkpoint has the complete base or the complete adapters, or both, of a network with adapters.

    Args:
        network (nn.Cell): The network into which MindFormers loads; not checked if it has no adapters.
        loaded (mapping): Name -> value of each parameter that the checkpoint has.

    Raises:
        CheckpointError: The checkpoint has only a part of the base or the adapters, or adapters of cells without
            adapters here.
    """
    cells = [cell for _, cell in network.cells_and_names() if isinstance(cell, (LoRACell, StackedLoRADense))]
    adapters = {parameter.name for cell in cells for parameter in cell.lora_parameters()}
    if not adapters:
        return
    # VeRA's shared projection is redrawn if a checkpoint lacks it.
    drawn = {parameter.name for _, cell in lora_cells(network) for parameter in cell.shared_parts().values()}
    base = {
        parameter.name
        for parameter in network.get_parameters()
        if parameter.name not in adapters | drawn and not names.is_computed(parameter.name)
    }
    head = set(filter(is_of_head, base))
    if not head & set(loaded):
        # A classifier's head is new if its adapter is; check_checkpoint has verified that.
        base -= head
    for kind, expected in (("base", base), ("adapters", adapters)):
        missing = sorted(expected - set(loaded))
        if missing and len(missing) < len(expected):
            raise CheckpointError(
                f"The checkpoint has only a part of the {kind}; these are missing: {listed(missing)}. Load the "
                "checkpoint of the same model, with adapters on the same cells."
            )
    if not (base | adapters) & set(loaded):
        raise CheckpointError(
            f"The checkpoint has no parameter of this model, but {listed(sorted(loaded)) or 'nothing'}. Load one of "
            "the same model."
        )
    packed = sorted(
        parameter.name
        for parameter in network.get_parameters()
        if parameter.name in loaded and is_packed(loaded[parameter.name]) and not is_packed(parameter)
    )
    if packed:
        raise CheckpointError(
            f"The checkpoint has 4-bit weights, but the model has {listed(packed)} in float. Set pet_config."
            "quantize_base: nf4, or load a base in float."
        )
    extra = _adapters_of_other_cells(loaded, adapters)
    if extra:
        raise CheckpointError(
            f"The checkpoint has adapters on cells that have none here: {listed(extra)}. Make target_modules select "
            "them too."
        )


def _adapters_of_other_cells(loaded: Mapping[str, Any], adapters: set) -> List[str]:
    return sorted(name for name in loaded if name.endswith(("lora_a", "lora_b")) and name not in adapters)


class SavedWithStates(TrainerCallback):
    """MindFormers' callback that saves checkpoints; it then writes step_folder.RUN into their folders on rank 0.

    Args:
        saver (CheckpointCallback): MindFormers'.
        callbacks (sequence): The callbacks whose states are saved.
        step (TrainStep): The train step, whose state is saved too.
    """

    def __init__(self, saver: CheckpointCallback, callbacks: Sequence[Any], step: nn.Cell):
        self.saver = saver
        self.callbacks = callbacks
        self.step = step

    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Creates the folder for checkpoints."""
        self.saver.on_train_begin(args, state, **kwargs)

    def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Saves if a save is due."""
        self.saver.on_step_end(args, state, **kwargs)
        if get_real_rank() == 0:
            self._complete(args, state.global_step, kwargs["model"])

    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Saves the last step; raises CheckpointError if MindFormers failed to, which it only logs."""
        self.saver.on_train_end(args, state, **kwargs)
        if get_real_rank() == 0 and not self._complete(args, state.global_step, kwargs["model"]):
            raise CheckpointError(
                f"MindFormers could not save step {state.global_step}, the last one, in {self.saver.save_path}: its "
                "log says why. Correct that, and train again from the last step that is there."
            )

    def _complete(self, args, step, model):
        """Completes the folder of a step; returns whether the step has been saved."""
        saved = self.saver.current_ckpt_step_list
        if not saved or os.path.basename(saved[-1]) != step_folder.name_of(step):
            return False
        config = args.to_dict()
        content = {name: config.get(name) for name in ("lora_config", "pet_config")}
        content[_BASE] = next((cell.initial_pair.fingerprint for cell in _changed_cells(model)), None)
        if self.step.reference is not None:
            content[_REFERENCE] = self.step.reference.tolist()
        arrays = {parameter.name: parameter.asnumpy() for parameter in self.step.state_parameters()}
        if arrays:
            with atomic.replace_file(os.path.join(saved[-1], step_folder.ARRAYS)) as path, open(path, "wb") as file:
                np.savez(file, **arrays)
        with atomic.replace_file(os.path.join(saved[-1], step_folder.RUN)) as path:
            write_json(path, {**content, "callbacks": callback_states(self.callbacks)})
        return True


def restore(load_path: str, callbacks: Sequence[Any], step: nn.Cell) -> List[str]:
    """Restores the states of callbacks and train step that were saved with the checkpoint at ``load_path``.

    Returns the names of callbacks whose state is missing. Raises CheckpointError if a file is damaged,
    or lacks a state of the train step.
    """
    _restore_arrays(step.state_parameters(), load_path)
    return restore_callbacks(_read(load_path).get("callbacks") or {}, callbacks)


def restore_fingerprint(load_path: str, model: Sequence[nn.Cell]) -> None:
    """Sets, in the cells of a resumed model, the fingerprint of the base before lora_init changed it.

    Raises CheckpointError if the file beside the checkpoint, which checkpoint.load_path names, is damaged.
    """
    fingerprint = _read(load_path).get(_BASE)
    for cell in _changed_cells(model):
        cell.initial_pair = cell.initial_pair._replace(fingerprint=fingerprint)


def saved_reference(load_path: str) -> np.ndarray:
    """Returns the reference's fingerprint from the run that saved a checkpoint, int32 [8].

    Raises CheckpointError if the file beside the checkpoint, which checkpoint.load_path names, is damaged or lacks it.
    """
    fingerprint = _read(load_path).get(_REFERENCE)
    if fingerprint is None:
        raise CheckpointError(
            f"{load_path} was saved by a run whose reference did not come from its data. Remove "
            "preference.precomputed_reference to go on with it."
        )
    return np.array(fingerprint, np.int32)


def _restore_arrays(parameters, load_path):
    """Sets parameters to the arrays saved beside a checkpoint under their names."""
    if not parameters:
        return
    path = os.path.join(step_folder.last_step(load_path), step_folder.ARRAYS)
    try:
        with np.load(path) as arrays:
            for parameter in parameters:
                parameter.set_data(Tensor(arrays[parameter.name]))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} does not hold the state of the run's train step ({error}). Set checkpoint.load_path to a "
            "checkpoint of the same configuration, copied with all of its files."
        ) from error


def _read(load_path: str) -> Dict[str, Any]:
    """Returns the states saved beside a checkpoint; empty if there are none."""
    path = os.path.join(step_folder.last_step(load_path), step_folder.RUN) if load_path else ""
    if not os.path.isfile(path):
        return {}
    with open(path, "rb") as file:
        return parse_object(file.read(), path, CheckpointError)


def _changed_cells(model: Sequence[nn.Cell]) -> Iterator[LoRACell]:
    """Yields the cells of a model's stages whose weight differs from the base's."""
    for stage in model:
        for _, cell in lora_cells(stage):
            if cell.initial_pair:
                yield cell
