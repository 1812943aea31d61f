"""mindlora-run's checks before MindFormers is set up: the machine, msrun, output folders, needs of prediction."""

import os
import tempfile

from mindformers.tools.register import MindFormerConfig

from mindlora.core.errors import ConfigError
from mindlora.core.yaml_file import TRAINING_MODES
from mindlora.run.yaml_run import YamlRun

# msrun, a rank table and mpirun each set one of these.
_LAUNCHERS = ("MS_ROLE", "RANK_TABLE_FILE", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE")


def check_launch(config: MindFormerConfig, random_base: bool = False) -> None:
    """Raises ConfigError if the run cannot start on this machine, or would predict with random weights by mistake."""
    fill_base(config)
    _check_device(config)
    _check_output(config)
    if config.use_parallel and not any(name in os.environ for name in _LAUNCHERS):
        raise ConfigError(
            "use_parallel is True, but this process is alone. Launch one for each device, for instance 8: "
            "msrun --worker_num=8 --local_worker_num=8 --join=True $(which mindlora-run) --config ... "
            "Or set use_parallel: False."
        )
    if config.run_mode in TRAINING_MODES:
        return
    if not config.load_checkpoint and not random_base:
        raise ConfigError(
            f"run_mode is {config.run_mode} and load_checkpoint is empty, so the base would have random weights. Name "
            "the base with --load_checkpoint, or pass --random_base if that is intended."
        )
    if config.run_mode == "predict":
        _check_predict(config)


def fill_base(config: MindFormerConfig) -> None:
    """Sets load_checkpoint to the base that MindFormers' Trainer will load, if another key names the base."""
    path = YamlRun(config).base[1]
    if path and os.path.exists(path):
        config.load_checkpoint = path


def _check_device(config):
    import mindspore

    if (config.context or {}).get("device_target") == "Ascend" and not mindspore.hal.is_available("Ascend"):
        raise ConfigError(
            "context.device_target is Ascend, but MindSpore finds no Ascend device here: mindlora doctor says what is "
            "missing. To try mindlora on a CPU, take configs/tiny/lora_llama_tiny_cpu.yaml."
        )


def _check_output(config):
    """Creates the folders that the run writes to, so that it does not fail at its first save."""
    folders = {"output_dir": config.output_dir or "output"}
    run = YamlRun(config)
    for where, callback in run.callbacks if run.trains else ():
        if callback.get("directory"):
            folders[f"{where}: directory"] = callback["directory"]
    for key, folder in folders.items():
        try:
            os.makedirs(os.path.expanduser(folder), exist_ok=True)
            with tempfile.TemporaryFile(dir=os.path.expanduser(folder)):
                pass
        except OSError as error:
            raise ConfigError(
                f"{key} is {folder}, where nothing can be written: {error.strerror}. Name another folder."
            ) from error


def _check_predict(config):
    if not config.input_data:
        raise ConfigError("run_mode is predict, but there is no input: give texts with --predict_data.")
    tokenizer = (config.processor or {}).get("tokenizer") or {}
    files = {key: tokenizer[key] for key in ("tokenizer_file", "vocab_file") if key in tokenizer}
    if files and not any(files.values()):
        raise ConfigError(
            f"processor.tokenizer has an empty {' and '.join(files)}: name the tokenizer that the model was trained "
            f"with, for instance --processor.tokenizer.{next(iter(files))} tokenizer.json."
        )
