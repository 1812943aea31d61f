"""The cache of compiled graphs: processes that begin after each other, over one folder."""

import json
import os
import threading

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindlora import apply_lora
from mindlora.network.graph_cache import NoKeyError, graph_key
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.training.step.rate_factor import RateFactor
from tests.support import forked
from tests.support.networks import TinyModel
from tests.support.runs import succeeded

# Compiles the cells that its arguments name, in their order, and prints what they compute and what came from the cache.
PROGRAM = """
import json, logging, sys, threading
import mindspore as ms, numpy as np
from mindspore import Parameter, Tensor, nn
from mindlora.network.graph_cache import CompiledOnce
from mindlora.training.step.rate_factor import RateFactor

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_device("CPU")

class Scale(CompiledOnce):
    def __init__(self, factor, weight):
        super().__init__()
        self.factor = factor
        self.weight = Parameter(Tensor(np.full(3, weight, np.float32)), name="weight")

    def construct(self, x, minus=0):
        return x * self.factor + self.weight + SHIFT - minus

SHIFT = 0

class Other(nn.Cell):
    def construct(self, x):
        return x - 1

class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

lines = []
logger = logging.getLogger("mindlora")
logger.setLevel(logging.INFO)
logger.addHandler(Lines())
given = json.loads(sys.argv[1])
if "limit" in given:
    from mindlora.network import graph_cache

    graph_cache.HOME_BYTES = given["limit"]
x = Tensor(np.arange(3, dtype=np.float32))
sums = []
for factor in given["factors"]:
    Other()(x)
    cell = Scale(factor, given["weight"])
    if given.get("lock"):
        cell.lock = threading.Lock()
    keywords = {"minus": given["minus"]} if "minus" in given else {}
    sums += [float(cell(x, **keywords).asnumpy().sum()), float(cell(x + 1, **keywords).asnumpy().sum())]
print(json.dumps({"sums": sums, "lines": lines}))
"""
ROWS = Tensor(np.ones((2, 3), np.float32))


@pytest.fixture
def start(tmp_path, mindformers):
    """Returns a function that begins a process and returns what it printed."""

    def started(*factors, weight=1.0, shift=0, variables=(), **given):
        environment = {**os.environ, "PYTHONPATH": forked.ROOT, "MINDLORA_GRAPH_CACHE": str(tmp_path / "graphs")}
        (tmp_path / "program.py").write_text(PROGRAM.replace("SHIFT = 0", f"SHIFT = {shift}"), encoding="utf-8")
        words = ("program.py", json.dumps({"factors": factors, "weight": weight, **given}))
        ended = forked.run(words, tmp_path, {**environment, **dict(variables)})
        printed = succeeded(ended)
        started.told = ended.stderr
        answer = json.loads(printed.splitlines()[-1])
        expected = [3 * (factor + weight + shift - given.get("minus", 0)) for factor in factors]
        assert answer["sums"][::2] == pytest.approx(expected)
        assert answer["sums"][1::2] == pytest.approx([first + 3 * factor for first, factor in zip(expected, factors)])
        return sum("was taken from" in line for line in answer["lines"]), answer["lines"]

    return started


def graphs(tmp_path):
    return sorted(path.name for path in (tmp_path / "graphs").iterdir())


def test_the_second_start_takes_all_graphs(start, tmp_path):
    assert start(2.0, 3.0)[0] == 0
    kept = graphs(tmp_path)
    # The folder of the process is gone.
    assert len(kept) == 2 and all(name.endswith(".mindir") for name in kept)
    assert start(2.0, 3.0)[0] == 2 and graphs(tmp_path) == kept


def test_graphs_are_found_by_what_they_are_and_not_by_their_number(start, tmp_path):
    start(2.0, 3.0)
    # Another order, other weights, and one between that is not there.
    assert start(3.0, weight=5.0)[0] == 1
    assert start(3.0, 2.0, weight=7.0)[0] == 2
    assert start(3.0, 4.0, 2.0)[0] == 2
    assert start(4.0, 2.0, 3.0)[0] == 3


def test_a_module_of_the_user_that_has_changed_is_compiled(start):
    start(2.0)
    assert start(2.0, shift=1)[0] == 0
    assert start(2.0)[0] == start(2.0, shift=1)[0] == 1


def test_files_may_be_deleted(start, tmp_path):
    start(2.0, 3.0)
    for path in (tmp_path / "graphs").glob("*.mindir"):
        path.unlink()
    assert start(2.0)[0] == 0 and start(2.0)[0] == 1


