"""The functions of the CPU library, called in a process of its own: what they refuse, threads, every float16."""

import re

import numpy as np
import pytest

from mindlora.ops import backend
from tests.support.native import call, guarded
from tests.support.operator_cases import cases
from tests.support.operator_process import EMULATOR, OperatorProcess

CASES = cases()


@pytest.fixture(scope="module")
def processes(library):
    """By number of threads."""
    found = {threads: OperatorProcess(OMP_NUM_THREADS=str(threads)) for threads in (1, 2)}
    yield found
    for process in found.values():
        process.close()


def run(process, name, tensors):
    """Returns the answer and the tensors after the call."""
    stored = [(*guarded(array, dtype), dtype) for array, dtype in tensors]
    return process.call(name, stored), [inner for _, inner, _ in stored]


def test_every_operator_is_called_here():
    assert set(backend.OP_TYPES.values()) == {re.sub("(Weight)?Grad|Like", "", name) for name in CASES}


def test_version_instruction_set_and_threads(processes, library):
    for threads, process in processes.items():
        assert process.mindlora_library_version() == backend._LIBRARY_VERSION
        assert process.mindlora_set_isa(-1) == (0 if EMULATOR else library.mindlora_set_isa(-1))
        assert process.omp_get_max_threads() == threads


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_number_of_threads(processes, name):
    answers, results = zip(*(run(processes[threads], name, CASES[name]) for threads in (1, 2)))
    assert answers[0] == answers[1] and answers[0].code == "code 0"
    assert answers[0].shape == " ".join(map(str, ("shape", *CASES[name][-1][0].shape)))
    assert CASES[name][int(answers[0].type.split()[1])][1] == CASES[name][-1][1]
    for one, two in zip(*results):
        assert one.tobytes() == two.tobytes()
    assert np.isfinite(results[0][-1]).all()


# (function, number of the input, its shape, message)
SHAPES = [
    ("LoraDelta", 1, (39, 37), "lora_delta: the number of tokens is 40 in one input and 39 in another."),
    ("LoraDelta", 3, (53, 6), "lora_delta: the rank is 5 in one input and 6 in another."),
    ("LoraDropout", 0, (9, 13, 10), "lora_dropout: x has 3 dimensions: it must have 2."),
    ("LoraLinear", 1, (260, 255), "lora_linear: K is 256 in one input and 255 in another."),
    ("LoraLinear", 2, (257, 256), "lora_linear: the rank is 257 in one input and 5 in another."),
    ("MaskedAttention", 1, (2, 70, 4, 40), "masked_attention: the number of heads is 4 in one input and 2 in another."),
    (
        "MaskedAttention",
        3,
        (2, 1, 70, 69),
        "masked_attention: the number of tokens is 70 in one input and 69 in another.",
    ),
    ("MaskedAttentionGrad", 0, (2, 70, 5, 40), "masked_attention: the shape of y is 5 in one input and 6 in another."),
    ("MultiLoraDelta", 2, (7, 64, 89), "multi_lora_delta: K + N is 90 in one input and 89 in another."),
    ("MultiLoraLinear", 3, (6,), "multi_lora_linear: the number of slots is 7 in one input and 6 in another."),
    ("MultiLoraSlotWrite", 4, (65, 90), "multi_lora_slot_write: rank is 65: the pool takes 1 to 64."),
    ("Nf4Linear", 1, (299, 96), "nf4_linear: N is 299 in one input and 300 in another."),
    ("Nf4LinearGrad", 0, (9, 299), "nf4_linear: N is 299 in one input and 300 in another."),
    ("Nf4LinearGradLike", 5, (9, 300), "nf4_linear: the number of blocks of a row is 5 in one input and 3 in another."),
    ("RmsNorm", 1, (511,), "rms_norm: H is 512 in one input and 511 in another."),
    ("RmsNormGrad", 0, (299, 512), "rms_norm: the number of rows is 299 in one input and 300 in another."),
    ("RotaryEmbedding", 2, (300, 32), "rotary_embedding: D is 64 in one input and 32 in another."),
    ("PagedAttention", 8, (2,), "paged_attention: the number of sequences is 3 in one input and 2 in another."),
]
# (function, number of the input, its numbers or their dtype, message)
CONTENTS = [
    ("LoraDelta", 2, "float16", "lora_delta: A is float16: it must be float32."),
    ("LoraDropout", 2, [1.0], "lora_dropout: rate is 1.000000: it must be in [0, 1)."),
    ("LoraLinear", 5, "bfloat16", "lora_linear: bias is bfloat16: it must be float32."),
    ("MaskedAttentionGrad", 4, "float16", "masked_attention: mask is float16: it must be float32."),
    ("MultiLoraDelta", 5, [7] * 9, "multi_lora_delta: row 0 asks for slot 7 of 7."),
    ("MultiLoraLinear", 3, [65] * 7, "multi_lora_linear: rank 65 of slot {} is not 0 to 64."),
    ("MultiLoraSlotWrite", 3, [7], "multi_lora_slot_write: slot is 7: the pool has 7."),
    ("Nf4Linear", 1, "int32", "nf4_linear: codes is int32: it must be uint8."),
    ("Nf4LinearGrad", 3, "float16", "nf4_linear: scales is float16: it must be float32."),
    ("RmsNorm", 0, "int32", "rms_norm: weight is float32: it must be int32."),
    ("RmsNormWeightGrad", 1, "float16", "rms_norm: x is float16: it must be float32."),
    ("RotaryEmbedding", 0, "int32", "rotary_embedding: dtype is int32: it must be float32, float16 or bfloat16."),
    ("PagedAttention", 9, [70, 1, 47], "paged_attention: query_lengths sum to 118: query has 119 tokens."),
]


