"""Hugging Face's config.json of a model, read for a YAML: each setting is carried over or refused by name."""

import dataclasses
from typing import Any, Dict, Mapping, NamedTuple, NoReturn, Optional

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, NOT_NEGATIVE, POSITIVE
from mindlora.core.text import shown

_DEFAULT_THETA = 10000.0


class Rope(NamedTuple):
    """How positions rotate a model's queries and keys.

    Attributes:
        theta (float): The base of its frequencies.
        kind (str): How they are scaled for long texts: "default" (not at all), "linear", "llama3", "yarn", ...
        settings (mapping): The settings of this kind, such as factor.
    """

    theta: float
    kind: str
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class HuggingFaceConfig:
    """The content of a config.json; ``path`` is for messages. A null counts as a setting that is not there."""

    path: str
    content: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        """The kind of the model, such as "llama"."""
        return str(self.get("model_type", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a setting, or ``default`` where it is missing."""
        value = self.content.get(key)
        return default if value is None else value

    def count(self, key: str, default: Optional[int] = None) -> int:
        """Returns a whole number of at least 1; raises ConfigError for other values, or without value and default."""
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"{self.path} has no {key}, without which the model cannot be built. Copy it again.")
        if value not in COUNT:
            self.refuse(key, f"it must be {COUNT.words}")
        return int(value)

    def number(self, key: str, default: float) -> float:
        """Returns a number above 0; raises ConfigError for anything else."""
        value = self.get(key, default)
        if value not in POSITIVE:
            self.refuse(key, f"it must be {POSITIVE.words}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns True or False; raises ConfigError for anything else."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return bool(value)

    def require(self, key: str, value: Any, reason: str, default: Any = None) -> None:
        """Raises ConfigError, with the reason, unless a setting is ``value``; it is ``default`` where it is missing."""
        if self.get(key, value if default is None else default) != value:
            self.refuse(key, reason)

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raises ConfigError that names a setting, its value, and why no YAML can be written for it."""
        raise ConfigError(
            f"{self.path}: {key} is {shown(self.content.get(key))}, and {reason}. Choose another model, or correct the "
            "setting if it is wrong."
        )

    @property
    def rope_key(self) -> str:
        """The key that ``rope`` reads, for messages."""
        return "rope_parameters" if self.get("rope_parameters") else "rope_scaling"

    def rope(self, *others_known: str) -> Rope:
        """Returns how positions are encoded; raises ConfigError if the setting cannot be read.

        ``others_known`` are settings that the caller reads itself.

        transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
        """
        settings = self.get(self.rope_key, {})
        if not isinstance(settings, Mapping):
            self.refuse(self.rope_key, "it must hold the settings of the rotary embedding")
        theta = settings.get("rope_theta") or self.number("rope_theta", _DEFAULT_THETA)
        if theta not in POSITIVE:
            self.refuse(self.rope_key, f"rope_theta must be {POSITIVE.words}")
        kind = str(settings.get("rope_type") or settings.get("type") or "default")
        named = ("rope_theta", "rope_type", "type", *others_known)
        others = {key: value for key, value in settings.items() if key not in named and value is not None}
        rope = Rope(float(theta), kind, others)
        if kind == "default":
            self.scaling(rope, {})
        return rope

    def scaling(self, rope: Rope, defaults: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns the settings of a rotary embedding over ``defaults``, in which None marks a required setting.

        Raises ConfigError if a setting is required and missing, is not a number, or is not among the defaults.
        """
        for key in rope.settings:
            if key not in defaults:
                self.refuse(self.rope_key, f"MindFormers has no {key} for rope_type {rope.kind}")
        settings = {**defaults, **rope.settings}
        for key, value in settings.items():
            if value not in NOT_NEGATIVE:
                self.refuse(self.rope_key, f"rope_type {rope.kind} needs {key}, {NOT_NEGATIVE.words}")
        return settings

    def window(self) -> Optional[int]:
        """Returns how many tokens a token attends to, itself included; None for all tokens before it."""
        kinds = self.get("layer_types")
        if kinds is None:
            is_mistral = self.model_type == "mistral"
            whole = 0 if is_mistral else self.get("max_window_layers", 0)
            slides = self.flag("use_sliding_window", is_mistral) and whole < self.count("num_hidden_layers")
        else:
            slides = "sliding_attention" in kinds
        return self.count("sliding_window") if slides and self.get("sliding_window") else None
