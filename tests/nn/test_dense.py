"""LoRADense against numpy: equation, gradients, starts, and what it takes over from the cell it replaces."""
import copy
import dataclasses
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.common.initializer import Normal

from mindlora import LoRADense, LoraConfig
from mindlora.errors import BackendError, ConfigError, UnsupportedCellError
from mindlora.ops.lora_dropout import LoraDeltaWithDropout
from tests.helpers import WeightedSum, as_array, assert_close, lora_forward, randomize

IN, OUT, RANK, ALPHA = 7, 5, 3, 4.5
SCALE = ALPHA / RANK
CONFIG = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA)
IN_GRAPH_MODE = pytest.mark.parametrize("mode", [ms.GRAPH_MODE], indirect=True)


def relu(y):
    return np.maximum(y, 0)


def silu(y):
    return y / (1 + np.exp(-y))


KINDS = {
    "dense": ("Dense", {"has_bias": False}, None),
    "dense with bias": ("Dense", {}, None),
    "dense with relu": ("Dense", {"activation": "relu"}, relu),
    "linear": ("Linear", {"has_bias": False}, None),
    "linear with bias": ("Linear", {}, None),
    "linear with silu": ("Linear", {"activation": "silu"}, silu),
}


@pytest.fixture(params=KINDS)
def plain(request, mindformers):
    """A linear cell with normal weights, and its activation in numpy."""
    kind, arguments, activation = KINDS[request.param]
    if kind == "Dense":
        cell = nn.Dense(IN, OUT, **arguments)
    else:
        cell = mindformers.modules.layers.Linear(IN, OUT, compute_dtype=ms.float32, **arguments)
    randomize(cell.get_parameters(), seed=1)
    return cell, activation


def adapted(cell, config=CONFIG):
    """Returns a LoRADense over ``cell`` whose A and B are normal."""
    lora = LoRADense.from_dense(cell, config)
    randomize(lora.lora_parameters(), seed=2)
    return lora


def oracle(lora, x, activation=None):
    a, b = lora.lora_parameters()
    return lora_forward(x, as_array(lora.weight), as_array(a), as_array(b), lora.lora_alpha / lora.lora_rank,
                        None if lora.bias is None else as_array(lora.bias), activation)


def normal(*shape, seed=3):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# The equation ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [(3, IN), (1, 3, IN), (2, 1, 3, IN)], ids=str)
def test_forward_starts_as_the_plain_cell_and_is_the_equation(mode, plain, shape):
    cell, activation = plain
    lora = LoRADense.from_dense(cell, CONFIG)
    x = normal(*shape)
    lora.set_train()
    np.testing.assert_array_equal(lora(Tensor(x)).asnumpy(), cell(Tensor(x)).asnumpy())  # B is zero
    lora.set_train(False)
    randomize(lora.lora_parameters(), seed=2)
    assert_close(lora(Tensor(x)), oracle(lora, x, activation))


@pytest.mark.parametrize("in_channels, out_channels, rank", [(1, 1, 1), (1, 5, 3), (13, 1, 2), (8, 8, 8), (3, 4, 17)])
def test_odd_sizes(mode, in_channels, out_channels, rank):
    lora = LoRADense(in_channels, out_channels, rank, 2)
    randomize(lora.get_parameters())
    x = normal(3, in_channels)
    assert_close(lora(Tensor(x)), oracle(lora, x))


def test_a_new_cell_and_an_adapted_one_are_the_same():
    dense = nn.Dense(IN, OUT, activation="relu")
    lora, new = adapted(dense), LoRADense(IN, OUT, RANK, ALPHA, activation="relu")
    for mine, theirs in zip(new.get_parameters(), lora.get_parameters()):
        assert mine.name == theirs.name
        mine.set_data(theirs.value())
    x = Tensor(normal(3, IN))
    np.testing.assert_array_equal(new(x).asnumpy(), lora(x).asnumpy())


# dtypes ---------------------------------------------------------------------------------------------------------
# A product of bfloat16 has no CPU kernel (neither MatMul nor Mul), so bfloat16 is computed in nowhere below; that
# A, B and W are kept in it, and cast to what is computed in, can be run.

