"""multi_lora_slot_write: what is tested of it, beside what a cell writes (tests/ops/test_multi_lora_slot_write.py)."""

import numpy as np

from mindlora.ops import MultiLoraSlotWrite
from tests.ops.contract import SCALE, Operator, normals

SLOTS, MAX_RANK, K, N = 4, 16, 7, 9


def inputs(dtype, rank):
    return {
        **normals(dtype, pool=(SLOTS, MAX_RANK, K + N)),
        "ranks": (np.int32([1, 2, 0, 16]), "int32"),
        "scales": (np.float32([1, 2, 3, 4]), "float32"),
        "slot": (np.int32([2]), "int32"),
        **normals(dtype, packed=(rank, K + N)),
        "scale": SCALE,
    }


def expected(reference, pool, ranks, scales, slot, packed, scale):
    reference.multi_lora_slot_write(pool, ranks, scales, slot[0], packed, scale[0])
    return slot


SLOT_WRITE = Operator(
    name="multi_lora_slot_write",
    inputs=inputs,
    expected=expected,
    terms=lambda rank: 1,
    result="int32",
    function="MultiLoraSlotWrite",
    sizes=((1,), (13,), (16,)),
    threaded=(13,),
    in_place=3,
    isas=("plain",),
    cell=MultiLoraSlotWrite,
    refused_size=(3,),
    alike=(("pool", "packed"),),
    unchecked=("ranks", "scales", "slot", "scale"),
    refused_shapes=(
        ({"packed": (17, K + N)}, "rank is 17: the pool takes 1 to 16."),
        ({"packed": (3, K + N - 1)}, "K + N is 16 in one input and 15 in another."),
    ),
    refused_values=(("slot", 0, SLOTS, "slot is 4: the pool has 4."), ("slot", 0, -1, "slot is -1: the pool has 4.")),
)
FORMS = (SLOT_WRITE,)
