"""LoRACell: what every cell with an adapter has in common."""

from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindlora.core.errors import MergeError, UnsupportedCellError
from mindlora.core.numerics import initializers
from mindlora.core.numerics.pair_shapes import LINEAR, PairLayout
from mindlora.models.lora_config import LoraConfig
from mindlora.models.variants.registry import LORA, PARAMETERS
from mindlora.models.variants.variant import Variant
from mindlora.network.cells.initial_values import initial_values
from mindlora.network.tensors import to_array

# The name of a cell's weight: in most cells, in MindFormers' embeddings, in MindSpore's embeddings.
WEIGHTS = ("weight", "embedding_weight", "embedding_table")


class LoRACell(nn.Cell):
    """Base of the cells that replace a cell of the base model and add an adapter to it.

    A subclass says what it replaces (base_types, check, weight_shape) and which adapter it is (variant, layout), and
    has three hooks, in the order in which they are called::

        kind_of(cell, config)                 picks the class by base_types and variant
          from_cell(cell, config)             check, then settings of the configuration
            1  _adopt(cell, config)           takes over weight, bias and operators of the base
            2  _add_adapter(config, shared)   adds A and B, or the parts of another variant, and the operators for them
        construct(x)                          linear cells share one
            3  _adapted(x)                    the equation, from a base (linear_base) and a low-rank path (low_rank)

    Attributes:
        weight (Parameter): The base's weight.
        lora_rank, lora_alpha, use_rslora, scale, dropout_rate: As in LoraConfig.
        variant (Variant): The variant of LoRA that it computes.
        layout (PairLayout): What A and B look like on it.
        parameter_names (mapping): Part -> name of its parameter.
        invocation_tokens (tuple of int): The tokens from which on it acts (alora_invocation_tokens); empty if on all.
        lora_init (str or None): As in LoraConfig; None once a loaded adapter has replaced the initial one.
        initial_pair (InitialPair or None): The initial A and B whose product was subtracted from the base (see
            initialize_adapters); None if nothing was subtracted.
        projection_key (int): The key that VeRA's shared projection is drawn from.
        freeze_lora_a (bool): Whether only B trains.
        before_merge (tuple or None): While the adapter is merged (see merge_lora), the values of merge_parameters()
            before the merge, as arrays.
    """

    variant: Variant = LORA
    layout: PairLayout = LINEAR
    parameter_names: Mapping[str, str] = PARAMETERS
    initial_pair = None
    projection_key = 0
    before_merge = None

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

    @classmethod
    def from_cell(cls, cell: nn.Cell, config: LoraConfig, shared: Optional[Tuple[Parameter, ...]] = None) -> "LoRACell":
        """Puts an adapter on an existing cell, and shares its parameters and operators with it.

        Args:
            cell (nn.Cell): The cell to replace, one that ``check`` accepts.
            config (LoraConfig): Rank, scale, dropout, initializers and dtypes.
            shared (tuple of Parameter): What ``shared_parameters`` returned for all cells of the network. Default:
                None, to use what it returns for just this cell.

        Raises:
            UnsupportedCellError: The cell cannot carry this adapter.
        """
        cls.check(cell, config)
        self = cls.__new__(cls)
        nn.Cell.__init__(self)
        self._replace(cell, config, shared)
        return self

    def _replace(self, cell, config, shared=None):
        # The tuple hides it from MindSpore, which would name and save the parameters of a child cell a second time.
        self._adopted = (cell,)
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
        return cls.variant.tensor_shapes(cls.layout, cls.weight_shape(cell), rank, cls.groups_of(cell))

    @classmethod
    def weight_shape(cls, cell: nn.Cell) -> Tuple[int, ...]:
        """Returns the shape of a cell's weight as ``layout`` takes it; the cell is as for part_shapes."""
        raise NotImplementedError

    @staticmethod
    def groups_of(cell: nn.Cell) -> int:
        """Returns the number of groups of a convolution, and 1 of any other cell."""
        return getattr(cell, "group", getattr(cell, "groups", 1))

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

    def _add_parts(self, values):
        """Adds parameters of the adapter: part -> initial value."""
        trained = self.variant.trained_parts(self)
        for part, value in values.items():
            name = self.parameter_names[part]
            setattr(self, name, Parameter(value, name=name, requires_grad=part in trained))

    @property
    def quantization(self) -> Optional[str]:
        """How W is quantized: "nf4", "loftq" if together with the initial A and B, or None for a weight in float."""
        form = getattr(self.base_cell, "quantization", None)
        return "loftq" if form and initializers.is_loftq(self.lora_init) else form

    @property
    def base_cell(self) -> nn.Cell:
        """The cell that this one replaced."""
        return self._adopted[0]

    def parts(self) -> Dict[str, Parameter]:
        """Returns this cell's own parameters of the adapter, by part (see PARAMETERS)."""
        return {part: getattr(self, name) for part, name in self.parameter_names.items() if hasattr(self, name)}

    def name_parts(self, path: str) -> None:
        """Gives the parts their names in a network, in which ``path`` is the prefix of the cell's parameters."""
        for part, parameter in self.parts().items():
            parameter.name = f"{path}.{self.parameter_names[part]}"

    def saved_parts(self, keep_zeros: bool = False) -> Dict[str, np.ndarray]:
        """Returns the parts as a file holds them, in their stored dtypes; empty if the adapter has no rank left.

        With ``keep_zeros``, what adds nothing is kept where a cell would leave it out.
        """
        return {part: to_array(parameter) for part, parameter in self.parts().items()}

    def shared_parts(self) -> Dict[str, Parameter]:
        """Returns the parameters of the adapter that all cells of the network share, by part."""
        return {}

    def lora_parameters(self) -> Tuple[Parameter, ...]:
        """Returns the parameters of parts()."""
        return tuple(self.parts().values())

    def pair(self) -> Tuple[np.ndarray, np.ndarray]:
        """Returns copies of A and B in NumPy. The adapter adds scale B A to W."""
        return self.mindpet_delta_lora_a.asnumpy().copy(), self.mindpet_delta_lora_b.asnumpy().copy()

    def trained_parameters(self) -> Tuple[Parameter, ...]:
        """Returns the lora_parameters() that train."""
        trained = self.variant.trained_parts(self)
        return tuple(parameter for part, parameter in self.parts().items() if part in trained)

    @property
    def awaits_initialization(self) -> bool:
        """Whether initialize_adapters has yet to make A and B from the base's weight."""
        return initializers.changes_base(self.lora_init) and self.initial_pair is None

    def load_part(self, part: str, array: np.ndarray) -> None:
        """Sets one of PARAMETERS to values from a file, of the shape that part_shapes gives, cast to its dtype."""
        parameter = self.parts()[part]
        parameter.set_data(Tensor(np.ascontiguousarray(array), parameter.dtype))

    def prepare(self) -> None:
        """Called before the adapter is trained, saved or merged."""

    def merge_parameters(self) -> Tuple[Parameter, ...]:
        """Returns the parameters that merging changes: W, the zero_part, then any others that the variant has."""
        return self.weight, self.parts()[self.variant.zero_part]

    def silence(self) -> None:
        """Switches the adapter off: from then on, the cell computes what the plain cell does."""
        fill(self.parts()[self.variant.zero_part], 0)

    @property
    def merged(self) -> bool:
        """Whether the adapter is merged into W (see merge_lora), and the zero_part is zero."""
        return self.before_merge is not None

    @property
    def adapter_path(self) -> str:
        """The prefix of the adapter's parameters, without the last dot; empty for a cell outside of a network."""
        return self.parts()[self.variant.zero_part].name.rpartition(".")[0]

    def plain_cell(self) -> nn.Cell:
        """Returns the cell that this one replaced, with this one's weight, bias and settings."""
        cell = self.base_cell
        for name in (*WEIGHTS, "bias"):
            if hasattr(cell, name):
                setattr(cell, name, self.bias if name == "bias" else self.weight)
        carry_settings(self, cell)
        return cell

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