@pytest.mark.parametrize("param_init_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("weight_dtype, input_dtype, compute_dtype", [
    ("float32", "float32", None), ("float16", "float16", None), ("float16", "float32", None),
    ("float32", "float32", "float16"), ("float16", "float16", "float32"), ("bfloat16", "bfloat16", "float32")])
def test_every_dtype_that_a_cpu_has(mode, param_init_type, weight_dtype, input_dtype, compute_dtype):
    dense = nn.Dense(IN, OUT, dtype=getattr(ms, weight_dtype))
    randomize(dense.get_parameters(), seed=1)
    lora = adapted(dense, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, param_init_type=param_init_type,
                                     compute_dtype=compute_dtype))
    x = Tensor(normal(2, 3, IN), getattr(ms, input_dtype))
    y = lora(x)
    assert y.dtype == x.dtype
    computed = compute_dtype or weight_dtype
    # The oracle takes the parameters as they are rounded; what is left is the rounding of the products and of y.
    assert_close(y, oracle(lora, as_array(x)), max((computed, input_dtype), key=["float32", "float16",
                                                                                 "bfloat16"].index))


@pytest.mark.parametrize("kind, cell_dtype, compute_dtype, overflows", [
    ("Dense", "float16", None, True), ("Dense", "float16", "float32", False),
    ("Dense", "float32", None, False), ("Dense", "float32", "float16", True),
    ("Linear", "float16", None, True), ("Linear", "float16", "float32", False),
    ("Linear", "float32", None, False), ("Linear", "float32", "float16", True)])
def test_compute_dtype_is_the_cell_s_own_unless_it_is_given(mindformers, kind, cell_dtype, compute_dtype, overflows):
    if kind == "Dense":
        cell = nn.Dense(IN, OUT, weight_init="ones", dtype=getattr(ms, cell_dtype))
    else:
        # MindFormers' Linear keeps float32 and computes in another dtype.
        cell = mindformers.modules.layers.Linear(IN, OUT, weight_init="ones", compute_dtype=getattr(ms, cell_dtype))
    lora = LoRADense.from_dense(cell, LoraConfig(compute_dtype=compute_dtype))
    y = lora(Tensor(np.full((1, IN), 1e5, np.float32))).asnumpy()  # float16 ends at 65504
    assert np.isfinite(y).all() != overflows


def test_bfloat16_is_inherited_too():
    assert "compute_dtype=BFloat16" in repr(LoRADense.from_dense(nn.Dense(IN, OUT, dtype=ms.bfloat16), CONFIG))


@pytest.mark.parametrize("param_init_type", ["float32", "float16", "bfloat16"])
def test_a_and_b_and_their_gradients_are_in_param_init_type(mode, param_init_type):
    lora = LoRADense(IN, OUT, RANK, ALPHA, param_init_type=param_init_type, compute_dtype="float32", dtype=ms.float16)
    parameters = lora.lora_parameters()
    gradients = ms.grad(WeightedSum(lora), None, parameters)(Tensor(normal(3, IN)), Tensor(normal(3, OUT)))
    assert [p.dtype for p in parameters] == [getattr(ms, param_init_type)] * 2
    assert [g.dtype for g in gradients] == [getattr(ms, param_init_type)] * 2
    assert lora.weight.dtype == ms.float16 and lora.bias.dtype == ms.float16


# Starts ---------------------------------------------------------------------------------------------------------

def test_shapes_names_and_default_starts_of_the_parameters():
    lora = LoRADense(400, 30, 64, 8)
    assert [(p.name, p.shape, p.requires_grad) for p in lora.get_parameters()] == [
        ("weight", (30, 400), True), ("bias", (30,), True),
        ("mindpet_delta_lora_a", (64, 400), True), ("mindpet_delta_lora_b", (30, 64), True)]
    a, b = (p.asnumpy() for p in lora.lora_parameters())
    bound = 1 / np.sqrt(400)  # He uniform with negative_slope sqrt(5)
    assert 0.99 * bound < a.max() <= bound and -bound <= a.min() < -0.99 * bound
    assert abs(a.mean()) < 0.03 * bound
    assert abs(a.std() / (bound / np.sqrt(3)) - 1) < 0.02
    assert not b.any()


