"""kv_cache_write: keys and values of new tokens into the blocks of a cache, for serving on a CPU."""

import mindspore as ms
from mindspore import Parameter, Tensor

from mindlora.ops.operator_cell import OperatorCell, check_dtypes, check_fixed_dtypes

_NAMES = ("key", "value", "key_cache", "value_cache")


class KvCacheWrite(OperatorCell):
    r"""key_cache.reshape(-1, kv_heads * D)[slot_mapping[t]] = key[t], and the same for values, in place.

    This is MindSpore's ReshapeAndCache, which has no kernel for a CPU. A token with a negative slot is not written; of
    two tokens with one slot, the later is kept. A wrong slot is an error, and then nothing is written.

    Inputs:
        - **key** (Tensor) - Shape [T, kv_heads * D] or [1, T, kv_heads * D]; float32, float16 or bfloat16.
        - **value** (Tensor) - The same.
        - **key_cache** (Parameter) - Shape [blocks, block_size, kv_heads, D], dtype of key. Written in place, as is
          value_cache: they must be Parameters.
        - **value_cache** (Parameter) - The same.
        - **slot_mapping** (Tensor) - Shape [T], int32: block * block_size + place in the block.

    Outputs:
        Tensor [1], int32: how many tokens were written.

    Raises:
        BackendError: The device is not a CPU, the library is not built, or a dtype is not supported.
        RuntimeError: A shape or a slot is wrong (raised by the kernel, which names it).

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
    """

    op = "kv_cache_write"
    inputs = 5
    writes = True

    def construct(
        self, key: Tensor, value: Tensor, key_cache: Parameter, value_cache: Parameter, slot_mapping: Tensor
    ) -> Tensor:
        check_dtypes(self.op, self.path, _NAMES, (key.dtype, value.dtype, key_cache.dtype, value_cache.dtype))
        check_fixed_dtypes(self.op, self.path, ("slot_mapping",), (slot_mapping.dtype,), (ms.int32,))
        return self.kernel(key, value, key_cache, value_cache, slot_mapping)
