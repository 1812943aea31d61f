"""LoRACell: how a cell with an adapter replaces a cell of the base model; its parts and their initial values."""

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype
from mindspore.common.initializer import HeUniform, Normal, Uniform, initializer

from mindlora.core.errors import ConfigError, MergeError, UnsupportedCellError
from mindlora.core.numerics import initializers
from mindlora.core.numerics.pair_shapes import LINEAR, PairLayout
from mindlora.models.lora_config import LoraConfig
from mindlora.models.variants.registry import LORA, PARAMETERS
from mindlora.models.variants.variant import Variant
from mindlora.network.tensors import fill, to_array


class AdapterParts(nn.Cell):
    """The interface of a cell with an adapter (LoRACell) to files, merges and training; it computes nothing.

    Everything follows from the parameters' names and the variant, so that a new variant overrides none of it if
    files hold the parameters unchanged and its pair is A and B. Otherwise it overrides what differs: ``pair``,
    ``saved_parts`` and ``load_part``, ``shared_parts``, or ``prepare`` for a part that needs the base.

    Attributes:
        variant (Variant): The variant of LoRA.
        parameter_names (mapping): Part -> name of its parameter.
        initial_pair (InitialPair or None): The initial A and B whose product was subtracted from the base (see
            initialize_adapters); None if nothing was subtracted.
        before_merge (tuple or None): While the adapter is merged (see merge_lora), the values of merge_parameters()
            before the merge, as arrays.
    """

    variant: Variant = LORA
    parameter_names: Mapping[str, str] = PARAMETERS
    initial_pair = None
    before_merge = None

    # Its parameters

    def parts(self) -> Dict[str, Parameter]:
        """Returns this cell's own parameters of the adapter, by part (see PARAMETERS)."""
        return {part: getattr(self, name) for part, name in self.parameter_names.items() if hasattr(self, name)}

    def shared_parts(self) -> Dict[str, Parameter]:
        """Returns the parameters of the adapter that all cells of the network share, by part."""
        return {}

    def lora_parameters(self) -> Tuple[Parameter, ...]:
        """Returns the parameters of parts()."""
        return tuple(self.parts().values())

    def trained_parameters(self) -> Tuple[Parameter, ...]:
        """Returns the lora_parameters() that train."""
        trained = self.variant.trained_parts(self)
        return tuple(parameter for part, parameter in self.parts().items() if part in trained)

    def pair(self) -> Tuple[np.ndarray, np.ndarray]:
        """Returns copies of A and B in NumPy. The adapter adds scale B A to W."""
        return self.mindpet_delta_lora_a.asnumpy().copy(), self.mindpet_delta_lora_b.asnumpy().copy()

    # In a network

    def name_parts(self, path: str) -> None:
        """Names the parts for a network in which ``path`` is the prefix of the cell's parameters."""
        for part, parameter in self.parts().items():
            parameter.name = f"{path}.{self.parameter_names[part]}"

    @property
    def adapter_path(self) -> str:
        """The prefix of the adapter's parameters, without the last dot; empty for a cell outside a network."""
        return self.parts()[self.variant.zero_part].name.rpartition(".")[0]

    @property
    def compile_phase(self) -> str:
        """The compiled graph that the cell belongs to, as MindSpore names it."""
        return self._compile_phase

    @compile_phase.setter
    def compile_phase(self, value: str) -> None:
        # MindSpore sets it at every call of a network in graph mode, two microseconds for each cell, and there are
        # several below this one. They need it only when it changes.
        if value != self._compile_phase:
            nn.Cell.compile_phase.fset(self, value)

    # In files

    def saved_parts(self, keep_zeros: bool = False) -> Dict[str, np.ndarray]:
        """Returns the parts as a file holds them, in their stored dtypes; empty if the adapter has no rank left.

        With ``keep_zeros``, parts that add nothing are kept where a cell would leave them out.
        """
        return {part: to_array(parameter) for part, parameter in self.parts().items()}

    def load_part(self, part: str, array: np.ndarray) -> None:
        """Sets one of PARAMETERS to values from a file, of the shape that part_shapes gives, cast to its dtype."""
        parameter = self.parts()[part]
        parameter.set_data(Tensor(np.ascontiguousarray(array), parameter.dtype))

    # In training

    @property
    def will_change_base(self) -> bool:
        """Whether initialize_adapters has yet to subtract the product of A and B from the base's weight."""
        return initializers.changes_base(self.lora_init) and self.initial_pair is None

    @property
    def awaits_initialization(self) -> bool:
        """Whether initialize_adapters has yet to compute A and B from the base's weight."""
        if not initializers.freezes_b(self.lora_init) or self.merged:
            return self.will_change_base
        # MiCA's B is zero until then.
        b = self.parts()["B"]
        return bool(b.has_init) or not to_array(b).any()

    def prepare(self) -> None:
        """Called before the adapter is trained, saved or merged."""

    def add_flags(self, **flags: Any) -> nn.Cell:
        """Sets flags as nn.Cell does. A network's set_train calls this on its cells, instead of their set_train.

        Raises:
            MergeError: Training is switched on while the adapter is merged.
        """
        if flags.get("training") and self.merged:
            raise MergeError(
                f"{self.adapter_path or 'The cell'} is merged into its base and cannot train: call unmerge_lora first, "
                "or set_train(False) to go on without training."
            )
        return super().add_flags(**flags)

    # Merged into the base

    @property
    def merged(self) -> bool:
        """Whether the adapter is merged into W (see merge_lora), and the zero_part is zero."""
        return self.before_merge is not None

    def merge_parameters(self) -> Tuple[Parameter, ...]:
        """Returns the parameters that merging changes: W, the zero_part, and the norms of W's rows if they train."""
        return self.weight, *(self.parts()[part] for part in self._silent_values())

    def silence(self) -> None:
        """Switches the adapter off: from then on, the cell computes the same as the plain cell."""
        for part, value in self._silent_values().items():
            fill(self.parts()[part], value)

    def _silent_values(self):
        """Returns part -> the value with which the adapter adds nothing; norms are NaN until they are taken from W."""
        norms = {self.variant.row_norms: np.nan} if self.variant.row_norms else {}
        return {self.variant.zero_part: 0, **norms}