@pytest.mark.parametrize("content", [b"", b"no graph", None])
def test_a_damaged_file(start, tmp_path, content):
    start(2.0)
    (kept,) = (tmp_path / "graphs").glob("*.mindir")
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert start(2.0)[0] == 0 and start(2.0)[0] == 1


def test_a_graph_that_is_missing_is_no_error(start, tmp_path):
    start(2.0)
    assert start(3.0)[0] == 0 and "ERROR" not in start.told
    # Errors of what is there are told.
    next((tmp_path / "graphs").glob("*.mindir")).write_bytes(b"no graph")
    start(2.0, 3.0)
    assert "ERROR" in start.told


def test_in_the_user_s_own_folder_the_graphs_used_last_are_kept(start, tmp_path):
    home = [("XDG_CACHE_HOME", str(tmp_path)), ("MINDLORA_GRAPH_CACHE", str(tmp_path / "mindlora" / "graphs"))]
    start(2.0, 3.0, variables=home)
    size = max(path.stat().st_size for path in (tmp_path / "mindlora" / "graphs").iterdir())
    # The first is used again, and there is room for two.
    assert start(2.0, variables=home)[0] == 1
    start(4.0, variables=home, limit=2 * size)
    assert len(list((tmp_path / "mindlora" / "graphs").iterdir())) == 2
    assert start(2.0, 4.0, variables=home)[0] == 2


def test_a_cell_without_a_key_is_compiled_and_the_log_says_so(start, tmp_path):
    for _ in range(2):
        taken, lines = start(2.0, lock=True)
        assert taken == 0 and "The graph of Scale is not kept, as Scale.lock is a _thread.lock" in "".join(lines)
    assert graphs(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named_and_the_run_goes_on(start, tmp_path):
    (tmp_path / "graphs").write_text("a file")
    taken, lines = start(2.0)
    assert taken == 0 and "MINDLORA_GRAPH_CACHE has no effect" in "".join(lines) and str(tmp_path) in "".join(lines)


def test_keywords_tell_graphs_apart(start):
    assert start(2.0, minus=1)[0] == 0
    assert start(2.0, minus=2)[0] == 0
    assert start(2.0, minus=2)[0] == start(2.0, minus=1)[0] == 1


def test_beside_mindspores_own_cache_none_is_kept(start, tmp_path):
    own = {"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": str(tmp_path / "own")}
    taken, lines = start(2.0, variables=own)
    assert taken == 0 and "MS_COMPILER_CACHE_ENABLE is 1" in "".join(lines) and not (tmp_path / "graphs").exists()


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


def test_sizes_that_set_inputs_leaves_open_change_no_key():
    def of(rows, *shape):
        cell = Scale()
        cell.set_inputs(Tensor(shape=shape, dtype=ms.float32))
        return key(cell, Tensor(np.ones((rows, 3), np.float32)))

    assert of(2, None, 3) == of(4, None, 3) != of(2, None, None) != key()


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


def test_what_changes_while_it_trains_and_no_graph_reads_changes_no_key():
    class Rates(nn.Cell):
        def __init__(self, factor):
            super().__init__()
            self.optimizer = nn.SGD(nn.Dense(3, 3).trainable_params(), 0.1)
            self.rate = RateFactor(self.optimizer)
            self.rate.set("WarmUp", factor)

    assert key(Rates(0.5)) == key(Rates(0.25))


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_settings_of_an_adapter_that_no_graph_reads_change_no_key(use_dora):
    def of(**settings):
        model = TinyModel(num_layers=1)
        apply_lora(model, PetLoraConfig(lora_rank=2, target_modules=["wq"], use_dora=use_dora, **settings))
        return key(model)

    assert of() == of(seed=3, base_model_name_or_path="someone/a-base") != of(lora_alpha=9)


@pytest.mark.usefixtures("mindformers")
@pytest.mark.parametrize("noted", ["dataset_config", "pet_config"])
@pytest.mark.parametrize("is_mcore", [False, True], ids=["legacy", "mcore"])
def test_what_mindformers_notes_in_a_configuration_changes_no_key(noted, is_mcore):
    from mindformers import LlamaConfig
    from mindformers.parallel_core.transformer_config import TransformerConfig

    def of(**settings):
        cell = Scale()
        cell.config = TransformerConfig(num_attention_heads=2, num_layers=1) if is_mcore else LlamaConfig()
        for name, value in settings.items():
            setattr(cell.config, name, value)
        return key(cell)

    assert of(**{noted: {"seed": 1}}) == of(**{noted: {"seed": 2}}) != of(hidden_size=8)
