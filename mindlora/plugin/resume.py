"""A training run on disk: the adapter with optimizer moments, step and learning-rate position, and back."""

import json
import os
import re
from typing import List, Optional

from mindformers.tools.utils import get_output_root_path
from mindspore import Tensor
from safetensors.numpy import load_file, save_file

from mindlora.common import atomic
from mindlora.common.text import listed
from mindlora.errors import ConfigError
from mindlora.plugin.network import base_of
from mindlora.save_load import load_lora, save_lora

STEP_PREFIX = "step_"
_STATE_TENSORS = "training_state.safetensors"
_STATE_FACTS = "training_state.json"
_BEST_FACTS = "best.json"


def checkpoint_directory(directory: Optional[str]) -> str:
    """Returns where a run saves: ``directory``, or lora_checkpoint in the output folder of the run."""
    return os.path.abspath(directory or os.path.join(get_output_root_path(), "lora_checkpoint"))


def total_steps(params) -> int:
    """Returns the number of steps of the whole run, from MindSpore's callback parameters."""
    return params.epoch_num * params.batch_num


def passed(every: int, before: int, now: int) -> bool:
    """Returns whether a multiple of ``every`` lies after step ``before`` and up to step ``now``.

    A dataset that sinks to the device reports several steps at once, so ``now % every == 0`` might never come true.
    """
    return now // every > before // every


def step_folders(directory: str) -> List[str]:
    """Returns the step folders in ``directory``, oldest first."""
    found = (
        [
            (int(match.group(1)), entry.path)
            for entry in os.scandir(directory)
            if (match := re.fullmatch(STEP_PREFIX + r"(\d+)", entry.name))
        ]
        if os.path.isdir(directory)
        else []
    )
    return [path for _, path in sorted(found)]


def set_aside(directory: str, step: int) -> Optional[str]:
    """Moves what an earlier run saved after ``step`` into a folder of its own, so that two runs are never mixed up.

    Args:
        directory (str): Where this run is going to save.
        step (int): Where this run starts; 0 for a new one.

    Returns:
        str, the folder that now holds it, or None where there was nothing.
    """
    later = [folder for folder in step_folders(directory) if int(os.path.basename(folder)[len(STEP_PREFIX) :]) > step]
    best = os.path.join(directory, "best")
    if (_read_json(os.path.join(best, _BEST_FACTS)) or {}).get("step", 0) > step:
        later.append(best)
    if not later:
        return None
    number = 1
    while os.path.exists(aside := os.path.join(directory, f"earlier_run_{number}")):
        number += 1
    os.mkdir(aside)
    for folder in later:
        os.rename(folder, os.path.join(aside, os.path.basename(folder)))
    return aside


def resume_folder(directory: str, resume) -> str:
    """Returns the step folder to go on from: ``resume`` itself if it is a path, else the newest in ``directory``.

    Raises:
        ConfigError: There is none, or it holds no training state.
    """
    folders = [resume] if isinstance(resume, str) else step_folders(directory)
    if not folders:
        raise ConfigError(
            f"LoraCheckpoint: resume is True, but {directory} holds no {STEP_PREFIX}N folder. Name the "
            "folder, or set resume: False to start anew."
        )
    if not os.path.isdir(folders[-1]):
        raise ConfigError(f"LoraCheckpoint: there is no folder {folders[-1]} to resume from.")
    if not os.path.isfile(os.path.join(folders[-1], _STATE_FACTS)):
        raise ConfigError(
            f"LoraCheckpoint: {folders[-1]} holds no {_STATE_FACTS}, so no run can be resumed from it. "
            "To start a new run from its adapter, set pet_config.adapter_path."
        )
    return folders[-1]


def read_metadata(folder: str) -> dict:
    """Returns the step and the steps per epoch of a step folder."""
    return _read_json(os.path.join(folder, _STATE_FACTS))


