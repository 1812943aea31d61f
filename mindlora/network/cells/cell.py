"""LoRACell: how a cell with an adapter replaces a cell of the base model, and the initial values of A and B."""

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype
from mindspore.common.initializer import HeUniform, Normal, Uniform, initializer

from mindlora.core.errors import ConfigError, UnsupportedCellError
from mindlora.core.numerics import initializers
from mindlora.core.numerics.pair_shapes import LINEAR, PairLayout
from mindlora.models.lora_config import LoraConfig
from mindlora.network.cells.adapter_parts import AdapterParts

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
