"""Selects and freezes the parameters of a network by its description and a configuration, or refuses.

apply_lora and freeze_base describe a network, mindlora plan a YAML, and both ask here.
"""

import dataclasses
import fnmatch
import math
from typing import Collection, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from mindlora.core.errors import ConfigError, TargetError, UnsupportedCellError
from mindlora.core.numerics import initializers
from mindlora.core.numerics.pair_shapes import EXPERTS, LINEAR, Shape
from mindlora.core.text import examples, listed
from mindlora.models import names, target_modules
from mindlora.models.description import AdaptableCell, Description
from mindlora.models.lora_config import NF4, LoraConfig
from mindlora.models.variants.variant import HEADS

# The parts of a text-to-image pipeline in one cell, and those of them that an adapter never changes.

# Names of a pipeline's parts, as in diffusers.
DENOISERS = ("unet", "transformer")
TEXT_ENCODER = "text_encoder"
# LoRA files have no place for these, and latents of a changed VAE are not those that the UNet was trained on.
NEVER_ADAPTED = ("vae", "image_encoder", "safety_checker")


def check_parts(paths: Sequence[str], all_paths: Sequence[str], patterns: object, field: str) -> None:
    """Checks that a configuration changes only the parts of a text-to-image pipeline that it may change.

    A pipeline is a cell with a denoiser (``unet`` or ``transformer``) beside other parts of these names: ``vae``,
    ``image_encoder``, ``safety_checker``, which are never changed, and ``text_encoder`` (``text_encoder_2`` ...), which
    is changed only if ``patterns`` contains its name. Other networks pass.

    Args:
        paths (sequence of str): Full paths of the cells or parameters that would be adapted or trained.
        all_paths (sequence of str): Full paths of all cells or parameters of the network.
        patterns (str or list of str): The patterns of ``field``, such as target_modules, that selected ``paths``.

    Raises TargetError if the configuration would change a part that must stay as it is.
    """
    asked = TEXT_ENCODER in str(patterns)
    touched: Dict[str, List[str]] = {}
    for path in paths:
        part = _frozen_part(path, all_paths)
        if part is not None and not (asked and _name(part).startswith(TEXT_ENCODER)):
            touched.setdefault(part, []).append(path)
    if not touched:
        return
    part, touching = next(iter(touched.items()))
    denoiser = _denoiser_beside(part, all_paths)
    asking = f", or name {TEXT_ENCODER} in them to train it as well" if _name(part).startswith(TEXT_ENCODER) else ""
    raise TargetError(
        f"{field} {patterns!r} selects cells of {part}, which fine-tuning {denoiser} leaves as it is: "
        f"{examples(touching)}. Begin the patterns with the part that they are for, such as {denoiser}{asking}."
    )


def _frozen_part(path: str, all_paths: Sequence[str]) -> Optional[str]:
    """Returns the path of the part that must not be changed and that ``path`` is in, or None."""
    pieces = path.split(".")
    for end, piece in enumerate(pieces, 1):
        part = ".".join(pieces[:end])
        frozen = piece in NEVER_ADAPTED or piece.startswith(TEXT_ENCODER)
        if frozen and _denoiser_beside(part, all_paths) is not None:
            return part
    return None


def _denoiser_beside(part: str, all_paths: Sequence[str]) -> Optional[str]:
    """Returns the path of the denoiser that is in the same cell as ``part``, or None."""
    around = part[: -len(_name(part))]
    for denoiser in DENOISERS:
        start = f"{around}{denoiser}."
        if any(path.startswith(start) for path in all_paths):
            return around + denoiser
    return None


def _name(path: str) -> str:
    return path.rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class Selection:
    """The cells and parameters of a network that a configuration selects.

    Attributes:
        cells (dict): Path -> AdaptableCell of the cells that get an adapter.
        saved (tuple of str): The parameters of modules_to_save.
        quantized (tuple of str): Paths of the cells whose weights quantize_base makes 4-bit.
        parts (dict): Prefix of each of ``cells`` -> part -> its shape.
        shared (dict): Part -> shape of the tensors that all cells share: VeRA's projection.
        trainable (int): Elements of the trainable parts and saved modules, before any are frozen.
    """

    cells: Mapping[str, AdaptableCell]
    saved: Tuple[str, ...]
    quantized: Tuple[str, ...]
    parts: Mapping[str, Dict[str, Shape]]
    shared: Dict[str, Shape]
    trainable: int


