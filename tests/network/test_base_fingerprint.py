"""The fingerprint of a base: equal for equal weights, different for others, whatever the adapters are."""

import mindspore as ms
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora
from mindlora.files.adapters.fingerprint import base_difference
from mindlora.network.base_fingerprint import base_fingerprint
from tests.support.networks import TinyModel, adapters, randomize

VALUES = "the adapted weights have other values (another checkpoint, or another dtype)"
SHAPES = "the adapted weights have other paths or shapes"


def network(seed=1, num_layers=2, target_modules="all-linear", **fields):
    result = TinyModel(num_layers)
    randomize(result.get_parameters(), seed)
    apply_lora(result, LoraConfig(lora_rank=2, target_modules=target_modules, **fields))
    return result


def test_a_fingerprint_is_a_dtype_and_four_short_hashes():
    mark = base_fingerprint(network())
    assert mark.pop("dtype") == "float32"
    assert sorted(mark) == ["bfloat16", "float16", "shapes", "values"]
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in mark.values())


def test_the_same_base_has_the_same_fingerprint_whatever_the_adapter_is():
    first, second = network(), network(lora_b_init="ones", lora_alpha=4, param_init_type="float16")
    randomize(adapters(first).values())
    assert base_fingerprint(first) == base_fingerprint(second)
    assert base_difference(base_fingerprint(first), base_fingerprint(second)) == ""


@pytest.mark.parametrize(
    "change, difference", [({"seed": 2}, VALUES), ({"num_layers": 3}, SHAPES), ({"target_modules": ["wq"]}, SHAPES)]
)
def test_another_base_has_another_fingerprint(change, difference):
    assert base_difference(base_fingerprint(network()), base_fingerprint(network(**change))) == difference


def test_the_same_shape_at_another_path_is_another():
    first, second = (base_fingerprint(network(target_modules=[leaf])) for leaf in ("wk", "wv"))
    assert base_difference(first, second) == SHAPES


def in_dtype(dtype, seed=0):
    cell = nn.SequentialCell(nn.Dense(5, 4, has_bias=False, dtype=dtype))
    randomize(cell.get_parameters(), seed)
    apply_lora(cell, LoraConfig(target_modules="all-linear"))
    return base_fingerprint(cell)


@pytest.mark.parametrize("narrow", [ms.float16, ms.bfloat16])
def test_a_base_and_its_copy_in_another_dtype_are_one(narrow):
    wide, copy = in_dtype(ms.float32), in_dtype(narrow)
    assert wide["values"] != copy["values"]
    assert base_difference(wide, copy) == base_difference(copy, wide) == ""
    assert base_difference(wide, in_dtype(narrow, seed=1)) == VALUES


def test_two_copies_that_were_rounded_in_two_ways_are_told_apart():
    assert base_difference(in_dtype(ms.float16), in_dtype(ms.bfloat16)) == VALUES


def test_in_one_dtype_a_change_that_rounding_would_hide_counts():
    cell = nn.SequentialCell(nn.Dense(5, 4, has_bias=False))
    randomize(cell.get_parameters())
    apply_lora(cell, LoraConfig(target_modules="all-linear"))
    before = base_fingerprint(cell)
    cell[0].weight.set_data(Tensor(cell[0].weight.asnumpy() * (1 + 2**-22)))
    after = base_fingerprint(cell)
    assert before["bfloat16"] == after["bfloat16"]
    assert base_difference(before, after) == VALUES


def test_an_adapter_of_an_earlier_version_has_two_hashes_alone():
    wide, copy = in_dtype(ms.float32), in_dtype(ms.float16)
    earlier = {name: wide[name] for name in ("shapes", "values")}
    assert base_difference(earlier, wide) == "" and base_difference(earlier, copy) == VALUES


@pytest.mark.parametrize("shape", [(4, 3), (32, 32), (1024, 8), (1, 1)])
def test_weights_of_every_size_are_read_at_both_ends(shape):
    cell = nn.SequentialCell(nn.Dense(shape[1], shape[0], has_bias=False))
    apply_lora(cell, LoraConfig(target_modules="all-linear"))
    before = base_fingerprint(cell)
    for index in (0, -1):
        values = cell[0].weight.asnumpy().copy()
        values.reshape(-1)[index] += 1
        cell[0].weight.set_data(Tensor(values))
        after = base_fingerprint(cell)
        assert base_difference(before, after) == VALUES
        before = after


def test_the_first_and_the_last_of_many_cells_are_read():
    many = network(num_layers=4)
    before = base_fingerprint(many)
    for cell in (many.model.layers[0].attention.wk, many.model.layers[3].feed_forward.w3):
        randomize([cell.weight], seed=7)
        after = base_fingerprint(many)
        assert base_difference(before, after) == VALUES
        before = after


def test_a_base_without_values_has_no_fingerprint(semi_auto_parallel):
    # In semi-automatic parallel, MindSpore delays initialization until the network is compiled.
    cell = nn.SequentialCell(nn.Dense(5, 4))
    apply_lora(cell, LoraConfig(target_modules="all-linear"))
    assert cell[0].weight.has_init
    assert base_fingerprint(cell) is None


def test_no_more_than_a_few_weights_are_read(monkeypatch):
    many = network(num_layers=4)
    read = []
    original = ms.Parameter.asnumpy
    monkeypatch.setattr(ms.Parameter, "asnumpy", lambda self: read.append(self.name) or original(self), raising=False)
    base_fingerprint(many)
    assert len(read) == 8 and len(set(read)) == 8
