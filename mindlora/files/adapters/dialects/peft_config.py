"""Reads PEFT's adapter_config.json: fields that change the mathematics are refused, and unknown ones with a value."""

import dataclasses
import os
import re
from typing import Any, Collection, Dict, List, Mapping, Optional, Tuple

from mindlora.core.errors import AdapterError, AdapterFormatError
from mindlora.core.fields import Range
from mindlora.core.json_files import parse_object
from mindlora.core.numerics import initializers
from mindlora.core.text import shown
from mindlora.files.adapters.adapter import ALPHA
from mindlora.files.adapters.dialects import peft_tuners
from mindlora.models.target_modules import pattern_value
from mindlora.models.variants.variant import Variant

# The modules and parameters that an adapter_config.json selects in PEFT, by PEFT's own rule.

_ALL_LINEAR = "all-linear"


def selects(selection: Mapping[str, Any], modules: Collection[str], parameters: Collection[str]) -> bool:
    """Returns whether fields of a configuration select these modules and parameters, and name no others.

    ``modules`` are the full paths of adapted modules, ``parameters`` those of adapted stacked weights of experts
    (target_parameters); both under Hugging Face's names. With parameters, each name must belong to an adapted
    module: PEFT takes gate_proj for all experts of a model that stacks them.
    """
    targets = selection.get("target_modules") or []
    named = selection.get("target_parameters") or []
    if parameters and (isinstance(targets, str) or not all(_ends_any(modules, name) for name in targets)):
        return False
    if not modules and targets or not all(_ends_any(parameters, name) for name in named):
        return False
    return all(_matches(named, path) for path in parameters) and all(
        _is_target(selection, module) for module in modules
    )


def _is_target(selection: Mapping[str, Any], module: str) -> bool:
    """Returns whether PEFT puts an adapter on a module."""
    if _matches(selection.get("exclude_modules") or [], module):
        return False
    targets = selection.get("target_modules") or []
    if targets == _ALL_LINEAR:
        return not module.endswith(("lm_head", "embed_tokens"))
    # layers_to_transform narrows names down, and neither a regular expression nor a full path.
    if isinstance(targets, str) or module in targets:
        return _matches(targets, module)
    return _matches(targets, module) and _is_in_layers(selection, module)


def _is_in_layers(selection: Mapping[str, Any], module: str) -> bool:
    layers = selection.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    patterns = selection.get("layers_pattern") or [r"[^.]*"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module)
        if found:
            return int(found[1]) in (layers if isinstance(layers, list) else [layers])
    return False