def select(network: Description, config: LoraConfig, warn: bool = True) -> Selection:
    """Returns the Selection that ``config`` makes in a network without adapters.

    With ``warn``, alternatives of a regex that match nothing give a warning.

    Raises:
        TargetError: A field selects nothing, names something that does not exist, or something that the configuration
            uses twice.
        UnsupportedCellError: Selected cells carry no such adapter, or cannot be quantized; all of them are listed.
        ConfigError: rank_pattern or alpha_pattern names single experts, or the initializer does not take a rank.
    """
    adapted = _adapted_cells(network, config, warn)
    _check_single_experts(config, list(adapted.values()))
    every_path = [*network.cells, *network.classes]
    check_parts(list(adapted), every_path, config.target_modules, "target_modules")
    saved = _saved_parameters(network, config, adapted)
    _check_supported(adapted, config)
    quantized = _quantized_cells(network, config, saved)
    _check_ranks(adapted, quantized, config)
    variant, parts = config.variant, {}
    for cell in adapted.values():
        rank = config.for_cell(cell.prefix).lora_rank
        parts[cell.prefix] = variant.part_shapes(cell.layout, cell.shape, rank, cell.groups)
    shared = variant.shared_shapes([cell.shape for cell in adapted.values()], config.lora_rank)
    trained = [network.parameters[name].shape for name in saved if not names.is_balance(name)]
    for shapes in parts.values():
        trained += [shapes[part] for part in variant.trained_parts(config)]
    return Selection(adapted, tuple(saved), tuple(quantized), parts, shared, sum(map(math.prod, trained)))


def freeze(
    trained: Mapping[str, bool], quantized: Collection[str], config: Optional[LoraConfig] = None
) -> Dict[str, bool]:
    """Applies freeze_include and freeze_exclude, and returns which parameters train.

    A parameter that matches both is treated as if it matched neither. A router's counts never train; the bias by
    which it balances its experts trains if freeze_exclude names it.

    Args:
        trained (dict): Name of each parameter -> whether it is an adapter's or a saved module's, and trains.
        quantized (collection of str): The parameters that hold 4-bit values.

    Raises:
        TargetError: A pattern matches no parameter, freeze_exclude one of a part that stays as it is, nothing is left
            to train, or a 4-bit weight would be.
    """
    freeze_include = _matched_names(trained, config.freeze_include if config else None, "freeze_include")
    freeze_exclude = _matched_names(trained, config.freeze_exclude if config else None, "freeze_exclude")
    if config and freeze_exclude:
        check_parts(sorted(freeze_exclude), list(trained), config.freeze_exclude, "freeze_exclude")
    settled = {name: trains and not names.is_balance(name) for name, trains in trained.items()}
    for name in freeze_include ^ freeze_exclude:
        settled[name] = name in freeze_exclude and not names.is_computed(name)
    if config and not any(settled.values()):
        raise TargetError(
            f"freeze_include {config.freeze_include!r} freezes everything: nothing is left to train. Narrow it."
        )
    packed = [name for name, trains in settled.items() if trains and name in quantized]
    if packed:
        raise TargetError(
            f"modules_to_save or freeze_exclude trains {listed(packed)}, which is quantized, and "
            "weights in few bits do not train. Leave it out, or, of nf4, add it to quantize_exclude."
        )
    return settled


def _adapted_cells(network: Description, config: LoraConfig, warn: bool) -> Dict[str, AdaptableCell]:
    selected: List[str] = []
    if config.target_modules is not None or config.target_parameters is None:
        selected += target_modules.select_targets(
            list(network.cells),
            config.target_modules,
            config.exclude_modules,
            network.classes,
            config.layers_to_transform,
            warn,
            network.cells.keys() - network.of_kind(LINEAR).keys(),
        )
    if config.target_parameters is not None:
        selected += target_modules.select_parameters(
            list(network.of_kind(EXPERTS)), config.target_parameters, config.exclude_modules, config.layers_to_transform
        )
    return {path: cell for path, cell in network.cells.items() if path in selected}


def _check_single_experts(config: LoraConfig, cells: List[AdaptableCell]) -> None:
    """Raises ConfigError if rank_pattern or alpha_pattern names single experts of ``cells``."""
    stacks = [cell for cell in cells if cell.layout is EXPERTS]
    for field in ("rank_pattern", "alpha_pattern"):
        for expression in getattr(config, field) or ():
            for stack in stacks:
                if _names_single_experts(expression, stack):
                    raise ConfigError(
                        f"{field} {expression!r} names single experts, but all experts of a layer have one rank and "
                        f"one lora_alpha. Name their weights, such as '{names.to_hugging_face(stack.prefix)}'."
                    )


