"""Cells in place of operators of a MindFormers network that are many, keep much, or have large tables, on a CPU."""

import mindspore as ms
from mindformers.core.loss.loss import CrossEntropyLoss, _NLLLoss
from mindformers.models.llama.llama_layer import LlamaSiLU
from mindspore import Tensor, nn, ops

from mindlora.network.cells.broadcasting import BroadcastAdd, BroadcastMul, BroadcastSub, Softmax, SwapHeads
from mindlora.training.log import logger
from mindlora.training.model.cpu_llama import fuse, fused_problem


class CpuNLLLoss(_NLLLoss):
    """MindFormers' _NLLLoss, whose gradient broadcasts without a table."""

    def bprop(self, log_softmax_result, one_hot_label, out, dout):
        logits = ops.exp(log_softmax_result) - one_hot_label
        return logits * ops.broadcast_to(ops.expand_dims(dout, -1), logits.shape), ops.zeros_like(one_hot_label)


class CpuSiLU(nn.Cell):
    """y = x sigmoid(x), dx = dy (s + y - y s) with s = sigmoid(x), which is computed in the backward alone.

    MindSpore's gradient needs nothing but x for s, so it computes it in the forward, and keeps it from there on.

    Args:
        silu (ops.Primitive): MindSpore's operator for the forward.
    """

    def __init__(self, silu: ops.Primitive):
        super().__init__()
        self.silu = silu

    def construct(self, x: Tensor) -> Tensor:
        return self.silu(x)

    def bprop(self, x, out, dout):
        sigmoid = ops.sigmoid(ops.depend(x, dout))
        return (dout * (sigmoid + out - out * sigmoid),)


def use_cpu_cells(network: nn.Cell) -> None:
    """Replaces operators of a legacy MindFormers network, in place, where it trains on a CPU in graph mode.

    What the network computes stays the same, up to the order of sums. A Llama gets mindlora's fused operators, if their
    library is there; what has none gets operators without tables (mindlora.network.cells.broadcasting).
    """
    if ms.get_context("device_target") != "CPU" or ms.get_context("mode") != ms.GRAPH_MODE:
        return
    problem = fused_problem()
    if problem:
        logger.warning(
            "Norms and attention will take more memory and time than they need: %s. Build the library of the CPU "
            "operators with `python -m mindlora.ops.build`.",
            problem,
        )
    for _, cell in list(network.cells_and_names()):
        if isinstance(cell, LlamaSiLU):
            cell.silu = CpuSiLU(cell.silu)
        elif problem or not fuse(cell):
            _avoid_tables(cell)


def _avoid_tables(cell):
    if getattr(cell, "self_define", False) and hasattr(cell, "rms_norm"):
        cell.mul, cell.mul2 = BroadcastMul(), BroadcastMul()
    elif hasattr(cell, "apply_rotary_emb") and not cell.use_flash_attention:
        cell.transpose, cell.merger_head_transpose = SwapHeads(), SwapHeads()
        cell.add, cell.softmax = BroadcastAdd(), Softmax()
        rotary = cell.apply_rotary_emb
        rotary.mul, rotary.mul_inc, rotary.mul_with_batch_freqs = BroadcastMul(), BroadcastMul(), BroadcastMul()
    elif isinstance(cell, CrossEntropyLoss):
        cell._log_softmax.sub = BroadcastSub()
        cell._nllloss = CpuNLLLoss()