def refused(process, name, at, array, dtype):
    """Calls an operator with another input, and returns the answer; nothing is written to any tensor."""
    tensors = list(CASES[name])
    tensors[at] = (array, dtype)
    answer, after = run(process, name, tensors)
    for (before, dtype), stored in zip(tensors, after):
        assert stored.tobytes() == guarded(before, dtype)[1].tobytes()
    return answer


@pytest.mark.parametrize("name, at, shape, message", SHAPES)
def test_a_wrong_shape_is_refused_when_the_network_is_compiled_and_when_it_runs(processes, name, at, shape, message):
    dtype = CASES[name][at][1]
    answer = refused(processes[1], name, at, np.zeros(shape, dtype), dtype)
    assert answer.shape == answer.code == f"refused mindlora {message}"


@pytest.mark.parametrize("name, at, content, message", CONTENTS)
def test_wrong_dtypes_and_numbers_are_refused(processes, name, at, content, message):
    array, dtype = CASES[name][at]
    if isinstance(content, str):
        dtype = content
    else:
        array = np.array(content, dtype)
    answer = refused(processes[2], name, at, array, dtype)
    slot = CASES["MultiLoraLinear"][5][0][0]
    assert answer.code == f"refused mindlora {message.format(slot)}" and answer.shape.startswith("shape ")


@pytest.mark.parametrize("scale", [0.0, 0.25, 0.5, 0.75, -0.5])
def test_every_float16_is_read_and_rounded_to_nearest_ties_to_even(isa, scale):
    # One row for each sign and exponent; the delta is a part of the step between its numbers.
    numbers = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(64, 1024)
    steps = np.float32([[2.0 ** (max(exponent, 1) - 25)] for _ in "+-" for exponent in range(32)])
    steps[[31, 63]] = 0  # infinity and NaN
    one = np.ones((1024, 1), np.float32)
    inputs = [(numbers, "float16"), (steps, "float16"), (one[:1], "float16"), (one, "float16")]
    y = call("LoraDelta", [*inputs, (np.float32(scale), "float32")], numbers.shape, "float16")
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = (numbers.astype(np.float32) + np.float32(scale) * steps).astype(np.float16)
    np.testing.assert_array_equal(y, wanted.astype(np.float32))
