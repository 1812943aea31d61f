"""mindlora doctor checked against MindFormers: configurations, the cells it builds, what mindlora-run refuses."""

import glob
import json
import os

import pytest

from mindlora.cli.doctor.examination import check_yaml
from mindlora.models.architectures.llama import linear_sizes
from tests.conftest import ROOT
from tests.support.doctor_findings import DATA

CONFIGS = sorted(glob.glob(os.path.join(ROOT, "configs", "*", "*.yaml")))


@pytest.mark.parametrize("path", CONFIGS, ids=[os.path.basename(path) for path in CONFIGS])
def test_the_configurations_of_the_project_have_no_faults(path, mindformers):
    findings = check_yaml(path)
    assert {finding.severity for finding in findings} == {"note"}
    assert DATA in [finding.key for finding in findings]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"n_kv_heads": None, "intermediate_size": None},
        {"intermediate_size": None, "multiple_of": 24},
        {"intermediate_size": None, "multiple_of": 1, "ffn_dim_multiplier": 1.3},
        {"qkv_concat": True},
        {"num_layers": 1, "num_heads": 8, "n_kv_heads": 2},
    ],
)
def test_cells_and_sizes_are_those_that_mindformers_builds(make_llama, keys):
    from mindlora.network.cells.linear_base import plain_linear_types

    network = make_llama(**keys)
    built = {
        path: (cell.out_channels, cell.in_channels)
        for path, cell in network.cells_and_names()
        if isinstance(cell, plain_linear_types())
    }
    config = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 64,
        "intermediate_size": 48,
        **keys,
    }
    assert linear_sizes(config) == built


def test_sizes_of_mindformers_default_model():
    assert linear_sizes({})["model.layers.31.feed_forward.w2"] == (4096, 11008)
    assert len(linear_sizes({})) == 32 * 7 + 1


def test_what_mindlora_run_refuses_is_found(mindformers, tmp_path):
    with open(os.path.join(ROOT, "configs", "tiny", "lora_llama_tiny_cpu.yaml"), encoding="utf-8") as file:
        text = file.read()
    path = tmp_path / "x.yaml"
    path.write_text(text.replace("use_past: False", "use_past: True"), encoding="utf-8")
    (finding,) = (finding for finding in check_yaml(str(path)) if finding.severity == "error")
    assert str(finding).startswith(
        "context.device_target is CPU, where this YAML cannot run. Set: model.model_config.use_past: False"
    )
    path.write_text(text.replace("runner_config:", "runner_config:\n  epoch: 3"), encoding="utf-8")
    (finding,) = (finding for finding in check_yaml(str(path)) if finding.severity == "error")
    assert str(finding).startswith("'epoch' is not a key of runner_config. Did you mean 'epochs'?")


@pytest.mark.parametrize("keys", [{"use_dora": True}, {"target_modules": ["embed_tokens", "wq"]}])
def test_parameters_of_variants_are_those_that_are_trained(keys, make_llama, tmp_path):
    from mindlora import LoraConfig, apply_lora

    pet = {"pet_type": "lora", "lora_rank": 2, "target_modules": ["wq", "w2"], **keys}
    model = {
        "type": "LlamaConfig",
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 64,
        "intermediate_size": 48,
        "pet_config": pet,
    }
    path = tmp_path / "x.yaml"
    path.write_text(json.dumps({"model": {"model_config": model, "arch": {"type": "LlamaForCausalLM"}}}))
    found = "".join(finding.found for finding in check_yaml(str(path)))
    report = apply_lora(make_llama(), LoraConfig.from_pet_config(pet))
    assert f"LoRA on {len(report.replaced)} cells, {report.trainable:,} parameters" in found
