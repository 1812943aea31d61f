"""Every YAML in configs/, shrunk: it builds the network, the train step and the callbacks that it names."""

import os

import numpy as np
import pytest
import yaml

from mindlora import LoRADense
from mindlora.network.quantized.nf4 import parameter_count
from mindlora.network.tree import lora_cells
from tests.support.config_files import (
    ATTENTION,
    LEAVES,
    ON_8,
    ON_ASCEND,
    PATHS,
    QLORA,
    adapter_count,
    base_count,
    linear_shapes,
    pet_figures,
    prepared,
    read,
    target_modules,
)


def test_the_configs_are_there():
    names = {os.path.relpath(path, "configs") for path in PATHS}
    for model in ("llama2/lora_llama2_7b", "llama2/lora_llama2_13b", "llama3/lora_llama3_8b"):
        assert {f"{model}.yaml", f"{model}_all_linear.yaml"} <= names
    assert len([name for name in names if name.startswith("tiny")]) == 3


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
def test_the_products_of_an_adapter_are_split_by_rows_over_8_npus_in_the_semi_automatic_mode(path, monkeypatch):
    import mindspore as ms
    from mindformers.modules.transformer import op_parallel_config

    monkeypatch.setattr(op_parallel_config.D, "get_group_size", lambda: 8)
    config = prepared(path)
    parallel = {**config.parallel, "parallel_mode": "semi_auto_parallel", "full_batch": True}
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
    """With the calls that MindFormers makes on several devices, but without strategies of a graph compiled for them."""
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


# Helpers


def build(config):
    """Returns the network that MindFormers builds from a YAML in training."""
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models import build_network

    build_parallel_config(config)
    # MindFormers changes the configuration that it builds from.
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
    """Returns the callbacks that MindFormers builds from a YAML, its own with the arguments that its Trainer gives."""
    from mindformers.core import build_callback

    given = {"MFLossMonitor": {"learning_rate": step.optimizer.learning_rate, "origin_epochs": 1, "dataset_size": 10}}
    return [build_callback(type(config)(**node), default_args=given.get(node["type"])) for node in config.callbacks]


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
