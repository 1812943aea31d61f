"""A training run saved to disk and resumed: the adapter, the optimizer's moments, the step and the loss scale."""

import json
import os
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import numpy as np
from mindformers.tools.utils import get_output_root_path
from mindspore import Parameter, Tensor, nn
from mindspore.train.callback._callback import InternalCallbackParam
from safetensors.numpy import load_file, save_file

from mindlora.core import atomic
from mindlora.core.errors import ConfigError
from mindlora.core.json_files import write_json
from mindlora.core.text import listed
from mindlora.models.names import TRANSIENT
from mindlora.network.save_load import check_base, load_lora, save_lora
from mindlora.network.tree import allocates_ranks, lora_cells
from mindlora.training.log import logger
from mindlora.training.model.network import base_of, collect_state, distribute_state

STEP_PREFIX = "step_"
# The folder for a sharded run's slices that could not be joined; it holds step_N/rank_R.
SLICES = "slices"
_STATE_TENSORS = "training_state.safetensors"
_STATE_METADATA = "training_state.json"
_BEST_METADATA = "best.json"


def checkpoint_directory(directory: Optional[str]) -> str:
    """Returns the folder where a run saves: ``directory``, or lora_checkpoint in the run's output folder."""
    return os.path.abspath(directory or os.path.join(get_output_root_path(), "lora_checkpoint"))


def total_steps(params: InternalCallbackParam) -> int:
    """Returns the total number of steps of the run, from MindSpore's callback parameters."""
    return params.epoch_num * params.batch_num


def passed(every: int, before: int, now: int) -> bool:
    """Returns whether a multiple of ``every`` lies after step ``before`` and up to step ``now``.

    With data sinking, several steps are reported at once, so ``now % every == 0`` might never be true.
    """
    return now // every > before // every


def step_folders(directory: str) -> List[str]:
    """Returns the step folders in ``directory``, oldest first."""
    folders = {}
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        match = re.fullmatch(STEP_PREFIX + r"(\d+)", name)
        if match:
            folders[int(match.group(1))] = os.path.join(directory, name)
    return [folders[step] for step in sorted(folders)]


def set_aside(directory: str, step: int) -> Optional[str]:
    """Moves an earlier run's saves after ``step`` into a separate folder and logs it: two runs must not mix.

    This run starts at ``step``, 0 if it is new. Returns the folder, or None if there was nothing to move.
    """
    saved = [*step_folders(directory), *step_folders(os.path.join(directory, SLICES))]
    later = [folder for folder in saved if int(os.path.basename(folder)[len(STEP_PREFIX) :]) > step]
    best = os.path.join(directory, "best")
    if (_read_json(os.path.join(best, _BEST_METADATA)) or {}).get("step", 0) > step:
        later.append(best)
    if not later:
        return None
    number = 1
    while os.path.exists(aside := os.path.join(directory, f"earlier_run_{number}")):
        number += 1
    os.mkdir(aside)
    for folder in later:
        os.renames(folder, os.path.join(aside, os.path.relpath(folder, directory)))
    logger.warning(
        "%s held saves of an earlier run; they have been moved to %s. Delete them once nobody needs them.",
        directory,
        aside,
    )
    return aside


def resume_folder(directory: str, resume: Union[bool, str]) -> str:
    """Returns the step folder to resume from: the given folder, or for True the newest in ``directory``.

    Raises ConfigError if there is no such folder, or it holds no training state.
    """
    folders = [resume] if isinstance(resume, str) else step_folders(directory)
    if not folders:
        raise ConfigError(
            f"LoraCheckpoint: resume is True, but {directory} has no {STEP_PREFIX}N folder. Set resume to the "
            "path of a step folder, or to False for a new run."
        )
    if not os.path.isdir(folders[-1]):
        raise ConfigError(
            f"LoraCheckpoint: resume is {folders[-1]}, which is not a folder. Set it to the path of a step folder."
        )
    if not os.path.isfile(os.path.join(folders[-1], _STATE_METADATA)):
        raise ConfigError(
            f"LoraCheckpoint: {folders[-1]} has no {_STATE_METADATA}, so no run can be resumed from it. "
            "To start a new run from its adapter, set pet_config.adapter_path."
        )
    return folders[-1]


