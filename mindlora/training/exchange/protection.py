"""Which parameters' gradients are always sent whole."""

import re
from typing import Optional, Sequence, Set

from mindlora.errors import ConfigError
from mindlora.models.names import layer_of


def protected_names(names: Sequence[str], patterns: Optional[Sequence[str]]) -> Set[str]:
    """Returns the names of the parameters to send whole.

    Args:
        names (Sequence[str]): Names of all trained parameters.
        patterns (Sequence[str]): Regular expressions for whole names; None for those of the first and the last layer,
            and those outside the adapters, which modules_to_save brings.

    Raises:
        ConfigError: A pattern is wrong or matches nothing, or nothing is left to compress.
    """
    found = _by_default(names) if patterns is None else set().union(*(_matching(names, p) for p in patterns))
    if len(found) == len(set(names)):
        raise ConfigError(
            f"gradient_exchange: protect leaves none of the {len(names)} trained parameters to compress "
            f"(by default it names the first and the last layer). Set protect: [], or use type dense."
        )
    return found


def _by_default(names):
    numbers = [number for number in map(layer_of, names) if number is not None]
    ends = {min(numbers), max(numbers)} if numbers else set()
    return {name for name in names if layer_of(name) in ends or "mindpet_delta_lora" not in name}


def _matching(names, pattern):
    try:
        found = {name for name in names if re.fullmatch(pattern, name)}
    except re.error as error:
        raise ConfigError(
            f"gradient_exchange: protect has {pattern!r}, which is no regular expression: {error}."
        ) from error
    if not found:
        raise ConfigError(
            f"gradient_exchange: protect has {pattern!r}, which matches no trained parameter, such as {names[0]}."
        )
    return found
