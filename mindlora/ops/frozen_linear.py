"""frozen_linear: frozen layers whose weights stay in 16 bits, for training on a CPU."""

from typing import Callable, Tuple

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import constexpr

from mindlora.core.errors import BackendError
from mindlora.ops.operator_cell import CpuKernel, OperatorCell, check_fixed_dtypes

# Dtypes of such weights.
HELD_DTYPES = (mstype.bfloat16, mstype.float16)


class FrozenLinear(OperatorCell):
    r"""y = x W^T and dx = dy W with a 16-bit W, of which a small part at a time is widened. W gets no gradient.

    Products are in float32, or, with ``rounds``, in bfloat16: x in the forward and dy in the backward are rounded
    to bfloat16, the products of such numbers are exact in float32, and all sums are in float32. A processor with
    AVX512_BF16 or AMX has instructions for that.

    Args:
        rounds (bool): Whether products are in bfloat16; W is then in bfloat16 too. Default: False.

    Inputs:
        - **x** (Tensor) - Shape [tokens, K], float32.
        - **weight** (Tensor) - Shape [N, K], bfloat16 or float16.

    Outputs:
        Tensor [tokens, N], float32.

    Raises:
        BackendError: The device is not a CPU, the library is missing, or a dtype is not supported.
        RuntimeError: A shape is wrong (raised by the kernel, which names it).

    Source: Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019.
    """

    op = "frozen_linear"
    inputs = 2

    def __init__(self, rounds: bool = False):
        super().__init__()
        self.rounds = rounds
        name = "FrozenLinearRounded" if rounds else "FrozenLinear"
        self.grad_kernel = CpuKernel(f"{name}Grad", self.inputs)
        self.kernel = CpuKernel(name, self.inputs, bprop=_gradient(self.grad_kernel))

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        check_fixed_dtypes(self.op, self.path, ("x",), (x.dtype,), (mstype.float32,))
        _check_weight(self.op, self.path, weight.dtype, self.rounds)
        return self.kernel(x, weight)

    def times(self, dy: Tensor, weight: Tensor) -> Tensor:
        """dy W, [tokens, K], for dy [tokens, N]: the gradient of x, which has no gradient itself."""
        return self.grad_kernel(dy, weight)


def _gradient(kernel: CpuKernel) -> Callable[..., Tuple[Tensor, Tensor]]:
    """Returns the bprop of a product, whose gradient ``kernel`` computes.

    It belongs to the primitive and not to the cell: inputs of a cell's bprop are kept from the forward, and where
    gradients are accumulated in a loop, MindSpore keeps a parameter as a copy.
    """

    def bprop(x, weight, out, dout):
        return kernel(dout, weight), ops.zeros_like(weight)

    return bprop


class FrozenExperts(OperatorCell):
    r"""y_e = x_e W_e and dx_e = dy_e W_e^T for the rows x_e of each expert e, whose W_e is frozen and stays in 16 bits.

    Otherwise it is like FrozenLinear. Rows after the last expert's give zeros.

    Args:
        rounds (bool): As in FrozenLinear. Default: False.

    Inputs:
        - **x** (Tensor) - Shape [tokens, in], float32, sorted by expert.
        - **weight** (Tensor) - Shape [experts * in, out], bfloat16 or float16: the W_e, one below the other.
        - **groups** (Tensor) - Shape [experts], int64: the row of x after each expert's last.

    Outputs:
        Tensor [tokens, out], float32.

    Raises:
        BackendError: As in FrozenLinear.
        RuntimeError: A shape is wrong, or the groups are not in order (raised by the kernel, which names it).

    Source: Shazeer et al., Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer, 2017.
    """

    op = "frozen_linear"
    inputs = 3

    def __init__(self, rounds: bool = False):
        super().__init__()
        self.rounds = rounds
        name = "FrozenExpertsRounded" if rounds else "FrozenExperts"
        grad_kernel = CpuKernel(f"{name}Grad", self.inputs)
        self.kernel = CpuKernel(name, self.inputs, bprop=_gradient_of_rows(grad_kernel))

    def construct(self, x: Tensor, weight: Tensor, groups: Tensor) -> Tensor:
        check_fixed_dtypes(self.op, self.path, ("x", "groups"), (x.dtype, groups.dtype), (mstype.float32, mstype.int64))
        _check_weight(self.op, self.path, weight.dtype, self.rounds)
        return self.kernel(x, weight, groups)


def _gradient_of_rows(kernel: CpuKernel) -> Callable[..., Tuple[Tensor, Tensor, Tensor]]:
    """Returns the bprop of a product by experts, as _gradient."""

    def bprop(x, weight, groups, out, dout):
        return kernel(dout, weight, groups), ops.zeros_like(weight), ops.zeros_like(groups)

    return bprop


def _no_gradient(ids, weight, like, out, dout):
    return ops.zeros_like(ids), ops.zeros_like(weight), ops.zeros_like(like)


class FrozenRows(OperatorCell):
    """Rows of a 16-bit table by number, widened to float32. The table gets no gradient.

    Inputs:
        - **ids** (Tensor) - Any shape, int32, each from 0 to N - 1.
        - **weight** (Tensor) - Shape [N, K], bfloat16 or float16.

    Outputs:
        Tensor of the shape of ids and K, float32.

    Raises:
        BackendError: As in FrozenLinear.
        RuntimeError: A shape or a number is wrong (raised by the kernel, which names it).
    """

    op = "frozen_linear"
    inputs = 3

    def __init__(self):
        super().__init__()
        self.kernel = CpuKernel("FrozenRows", self.inputs, bprop=_no_gradient)
        self.like = Tensor([0], mstype.float32)

    def construct(self, ids: Tensor, weight: Tensor) -> Tensor:
        check_fixed_dtypes(self.op, self.path, ("ids",), (ids.dtype,), (mstype.int32,))
        _check_weight(self.op, self.path, weight.dtype, False)
        return self.kernel(ids, weight, self.like)


class FrozenGather(nn.Cell):
    """FrozenRows with the arguments of MindSpore's Gather, for cells that call it.

    Inputs:
        - **weight** (Tensor) - Shape [N, K], bfloat16 or float16.
        - **ids** (Tensor) - Any shape, int32, each from 0 to N - 1.
        - **axis** (int) - 0.

    Outputs:
        Tensor of the shape of ids and K, float32.
    """

    def __init__(self):
        super().__init__()
        self.rows = FrozenRows()

    def construct(self, weight: Tensor, ids: Tensor, axis: int) -> Tensor:
        return self.rows(ids, weight)


@constexpr
def _check_weight(op, path, dtype, rounds):
    dtypes = (mstype.bfloat16,) if rounds else HELD_DTYPES
    if dtype not in dtypes:
        raise BackendError(f"{op} ({path}): W is {dtype}: it must be {' or '.join(map(str, dtypes))}.")
