"""The one function of MindFormers that is replaced: what it is told in each parallel mode, and that it still exists."""

import mindspore as ms
import pytest
from mindformers.parallel_core.training_graph.base_models.gpt import gpt_model

from mindlora.training.launch import hooks  # noqa: F401
from mindlora.training.model import replaced_names
from mindlora.training.model.replaced_names import allow_data_parallel

SIZES = {
    "tensor_model_parallel_size": 1,
    "data_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
}


@pytest.fixture
def told(monkeypatch):
    """What MindFormers' own function is told on eight devices."""
    calls = []
    monkeypatch.setattr(gpt_model, "initialize_model_parallel", lambda **sizes: calls.append(sizes))
    monkeypatch.setattr(replaced_names, "get_group_size", lambda: 8)
    allow_data_parallel()
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
    allow_data_parallel()
    assert gpt_model.initialize_model_parallel is replaced
