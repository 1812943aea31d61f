"""GkdSettings: how a policy learns a teacher's complete distribution, from rl.gkd, with TRL's names."""

from dataclasses import dataclass, fields
from typing import Any, Mapping

from mindlora.core.errors import ConfigError
from mindlora.core.fields import Range, check_flag, check_number
from mindlora.core.text import suggestion

_SHARE = Range("a number from 0 to 1", lambda value: 0 <= value <= 1)
# The field of the prompts' file with an answer that the policy learns instead of its own.
COMPLETION = "completion"


@dataclass(frozen=True)
class GkdSettings:
    """Settings of generalized knowledge distillation, with the names, meanings and defaults of TRL's GKDConfig.

    Args:
        beta (float): The divergence to learn: 0 is KL(teacher || policy), 1 is KL(policy || teacher), values in between
            are the generalized Jensen-Shannon divergence (see HeadDivergences). Default: 0.5.
        lmbda (float): The share of rows that the policy answers itself. Default: 0.5.
        seq_kd (bool): Whether the teacher answers the other rows; otherwise, they have the data's completions.
            Default: False.

    Raises:
        ConfigError: A value is out of range.

    Source: Agarwal et al., On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes, 2024.
    """

    beta: float = 0.5
    lmbda: float = 0.5
    seq_kd: bool = False

    def __post_init__(self):
        for name in ("beta", "lmbda"):
            check_number(getattr(self, name), f"rl.gkd.{name}", _SHARE)
        check_flag(self.seq_kd, "rl.gkd.seq_kd")

    @property
    def reads_completions(self) -> bool:
        """Whether some rows have the data's completions."""
        return self.lmbda < 1 and not self.seq_kd


def gkd_settings(node: Any) -> GkdSettings:
    """Returns the settings of the node rl.gkd.

    Raises ConfigError if it is not a node, a key is unknown, or a value is out of range.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"rl.gkd is {node!r}, but it must be a node, such as {{beta: 0.5, lmbda: 1.0}}.")
    keys = [field.name for field in fields(GkdSettings)]
    for key in node:
        if key not in keys:
            raise ConfigError(f"rl.gkd has no key {key!r}.{suggestion(str(key), keys)}")
    return GkdSettings(**node)