# The name of a cell's weight: in most cells, in MindFormers' embeddings, in MindSpore's embeddings.
WEIGHTS = ("weight", "embedding_weight", "embedding_table")


class ReplacingCell:
    """Mixin of the cells that replace a cell of the base and keep it: a class beside nn.Cell."""

    # The tuple hides it from MindSpore, which would name and save the parameters of a child cell a second time.
    _adopted: Tuple[nn.Cell]

    @property
    def base_cell(self) -> nn.Cell:
        """The replaced cell."""
        return self._adopted[0]

    def plain_cell(self) -> nn.Cell:
        """Returns the replaced cell with this one's weight, bias and settings."""
        cell = self.base_cell
        for name in (*WEIGHTS, "bias"):
            if hasattr(cell, name):
                setattr(cell, name, self.bias if name == "bias" else self.weight)
        carry_settings(self, cell)
        return cell


class LoRACell(ReplacingCell, AdapterParts):
    """Base of the cells that replace a cell of the base model and add an adapter to it.

    These are all methods of a new variant, in the order of their calls; a variant on linear cells is a subclass of
    LoRADense, which has the rest. The interface for files, merges and training is AdapterParts::

        variant, layout                       the kind of adapter, and the layout of its A and B
        kind_of(cell, config)                 picks the class:
            base_types()                        by the cells that it replaces (linear cells: base_kind)
            variant                             and by its variant
        shared_parameters(cells, config)      the parameters that its cells share, if any (VeRA)
        from_cell(cell, config)               builds the cell:
            check(cell, config)                 refuses cells that it cannot replace
            _adopt(cell, config)                takes over weight, bias and operators of the base
            weight_shape(cell)                  from which part_shapes follows
            _add_adapter(config, shared)        adds the parts (_add_parts), and the operators for them
        construct(x)                          computes; linear cells share one, in which a variant has
            _adapted(x)                         the equation, from a base (linear_base) and a low-rank path (low_rank)

    Attributes:
        weight (Parameter): The base's weight.
        config (LoraConfig): What the cell was made with.
        lora_rank, lora_alpha, use_rslora, scale, dropout_rate: As in LoraConfig.
        layout (PairLayout): The layout of its A and B.
        invocation_tokens (tuple of int): The tokens from which on it acts (alora_invocation_tokens); empty for all
            tokens.
        lora_init (str or None): As in LoraConfig; None once a loaded adapter has replaced the initial one.
        projection_key (int): The seed of VeRA's shared projection.
        freeze_lora_a (bool): Whether only B trains.
    """

    layout: PairLayout = LINEAR
    projection_key = 0
    # What the settings make of a cell is in its other attributes; seeds and paths are in no graph.
    UNREAD_BY_GRAPHS = ("config",)

    @classmethod
    def from_cell(cls, cell: nn.Cell, config: LoraConfig, shared: Optional[Tuple[Parameter, ...]] = None) -> "LoRACell":
        """Puts an adapter on an existing cell, whose parameters and operators it shares.

        Args:
            cell (nn.Cell): The cell to replace, one that ``check`` accepts.
            config (LoraConfig): Rank, scale, dropout, initializers and dtypes.
            shared (tuple of Parameter): The result of ``shared_parameters`` for all cells of the network. Default:
                None, its result for this cell alone.

        Raises:
            UnsupportedCellError: The cell cannot carry this adapter.
        """
        cls.check(cell, config)
        self = cls.__new__(cls)
        nn.Cell.__init__(self)
        self._replace(cell, config, shared)
        return self

    def _replace(self, cell, config, shared=None):
        self._adopted = (cell,)
        self.config = config
        self.lora_rank = config.lora_rank
        self.lora_alpha = config.lora_alpha
        self.use_rslora = config.use_rslora
        self.scale = config.scale
        self.dropout_rate = float(config.lora_dropout)
        self.invocation_tokens = tuple(config.alora_invocation_tokens or ())
        self.lora_init = config.lora_init
        self.freeze_lora_a = config.freeze_lora_a
        self._adopt(cell, config)
        self._add_adapter(config, self.shared_parameters([cell], config) if shared is None else shared)
        # Last, so that the training mode reaches the low-rank path.
        carry_settings(cell, self)

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        """Returns the classes of the cells that this one replaces."""
        raise NotImplementedError

    @classmethod
    def check(cls, cell: nn.Cell, config: LoraConfig) -> None:
        """Raises UnsupportedCellError, with the reason, for a cell that this one cannot replace."""
        raise NotImplementedError

    @classmethod
    def part_shapes(cls, cell: nn.Cell, rank: int) -> Dict[str, Tuple[int, ...]]:
        """Returns part -> shape of an adapter of rank r on ``cell``: {"A": (r, in_channels), "B": (out_channels, r)}.

        The cell may have the adapter already.
        """
        return cls.variant.tensor_shapes(cls.layout, cls.weight_shape(cell), rank, groups_of(cell))

    @classmethod
    def weight_shape(cls, cell: nn.Cell) -> Tuple[int, ...]:
        """Returns the shape of a cell's weight as ``layout`` takes it; the cell is as for part_shapes."""
        raise NotImplementedError

    @classmethod
    def shared_parameters(cls, cells: Sequence[nn.Cell], config: LoraConfig) -> Tuple[Parameter, ...]:
        """Returns the parameters that the adapters of all ``cells`` share: VeRA's projection, or none."""
        return ()

    def _adopt(self, cell, config):
        raise NotImplementedError

    def _add_adapter(self, config, shared):
        shapes = self.part_shapes(self.base_cell, self.lora_rank)
        a, b = initial_values(config, shapes["A"], shapes["B"])
        self._add_parts({"A": a, "B": b})

    def _drawn(self, config: LoraConfig, initializers_of: Mapping[str, Any]) -> Dict[str, Tensor]:
        """Returns part -> initial value, by the initializer of each part, in the dtype of param_init_type."""
        shapes, dtype = self.part_shapes(self, self.lora_rank), getattr(mstype, config.param_init_type)
        return {part: initializer(init, list(shapes[part]), dtype) for part, init in initializers_of.items()}

    def _add_parts(self, values: Mapping[str, Tensor]) -> None:
        """Adds parameters of the adapter: part -> initial value."""
        trained = self.variant.trained_parts(self)
        for part, value in values.items():
            name = self.parameter_names[part]
            setattr(self, name, Parameter(value, name=name, requires_grad=part in trained))

    @property
    def quantization(self) -> Optional[str]:
        """The quantization of W: "nf4", "loftq" if together with the initial A and B, or None for a weight in float."""
        form = getattr(self.base_cell, "quantization", None)
        return "loftq" if form and initializers.is_loftq(self.lora_init) else form


