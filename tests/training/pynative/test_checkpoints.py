"""A base that is loaded, LoraCheckpoint's PEFT folders, and a run that goes on, under MindFormers' PyNative Trainer."""

import json
import shutil

import numpy as np
import pytest
from mindspore import Tensor
from mindspore.dataset import MindDataset
from safetensors.numpy import load_file

from mindlora import cli, load_lora, save_lora
from mindlora.core.mindformers_version import cannot_be_imported, mindformers_version
from mindlora.files.adapters.convert import Heads, convert_adapter
from mindlora.files.base.convert import convert_base
from mindlora.files.base.merge import merge_checkpoint
from tests.support import mcore_networks, pynative_runs
from tests.support.pynative_runs import BASE_FILE, BRIDGE, LORA, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
only_with_graph_mode = pytest.mark.skipif(
    cannot_be_imported(mindformers_version() or "0"), reason="MindFormers 2.0 is imported with hyper_parallel alone."
)
STEPS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the bases hf and base, a run of four steps, whole, and resumed, which repeats its last two."""
    folder = tmp_path_factory.mktemp("checkpoints")
    pynative_runs.write_data(folder / "rows.mindrecord", rows=16)
    pynative_runs.write_base(folder / "base", folder / "hf")
    saved = {"enable_save": True, "save_path": str(folder / "saved"), "save_interleaved_steps": 2}
    config = pynative_runs.bridged("qwen3", folder / "rows.mindrecord", STEPS)
    for name, checkpoint in (
        ("whole", {**saved, "load_path": str(folder / "base"), "no_load_optim": True}),
        ("resumed", {"enable_save": False, "load_path": str(folder / "saved" / "iteration_00000002")}),
    ):
        # The best is that of the highest loss; MindFormers saves between its steps.
        saving = {"type": "LoraCheckpoint", "save_steps": 3, "best_mode": "max"}
        saving["directory"] = str(folder / f"{name}_adapters")
        run = pynative_runs.launch(
            {**config, "checkpoint": checkpoint, "callbacks": [saving], "pet_config": {"lora_rank": 4}},
            folder / name,
            "--register_path",
            BRIDGE,
        )
        assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    return folder


@shows("resume", "qwen3", trainer="pynative")
def test_a_resumed_run_is_the_rest_of_the_whole_one(runs):
    whole, resumed = (pynative_runs.losses(runs / name) for name in ("whole", "resumed"))
    assert resumed == whole[2:] and len(whole) == STEPS
    whole, resumed = (pynative_runs.trained(runs / name) for name in ("whole", "resumed"))
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)


def test_the_best_adapter_is_that_of_the_metric_whether_the_run_was_resumed_or_not(runs):
    best = {"step": 3, "loss": pytest.approx(np.mean(pynative_runs.losses(runs / "whole")[:3]))}
    for name in ("whole", "resumed"):
        folder = runs / f"{name}_adapters"
        assert json.loads((folder / "best" / "best.json").read_text("utf-8")) == best
        adapter, expected = (load_file(folder / at / "adapter_model.safetensors") for at in ("best", "step_3"))
        assert all(np.array_equal(adapter[key], expected[key]) for key in expected)


@only_with_graph_mode
def test_the_base_means_what_it_means_in_graph_mode(runs, graph_mode, mindformers):
    """Both models order the rows of joined cells alike: with B zero, the first loss is the base's."""
    data = MindDataset(str(runs / "rows.mindrecord"), shuffle=False).batch(4)
    batch = next(data.create_dict_iterator())
    network = mcore_networks.tiny_qwen3(
        num_hidden_layers=pynative_runs.QWEN3["num_hidden_layers"],
        pad_token_id=pynative_runs.QWEN3["pad_token_id"],
        ignore_token_id=pynative_runs.IGNORED,
    )
    for name, array in load_file(runs / "base" / BASE_FILE).items():
        network.parameters_dict()[name].set_data(Tensor(array))
    network.set_train()

    loss = mcore_networks.Loss(network)(batch["input_ids"], batch["labels"])

    np.testing.assert_allclose(pynative_runs.losses(runs / "whole")[0], loss.asnumpy()[0], rtol=1e-4)


@only_with_graph_mode
def test_an_adapter_goes_to_peft_to_graph_mode_and_back_bit_for_bit(runs, graph_mode, mindformers):
    step, base = runs / "saved" / f"iteration_{STEPS:08d}", ["--base", str(runs / "whole.yaml")]
    assert cli.main(["adapter", "convert", str(step), str(runs / "peft"), "--to", "peft", *base]) == 0
    network = mcore_networks.tiny_qwen3(num_hidden_layers=pynative_runs.QWEN3["num_hidden_layers"])
    load_lora(network, runs / "peft")
    save_lora(network, runs / "graph")
    words = [str(runs / "graph"), str(runs / "back"), "--to", "pynative", *base]
    assert cli.main(["adapter", "convert", *words]) == 0

    trained = {name: array for name, array in load_file(step / BASE_FILE).items() if "lora" in name}
    found = load_file(runs / "back" / BASE_FILE)
    assert found.keys() == trained.keys() and len(found) == 16
    assert all(found[name].tobytes() == trained[name].tobytes() for name in trained)