def test_two_cells_start_at_different_a():
    first, second = (LoRADense(IN, OUT, RANK, ALPHA).mindpet_delta_lora_a.asnumpy() for _ in range(2))
    assert (first != second).all()


@pytest.mark.parametrize("name, std", [
    ("normal", 0.01), ("uniform", 0.07 / np.sqrt(3)), ("xavier_uniform", np.sqrt(2 / (400 + 64))),
    ("he_normal", np.sqrt(2 / 400)), ("he_uniform", np.sqrt(2 / 400)),
    ("kaiming_uniform", 1 / np.sqrt(3 * 400)), (Normal(sigma=0.5, mean=0.0), 0.5)])
def test_the_initializer_that_is_named_is_the_one_used(name, std):
    dense = nn.Dense(400, 400)
    a = LoRADense.from_dense(dense, LoraConfig(lora_rank=64, lora_a_init=name)).mindpet_delta_lora_a.asnumpy()
    assert abs(a.std() / std - 1) < 0.05 and abs(a.mean()) < 0.05 * std
    if name != "kaiming_uniform":  # for B that means its own fan-in, the rank
        b = LoRADense.from_dense(nn.Dense(64, 64), LoraConfig(lora_rank=400, lora_b_init=name)).mindpet_delta_lora_b
        assert abs(b.asnumpy().std() / std - 1) < 0.05


def test_constant_starts():
    lora = LoRADense(IN, OUT, RANK, ALPHA, lora_a_init="zeros", lora_b_init="ones")
    assert not lora.mindpet_delta_lora_a.asnumpy().any()
    assert (lora.mindpet_delta_lora_b.asnumpy() == 1).all()


@pytest.mark.parametrize("param_init_type", ["float32", "float16", "bfloat16"])
def test_a_tensor_is_taken_as_the_start(param_init_type):
    # Quarters are exact in each dtype.
    a, b = np.arange(RANK * IN).reshape(RANK, IN) / 4, np.arange(OUT * RANK).reshape(OUT, RANK) / 4
    lora = LoRADense(IN, OUT, RANK, ALPHA, lora_a_init=Tensor(a, getattr(ms, param_init_type)),
                     lora_b_init=Tensor(b, getattr(ms, param_init_type)), param_init_type=param_init_type)
    np.testing.assert_array_equal(as_array(lora.mindpet_delta_lora_a), a)
    np.testing.assert_array_equal(as_array(lora.mindpet_delta_lora_b), b)


@pytest.mark.parametrize("inits, message", [
    ({"lora_a_init": Tensor(np.ones((IN, RANK), np.float32))},
     f"lora_a_init is a Tensor of shape [{IN}, {RANK}]: it must be [{RANK}, {IN}]."),
    ({"lora_b_init": Tensor(np.ones((OUT, RANK + 1), np.float32))},
     f"lora_b_init is a Tensor of shape [{OUT}, {RANK + 1}]: it must be [{OUT}, {RANK}]."),
    ({"lora_a_init": "kaming"}, "lora_a_init is 'kaming', which is no MindSpore initializer: "),
    ({"lora_b_init": "nonsense"}, "lora_b_init is 'nonsense', which is no MindSpore initializer: "),
    ({"lora_rank": 0}, "lora_rank is 0: it must be a whole number of at least 1."),
    ({"lora_dropout": 1.0}, "lora_dropout is 1.0: it must be a number in [0, 1).")])
def test_wrong_starts_and_numbers_are_refused(inits, message):
    arguments = {"lora_rank": RANK, "lora_alpha": ALPHA, **inits}
    with pytest.raises(ConfigError, match=re.escape(message)):
        LoRADense(IN, OUT, **arguments)
    if "lora_dropout" not in inits and "lora_rank" not in inits:
        with pytest.raises(ConfigError, match=re.escape(message)):
            LoRADense.from_dense(nn.Dense(IN, OUT), LoraConfig(**arguments))


# Gradients ------------------------------------------------------------------------------------------------------

def gradients(lora, x, weights):
    """Returns d sum(lora(x) * weights) / d x, A, B as MindSpore computes them."""
    of_x, (of_a, of_b) = ms.grad(WeightedSum(lora), 0, lora.lora_parameters())(Tensor(x), Tensor(weights))
    return of_x, of_a, of_b


