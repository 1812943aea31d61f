"""Checks of a YAML of one of MindFormers' mcore models: whether LoRA can train it."""

from typing import Iterator, Tuple

from mindlora.common.yaml_file import PET, value_at
from mindlora.doctor.finding import Finding
from mindlora.errors import ConfigError
from mindlora.plugin.mcore import check_mcore, is_mcore


def check_mcore_model(config: dict) -> Iterator[Finding]:
    """Yields an error if a YAML of an mcore model has a pet_config and cannot run.

    Args:
        config (dict): The YAML.
    """
    if not is_mcore(config) or not value_at(config, PET):
        return
    try:
        check_mcore(config)
    except ConfigError as error:
        yield Finding("error", "use_legacy", str(error))


def base_dtype_keys(config: dict) -> Tuple[Tuple[str, str], Tuple[str, str]]:
    """Returns (key, default) of the dtypes in which the base is stored and computed."""
    if not is_mcore(config):
        return ("param_init_type", "float16"), ("compute_dtype", "float16")
    stored = "param_init_type" if value_at(config, "model.model_config.param_init_type") else "params_dtype"
    return (stored, "float32"), ("compute_dtype", "bfloat16")
