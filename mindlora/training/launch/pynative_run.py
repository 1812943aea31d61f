"""mindlora-run --mode 1 for a YAML of MindFormers 2's PyNative Trainer, which reads no other flag."""

import argparse
import os
from typing import Any, Dict, List, Mapping, Optional

from mindlora.core.errors import ConfigError
from mindlora.core.formats import step_folder
from mindlora.core.mindformers_version import require_mindformers
from mindlora.core.overrides import keys_and_texts, read_value, set_key
from mindlora.core.yaml_file import read_merged
from mindlora.run.checks.data_rows import pynative_files
from mindlora.run.checks.pynative import NODES, is_pynative, processes_of_a_model
from mindlora.training.rl.rules import DATA

_READ = ("config", "mode", "register_path", "verbose", "resume")


def is_for_pynative(path: str) -> bool:
    """Returns whether a file is a YAML of the PyNative Trainer."""
    try:
        return is_pynative(read_merged(path))
    except ConfigError:
        return False  # The launcher reports the fault of the file.


def build_config(args: argparse.Namespace, rest: List[str]) -> Dict[str, Any]:
    """Returns the content of a PyNative Trainer YAML with the command line's overrides.

    Args:
        args (Namespace): The flags; ``config`` is such a YAML.
        rest (list of str): ``--a.b.c VALUE``, which override its keys.

    Raises:
        ConfigError: --mode is not 1, another flag is set, a key is wrong, there is no lora_config, or there is no save
            from which --resume could continue.
    """
    _check_flags(args)
    config = read_merged(args.config)
    for key, text in keys_and_texts(rest):
        set_key(config, key, read_value(text), f"--{key}", create=True, nodes=NODES)
    check_content(config)
    if args.resume is not None:
        folder = _last_step(config) if args.resume is True else args.resume
        config["checkpoint"] = {**(config.get("checkpoint") or {}), "load_path": folder, "no_load_optim": False}
    return config


def train(config: Dict[str, Any]) -> None:
    """Trains according to build_config's result, with mindlora's LoRA. Passes on any LoraError of the Trainer."""
    require_mindformers("2.0")
    from mindspore.mint.distributed import get_world_size

    from mindlora.training.callbacks.registry import ADDED

    callbacks = list(config.get("callbacks") or [])
    if processes_of_a_model(config.get("parallelism") or {}, get_world_size()) == 1:
        listed = [callback.get("type") for callback in callbacks]
        callbacks += [{"type": name} for name in ADDED if name not in listed]
        if (config.get("preference") or {}).get("precomputed_reference") and "ReferenceCheck" not in listed:
            files = [path for _, paths in pynative_files(config) for path in paths]
            callbacks.append({"type": "ReferenceCheck", "files": files})
        config["callbacks"] = callbacks
    if config.get("rl") is not None:
        config.setdefault("train_dataset", DATA)
    make_trainer(config).train()


def make_trainer(config: Dict[str, Any]) -> Any:
    """Returns MindFormers' Trainer for build_config's result, which puts mindlora's adapters on its model."""
    require_mindformers("2.0")
    import mindspore as ms

    target = (config.get("context") or {}).get("device_target")
    ms.set_context(mode=ms.PYNATIVE_MODE, **({"device_target": target} if target else {}))
    from mindformers.pynative.trainer import Trainer

    from mindlora.training.pynative import hooks  # noqa: F401  importing hooks replaces MindFormers' LoRA

    return Trainer(config)


def saved_step(config: Mapping[str, Any]) -> Optional[str]:
    """Returns the folder of the last step in checkpoint.save_path; None if there is none."""
    checkpoint = config.get("checkpoint") or {}
    path = str(checkpoint.get("save_path") or "")
    if not path or checkpoint.get("enable_save") is False or not os.path.isdir(path):
        return None
    step = step_folder.last_step(path)
    return step if step != path else None


def _last_step(config):
    step = saved_step(config)
    if step is None:
        checkpoint = config.get("checkpoint") or {}
        raise ConfigError(
            "--resume goes on with a run that MindFormers saved, and checkpoint.save_path is "
            f"{checkpoint.get('save_path')!r}, where no step is (enable_save: {checkpoint.get('enable_save', True)}). "
            "Name a saved step, --resume FOLDER, or leave --resume out."
        )
    return step


def check_content(config: Mapping[str, Any]) -> None:
    """Raises ConfigError if a YAML does not train, or has no adapters."""
    if config.get("run_mode", "train") != "train":
        raise ConfigError(
            f"run_mode is {config['run_mode']!r}, and mindlora-run does nothing but train with the PyNative Trainer. "
            "Set run_mode: train, or use run_mindformer.py."
        )
    if not config.get("lora_config"):
        raise ConfigError(
            "The YAML has no lora_config: MindFormers would train the whole model. Add one, with target_modules, "
            "lora_rank and lora_alpha."
        )


def _check_flags(args):
    given: Dict[str, Any] = {name: value for name, value in vars(args).items() if value not in (None, False)}
    if args.mode != 1:
        raise ConfigError(
            f"{os.path.basename(args.config)} is a YAML of MindFormers' PyNative Trainer. Add --mode 1, or give a YAML "
            "with runner_config and model.model_config."
        )
    others = [name for name in given if name not in _READ]
    if others:
        raise ConfigError(
            f"--{others[0]} has no meaning for MindFormers' PyNative Trainer. Set a key of its YAML instead, such as "
            "--training.steps 100 or --checkpoint.load_path FOLDER."
        )
