"""Every YAML in configs/: its keys are known, the figures in its header match its sizes, its commands exist."""

import inspect
import os
import re
import shlex

import numpy as np
import pytest
import yaml

from mindlora.models.label_losses import tokens_at_once
from tests.conftest import ROOT
from tests.support.config_files import ON_ASCEND, PATHS, QLORA, adapter_count, base_count, linear_shapes, load, read

# The keys of a YAML


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

    from mindlora.run.checks.pet_config import PetLoraConfig
    from mindlora.training.callbacks import registry as ours

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
    assert os.path.exists(os.path.join(ROOT, "mindlora", "training", "launch", "register_path", "bridge.py"))


# The header comment of a YAML


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
    piece = tokens_at_once(tokens, model.hidden_size, model.vocab_size)
    factors = {
        "base weights": [base_count(config), 2],
        "adapter": [adapter_count(config), 4 + 4 + 8],
        "inputs of the layers": [model.num_layers, tokens, model.hidden_size, 2],
        "logits of a piece": [piece, model.vocab_size, 4],
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
    from mindlora.training.launch import launcher, preflight

    monkeypatch.chdir(ROOT)
    seen = 0
    for words in commands(path):
        if words[:2] == ["mindlora", "data"]:
            assert cli._parser().parse_args(words[1:]).seq_length == load(path).model.model_config.seq_length
            continue
        if words[:3] == ["mindlora", "base", "quantize"]:
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


def merged(path):
    """Returns the content of a YAML and its base_config, without what MindFormers fills in."""
    from mindformers.tools.register import MindFormerConfig

    return MindFormerConfig._file2dict(os.path.join(ROOT, path))


def arguments(cls, method="__init__"):
    """Returns the names of a class's arguments, and ``type``, with which a YAML names the class."""
    return {"type"} | {
        name
        for name, parameter in inspect.signature(getattr(cls, method)).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def commands(path):
    """Yields the words of each command in the header comment of a YAML."""
    above = read(path).partition("\nseed:")[0].partition("\nbase_config:")[0]
    comment = "\n".join(line[1:].strip() for line in above.splitlines())
    for line in comment.replace("\\\n", " ").splitlines():
        if line.startswith(("mindlora ", "mindlora-run ", "bash ")):
            yield shlex.split(line)


def number(text):
    return int(text.replace(",", ""))
