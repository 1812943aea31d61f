"""Reading a MindFormers YAML, with the files that it names as base_config, without MindFormers."""

import os
from typing import Any, Dict

import yaml

from mindlora.errors import ConfigError

PET = "model.model_config.pet_config"


def read_yaml(path: str) -> dict:
    """Returns the content of a complete MindFormers YAML, merged over its base_config files.

    Raises:
        ConfigError: The file, or one that it names, cannot be read or is not YAML, or it has no model.model_config.
    """
    config = _read_merged(path)
    if not isinstance(value_at(config, "model.model_config"), dict):
        raise ConfigError(f"{path} has no model.model_config: it is not a complete MindFormers YAML.")
    return config


def value_at(config: dict, key: str) -> Any:
    """Returns the value at a dotted key, or None where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def merged(base: Dict[str, Any], config: Dict[str, Any]) -> Dict[str, Any]:
    """Returns ``base`` with the values of ``config`` over its own, node by node."""
    return {
        **base,
        **{
            key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
            for key, value in config.items()
        },
    }


def _read_merged(path):
    """Returns the content of a YAML, merged over its base_config files as MindFormers merges them."""
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} has no keys: it is not a MindFormers YAML.")
    bases, content = config.pop("base_config", []), {}
    for base in [bases] if isinstance(bases, str) else bases:
        content.update(_read_merged(os.path.join(os.path.dirname(path), base)))
    return merged(content, config)
