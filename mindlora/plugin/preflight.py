"""Checks of a MindFormers YAML before anything is built, and the few settings that mindlora-run fills in."""

import contextlib
import os
from typing import Mapping

from mindformers.tools.register import MindFormerConfig

from mindlora.adapters import files as adapter_files
from mindlora.base import quantize
from mindlora.common.text import suggestion
from mindlora.config import PET_TYPES, PRESETS, expand_pet_type
from mindlora.errors import ConfigError
from mindlora.formats.safetensors_file import TensorFile
from mindlora.numerics import initializers
from mindlora.plugin import lora_plus, resume
from mindlora.plugin.log import logger
from mindlora.plugin.pet import PET_TYPE, PetLoraConfig, refuse_qlora

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
_LLAMA_DEFAULTS = {
    "use_flash_attention": False,
    "fused_rms_norm": True,
    "use_rope_slice": False,
    "use_past": False,
    "compute_dtype": "float16",
    "layernorm_compute_type": "float32",
    "softmax_compute_type": "float32",
    "rotary_dtype": "float32",
    "param_init_type": "float16",
}

# Modes in which MindSpore rewrites the graph: there, optimizer parallelism cuts the parameters themselves.
_GRAPH_PARALLEL_MODES = (1, 2, "SEMI_AUTO_PARALLEL", "AUTO_PARALLEL")


def check_pet_config(pet_config: Mapping) -> None:
    """Raises ConfigError unless ``pet_config`` is one that MindFormers or mindlora can build."""
    pet_type = pet_config.get("pet_type")
    if pet_type == PET_TYPE:
        PetLoraConfig.from_pet_config(pet_config)
    elif pet_type == "qlora":
        refuse_qlora()
    elif pet_type not in _MINDFORMERS_PET_TYPES:
        known = [*PET_TYPES, *_MINDFORMERS_PET_TYPES]
        raise ConfigError(
            f"model.model_config.pet_config: pet_type is {pet_type!r}, which is not known. MindFormers "
            f"would train the whole network.{suggestion(str(pet_type), known)}"
        )


def check_files(config) -> None:
    """Raises ConfigError, with the flag that sets it, for a file that the run needs and that is not there."""
    training = config.run_mode in ("train", "finetune")
    if config.load_checkpoint and not os.path.exists(config.load_checkpoint):
        raise ConfigError(f"load_checkpoint: {config.load_checkpoint} does not exist (--load_checkpoint).")
    if training or config.run_mode == "eval":
        kind = "train" if training else "eval"
        _check_data(config.get(f"{kind}_dataset"), kind)
    if training and not config.load_checkpoint and config.model.model_config.pet_config:
        logger.warning(
            "load_checkpoint is empty: the base under the adapter has random weights. (In training, "
            "MindFormers reads no other key for them, checkpoint_name_or_path neither.)"
        )


def _check_data(dataset, kind):
    loader = (dataset or {}).get("data_loader") or {}
    if not loader:
        raise ConfigError(f"{kind}_dataset.data_loader is missing, which names the data.")
    if loader.get("type") != "MindDataset" or loader.get("dataset_files"):
        return
    place = f"{kind}_dataset.data_loader.dataset_dir"
    if not loader.get("dataset_dir"):
        raise ConfigError(f"{place} is empty: name a MindRecord, or a folder of them, with --{kind}_dataset_dir.")
    if not os.path.exists(loader["dataset_dir"]):
        raise ConfigError(f"{place}: {loader['dataset_dir']} does not exist (--{kind}_dataset_dir).")


def prepare(config) -> None:
    """Checks a run's configuration and fills in what follows from it: a preset's learning rate, and resuming.

    Args:
        config (MindFormerConfig): The whole YAML with the command line's overrides; changed in place.

    Raises:
        ConfigError: With the key, what it is, and what it must be.
    """
    if not config.model or not config.model.model_config:
        raise ConfigError("The YAML has no model.model_config.")
    model_config = config.model.model_config
    training = config.run_mode in ("train", "finetune")
    if model_config.pet_config:
        expand_pet_type(model_config.pet_config)
        check_pet_config(model_config.pet_config)
    if config.context.device_target == "CPU":
        _check_cpu(config, training)
    if training:
        _check_sharded_adapter(config)
        _fill_preset_learning_rate(config)
        _fill_resume(config)
        _add_start(config)
    _fill_lora_plus(config, training)
    _check_quantized_base(config)


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
    if config.run_mode == "predict":
        # Choosing the next token in MindSpore takes ArgMaxExt or TopkExt, which a CPU does not have.
        if not model_config.get("do_sample", True):
            wrong.append(
                "model.model_config.do_sample: True (greedy search has no CPU kernel; with top_k: 1 sampling "
                "takes the same tokens)"
            )
        if not config.postprocess_use_numpy:
            wrong.append("postprocess_use_numpy: True (sampling has no CPU kernel either)")
    if config.use_parallel and config.load_checkpoint:
        wrong.append(
            "use_parallel: False (with several devices and load_checkpoint MindFormers waits at a Barrier, "
            "which has no CPU kernel)"
        )
    wrapper = config.runner_wrapper.type if config.runner_wrapper else None
    if training and wrapper == "MFTrainOneStepCell":
        wrong.append(
            "runner_wrapper.type: LoraTrainOneStepCell (MFTrainOneStepCell checks overflow with kernels that "
            "only Ascend has)"
        )
    if wrong:
        raise ConfigError("context.device_target is CPU, where this YAML cannot run. Set: " + "; ".join(wrong) + ".")


