"""Variant: a kind of adapter, described without a network. Plain LoRA is the base class of the others."""

from typing import AbstractSet, Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from mindlora.core.errors import ConfigError
from mindlora.core.fields import refuse_fields, settle_dependents
from mindlora.core.numerics import initializers, pair_shapes
from mindlora.core.numerics.pair_shapes import LINEAR, Pair, PairLayout, Shape
from mindlora.core.text import listed
from mindlora.models import names

# LoraConfig, which imports the variants and so cannot be imported here.
Settings = Any
# (path of the cell under MindFormers' names, name of the part).
PartKey = Tuple[str, str]
# Kinds of cells of the base, other than a linear cell in float on one device.
EMBEDDINGS = pair_shapes.EMBEDDING.cells
CONVOLUTIONS = pair_shapes.CONVOLUTION.cells
EXPERTS = pair_shapes.EXPERTS.cells
NOT_LINEAR = (EMBEDDINGS, CONVOLUTIONS, EXPERTS)
QUANTIZED = "quantized weights"
SHARDED = "sharded cells"
# Sharded cells whose weight is cut; sharding by tokens leaves it whole.
CUT = "sharded weights"
HEADS = "output heads"
# The advice besides changing the setting; for the other bases it is _EXCLUDE.
_WAYS_OUT = {
    QUANTIZED: "leave quantize_base out",
    SHARDED: "train in data parallel (parallel_mode: 0)",
    CUT: "set model_parallel: 1",
}
_EXCLUDE = "add the cell to exclude_modules"
# Base -> why no adapter on it acts from its invocation tokens on.
_NOT_ACTIVATED = {
    **dict.fromkeys(NOT_LINEAR, "only linear cells get the tokens of a batch in their order"),
    SHARDED: "each device has tokens of its own",
    HEADS: "while a text is written, they get its last token alone",
}


class Part(NamedTuple):
    """One tensor of a cell's adapter.

    Attributes:
        name (str): "A", "B", "magnitude", ...
        parameter (str): Its parameter's name in a network; with a dot before it, the ending of its key in MindFormers'
            files.
        peft (str): The ending of its key in PEFT's files; for a shared part, the whole key.
        size (str): Its shape: "r", "out" for one element per row of the weight, or "out, r". Default: "", that of A
            or B, which depends on the cell.
        turned (bool): Whether PEFT's files hold its transpose. Default: False.
    """

    name: str
    parameter: str
    peft: str
    size: str = ""
    turned: bool = False

    @property
    def pynative(self) -> str:
        """Its parameter's name in a PyNative model of MindFormers, which finds adapters by lora_a or lora_b."""
        name = self.parameter.replace("mindpet_delta_lora_", "")
        return f"lora_{name}" if name in ("a", "b") else f"{name}_lora_b"

    def shape(self, rank: int, rows: int) -> Shape:
        """Returns the shape that ``size`` means for an adapter of rank ``rank`` on a weight with ``rows`` rows."""
        return tuple({"r": rank, "out": rows}[axis] for axis in self.size.split(", "))


A = Part("A", "mindpet_delta_lora_a", LINEAR.peft["A"])
B = Part("B", "mindpet_delta_lora_b", LINEAR.peft["B"])


class Unsupported(NamedTuple):
    """A setting that a base does not support: the field, the field with its value if that matters, and the reason."""

    field: str
    setting: str
    reason: str