@pytest.mark.parametrize("shape", [(4, IN), (2, 3, IN)])
def test_gradients_are_the_closed_form(mode, shape):
    lora = adapted(nn.Dense(IN, OUT))
    x, upstream = normal(*shape), normal(*shape[:-1], OUT, seed=4)
    of_x, of_a, of_b = gradients(lora, x, upstream)
    weight, (a, b) = as_array(lora.weight), (as_array(p) for p in lora.lora_parameters())
    rows, flat = x.reshape(-1, IN).astype(np.float64), upstream.reshape(-1, OUT).astype(np.float64)
    assert_close(of_x, (flat @ weight + SCALE * flat @ b @ a).reshape(shape))
    assert_close(of_a, SCALE * (flat @ b).T @ rows)
    assert_close(of_b, SCALE * flat.T @ (rows @ a.T))


def test_gradients_are_the_differences_of_the_oracle(mode, plain):
    cell, activation = plain
    lora = adapted(cell)
    x, upstream = normal(2, 3, IN), normal(2, 3, OUT, seed=4)
    places = [x.astype(np.float64)] + [as_array(p) for p in lora.lora_parameters()]

    def loss():
        y = lora_forward(places[0], as_array(lora.weight), places[1], places[2], SCALE,
                         None if lora.bias is None else as_array(lora.bias), activation)
        return (y * upstream).sum()

    for gradient, place in zip(gradients(lora, x, upstream), places):
        assert_close(gradient, _differences(loss, place, step=1e-6), "float32")


def test_gradients_are_the_differences_of_the_cell_itself(mode):
    lora = adapted(nn.Dense(IN, OUT))
    x, upstream = normal(2, IN), normal(2, OUT, seed=4)
    a, b = lora.lora_parameters()
    places = [x.copy(), a.asnumpy().copy(), b.asnumpy().copy()]

    def loss():
        a.set_data(Tensor(places[1]))
        b.set_data(Tensor(places[2]))
        return (as_array(lora(Tensor(places[0]))) * upstream).sum()

    # y is linear in each of x, A and B, so that central differences are exact at any step, and a long one rounds least.
    for gradient, place in zip(gradients(lora, x, upstream), places):
        assert_close(gradient, _differences(loss, place, step=1.0), "float32")


def _differences(loss, place, step):
    """Returns the central differences of ``loss`` in each element of ``place``, which it reads."""
    result = np.empty(place.shape)
    for index in np.ndindex(place.shape):
        kept = place[index]
        place[index] = kept + step
        above = loss()
        place[index] = kept - step
        below = loss()
        place[index] = kept
        result[index] = (above - below) / (2 * step)
    return result


# What is shared and what is new ---------------------------------------------------------------------------------

def test_the_base_is_shared_and_not_copied(plain):
    cell, _ = plain
    lora = LoRADense.from_dense(cell, CONFIG)
    assert lora.weight is cell.weight and lora.bias is cell.bias and lora.activation is cell.activation
    assert lora.matmul is cell.matmul
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
    LoRADense.from_dense(nn.Dense(8, 8), CONFIG)  # what is loaded once is not what is measured
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


def test_repr_tells_the_adapter():
    text = repr(LoRADense(IN, OUT, RANK, ALPHA, 0.1, has_bias=False))
    assert ("in_channels=7, out_channels=5, has_bias=False, lora_rank=3, lora_alpha=4.5, lora_dropout=0.1, "
            "compute_dtype=Float32") in text


# Dropout --------------------------------------------------------------------------------------------------------

DROP = LoraConfig(lora_rank=6, lora_alpha=6, lora_dropout=0.25, lora_a_init="identity", lora_b_init="identity")


def mask_cell():
    """A cell that returns what its dropout leaves of x: W is zero, A and B are the identity."""
    return LoRADense.from_dense(nn.Dense(6, 6, weight_init="zeros", has_bias=False), DROP)


def test_dropout_is_off_in_evaluation(mode):
    dense = nn.Dense(IN, OUT)
    lora = adapted(dense, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, lora_dropout=0.5))
    lora.set_train(False)
    x = normal(3, IN)
    assert_close(lora(Tensor(x)), oracle(lora, x))


