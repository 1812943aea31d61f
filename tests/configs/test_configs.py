"""Every YAML in configs/: shrunk, it builds all that it names; the figures above it are those of its real sizes."""

import glob
import inspect
import os
import re
import shlex

import numpy as np
import pytest
import yaml

from mindlora import LoRADense
from mindlora.nn.nf4 import parameter_count
from mindlora.nn.tree import lora_cells
from tests.conftest import ROOT

PATHS = sorted(os.path.relpath(path, ROOT) for path in glob.glob(os.path.join(ROOT, "configs", "*", "*.yaml")))
ON_ASCEND = [path for path in PATHS if not path.startswith(os.path.join("configs", "tiny"))]
QLORA = os.path.join("configs", "llama2", "qlora_llama2_7b.yaml")
ON_8 = [path for path in ON_ASCEND if path != QLORA]
ATTENTION = {"wq", "wk", "wv", "wo"}
LEAVES = {".*wq|.*wk|.*wv|.*wo": ATTENTION, "all-linear": ATTENTION | {"w1", "w2", "w3"}, None: set()}
SMALL = {
    "seq_length": 16,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 96,
    "intermediate_size": 80,
}


@pytest.fixture(autouse=True)
def _cpu(mindformers, graph_mode):
    import mindspore as ms

    import mindlora.plugin.hooks  # noqa: F401

    ms.set_context(device_target="CPU")


def test_the_configs_are_there():
    names = {os.path.relpath(path, "configs") for path in PATHS}
    for model in ("llama2/lora_llama2_7b", "llama2/lora_llama2_13b", "llama3/lora_llama3_8b"):
        assert {f"{model}.yaml", f"{model}_all_linear.yaml"} <= names
    assert len([name for name in names if name.startswith("tiny")]) == 3


# What a YAML builds


@pytest.mark.parametrize("path", PATHS)
def test_it_builds_the_network_it_names(path):
    config = prepared(path)
    network = build(config)
    model, pet = config.model.model_config, config.model.model_config.pet_config
    leaves = LEAVES[target_modules(config)]
    layers = [f"model.layers.{i}" for i in range(2)]
    cells = dict(lora_cells(network))
    assert set(cells) == {
        f"{layer}.{'attention' if leaf in ATTENTION else 'feed_forward'}.{leaf}" for layer in layers for leaf in leaves
    }
    shapes = linear_shapes(model)
    rank, alpha, dropout = pet_figures(pet)
    for name, cell in cells.items():
        out_channels, in_channels = shapes[name.rpartition(".")[2]]
        a, b = cell.lora_parameters()
        assert isinstance(cell, LoRADense)
        assert (a.shape, b.shape) == ((rank, in_channels), (out_channels, rank))
        assert cell.scale == alpha / rank and cell.dropout_rate == dropout
        assert str(a.dtype) == str(b.dtype) == "Float32"
        assert str(cell.weight.dtype).lower() == ("uint8" if path == QLORA else model.param_init_type)
        assert str(cell.dtype).lower() == model.compute_dtype
    trained = {p.name for p in network.trainable_params()}
    if pet:
        assert trained == {p.name for cell in cells.values() for p in cell.lora_parameters()}
        assert sum(p.size for p in network.trainable_params()) == adapter_count(config)
    else:
        assert trained == {p.name for p in network.get_parameters()}
    assert parameter_count(network) == base_count(config) + adapter_count(config)


@pytest.mark.parametrize("path", PATHS)
def test_it_builds_its_train_step_and_callbacks(path):
    config = prepared(path)
    network = build(config)
    step = train_step(config, network)
    assert type(step).__name__ == config.runner_wrapper.type == "LoraTrainOneStepCell"
    assert step.use_clip_grad and float(step.clip_grad_norm.clip_norm) == 1.0
    assert {p.name for p in step.optimizer.parameters} == {p.name for p in network.trainable_params()}
    built = [type(callback).__name__ for callback in callbacks(config, step)]
    assert built == [node["type"] for node in config.callbacks]


@pytest.mark.parametrize("path", ON_ASCEND)
def test_recompute_reaches_the_adapters(path):
    cells = dict(lora_cells(build(prepared(path))))
    assert cells and all("recompute" in cell.get_scope() for cell in cells.values())


@pytest.mark.parametrize("path", ON_8)
def test_the_products_of_an_adapter_are_split_by_rows_over_8_npus(path, monkeypatch):
    import mindspore as ms
    from mindformers.modules.transformer import op_parallel_config

    monkeypatch.setattr(op_parallel_config.D, "get_group_size", lambda: 8)
    config = prepared(path)
    parallel = {**config.parallel, "parallel_mode": {1: "semi_auto_parallel"}[config.parallel.parallel_mode]}
    ms.set_auto_parallel_context(device_num=8, global_rank=0, **parallel)
    try:
        assert ms.get_auto_parallel_context("enable_parallel_optimizer") is False
        assert ms.get_auto_parallel_context("strategy_ckpt_config")["only_trainable_params"] is False
        cells = dict(lora_cells(build(config)))
    finally:
        ms.reset_auto_parallel_context()
    for cell in cells.values():
        assert cell.low_rank.a_matmul.in_strategy == cell.low_rank.b_matmul.in_strategy == ((8, 1), (1, 1))