def read_metadata(folder: str) -> dict:
    """Returns the step and the steps per epoch recorded in a step folder."""
    return _read_json(os.path.join(folder, _STATE_METADATA))


def save(folder: str, params: InternalCallbackParam, values: Optional[Mapping[str, np.ndarray]] = None) -> None:
    """Writes a step folder, atomically: adapter, moments, loss scale, step, trained base parameters, callbacks' state.

    In a sharded run, ``values`` are the joined tensors of the adapter (see mindlora.network.save_load.adapter_of). Only
    the adapter is then written, since every rank has its own state.
    """
    if values is not None:
        save_adapter(folder, params, values)
        return
    collect_state(params.train_network)
    # A copy is contiguous and, unlike ascontiguousarray, keeps the shape of a scalar.
    tensors = {p.name: p.asnumpy().copy() for p in state_parameters(params.train_network)}
    metadata = {
        "step": params.cur_step_num,
        "steps_per_epoch": params.batch_num,
        "callbacks": callback_states(params.list_callback),
    }
    with atomic.replace_folder(folder) as new:
        save_adapter(new, params)
        save_file(tensors, os.path.join(new, _STATE_TENSORS))
        write_json(os.path.join(new, _STATE_METADATA), metadata)


def save_adapter(folder: str, params: InternalCallbackParam, values: Optional[Mapping[str, np.ndarray]] = None) -> None:
    """Writes the adapter, with its base's name from pet_config; ``values`` are as for ``save``."""
    network = base_of(params.train_network)
    if "run_facts" in params:
        # The PyNative Trainer's model lacks this attribute.
        base_model = (params.run_facts["configuration"].get("pet_config") or {}).get("base_model_name_or_path")
    else:
        pet_config = getattr(getattr(network, "config", None), "pet_config", None)
        base_model = getattr(pet_config, "base_model_name_or_path", None)
    save_lora(network, folder, base_model=base_model, values=values)


def save_best(
    folder: str,
    params: InternalCallbackParam,
    metric: str,
    value: float,
    values: Optional[Mapping[str, np.ndarray]] = None,
) -> None:
    """Writes the best adapter so far, atomically, with its step and metric; ``values`` are as for ``save``."""
    collect_state(params.train_network)
    with atomic.replace_folder(folder) as new:
        save_adapter(new, params, values)
        write_json(os.path.join(new, _BEST_METADATA), {"step": params.cur_step_num, metric: value})


def best_value(folder: str, metric: str) -> Optional[float]:
    """Returns the best adapter's value of a metric, or None if none was saved with this metric."""
    return (_read_json(os.path.join(folder, _BEST_METADATA)) or {}).get(metric)


def restore(folder: str, params: InternalCallbackParam) -> None:
    """Restores a run: adapter, moments, loss scale, optimizer step and MindSpore's step count.

    Raises ConfigError if the run was complete, had another number of steps per epoch, another optimizer, loss scale or
    network, or the dataset does not start at the saved step.
    """
    metadata = read_metadata(folder)
    _check_steps(folder, metadata, params)
    restore_state(folder, params)
    params.cur_step_num = metadata["step"]


def restore_state(folder: str, params: InternalCallbackParam) -> None:
    """Restores a step folder's content, at whichever step the run is: adapter, moments and so on, callbacks' state.

    Raises ConfigError if the folder is from a run with another optimizer, loss scale or network.
    """
    tensors = load_file(os.path.join(folder, _STATE_TENSORS))
    parameters = {p.name: p for p in state_parameters(params.train_network)}
    _check_parameters(folder, tensors, parameters)
    network = base_of(params.train_network)
    if not allocates_ranks(network):
        load_lora(network, folder, on_base_mismatch="error")
    # In another dtype, the run would not continue bit for bit.
    check_base(network, folder, exact=True)
    for name, parameter in parameters.items():
        parameter.set_data(Tensor(tensors[name], parameter.dtype))
    distribute_state(params.train_network)
    for name in restore_callbacks(read_metadata(folder).get("callbacks") or {}, params.list_callback):
        logger.warning(
            "%s has no state of %s, which starts from scratch. Resume with the callbacks of the run to continue "
            "exactly.",
            folder,
            name,
        )


