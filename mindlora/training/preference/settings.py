"""PreferenceSettings: how a run learns from preferences, from a YAML's runner_wrapper.preference."""

from dataclasses import dataclass, fields
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.fields import NOT_NEGATIVE, POSITIVE, Range, check_flag, check_number
from mindlora.core.text import suggestion

_SMOOTHING = Range("a number from 0 to below 0.5", lambda value: 0 <= value < 0.5)
# The measures reported for a step and for held-out data, if the loss has them: means over answers, or over examples.
MEASURES = (
    *("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"),
    *("log_probability_chosen", "log_probability_rejected", "tokens_chosen", "tokens_rejected", "kl"),
)
# The columns that ``mindlora reference`` adds: the reference's log-probabilities, and its fingerprint.
REFERENCE, REFERENCE_FINGERPRINT = "reference", "reference_fingerprint"
# The callback that adds them under MindFormers' PyNative Trainer.
WRITER = "ReferenceWriter"
# Settings that only some losses have.
_OWN = ("label_smoothing", "margin", "desirable_weight", "undesirable_weight")


class LossKind(NamedTuple):
    """The properties of a preference loss, apart from its equation (mindlora.training.preference.loss).

    Attributes:
        source (str): The loss's paper and year.
        keys (tuple of str): The settings of _OWN that it has.
        uses_reference (bool): Whether it compares with the reference, instead of using plain log-probabilities.
        length_normalization (bool): The loss's default of that setting.
        sft_weight (float): The loss's default of that setting.
        beta (float): The loss's default of that setting.
        pairs (bool): Whether it learns from pairs, not from single desirable or undesirable answers.
        scores (bool): Whether it compares a reward model's scores instead of log-probabilities.
    """

    source: str
    keys: Tuple[str, ...] = ()
    uses_reference: bool = True
    length_normalization: bool = False
    sft_weight: float = 0.0
    beta: float = 0.1
    pairs: bool = True
    scores: bool = False

    @property
    def columns(self) -> Tuple[str, ...]:
        """The columns that ``mindlora data preference`` writes for this loss."""
        return "input_ids", "labels", "answers", "pairs" if self.pairs else "judgments"


LOSSES: Dict[str, LossKind] = {
    "dpo": LossKind("Rafailov et al., 2023", ("label_smoothing",)),
    "ipo": LossKind("Azar et al., 2023", length_normalization=True),
    "hinge": LossKind("Zhao et al., SLiC-HF, 2023"),
    "kto": LossKind("Ethayarajh et al., 2024", ("desirable_weight", "undesirable_weight"), pairs=False),
    "simpo": LossKind(
        "Meng et al., 2024", ("label_smoothing", "margin"), uses_reference=False, length_normalization=True, beta=2.0
    ),
    "orpo": LossKind("Hong et al., 2024", uses_reference=False, length_normalization=True, sft_weight=1.0),
    "reward": LossKind("Ouyang et al., 2022", uses_reference=False, beta=1.0, scores=True),
    "cpo": LossKind("Xu et al., 2024", ("label_smoothing",), uses_reference=False, sft_weight=1.0),
}


