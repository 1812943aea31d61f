"""Many adapters in one batch: each row of a batch goes through an adapter of its own, in one operator.

Run it with ``python examples/many_adapters_in_one_batch.py``. It needs MindSpore and no NPU. The adapters live in the
slots of a pool; ``multi_lora_slot_write`` puts one there and ``multi_lora_delta`` adds them to the base's output.
"""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from mindlora import ops

TOKENS, IN, OUT, SLOTS, MAX_RANK = 8, 64, 48, 4, 8


def expected(y0: np.ndarray, x: np.ndarray, adapters: list, indices: list) -> np.ndarray:
    """Returns y0[t] + scale_i (x[t] A_i^T) B_i^T for each row t with i = indices[t]; y0[t] where i is negative."""
    y = y0.copy()
    for t, i in enumerate(indices):
        if i >= 0:
            a, b, scale = adapters[i]
            y[t] += scale * (x[t] @ a.T) @ b.T
    return y


def main() -> None:
    """Fills a pool with adapters of different ranks, runs one mixed batch and compares it with NumPy."""
    ms.set_context(device_target="CPU")
    rng = np.random.default_rng(0)

    # A is [rank, IN], B is [OUT, rank]; the ranks may differ up to MAX_RANK.
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    adapters = [(normal(rank, IN), normal(OUT, rank), 16 / rank) for rank in (2, 8, 4)]

    pool = Parameter(Tensor(np.zeros((SLOTS, MAX_RANK, IN + OUT), np.float32)), name="pool")
    ranks = Parameter(Tensor(np.zeros(SLOTS, np.int32)), name="ranks")
    scales = Parameter(Tensor(np.zeros(SLOTS, np.float32)), name="scales")
    for slot, (a, b, scale) in enumerate(adapters):
        packed = ops.pack_adapter(Tensor(a), Tensor(b))
        ops.multi_lora_slot_write(pool, ranks, scales, Tensor([slot], ms.int32), packed, scale)
    print(f"ranks in the pool: {ranks.asnumpy().tolist()}")

    x, y0 = normal(TOKENS, IN), normal(TOKENS, OUT)
    indices = [0, 1, 2, 1, -1, 0, 2, -1]  # the slot of each row; -1 is a row without an adapter
    y = ops.multi_lora_delta(Tensor(y0), Tensor(x), pool, ranks, scales, Tensor(indices, ms.int32)).asnumpy()
    print(f"path: {ops.MultiLoraDelta().choice.path}")
    reference = expected(y0, x, adapters, indices)
    print(f"largest difference from NumPy, relative: {np.abs(y - reference).max() / np.abs(reference).max():.1e}")
    print(f"rows without an adapter are unchanged: {bool((y[[4, 7]] == y0[[4, 7]]).all())}")


if __name__ == "__main__":
    main()
