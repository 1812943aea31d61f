"""selects: PEFT's rule of which modules a configuration adapts; what is written selects what the tensors are for."""

import json

import numpy as np
import pytest

from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import convert_adapter
from mindlora.files.adapters.dialects.peft_config import selects
from mindlora.files.adapters.expert_pairs import stack_pairs
from tests.support.adapter_samples import CONFIG

LAYERS = [f"model.layers.{layer}" for layer in (0, 1)]
Q = [f"{layer}.self_attn.q_proj" for layer in LAYERS]
MLP = [f"{layer}.mlp.up_proj" for layer in LAYERS]
STACKS = [f"{layer}.mlp.experts.{weight}" for layer in LAYERS for weight in ("gate_up_proj", "down_proj")]
EXPERTS = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("selection", "modules", "parameters"),
    [
        ({"target_modules": ["q_proj"]}, Q, []),
        ({"target_modules": ["q_proj", "of_no_layer"]}, Q, []),
        ({"target_modules": Q}, Q, []),
        ({"target_modules": r"model\..*\.q_proj"}, Q, []),
        ({"target_modules": "all-linear"}, Q, []),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, Q[1:], []),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"}, Q, []),
        ({"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["up_proj"]}, Q, []),
        ({"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "down_proj"]}, Q, STACKS),
        ({"target_parameters": STACKS}, [], STACKS),
    ],
)
def test_what_a_selection_is_of(selection, modules, parameters):
    assert selects(selection, modules, parameters)


@pytest.mark.parametrize(
    ("selection", "modules", "parameters"),
    [
        ({}, Q, []),
        ({"target_modules": ["q_proj"]}, Q + MLP, []),
        ({"target_modules": ["proj"]}, Q, []),
        ({"target_modules": r"layers\.\d\.self_attn\.q_proj"}, Q, []),
        ({"target_modules": "all-linear"}, [*Q, "lm_head"], []),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, Q, []),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "blocks"}, Q[:1], []),
        ({"target_modules": ["q_proj"], "exclude_modules": "model.layers.0.*"}, Q, []),
        ({"target_modules": ["q_proj", *EXPERTS]}, Q, STACKS),
        ({"target_modules": ["q_proj", *EXPERTS], "target_parameters": STACKS}, Q, STACKS),
        ({"target_modules": r".*\.(q_proj|up_proj)", "target_parameters": STACKS}, Q, STACKS),
        ({"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj"]}, Q, STACKS),
        ({"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj"]}, Q, []),
        ({"target_modules": ["q_proj"], "target_parameters": STACKS}, [], STACKS),
    ],
)
def test_what_it_is_not_of(selection, modules, parameters):
    assert not selects(selection, modules, parameters)


def adapter_of(single, ranks=(2, 2), **fields):
    """An adapter of q_proj and of three experts in each layer, in stacks or one by one."""
    adapter, rng = Adapter({}, **fields), np.random.default_rng(1)
    sizes = {f"model.layers.{layer}.attention.wq": (8, 8) for layer in (0, 1)}
    for layer in LAYERS:
        for expert in range(3):
            sizes |= {f"{layer}.mlp.experts.{expert}.{name}": (5, 8) for name in EXPERTS[:2]}
            sizes[f"{layer}.mlp.experts.{expert}.down_proj"] = (8, 5)
    for path, (rows, columns) in sizes.items():
        rank = ranks["experts" in path]
        adapter.tensors[path, "A"] = rng.normal(size=(rank, columns)).astype(np.float32)
        adapter.tensors[path, "B"] = rng.normal(size=(rows, rank)).astype(np.float32)
        adapter.alphas[path] = 4.0
    if not single:
        stack_pairs(adapter)
    return adapter


@pytest.mark.parametrize("ranks", [(2, 2), (4, 2)], ids=["one rank", "rank_pattern"])
@pytest.mark.parametrize("single", [True, False], ids=["from single", "from stacked"])
@pytest.mark.parametrize("experts", [None, "stacked", "single"])
def test_the_configuration_of_experts_is_that_of_the_form_they_are_written_in(tmp_path, single, experts, ranks):
    selection = {"target_modules": ["q_proj", *EXPERTS]} if single else {"target_modules": ["q_proj"]}
    if not single:
        selection["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter_files.write(adapter_of(single, ranks, selection=selection), str(tmp_path / "in"))
    convert_adapter(str(tmp_path / "in"), str(tmp_path / "out"), "peft", experts=experts)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    is_single = experts == "single" or experts is None and single
    names = [f"{layer}.mlp.experts.{expert}.{name}" for layer in LAYERS for expert in range(3) for name in EXPERTS]
    assert selects(config, Q + names if is_single else Q, [] if is_single else STACKS)
    if is_single:
        assert "target_parameters" not in config
    else:
        assert not any(name.endswith(tuple(EXPERTS)) for name in config["target_modules"])
    # As they were, where nothing has changed.
    if is_single == single:
        assert {field: config[field] for field in selection} == selection