def _names_single_experts(expression: str, stack: AdaptableCell) -> bool:
    pattern = {expression: True}
    if target_modules.pattern_value(pattern, stack.prefix, False):
        return False
    holder = names.to_hugging_face(stack.prefix).rpartition(".")[0]
    for expert in range(stack.shape[0]):
        for end in ("", ".gate_proj", ".up_proj", ".down_proj"):
            if target_modules.pattern_value(pattern, f"{holder}.{expert}{end}", False):
                return True
    return False


def _saved_parameters(network: Description, config: LoraConfig, adapted: Mapping[str, AdaptableCell]) -> List[str]:
    """Returns the parameters of modules_to_save, which names the ends of modules' paths."""
    saved: List[str] = []
    for module in config.modules_to_save or ():
        matched = [name for name in network.parameters if names.belongs_to(name, module)]
        if not matched:
            raise TargetError(
                f"modules_to_save names {module!r}, which matches no module. Choose from {listed(network.parameters)}."
            )
        both = [path for path, cell in adapted.items() if any(map(cell.holds, matched))]
        if both:
            raise TargetError(
                f"modules_to_save names {module!r}, and so does target_modules: {listed(both)}. "
                "Keep each in one of the two: a module either trains itself or gets an adapter."
            )
        _check_not_joined(module, matched)
        # A router's counts belong to no module.
        saved += [name for name in matched if not names.is_computed(name)]
    check_parts(saved, list(network.parameters), config.modules_to_save, "modules_to_save")
    # Two of the modules may be one, by its names in two worlds.
    return list(dict.fromkeys(saved))


def _check_not_joined(module: str, parameters: List[str]) -> None:
    """Raises TargetError for a joined cell of an mcore model: its weight has no name in the file of an adapter."""
    paths = [name.rpartition(".")[0] for name in parameters]
    joined = [path for path in paths if names.is_mcore(path) and names.joined_parts(path)]
    if joined:
        raise TargetError(
            f"modules_to_save names {module!r}, and {listed(joined)} joins weights that an adapter's file holds apart. "
            "Put it into target_modules instead."
        )


def _check_supported(adapted: Mapping[str, AdaptableCell], config: LoraConfig) -> None:
    refused = {}
    for path, cell in adapted.items():
        head = (HEADS,) if names.is_output_head(path) else ()
        refusal = cell.refusal or config.variant.refusal(config, cell.layout.cells, *cell.bases, *head)
        if refusal:
            refused[path] = refusal
    if refused:
        reasons = _with_reasons(refused)
        raise UnsupportedCellError(f"LoRA cannot be put on {len(refused)} of the selected cells. {reasons}")


def _quantized_cells(network: Description, config: LoraConfig, saved: List[str]) -> Dict[str, AdaptableCell]:
    if config.quantize_base != NF4:
        return {}
    cells = network.of_kind(LINEAR, EXPERTS)
    selected = target_modules.select_quantized(list(cells), config.quantize_exclude)
    # The 4-bit weights of a base that is quantized already stay as they are.
    quantized = {path: cells[path] for path in selected if not network.is_quantized(cells[path].weight)}
    refused = {path: cell.quantization_refusal for path, cell in quantized.items() if cell.quantization_refusal}
    if refused:
        raise UnsupportedCellError(
            f"{len(refused)} of the linear cells cannot be quantized; leave them out with "
            f"quantize_exclude. {_with_reasons(refused)}"
        )
    packed: List[str] = []
    for cell in quantized.values():
        packed += filter(cell.holds, saved)
    if packed:
        raise TargetError(
            f"modules_to_save names {listed(packed)}, which quantize_base would quantize, and "
            "4-bit weights do not train. Add it to quantize_exclude."
        )
    return quantized


def _with_reasons(refused: Mapping[str, str]) -> str:
    paths: Dict[str, List[str]] = {}
    for path, reason in refused.items():
        paths.setdefault(reason, []).append(path)
    return "; ".join(f"{listed(alike)}: {reason}" for reason, alike in paths.items())


def _check_ranks(adapted: Mapping[str, AdaptableCell], quantized: Collection[str], config: LoraConfig) -> None:
    for path, cell in adapted.items():
        rank = config.for_cell(cell.prefix).lora_rank
        if initializers.is_loftq(config.lora_init) and path in quantized:
            initializers.check_rank(rank, cell, "loftq")
        elif config.lora_init == "orthogonal":
            initializers.check_even(rank)


def _matched_names(parameters: Collection[str], patterns: Optional[List[str]], field: str) -> Set[str]:
    matched: Set[str] = set()
    for pattern in patterns or ():
        hits = {name for name in parameters if fnmatch.fnmatchcase(name, pattern)}
        if not hits:
            raise TargetError(f"{field} pattern {pattern!r} matches no parameter. Choose from {listed(parameters)}.")
        matched |= hits
    return matched
