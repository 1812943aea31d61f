"""Reads a MindFormers YAML and the files that it names as base_config, without MindFormers."""

import os
from typing import Any, Dict, Mapping, Tuple

import yaml

from mindlora.core.errors import ConfigError
from mindlora.core.text import shown

# Values of run_mode and of parallel.parallel_mode in a MindFormers YAML.

TRAINING_MODES = ("train", "finetune")
RUN_MODES = (*TRAINING_MODES, "eval", "predict")
# The values of parallel_mode with which MindSpore rewrites the graph: it can divide cells and parameters.
SHARDING_MODES = (1, 2, "SEMI_AUTO_PARALLEL", "AUTO_PARALLEL")
# The values with which each cell declares how it is divided.
SEMI_AUTOMATIC = (1, "SEMI_AUTO_PARALLEL")


PET = "model.model_config.pet_config"


def read_yaml(path: str) -> dict:
    """Returns the content of a complete MindFormers YAML, merged over its base_config files.

    Raises ConfigError if a file cannot be read or is not YAML, or there is no model.model_config.
    """
    config = read_merged(path)
    if not isinstance(value_at(config, "model.model_config"), dict):
        raise ConfigError(f"{path} has no model.model_config: give a complete MindFormers YAML.")
    return config


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value at a dotted key, or None if there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def merged(base: Mapping[str, Any], config: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns ``base`` with the values of ``config`` over its own, node by node."""
    return {
        **base,
        **{
            key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
            for key, value in config.items()
        },
    }


def read_merged(path: str, above: Tuple[str, ...] = ()) -> Dict[str, Any]:
    """Returns the content of a YAML, merged over its base_config files as MindFormers merges them.

    ``above`` are the files whose base_config led here. Raises ConfigError if a file cannot be read, is not YAML, or
    names itself.
    """
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Correct the path or its permissions.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}. Correct that line.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} has no keys: give a MindFormers YAML.")
    bases = config.pop("base_config", None) or []
    content = {}
    above = (*above, os.path.realpath(path))
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"{path}: base_config is {shown(bases)}, but it must be the path of a YAML, or a list of them."
        )
    for base in (os.path.join(os.path.dirname(path), base) for base in bases):
        if os.path.realpath(base) in above:
            raise ConfigError(f"{path}: base_config leads back to {base}. Remove it from one of the files.")
        content.update(read_merged(base, above))
    return merged(content, config)
