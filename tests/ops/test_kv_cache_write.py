"""kv_cache_write against its reference: slots, dtypes, modes, dynamic shapes, errors that leave the cache as it was."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora.errors import BackendError
from mindlora.ops.kv_cache_write import KvCacheWrite
from tests.support.native import DTYPES, call, normal, refused_by_kernel, tensor, values

BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE = 5, 8, 3, 20
CACHE, WIDTH = (BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE), KV_HEADS * SIZE
SLOTS = np.int32([7, 39, -1, 0, 8, -5, 23])


def case(slots=SLOTS, dtype="float32"):
    """key, value, key_cache and value_cache."""
    rows = [normal(len(slots), WIDTH, seed=seed, dtype=dtype) for seed in (1, 2)]
    return [*rows, *[normal(*CACHE, seed=seed, dtype=dtype) for seed in (3, 4)]]


class Net(nn.Cell):
    def __init__(self, key_cache, value_cache, dtype="float32"):
        super().__init__()
        self.key_cache = Parameter(tensor(key_cache, dtype), name="key_cache")
        self.value_cache = Parameter(tensor(value_cache, dtype), name="value_cache")
        self.write = KvCacheWrite()

    def construct(self, key, value, slot_mapping):
        return self.write(key, value, self.key_cache, self.value_cache, slot_mapping)

    def assert_holds(self, key_cache, value_cache):
        np.testing.assert_array_equal(values(self.key_cache), key_cache)
        np.testing.assert_array_equal(values(self.value_cache), value_cache)


def native(inputs, slots, dtype="float32"):
    arrays = [*((array, dtype) for array in inputs), (slots, "int32")]
    return call("KvCacheWrite", arrays, (1,), "int32", in_place=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_is_the_reference(library, reference, dtype):
    # The last is enough for two threads; the one before it has two tokens for a slot.
    for slots in (SLOTS, SLOTS[:0], np.int32([-1]), np.int32([4, 9, 4]), np.arange(39, -1, -1, np.int32).repeat(20)):
        inputs = case(slots, dtype)
        expected = [array.copy() for array in inputs]
        count = reference.kv_cache_write(*expected, slots)
        *written, out = native(inputs, slots, dtype)
        for actual, wanted in zip(written, expected):
            np.testing.assert_array_equal(actual, wanted)
        assert out[0] == count


def test_of_two_tokens_with_one_slot_the_later_is_kept(library):
    key, value, *_ = inputs = case(np.int32([4, 9, 4]))
    _, _, key_cache, value_cache, _ = native(inputs, np.int32([4, 9, 4]))
    np.testing.assert_array_equal(key_cache.reshape(-1, WIDTH)[4], key[2])
    np.testing.assert_array_equal(value_cache.reshape(-1, WIDTH)[4], value[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cell_writes_its_parameters(mode, reference, library, dtype):
    key, value, *caches = case(dtype=dtype)
    net = Net(*caches, dtype)
    for shape, slots in (((7, WIDTH), SLOTS), ((1, 7, WIDTH), SLOTS[::-1].copy())):
        count = reference.kv_cache_write(key, value, *caches, slots)
        out = net(tensor(key.reshape(shape), dtype), tensor(value.reshape(shape), dtype), Tensor(slots))
        assert out.dtype == ms.int32 and out.asnumpy().tolist() == [count]
        net.assert_holds(*caches)


def test_dynamic_shapes(mode, reference, library):
    _, _, *caches = case()
    net = Net(*caches)
    rows = Tensor(shape=[1, None, WIDTH], dtype=ms.float32)
    net.set_inputs(rows, rows, Tensor(shape=[None], dtype=ms.int32))
    for count in (7, 1, 3):
        key, value = (normal(count, WIDTH, seed=seed) for seed in (count, 10 + count))
        reference.kv_cache_write(key, value, *caches, SLOTS[:count])
        net(Tensor(key[None]), Tensor(value[None]), Tensor(SLOTS[:count])).asnumpy()
        net.assert_holds(*caches)


def test_a_slot_after_the_end_is_refused_and_nothing_is_written(library, pynative_mode):
    key, value, *caches = case(np.int32([0, 40, 1]))
    net = Net(*caches)
    message = "mindlora kv_cache_write: slot_mapping has slot 40 for token 1: the cache has 40[.]"
    with refused_by_kernel(message):
        net(Tensor(key), Tensor(value), Tensor(np.int32([0, 40, 1]))).asnumpy()
    net.assert_holds(*caches)


@pytest.mark.parametrize(
    "key, value, slots, value_cache, message",
    [
        ((60,), (7, 60), (7,), CACHE, "key has 1 dimensions: it must have 2 or 3."),
        ((7, 60), (1, 1, 7, 60), (7,), CACHE, "value has 4 dimensions: it must have 2 or 3."),
        ((7, 60), (6, 60), (7,), CACHE, "the number of tokens is 7 in one input and 6 in another."),
        ((7, 60), (7, 60), (8,), CACHE, "the number of tokens is 7 in one input and 8 in another."),
        ((7, 60), (7, 60), (7, 1), CACHE, "slot_mapping has 2 dimensions: it must have 1."),
        ((7, 40), (7, 60), (7,), CACHE, "kv_heads * D is 40 in one input and 60 in another."),
        ((7, 60), (7, 61), (7,), CACHE, "kv_heads * D is 61 in one input and 60 in another."),
        ((7, 60), (7, 60), (7,), (5, 8, 60), "value_cache has 3 dimensions: it must have 4."),
        ((7, 60), (7, 60), (7,), (4, 8, 3, 20), "the number of blocks is 5 in one input and 4 in another."),
        ((7, 60), (7, 60), (7,), (5, 8, 20, 3), "kv_heads is 3 in one input and 20 in another."),
    ],
)
def test_refused_shapes(library, graph_mode, key, value, slots, value_cache, message):
    net = Net(np.zeros(CACHE), np.zeros(value_cache))
    key, value = Tensor(np.zeros(key, np.float32)), Tensor(np.zeros(value, np.float32))
    with pytest.raises(
        RuntimeError, match="mindlora kv_cache_write: " + message.replace(".", "[.]").replace("*", "[*]")
    ):
        net(key, value, Tensor(np.zeros(slots, np.int32))).asnumpy()


@pytest.mark.parametrize(
    "key, value, cache, slots, message",
    [
        ("int32", "int32", "float32", "int32", "key is Int32: it must be Float32, Float16 or BFloat16."),
        ("float32", "float16", "float32", "int32", "value is Float16 and key is Float32: cast them to one dtype."),
        ("float16", "float16", "float32", "int32", "key_cache is Float32 and key is Float16: cast them to one dtype."),
        ("float32", "float32", "float32", "int64", "slot_mapping is Int64: it must be Int32."),
    ],
)
def test_refused_dtypes(library, mode, key, value, cache, slots, message):
    rows, _, *caches = case()
    with pytest.raises(BackendError) as error:
        Net(*caches, cache)(tensor(rows, key), tensor(rows, value), tensor(SLOTS, slots))
    assert str(error.value) == f"kv_cache_write (cpu): {message}"
