"""Starts the data of a resumed run where the checkpoint stopped: MindFormers builds it before any callback runs."""

from typing import Any, Dict, List

from mindformers.tools.register import MindFormerConfig

from mindlora.core.errors import ConfigError
from mindlora.run.checks.training import callbacks_of
from mindlora.training.log import logger
from mindlora.training.resume import training_state
from mindlora.training.several import resuming as several_adapters
from mindlora.training.several.data import DataOfAdapters


def fill_resume(config: MindFormerConfig) -> None:
    """Fills in from which step folder a run goes on, and where its data starts, if LoraCheckpoint says resume.

    Raises ConfigError if there is no such folder, or nothing is left to train.
    """
    for _, callback in callbacks_of(config, "LoraCheckpoint"):
        if callback.get("resume"):
            directory = training_state.checkpoint_directory(callback.get("directory"))
            folder = training_state.resume_folder(directory, callback["resume"])
            callback["resume"] = folder
            _start_data_after(config, folder)
    for _, callback in callbacks_of(config, "EachAdapter"):
        _resume_adapters(config, callback["runs"], callback["directory"])


def _resume_adapters(config: MindFormerConfig, runs: List[Dict[str, Any]], directory: str) -> None:
    """Says in the runs of several adapters where each of them goes on, or stays as it had ended."""
    resume = _saving(runs[0]).get("resume")
    if not resume:
        return
    adapters = [{**run, "directory": _saving(run)["directory"]} for run in runs]
    saved = several_adapters.find_saved(directory, resume, adapters)
    for run in runs:
        folder, ended = saved[run["name"]]
        _saving(run)["resume"] = folder
        if ended:
            run.update(folder=folder, ended=ended)
    _start_data_after(config, next(folder for folder, ended in saved.values() if not ended))
    if config.train_dataset_task.type == DataOfAdapters.__name__:
        config.train_dataset_task.first_step = config.data_skip_steps


def _saving(run: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the node of LoraCheckpoint in the run of one adapter; empty if there is none."""
    return next((callback for _, callback in callbacks_of(run["configuration"], "LoraCheckpoint")), {})


def _start_data_after(config: MindFormerConfig, folder: str) -> None:
    metadata = training_state.read_metadata(folder)
    epochs = config.runner_config.epochs
    if not config.runner_config.sink_mode and metadata["step"] >= metadata["steps_per_epoch"] * epochs:
        raise ConfigError(
            f"{folder} was saved at the last step of {epochs} epochs, so nothing is left to train. "
            "Raise runner_config.epochs to train longer."
        )
    config.data_skip_steps = metadata["step"]
    logger.info("Resuming from %s: the data starts at step %d.", folder, config.data_skip_steps)
