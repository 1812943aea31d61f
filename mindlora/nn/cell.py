"""LoRACell: what every cell with an adapter has, whatever it computes."""

from typing import Dict, Optional, Sequence, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindlora.adapters.pair_kinds import PARTS
from mindlora.config import LoraConfig
from mindlora.errors import MergeError, UnsupportedCellError
from mindlora.numerics import initializers

LORA_A = "mindpet_delta_lora_a"
LORA_B = "mindpet_delta_lora_b"
# MindFormers freezes once more what has no mindpet_delta_lora in its name.
MAGNITUDE = "mindpet_delta_lora_magnitude"
# Part of an adapter -> how its parameter is called in a network.
PART_NAMES = {name: part.parameter for name, part in PARTS.items()}


class LoRACell(nn.Cell):
    """Base of the cells that take the place of a cell of the base model and add an adapter to it.

    A subclass takes over the cell's weight, bias and operators in ``_adopt``, which calls ``_describe``, and adds the
    parameters of its adapter, called as PART_NAMES says.

    Attributes:
        weight (Parameter): The base's weight.
        lora_rank, lora_alpha, use_rslora, scale, dropout_rate: As in LoraConfig.
        embeds (bool): Whether W is a table [vocabulary, dim], to which the transpose of scale B A is added.
        quantization (str or None): How W is quantized.
        lora_init (str or None): As in LoraConfig; None once an adapter was loaded in the place of its start.
        zero_part (str): The part of the adapter without which it does nothing.
        takes_base_initializers (bool): Whether the starts that need W, or A and B together, are known for such a cell.
        initial_pair (InitialPair or None): What the start took from the base (see initialize_adapters).
        projection_key (int): What VeRA's A and B were drawn from.
        freeze_lora_a (bool): Whether B alone trains.
        before_merge (tuple or None): While the adapter is merged (see merge_lora), what merge_parameters() were, as arrays.
    """

    embeds = False
    zero_part = "B"
    takes_base_initializers = False
    quantization = None
    initial_pair = None
    projection_key = 0
    before_merge = None

    @classmethod
    def from_cell(cls, cell: nn.Cell, config: LoraConfig, common: Optional[Tuple[Parameter, ...]] = None) -> "LoRACell":
        """Puts an adapter on an existing cell, whose parameters and operators are shared and not copied.

        Args:
            cell (nn.Cell): The cell to replace, of a kind that ``check`` takes.
            config (LoraConfig): Rank, scale, dropout, starts and dtypes.
            common (tuple of Parameter): What ``shared_parameters`` gave for all cells of the network. Default: None,
                what it gives for this cell.

        Returns:
            LoRACell.

        Raises:
            UnsupportedCellError: The cell cannot carry this adapter.
        """
        cls.check(cell, config)
        self = cls.__new__(cls)
        nn.Cell.__init__(self)
        self._adopt(cell, config)
        self._join(cls.shared_parameters([cell], config) if common is None else common)
        return self

    @classmethod
    def base_types(cls) -> tuple:
        """Returns the classes of the cells that this one takes the place of."""
        raise NotImplementedError

    @classmethod
    def serves(cls, config: LoraConfig) -> bool:
        """Tells whether this is the kind of adapter that ``config`` asks for."""
        raise NotImplementedError

    @classmethod
    def check(cls, cell: nn.Cell, config: LoraConfig) -> None:
        """Raises UnsupportedCellError, with the reason, for a cell that this one cannot stand in for."""
        raise NotImplementedError

    @classmethod
    def part_shapes(cls, cell: nn.Cell, rank: int) -> Dict[str, Tuple[int, ...]]:
        """Returns the shape of each part of an adapter of this kind for ``cell``, adapted already or not."""
        raise NotImplementedError

    @classmethod
    def shared_parameters(cls, cells: Sequence[nn.Cell], config: LoraConfig) -> Tuple[Parameter, ...]:
        """Returns what the adapters of all ``cells`` of a network have in common: nothing, but with VeRA."""
        return ()

    def _adopt(self, cell, config):
        raise NotImplementedError

    def _join(self, common):
        """Takes what ``shared_parameters`` made."""

    def _describe(self, cell, config):
        """Takes over what cells of every kind have."""
        # In a tuple, where MindSpore does not see it: as a child it would name and save the base's parameters twice.
        self._adopted = (cell,)
        self.lora_rank, self.lora_alpha, self.use_rslora = config.lora_rank, config.lora_alpha, config.use_rslora
        self.scale = config.scale
        self.dropout_rate = float(config.lora_dropout)
        if initializers.needs_whole_matrices(config.lora_init) and not self.takes_base_initializers:
            raise UnsupportedCellError(
                f"lora_init {config.lora_init!r} is for linear cells, and one of the selected "
                f"cells is {type(cell).__name__}. Set lora_init: kaiming, or add it to "
                "exclude_modules."
            )
        self.lora_init, self.freeze_lora_a = config.lora_init, config.freeze_lora_a

    def parts(self) -> Dict[str, Parameter]:
        """Returns the parameters of the adapter that are this cell's own, by part, as PART_NAMES has them."""
        return {part: getattr(self, name) for part, name in PART_NAMES.items() if hasattr(self, name)}

    def shared_parts(self) -> Dict[str, Parameter]:
        """Returns what the adapter has in common with those of the network's other cells, by part."""
        return {}

    def lora_parameters(self) -> Tuple[Parameter, ...]:
        """Returns the parameters of parts()."""
        return tuple(self.parts().values())

    def pair(self) -> Tuple[np.ndarray, np.ndarray]:
        """Returns copies of A and B in NumPy, of which scale B A is what the adapter adds to W."""
        return self.mindpet_delta_lora_a.asnumpy().copy(), self.mindpet_delta_lora_b.asnumpy().copy()

    def trained_parameters(self) -> Tuple[Parameter, ...]:
        """Returns those of lora_parameters() that train."""
        return tuple(p for part, p in self.parts().items() if part != "A" or not self.freeze_lora_a)

    @property
    def awaits_initialization(self) -> bool:
        """Whether A and B are still to be made from the base's weight, by initialize_adapters."""
        return initializers.changes_base(self.lora_init) and self.initial_pair is None

    def load_part(self, part: str, array: np.ndarray) -> None:
        """Gives one part of the adapter its values from a file."""
        parameter = self.parts()[part]
        parameter.set_data(Tensor(np.ascontiguousarray(array), parameter.dtype))

    def prepare(self) -> None:
        """Called before the adapter is read out of the cell, to train, save or merge it."""

    def merge_parameters(self) -> Tuple[Parameter, ...]:
        """Returns the parameters that merging changes: W, that of zero_part, and then those of the cell's own kind."""
        return self.weight, self.parts()[self.zero_part]

    def silence(self) -> None:
        """Takes the adapter out of the forward, which is that of the plain cell from then on."""
        fill(self.parts()[self.zero_part], 0)

    @property
    def merged(self) -> bool:
        """Whether W holds the low-rank path (see merge_lora); B is zero then."""
        return self.before_merge is not None

    @property
    def adapter_path(self) -> str:
        """What stands before the names of the adapter's parameters; empty for a cell outside of a network."""
        return self.parts()[self.zero_part].name.rpartition(".")[0]

    def plain_cell(self) -> nn.Cell:
        """Returns the cell that this one took the place of, with this one's weight, bias and settings."""
        (cell,) = self._adopted
        self._give_back(cell)
        carry_settings(self, cell)
        return cell

    def _give_back(self, cell):
        cell.weight, cell.bias = self.weight, self.bias

    def add_flags(self, **flags):
        """Sets flags of the cell as nn.Cell does; here, and not at set_train, a network's set_train reaches a cell.

        Raises:
            MergeError: The flag is training while the adapter is merged.
        """
        if flags.get("training") and self.merged:
            raise MergeError(
                f"{self.adapter_path or 'The cell'} is merged into its "
                "base and cannot train: call unmerge_lora first, or set_train(False) to go on without "
                "training."
            )
        return super().add_flags(**flags)


def fill(parameter: Parameter, value: float) -> None:
    """Gives each element of a parameter the same value."""
    # from_numpy takes the array over, where Tensor would copy it.
    parameter.set_data(Tensor.from_numpy(np.full_like(parameter.asnumpy(), value)))


def carry_settings(source: nn.Cell, target: nn.Cell) -> None:
    """Carries over recomputation, pipeline stage and training mode from the cell that ``target`` replaces."""

    target._scope = source._scope
    target._has_config_recompute = source._has_config_recompute
    target.add_flags(**source.get_flags())
    if hasattr(source, "_pipeline_stage"):
        target.pipeline_stage = source.pipeline_stage
    target.set_train(source.training)