@shows("resume", "deepseek_v3", trainer="pynative")
@shows("experts", "deepseek_v3", trainer="pynative")
def test_deepseek_goes_on_too_and_its_experts_go_to_peft_and_back(tmp_path):
    """Without a base: what random numbers have made of one is in MindFormers' checkpoint."""
    pynative_runs.write_data(tmp_path / "rows.mindrecord", rows=16)
    saved = {"enable_save": True, "save_path": str(tmp_path / "saved"), "save_interleaved_steps": 2}
    nodes = {"lora_config": pynative_runs.LORA_WITH_EXPERTS}
    config = pynative_runs.bridged("deepseek_v3", tmp_path / "rows.mindrecord", STEPS, **nodes)
    for name, checkpoint in (("whole", saved), ("resumed", {"enable_save": False, "load_path": saved["save_path"]})):
        saving = {"type": "LoraCheckpoint", "save_steps": STEPS, "directory": str(tmp_path / f"{name}_adapters")}
        changes = {"checkpoint": checkpoint, "callbacks": [saving]}
        run = pynative_runs.launch({**config, **changes}, tmp_path / name, "--register_path", BRIDGE)
        assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
        if name == "whole":
            # MindFormers goes on from the newest one.
            shutil.move(tmp_path / "saved" / "iteration_00000004", tmp_path / "last")
            (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2", encoding="utf-8")

    whole, resumed = (pynative_runs.losses(tmp_path / name) for name in ("whole", "resumed"))
    assert resumed == whole[2:] and len(whole) == STEPS
    folders = [tmp_path / f"{name}_adapters" / f"step_{STEPS}" for name in ("whole", "resumed")]
    whole, resumed = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert any("q_a_proj" in name for name in whole) and any("shared_experts" in name for name in whole)
    assert any("mlp.experts.base_layer.lora_A" in name for name in whole)
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)

    sizes = {"heads": Heads(4, 4, 8, q_rank=8), "architecture": "deepseek_v3"}
    peft, back = tmp_path / "peft", tmp_path / "back"
    convert_adapter(str(tmp_path / "last"), str(peft), "peft", **sizes)
    convert_adapter(str(peft), str(back), "pynative", **sizes)
    converted, again = (load_file(peft / "adapter_model.safetensors"), load_file(back / pynative_runs.BASE_FILE))
    saved = load_file(tmp_path / "last" / pynative_runs.BASE_FILE)
    assert converted.keys() == whole.keys() and any("weight1_lora_b" in name for name in again)
    assert all(np.array_equal(converted[name], whole[name]) for name in whole)
    assert all(np.array_equal(again[name], saved[name]) for name in saved if "lora" in name)


def test_a_folder_for_peft_holds_what_was_trained(runs):
    folder = runs / "whole_adapters" / f"step_{STEPS}"
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert (settings["r"], settings["lora_alpha"]) == (LORA["lora_rank"], LORA["lora_alpha"])
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"} <= set(settings["target_modules"])
    again = load_file(runs / "resumed_adapters" / f"step_{STEPS}" / "adapter_model.safetensors")
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        np.testing.assert_array_equal(again[name], tensor)


def test_merged_into_the_base_it_is_the_trained_model(runs):
    """The delta that Hugging Face's base gets is scale B A, cell by cell, once it is in MindFormers' names again."""
    adapter, merged = runs / "whole_adapters" / f"step_{STEPS}", runs / "merged"
    merge_checkpoint(str(runs / "hf"), str(adapter), str(merged))
    convert_base(str(merged), str(runs / "merged.safetensors"), None, "mcore")
    before, after = load_file(runs / "base" / BASE_FILE), load_file(runs / "merged.safetensors")
    trained = pynative_runs.trained(runs / "whole")
    cells = sorted(name[: -len(".lora_a")] for name in trained if name.endswith(".lora_a"))
    assert len(cells) == 8
    scale = LORA["lora_alpha"] / LORA["lora_rank"]
    for cell in cells:
        delta = scale * trained[f"{cell}.lora_b"] @ trained[f"{cell}.lora_a"]
        assert np.abs(delta).max() > 1e-3
        np.testing.assert_allclose(after[f"{cell}.weight"] - before[f"{cell}.weight"], delta, atol=1e-6)