def _check_sharded_adapter(config):
    if not config.use_parallel or not any(
        callback.get("type") == "LoraCheckpoint" for callback in config.callbacks or []
    ):
        return
    parallel, context = config.parallel_config or {}, config.parallel or {}
    found = [
        (f"parallel_config.{key}", parallel[key], 1)
        for key in ("model_parallel", "pipeline_stage")
        if (parallel.get(key) or 1) > 1
    ]
    if context.get("enable_parallel_optimizer") and context.get("parallel_mode") in _GRAPH_PARALLEL_MODES:
        found.append(("parallel.enable_parallel_optimizer", True, False))
    for key, value, needed in found:
        raise ConfigError(
            f"callbacks has LoraCheckpoint and {key} is {value}: each device then holds a part of the "
            f"adapter, and LoraCheckpoint saves whole ones. Set {key.rpartition('.')[2]}: {needed}, or "
            "save with CheckpointMonitor and save_trainable_params: True and merge the parts with "
            "MindFormers' transform_checkpoint."
        )


def _fill_preset_learning_rate(config):
    preset = (config.model.model_config.pet_config or {}).get("preset")
    if preset and config.lr_schedule and config.lr_schedule.get("learning_rate") is None:
        config.lr_schedule.learning_rate = PRESETS[preset]["learning_rate"]
        logger.info("lr_schedule.learning_rate is %g, from preset %s.", config.lr_schedule.learning_rate, preset)


def _add_start(config):
    """Lets a start that changes the base be carried out: MindFormers loads the base after the network was built."""
    pet_config = config.model.model_config.pet_config or {}
    if not initializers.changes_base(pet_config.get("lora_init")) or pet_config.get("adapter_path"):
        return
    parallel = config.parallel or {}
    if (
        config.use_parallel
        and parallel.get("enable_parallel_optimizer")
        and (parallel.get("parallel_mode") in _GRAPH_PARALLEL_MODES)
    ):
        raise ConfigError(
            f"pet_config has lora_init {pet_config['lora_init']} and parallel.enable_parallel_optimizer "
            "is True: each device then holds a part of a weight. Set enable_parallel_optimizer: False."
        )
    if not any(
        callback.get("type") in ("LoraCheckpoint", "LoraInitialization", "LoraStart")
        for callback in config.callbacks or []
    ):
        config.callbacks = [MindFormerConfig(type="LoraInitialization"), *(config.callbacks or [])]


def _check_quantized_base(config):
    """Checks that load_checkpoint is quantized where quantize_base says so, and lets MindFormers read it."""
    pet_config, path = config.model.model_config.pet_config or {}, config.load_checkpoint
    if not path or not os.path.exists(path):
        return
    is_safetensors = path.endswith(".safetensors") and os.path.isfile(path)
    if not pet_config.get("quantize_base"):
        with TensorFile(path) if is_safetensors else contextlib.nullcontext() as file:
            if file and quantize.quantized_paths(file.tensors):
                raise ConfigError(
                    f"load_checkpoint: {path} is quantized, and pet_config has no quantize_base. Set "
                    "quantize_base: nf4, or give the base in float."
                )
        return
    if not is_safetensors:
        raise ConfigError(
            f"load_checkpoint: {path} is no .safetensors file, and pet_config has quantize_base. Write a "
            f"quantized base, once: mindlora quantize-base {path} base-nf4.safetensors"
        )
    quantize.check_fits(path, pet_config.get("quantize_exclude"))
    if pet_config.get("adapter_path"):
        _compare_bases(path, pet_config["adapter_path"])
    if config.load_ckpt_format != "safetensors":
        config.load_ckpt_format = "safetensors"
        logger.info("load_ckpt_format is safetensors, as a quantized base is.")


def _compare_bases(path, adapter_path):
    """Warns where an adapter is of another quantized base; load_lora cannot tell, as the base is loaded after it."""
    adapter = adapter_files.read(adapter_path)
    mark, found = adapter.fingerprint or {}, quantize.values_mark(path, adapter.paths)
    if found and mark.get("quantization") and mark["values"] != found:
        logger.warning(
            "adapter_path: %s was made for another quantized base than load_checkpoint: %s. Give the base "
            "that it was trained on, or that mindlora quantize-base --loftq wrote with it.",
            adapter_path,
            path,
        )


def _fill_lora_plus(config, training):
    """Takes loraplus_lr_ratio out of pet_config, where it would be no setting of an adapter, into learning rates."""
    ratio = (config.model.model_config.pet_config or {}).pop(lora_plus.KEY, None)
    if ratio is not None and training:
        lora_plus.set_groups(config, ratio)


def _fill_resume(config):
    """Lets the data start where the checkpoint stopped: MindFormers builds the dataset before any callback runs."""
    for callback in config.callbacks or []:
        if callback.get("type") == "LoraCheckpoint" and callback.get("resume"):
            directory = resume.checkpoint_directory(callback.get("directory"))
            folder = resume.resume_folder(directory, callback["resume"])
            facts, epochs = resume.read_metadata(folder), config.runner_config.epochs
            if not config.runner_config.sink_mode and facts["step"] >= facts["steps_per_epoch"] * epochs:
                raise ConfigError(
                    f"{folder} is of the last step of {epochs} epochs, so nothing is left to resume. "
                    "Raise runner_config.epochs to train longer."
                )
            config.data_skip_steps = facts["step"]
            callback["resume"] = folder
            logger.info("Resuming from %s: the data starts at step %d.", folder, config.data_skip_steps)
