"""The tokens that do not count in a model's loss, as its configuration has them or as MindFormers fills them in."""

from typing import Any

# MindFormers' own defaults, of all models that it trains.
IGNORE_TOKEN_ID = -100
PAD_TOKEN_ID = 0


def ignore_token_id(config: Any) -> int:
    """Returns the label that does not count in the loss.

    Args:
        config (PretrainedConfig or mapping): The configuration of a model, or its node in a YAML. Those of MindFormers'
            mcore models do not have the key unless a YAML sets it.
    """
    return _value(config, "ignore_token_id", IGNORE_TOKEN_ID)


def pad_token_id(config: Any) -> int:
    """Returns the token that does not count in the loss, of a configuration as ``ignore_token_id`` takes it."""
    return _value(config, "pad_token_id", PAD_TOKEN_ID)


def _value(config: Any, name: str, default: int) -> int:
    value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return default if value is None else value
