"""Checks of a MindFormers YAML before anything is built, and the few settings that mindlora-run fills in."""
from typing import Mapping

from mindlora.config import PRESETS, suggestion
from mindlora.errors import ConfigError
from mindlora.plugin import resume
from mindlora.plugin.log import logger
from mindlora.plugin.pet import PET_TYPE, PetLoraConfig

# PET types that MindFormers handles itself and mindlora leaves alone.
_MINDFORMERS_PET_TYPES = ("prefixtuning", "ptuning2", "slora")

# What MindFormers' Llama needs on a CPU, where some of its kernels do not exist.
_CPU_MODEL = {
    "use_flash_attention": (False, "flash attention has no CPU kernel"),
    "fused_rms_norm": (False, "the fused RmsNorm has no CPU kernel"),
    "use_rope_slice": (True, "the other rotary embedding broadcasts in a way that CPU kernels do not"),
    "use_past": (False, "paged attention has no CPU kernel"),
}
_CPU_DTYPES = ("compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype", "param_init_type")
_LLAMA_DEFAULTS = {"use_flash_attention": False, "fused_rms_norm": True, "use_rope_slice": False, "use_past": False,
                   "compute_dtype": "float16", "layernorm_compute_type": "float32", "softmax_compute_type": "float32",
                   "rotary_dtype": "float32", "param_init_type": "float16"}


def check_pet_config(pet_config: Mapping) -> None:
    """Raises ConfigError unless ``pet_config`` is one that MindFormers or mindlora can build."""
    pet_type = pet_config.get("pet_type")
    if pet_type == PET_TYPE:
        PetLoraConfig.from_pet_config(pet_config)
    elif pet_type not in _MINDFORMERS_PET_TYPES:
        known = [PET_TYPE, *_MINDFORMERS_PET_TYPES]
        raise ConfigError(f"model.model_config.pet_config: pet_type is {pet_type!r}, which is not known. MindFormers "
                          f"would train the whole network.{suggestion(str(pet_type), known)}")


def prepare(config) -> None:
    """Checks a run's configuration and fills in what follows from it: a preset's learning rate, and resuming.

    Args:
        config (MindFormerConfig): The whole YAML with the command line's overrides; changed in place.

    Raises:
        ConfigError: With the key, what it is, and what it must be.
    """
    model_config = config.model.model_config
    training = config.run_mode in ("train", "finetune")
    if model_config.pet_config:
        check_pet_config(model_config.pet_config)
    if config.context.device_target == "CPU":
        _check_cpu(config, training)
    if training:
        _check_sharded_adapter(config)
        _fill_preset_learning_rate(config)
        _fill_resume(config)


def _check_cpu(config, training):
    model_config = config.model.model_config
    wrong = []
    for key, (needed, reason) in _CPU_MODEL.items():
        if bool(model_config.get(key, _LLAMA_DEFAULTS[key])) != needed:
            wrong.append(f"model.model_config.{key}: {needed} ({reason})")
    for key in _CPU_DTYPES:
        found = model_config.get(key, _LLAMA_DEFAULTS[key])
        if found not in ("float32", "fp32"):
            wrong.append(f"model.model_config.{key}: float32 (found {found})")
    wrapper = config.runner_wrapper.type if config.runner_wrapper else None
    if training and wrapper == "MFTrainOneStepCell":
        wrong.append("runner_wrapper.type: LoraTrainOneStepCell (MFTrainOneStepCell checks overflow with kernels that "
                     "only Ascend has)")
    if wrong:
        raise ConfigError("context.device_target is CPU, where this YAML cannot run. Set: " + "; ".join(wrong) + ".")


def _check_sharded_adapter(config):
    if not any(callback.get("type") == "LoraCheckpoint" for callback in config.callbacks or []):
        return
    parallel = config.parallel_config or {}
    for key in ("model_parallel", "pipeline_stage"):
        if config.use_parallel and (parallel.get(key) or 1) > 1:
            raise ConfigError(f"callbacks has LoraCheckpoint and parallel_config.{key} is {parallel[key]}: each device "
                              f"then holds a part of the adapter, and LoraCheckpoint saves whole ones. Set {key}: 1, or "
                              "save with CheckpointMonitor and save_trainable_params: True and merge the parts with "
                              "MindFormers' transform_checkpoint.")


def _fill_preset_learning_rate(config):
    preset = (config.model.model_config.pet_config or {}).get("preset")
    if preset and config.lr_schedule and config.lr_schedule.get("learning_rate") is None:
        config.lr_schedule.learning_rate = PRESETS[preset]["learning_rate"]
        logger.info("lr_schedule.learning_rate is %g, from preset %s.", config.lr_schedule.learning_rate, preset)


def _fill_resume(config):
    """Lets the data start where the checkpoint stopped: MindFormers builds the dataset before any callback runs."""
    for callback in config.callbacks or []:
        if callback.get("type") == "LoraCheckpoint" and callback.get("resume"):
            directory = resume.checkpoint_directory(callback.get("directory"))
            folder = resume.resume_folder(directory, callback["resume"])
            config.data_skip_steps = resume.read_facts(folder)["step"]
            callback["resume"] = folder
            logger.info("Resuming from %s: the data starts at step %d.", folder, config.data_skip_steps)