def save(folder: str, params) -> None:
    """Writes a step folder: adapter, optimizer moments, loss scale, step, and base parameters that train too."""
    # A copy is contiguous, and unlike ascontiguousarray it leaves scalars scalars.
    tensors = {p.name: p.asnumpy().copy() for p in _state_parameters(params.train_network)}
    facts = {"step": params.cur_step_num, "steps_per_epoch": params.batch_num}
    with atomic.replace_folder(folder) as new:
        save_lora(base_of(params.train_network), new)
        save_file(tensors, os.path.join(new, _STATE_TENSORS))
        _write_json(os.path.join(new, _STATE_FACTS), facts)


def save_best(folder: str, params, metric: str, value: float) -> None:
    """Writes the adapter and what made it the best so far."""
    with atomic.replace_folder(folder) as new:
        save_lora(base_of(params.train_network), new)
        _write_json(os.path.join(new, _BEST_FACTS), {"step": params.cur_step_num, metric: value})


def best_value(folder: str, metric: str) -> Optional[float]:
    """Returns the metric of the best adapter so far, or None where there is none by this metric."""
    return (_read_json(os.path.join(folder, _BEST_FACTS)) or {}).get(metric)


def restore(folder: str, params) -> None:
    """Puts a run where it was: adapter, moments, loss scale, optimizer step and MindSpore's count of steps.

    Raises:
        ConfigError: The run was complete, or the folder belongs to another run: other steps per epoch, another
            optimizer, or a dataset that does not start at the step.
    """
    facts = read_metadata(folder)
    if facts["steps_per_epoch"] != params.batch_num:
        raise ConfigError(
            f"{folder} was saved at {facts['steps_per_epoch']} steps per epoch, this run has "
            f"{params.batch_num}: resume with the same data, batch_size and number of devices."
        )
    if facts["step"] >= total_steps(params):
        raise ConfigError(
            f"{folder} is of step {facts['step']}, and this run ends at step {total_steps(params)}: "
            "nothing is left to train. Raise epochs to train longer."
        )
    skipped = params.train_dataset.get_init_step()
    if skipped != facts["step"]:
        raise ConfigError(
            f"{folder} stopped after step {facts['step']}, but the dataset starts at step {skipped}: set "
            f"data_skip_steps: {facts['step']} in the YAML (mindlora-run sets it by itself)."
        )
    tensors = load_file(os.path.join(folder, _STATE_TENSORS))
    parameters = {p.name: p for p in _state_parameters(params.train_network)}
    differing = sorted(
        name for name in set(tensors) & set(parameters) if tensors[name].shape != tuple(parameters[name].shape)
    )
    problems = [
        f"{what}: {listed(which)}"
        for what, which in (
            ("only in the folder", sorted(set(tensors) - set(parameters))),
            ("only in this run", sorted(set(parameters) - set(tensors))),
            ("of another shape", differing),
        )
        if which
    ]
    if problems:
        raise ConfigError(
            f"{folder} has the state of another optimizer, loss scale or network. "
            f"{'; '.join(problems)}. Resume with the optimizer, runner_wrapper and pet_config it was "
            "saved with."
        )
    load_lora(base_of(params.train_network), folder, on_base_mismatch="error")
    for name, parameter in parameters.items():
        parameter.set_data(Tensor(tensors[name], parameter.dtype))
    params.cur_step_num = facts["step"]


def _state_parameters(train_network):
    """What a run needs besides adapter and frozen base: moments, step, loss scale, and base parameters that train."""
    network = base_of(train_network)
    in_adapter = {p.name for p in network.get_parameters() if "mindpet_delta_lora" in p.name}
    frozen = {p.name for p in network.get_parameters() if not p.requires_grad}
    return [p for p in train_network.get_parameters() if p.name not in in_adapter | frozen]


def _read_json(path):
    """Returns the content of a file, or None where there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def _write_json(path, content):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, sort_keys=True)
