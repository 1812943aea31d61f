"""LoraConfig: one validated description of an adapter, read from MindFormers' pet_config or built in Python."""

import dataclasses
import math
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Dict, List, Optional, Type, TypeVar, Union

from mindlora.core.errors import ConfigError
from mindlora.core.fields import (
    COUNT,
    INDEX,
    POSITIVE,
    Range,
    check_flag,
    check_indices,
    check_names,
    check_number,
    check_patterns,
    check_values_by_pattern,
    dtype_name,
)
from mindlora.core.numerics import initializers, rank_schedule
from mindlora.core.text import suggestion
from mindlora.models.target_modules import pattern_value
from mindlora.models.variants import registry
from mindlora.models.variants.variant import QUANTIZED

# Keys of a pet_config node besides the fields of LoraConfig: pet types and presets.

# Recipes by the size of the fine-tuning data. `learning_rate` is not a field of an adapter:
# mindlora-run puts it into lr_schedule when the YAML names none.
PRESETS = {
    "small_dataset": {"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.2, "learning_rate": 1e-4},
    "large_dataset": {"lora_rank": 16, "lora_alpha": 64, "lora_dropout": 0.05, "learning_rate": 1e-4},
}

PET_TYPES = ["lora", "qlora"]


def expand_pet_type(pet_config: MutableMapping) -> None:
    """Expands ``pet_type: qlora`` to what it is short for, in place; any other pet_type is left unchanged."""
    if pet_config.get("pet_type") == "qlora":
        pet_config["pet_type"] = "lora"
        if pet_config.get("quantize_base") is None:
            pet_config["quantize_base"] = "nf4"


def check_pet_type(pet_type: object) -> None:
    """Raises ConfigError unless ``pet_type`` is the one that mindlora handles, ``lora``."""
    if pet_type != "lora":
        raise ConfigError(f"pet_type is {pet_type!r}, which is not known.{suggestion(str(pet_type), PET_TYPES)}")


def preset_fields(preset: str) -> dict:
    """Returns the LoraConfig fields of a named preset; raises ConfigError for a name that is not in PRESETS."""
    if preset not in PRESETS:
        raise ConfigError(f"preset is {preset!r}, which is not known.{suggestion(str(preset), list(PRESETS))}")
    return {key: value for key, value in PRESETS[preset].items() if key != "learning_rate"}


# The base in 4-bit NormalFloat, or in the integers that its checkpoint has, by an operator for them.
NF4, AS_STORED = "nf4", "as_stored"
QUANTIZATIONS = (NF4, AS_STORED)
_DROPOUT = Range("a number in [0, 1)", lambda value: 0 <= value < 1)
_ZERO_INITS = ("zero", "zeros")
# PEFT's names of fields, for users who know them.
_PEFT_NAMES = {"r": "lora_rank", "init_lora_weights": "lora_init"}
Patterns = Union[str, List[str], None]
_Config = TypeVar("_Config", bound="LoraConfig")


@dataclasses.dataclass
class LoraConfig:
    """Describes the LoRA adapters of a network: y = base(x) + (lora_alpha / lora_rank) * dropout(x) A^T B^T.

    Args:
        lora_rank (int): Rank r of A [r, in_channels] and B [out_channels, r]; at least 1. Default: 8.
        lora_alpha (float): Numerator of the scale lora_alpha / lora_rank; above 0. Default: 16.
        lora_dropout (float): Probability of dropping an element of x on the LoRA path, in [0, 1). Default: 0.0.
        target_modules (str or list of str): Which linear cells get an adapter. A string is a regular expression
            that must match a full path (``.*attention\\.w[qv]``) or, as MindFormers does, the beginning of a bare
            cell name (``.*wq|.*wv``); a list holds suffixes of paths (``["wq", "attention.wv"]``); ``"all-linear"``
            is every linear cell except the output head. Hugging Face names (``q_proj``) mean their MindFormers
            counterparts (``wq``).
        target_parameters (list of str): Which stacked weights of routed experts get an adapter: ends of their names in
            Hugging Face's world or MindFormers' (``["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]``), or
            ``["mlp.experts"]`` for both, besides what target_modules selects. Default: None.
        exclude_modules (str or list of str): Cells that get no adapter, given as target_modules is. Default: None.
        quantize_base (str): ``"nf4"`` quantizes linear cells and routed experts of the base, adapted or not, to 4-bit
            NormalFloat (Dettmers et al., QLoRA, 2023; see quantize_base). ``"as_stored"`` says that linear cells hold
            the integers of a quantized checkpoint, as hold_base made them. Default: None, the base stays as it is.
        quantize_exclude (str or list of str): Cells to leave unquantized in addition to output heads, given as
            target_modules is. Default: None.
        lora_init (str): Initializer of A and B together: ``"kaiming"``, ``"gaussian"`` (A normal with deviation
            1 / r), ``"orthogonal"``, ``"pissa"``, ``"pissa_niter_N"``, ``"olora"``, ``"mica"``, ``"loftq"`` or
            ``"loftq_iter_N"`` (core/numerics/initializers.py). pissa, olora and mica are computed from the base's
            weights, so initialize_adapters applies them once these are loaded; pissa and olora change the base, and
            mica trains A alone. loftq needs quantize_base and takes one iteration, or N. PEFT calls this
            init_lora_weights. Default: None, which leaves it to lora_a_init and lora_b_init.
        lora_a_init (str, Initializer or Tensor): Initial A. Default: None, ``"kaiming_uniform"``: He uniform with
            negative_slope sqrt(5). It may be the name of any MindSpore initializer.
        lora_b_init (str, Initializer or Tensor): Initial B. Default: None, ``"zeros"``, so that training begins at the
            base.
        param_init_type (str): dtype of A and B: float32, float16 or bfloat16. Default: float32.
        compute_dtype (str): dtype of the products. Default: None, the replaced cell's.
        use_rslora (bool): Scale by lora_alpha / sqrt(lora_rank) instead of lora_alpha / lora_rank, so that the update
            does not shrink at large ranks (Kalajdzievski, 2023). Default: False.
        use_dora (bool): Train the norm of each row of the weight separately from its direction (Liu et al., DoRA, 2024;
            see DoRADense). Default: False.
        use_vera (bool): Train two vectors around random matrices A and B that the network's cells share (Kopiczko et
            al., VeRA, 2024; see VeRADense). It has no lora_alpha: leave it out. Default: False.
        d_initial (float): Initial value of VeRA's vector between A and B; not 0. Default: None, 0.1 with use_vera.
        projection_prng_key (int): Seed of VeRA's A and B, as in PEFT. Default: None, 0 with use_vera.
        use_miss (bool): Train one matrix for each cell, which all shards of r inputs share (Kang et al., MiSS, 2025;
            see MiSSDense). It has no lora_alpha: leave it out. Default: False.
        use_adalora (bool): Train scale P Lambda Q, and give the rank to the cells that need it (Zhang et al., AdaLoRA,
            2023; see AdaLoRADense). Default: False.
        init_r, target_r, tinit, tfinal, deltaT, beta1, beta2, orth_reg_weight: AdaLoRA's settings (see BudgetSettings);
            init_r takes the place of lora_rank. Default: None, those of BudgetSettings with use_adalora.
        alora_invocation_tokens (list of int): Tokens from whose last place in a row on the adapter acts (Greenewald et
            al., Activated LoRA, 2025; see mindlora.network.invocation); in rows without them it does nothing. Default:
            None, it acts on all tokens.
        freeze_lora_a (bool): Train only B: A keeps its initial value, and needs neither gradient nor optimizer state
            (Zhang et al., LoRA-FA, 2023). Default: False.
        rank_pattern, alpha_pattern (dict): Regular expression -> lora_rank or lora_alpha of the cells that it matches,
            by the full path or by its end after a dot. The first match counts, as in PEFT. Default: None.
        layers_to_transform (int or list of int): The only layers whose cells get an adapter. Default: None, all.
        modules_to_save (list of str): Ends of paths of modules that are trained in full and saved with the adapter,
            such as ``["lm_head", "attention_norm"]``. Default: None.
        freeze_include (list of str): Shell-style patterns of parameter names to freeze besides the base. Default: None.
        freeze_exclude (list of str): Shell-style patterns of base parameters to train too. Default: None.

    Attributes:
        variant (Variant): The variant that the use_... fields select: plain LoRA, DoRA, ...

    Raises:
        ConfigError: A field has the wrong type or is out of range.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    lora_rank: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    target_modules: Patterns = None
    target_parameters: Optional[List[str]] = None
    exclude_modules: Patterns = None
    quantize_base: Optional[str] = None
    quantize_exclude: Patterns = None
    lora_init: Optional[str] = None
    lora_a_init: object = None
    lora_b_init: object = None
    param_init_type: str = "float32"
    compute_dtype: Optional[str] = None
    use_rslora: bool = False
    use_dora: bool = False
    use_vera: bool = False
    d_initial: Optional[float] = None
    projection_prng_key: Optional[int] = None
    use_miss: bool = False
    use_adalora: bool = False
    init_r: Optional[int] = None
    target_r: Optional[int] = None
    tinit: Optional[int] = None
    tfinal: Optional[int] = None
    deltaT: Optional[int] = None
    beta1: Optional[float] = None
    beta2: Optional[float] = None
    orth_reg_weight: Optional[float] = None
    alora_invocation_tokens: Optional[List[int]] = None
    freeze_lora_a: bool = False
    rank_pattern: Optional[Dict[str, int]] = None
    alpha_pattern: Optional[Dict[str, float]] = None
    layers_to_transform: Union[int, List[int], None] = None
    modules_to_save: Optional[List[str]] = None
    freeze_include: Optional[List[str]] = None
    freeze_exclude: Optional[List[str]] = None

    def __new__(cls, *_: object, **fields: object) -> "LoraConfig":
        """Raises ConfigError for an unknown field, and suggests the nearest known one."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in names:
                advice = _meant(name, names)
                raise ConfigError(f"{cls.__name__} has no field '{name}'.{advice}")
        return super().__new__(cls)

    def __post_init__(self):
        _check_rank(self.lora_rank, "lora_rank")
        _check_alpha(self.lora_alpha, "lora_alpha")
        check_number(self.lora_dropout, "lora_dropout", _DROPOUT)
        if self.lora_alpha < 1:
            warnings.warn(
                f"lora_alpha is {self.lora_alpha}, which looks like a learning rate: the scale lora_alpha / lora_rank "
                f"becomes {self.scale:g}. Use a value such as 8 to 64, and set the learning rate in lr_schedule.",
                stacklevel=3,
            )
        for field in ("target_modules", "exclude_modules", "quantize_exclude"):
            check_patterns(getattr(self, field), field)
        for field in ("freeze_include", "freeze_exclude", "modules_to_save", "target_parameters"):
            check_names(getattr(self, field), field)
        for field in ("use_rslora", "freeze_lora_a", *(variant.field for variant in registry.VARIANTS)):
            check_flag(getattr(self, field), field)
        check_values_by_pattern(self.rank_pattern, "rank_pattern", _check_rank)
        check_values_by_pattern(self.alpha_pattern, "alpha_pattern", _check_alpha)
        check_indices(self.layers_to_transform, "layers_to_transform", "a layer number, or a list of them")
        self.param_init_type = dtype_name(self.param_init_type, "param_init_type")
        if self.compute_dtype is not None:
            self.compute_dtype = dtype_name(self.compute_dtype, "compute_dtype")
        _check_initialization(self.lora_init, self.lora_a_init, self.lora_b_init)
        self.variant = registry.of_config(self)
        for variant in registry.VARIANTS:
            variant.settle(self)
        self._check_quantization()
        if self.alora_invocation_tokens is not None:
            self._check_invocation()
        if initializers.freezes_b(self.lora_init):
            self._check_frozen_b()
        if _is_zero(self.lora_a_init) and (self.lora_b_init is None or _is_zero(self.lora_b_init)):
            raise ConfigError(
                "lora_a_init and lora_b_init are both zeros: then no gradient ever reaches A or B. "
                "Keep lora_b_init 'zeros' and leave lora_a_init at its default."
            )
        if self.freeze_lora_a and _is_zero(self.lora_a_init):
            raise ConfigError(
                "freeze_lora_a is True and lora_a_init is zeros: if A stays zero, B gets no "
                "gradient. Leave lora_a_init at its default."
            )

    def _check_quantization(self):
        if self.quantize_base not in (None, *QUANTIZATIONS):
            raise ConfigError(
                f"quantize_base is {self.quantize_base!r}, which is not known."
                f"{suggestion(str(self.quantize_base), list(QUANTIZATIONS))}"
            )
        if self.quantize_base is None:
            if self.quantize_exclude is not None:
                raise ConfigError(
                    f"quantize_exclude is {self.quantize_exclude!r}, but quantize_base is not set, so "
                    "nothing is quantized. Set quantize_base: nf4, or remove it."
                )
            if initializers.is_loftq(self.lora_init):
                raise ConfigError(
                    f"lora_init is {self.lora_init!r}, which makes up for the error of quantizing the base, but "
                    "the base is not quantized. Set quantize_base: nf4, or use 'pissa'."
                )
            return
        if self.quantize_base == AS_STORED and self.quantize_exclude is not None:
            raise ConfigError(
                f"quantize_exclude is {self.quantize_exclude!r}, and quantize_base is as_stored: the checkpoint says "
                "which weights are quantized. Remove it."
            )
        if self.quantize_base == AS_STORED and initializers.is_loftq(self.lora_init):
            raise ConfigError(
                f"lora_init is {self.lora_init!r}, which makes up for the error of quantizing the base to NF4, and "
                "quantize_base is as_stored. Remove lora_init, or quantize the base to NF4 (mindlora base quantize)."
            )
        nf4 = self.quantize_base == NF4
        for field, _, reason in self.variant.unsupported(self, QUANTIZED):
            raise ConfigError(
                f"quantize_base is {self.quantize_base!r} and {field} is {getattr(self, field)!r}: {reason}. "
                f"Leave one of them out{'; for a quantized base there is lora_init: loftq' if nf4 else ''}."
            )

    def _check_invocation(self):
        tokens = self.alora_invocation_tokens
        if not isinstance(tokens, (list, tuple)) or not tokens or not all(token in INDEX for token in tokens):
            raise ConfigError(
                f"alora_invocation_tokens is {tokens!r}: it must be a list of token numbers, those of the text from "
                "which on the adapter acts."
            )
        self.alora_invocation_tokens = list(tokens)
        reasons = {
            self.variant.field: "only plain LoRA acts on some tokens alone",
            "modules_to_save": "they would change all tokens, those before the invocation too",
            "lora_init": "it changes the base, or makes up for a change, for all tokens",
        }
        changed = initializers.changes_base(self.lora_init) or initializers.is_loftq(self.lora_init)
        for field, reason in reasons.items():
            if field and getattr(self, field) and (field != "lora_init" or changed):
                raise ConfigError(
                    f"alora_invocation_tokens is set and {field} is {getattr(self, field)!r}: {reason}. Leave one of "
                    "them out."
                )

    def _check_frozen_b(self):
        reasons = {
            "freeze_lora_a": "nothing of the adapter would train",
            self.variant.field: "only plain LoRA trains with a B that stays as it is",
            "alora_invocation_tokens": "an adapter with a B that stays as it is acts on all tokens",
        }
        for field, reason in reasons.items():
            if field and getattr(self, field):
                raise ConfigError(
                    f"lora_init is {self.lora_init!r}, which trains A alone, and {field} is {getattr(self, field)!r}: "
                    f"{reason}. Leave one of them out."
                )

    @property
    def budget_settings(self) -> rank_schedule.BudgetSettings:
        """The settings of AdaLoRA."""
        return rank_schedule.BudgetSettings(*(getattr(self, name) for name in rank_schedule.DEFAULTS))

    @property
    def scale(self) -> float:
        """lora_alpha / lora_rank, or lora_alpha / sqrt(lora_rank): the factor on the low-rank path."""
        return self.lora_alpha / (math.sqrt(self.lora_rank) if self.use_rslora else self.lora_rank)

    def for_cell(self, path: str) -> "LoraConfig":
        """Returns the configuration of the cell at ``path``, with rank_pattern and alpha_pattern resolved."""
        rank = pattern_value(self.rank_pattern, path, self.lora_rank)
        alpha = pattern_value(self.alpha_pattern, path, self.lora_alpha)
        if (rank, alpha) == (self.lora_rank, self.lora_alpha):
            return self
        return dataclasses.replace(self, lora_rank=rank, lora_alpha=alpha, rank_pattern=None, alpha_pattern=None)

    def as_saved(self) -> "LoraConfig":
        """Returns the configuration of the adapter that save_lora writes.

        If lora_init changes the base, the adapter is saved as a plain LoRA of twice the rank, at the same scale (see
        mindlora.network.initialize).
        """
        if initializers.is_loftq(self.lora_init):
            return dataclasses.replace(self, lora_init=None)
        if not initializers.changes_base(self.lora_init):
            return self
        growth = math.sqrt(2) if self.use_rslora else 2
        ranks, alphas = self.rank_pattern, self.alpha_pattern
        return dataclasses.replace(
            self,
            lora_init=None,
            lora_rank=2 * self.lora_rank,
            lora_alpha=growth * self.lora_alpha,
            rank_pattern=ranks and {key: 2 * rank for key, rank in ranks.items()},
            alpha_pattern=alphas and {key: growth * alpha for key, alpha in alphas.items()},
        )

    @classmethod
    def from_pet_config(cls: Type[_Config], pet_config: Mapping) -> _Config:
        """Reads the pet_config node of a MindFormers YAML.

        Args:
            pet_config (Mapping): Keys are the fields of this class, ``pet_type`` (``lora``, or ``qlora`` for ``lora``
                with quantize_base ``nf4``), ``preset`` (a name in PRESETS, whose values the other keys override) and
                ``exclude_layers`` (MindFormers' older name of exclude_modules).

        Returns:
            LoraConfig.

        Raises:
            ConfigError: pet_type is neither of these, a key or a preset is unknown, target_modules is missing, or a
                field is out of range.
        """
        settings = {key: value for key, value in dict(pet_config).items() if value is not None}
        expand_pet_type(settings)
        check_pet_type(settings.pop("pet_type", "lora"))
        preset = settings.pop("preset", None)
        if preset is not None:
            fields_of_preset = preset_fields(preset)
            for variant in registry.VARIANTS:
                if settings.get(variant.field):
                    fields_of_preset = variant.preset(fields_of_preset)
            settings = {**fields_of_preset, **settings}
        if "exclude_layers" in settings:
            if "exclude_modules" in settings:
                raise ConfigError(
                    "pet_config has both exclude_layers and exclude_modules: keep exclude_modules, "
                    "exclude_layers is its older name."
                )
            settings["exclude_modules"] = settings.pop("exclude_layers")
        fields = [field.name for field in dataclasses.fields(cls)]
        keys = fields + ["pet_type", "preset", "exclude_layers"]
        for key in settings:
            if key not in fields:
                advice = _meant(key, keys)
                raise ConfigError(f"pet_config has an unknown key '{key}'.{advice}")
        if "target_modules" not in settings and "target_parameters" not in settings:
            raise ConfigError(
                "pet_config has no target_modules: name the linear cells that get an adapter, "
                "for instance '.*wq|.*wk|.*wv|.*wo' or 'all-linear'."
            )
        for key in (
            "target_modules",
            "target_parameters",
            "exclude_modules",
            "freeze_include",
            "freeze_exclude",
            "modules_to_save",
            "layers_to_transform",
            "quantize_exclude",
            "alora_invocation_tokens",
        ):
            if isinstance(settings.get(key), tuple):
                settings[key] = list(settings[key])
        return cls(**settings)

    def to_dict(self) -> dict:
        """Returns the fields as plain values, which YAML or JSON can hold if the initializers are given by name."""
        return dataclasses.asdict(self)


def _meant(key, known) -> str:
    return f" Did you mean '{_PEFT_NAMES[key]}'?" if key in _PEFT_NAMES else suggestion(key, known)


def _check_rank(value, field):
    check_number(value, field, COUNT)


def _check_alpha(value, field):
    check_number(value, field, POSITIVE)


def _check_initialization(lora_init, a_init, b_init):
    if lora_init is None:
        return
    if not isinstance(lora_init, str) or not initializers.is_known(lora_init):
        raise ConfigError(
            f"lora_init is {lora_init!r}, which is not known.{suggestion(str(lora_init), list(initializers.NAMES))}"
        )
    agrees = {
        "lora_a_init": lora_init == "kaiming" and a_init == "kaiming_uniform",
        "lora_b_init": lora_init in ("kaiming", "gaussian") and _is_zero(b_init),
    }
    for field, value in (("lora_a_init", a_init), ("lora_b_init", b_init)):
        if value is not None and not agrees[field]:
            raise ConfigError(
                f"lora_init is {lora_init!r} and {field} is {value!r}: both set the initial values. Keep one of them."
            )


def _is_zero(init) -> bool:
    return isinstance(init, str) and init.lower() in _ZERO_INITS
