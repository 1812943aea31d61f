"""Keys of graphs: equal where the graphs are, another one for whatever a graph may depend on."""

import threading

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindlora.network.graph_key import NoKeyError, graph_key

ROWS = Tensor(np.ones((2, 3), np.float32))


class Scale(nn.Cell):
    """A cell with something of each kind that graphs depend on."""

    def __init__(self, factor=2.0, constant=(1, 2, 3), parameter=1.0, name="weight", trains=True, offset=0):
        super().__init__()
        self.factor = factor
        self.constant = Tensor(np.array(constant, np.float32))
        self.weight = Parameter(Tensor(np.full(3, parameter, np.float32)), name=name, requires_grad=trains)
        self.sizes = {"rows": [1, 2], "names": ("a", None)}
        self.add = ops.Add()
        self.product = ops.MatMul(transpose_b=True)
        self.shift = lambda x: x + offset
        self.inner = nn.Dense(3, 3)

    def construct(self, x):
        return self.shift(self.inner(x) * self.factor + self.constant * self.weight)


def key(cell=None, x=ROWS):
    return graph_key(cell or Scale(), (x,))


def test_equal_cells_have_equal_keys_whatever_their_parameters_hold():
    assert key() == key(Scale(parameter=5.0)) and len(key()) == 64


@pytest.mark.parametrize(
    "changed",
    [
        {"factor": 3.0},
        {"factor": 2},
        {"constant": (1, 2, 4)},
        {"constant": (1, 2, 3, 4)},
        {"name": "other"},
        {"trains": False},
        {"offset": 1},
    ],
    ids=str,
)
def test_what_a_cell_is_built_from_changes_its_key(changed):
    assert key(Scale(**changed)) != key()


def other_construct(self, x):
    return x


@pytest.mark.parametrize(
    "change",
    [
        lambda cell: cell.set_train(),
        lambda cell: setattr(cell, "phase", "prefill"),
        lambda cell: cell.sizes["rows"].append(3),
        lambda cell: cell.add.add_prim_attr("mark", 1),
        lambda cell: setattr(cell, "product", ops.MatMul()),
        lambda cell: setattr(cell, "inner", nn.Dense(3, 3, has_bias=False)),
        lambda cell: setattr(cell, "cell_init_args", "lazy_inline_Scale_layers_0"),
        lambda cell: cell.inner.recompute(),
        lambda cell: setattr(cell, "self", cell),
    ],
)
def test_what_is_done_to_a_cell_changes_its_key(change):
    cell = Scale()
    change(cell)
    assert key(cell) != key()


def test_another_function_of_the_class_changes_the_key(monkeypatch):
    before = key()
    monkeypatch.setattr(Scale, "construct", other_construct)
    assert key() != before


@pytest.mark.parametrize(
    "x", [Tensor(np.ones((3, 3), np.float32)), Tensor(np.ones((2, 3), np.float16)), (ROWS,), 1], ids=str
)
def test_arguments_change_the_key(x):
    assert key(x=x) != key() == key(x=ROWS + 1)


def test_settings_and_variables_of_mindspore_change_the_key(monkeypatch):
    before = key()
    monkeypatch.setenv("MS_DEV_SIDE_EFFECT_LOAD_ELIM", "1")
    assert key() != before
    monkeypatch.delenv("MS_DEV_SIDE_EFFECT_LOAD_ELIM")
    mode = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE if mode == ms.GRAPH_MODE else ms.GRAPH_MODE)
    try:
        assert key() != before
    finally:
        ms.set_context(mode=mode)
    assert key() == before


def test_what_cannot_be_seen_has_no_key():
    cell = Scale()
    cell.sizes["lock"] = threading.Lock()
    with pytest.raises(NoKeyError, match=r"Scale.sizes.lock is a _thread.lock"):
        key(cell)
