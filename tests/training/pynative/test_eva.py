"""mindlora eva on a YAML of MindFormers' PyNative Trainer, which then trains the adapter."""

import json

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from mindlora.files.adapters import files as adapter_files
from tests.support import pynative_runs
from tests.support.pynative_runs import BASE_FILE, IGNORED, LORA, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
ROWS = 8
LORA_WITH_HEAD = {**LORA, "target_modules": f"{LORA['target_modules']}|output_layer"}
COMPUTING = """
from tests.support import pynative_cpu
pynative_cpu.install()
from mindlora import cli
arguments = ["--rows", "8", "--batch-size", "8", "--rho", "2"]
several = ["--pet_config.adapters", "[{name: one}]"]
codes = [cli.main(["eva", "eva.yaml", "--output", "eva", *arguments])]
codes.append(cli.main(["eva", "eva.yaml", "--output", "other", *several]))
print(*codes)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a base and rows."""
    folder = tmp_path_factory.mktemp("eva")
    pynative_runs.write_base(folder / "base", folder / "hf")
    pynative_runs.write_data(folder / "rows.mindrecord", rows=ROWS)
    return folder


def configuration(folder, **changes):
    changes = {"lora_config": LORA_WITH_HEAD, **changes}
    config = pynative_runs.tiny_config("qwen3", folder / "rows.mindrecord", 2, **changes)
    config["checkpoint"] = {"load_path": str(folder / "base"), "no_load_optim": True, "enable_save": False}
    return config


@pytest.fixture(scope="module")
def computed(folder):
    """What computing EVA's adapter printed."""
    (folder / "eva.yaml").write_text(yaml.safe_dump(configuration(folder)), encoding="utf-8")
    run = pynative_runs.python(["-c", COMPUTING], folder)
    assert run.stdout.splitlines()[-1] == "0 1", run.stderr[-3000:]
    return run


@pytest.fixture(scope="module")
def message(folder, computed):
    """What refused a run that begins with it, or None."""
    nodes = yaml.safe_load(computed.stdout.rpartition("\n")[0].rpartition("0 1")[0])
    callbacks = [
        {"type": "LoraCheckpoint", "save_steps": 2, "directory": str(folder / "peft")},
        {"type": "RecordLosses", "directory": str(folder / "trained")},
    ]
    changes = {"callbacks": callbacks, "pet_config": nodes["pet_config"]}
    changes["lora_config"] = {**LORA_WITH_HEAD, **nodes.get("lora_config", {})}
    plain = [{"type": "RecordLosses", "directory": str(folder / "plain")}]
    configs = [configuration(folder, **changes), configuration(folder, callbacks=plain)]
    return pynative_runs.series(configs, folder)


def inputs_of_the_first_cell(folder):
    """Returns what linear_qkv of the first layer reads where a token counts, in NumPy: the normalized embeddings."""
    base = load_file(folder / "base" / BASE_FILE)
    tokens, labels = (array[:, part] for array, part in zip(pynative_runs.counting_rows(ROWS), (np.s_[:-1], np.s_[1:])))
    rows = base["embedding.word_embeddings.weight"][tokens]
    rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)
    # A label is that of the next token, which counts.
    counted = np.pad(labels[:, :-1] != IGNORED, ((0, 0), (1, 0)))
    return (rows * base["decoder.layers.0.input_layernorm.weight"])[counted]


def test_the_directions_are_those_of_what_a_cell_reads(folder, computed):
    a = adapter_files.read(str(folder / "eva")).pair("model.layers.0.attention.wq")[0]
    rows = inputs_of_the_first_cell(folder)
    directions = np.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][: len(a)]
    np.testing.assert_allclose(np.abs(a @ directions.T), np.eye(len(a)), atol=1e-2)


@shows("eva", "qwen3", trainer="pynative")
def test_a_run_begins_with_them_as_the_base_and_trains(folder, message):
    assert message == [None, None]
    losses, plain = (pynative_runs.losses(folder / name) for name in ("trained", "plain"))
    assert losses[0] == pytest.approx(plain[0], rel=1e-6) and losses[1] != plain[1]
    ranks = {
        name: array.shape[0] for name, array in pynative_runs.trained(folder / "trained").items() if "lora_a" in name
    }
    assert sum(ranks.values()) == 9 * LORA["lora_rank"] and len(set(ranks.values())) > 1
    settings = json.loads((folder / "peft" / "step_2" / "adapter_config.json").read_text(encoding="utf-8"))
    assert settings["rank_pattern"]


def test_one_adapter_is_made(computed):
    assert "pet_config has adapters, and EVA makes one" in computed.stderr
