"""Where a YAML describes the language model: in model, or in its llm_model if the model is multi-modal."""

import dataclasses
from typing import Iterable, Iterator, Tuple

from mindlora.checks.finding import Finding
from mindlora.common.yaml_file import PET, value_at

_MODEL = "model.model_config"
_NESTED = f"{_MODEL}.llm_model.model_config"


def language_model(config: dict) -> Tuple[dict, str]:
    """Returns the YAML with the language model as its model, and the key at which that model's configuration is.

    Args:
        config (dict): The YAML. MindFormers' multi-modal models have a pet_config in model_config.llm_model.
    """
    nested = value_at(config, f"{_MODEL}.llm_model")
    if value_at(config, PET) or not value_at(config, f"{_NESTED}.pet_config"):
        return config, _MODEL
    return {**config, "model": nested}, _NESTED


def at(key: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yields findings about a language model, the configuration of which is at ``key``, with the YAML's own keys."""
    for finding in findings:
        own = finding.key
        yield dataclasses.replace(finding, key=key + own[len(_MODEL) :] if own.startswith(_MODEL) else own)
