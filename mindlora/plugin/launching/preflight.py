"""Checks of a MindFormers YAML before anything is built, and the few settings that mindlora-run fills in."""

import contextlib
import os

from mindformers.tools.register import MindFormerConfig

from mindlora.base import quantize
from mindlora.checks.cpu import check_cpu
from mindlora.checks.mcore import check_mcore, is_mcore
from mindlora.checks.pet_config import check_pet_config
from mindlora.checks.sharded import check_sharded, is_scattered
from mindlora.common.git_lfs import refuse_pointer
from mindlora.common.run_modes import TRAINING_MODES
from mindlora.config import PRESETS, expand_pet_type
from mindlora.errors import ConfigError
from mindlora.formats.safetensors_file import TensorFile
from mindlora.numerics import initializers
from mindlora.plugin.callbacks.order import arrange_callbacks
from mindlora.plugin.eval_rows import cut_rows_for_eval
from mindlora.plugin.graph import lora_plus, packing
from mindlora.plugin.graph.train_step_settings import (
    WRAPPER,
    accumulates_here,
    prepare_budget,
    prepare_exchange,
    record_gradient_norms,
    set_micro_batches,
)
from mindlora.plugin.launch_checks import fill_base
from mindlora.plugin.log import logger
from mindlora.plugin.mindrecords import files_of
from mindlora.plugin.mistakes import refuse_mistakes
from mindlora.plugin.resume import training_state
from mindlora.plugin.run_configuration import remember_configuration

# Callbacks that carry out a lora_init that changes the base. LoraStart was LoraInitialization's name in version 0.1.
_INITIALIZING_CALLBACKS = ("LoraCheckpoint", "LoraInitialization", "LoraStart")


def prepare(config: MindFormerConfig) -> None:
    """Checks a run's configuration and fills in what follows from it: a preset's learning rate, resuming and so on.

    Args:
        config (MindFormerConfig): The whole YAML with the command line's overrides; changed in place.

    Raises:
        ConfigError: A setting is wrong; the message gives the key, its value, and what it must be.
    """
    if not config.model or not config.model.model_config:
        raise ConfigError("The YAML has no model.model_config.")
    fill_base(config)
    pet_config = config.model.model_config.pet_config
    if pet_config:
        expand_pet_type(pet_config)
        check_pet_config(pet_config)
    if is_mcore(config):
        _prepare_mcore(config, pet_config)
    elif config.context.device_target == "CPU":
        check_cpu(config)
    refuse_mistakes(config)
    _add_base_check(config)
    if config.run_mode in TRAINING_MODES:
        check_sharded(config)
        _fill_adapter_slices(config)
        _fill_preset_learning_rate(config)
        _fill_resume(config)
        _add_initialization(config)
        packing.set_boundary(config)
        set_micro_batches(config)
        prepare_exchange(config)
        prepare_budget(config)
        arrange_callbacks(config)
        record_gradient_norms(config)
    packing.check_eval_data(config)
    cut_rows_for_eval(config)
    _move_lora_plus(config)
    check_quantized_base(config)
    remember_configuration(config)


def check_files(config: MindFormerConfig) -> None:
    """Raises ConfigError if a file that the run needs does not exist, with the flag that sets it."""
    training = config.run_mode in TRAINING_MODES
    if config.load_checkpoint and not os.path.exists(config.load_checkpoint):
        raise ConfigError(f"load_checkpoint: {config.load_checkpoint} does not exist (--load_checkpoint).")
    # Of its newer format, MindFormers reads .safetensors files alone.
    newer = config.checkpoint or config.use_legacy_format is False
    _check_base(config.load_checkpoint, "safetensors" if newer else config.load_ckpt_format or "ckpt")
    adapter = (config.model.model_config.pet_config or {}).get("adapter_path")
    if adapter and not os.path.exists(adapter):
        raise ConfigError(f"model.model_config.pet_config.adapter_path: {adapter} does not exist.")
    if training or config.run_mode == "eval":
        kind = "train" if training else "eval"
        _check_data(config.get(f"{kind}_dataset"), kind)
    if training and not config.load_checkpoint and config.model.model_config.pet_config:
        logger.warning(
            "load_checkpoint is empty: the base under the adapter has random weights. (In training, MindFormers does "
            "not take them from checkpoint_name_or_path.)"
        )


def _check_base(path, wanted):
    """Checks that load_checkpoint is a checkpoint of the wanted format, or a folder with one, by their names."""
    if not path:
        return
    refuse_pointer(path, ConfigError)
    found = [name for _, _, names in os.walk(path) for name in names] if os.path.isdir(path) else [path]
    formats = {ending for ending in ("ckpt", "safetensors") if any(name.endswith(f".{ending}") for name in found)}
    if not formats:
        holds = "a folder without one" if os.path.isdir(path) else "not one"
        raise ConfigError(
            f"load_checkpoint must be a .ckpt or .safetensors file, or a folder of them, and {path} is {holds} "
            "(--load_checkpoint)."
        )
    if wanted not in formats:
        raise ConfigError(
            f"load_checkpoint: {path} is {' and '.join(formats)}, and load_ckpt_format is {wanted!r}. Set "
            f"load_ckpt_format: {' or '.join(formats)} (--load_ckpt_format)."
        )