@dataclass(frozen=True)
class PreferenceSettings:
    """Settings of learning from preferences; docs/preferences.md has the equations.

    Args:
        loss (str): dpo, ipo, hinge, kto, simpo, orpo, cpo, or for a reward model reward. Default: "dpo".
        beta (float): How strongly the answers are weighed against the reference; for orpo, the weight of the odds
            ratio. Default: None, 0.1, and 2 for simpo, 1 for reward.
        label_smoothing (float): Share of the pairs assumed to be the wrong way round: dpo, simpo, cpo. Default:
            0.
        margin (float): Target difference between the rewards of the chosen and the rejected answer for simpo. Default:
            None, 0.5 for simpo.
        desirable_weight (float): Weight of kto's desirable answers. Default: 1.
        undesirable_weight (float): Weight of kto's undesirable answers. Default: 1.
        length_normalization (bool): Whether log-probabilities are means over the tokens of an answer, not sums.
            Default: None, True only for ipo, simpo and orpo.
        sft_weight (float): Weight of the mean cross entropy of the chosen answers (for kto, the desirable ones), which
            is added to the loss. Default: None, 1 for orpo and cpo, and 0 for the others.
        precomputed_reference (bool): Whether the data holds the reference's log-probabilities, from ``mindlora
            reference``. Default: False, each step computes them.

    Raises:
        ConfigError: A value is out of range, or belongs to another loss.
    """

    loss: str = "dpo"
    beta: Optional[float] = None
    label_smoothing: float = 0.0
    margin: Optional[float] = None
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    length_normalization: Optional[bool] = None
    sft_weight: Optional[float] = None
    precomputed_reference: bool = False

    def __post_init__(self):
        if self.loss not in LOSSES:
            raise ConfigError(
                f"preference: loss is {self.loss!r}, but it must be one of {', '.join(LOSSES)}."
                f"{suggestion(str(self.loss), list(LOSSES))}"
            )
        for name, default in _defaults(self.loss).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name, allowed in _RANGES.items():
            check_number(getattr(self, name), f"preference: {name}", allowed)
        check_flag(self.length_normalization, "preference: length_normalization")
        check_flag(self.precomputed_reference, "preference: precomputed_reference")
        if self.precomputed_reference and not self.kind.uses_reference:
            raise ConfigError(
                f"preference: precomputed_reference is True, and the loss {self.loss} has no reference. Remove it."
            )
        if self.kind.scores and (self.sft_weight or self.length_normalization):
            raise ConfigError(
                f"preference: the loss {self.loss} compares scores, and sft_weight and length_normalization are about "
                "log-probabilities. Remove them."
            )
        if self.loss == "orpo" and not self.length_normalization:
            raise ConfigError(
                "preference: length_normalization is False, and orpo compares odds, which exist only for mean "
                "log-probabilities. Remove it."
            )

    @property
    def kind(self) -> LossKind:
        """The kind of the loss."""
        return LOSSES[self.loss]

    @property
    def columns(self) -> Tuple[str, ...]:
        """The columns of the data, in the order of the train step's inputs."""
        return (*self.kind.columns, REFERENCE) if self.precomputed_reference else self.kind.columns


_RANGES = {
    "beta": POSITIVE,
    "label_smoothing": _SMOOTHING,
    "margin": NOT_NEGATIVE,
    "desirable_weight": NOT_NEGATIVE,
    "undesirable_weight": NOT_NEGATIVE,
    "sft_weight": NOT_NEGATIVE,
}


def _defaults(loss: str) -> Dict[str, Any]:
    """Returns the settings whose defaults depend on the loss."""
    kind = LOSSES[loss]
    return {
        "beta": kind.beta,
        "margin": 0.5 if "margin" in kind.keys else 0.0,
        "length_normalization": kind.length_normalization,
        "sft_weight": kind.sft_weight,
    }


def preference_settings(node: Mapping[str, Any]) -> PreferenceSettings:
    """Returns the settings of a YAML's ``preference``, a node with the fields of PreferenceSettings.

    Raises ConfigError if it is not a node, a key is unknown or belongs to another loss, or a value is out of range.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"preference is {node!r}, but it must be a node, such as {{loss: dpo, beta: 0.1}}.")
    keys = [field.name for field in fields(PreferenceSettings)]
    for key in node:
        if key not in keys:
            raise ConfigError(
                f"preference has no key {key!r}.{suggestion(str(key), keys)} Its keys: {', '.join(keys)}."
            )
    settings = PreferenceSettings(**node)
    for key in node:
        if key in _OWN and key not in settings.kind.keys:
            others = [name for name, kind in LOSSES.items() if key in kind.keys]
            raise ConfigError(
                f"preference: {key} belongs to {', '.join(others)}, but the loss is {settings.loss}. Remove it."
            )
    return settings