def callback_states(callbacks: Sequence[Any]) -> Dict[str, Any]:
    """Returns the callbacks' state that a resumed run needs, as JSON values: class name -> state."""
    return {type(callback).__name__: callback.training_state() for callback in _with_state(callbacks)}


def restore_callbacks(states: Mapping[str, Any], callbacks: Sequence[Any]) -> List[str]:
    """Restores the states from ``callback_states``; returns the names of callbacks whose state is missing."""
    without = []
    for callback in _with_state(callbacks):
        name = type(callback).__name__
        if name in states:
            callback.restore_training_state(states[name])
        else:
            without.append(name)
    return without


def _check_steps(folder, metadata, params):
    if metadata["steps_per_epoch"] != params.batch_num:
        raise ConfigError(
            f"{folder} was saved by a run of {metadata['steps_per_epoch']} steps per epoch, but this run has "
            f"{params.batch_num}: resume with the same data, batch_size and number of devices."
        )
    if metadata["step"] >= total_steps(params):
        raise ConfigError(
            f"{folder} was saved at step {metadata['step']}, and this run ends at step {total_steps(params)}, "
            "so nothing is left to train. Raise runner_config.epochs to train longer."
        )
    skipped = params.train_dataset.get_init_step()
    if skipped != metadata["step"]:
        raise ConfigError(
            f"{folder} was saved at step {metadata['step']}, but the dataset starts at step {skipped}: set "
            f"data_skip_steps: {metadata['step']} in the YAML (mindlora-run does so itself)."
        )


def _check_parameters(folder, tensors, parameters):
    in_both = sorted(set(tensors) & set(parameters))
    differences = {
        "only in the folder": sorted(set(tensors) - set(parameters)),
        "only in this run": sorted(set(parameters) - set(tensors)),
        "with another shape": [name for name in in_both if tensors[name].shape != tuple(parameters[name].shape)],
    }
    problems = [f"{problem}: {listed(names)}" for problem, names in differences.items() if names]
    if problems:
        raise ConfigError(
            f"{folder} holds the state of another optimizer, loss scale or network. Parameters "
            f"{'; '.join(problems)}. Resume with the optimizer, runner_wrapper and pet_config of that run."
        )


def _with_state(callbacks):
    return [callback for callback in callbacks if hasattr(callback, "training_state")]


def warn_about_draws(network: nn.Cell, has_noise: bool) -> None:
    """Warns about draws that a resumed run cannot repeat: elements dropped by lora_dropout, neftune_alpha's noise."""
    if any(cell.dropout_rate > 0 for _, cell in lora_cells(network)):
        logger.warning(
            "lora_dropout is above 0: the resumed run drops other elements than an uninterrupted run would, so its "
            "losses differ a little from now on. Set lora_dropout: 0.0 if a run must resume exactly."
        )
    if has_noise:
        logger.warning(
            "neftune_alpha is set: the resumed run adds other noise than an uninterrupted run would, so its losses "
            "differ a little from now on. Leave neftune_alpha out if a run must resume exactly."
        )


def state_parameters(train_network: nn.Cell) -> List[Parameter]:
    """Returns a run's state other than the adapter: moments, step, loss scale and trained base parameters."""
    network = base_of(train_network)
    elsewhere = {p.name for p in network.get_parameters() if "mindpet_delta_lora" in p.name}
    for _, cell in lora_cells(network):
        if not cell.variant.in_files:
            # An adapter file does not hold AdaLoRA's parts in their trained form.
            elsewhere -= {p.name for p in cell.lora_parameters()}
    elsewhere |= {p.name for p in network.get_parameters() if not p.requires_grad}
    return [p for p in train_network.get_parameters() if p.name not in elsewhere and TRANSIENT not in p.name]


def _read_json(path):
    """Returns the content of a file, or None if there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
