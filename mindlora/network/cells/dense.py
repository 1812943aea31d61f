"""LoRADense: a frozen linear cell with a trainable low-rank path beside it."""

from typing import Any, Optional, Tuple, Type

from mindspore import Tensor, nn, ops

from mindlora.core.numerics.folding import Rows
from mindlora.models.lora_config import LoraConfig
from mindlora.network.cells.cell import LoRACell, refuse_unsupported
from mindlora.network.cells.linear_base import HeldWeight, LinearBase, adopt_linear, adopt_weight, channels_of
from mindlora.network.cells.low_rank import TrainedRead, activated_low_rank, composed_low_rank


class LoRADense(HeldWeight, LoRACell):
    r"""A linear cell with a low-rank update: y = activation(x W^T + bias + ((dropout(x) A^T) * scale) B^T).

    scale is lora_alpha / lora_rank (with use_rslora: lora_alpha / sqrt(lora_rank), Kalajdzievski, 2023). It is applied
    to the tensor of width r, the smallest one. W and bias should be frozen (see freeze_base); A and B train. B
    is initialized to zero, so that the cell computes the same as the plain one until it trains.

    Args:
        in_channels (int): Size of the last axis of x.
        out_channels (int): Size of the last axis of y.
        lora_rank (int): Rank r.
        lora_alpha (float): Numerator of the scale.
        lora_dropout (float): Probability of dropping an element of x on the low-rank path. Default: 0.0.
        lora_init, lora_a_init, lora_b_init: Initializers of A and B, as in LoraConfig.
        param_init_type (str): dtype of A and B. Default: float32.
        compute_dtype (str): dtype of the products. Default: None, the dtype of W.
        use_rslora (bool): Divide by sqrt(lora_rank) in the scale. Default: False.
        freeze_lora_a (bool): Train only B (Zhang et al., LoRA-FA, 2023). Default: False.
        **dense: Further arguments of nn.Dense: weight_init, bias_init, has_bias, activation, dtype.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], mindpet_delta_lora_a [r, in_channels],
        mindpet_delta_lora_b [out_channels, r].

    The low-rank path is a fused operator where that is faster, which it never is in training on a CPU (see
    mindlora.network.cells.low_rank). In training on a CPU, the backward recomputes the dropout mask from a four-byte
    seed, so neither the mask nor the dropped x is kept. On other devices, and if the cell is sharded, MindSpore's
    Dropout keeps both.

    Attributes:
        choice (Choice): The path that was picked when the cell was built, and why.

    Inputs:
        - **x** (Tensor) - Shape [..., in_channels].

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of x.

    Raises:
        ConfigError: A LoRA argument is out of range.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    base_kind: Type[LinearBase] = LinearBase
    # Why the fused operators do not support a variant; None if they do.
    not_fused: Optional[str] = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        lora_rank: int,
        lora_alpha: float,
        lora_dropout: float = 0.0,
        *,
        lora_init: Optional[str] = None,
        lora_a_init: Any = None,
        lora_b_init: Any = None,
        param_init_type: str = "float32",
        compute_dtype: Optional[str] = None,
        use_rslora: bool = False,
        freeze_lora_a: bool = False,
        **dense: Any,
    ):
        super().__init__()
        config = LoraConfig(
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            lora_init=lora_init,
            lora_a_init=lora_a_init,
            lora_b_init=lora_b_init,
            param_init_type=param_init_type,
            compute_dtype=compute_dtype,
            use_rslora=use_rslora,
            freeze_lora_a=freeze_lora_a,
        )
        self._replace(nn.Dense(in_channels, out_channels, **dense), config)

    @classmethod
    def from_dense(cls, cell: nn.Cell, config: LoraConfig) -> "LoRADense":
        """Puts LoRA on an existing linear cell, and shares its parameters and operators with it.

        Args:
            cell (nn.Dense, mint.nn.Linear or mindformers.modules.layers.Linear): The cell to replace.
            config (LoraConfig): Rank, scale, dropout, initializers and dtypes.

        Raises:
            UnsupportedCellError: The cell is of another kind, holds experts, keeps its weight as
                [in_channels, out_channels], or is sharded by Layouts.
        """
        return cls.from_cell(cell, config)

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return cls.base_kind.types()

    @classmethod
    def check(cls, cell: nn.Cell, config: LoraConfig) -> None:
        cls.base_kind.check(cell)
        refuse_unsupported(config, *cls.base_kind.traits(cell))

    @classmethod
    def weight_shape(cls, cell: nn.Cell) -> Tuple[int, ...]:
        in_channels, out_channels = channels_of(cell)
        return out_channels, in_channels

    def _adopt(self, cell, config):
        adopt_linear(self, cell, self.base_kind.of(cell, config.compute_dtype))
        adopt_weight(self, cell)
        self.cast = ops.Cast()
        self.trained = TrainedRead(self.dtype)
        if config.alora_invocation_tokens:
            picks = activated_low_rank(self.dropout_rate)
        elif self.not_fused:
            picks = composed_low_rank(self.dropout_rate, self.not_fused)
        else:
            picks = self.base.pick_low_rank(self.lora_rank, self.dropout_rate)
        self.choice, self.low_rank, self.decode = picks

    def hold_base(self, rounds: bool) -> None:
        """Makes the cell multiply by a frozen 16-bit W directly: see LinearBase.hold."""
        self.base.hold(rounds)
        # The operator for a decode step needs W in the dtype of x.
        self.decode = None

    def construct(self, x: Tensor) -> Tensor:
        y = self._adapted(self.base.tokens(x))
        if self.activation_flag:
            y = self.activation(y)
        return self.base.like(y, x)

    def _adapted(self, x):
        """x W^T + bias + ((dropout(x) A^T) * scale) B^T of tokens [tokens, in_channels]; the equation of a variant."""
        a, b = self.trained.of(self.mindpet_delta_lora_a), self.trained.of(self.mindpet_delta_lora_b)
        if self.decode is not None and self.decode.takes(x):
            return self.decode.linear(x, self.weight, self.bias, a, b, self.scale)
        y = self.base.linear(x, self._operands(), self.bias)
        return self.low_rank.add_to(y, x, a, b, self.scale)

    def _operands(self):
        """The factor of x: W as the base takes it, or the tensors of a quantized W."""
        if self.packed:
            return self.packed_weight()
        return (self.base.operand(self.weight),)

    def _stored(self):
        """W as it is stored: its parameter, or those of a quantized W."""
        if self.packed:
            return self.packed_weight()
        return (self.weight,)

    def by_rows(self) -> Rows:
        """Returns W [out_channels, in_channels] in NumPy, of which rows are read as ``[begin:end]``."""
        return self.base.by_rows(self._stored())

    def extend_repr(self) -> str:
        quantization = f", quantization={self.quantization}" if self.quantization else ""
        return (
            f"in_channels={self.in_channels}, out_channels={self.out_channels}, has_bias={self.has_bias}, "
            f"lora_rank={self.lora_rank}, lora_alpha={self.lora_alpha}, lora_dropout={self.dropout_rate}, "
            f"compute_dtype={self.dtype}{quantization}"
        )