def _check_data(dataset, kind):
    loader = (dataset or {}).get("data_loader") or {}
    if not loader:
        raise ConfigError(f"{kind}_dataset.data_loader is missing: it must name the data.")
    if loader.get("type") != "MindDataset" or loader.get("dataset_files"):
        return
    key = f"{kind}_dataset.data_loader.dataset_dir"
    if not loader.get("dataset_dir"):
        raise ConfigError(f"{key} is empty: name a MindRecord, or a folder of them, with --{kind}_dataset_dir.")
    if not os.path.exists(loader["dataset_dir"]):
        raise ConfigError(f"{key}: {loader['dataset_dir']} does not exist (--{kind}_dataset_dir).")
    if not files_of(loader["dataset_dir"]):
        raise ConfigError(
            f"{key}: {loader['dataset_dir']} has no file in it that ends in .mindrecord (--{kind}_dataset_dir)."
        )


def _prepare_mcore(config, pet_config):
    if pet_config:
        check_mcore(config)
    wrapper = config.runner_wrapper or {}
    if wrapper.get("type") == WRAPPER and accumulates_here(config):
        # The step is mindlora's then, which adds the losses up; MindFormers' monitor would print zeros for them.
        config.print_separate_loss = False


def _fill_adapter_slices(config):
    """Has each rank load its own slices, if adapter_path is a folder that mindlora scatter wrote."""
    path = (config.model.model_config.pet_config or {}).get("adapter_path")
    if not is_scattered(path):
        return
    if not config.use_parallel:
        raise ConfigError(
            f"adapter_path: {path} holds slices of an adapter for the ranks of a sharded run, and use_parallel is "
            "False. Name the adapter itself."
        )
    config.callbacks = [MindFormerConfig(type="AdapterSlices", path=path), *(config.callbacks or [])]


def _add_base_check(config):
    """Has a run compare the base of adapter_path with load_checkpoint, which MindFormers loads after the adapter."""
    path = (config.model.model_config.pet_config or {}).get("adapter_path")
    key = {"eval": "eval_callbacks", **dict.fromkeys(TRAINING_MODES, "callbacks")}.get(config.run_mode)
    if path and key and not is_scattered(path):
        config[key] = [MindFormerConfig(type="BaseCheck"), *(config[key] or [])]


def _fill_preset_learning_rate(config):
    preset = (config.model.model_config.pet_config or {}).get("preset")
    if preset and config.lr_schedule and config.lr_schedule.get("learning_rate") is None:
        config.lr_schedule.learning_rate = PRESETS[preset]["learning_rate"]
        logger.info("lr_schedule.learning_rate is %g, from preset %s.", config.lr_schedule.learning_rate, preset)


def _add_initialization(config):
    """Adds LoraInitialization if lora_init changes the base, which MindFormers loads after it builds the network."""
    pet_config = config.model.model_config.pet_config or {}
    if not initializers.changes_base(pet_config.get("lora_init")) or pet_config.get("adapter_path"):
        return
    callbacks = config.callbacks or []
    if not any(callback.get("type") in _INITIALIZING_CALLBACKS for callback in callbacks):
        config.callbacks = [MindFormerConfig(type="LoraInitialization"), *callbacks]


def check_quantized_base(config: MindFormerConfig) -> None:
    """Checks that load_checkpoint is quantized if and only if quantize_base is set, and sets its load_ckpt_format."""
    pet_config, path = config.model.model_config.pet_config or {}, config.load_checkpoint
    if not path or not os.path.exists(path):
        return
    is_safetensors = path.endswith(".safetensors") and os.path.isfile(path)
    if not pet_config.get("quantize_base"):
        with TensorFile(path) if is_safetensors else contextlib.nullcontext() as file:
            if file and quantize.quantized_paths(file.tensors):
                raise ConfigError(
                    f"load_checkpoint: {path} is quantized, but pet_config has no quantize_base. Set "
                    "quantize_base: nf4, or name a base that is not quantized."
                )
        return
    if not is_safetensors:
        raise ConfigError(
            f"load_checkpoint: {path} is not a .safetensors file, but pet_config has quantize_base. Write a "
            f"quantized base once: mindlora quantize-base {path} base-nf4.safetensors"
        )
    quantize.check_quantized_base(path, pet_config.get("quantize_exclude"))
    if config.load_ckpt_format != "safetensors":
        config.load_ckpt_format = "safetensors"
        logger.info("load_ckpt_format is set to safetensors, the format of a quantized base.")


def _move_lora_plus(config):
    """Moves loraplus_lr_ratio from pet_config, where MindFormers would not use it, into grouped learning rates."""
    ratio = (config.model.model_config.pet_config or {}).pop(lora_plus.KEY, None)
    if ratio is not None and config.run_mode in TRAINING_MODES:
        lora_plus.set_groups(config, ratio)


def _fill_resume(config):
    """Makes the data start where the checkpoint stopped: MindFormers builds the dataset before any callback runs."""
    for callback in config.callbacks or []:
        if callback.get("type") == "LoraCheckpoint" and callback.get("resume"):
            directory = training_state.checkpoint_directory(callback.get("directory"))
            folder = training_state.resume_folder(directory, callback["resume"])
            metadata, epochs = training_state.read_metadata(folder), config.runner_config.epochs
            if not config.runner_config.sink_mode and metadata["step"] >= metadata["steps_per_epoch"] * epochs:
                raise ConfigError(
                    f"{folder} was saved at the last step of {epochs} epochs, so nothing is left to train. "
                    "Raise runner_config.epochs to train longer."
                )
            config.data_skip_steps = metadata["step"]
            callback["resume"] = folder
            logger.info("Resuming from %s: the data starts at step %d.", folder, config.data_skip_steps)