@pytest.mark.parametrize("path", ON_8)
def test_a_hugging_face_folder_loads_under_the_adapters(path, tmp_path):
    """With the calls that MindFormers makes on several devices, but for the strategies of a graph compiled for them."""
    import mindspore as ms
    from mindformers.utils.safetensors.convert_safetensors import _convert_index_json
    from safetensors.numpy import save_file

    config = prepared(path)
    assert (config.load_ckpt_format, config.auto_trans_ckpt) == ("safetensors", True)
    weights = hugging_face_weights(config.model.model_config)
    save_file(weights, str(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(
        str({"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}).replace("'", '"')
    )
    network = build(config)
    a, b = (np.array(p.asnumpy()) for p in next(lora_cells(network))[1].lora_parameters())
    _convert_index_json(str(tmp_path), str(tmp_path), network.convert_map_dict, False)
    ms.load_distributed_checkpoint(
        network=network,
        predict_strategy=None,
        unified_safetensors_dir=str(tmp_path),
        format="safetensors",
        name_map=network.obtain_name_map([str(tmp_path / "model.safetensors")]),
    )
    found = {p.name: p.astype(ms.float32).asnumpy() for p in network.get_parameters()}
    for name, weight in weights.items():
        rounded = ms.Tensor(weight).astype(ms.bfloat16).astype(ms.float32).asnumpy()
        expected = weight.astype(np.float32) if "norm" in name else rounded
        assert (found[network.convert_name(name)] == expected).all()
    adapter = next(lora_cells(network))[1]
    assert all((p.asnumpy() == before).all() for p, before in zip(adapter.lora_parameters(), (a, b)))


@pytest.mark.parametrize("path", [path for path in ON_ASCEND if "llama2" in path])
def test_the_loss_scale_in_the_last_lines_builds(path):
    text = read(path)
    given = yaml.safe_load(
        "\n".join(line[3:] for line in text.splitlines() if line.startswith("#   ")).partition("scale_sense:\n")[2]
    )
    config = prepared(path)
    config.runner_wrapper.scale_sense = type(config)(**given)
    step = train_step(config, build(config))
    assert type(step.loss_scaling_manager).__name__ == "DynamicLossScaleUpdateCell"
    assert step.loss_scaling_manager.get_loss_scale() == 65536


# What stands in a YAML


@pytest.mark.parametrize("path", PATHS)
def test_every_key_is_known(path, mindformers):
    import mindspore as ms
    from mindformers.core.callback import callback as mindformers_callbacks
    from mindformers.core.config_args import ContextConfig
    from mindformers.core.lr import CosineWithWarmUpLR
    from mindformers.core.optim import AdamW
    from mindformers.dataset import CausalLanguageModelDataset
    from mindformers.tools.register.template import CONFIG_NAME_TO_CLASS
    from mindformers.wrapper import MFTrainOneStepCell

    from mindlora.plugin import callbacks as ours
    from mindlora.plugin.pet_config import PetLoraConfig

    given = merged(path)
    model = given["model"]["model_config"]
    own = {
        callback["type"]: getattr(ours, callback["type"], None) or getattr(mindformers_callbacks, callback["type"])
        for callback in given["callbacks"]
    }
    assert set(given) <= set(CONFIG_NAME_TO_CLASS) | set(CONFIG_NAME_TO_CLASS["general_config"].keys())
    for node in ("runner_config", "parallel_config", "recompute_config"):
        assert set(given.get(node, {})) <= set(CONFIG_NAME_TO_CLASS[node].keys())
    assert set(given["context"]) <= set(ContextConfig.get_supported_kwargs())
    assert set(model) <= arguments(mindformers.LlamaConfig) | {"pet_config"}
    assert set(model.get("pet_config", {})) <= arguments(PetLoraConfig) | {"pet_type", "preset"}
    assert set(given["runner_wrapper"]) <= arguments(MFTrainOneStepCell)
    assert set(given["optimizer"]) <= arguments(AdamW, "__new__")
    assert set(given["lr_schedule"]) <= arguments(CosineWithWarmUpLR) | {"warmup_ratio"}
    for dataset in [given[name] for name in ("train_dataset", "eval_dataset") if name in given]:
        assert set(dataset) <= arguments(CausalLanguageModelDataset, "__new__")
        assert set(dataset["data_loader"]) <= arguments(ms.dataset.MindDataset) | {"dataset_dir"}
    for callback in given["callbacks"]:
        assert set(callback) <= arguments(own[callback["type"]])


@pytest.mark.parametrize("path", ON_ASCEND)
def test_the_official_launcher_finds_mindlora_by_one_line(path):
    text = read(path)
    assert text.count("    # auto_register: bridge.LlamaConfig\n") == 1
    given = yaml.safe_load(text.replace("# auto_register", "auto_register"))
    assert given["model"]["model_config"]["auto_register"] == "bridge.LlamaConfig"
    assert os.path.exists(os.path.join(ROOT, "mindlora", "plugin", "register_path", "bridge.py"))


# What stands above a YAML


@pytest.mark.parametrize("path", PATHS)
def test_the_figures_are_those_of_the_shapes(path):
    config, text = load(path), read(path)
    base, adapter = base_count(config), adapter_count(config)
    trained = adapter if config.model.model_config.pet_config else base
    line = re.search(r"^# trainable parameters: ([\d,]+) of ([\d,]+) \(([\d.]+) %\)$", text, re.M)
    trainable, total, percent = line.groups()
    assert number(trainable) == trained
    assert number(total) == base + adapter
    assert percent == f"{100 * trained / (base + adapter):.4f}"
    size = re.search(r"^# adapter file: ([\d.]+) MB", text, re.M)
    assert bool(size) == bool(adapter)
    if size:
        assert size[1] == f"{4 * adapter / 1e6:.1f}"
    for step_folder in re.findall(r"^# adapter file.*AdamW: ([\d.]+) MB", text, re.M):
        assert step_folder == f"{3 * 4 * adapter / 1e6:.1f}"


@pytest.mark.parametrize("path", ON_ASCEND)
def test_the_memory_is_what_its_factors_make(path):
    config = load(path)
    model = config.model.model_config
    lines = dict(re.findall(r"^#   (\w[\w ]+?)  +(.*? GB)$", read(path), re.M))
    tokens = config.runner_config.batch_size * model.seq_length
    factors = {
        "base weights": [base_count(config), 2],
        "adapter": [adapter_count(config), 4 + 4 + 8],
        "inputs of the layers": [model.num_layers, tokens, model.hidden_size, 2],
        "logits": [tokens, model.vocab_size, 4],
    }
    if path == QLORA:
        packed = model.num_layers * sum(out * in_ for out, in_ in linear_shapes(model).values())
        assert lines.pop("weights in NF4").split() == [
            f"{packed:,}",
            "x",
            "4.129",
            "/",
            "8",
            "bytes",
            f"{packed * 4.129 / 8e9:.1f}",
            "GB",
        ]
        factors["other weights"] = [factors.pop("base weights")[0] - packed, 2]
    assert set(lines) == set(factors)
    for name, line in lines.items():
        written, size = re.fullmatch(r"(.*?bytes).*? ([\d.]+) GB", line).groups()
        terms = re.search(r"\((.*)\)", written)
        if terms:
            written = written.replace(terms[0], str(sum(map(int, re.findall(r"\d+", terms[1])))))
        assert [number(factor) for factor in re.findall(r"[\d,]+", written)] == factors[name]
        assert size == f"{np.prod(factors[name], dtype=float) / 1e9:.1f}"


@pytest.mark.parametrize("path", PATHS)
def test_the_commands_are_ones_that_we_have(path, monkeypatch):
    from mindlora import cli
    from mindlora.plugin import launcher, preflight

    monkeypatch.chdir(ROOT)
    seen = 0
    for words in commands(path):
        if words[:2] == ["mindlora", "data"]:
            assert cli._parser().parse_args(words[1:]).seq_length == load(path).model.model_config.seq_length
            continue
        if words[:2] == ["mindlora", "quantize-base"]:
            assert cli._parser().parse_args(words[1:]).output == "llama2-7b-nf4.safetensors"
            continue
        if words[0] == "bash":
            assert os.path.exists(words[1]) and words[3] == "8"
            words = shlex.split(words[2])
            assert os.path.exists(words[0])
        else:
            assert words[0] == "mindlora-run"
        config = launcher.build_config(words[1:])
        assert words[words.index("--config") + 1] == path
        preflight.prepare(config)
        seen += 1
    assert seen


# Helpers


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def merged(path):
    """Returns what the YAML and those under it say, without what MindFormers fills in."""
    from mindformers.tools.register import MindFormerConfig

    return MindFormerConfig._file2dict(os.path.join(ROOT, path))


def load(path):
    from mindformers.tools.register import MindFormerConfig

    return MindFormerConfig(os.path.join(ROOT, path))


def prepared(path):
    """Returns a YAML with its sizes shrunk, as mindlora-run prepares it."""
    from mindlora.plugin import preflight

    config = load(path)
    model = config.model.model_config
    model.update({key: value for key, value in SMALL.items() if key in model})
    if model.n_kv_heads:
        model.n_kv_heads = 2
    preflight.prepare(config)
    return config


def build(config):
    """Returns the network that MindFormers builds from a YAML in training."""
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models import build_network

    build_parallel_config(config)
    # MindFormers changes what it builds from.
    node = type(config)(**{"model": config.model.to_dict()}).model
    return build_network(
        node, default_args={"parallel_config": config.parallel_config, "moe_config": config.moe_config}
    )


def train_step(config, network):
    """Returns the train step that MindFormers builds from a YAML."""
    from mindformers.core import build_lr, build_optim
    from mindformers.wrapper import build_wrapper

    config.lr_schedule.total_steps = 10
    optimizer = build_optim(
        config.optimizer,
        default_args={"params": network.trainable_params(), "learning_rate": build_lr(config.lr_schedule)},
    )
    return build_wrapper(
        config.runner_wrapper,
        default_args={"network": network, "optimizer": optimizer, "parallel_config": config.parallel_config},
    )


def callbacks(config, step):
    """Returns the callbacks that MindFormers builds from a YAML; its own need the arguments that its Trainer gives."""
    from mindformers.core import build_callback

    given = {"MFLossMonitor": {"learning_rate": step.optimizer.learning_rate, "origin_epochs": 1, "dataset_size": 10}}
    return [build_callback(type(config)(**node), default_args=given.get(node["type"])) for node in config.callbacks]


def arguments(cls, method="__init__"):
    """Returns the names of what a class takes, and ``type``, by which a YAML names the class."""
    return {"type"} | {
        name
        for name, parameter in inspect.signature(getattr(cls, method)).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def commands(path):
    """Yields the words of each command in the comment above a YAML."""
    above = read(path).partition("\nseed:")[0].partition("\nbase_config:")[0]
    comment = "\n".join(line[1:].strip() for line in above.splitlines())
    for line in comment.replace("\\\n", " ").splitlines():
        if line.startswith(("mindlora ", "mindlora-run ", "bash ")):
            yield shlex.split(line)


def target_modules(config):
    pet = config.model.model_config.pet_config
    return pet.target_modules if pet else None


def pet_figures(pet):
    """Returns rank, alpha and dropout, from the YAML or the preset that it names."""
    recipe = {"small_dataset": (8, 32, 0.2), "large_dataset": (16, 64, 0.05)}
    if not pet:
        return None, None, None
    return recipe[pet.preset] if pet.preset else (pet.lora_rank, pet.lora_alpha, pet.lora_dropout)


def linear_shapes(model):
    """Returns (out, in) of the linear cells of one layer."""
    hidden, inner = model.hidden_size, model.intermediate_size
    key_value = hidden // model.num_heads * (model.n_kv_heads or model.num_heads)
    return {
        "wq": (hidden, hidden),
        "wk": (key_value, hidden),
        "wv": (key_value, hidden),
        "wo": (hidden, hidden),
        "w1": (inner, hidden),
        "w2": (hidden, inner),
        "w3": (inner, hidden),
    }


def base_count(config):
    """Returns the number of weights: embedding, head, linear cells, two norms in each layer and one at the end."""
    model = config.model.model_config
    layer = sum(out * in_ for out, in_ in linear_shapes(model).values()) + 2 * model.hidden_size
    return 2 * model.vocab_size * model.hidden_size + model.num_layers * layer + model.hidden_size


def adapter_count(config):
    """Returns the number of elements of all A [rank, in] and B [out, rank]."""
    model = config.model.model_config
    rank = pet_figures(model.pet_config)[0]
    shapes = linear_shapes(model)
    return model.num_layers * sum(rank * sum(shapes[leaf]) for leaf in LEAVES[target_modules(config)])


def number(text):
    return int(text.replace(",", ""))


def hugging_face_weights(model):
    """Returns random float16 weights under Hugging Face's names."""
    rng = np.random.default_rng(0)
    names = {
        "wq": "self_attn.q_proj",
        "wk": "self_attn.k_proj",
        "wv": "self_attn.v_proj",
        "wo": "self_attn.o_proj",
        "w1": "mlp.gate_proj",
        "w2": "mlp.down_proj",
        "w3": "mlp.up_proj",
    }
    vocabulary, norm = (model.vocab_size, model.hidden_size), (model.hidden_size,)
    shapes = {"model.embed_tokens": vocabulary, "lm_head": vocabulary, "model.norm": norm}
    for layer in (f"model.layers.{i}" for i in range(model.num_layers)):
        shapes.update({f"{layer}.{names[leaf]}": shape for leaf, shape in linear_shapes(model).items()})
        shapes.update({f"{layer}.input_layernorm": norm, f"{layer}.post_attention_layernorm": norm})
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}