def refuse_own_forward(cell: nn.Cell, types: Tuple[type, ...], replacement: str) -> None:
    """Raises UnsupportedCellError if a cell's forward differs from that of the classes that can be replaced."""
    if not any(type(cell).construct is base.construct for base in types):
        kind = type(cell).__name__
        raise UnsupportedCellError(
            f"{kind} has a forward of its own, which {replacement} would drop. Add it to exclude_modules."
        )


def refuse_unsupported(config: LoraConfig, *bases: str) -> None:
    """Raises UnsupportedCellError if a cell with all traits of ``bases`` does not support the adapter of ``config``."""
    refusal = config.variant.refusal(config, *bases)
    if refusal:
        raise UnsupportedCellError(refusal)


def groups_of(cell: nn.Cell) -> int:
    """Returns the number of groups of a convolution, and 1 of any other cell."""
    return getattr(cell, "group", getattr(cell, "groups", 1))


def carry_settings(source: nn.Cell, target: nn.Cell) -> None:
    """Carries over recomputation, pipeline stage, flags and training mode from the cell that ``target`` replaces."""
    target._scope = source._scope
    target._has_config_recompute = source._has_config_recompute
    target.add_flags(**source.get_flags())
    if hasattr(source, "_pipeline_stage"):
        target.pipeline_stage = source.pipeline_stage
    target.set_train(source.training)