def _matches(names: Any, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(_is_or_ends_in(module, name) for name in names)


def _ends_any(paths: Collection[str], name: str) -> bool:
    return any(_is_or_ends_in(path, name) for path in paths)


def _is_or_ends_in(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


_MAX_BYTES = 10_000_000  # A configuration with 100,000 module names has a tenth of this.

# The version of PEFT whose fields are all below.
_KNOWN_UP_TO = "0.21"
# Fields that select modules: they are passed on unchanged.
_SELECTING = ("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern")
# Fields that say nothing about trained tensors.
_NEUTRAL = (
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
)
# Fields that ms-swift, transformers and unsloth add, none of which changes what an adapter computes.
_OF_OTHERS = ("lora_dtype", "lorap_emb_lr", "lorap_lr_ratio", "transformers_version", "unsloth_fixed")
# Fields about the start of training, for which PEFT warns beside another init_lora_weights.
_OF_INITIALIZERS = ("corda_config", "eva_config", "loftq_config", "lora_ga_config")
# Fields that change the forward or the base.
_UNSUPPORTED = {
    "arrow_config": "the adapter is then a mixture of several",
    "layer_replication": "the base then repeats layers",
    "lora_bias": "B then has a bias",
    "monteclora_config": "the update is then sampled",
    "use_bdlora": "A or B is then block-diagonal",
    "use_qalora": "the input is then pooled",
    "velora_config": "the update is then compressed",
}
# Initializers that subtract the product of A and B from the base; two of them are deterministic.
_EXACT_INITIALIZERS = ("pissa", "olora")
# KaSA, whose change also follows from the base.
_KASA = "kasa_config"
_BASE_CHANGING_INITIALIZERS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_USED = (
    "alora_invocation_tokens",
    "base_model_name_or_path",
    "bias",
    # PEFT resets it where a cell is linear, and a file of A and B is the same either way.
    "fan_in_fan_out",
    "init_lora_weights",
    _KASA,
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "use_dora",
    "use_rslora",
)


@dataclasses.dataclass(frozen=True)
class Extras:
    """Features that a reader supports besides plain pairs.

    Attributes:
        initial_pairs (bool): An adapter as PiSSA, OLoRA or KaSA trains it, whose initial pairs follow from the base.
        token_rows (bool): Single rows of the embedding (trainable_token_indices).
        invocation_tokens (bool): An adapter that acts from its invocation tokens on (alora_invocation_tokens).
        refusals (list of str): If given, faults are added to it as text, and the rest is read.
    """

    initial_pairs: bool = False
    token_rows: bool = False
    invocation_tokens: bool = False
    refusals: Optional[List[str]] = None

    def refuse(self, error: AdapterError) -> None:
        """Raises an error, or adds its text to ``refusals`` if these are collected."""
        if self.refusals is None:
            raise error
        self.refusals.append(str(error))


NO_EXTRAS = Extras()

# Fields that are written as they were read.
_KEPT = (
    *(field for field in _NEUTRAL if field not in _OF_INITIALIZERS),
    "fan_in_fan_out",
    "modules_to_save",
    "trainable_token_indices",
)
# Fields of mlx-lm's configuration.
_MLX = ("fine_tune_type", "lora_parameters", "num_layers", "lora_layers")
_BIASES = ("none", "all", "lora_only")
# PEFT's default of r and of lora_alpha.
_DEFAULT_RANK = 8
# Other programs write 8.0 for 8.
_RANK = Range("a whole number of at least 1", lambda value: value == value // 1 and value >= 1)
DROPOUT = Range("a number in [0, 1)", lambda value: 0 <= value < 1)


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """The checked content of an adapter_config.json.

    Attributes:
        projection_key (int): VeRA's projection_prng_key.
        rank_pattern, alpha_pattern (dict): Regular expression -> r or lora_alpha.
        modules_to_save (tuple of str): Modules that were trained in full and are saved with the adapter.
        selection (dict): The fields that select modules, unchanged.
        base_model (str): base_model_name_or_path, or None.
        bias (str): "none", or which biases of the base were trained.
        initializer (str): "pissa", "olora" or "kasa", if the adapter is for the base that it changed; or None.
        token_rows (dict): Module -> indices of the rows of its weight that were trained (trainable_token_indices).
        invocation_tokens (tuple of int): The tokens from which on it acts (alora_invocation_tokens); empty for all
            tokens.
        kept (dict): Fields that change nothing here and are written unchanged, unknown ones among them.
    """

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    variant: Variant
    projection_key: int
    rank_pattern: Dict[str, int]
    alpha_pattern: Dict[str, float]
    modules_to_save: tuple
    selection: Dict[str, object]
    base_model: Optional[str]
    bias: str = "none"
    initializer: Optional[str] = None
    token_rows: Dict[str, List[int]] = dataclasses.field(default_factory=dict)
    invocation_tokens: Tuple[int, ...] = ()
    kept: Dict[str, Any] = dataclasses.field(default_factory=dict)

    def rank_of(self, path: str) -> int:
        """Returns r of the module at ``path`` (MindFormers' or Hugging Face's name)."""
        return pattern_value(self.rank_pattern, path, self.rank)

    def alpha_of(self, path: str) -> float:
        """Returns lora_alpha of the module at ``path``."""
        return pattern_value(self.alpha_pattern, path, self.alpha)


def read(path: str, extras: Extras = NO_EXTRAS) -> PeftConfig:
    """Reads an adapter_config.json.

    Raises AdapterFormatError if the file is missing, a field is invalid or changes the mathematics in an unsupported
    way, or an unknown field is not null, false or empty: PEFT adds variants of LoRA as fields.
    """
    return parse(json_object(path), path, extras)


def parse(content: dict, path: str, extras: Extras = NO_EXTRAS) -> PeftConfig:
    """Returns the checked content of the adapter_config.json at ``path``; raises as ``read`` does."""
    if is_of_mlx(content):
        raise AdapterFormatError(
            f"{path} is mlx-lm's configuration, not PEFT's. Give its folder, with adapters.safetensors in it."
        )
    _flag(content, "use_dora", path)
    variant = peft_tuners.variant_of(content)
    projection_key = peft_tuners.projection_key(content)
    content = peft_tuners.as_lora(content, path)
    unknown = sorted(set(content) - {*_SELECTING, *_NEUTRAL, *_OF_OTHERS, *_USED, *_UNSUPPORTED})
    _refuse_unknown({field: content[field] for field in unknown}, path, extras)
    _refuse_unsupported(content, path, extras)
    dropout = content.get("lora_dropout")
    return PeftConfig(
        rank=int(_number(content.get("r", _DEFAULT_RANK), _RANK, "r", path)),
        alpha=float(_number(content.get("lora_alpha", _DEFAULT_RANK), ALPHA, "lora_alpha", path)),
        dropout=float(_number(0 if dropout is None else dropout, DROPOUT, "lora_dropout", path)),
        use_rslora=_flag(content, "use_rslora", path),
        variant=variant,
        projection_key=projection_key,
        rank_pattern=_pattern(content, "rank_pattern", _RANK, int, path),
        alpha_pattern=_pattern(content, "alpha_pattern", ALPHA, float, path),
        modules_to_save=tuple(_names(content.get("modules_to_save") or [], "modules_to_save", path)),
        selection=selection(content, path),
        base_model=_text(content.get("base_model_name_or_path"), path),
        bias=content.get("bias", "none"),
        initializer=_exact_initializer(content) if extras.initial_pairs else None,
        token_rows=_token_rows(content.get("trainable_token_indices"), path),
        invocation_tokens=_invocation_tokens(content.get("alora_invocation_tokens"), path),
        kept={field: content[field] for field in content if field in (*_KEPT, *_OF_OTHERS, *unknown)},
    )


def is_of_mlx(content: object) -> bool:
    """Returns whether the content of an adapter_config.json is mlx-lm's, which uses the same name."""
    return isinstance(content, dict) and "peft_type" not in content and sum(mark in content for mark in _MLX) >= 2


def json_object(path: str) -> dict:
    """Returns a JSON file's object; raises AdapterFormatError if it holds anything else, or a key twice."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise AdapterFormatError(
            f"{path} is not a file but a folder, a device, or a broken link. Copy the file itself there."
        )
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise AdapterFormatError(f"{path} is missing: copy it into the folder, beside the weights.") from error
    if len(text) > _MAX_BYTES:
        raise AdapterFormatError(
            f"{path} is larger than {_MAX_BYTES // 1_000_000} MB, so it is not a configuration. Copy the adapter's own "
            "there."
        )
    return parse_object(text, path, AdapterFormatError)


def _refuse_unknown(fields: dict, path: str, extras: Extras) -> None:
    # 0 is a value: it may be a factor.
    given = {field: value for field, value in fields.items() if value not in (None, "", [], {}) and value is not False}
    if given:
        named = ", ".join(f"{field} ({shown(value)})" for field, value in given.items())
        message = (
            f"{path} has fields that mindlora does not know, and which may change what the adapter computes: {named}. "
            f"It knows those of PEFT up to {_KNOWN_UP_TO}. Update mindlora; or remove what another program has written "
            "for itself."
        )
        extras.refuse(AdapterFormatError(message))


def _refuse_unsupported(content: dict, path: str, extras: Extras) -> None:
    kind = content.get("peft_type", "LORA")
    if kind != "LORA":
        types = ", ".join(map(repr, ("LORA", *peft_tuners.TUNERS)))
        raise AdapterFormatError(
            f"{path}: peft_type is {shown(kind)}; it must be one of {types}. PEFT merges most other kinds into their "
            "base (merge_and_unload)."
        )
    if content.get("bias", "none") not in _BIASES:
        raise AdapterFormatError(f"{path}: bias is {shown(content['bias'])}; it must be 'none', 'all' or 'lora_only'.")
    for field, meaning in _UNSUPPORTED.items():
        if content.get(field):
            message = f"{path}: {field} is {shown(content[field])}, which is not supported: {meaning}."
            extras.refuse(AdapterFormatError(message))
    if content.get("trainable_token_indices") and not extras.token_rows:
        message = (
            f"{path}: trainable_token_indices is {shown(content['trainable_token_indices'])}, so rows of the embedding "
            "were trained too, which only PEFT's form has a place for. Load it (load_lora), or merge it."
        )
        extras.refuse(AdapterFormatError(message))
    check_invocation(content.get("alora_invocation_tokens"), path, extras)
    initializer = content.get("init_lora_weights", True)
    changes_base = isinstance(initializer, str) and initializer.lower().startswith(_BASE_CHANGING_INITIALIZERS)
    if changes_base and not (extras.initial_pairs and _exact_initializer(content)):
        message = (
            f"{path}: init_lora_weights is {shown(initializer)}, so the adapter belongs to a base that this "
            f"initializer changed. {_way_out(initializer)}"
        )
        extras.refuse(AdapterFormatError(message))
    elif content.get(_KASA) and not extras.initial_pairs:
        message = (
            f"{path}: {_KASA} is {shown(content[_KASA])}, so the adapter belongs to a base without its smallest "
            "singular values. Load it (load_lora) or merge it, where they are computed from the base."
        )
        extras.refuse(AdapterFormatError(message))


def _exact_initializer(content: dict) -> Optional[str]:
    """Returns the initializer if its initial pairs are the same at each computation, or None."""
    initializer = content.get("init_lora_weights")
    name = initializer.lower() if isinstance(initializer, str) else ""
    if content.get(_KASA):
        # It would not be exact on a base that was changed otherwise too.
        return None if name.startswith(_BASE_CHANGING_INITIALIZERS) else initializers.KASA
    return name if name in _EXACT_INITIALIZERS else None


def _way_out(initializer: str) -> str:
    convert = "Save it with PEFT's path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
    if initializer.lower() in _EXACT_INITIALIZERS:
        return f"Load it (load_lora) or merge it, where its initial pairs are computed from the base; or: {convert}."
    return f"What it changed cannot be computed again. {convert}."


def _token_rows(value: Any, path: str) -> Dict[str, List[int]]:
    """Returns module -> indices; PEFT takes a list for the input embedding's."""
    tables = value if isinstance(value, dict) else {"embed_tokens": value} if value else {}
    for indices in tables.values():
        good = isinstance(indices, list) and all(type(index) is int and index >= 0 for index in indices)
        if not good or len(set(indices)) < len(indices):
            raise AdapterFormatError(
                f"{path}: trainable_token_indices is {shown(value)}; it must be a list of different token numbers, or "
                "such a list for each module."
            )
    return tables


def check_invocation(tokens: Any, path: str, extras: Extras) -> None:
    """Refuses an adapter with invocation tokens in the settings at ``path``, unless ``extras`` allows it."""
    if tokens and not extras.invocation_tokens:
        message = (
            f"{path}: alora_invocation_tokens is {shown(tokens)}, so the adapter acts from these tokens on only "
            "(aLoRA), which has no merged form. Load it (load_lora), serve it (mindlora serve, generate, chat), or "
            "leave it in PEFT's form."
        )
        extras.refuse(AdapterFormatError(message))


def _invocation_tokens(value: Any, path: str) -> Tuple[int, ...]:
    tokens = [] if value is None else value
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise AdapterFormatError(
            f"{path}: alora_invocation_tokens is {shown(value)}; it must be a list of token numbers."
        )
    return tuple(tokens)


def _number(value: Any, range_: Range, field: str, path: str) -> Any:
    """Returns a number that must be in a range."""
    if value not in range_:
        raise AdapterFormatError(f"{path}: {field} is {shown(value)}; it must be {range_.words}.")
    return value


def _flag(content: dict, field: str, path: str) -> bool:
    # Python takes the string "false" for true, which would change every scale.
    value = content.get(field)
    if value is not None and not isinstance(value, bool):
        raise AdapterFormatError(f"{path}: {field} is {shown(value)}; it must be true or false.")
    return bool(value)


def _pattern(content: dict, field: str, range_: Range, kind: type, path: str) -> dict:
    """Returns regular expression -> number; each number must be in a range."""
    pattern = content.get(field) or {}
    if not isinstance(pattern, dict):
        raise AdapterFormatError(f"{path}: {field} is {shown(pattern)}; it must map regular expressions to numbers.")
    for expression in pattern:
        # Compiled as pattern_value uses it.
        _check_regex(expression, rf"(.*\.)?({expression})$", field, path)
    return {key: kind(_number(value, range_, f"{field}[{shown(key)}]", path)) for key, value in pattern.items()}


def _check_regex(expression: str, used: str, field: str, path: str) -> None:
    try:
        re.compile(used)
    except (re.error, OverflowError, RecursionError) as error:
        raise AdapterFormatError(
            f"{path}: {field} holds {shown(expression)}, which is not a regular expression: {error}. Correct it."
        ) from error


def _names(value: Any, field: str, path: str) -> List[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise AdapterFormatError(f"{path}: {field} is {shown(value)}; it must be a list of module names.")
    return value


def selection(content: dict, path: str) -> dict:
    """Checks the fields of ``content`` that select modules, and returns them unchanged."""
    selected = {field: content[field] for field in _SELECTING if content.get(field) is not None}
    for field in ("target_modules", "target_parameters", "exclude_modules", "layers_pattern"):
        value = selected.get(field)
        if isinstance(value, str) and field != "target_parameters":
            _check_regex(value, value, field, path)
        elif value is not None:
            _names(value, field, path)
    layers = selected.get("layers_to_transform", [])
    if not all(type(layer) is int for layer in (layers if isinstance(layers, list) else [layers])):
        raise AdapterFormatError(
            f"{path}: layers_to_transform is {shown(layers)}; it must be a layer number or a list of them."
        )
    return selected


def _text(value: Any, path: str) -> Optional[str]:
    if value is not None and not isinstance(value, str):
        raise AdapterFormatError(f"{path}: base_model_name_or_path is {shown(value)}; it must be a name or a path.")
    return value or None
