"""multi_lora_slot_write: puts an adapter into a slot of the pool that multi_lora_delta reads."""

from typing import Union

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import constexpr

from mindlora.core.errors import BackendError
from mindlora.ops.operator_cell import OperatorCell, check_dtypes, current_cell

_NAMES = ("pool", "packed")


def pack_adapter(a: Tensor, b: Tensor) -> Tensor:
    """Returns A and B as one block, whose row j is A[j, :] followed by B[:, j]. Call it once per adapter.

    Args:
        a (Tensor): Shape [r, K].
        b (Tensor): Shape [N, r], dtype of a.

    Returns:
        Tensor [r, K + N] of the dtype of a.
    """
    return ops.concat((a, ops.transpose(b, (1, 0))), axis=1)


class MultiLoraSlotWrite(OperatorCell):
    r"""pool[slot, :r] = packed, ranks[slot] = r, scales[slot] = scale: one contiguous copy of r (K + N) numbers.

    Inputs:
        - **pool** (Parameter) - Shape [slots, max_rank, K + N]; float32, float16 or bfloat16. Written in place, as
          are ranks and scales: they must be Parameters.
        - **ranks** (Parameter) - Shape [slots], int32.
        - **scales** (Parameter) - Shape [slots], float32.
        - **slot** (Tensor) - Shape [1], int32. One beyond the pool is an error on the cpu path; on the ascend path,
          which cannot raise, nothing is written.
        - **packed** (Tensor) - Shape [r, K + N] with r up to max_rank, dtype of pool: see pack_adapter.
        - **scale** (Tensor) - One number, float32.

    Outputs:
        Tensor [1], int32: the slot that was written; -1 if none was.

    Raises:
        BackendError: MINDLORA_BACKEND names a path that is not available, or a dtype is not supported.
        RuntimeError: A shape or rank is wrong, or on the cpu path a slot (raised by MindSpore or by the kernel, which
            names it).

    Source: Sheng et al., S-LoRA: Serving Thousands of Concurrent LoRA Adapters, 2023.
    """

    op = "multi_lora_slot_write"
    inputs = 6
    writes = True

    def __init__(self):
        super().__init__()
        self.on_cpu = ms.get_context("device_target") == "CPU"
        self.update = ops.ScatterUpdate()

    def construct(
        self, pool: Parameter, ranks: Parameter, scales: Parameter, slot: Tensor, packed: Tensor, scale: Tensor
    ) -> Tensor:
        check_dtypes(self.op, self.path, _NAMES, (pool.dtype, packed.dtype))
        if self.path != "composed":
            return self.kernel(pool, ranks, scales, slot, packed, scale)
        if self.on_cpu:
            check_written_on_cpu(pool.dtype)
        rank = packed.shape[0]
        padding = ops.zeros((pool.shape[1] - rank, packed.shape[1]), packed.dtype)
        self.update(pool, slot, ops.expand_dims(ops.concat((packed, padding), axis=0), 0))
        self.update(ranks, slot, ops.full((1,), rank, dtype=mstype.int32))
        self.update(scales, slot, ops.reshape(scale, (1,)))
        return slot


@constexpr
def check_written_on_cpu(dtype: ms.dtype.Type) -> None:
    """Raises BackendError for a dtype that plain operators cannot write in place. Runs when a graph is compiled."""
    if dtype == ms.bfloat16:
        raise BackendError(
            "multi_lora_slot_write (composed): pool is BFloat16, which MindSpore's own operators cannot "
            "write in place on a CPU. Build the library (`python -m mindlora.ops.build`), or keep the "
            "pool in Float32 or Float16."
        )


@constexpr
def _cell():
    return current_cell(MultiLoraSlotWrite)


def multi_lora_slot_write(
    pool: Parameter, ranks: Parameter, scales: Parameter, slot: Tensor, packed: Tensor, scale: Union[float, Tensor]
) -> Tensor:
    r"""Calls MultiLoraSlotWrite: pool[slot, :r] = packed, ranks[slot] = r, scales[slot] = scale, in place.

    Args:
        pool, ranks, scales (Parameter): As the inputs of MultiLoraSlotWrite.
        slot, packed (Tensor): As the inputs of MultiLoraSlotWrite.
        scale (float or Tensor): One number.

    Returns:
        Tensor [1], int32: the slot that was written.
    """
    return _cell()(pool, ranks, scales, slot, packed, ops.cast(scale, mstype.float32))
