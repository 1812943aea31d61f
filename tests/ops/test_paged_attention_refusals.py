"""What paged_attention does not accept, and the words in which it says so."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora.core.errors import BackendError
from mindlora.ops.paged_attention import PagedAttention
from tests.support.attention_batches import NAMES, Sequences
from tests.support.native import refused_by_kernel


class Net(nn.Cell):
    def __init__(self, key_cache, value_cache):
        super().__init__()
        self.key_cache = Parameter(key_cache, name="key_cache")
        self.value_cache = Parameter(value_cache, name="value_cache")
        self.attend = PagedAttention()

    def construct(self, query, key, value, cos, sin, tables, contexts, queries):
        return self.attend(query, key, value, cos, sin, self.key_cache, self.value_cache, tables, contexts, queries)


def attend(inputs):
    """Returns the net that was called, and its output."""
    tensors = [array if isinstance(array, Tensor) else Tensor(array) for array in inputs.values()]
    net = Net(*tensors[5:7])
    return net, net(*tensors[:5], *tensors[7:])


def case():
    """Two sequences of 12 and 20 tokens in 7 blocks of 8, of which this step has 12 and 1."""
    return dict(zip(NAMES, Sequences([12, 20], 2, 2, 16).batch([(0, 0, 12), (1, 19, 20)], 8)))


def refused(inputs):
    """Returns the kernel's message."""
    with refused_by_kernel() as error:
        attend(inputs)[1].asnumpy()
    return str(error.value).partition("mindlora paged_attention: ")[2].splitlines()[0]


@pytest.mark.parametrize(
    "name, at, value, message",
    [
        ("context_lengths", 1, 33, "context_lengths has 33 for sequence 1: block_tables has room for 32."),
        (
            "context_lengths",
            0,
            11,
            "context_lengths has 11 for sequence 0, which has 12 tokens in this step: they are part of the context.",
        ),
        ("query_lengths", 0, -1, "query_lengths has -1 for sequence 0: it must be 0 or more."),
        ("query_lengths", 0, 11, "query_lengths sum to 12: query has 13 tokens."),
        ("query_lengths", 1, 3, "query_lengths sum to 15: query has 13 tokens."),
        ("block_tables", (1, 2), 7, "block_tables has block 7 at 2 for sequence 1: the cache has 7."),
        ("block_tables", (0, 1), -1, "block_tables has block -1 at 1 for sequence 0: the cache has 7."),
    ],
)
def test_wrong_lengths_and_blocks(library, pynative_mode, name, at, value, message):
    inputs = case()
    inputs[name][at] = value
    assert refused(inputs) == message


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("query", (64,), "query has 1 dimensions: it must have 2 or 3."),
        ("query", (13, 72), "query has 72 numbers a token: it must be a multiple of kv_heads * D = 2 * 16."),
        ("query", (13, 0), "query has 0 numbers a token: it must be a multiple of kv_heads * D = 2 * 16."),
        ("key", (1, 1, 13, 32), "key has 4 dimensions: it must have 2 or 3."),
        ("key", (12, 32), "the number of tokens is 13 in one input and 12 in another."),
        ("key", (13, 16), "kv_heads * D is 16 in one input and 32 in another."),
        ("value", (14, 32), "the number of tokens is 13 in one input and 14 in another."),
        ("value", (13, 64), "kv_heads * D is 64 in one input and 32 in another."),
        ("cos", (13,), "cos has 1 dimensions: it must have 2."),
        ("cos", (12, 16), "the number of tokens is 13 in one input and 12 in another."),
        ("sin", (13, 8), "D is 8 in one input and 16 in another."),
        ("key_cache", (7, 8, 32), "key_cache has 3 dimensions: it must have 4."),
        ("value_cache", (7, 4, 2, 16), "block_size is 8 in one input and 4 in another."),
        ("value_cache", (7, 8, 2, 8), "D is 16 in one input and 8 in another."),
        ("block_tables", (8,), "block_tables has 1 dimensions: it must have 2."),
        ("block_tables", (3, 4), "the number of sequences is 3 in one input and 2 in another."),
        ("context_lengths", (2, 1), "context_lengths has 2 dimensions: it must have 1."),
        ("query_lengths", (3,), "the number of sequences is 2 in one input and 3 in another."),
    ],
)
def test_wrong_shapes(library, graph_mode, name, shape, message):
    inputs = case()
    inputs[name] = np.zeros(shape, inputs[name].dtype)
    assert refused(inputs) == message


def test_a_head_of_an_odd_size(library, graph_mode):
    inputs = dict(zip(NAMES, Sequences([12], 2, 2, 15).batch([(0, 0, 12)], 8)))
    assert refused(inputs) == "D is 15 in key_cache: it must be even and at least 2."


@pytest.mark.parametrize(
    "name, dtype, message",
    [
        ("query", ms.int32, "query is Int32: it must be Float32, Float16 or BFloat16."),
        ("key", ms.float16, "key is Float16 and query is Float32: cast them to one dtype."),
        ("sin", ms.float16, "sin is Float16 and cos is Float32: cast them to one dtype."),
        ("key_cache", ms.float16, "key_cache is Float16 and query is Float32: cast them to one dtype."),
        ("value_cache", ms.bfloat16, "value_cache is BFloat16 and query is Float32: cast them to one dtype."),
        ("block_tables", ms.int64, "block_tables is Int64: it must be Int32."),
        ("context_lengths", ms.int64, "context_lengths is Int64: it must be Int32."),
        ("query_lengths", ms.float32, "query_lengths is Float32: it must be Int32."),
    ],
)
def test_wrong_dtypes(library, mode, name, dtype, message):
    inputs = {key: Tensor(array) for key, array in case().items()}
    inputs[name] = inputs[name].astype(dtype)
    with pytest.raises(BackendError) as error:
        attend(inputs)
    assert str(error.value) == f"paged_attention (cpu): {message}"