def test_dropout_drops_its_share_and_keeps_the_mean(mode):
    cell = mask_cell().set_train()
    x = Tensor(np.ones((2000, 6), np.float32))
    first, second = cell(x).asnumpy(), cell(x).asnumpy()
    for y in (first, second):
        np.testing.assert_allclose(np.unique(y), [0, 1 / 0.75], rtol=1e-6)
        assert abs((y == 0).mean() - 0.25) < 0.02  # five standard deviations
        assert abs(y.mean() - 1) < 0.03
    assert (first != second).any()


def test_dropout_is_on_the_low_rank_path_alone(mode):
    dense = nn.Dense(IN, OUT)
    lora = LoRADense.from_dense(dense, LoraConfig(lora_rank=RANK, lora_dropout=0.9)).set_train()
    x = Tensor(normal(50, IN))
    np.testing.assert_array_equal(lora(x).asnumpy(), dense(x).asnumpy())


def test_the_backward_drops_what_the_forward_dropped(mode):
    cell = mask_cell().set_train()
    x = np.ones((50, 6), np.float32)
    y, of_x = ms.value_and_grad(WeightedSum(cell))(Tensor(x), Tensor(x))
    assert set(np.unique(np.round(of_x.asnumpy(), 4))) == {0, np.float32(1.3333)}
    assert_close(y, of_x.asnumpy().sum())


def test_without_dropout_there_is_no_cell_for_it():
    assert not hasattr(LoRADense(IN, OUT, RANK, ALPHA), "lora_delta_with_dropout")
    assert isinstance(LoRADense(IN, OUT, RANK, ALPHA, 0.1).lora_delta_with_dropout, LoraDeltaWithDropout)


def test_each_cell_and_each_call_drops_other_elements(mode):
    ms.set_seed(5)
    cells, x = [mask_cell().set_train() for _ in range(2)], Tensor(np.ones((50, 6), np.float32))
    assert len({(cell(x).asnumpy() == 0).tobytes() for cell in cells for _ in range(2)}) == 4


@IN_GRAPH_MODE
def test_a_recomputed_forward_drops_what_the_forward_dropped(mode):
    network = nn.SequentialCell(mask_cell(), mask_cell()).set_train()
    network.recompute()
    x = np.ones((50, 6), np.float32)
    y, of_x = ms.value_and_grad(WeightedSum(network))(Tensor(x), Tensor(x))
    assert_close(y, of_x.asnumpy().sum())  # the network is linear, so y is x * dy/dx


# Fused operators ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("path", ["cpu", "composed"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("training", [True, False])
def test_few_and_many_tokens_on_each_path(mode, plain, monkeypatch, library, path, dtype, training):
    monkeypatch.setenv("MINDLORA_BACKEND", path)
    cell, activation = plain
    lora = adapted(cell, dataclasses.replace(CONFIG, compute_dtype=dtype)).set_train(training)
    assert lora.choice.path == path
    for tokens in (1, 8, 9):
        x = normal(tokens, IN)
        assert_close(lora(Tensor(x)), oracle(lora, x, activation), dtype=dtype)


@IN_GRAPH_MODE
def test_any_number_of_tokens_in_one_graph(mode, monkeypatch, library):
    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    lora = adapted(nn.Dense(IN, OUT))
    lora.set_inputs(Tensor(shape=(None, IN), dtype=ms.float32))
    for tokens in (3, 1, 20):
        x = normal(tokens, IN)
        assert_close(lora(Tensor(x)), oracle(lora, x))


@IN_GRAPH_MODE
def test_what_fused_operators_cannot_take_is_composed_and_forced_is_refused(mode, monkeypatch, library):
    many, sharded = nn.Dense(300, 300), nn.Dense(IN, OUT)
    sharded.matmul.shard(((1, 1), (1, 1)))
    cells = [(many, LoraConfig(lora_rank=257, lora_alpha=1), "rank is 257, and the fused operators take 1 to 256"),
             (sharded, CONFIG, "the cell has a shard strategy")]
    for cell, config, reason in cells:
        monkeypatch.delenv("MINDLORA_BACKEND", raising=False)
        lora = LoRADense.from_dense(cell, config)
        assert lora.choice.path == "composed" and reason in lora.choice.reason
        monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
        with pytest.raises(BackendError, match=f"MINDLORA_BACKEND is cpu, but {reason}"):
            LoRADense.from_dense(cell, config)


