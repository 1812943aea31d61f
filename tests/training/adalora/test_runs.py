"""use_adalora from a YAML: what mindlora-run adds and refuses; two processes that decide alike on a Qwen3."""

import mindspore as ms
import numpy as np
import pytest
import yaml
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, load_lora, save_lora
from mindlora.core.errors import ConfigError, LoraError
from mindlora.files.adapters import files as adapter_files
from mindlora.network.tree import lora_cells
from mindlora.network.variants.adalora import AdaLoRADense
from mindlora.training.report.history import read_history
from mindlora.training.report.rank_suggestion import suggest_ranks
from tests.conftest import ROOT
from tests.support import tiny_runs
from tests.support.mcore_networks import tiny_config
from tests.support.networks import as_array, randomize
from tests.support.ranks import run_ranks
from tests.support.what_runs import shows

PET = {
    **{"pet_type": "lora", "target_modules": ".*wq|.*wv|.*w2", "lora_alpha": 8, "use_adalora": True},
    **{"init_r": 4, "target_r": 2, "tinit": 2, "tfinal": 3, "deltaT": 2},
}
STEPS = 10


CALLBACKS = [{"type": "AdapterHealth", "every_steps": 1}, {"type": "LoraCheckpoint", "save_steps": 4, "keep_last": 9}]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The output of a run of a Llama in one process, in PyNative; a Qwen3 has a graph in tests/e2e."""
    folder = tmp_path_factory.mktemp("one")
    tiny_runs.write_data(folder / "rows.mindrecord", 4 * STEPS)
    config = tiny_runs.tiny_config(folder / "rows.mindrecord", 1, CALLBACKS)
    config["context"]["mode"] = 1
    config["model"]["model_config"]["pet_config"] = {**PET, "lora_dropout": 0.0}
    process = tiny_runs.launch(config, folder / "output")
    assert process.returncode == 0, process.stderr[-3000:]
    return folder / "output"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The output of a run with two processes, which compares all ranks' adapters after each step."""
    folder = tmp_path_factory.mktemp("adalora")
    tiny_runs.write_data(folder / "rows.mindrecord", 4 * STEPS)
    pet = {**PET, "target_modules": ["linear_qkv", "linear_proj", "linear_fc2"], "lora_dropout": 0.0}
    config = tiny_config(str(folder / "rows.mindrecord"), 1, CALLBACKS, pet)
    config["runner_config"]["batch_size"] = 2
    config["use_parallel"] = True
    config["runner_wrapper"]["gradient_exchange"] = {"type": "dense", "check_every": 1}
    config["parallel_config"] = {**(config.get("parallel_config") or {}), "data_parallel": 2}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    script = f"{ROOT}/scripts/run_mindformer.py"
    run_ranks(2, folder, script, "--config", folder / "run.yaml", "--output_dir", folder / "output")
    return folder / "output"


@shows("adalora", "qwen3", place="processes")
def test_two_processes_agree_on_each_step_and_end_with_the_budget(two):
    history = read_history(str(two))
    ranks = [[cell["rank"] for cell in record["health"]["cells"].values()] for record in history.health]
    left = [sum(step) for step in ranks]
    # All of them up to step 3, fewer at even steps, and the target from step 7 on.
    assert left[:3] == [12] * 3 and left[3] < 12 and left[6:] == [6] * 4
    (event,) = [event for event in history.events if event["event"] == "rank_budget"]
    assert event["step"] == 7 and event["message"].startswith("AdaLoRA has allocated 6 ranks: ")
    assert not [event for event in history.events if event["event"] == "adapter_health"]


def test_ranks_can_be_suggested_from_it(one):
    suggestion = suggest_ranks(read_history(str(one)))
    assert (suggestion.before, len(suggestion.groups)) == (6, 3) and 3 <= suggestion.spent <= 6


def test_its_adapter_is_a_plain_lora_of_these_ranks(one, make_llama):
    folder = str(one / "lora_checkpoint" / "step_10")
    adapter = adapter_files.read(folder)
    assert adapter.allocation["target"] == 6
    assert adapter_files.read(str(one / "lora_checkpoint" / "step_4")).allocation["rank"] > 6
    network = make_llama(num_layers=1)
    load_lora(network, folder, on_base_mismatch="ignore")
    assert sum(cell.lora_rank for _, cell in lora_cells(network)) == 6


