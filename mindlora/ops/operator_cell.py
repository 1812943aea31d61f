"""Base classes of the operators' cells: the kernel of the picked path, checks of inputs, products."""

import functools
from typing import Any, Callable, Optional, Sequence, Tuple, Type, Union

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common import _Function
from mindspore.common import dtype as mstype
from mindspore.ops import CustomRegOp, DataType
from mindspore.ops.primitive import constexpr

from mindlora.core.errors import BackendError
from mindlora.ops import ascend
from mindlora.ops.backend import ASCEND_OP_TYPES, DTYPES, LIBRARY, OP_TYPES, choose

# CellWithBprop: a cell with its own gradient, in graph mode and in PyNative.


class CellWithBprop(nn.Cell):
    """Base of the cells with a bprop, which gets the inputs of construct, its output, and the output's gradient.

    In PyNative, MindSpore calls the bprop only below a function that it differentiates (value_and_grad and the
    like), and Tensor.backward() raises an error. Here both call it. They pass None as the output, which then need
    not be kept, unless the cell ``reads_output``, a tuple of tensors.
    """

    reads_output = False

    def _call_custom_bprop(self, *inputs: Tensor) -> Tensor:
        # MindSpore calls it instead of construct when PyNative records for a backward.
        return _Recorded.apply(self, *inputs)


class _Recorded(_Function):
    """The forward of a CellWithBprop in PyNative, and its bprop as the backward."""

    @staticmethod
    def forward(ctx: Any, cell: CellWithBprop, *inputs: Tensor) -> Union[Tensor, Tuple[Tensor, ...]]:
        ctx.cell = cell
        output = cell.construct(*inputs)
        ctx.inputs = len(inputs)
        ctx.save_for_backward(*inputs, *(output if cell.reads_output else ()))
        return output

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> Tuple[Optional[Tensor], ...]:
        inputs, output = ctx.saved_tensors[: ctx.inputs], ctx.saved_tensors[ctx.inputs :]
        if ctx.cell.reads_output:
            return None, *ctx.cell.bprop(*inputs, output, douts)
        return None, *ctx.cell.bprop(*inputs, None, *douts)


class OperatorCell(CellWithBprop):
    """Base of the cells that compute one operator.

    Attributes:
        op (str): The operator, one of mindlora.ops.backend.OPS.
        inputs (int): Number of tensors that its kernel takes.
        writes (bool): Whether its kernel writes into an input.
        choice (Choice): The path that was picked when the cell was built, and why.
        path (str): The name of that path: ascend, cpu or composed.
        kernel (ops.Custom or None): The primitive on that path; None on the composed one.

    Raises:
        BackendError: MINDLORA_BACKEND names a path that is unknown or not available, or the operator has no path here.
    """

    op: str
    inputs: int
    writes = False

    def __init__(self):
        super().__init__()
        self.choice = choose(self.op)
        self.path = self.choice.path
        if self.path == "none":
            raise BackendError(
                f"{self.op} cannot run here: {self.choice.reason}. Use it with device_target CPU and mindlora's "
                "library."
            )
        self.kernel = make_kernel(self.path, self.op, self.inputs, self.writes)


def make_kernel(path: str, op: str, inputs: int, writes: bool = False) -> Optional[ops.Custom]:
    """Returns the primitive of an operator on a path, or None on the composed one."""
    if path == "composed":
        return None
    if path == "ascend":
        return ascend.AscendKernel(ASCEND_OP_TYPES[op], LIBRARY, writes)
    return CpuKernel(OP_TYPES[op], inputs, writes)


class CpuKernel(ops.Custom):
    """A function of the CPU library, wrapped as a primitive; with several outputs, it returns a tuple.

    C++ infers shapes and types, and reg_info leaves the types open, which dynamic shapes need. If it
    ``writes`` into an input, MindSpore does not reorder it with reads of that input. ``bprop``, for cells without one,
    gets the inputs, the output, and the output's gradient.
    """

    def __init__(
        self, name: str, inputs: int, writes: bool = False, outputs: int = 1, bprop: Optional[Callable] = None
    ):
        self._arguments = (name, inputs, writes, outputs, bprop)
        info = CustomRegOp(f"mindlora_{name}_{inputs}")
        for i in range(inputs):
            info.input(i, f"input{i}")
        for i in range(outputs):
            info.output(i, f"output{i}")
        info.dtype_format(*[DataType.None_None] * (inputs + outputs)).target("CPU")
        super().__init__(f"{LIBRARY}:{name}", None, None, "aot", bprop, reg_info=info.get_op_info())
        if writes:
            self.add_prim_attr("side_effect_mem", True)

    def __deepcopy__(self, memo):
        # ops.Custom cannot be copied, but cells that hold one are copied.
        return type(self)(*self._arguments)


