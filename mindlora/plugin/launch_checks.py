"""What mindlora-run checks of a run before MindFormers is set up: the machine, msrun, and what predicting needs."""

import os

from mindformers.tools.register import MindFormerConfig

from mindlora.common.run_modes import TRAINING_MODES
from mindlora.errors import ConfigError

# msrun, a rank table and mpirun each set one of these.
_LAUNCHERS = ("MS_ROLE", "RANK_TABLE_FILE", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE")


def check_launch(config: MindFormerConfig, random_base: bool = False) -> None:
    """Raises ConfigError if the run cannot start on this machine, or would answer from random weights unasked.

    Args:
        config (MindFormerConfig): The whole YAML with the command line's overrides.
        random_base (bool): Whether predicting on random weights is meant. Default: False.
    """
    _check_device(config)
    if config.use_parallel and not any(name in os.environ for name in _LAUNCHERS):
        raise ConfigError(
            "use_parallel is True, but this process is alone. Launch one for each device, for instance 8: "
            "msrun --worker_num=8 --local_worker_num=8 --join=True $(which mindlora-run) --config ... "
            "Or set use_parallel: False."
        )
    if config.run_mode in TRAINING_MODES:
        _check_resume(config)
        return
    if not config.load_checkpoint and not random_base:
        raise ConfigError(
            f"run_mode is {config.run_mode} and load_checkpoint is empty, so the base would have random weights. Name "
            "the base with --load_checkpoint, or say --random_base if this is meant."
        )
    if config.run_mode == "predict":
        _check_predict(config)


def _check_device(config):
    import mindspore

    target = (config.context or {}).get("device_target")
    if target == "Ascend" and not mindspore.hal.is_available("Ascend"):
        raise ConfigError(
            "context.device_target is Ascend, and MindSpore finds no Ascend device here: mindlora doctor says what is "
            "missing. To try mindlora on a CPU, take configs/tiny/lora_llama_tiny_cpu.yaml."
        )


def _check_resume(config):
    types = [callback.get("type") for callback in config.callbacks or []]
    if config.resume_training and "LoraCheckpoint" in types and "CheckpointMonitor" not in types:
        raise ConfigError(
            f"resume_training is {config.resume_training}, which resumes from complete checkpoints of "
            "CheckpointMonitor, and this run saves with LoraCheckpoint. Use --resume, and set resume_training: False."
        )


def _check_predict(config):
    if not config.input_data:
        raise ConfigError("run_mode is predict, and there is nothing to go on with: give texts with --predict_data.")
    tokenizer = (config.processor or {}).get("tokenizer") or {}
    files = {key: tokenizer[key] for key in ("tokenizer_file", "vocab_file") if key in tokenizer}
    if files and not any(files.values()):
        raise ConfigError(
            f"processor.tokenizer has an empty {' and '.join(files)}: name the tokenizer that the model was trained "
            f"with, for instance --processor.tokenizer.{next(iter(files))} tokenizer.json."
        )
    for key, path in files.items():
        if path and not os.path.exists(path):
            raise ConfigError(
                f"processor.tokenizer names {path} as its {key}, which does not exist. Correct "
                f"--processor.tokenizer.{key}."
            )
