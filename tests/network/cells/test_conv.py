"""LoRAConv2d against MindSpore's convolution with W + scale B A: values, files and merging."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora import LoraConfig, apply_lora, combine_adapters, freeze_base, inspect_adapter, load_lora, save_lora
from mindlora.core.errors import AdapterError, ShapeMismatchError, TargetError, UnsupportedCellError
from mindlora.files.adapters import files as adapter_files
from mindlora.files.base.merge import merge_checkpoint
from mindlora.network.cells.conv import LoRAConv2d
from mindlora.network.merge import merge_and_unload, merge_lora, unmerge_lora
from mindlora.network.tree import lora_cells
from tests.support.networks import WeightedSum, as_array, assert_close, normal, randomize, snapshot

IN, OUT, RANK, ALPHA = 4, 6, 2, 3
SCALE = ALPHA / RANK
CONFIG = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA)
KINDS = {
    "same": {},
    "strided": {"pad_mode": "valid", "stride": 2},
    "padded": {"pad_mode": "pad", "padding": 1, "has_bias": True},
    "uneven": {"pad_mode": "pad", "padding": (0, 1, 2, 0), "stride": (1, 2)},
}


def conv(size=3, **keys):
    cell = nn.Conv2d(IN, OUT, size, **keys)
    randomize(cell.get_parameters(), seed=1)
    return cell


def adapted(cell, config=CONFIG):
    lora = LoRAConv2d.from_cell(cell, config)
    randomize(lora.lora_parameters(), seed=2)
    return lora


def changed(lora):
    """W + scale B A."""
    a, b = map(as_array, lora.lora_parameters())
    return as_array(lora.weight) + lora.scale * np.einsum("or,rihw->oihw", b[:, :, 0, 0], a)


def plain(kind, weight, lora, size=3):
    """A convolution with another weight."""
    cell = nn.Conv2d(IN, OUT, size, **kind)
    cell.weight.set_data(Tensor(weight.astype(np.float32)))
    if lora.has_bias:
        cell.bias.set_data(lora.bias.value())
    return cell


@pytest.mark.parametrize("size", [3, 1, (3, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_cell_is_the_plain_one_and_a_trained_one_is_one_convolution(mode, kind, size):
    cell, x = conv(size, **KINDS[kind]), Tensor(normal(2, IN, 7, 6))
    lora = LoRAConv2d.from_cell(cell, CONFIG)
    np.testing.assert_array_equal(lora(x).asnumpy(), cell(x).asnumpy())
    randomize(lora.lora_parameters(), seed=2)
    assert_close(lora(x), plain(KINDS[kind], changed(lora), lora, size)(x).asnumpy().astype(np.float64))


def test_gradients(mode):
    lora, x = adapted(conv(has_bias=True)), normal(2, IN, 5, 5)
    weights = normal(2, OUT, 5, 5, seed=4)
    of_x, (of_a, of_b) = ms.grad(WeightedSum(lora), 0, lora.lora_parameters())(Tensor(x), Tensor(weights))
    whole = plain({"has_bias": True}, changed(lora), lora)
    expected, (of_weight, _) = ms.grad(WeightedSum(whole), 0, [whole.weight, whole.bias])(Tensor(x), Tensor(weights))
    a, b = map(as_array, lora.lora_parameters())
    assert_close(of_x, as_array(expected))
    assert_close(of_a, SCALE * np.einsum("or,oihw->rihw", b[:, :, 0, 0], as_array(of_weight)))
    assert_close(of_b, SCALE * np.einsum("rihw,oihw->or", a, as_array(of_weight))[:, :, None, None])


def test_groups(mode):
    """A reads all channels, and each group of B reads its share of the rank."""
    lora, x = adapted(conv(group=2), LoraConfig(lora_rank=4, lora_alpha=4)), Tensor(normal(2, IN, 5, 5))
    a, b = lora.lora_parameters()
    assert a.shape == (4, IN, 3, 3) and b.shape == (OUT, 2, 1, 1)
    halves = ops.Conv2D(4, 3, pad_mode="same")(x, a).asnumpy()
    update = np.concatenate(
        [
            np.einsum("or,nrhw->nohw", as_array(b)[out, :, 0, 0], halves[:, ranks])
            for out, ranks in ((slice(0, 3), slice(0, 2)), (slice(3, 6), slice(2, 4)))
        ],
        axis=1,
    )
    base = lora.base.conv2d(x, lora.weight).asnumpy()
    assert_close(lora(x), base + update)


def test_dropout():
    ms.set_seed(1)
    lora = adapted(conv(), LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, lora_dropout=0.5))
    x = normal(1, IN, 5, 5)
    still = lora(Tensor(x)).asnumpy()[0]
    # The same picture 400 times in one batch: each is dropped from by itself.
    moving = lora.set_train()(Tensor(np.repeat(x, 400, axis=0))).asnumpy()
    assert not np.array_equal(moving[0], moving[1])
    np.testing.assert_allclose(np.mean(moving, axis=0), still, atol=0.2 * np.abs(still).max())


@pytest.mark.parametrize("dtype, compute_dtype", [("float16", None), ("float16", "float32")])
def test_dtypes(dtype, compute_dtype):
    lora = adapted(
        conv(dtype=getattr(ms, dtype)), LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, compute_dtype=compute_dtype)
    )
    y = lora(Tensor(normal(1, IN, 5, 5), getattr(ms, dtype)))
    assert y.dtype == getattr(ms, dtype)
    assert_close(y, plain({}, changed(lora), lora)(Tensor(normal(1, IN, 5, 5))).asnumpy().astype(np.float64), dtype)


class Vision(nn.Cell):
    """A convolution and a linear cell."""

    def __init__(self, **keys):
        super().__init__()
        self.patch = nn.Conv2d(IN, OUT, 3, **keys)
        self.lm_head = nn.Dense(OUT, 5)

    def construct(self, x):
        return self.lm_head(self.patch(x).mean((2, 3)))


def vision(targets=("patch", "lm_head"), seed=2, rank=RANK, **keys):
    network = Vision(**keys)
    randomize(network.get_parameters(), seed=1)
    if targets:
        apply_lora(network, LoraConfig(lora_rank=rank, lora_alpha=ALPHA, target_modules=list(targets)))
        randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()], seed)
    return network


def test_in_a_network():
    network = vision()
    freeze_base(network)
    assert {p.name for p in network.trainable_params()} == {
        f"{path}.mindpet_delta_lora_{part}" for path in ("patch", "lm_head") for part in "ab"
    }
    network = nn.SequentialCell(conv(), nn.Dense(5, 5))
    apply_lora(network, LoraConfig(target_modules="all-linear"))
    assert [path for path, _ in lora_cells(network)] == ["1"]
    with pytest.raises(TargetError, match="but that is a Conv2d and not a linear cell"):
        apply_lora(
            nn.SequentialCell(conv(), nn.Dense(5, 5)), LoraConfig(target_modules="all-linear", exclude_modules=["0"])
        )


@pytest.mark.parametrize("form, name", [("peft", "a"), ("ckpt", "a.ckpt"), ("mindformers", "a.safetensors")])
@pytest.mark.parametrize("keys", [{}, {"group": 2}], ids=str)
def test_saved_and_loaded(keys, form, name, tmp_path):
    source, x = vision(**keys), Tensor(normal(1, IN, 5, 5))
    save_lora(source, str(tmp_path / name), form)
    for target in (vision((), **keys), vision(seed=5, **keys)):
        load_lora(target, str(tmp_path / name))
        np.testing.assert_array_equal(target(x).asnumpy(), source(x).asnumpy())
        assert type(target.patch) is LoRAConv2d
    adapter = adapter_files.read(str(tmp_path / name))
    if not keys:
        np.testing.assert_allclose(
            adapter.delta("patch"), changed(source.patch) - as_array(source.patch.weight), atol=1e-5
        )
    assert "patch" in str(inspect_adapter(str(tmp_path / name)))
    with pytest.raises(AdapterError, match="^slora does not serve adapters of convolutions: patch"):
        adapter_files.write(adapter, str(tmp_path / "slora"), "slora")
    with pytest.raises(AdapterError, match="^Adapter 1 adapts convolutions, which cannot be combined: patch"):
        combine_adapters([adapter, adapter], [1, 1], "cat")


def test_merged_and_unmerged(mode):
    network, x = vision(), Tensor(normal(1, IN, 5, 5))
    before, y, expected = snapshot(network), network(x).asnumpy(), changed(network.patch)
    merge_lora(network)
    assert_close(network.patch.weight, expected)
    assert_close(network(x), y)
    unmerge_lora(network)
    assert snapshot(network) == before
    merge_and_unload(network)
    assert type(network.patch) is nn.Conv2d
    assert_close(network.patch.weight, expected)
    assert_close(network(x), y)


def test_groups_are_not_merged(tmp_path):
    network = vision(group=2)
    before = snapshot(network)
    message = (
        "^The convolution has 2 groups, so no change of its weight can do what A and B do. Keep the adapter unmerged.$"
    )
    with pytest.raises(ShapeMismatchError, match=message):
        merge_lora(network)
    assert snapshot(network) == before
    save_lora(network, str(tmp_path / "a"))
    write_base(network, tmp_path / "base.safetensors")
    with pytest.raises(ShapeMismatchError, match=message):
        merge_checkpoint(str(tmp_path / "base.safetensors"), str(tmp_path / "a"), str(tmp_path / "m.safetensors"))


def test_a_checkpoint_is_merged(tmp_path):
    from safetensors.numpy import load_file

    network = vision()
    write_base(network, tmp_path / "base.safetensors")
    save_lora(network, str(tmp_path / "a"))
    merge_checkpoint(str(tmp_path / "base.safetensors"), str(tmp_path / "a"), str(tmp_path / "m.safetensors"))
    assert_close(load_file(tmp_path / "m.safetensors")["patch.weight"], changed(network.patch))


def write_base(network, path):
    """Writes the base's weights, and one more that tells mindlora that the names are a Llama's."""
    from safetensors.numpy import save_file

    weights = {p.name: p.asnumpy() for p in network.get_parameters() if "lora" not in p.name}
    save_file({**weights, "model.norm_out.weight": np.ones(2, np.float32)}, path)


class Own(nn.Conv2d):
    """A forward of its own."""

    def construct(self, x):
        return super().construct(x) * 2


def sharded():
    cell = conv()
    cell.conv2d.in_strategy = ((2, 1, 1, 1), (1, 1, 1, 1))
    return cell


@pytest.mark.parametrize(
    "make, keys, message",
    [
        (
            conv,
            {"use_dora": True},
            "0: use_dora is not supported on convolutions: its norms are those of the rows of a linear cell. "
            "Leave use_dora out, or add the cell to exclude_modules.",
        ),
        (
            lambda: conv(group=2),
            {"lora_rank": 3},
            "0: Conv2d has 2 groups, which do not divide lora_rank 3. Choose a "
            "rank that they divide (rank_pattern), or add it to exclude_modules.",
        ),
        (
            lambda: conv(dilation=2),
            {},
            "0: Conv2d has data_format NCHW and dilation (2, 2): LoRA supports NCHW "
            "convolutions without dilation, as PEFT does. Add it to exclude_modules.",
        ),
        (
            lambda: Own(IN, OUT, 3),
            {},
            "0: Own has a forward of its own, which LoRAConv2d would drop. Add it to exclude_modules.",
        ),
        (
            sharded,
            {},
            "0: Conv2d is sharded, but LoRA on sharded convolutions is not supported. Add it to exclude_modules.",
        ),
    ],
)
def test_convolutions_that_cannot_carry_lora(make, keys, message):
    network = nn.SequentialCell(make())
    with pytest.raises(UnsupportedCellError) as error:
        apply_lora(network, LoraConfig(target_modules=["0"], **keys))
    assert str(error.value) == f"LoRA cannot be put on 1 of the selected cells. {message}"