class Variant:
    """Plain LoRA, and the properties that a variant may change.

    Attributes:
        name (str): For messages.
        field (str): The field of LoraConfig, of PEFT's configuration and of mindlora's metadata that selects it;
            empty for plain LoRA.
        unsupported_on (mapping): Base (EMBEDDINGS, SHARDED, ...) -> why the variant cannot be put on it.
        excludes (tuple of str): Fields of LoraConfig that the variant lacks.
        defaults (mapping): Field of LoraConfig that only this variant has -> its default.
        peft_flag (str): The field of PEFT's LoRA configuration that selects it; empty if none does.
        no_scale (str): Why the scale is 1, and lora_alpha is not for the user to set; empty for a variant with a scale.
        bounded_rank (bool): Whether a rank above the sides of a weight is of no use.
        allocates_ranks (bool): Whether training decides which cells keep how much of their ranks.
        pynative_dtype (str): The dtype of its parameters under MindFormers' PyNative Trainer; empty for the base's.
        parts (tuple of Part): The tensors of each cell besides A and B.
        own_pair (bool): Whether each cell has its own A and B, which train. Otherwise they are shared, or
            follow from its parts.
        shared_parts (mapping): "A" and "B" -> Part, for matrices that all cells of a network share, and that a file
            holds once.
        zero_part (str): The part that is zero until it trains; while it is, the adapter adds nothing.
        factors (tuple of str): The parts that x is multiplied by as matrices.
        row_norms (str): The part that gives the norm of each row of W + scale B A; empty if no part does.
        in_files (bool): Whether files hold its parts; otherwise it is saved as a plain LoRA.
        tensors (str): A description of its parts, for messages.
        report (str): What inspect_adapter says about such an adapter.
        cannot_join (str): Why pairs of joined cells (w_qkv) can be neither made nor split; empty if they can: then
            parts of size "out" are joined and split by rows, as B is.
        cannot_combine (str): Why several adapters cannot be combined into one; empty if they can.
    """

    name = "LoRA"
    field = ""
    unsupported_on: Mapping[str, str] = {}
    excludes: Tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}
    peft_flag = ""
    no_scale = ""
    bounded_rank = True
    allocates_ranks = False
    pynative_dtype = ""
    parts: Tuple[Part, ...] = ()
    own_pair = True
    shared_parts: Mapping[str, Part] = {}
    factors: Tuple[str, ...] = ("A", "B")
    row_norms = ""
    in_files = True
    tensors = ""
    report = ""
    cannot_join = ""
    cannot_combine = ""
    zero_part = "B"

    @property
    def is_plain(self) -> bool:
        """Whether it is plain LoRA."""
        return not self.field

    # Its settings

    def settle(self, config: Settings) -> None:
        """Sets the fields of this variant alone to their defaults, and checks the fields that it excludes.

        ``config`` need not select this variant; ConfigError says which field has no effect without it, or cannot be
        combined with it.
        """
        settle_dependents(config, self.field, self.defaults)
        if getattr(config, self.field):
            refuse_fields(config, self.field, self.excludes, self.name)
            if self.no_scale:
                self._fix_scale(config)
            self.check_settings(config)

    def check_settings(self, config: Settings) -> None:
        """Checks the settings of this variant, and sets those that depend on others."""

    def preset(self, fields: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns the fields of a preset for this variant."""
        return {field: value for field, value in fields.items() if field != "lora_alpha" or not self.no_scale}

    def _fix_scale(self, config: Settings) -> None:
        if config.lora_alpha not in (type(config).lora_alpha, config.lora_rank):
            raise ConfigError(
                f"{self.field} is True and lora_alpha is {config.lora_alpha!r}: {self.no_scale}. Leave lora_alpha out."
            )
        config.lora_alpha = config.lora_rank

    def unsupported(self, config: Settings, base: str) -> Iterator[Unsupported]:
        """Yields the settings of ``config``, for this variant, that a base such as EMBEDDINGS does not support."""
        if base in self.unsupported_on:
            yield Unsupported(self.field, self.field, self.unsupported_on[base])
        if base == EMBEDDINGS and config.freeze_lora_a:
            yield Unsupported("freeze_lora_a", "freeze_lora_a", "A is zero at first there, and B would get no gradient")
        if base == EXPERTS and config.lora_dropout:
            yield Unsupported(
                "lora_dropout", "lora_dropout", "it would drop elements of a token before it is sent to its experts"
            )
        if base in _NOT_ACTIVATED and config.alora_invocation_tokens:
            yield Unsupported("alora_invocation_tokens", "alora_invocation_tokens", _NOT_ACTIVATED[base])
        lora_init = config.lora_init
        if base == QUANTIZED:
            unsupported = initializers.computed_from_base(lora_init)
        elif base in (EMBEDDINGS, CONVOLUTIONS, CUT):
            unsupported = initializers.needs_whole_matrices(lora_init)
        elif base == EXPERTS:
            unsupported = initializers.needs_whole_matrices(lora_init) or initializers.is_loftq(lora_init)
        else:
            unsupported = False
        if unsupported:
            weight = "weight in float" if base == QUANTIZED else "whole weight of a linear cell"
            yield Unsupported("lora_init", f"lora_init {lora_init!r}", f"it needs the {weight}")

    def refusal(self, config: Settings, *bases: str) -> Optional[str]:
        """Returns why a cell cannot carry the adapter of ``config``, and what to do; None if it can.

        ``bases`` lists the kinds of the cell: EMBEDDINGS, SHARDED, ...; it is empty for a linear cell in float.
        """
        for base in bases:
            for field, setting, reason in self.unsupported(config, base):
                way_out = _WAYS_OUT.get(base, _EXCLUDE)
                return f"{setting} is not supported on {base}: {reason}. Leave {field} out, or {way_out}."
        return None

    def check_paths(self, paths: List[str]) -> None:
        """Refuses cells whose adapter could not be saved.

        Raises ConfigError if some of them replace several cells of Hugging Face's, and the variant cannot be split.
        """
        joined = [path for path in paths if names.joined_parts(path)]
        if self.cannot_join and joined:
            raise ConfigError(
                f"{self.field} is True, and {listed(joined)} do the work of several cells of Hugging Face's: a "
                f"{self.name} adapter of such a cell cannot be saved. Leave them out of target_modules."
            )

    # Its parts

    def part_shapes(self, layout: PairLayout, shape: Shape, rank: int, groups: int = 1) -> Dict[str, Shape]:
        """Returns part -> shape of what a cell has of its own, in the order of its parameters.

        ``shape`` is that of its weight; [experts, out, in] of stacked experts.
        """
        tensors = self.tensor_shapes(layout, shape, rank, groups)
        return {part: size for part, size in tensors.items() if part in self.own_parts}

    def tensor_shapes(self, layout: PairLayout, shape: Shape, rank: int, groups: int = 1) -> Dict[str, Shape]:
        """Returns part -> shape of all that a cell computes with, A and B among it; the arguments are part_shapes'."""
        pair = layout.pair_shapes(shape, rank, groups)
        return {**pair, **{part.name: part.shape(rank, shape[0]) for part in self.parts}}

    def shared_shapes(self, shapes: List[Shape], rank: int) -> Dict[str, Shape]:
        """Returns part -> shape of what cells with these weights share: VeRA's projection, else nothing."""
        if not self.shared_parts or not shapes:
            return {}
        rows, columns = zip(*shapes)
        pair = LINEAR.pair_shapes((max(rows), max(columns)), rank)
        return {part.name: pair[half] for half, part in self.shared_parts.items()}

    def trained_parts(self, config: Settings) -> Tuple[str, ...]:
        """Returns the parts of each cell that train: all of its own, but not A with freeze_lora_a, nor B with MiCA."""
        frozen = {"A": config.freeze_lora_a, "B": initializers.freezes_b(config.lora_init)}
        return tuple(part for part in self.own_parts if not frozen.get(part))

    def has_any(self, names: AbstractSet[str]) -> bool:
        """Returns whether any of these parts is one that only this variant has."""
        return any(part.name in names for part in self.parts)

    @property
    def own_parts(self) -> Tuple[str, ...]:
        """All that each cell has of its own, in the order of its parameters."""
        pair = ("A", "B") if self.own_pair else ()
        return (*pair, *(part.name for part in self.parts))

    @property
    def fast_parts(self) -> Tuple[str, ...]:
        """The parts that LoRA+ speeds up: B and, as in PEFT, the norms of rows."""
        return ("B", self.row_norms) if self.row_norms else ("B",)

    @property
    def row_parts(self) -> Tuple[str, ...]:
        """The parts that have an element, or a row, for each row of the weight."""
        return tuple(part.name for part in self.parts if part.size.startswith("out"))

    def reads_input(self, part: str) -> bool:
        """Returns whether the gradient of a part needs the input of the cell."""
        return part == "A"

    def kept_ranks(self, parts: Mapping[str, np.ndarray]) -> Optional[np.ndarray]:
        """Returns which of the ranks of a cell are left, as indices, where training takes ranks away; else None."""
        return None

    def low_rank_pair(self, parts: Mapping[str, np.ndarray]) -> Pair:
        """Returns the A and B whose product scale B A is added to the weight; ``parts`` has the shared ones too."""
        return parts["A"], parts["B"]

    def pair_of_parts(self, parts: Mapping[str, np.ndarray]) -> Pair:
        """Returns the A and B that follow from the parts of a cell, where it has none of its own and shares none."""
        raise NotImplementedError(f"{self.name} stores its pairs.")

    def columns_of(self, a: np.ndarray, in_channels: int) -> np.ndarray:
        """Returns the columns of an A that is not the cell's own for a cell with so many inputs."""
        return a[:, :in_channels]

    def fields_for(self, adapter: Any) -> Dict[str, Any]:
        """Returns the fields of LoraConfig that make cells of this variant, into which ``adapter`` can be loaded."""
        return {} if self.is_plain else {self.field: True}