# Refusals -------------------------------------------------------------------------------------------------------

class OtherForward(nn.Dense):
    """A linear cell whose forward is not nn.Dense's."""

    def construct(self, x):
        return 2 * super().construct(x)


class OtherName(nn.Dense):
    """A linear cell whose forward is nn.Dense's own."""


REFUSED = {
    "conv": (lambda linear: nn.Conv2d(3, 4, 3), "Conv2d is neither nn.Dense nor MindFormers' Linear."),
    "LoRADense": (lambda linear: LoRADense(IN, OUT, RANK, ALPHA),
                  "The cell is a LoRADense already: adapters do not stack."),
    "own forward": (lambda linear: OtherForward(IN, OUT),
                    "OtherForward has a forward of its own, which LoRADense would drop."),
    "transpose_b": (lambda linear: linear(IN, OUT, transpose_b=False),
                    "Linear keeps its weight as [in_channels, out_channels] (transpose_b False); LoRADense needs "
                    "[out_channels, in_channels]. Add it to exclude_modules."),
    "experts": (lambda linear: linear(IN, OUT, expert_num=2),
                "Linear holds 2 experts; LoRA on expert weights is not supported. Add it to exclude_modules."),
    "grouped experts": (lambda linear: linear(IN, OUT, expert_num=4, use_gmm=True),
                        "Linear holds 4 experts; LoRA on expert weights is not supported. Add it to "
                        "exclude_modules."),
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


# What is carried over -------------------------------------------------------------------------------------------

PARALLEL = {
    # name: strategy of the base product, then of the low-rank path's a_matmul, mul, b_matmul and add
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
    assert lora.matmul.in_strategy == base
    assert lora.lora_a_matmul.in_strategy == a_matmul
    assert lora.lora_mul.in_strategy == mul
    assert lora.lora_b_matmul.in_strategy == b_matmul
    assert lora.lora_add.in_strategy == add
    assert lora.lora_dropout.dropout.in_strategy == (base[0],)


def test_bias_and_activation_keep_their_strategies(mindformers, semi_auto_parallel):
    cell = mindformers.modules.layers.Linear(8, 8, activation="relu")
    cell.shard(((2, 1), (2, 1)), ((2, 2), (2,)), ((2, 2),))
    lora = LoRADense.from_dense(cell, CONFIG)
    assert lora.bias_add.in_strategy == ((2, 2), (2,))
    assert lora.activation.relu.in_strategy == ((2, 2),)


def test_a_cell_that_is_not_sharded_gives_no_strategies(mindformers, semi_auto_parallel):
    lora = LoRADense.from_dense(mindformers.modules.layers.Linear(8, 8), CONFIG)
    for product in (lora.lora_a_matmul, lora.lora_mul, lora.lora_b_matmul, lora.lora_add):
        assert not hasattr(product, "in_strategy")


def test_a_cell_that_is_sharded_by_layouts_is_refused(mindformers, semi_auto_parallel):
    layout = ms.Layout((2, 2), ("dp", "mp"))
    cell = mindformers.modules.layers.Linear(8, 8, has_bias=False)
    cell.shard((layout("dp", "None"), layout("mp", "None")), enable_nd_tp=True)
    with pytest.raises(UnsupportedCellError) as error:
        LoRADense.from_dense(cell, CONFIG)
    assert str(error.value) == (
        "Linear is sharded by Layouts, from which LoRA's strategies cannot be derived. "
        "Switch n-dimensional tensor parallelism off (use_3d_tensor_parallel: False).")


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
    lora = LoRADense.from_dense(dense, DROP)
    assert lora.training is training


def test_a_copy_is_a_cell_of_its_own():
    lora = adapted(nn.Dense(IN, OUT))
    twin = copy.deepcopy(lora)
    x = normal(3, IN)
    before = twin(Tensor(x)).asnumpy()
    randomize(lora.lora_parameters(), seed=9)
    np.testing.assert_array_equal(twin(Tensor(x)).asnumpy(), before)
    assert_close(lora(Tensor(x)), oracle(lora, x))
