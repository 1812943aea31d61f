"""The names of MindFormers that are replaced: what they do then, and that nothing else is replaced."""

import ast

import mindspore as ms
import pytest
from mindformers.parallel_core.training_graph.base_models.gpt import gpt_model

from mindlora.training import replaced_names
from mindlora.training.launch import hooks  # noqa: F401
from mindlora.training.replaced_names import IN_GRAPH_MODE, IN_PYNATIVE, replace_in_graph_mode
from tests.support.sources import modules

SIZES = dict.fromkeys(IN_GRAPH_MODE[0].arguments, 1)


@pytest.fixture
def told(monkeypatch):
    """What MindFormers' own function is told on eight devices."""
    calls = []
    replacement = replaced_names.for_all_devices(lambda **sizes: calls.append(sizes))
    monkeypatch.setattr(gpt_model, "initialize_model_parallel", replacement)
    monkeypatch.setattr(replaced_names, "get_group_size", lambda: 8)
    yield calls
    ms.reset_auto_parallel_context()


def test_in_data_parallel_the_process_groups_are_those_of_all_devices(told):
    ms.set_auto_parallel_context(parallel_mode="data_parallel")
    gpt_model.initialize_model_parallel(**SIZES)
    assert told == [{**SIZES, "data_parallel_size": 8}]


def test_in_any_other_mode_they_are_those_of_the_yaml(told):
    for mode in ("stand_alone", "semi_auto_parallel"):
        ms.set_auto_parallel_context(parallel_mode=mode)
        gpt_model.initialize_model_parallel(**{**SIZES, "data_parallel_size": 4})
    assert told == [{**SIZES, "data_parallel_size": 4}] * 2


def test_it_is_replaced_once_by_importing_the_hooks():
    replaced = gpt_model.initialize_model_parallel
    assert replaced.__wrapped__.__module__ == "mindformers.parallel_core.inference.parallel_state"
    replace_in_graph_mode()
    assert gpt_model.initialize_model_parallel is replaced


def test_every_replacement_is_there_with_its_reason():
    functions = {
        f"{path.removesuffix('.py').replace('/', '.')}.{node.name}"
        for path, _, tree in modules()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    for replaced in (*IN_GRAPH_MODE, *IN_PYNATIVE):
        assert f"training.{replaced.by}" in functions and replaced.reason.endswith(".")


def test_no_other_module_replaces_a_name_of_mindformers():
    found = [f"{path}:{line}" for path, _, tree in modules() for line in replacements(tree)]
    # LoRA+ and several adapters under the PyNative Trainer, while the optimizer is built.
    places = ["training/pynative/pet.py"] * 2 + ["training/several/pynative.py"] * 2
    assert [place.partition(":")[0] for place in found] == places, found


def replacements(tree):
    """Yields the lines that set an attribute of a module of MindFormers, however the module was imported."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mindformers"):
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("importlib.import_module("):
            imported |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            targets = [ast.Attribute(node.args[0], "")]
        owners = [target.value for target in targets if isinstance(target, ast.Attribute)]
        if any(isinstance(owner, ast.Name) and owner.id in imported for owner in owners):
            yield node.lineno
