"""What LoRADense takes over from the cell that it replaces, what it leaves alone, and which cells it refuses."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from mindlora import LoraConfig, LoRADense
from mindlora.core.errors import UnsupportedCellError
from mindlora.network.quantized.nf4 import NF4Dense
from mindlora.network.variants.dora import DoRADense
from tests.support.lora_dense import ALPHA, CONFIG, IN, OUT, RANK, adapted, oracle
from tests.support.networks import assert_close, gradients, normal

# What is refused ------------------------------------------------------------------------------------------------


class OtherForward(nn.Dense):
    """A linear cell whose forward is not nn.Dense's."""

    def construct(self, x):
        return 2 * super().construct(x)


class OtherName(nn.Dense):
    """A linear cell whose forward is nn.Dense's own."""


REFUSED = {
    "conv": (
        lambda linear: nn.Conv2d(3, 4, 3),
        "Conv2d is none of nn.Dense, mint.nn.Linear and MindFormers' Linear: pass one of these.",
    ),
    "LoRADense": (
        lambda linear: LoRADense(IN, OUT, RANK, ALPHA),
        "The cell is a LoRADense already: adapters do not stack. Use a network without adapters.",
    ),
    "own forward": (
        lambda linear: OtherForward(IN, OUT),
        "OtherForward has a forward of its own, which LoRADense would drop. Add it to exclude_modules.",
    ),
    "transpose_b": (
        lambda linear: linear(IN, OUT, transpose_b=False),
        "Linear keeps its weight as [in_channels, out_channels] (transpose_b False); LoRADense needs "
        "[out_channels, in_channels]. Add it to exclude_modules.",
    ),
    "experts": (
        lambda linear: linear(IN, OUT, expert_num=2),
        "Linear holds 2 experts; LoRA on expert weights is not supported. Add it to exclude_modules.",
    ),
    "grouped experts": (
        lambda linear: linear(IN, OUT, expert_num=4, use_gmm=True),
        "Linear holds 4 experts; LoRA on expert weights is not supported. Add it to exclude_modules.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cell_that_cannot_carry_lora_is_refused(mindformers, name):
    build, message = REFUSED[name]
    with pytest.raises(UnsupportedCellError) as error:
        LoRADense.from_dense(build(mindformers.modules.layers.Linear), CONFIG)
    assert str(error.value) == message


def test_a_subclass_with_the_same_forward_is_taken():
    lora = adapted(OtherName(IN, OUT))
    x = normal(3, IN)
    assert_close(lora(Tensor(x)), oracle(lora, x))


# What is shared -------------------------------------------------------------------------------------------------


def test_the_base_is_shared_and_not_copied(plain):
    cell, _ = plain
    lora = LoRADense.from_dense(cell, CONFIG)
    activation = cell.activation if getattr(cell, "activation_flag", False) else None
    assert lora.weight is cell.weight and lora.bias is cell.bias and lora.activation is activation
    assert lora.base.matmul is getattr(cell, "dense" if isinstance(cell, mint.nn.Linear) else "matmul")
    assert (lora.weight.name, lora.mindpet_delta_lora_a.name) == ("weight", "mindpet_delta_lora_a")
    cell.weight.set_data(Tensor(np.zeros((OUT, IN), np.float32)))
    assert not lora.weight.asnumpy().any()


def test_no_second_weight_is_allocated_even_for_a_moment():
    try:
        _reset_peak_memory()
    except OSError:
        pytest.skip("the peak of memory cannot be reset here")
    dense = nn.Dense(4096, 4096, weight_init="zeros", has_bias=False)
    dense.weight.asnumpy()
    LoRADense.from_dense(nn.Dense(8, 8), CONFIG)  # what is loaded once, at first use, must not be measured
    _reset_peak_memory()
    before = _memory("VmRSS")
    LoRADense.from_dense(dense, CONFIG)
    assert _memory("VmHWM") - before < 16  # the weight has 64


def _memory(field):
    """Returns a field of /proc/self/status in MiB."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


def _reset_peak_memory():
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


# What is carried over -------------------------------------------------------------------------------------------

PARALLEL = {
    # name: strategy of the base product, then of the low-rank path's a_matmul, mul, b_matmul and sum
    "column": (((2, 1), (2, 1)), ((2, 1), (1, 1)), ((2, 1), ()), ((2, 1), (2, 1)), ((2, 2), (2, 2))),
    "row": (((2, 2), (1, 2)), ((2, 2), (1, 2)), ((2, 1), ()), ((2, 1), (1, 1)), ((2, 1), (2, 1))),
    "data": (((4, 1), (1, 1)), ((4, 1), (1, 1)), ((4, 1), ()), ((4, 1), (1, 1)), ((4, 1), (4, 1))),
}


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("kind", ["Linear", "Dense"])
def test_shard_strategies_follow_from_the_base_product(mindformers, semi_auto_parallel, name, kind):
    base, a_matmul, mul, b_matmul, add = PARALLEL[name]
    if kind == "Linear":
        cell = mindformers.modules.layers.Linear(8, 8, has_bias=False)
        cell.shard(base)
    else:
        cell = nn.Dense(8, 8, has_bias=False)
        cell.matmul.shard(base)
    lora = LoRADense.from_dense(cell, LoraConfig(lora_rank=4, lora_dropout=0.1))
    assert lora.base.matmul.in_strategy == base
    assert lora.low_rank.a_matmul.in_strategy == a_matmul
    assert lora.low_rank.mul.in_strategy == mul
    assert lora.low_rank.b_matmul.in_strategy == b_matmul
    assert lora.low_rank.sum.in_strategy == add
    assert lora.low_rank.dropout.dropout.in_strategy == (base[0],)


def test_bias_and_activation_keep_their_strategies(mindformers, semi_auto_parallel):
    cell = mindformers.modules.layers.Linear(8, 8, activation="relu")
    cell.shard(((2, 1), (2, 1)), ((2, 2), (2,)), ((2, 2),))
    lora = LoRADense.from_dense(cell, CONFIG)
    assert lora.base.bias_add.in_strategy == ((2, 2), (2,))
    assert lora.activation.relu.in_strategy == ((2, 2),)


def test_a_cell_that_is_not_sharded_gives_no_strategies(mindformers, semi_auto_parallel):
    lora = LoRADense.from_dense(mindformers.modules.layers.Linear(8, 8), CONFIG)
    cells = [cell for _, cell in lora.low_rank.cells_and_names()]
    operators = [value for cell in cells for value in vars(cell).values() if isinstance(value, ops.Primitive)]
    assert operators and not any(hasattr(operator, "in_strategy") for operator in operators)


def with_strategies_of_ones(linear):
    """Returns a linear cell as those of MindFormers' ChatGLM, which has strategies however it runs."""
    cell = linear(IN, OUT, compute_dtype=ms.float32)
    cell.shard(((1, 1), (1, 1)), ((1, 1), (1,)))
    return cell


def test_strategies_of_ones_divide_nothing_on_one_device(mindformers):
    linear = mindformers.modules.layers.Linear
    x, cell = normal(3, IN), with_strategies_of_ones(linear)
    weight, bias = cell.weight.asnumpy(), cell.bias.asnumpy()
    assert_close(DoRADense.from_dense(cell, LoraConfig(use_dora=True))(Tensor(x)), x @ weight.T + bias)
    assert NF4Dense.from_dense(with_strategies_of_ones(linear))(Tensor(x)).shape == (3, OUT)


def test_strategies_of_ones_count_where_mindspore_divides_the_graph(mindformers, semi_auto_parallel):
    for kind in (DoRADense.from_dense, lambda cell, _: NF4Dense.from_dense(cell)):
        with pytest.raises(UnsupportedCellError, match="sharded"):
            kind(with_strategies_of_ones(mindformers.modules.layers.Linear), LoraConfig(use_dora=True))


def test_a_cell_that_is_sharded_by_layouts_is_refused(mindformers, semi_auto_parallel):
    layout = ms.Layout((2, 2), ("dp", "mp"))
    cell = mindformers.modules.layers.Linear(8, 8, has_bias=False)
    cell.shard((layout("dp", "None"), layout("mp", "None")), enable_nd_tp=True)
    with pytest.raises(UnsupportedCellError) as error:
        LoRADense.from_dense(cell, CONFIG)
    assert str(error.value) == (
        "Linear is sharded by Layouts, from which LoRA's strategies cannot be derived. "
        "Switch n-dimensional tensor parallelism off (use_3d_tensor_parallel: False)."
    )


def test_recomputation_is_carried_over(mode):
    dense = nn.Dense(IN, OUT)
    plain_lora = adapted(dense)
    dense.recompute()
    lora = adapted(dense)
    assert lora.get_scope() == dense.get_scope() != plain_lora.get_scope()
    assert dense.get_flags().items() <= lora.get_flags().items()
    x, upstream = normal(3, IN), normal(3, OUT, seed=4)
    for mine, theirs in zip(gradients(lora, x, upstream), gradients(plain_lora, x, upstream)):
        np.testing.assert_array_equal(mine.asnumpy(), theirs.asnumpy())


def test_pipeline_stage_is_carried_over():
    dense = nn.Dense(IN, OUT)
    dense.pipeline_stage = 3
    assert LoRADense.from_dense(dense, CONFIG).pipeline_stage == 3


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_is_carried_over(training):
    dense = nn.Dense(IN, OUT).set_train(training)
    lora = LoRADense.from_dense(dense, LoraConfig(lora_dropout=0.25))
    assert {cell.training for _, cell in lora.cells_and_names()} == {training}