class InitialDraws:
    """A context that draws initial values from ``seed`` and restores the generator on leaving. None has no effect.

    Entered again, it continues its sequence, so that cells built one by one draw the same as cells built together.
    """

    def __init__(self, seed: Optional[int]):
        # MindSpore's initializers take their seeds from NumPy's global generator.
        self._state = None if seed is None else np.random.RandomState(seed).get_state()
        self._outside: Any = None

    def __enter__(self) -> None:
        if self._state is not None:
            self._outside = np.random.get_state()
            np.random.set_state(self._state)

    def __exit__(self, *_: Any) -> None:
        if self._state is not None:
            self._state = np.random.get_state()
            np.random.set_state(self._outside)


def initial_values(config: LoraConfig, a_shape: Sequence[int], b_shape: Sequence[int]) -> Tuple[Tensor, Tensor]:
    """Returns the initial values of A and B, of dtype param_init_type.

    For an initializer that changes the base, these are the default values, because the weight that it needs is loaded
    later; initialize_adapters then applies it.

    Raises:
        ConfigError: lora_a_init or lora_b_init is not an initializer, or a Tensor of another shape.
    """
    a = config.lora_a_init
    b = config.lora_b_init
    dtype = getattr(mstype, config.param_init_type)
    if config.lora_init == "gaussian":
        a = Normal(1 / config.lora_rank)
    elif config.lora_init == "orthogonal":
        # NumPy's global generator, which mindspore.set_seed seeds, gives the seed.
        rng = np.random.default_rng(np.random.randint(2**31))
        a, b = (Tensor(half, dtype) for half in initializers.orthogonal(config.lora_rank, a_shape[1], b_shape[0], rng))
    return initial_value(a, list(a_shape), dtype, "lora_a_init"), initial_value(b, list(b_shape), dtype, "lora_b_init")


def initial_value(init: Any, shape: List[int], dtype: mstype.Type, field: str) -> Tensor:
    """Returns the initial value of A or B, unallocated while MindSpore delays initialization.

    ``init`` is None for the default of ``field``: kaiming_uniform for lora_a_init, zeros for lora_b_init.
    """
    if init is None:
        init = "kaiming_uniform" if field == "lora_a_init" else "zeros"
    if isinstance(init, str) and init == "kaiming_uniform":
        # MindSpore would count the rank of stacked experts, [experts, r, in], among the inputs.
        init = HeUniform(negative_slope=math.sqrt(5)) if len(shape) != 3 else Uniform(1 / math.sqrt(shape[2]))
    elif isinstance(init, Tensor) and list(init.shape) != shape:
        raise ConfigError(f"{field} is a Tensor of shape {list(init.shape)}: its shape must be {shape}.")
    try:
        return initializer(init, shape, dtype)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{field} is {init!r}, which is not a MindSpore initializer: use a name such as 'normal', an Initializer, "
            f"a Tensor or a number. MindSpore says: {error}"
        ) from error