@constexpr
def check_dtypes(op: str, path: str, names: Sequence[str], dtypes: Sequence[mstype.Type]) -> None:
    """Raises BackendError unless all dtypes are equal and in DTYPES. Runs when a graph is compiled."""
    for name, dtype in zip(names, dtypes):
        if dtype not in DTYPES:
            raise BackendError(f"{op} ({path}): {name} is {dtype}: it must be Float32, Float16 or BFloat16.")
        if dtype != dtypes[0]:
            raise BackendError(
                f"{op} ({path}): {name} is {dtype} and {names[0]} is {dtypes[0]}: cast them to one dtype."
            )


@constexpr
def check_fixed_dtypes(
    op: str, path: str, names: Sequence[str], dtypes: Sequence[mstype.Type], needed: Sequence[mstype.Type]
) -> None:
    """Raises BackendError unless each dtype is the needed one. Runs when a graph is compiled."""
    for name, dtype, needed_dtype in zip(names, dtypes, needed):
        if dtype != needed_dtype:
            raise BackendError(f"{op} ({path}): {name} is {dtype}: it must be {needed_dtype}.")


def current_cell(kind: Type[OperatorCell]) -> OperatorCell:
    """Returns the cell that computes an operator's function on the currently picked path."""
    return _shared_cell(kind, choose(kind.op).path, ms.get_context("device_target"))


@functools.lru_cache(maxsize=None)
def _shared_cell(kind, _path, _device):
    """Returns one cell of a kind, shared by all callers on the same path and device."""
    return kind()


class Products(nn.Cell):
    """Products of 2-D tensors. On a CPU, results are always float32, because it has no bfloat16 MatMul or Mul."""

    def __init__(self):
        super().__init__()
        self.widen = ms.get_context("device_target") == "CPU"
        self.nn = ops.MatMul()
        self.nt = ops.MatMul(transpose_b=True)
        self.tn = ops.MatMul(transpose_a=True)

    def wide(self, x: Tensor) -> Tensor:
        """x in the dtype in which products are computed."""
        return ops.cast(x, mstype.float32) if self.widen else x

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        """x y."""
        return self.nn(self.wide(x), self.wide(y))

    def times_transposed(self, x: Tensor, y: Tensor) -> Tensor:
        """x y^T."""
        return self.nt(self.wide(x), self.wide(y))

    def transposed_times(self, x: Tensor, y: Tensor) -> Tensor:
        """x^T y."""
        return self.tn(self.wide(x), self.wide(y))

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        """x * scale, for a scale of one number."""
        return x * ops.reshape(ops.cast(scale, x.dtype), ())

    def sum_as(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y in the dtype of x."""
        return ops.cast(self.wide(x) + y, x.dtype)

    def bias_grad(self, dy: Tensor, bias: Tensor) -> Tensor:
        """The gradient of sum(dy * (y + bias)) with respect to bias [N], in its dtype; dy is [tokens, N]."""
        return ops.cast(self.wide(dy).sum(axis=0), bias.dtype)

    def low_rank_grad(
        self, dy: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of sum(dy * (((x A^T) * scale) B^T)) with respect to x, A, B and scale, in their dtypes.

        dy is [tokens, N], x [tokens, K], a [r, K], b [N, r], and scale one float32 number.
        """
        low = self.times_transposed(x, a)
        d_low = self.times(dy, b)
        d_scaled = self.scaled(d_low, scale)
        dx = self.times(d_scaled, a)
        da = self.transposed_times(d_scaled, x)
        db = self.transposed_times(dy, self.scaled(low, scale))
        dscale = ops.reshape(ops.cast(low * d_low, mstype.float32).sum(), scale.shape)
        return ops.cast(dx, x.dtype), ops.cast(da, a.dtype), ops.cast(db, b.dtype), dscale