def fill(parameter: Parameter, value: float) -> None:
    """Sets every element of a parameter to the same value."""
    # from_numpy shares the array, whereas Tensor would copy it.
    parameter.set_data(Tensor.from_numpy(np.full_like(parameter.asnumpy(), value)))


def refuse_own_forward(cell: nn.Cell, types: Tuple[type, ...], replacement: str) -> None:
    """Raises UnsupportedCellError if a cell computes something else than the classes that can be replaced."""
    if not any(type(cell).construct is base.construct for base in types):
        kind = type(cell).__name__
        raise UnsupportedCellError(
            f"{kind} has a forward of its own, which {replacement} would drop. Add it to exclude_modules."
        )


def refuse_unsupported(config: LoraConfig, *bases: str) -> None:
    """Raises UnsupportedCellError if a cell that is all of ``bases`` does not support the adapter of ``config``."""
    refusal = config.variant.refusal(config, *bases)
    if refusal:
        raise UnsupportedCellError(refusal)


def carry_settings(source: nn.Cell, target: nn.Cell) -> None:
    """Carries over recomputation, pipeline stage, flags and training mode from the cell that ``target`` replaces."""
    target._scope = source._scope
    target._has_config_recompute = source._has_config_recompute
    target.add_flags(**source.get_flags())
    if hasattr(source, "_pipeline_stage"):
        target.pipeline_stage = source.pipeline_stage
    target.set_train(source.training)