def test_in_the_same_yaml_an_adapter_is_used_with_the_ranks_that_it_has(pynative_mode, make_llama, tmp_path):
    from mindformers.pet import get_pet_model

    from mindlora.training.launch import hooks  # noqa: F401

    trained = make_llama()
    apply_lora(trained, LoraConfig(**{key: value for key, value in PET.items() if key != "pet_type"}))
    for number, (_, cell) in enumerate(lora_cells(trained)):
        randomize(cell.lora_parameters(), number)
        weights = np.arange(4) < number
        cell.mindpet_delta_lora_lambda.set_data(Tensor(weights.astype(np.float32)))
    save_lora(trained, str(tmp_path / "adapter"))
    base = make_llama()
    ms.load_param_into_net(base, {p.name: p for p in trained.get_parameters() if "mindpet" not in p.name})
    model = get_pet_model(base, {**PET, "adapter_path": str(tmp_path / "adapter")})
    cells = dict(lora_cells(model))
    assert not any(isinstance(cell, AdaLoRADense) for cell in cells.values())
    assert [cell.lora_rank for cell in cells.values()] == [1, 2, 3, 4, 4]
    assert {p.name.rpartition("_")[2] for p in model.trainable_params()} == {"a", "b"}
    for path, cell in lora_cells(trained):
        if path in cells:
            a, b = cells[path].pair()
            found, expected = cells[path].scale * b @ a, cell.scale * cell.pair()[1] @ cell.pair()[0]
            np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def prepared(tmp_path, pet, **changes):
    """Returns a training YAML after mindlora-run's checks."""
    from mindformers.tools.register import MindFormerConfig

    from mindlora.training.launch import preflight

    tiny_runs.write_data(tmp_path / "rows.mindrecord", 8)
    config = tiny_runs.tiny_config(tmp_path / "rows.mindrecord", 1, [], run_mode="finetune")
    config["model"]["model_config"]["pet_config"] = {**PET, **pet}
    for node, keys in changes.items():
        config[node].update(keys)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    config = MindFormerConfig(str(tmp_path / "run.yaml"))
    preflight.prepare(config)
    return config


def test_mindlora_run_adds_what_it_needs(tmp_path):
    config = prepared(tmp_path, {})
    assert "RankBudget" in [callback["type"] for callback in config.callbacks] and config.runner_wrapper.rank_budget
    config = prepared(tmp_path, {"adapter_path": "adapter"})
    assert "RankBudget" not in [callback["type"] for callback in config.callbacks]
    assert not config.runner_wrapper.get("rank_budget")


@pytest.mark.parametrize(
    "pet, changes, message",
    [
        ({"target_r": 5}, {}, "target_r is 5 and init_r is 4: AdaLoRA only takes ranks away."),
        ({"use_dora": True}, {}, "use_adalora is True and use_dora is True, which AdaLoRA does not have."),
        (
            {},
            {"runner_wrapper": {"type": "MFTrainOneStepCell"}, "context": {"device_target": "Ascend"}},
            "pet_config.use_adalora is True, but ranks are allocated by mindlora's train step, alone or in data",
        ),
        (
            {},
            {"runner_config": {"sink_mode": True, "sink_size": 4}},
            "pet_config.use_adalora is True and runner_config.sink_size is 4: ranks are planned for each step",
        ),
    ],
    ids=["target above init", "DoRA", "train step", "data sinking"],
)
def test_what_cannot_be_is_refused_before_anything_is_built(tmp_path, pet, changes, message):
    with pytest.raises(LoraError) as error:
        prepared(tmp_path, pet, **changes)
    assert isinstance(error.value, ConfigError) and message in str(error.value)


def test_the_base_under_a_new_cell_is_untouched(make_llama):
    network = make_llama()
    before = {p.name: as_array(p) for p in network.get_parameters()}
    apply_lora(network, LoraConfig(use_adalora=True, target_modules="all-linear"))
    for name, array in before.items():
        np.testing.assert_array_equal(as_array(dict(network.parameters_and_names())[name]), array)
