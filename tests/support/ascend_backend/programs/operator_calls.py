"""What operators refuse, and calls of one operator again with other memory: operator_calls.py graph|pynative.

Prints a line of JSON for each refusal, its name and the message, or null where the call was accepted; then one for each
further check, its name and whether it held.
"""

import contextlib
import json
import os
import sys

os.environ["MINDLORA_BACKEND"] = "ascend"

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from mindlora.ops import LoraDelta, MultiLoraDelta, MultiLoraSlotWrite, Nf4Linear, quantize

ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE)
RNG = np.random.default_rng(0)
ONE = Tensor(np.float32(1))
TOKENS, K, N, RANK, SLOTS = 2, 64, 48, 8, 3


def drawn(*shape, dtype=ms.float32):
    return Tensor(RNG.normal(size=shape).astype(np.float32), dtype)


def whole(*numbers):
    return Tensor(np.int32(numbers))


def pair(rank=RANK, **kinds):
    """y0, x, A and B of lora_delta, and its scale."""
    shapes = {"y0": (TOKENS, N), "x": (TOKENS, K), "a": (rank, K), "b": (N, rank)}
    return [*(drawn(*shape, dtype=kinds.get(name, ms.float32)) for name, shape in shapes.items()), ONE]


def pooled(indices, rows=TOKENS):
    """The inputs of multi_lora_delta with a pool of three slots."""
    pool = drawn(SLOTS, RANK, K + N)
    ranks, scales = whole(*[RANK] * SLOTS), Tensor(np.ones(SLOTS, np.float32))
    return [drawn(rows, N), drawn(rows, K), pool, ranks, scales, whole(*indices)]


def refusal(call):
    """The first line of what a call raises, or None."""
    try:
        call()
    except Exception as error:
        # MindSpore 2.10 raises it once more in PyNative, for the operator that waits for the refused one.
        with contextlib.suppress(Exception):
            ms.runtime.synchronize()
        return str(error).strip().splitlines()[0]
    return None


delta, multi, write, linear = LoraDelta(), MultiLoraDelta(), MultiLoraSlotWrite(), Nf4Linear()
y0, x, a, b, scale = pair()
weight = quantize(RNG.normal(size=(N, K)).astype(np.float32))
codes, *statistics = map(Tensor, (weight.codes, weight.absmax, weight.scales, weight.offsets))
REFUSED = {
    "A and B exchanged": lambda: delta(y0, x, b, a, scale).asnumpy(),
    "another width of x": lambda: delta(y0, drawn(TOKENS, K + 1), a, b, scale).asnumpy(),
    "float64": lambda: delta(*(Tensor(each.asnumpy(), ms.float64) for each in (y0, x, a, b)), scale).asnumpy(),
    "mixed dtypes": lambda: delta(*pair(y0=ms.float16)).asnumpy(),
    "rank 257": lambda: delta(*pair(rank=257)).asnumpy(),
    "fewer indices than tokens": lambda: multi(*pooled([0])).asnumpy(),
    "indices of another dtype": lambda: multi(*pooled([0, 1])[:5], Tensor(np.int64([0, 1]))).asnumpy(),
    "codes of another width": lambda: linear(x, codes[:, :16], *statistics).asnumpy(),
}
for name, call in REFUSED.items():
    print("@refused", json.dumps([name, refusal(call)]), flush=True)


def held(name, found, wanted):
    right = bool(np.array_equal(np.isnan(found), np.isnan(wanted)))
    right = right and np.allclose(np.nan_to_num(found), np.nan_to_num(wanted), rtol=1e-4, atol=1e-4)
    print("@held", json.dumps([name, right]), flush=True)


def adapted(y0, x, pool, ranks, scales, indices):
    """multi_lora_delta in NumPy, NaN where a slot is not in the pool."""
    y = y0.copy()
    for row, index in enumerate(indices[: len(y)]):
        if index >= len(pool):
            y[row] = np.nan
        elif index >= 0:
            low_a, low_b = np.split(pool[index, : ranks[index]], [x.shape[1]], axis=1)
            y[row] += (x[row] @ low_a.T) * scales[index] @ low_b
    return y


def multi_held(name, inputs):
    held(name, multi(*inputs).asnumpy(), adapted(*(each.asnumpy() for each in inputs)))


multi_held("a slot beyond the pool is a row of NaN", pooled([0, 7, -1, 2], rows=4))
multi_held("indices after the tokens are not looked at", pooled([2, 1, 7, 7, 7, 7, 7]))
# Each call has tensors of its own, with which MindSpore launches the executor of the first again.
kept = []
for number in range(3):
    kept.append(pooled([number, 2 - number]))
    multi_held(f"call {number + 1} with other memory", kept[-1])
for tokens in (1, 5, 3, 5):
    multi_held(f"{tokens} tokens", pooled([0] * tokens, rows=tokens))

pool = Parameter(Tensor(np.zeros((SLOTS, RANK, K + N), np.float32)), name="pool")
ranks = Parameter(whole(0, 0, 0), name="ranks")
scales = Parameter(Tensor(np.zeros(SLOTS, np.float32)), name="scales")
wanted = np.zeros(pool.shape, np.float32)
for slot, rank in ((2, RANK), (0, 1), (2, 3)):
    packed = drawn(rank, K + N)
    write(pool, ranks, scales, whole(slot), packed, Tensor(np.float32(rank)))
    wanted[slot, :rank] = packed.asnumpy()
held("adapters are written where the pool is, the second over the first", pool.asnumpy(), wanted)
held("with their ranks", ranks.asnumpy().astype(np.float32), np.float32([1, 0, 3]))
held("and scales", scales.asnumpy(), np.float32([1, 0, 3]))
