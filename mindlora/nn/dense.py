"""LoRADense: a frozen linear cell with a trainable low-rank path beside it."""

import sys
from typing import Any, Optional, Tuple

from mindspore import Tensor, mint, nn, ops
from mindspore.common import dtype as mstype

from mindlora.config import LoraConfig
from mindlora.config.variants.variant import CUT, SHARDED
from mindlora.errors import UnsupportedCellError
from mindlora.nn.cell import LoRACell, carry_settings, refuse_unsupported
from mindlora.nn.initial_values import initial_values
from mindlora.nn.linear_form import adopt_form, channels_of, is_sharded, linear_form, strategy_of
from mindlora.nn.low_rank import pick_low_rank


class LoRADense(LoRACell):
    r"""A linear cell with a low-rank update: y = activation(x W^T + bias + ((dropout(x) A^T) * scale) B^T).

    scale is lora_alpha / lora_rank (with use_rslora: lora_alpha / sqrt(lora_rank), Kalajdzievski, 2023). It is applied
    to the tensor of width r, the smallest one. W and bias are meant to be frozen (see freeze_base); A and B train. B
    is initialized to zero, so that the cell computes what the plain one does until it trains.

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
    mindlora.nn.low_rank). In training on a CPU, the backward recomputes the dropout mask from a four-byte seed, so
    neither the mask nor the dropped x is kept. On other devices, and if the cell is sharded, MindSpore's Dropout keeps
    both.

    Attributes:
        choice (Choice): The path that was picked when the cell was made, and why.

    Inputs:
        - **x** (Tensor) - Shape [..., in_channels].

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of x.

    Raises:
        ConfigError: A LoRA argument is out of range.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

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
        self._adopt(nn.Dense(in_channels, out_channels, **dense), config)

    @classmethod
    def from_dense(cls, cell: nn.Cell, config: LoraConfig) -> "LoRADense":
        """Puts LoRA on an existing linear cell, and shares its parameters and operators with it.

        Args:
            cell (nn.Dense, mint.nn.Linear or mindformers.modules.layers.Linear): The cell to replace.
            config (LoraConfig): Rank, scale, dropout, initializers and dtypes.

        Returns:
            LoRADense.

        Raises:
            UnsupportedCellError: The cell is of another kind, holds experts, keeps its weight as
                [in_channels, out_channels], or is sharded by Layouts.
        """
        return cls.from_cell(cell, config)

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return plain_linear_types()

    @classmethod
    def weight_shape(cls, cell: nn.Cell) -> Tuple[int, ...]:
        in_channels, out_channels = channels_of(cell)
        return out_channels, in_channels

    @classmethod
    def check(cls, cell: nn.Cell, config: Optional[LoraConfig]) -> None:
        kind = type(cell).__name__
        if isinstance(cell, LoRACell):
            raise UnsupportedCellError(
                "The cell is a LoRADense already: adapters do not stack. Use a network without adapters."
            )
        if not isinstance(cell, plain_linear_types()):
            raise UnsupportedCellError(
                f"{kind} is none of nn.Dense, mint.nn.Linear and MindFormers' Linear: pass one of these."
            )
        if not any(type(cell).construct is base.construct for base in plain_linear_types()):
            raise UnsupportedCellError(
                f"{kind} has a forward of its own, which LoRADense would drop. Add it to exclude_modules."
            )
        if getattr(cell, "expert_num", 1) > 1 or getattr(cell, "use_gmm", False):
            raise UnsupportedCellError(
                f"{kind} holds {cell.expert_num} experts; LoRA on expert weights is not "
                "supported. Add it to exclude_modules."
            )
        if not getattr(cell, "transpose_b", True):
            raise UnsupportedCellError(
                f"{kind} keeps its weight as [in_channels, out_channels] (transpose_b False); "
                "LoRADense needs [out_channels, in_channels]. Add it to exclude_modules."
            )
        if isinstance(cell, mint.nn.Linear) and is_sharded(cell):
            raise UnsupportedCellError(
                f"{kind} of mindspore.mint is sharded, and LoRA's strategies are derived from those of nn.Dense "
                "and MindFormers' Linear alone. Add it to exclude_modules."
            )
        matmul = linear_form(cell).matmul
        if getattr(matmul, "in_layout", None) is not None:
            raise UnsupportedCellError(
                f"{kind} is sharded by Layouts, from which LoRA's strategies cannot be derived. "
                "Switch n-dimensional tensor parallelism off (use_3d_tensor_parallel: False)."
            )
        strategy = strategy_of(matmul)
        if config and strategy:
            refuse_unsupported(config, SHARDED, *([CUT] if max(strategy[1]) > 1 else []))

    def _adopt(self, cell, config):
        """Takes over what the forward of ``cell`` uses, and adds A and B."""
        self._describe(cell, config)
        form = adopt_form(self, cell)
        self.weight, self.bias, self.matmul = cell.weight, cell.bias, form.matmul
        self.dtype = getattr(mstype, config.compute_dtype) if config.compute_dtype else form.dtype

        self._add_adapter(config)
        self.cast, self.reshape = ops.Cast(), ops.Reshape()
        self.choice, self.low_rank, self.decode = self._pick_low_rank(strategy_of(form.matmul))
        # Last, so that the training mode reaches the low-rank path.
        carry_settings(cell, self)

    def _add_adapter(self, config):
        a, b = initial_values(config, [self.lora_rank, self.in_channels], [self.out_channels, self.lora_rank])
        self._add_parts({"A": a, "B": b})

    def _pick_low_rank(self, strategy):
        return pick_low_rank(self.lora_rank, self.dtype, self.dropout_rate, self.has_bias, strategy)

    def construct(self, x: Tensor) -> Tensor:
        out_shape, input_dtype = x.shape[:-1] + (self.out_channels,), x.dtype
        x = self.reshape(self.cast(x, self.dtype), (-1, self.in_channels))
        y = self._adapted(x)
        if self.activation_flag:
            y = self.activation(y)
        return self.cast(self.reshape(y, out_shape), input_dtype)

    def _factors(self):
        """What the low-rank path multiplies by: A, B and the scale."""
        a, b = self.cast(self.mindpet_delta_lora_a, self.dtype), self.cast(self.mindpet_delta_lora_b, self.dtype)
        return a, b, self.scale

    def _adapted(self, x):
        """x W^T + bias + ((dropout(x) A^T) * scale) B^T."""
        a, b, scale = self._factors()
        if self.decode is not None and self.decode.takes(x):
            return self.decode.linear(x, self.cast(self.weight, self.dtype), self._cast_bias(), a, b, scale)
        return self.low_rank.add_to(self._base(x), x, a, b, scale)

    def _base(self, x):
        """x W^T + bias."""
        return self._with_bias(self._base_product(x))

    def _base_product(self, x):
        """x W^T."""
        return self.matmul(x, self.cast(self.weight, self.dtype))

    def _with_bias(self, y):
        return self.bias_add(y, self._cast_bias()) if self.has_bias else y

    def _cast_bias(self):
        return self.cast(self.bias, self.dtype) if self.has_bias else None

    def extend_repr(self) -> str:
        return (
            f"in_channels={self.in_channels}, out_channels={self.out_channels}, has_bias={self.has_bias}, "
            f"lora_rank={self.lora_rank}, lora_alpha={self.lora_alpha}, lora_dropout={self.dropout_rate}, "
            f"compute_dtype={self.dtype}"
        )


def plain_linear_types() -> Tuple[type, ...]:
    """Returns the classes of plain linear cells: nn.Dense, mint.nn.Linear, and MindFormers' Linear if imported."""
    layers = sys.modules.get("mindformers.modules.layers")
    return (nn.Dense, mint.nn.Linear, layers.Linear) if layers else (nn.Dense, mint.nn.Linear)
