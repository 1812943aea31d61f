"""LinearsTogether: MultiLoRADense cells with one input, computed in one operator."""

from typing import Optional, Sequence, Tuple

from mindspore import Tensor, nn, ops

from mindlora.network.serving.multi_lora_dense import MultiLoRADense
from mindlora.ops.rounded_linear import RoundedLinears


class LinearsTogether(nn.Cell):
    """(cell(x), ...) for two or three MultiLoRADense whose products are rounded, to the last bit. Only ``of`` makes it.

    Inputs:
        - **x** (Tensor) - [..., in_channels].

    Outputs:
        Tuple of Tensor [..., out_channels], dtype of x: those of the cells.
    """

    def __init__(self, cells: Sequence[MultiLoRADense]):
        super().__init__(auto_prefix=False)
        self.linears = nn.CellList(cells, auto_prefix=False)
        first = self.linears[0]
        self.has_bias = first.has_bias
        self.dtype = first.dtype
        self.slots_of_tokens = first.slots_of_tokens
        self.rounded = RoundedLinears(first.packed, first.has_bias, len(cells))
        self.cast = ops.Cast()

    @classmethod
    def of(cls, cells: Sequence[nn.Cell]) -> Optional["LinearsTogether"]:
        """Returns the cell for ``cells``; None where one operator cannot compute them."""
        if not all(isinstance(cell, MultiLoRADense) and cell.rounds for cell in cells):
            return None
        kinds = {(cell.packed, cell.has_bias, cell.dtype, cell.lora_pool.dtype) for cell in cells}
        return cls(cells) if len(kinds) == 1 else None

    def construct(self, x: Tensor) -> Tuple[Tensor, ...]:
        weights, pools, biases = (), (), ()
        for cell in self.linears:
            weights += (cell.rounded_weight(),)
            pools += ((cell.lora_pool, cell.lora_ranks, cell.lora_scales),)
            if self.has_bias:
                biases += (cell.bias,)
        products = self.rounded(self.cast(x, self.dtype), weights, pools, self.slots_of_tokens, biases)
        outputs = ()
        for cell, y in zip(self.linears, products):
            outputs += (self.cast(cell.finished(y, self.slots_of_tokens), x.dtype),)
        return outputs


class JoinsLinears(nn.Cell):
    """Base of cells that apply some linear cells to one input.

    Attributes:
        joined (tuple of str): The attributes that hold these cells.
        joins (bool): Whether one operator computes them; see join_linears.
    """

    joined: Tuple[str, ...]

    def __init__(self, auto_prefix: bool = True):
        super().__init__(auto_prefix=auto_prefix)
        self.joins = False

    def join_linears(self) -> None:
        """Lets one operator compute the linear cells, if it can. They must be those of the network that is compiled."""
        together = LinearsTogether.of([getattr(self, name) for name in self.joined])
        if together is not None:
            # Straight into _cells: assigning an attribute would rename the parameters.
            self._cells["together"] = together
            self.joins = True
