"""Every YAML in configs/qwen3/, shrunk: it is checked, it builds its network, and its header says what follows."""

import os
import re

import pytest

from mindlora import cli
from mindlora.models.architectures.registry import by_model_type
from mindlora.network.quantized.nf4 import parameter_count
from mindlora.network.tree import lora_cells
from mindlora.run.checks.cpu import check_cpu
from mindlora.run.plan.run import read_run
from mindlora.run.yaml_run import YamlRun
from mindlora.training.launch import launcher, preflight
from tests.configs.test_configs_build import build, callbacks, train_step
from tests.configs.test_configs_text import arguments, commands, merged, number
from tests.conftest import ROOT
from tests.support.config_files import MCORE, TINY_MCORE, load, read
from tests.support.mcore_networks import mcore_context

SMALL = {
    "seq_length": 16,
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@pytest.fixture(autouse=True)
def _as_in_a_run(monkeypatch):
    monkeypatch.setenv("RUN_MODE", "finetune")
    with mcore_context():
        yield


def shrunk(path):
    """Returns a YAML with its sizes shrunk, as mindlora-run prepares it, on one device."""
    config = load(path)
    model = config.model.model_config
    model.update({key: value for key, value in SMALL.items() if key in model})
    one_device = {"data_parallel": 1, "model_parallel": 1, "expert_parallel": 1, "use_seq_parallel": False}
    config.parallel_config.update({key: one for key, one in one_device.items() if key in config.parallel_config})
    preflight.prepare(config)
    return config


def test_the_configs_are_there():
    names = {os.path.basename(path) for path in MCORE}
    assert names == {"lora_qwen3_8b.yaml", "qlora_qwen3_8b.yaml", "lora_qwen3_30b_a3b.yaml", "qlora_qwen3_30b_a3b.yaml"}


@pytest.mark.parametrize("path", MCORE)
def test_it_builds_its_network_with_adapters_train_step_and_callbacks(path):
    config = shrunk(path)
    network = build(config)
    model, pet = config.model.model_config, config.model.model_config.pet_config
    cells = dict(lora_cells(network))
    ends = {"self_attention.linear_qkv", "self_attention.linear_proj"}
    if pet.target_modules == "all-linear":
        ends |= {"mlp.linear_fc1", "mlp.linear_fc2"}
    assert set(cells) == {f"decoder.layers.{layer}.{end}" for layer in range(2) for end in ends}
    for cell in cells.values():
        assert "recompute" in cell.get_scope()
        assert (cell.lora_rank, cell.lora_alpha, cell.dropout_rate) == (16, 32, 0.05)
        assert str(cell.weight.dtype) == ("UInt8" if pet.quantize_base else "BFloat16")
        assert {str(p.dtype) for p in cell.lora_parameters()} == {"Float32"} and str(cell.dtype) == "BFloat16"
    assert {p.name for p in network.trainable_params()} == {p.name for c in cells.values() for p in c.lora_parameters()}
    assert sum(p.size for p in network.trainable_params()) == adapter_count(model, pet)
    held = "expert_load", "expert_bias", "fi_accu", "dropout"
    beside = sum(p.size for p in network.get_parameters() if any(word in p.name for word in held))
    assert parameter_count(network) - beside == base_count(model) + adapter_count(model, pet)
    experts = [p for p in network.get_parameters() if p.name.endswith(("experts.weight1", "experts.weight2"))]
    assert len(experts) == (4 if model.num_experts else 0)
    assert {str(p.dtype) for p in experts} <= {"UInt8" if pet.quantize_base else "BFloat16"}
    step = train_step(config, network)
    assert type(step).__name__ == "LoraTrainOneStepCell" and step.use_clip_grad
    assert [type(c).__name__ for c in callbacks(config, step)] == [node["type"] for node in config.callbacks]


@pytest.mark.parametrize("path", MCORE)
def test_the_figures_are_those_of_the_shapes(path):
    config, text = load(path), read(path)
    model, pet = config.model.model_config, config.model.model_config.pet_config
    base, adapter = base_count(model), adapter_count(model, pet)
    trainable, total, percent = re.search(
        r"^# trainable parameters: ([\d,]+) of ([\d,]+) \(([\d.]+) %\)$", text, re.M
    ).groups()
    assert (number(trainable), number(total)) == (adapter, base + adapter)
    assert percent == f"{100 * adapter / (base + adapter):.4f}"
    size = file_size(model, pet)
    file, folder = re.search(r"^# adapter file: ([\d.]+) MB; .*AdamW: ([\d.]+) MB$", text, re.M).groups()
    assert (file, folder) == (f"{size / 1e6:.1f}", f"{(size + 8 * adapter) / 1e6:.1f}")


@pytest.mark.parametrize("path", [path for path in MCORE if "qlora_" in path])
def test_the_bytes_of_a_4_bit_base_are_those_that_a_plan_counts(path):
    text = read(path)
    packed = number(re.search(r"^#   weights in NF4 +([\d,]+) x 4.129 / 8 bytes ", text, re.M)[1])
    others = number(re.search(r"^#   other weights +([\d,]+) x 2 bytes ", text, re.M)[1])
    base = [weight for weight in read_run(merged(path)).weights if not weight.adapter]
    assert sum(weight.count for weight in base if weight.dtype == "uint8") == packed
    assert sum(weight.count for weight in base if weight.dtype != "uint8") == others
    size = sum(weight.size for weight in base if weight.dtype == "uint8" or weight.part.endswith(("scales", "offsets")))
    assert abs(size - packed * 4.129 / 8) < 1e-4 * size


@pytest.mark.parametrize("path", MCORE)
def test_its_keys_are_known_and_its_commands_are_ones_that_we_have(path, monkeypatch):
    from mindformers.wrapper import MFTrainOneStepCell

    from mindlora import cli
    from mindlora.run.checks.pet_config import PetLoraConfig

    given = merged(path)
    assert set(given["model"]["model_config"]["pet_config"]) <= arguments(PetLoraConfig) | {"pet_type"}
    assert set(given["runner_wrapper"]) <= arguments(MFTrainOneStepCell)
    monkeypatch.chdir(ROOT)
    for words in commands(path):
        if words[0] == "mindlora":
            cli._parser().parse_args(words[1:])
        elif words[0] == "mindlora-run":
            preflight.prepare(launcher.build_config(words[1:]))
        else:
            assert words[0] == "bash" and path in words[2]


# Helpers


def in_and_out(model, pet):
    """Returns (in, out, members in Hugging Face's names) of the linear cells with an adapter in one layer."""
    record = by_model_type(model.architectures)
    sizes = {path: size for path, size in record.linear_sizes(dict(model)).items() if ".layers.0." in path}
    all_of_them = pet.target_modules == "all-linear"
    members = {"linear_qkv": 3, "linear_fc1": 2}
    return [
        (in_channels, out, members.get(path.rpartition(".")[2], 1))
        for path, (out, in_channels) in sizes.items()
        if all_of_them or "self_attention" in path
    ]


def adapter_count(model, pet):
    """Returns the number of elements of all A and B."""
    return model.num_hidden_layers * pet.lora_rank * sum(i + out for i, out, _ in in_and_out(model, pet))


def file_size(model, pet):
    """Returns the bytes of A and B in a PEFT folder, where members of a joined cell have an A each."""
    return 4 * model.num_hidden_layers * pet.lora_rank * sum(i * each + out for i, out, each in in_and_out(model, pet))


def base_count(model):
    """Returns the number of the base's weights."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    attention = 2 * heads * model.head_dim * hidden + 2 * model.num_key_value_heads * model.head_dim * hidden
    norms = 2 * hidden + 2 * model.head_dim
    feed_forward = 3 * hidden * model.intermediate_size
    if model.num_experts:
        feed_forward = model.num_experts * (3 * hidden * model.moe_intermediate_size + hidden)
    layers = model.num_hidden_layers * (attention + norms + feed_forward)
    return 2 * model.vocab_size * hidden + hidden + layers


@pytest.mark.parametrize("path", TINY_MCORE)
def test_the_tiny_ones_can_run_on_a_cpu(path):
    assert not list(check_cpu(YamlRun(load(path))))


def test_the_figures_of_the_tiny_one_are_those_of_the_plan(capsys):
    path = os.path.join(ROOT, "configs", "tiny", "lora_qwen3_tiny_cpu.yaml")
    assert cli.main(["plan", path]) == 0
    planned = capsys.readouterr().out
    trained, whole = re.search(r"trainable parameters: ([\d,]+) of ([\d,]+)", read(path)).groups()
    assert f"parameters    {whole}, of which {trained} are trained" in planned
