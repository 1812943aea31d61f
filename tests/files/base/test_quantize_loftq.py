"""LoftQ while a checkpoint is quantized: apply_lora's base and adapter, both or neither; and what is refused."""

import json
import os
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest

from mindlora import LoraConfig, apply_lora, load_lora, quantize_base, quantize_checkpoint, save_lora
from mindlora.cli import main
from mindlora.core.errors import (
    BaseMismatchError,
    CheckpointError,
    ConfigError,
    LoraError,
    QuantizationError,
    TargetError,
)
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.numerics import initializers
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.nf4 import TENSOR_NAMES, Nf4Array, dequantize, quantize, tensor_name
from mindlora.files.adapters import files as adapter_files
from mindlora.files.base.convert import convert_base
from mindlora.models import names
from mindlora.network.base_fingerprint import base_fingerprint
from mindlora.network.tree import lora_cells
from tests.conftest import ROOT
from tests.support import mcore_checkpoints
from tests.support.llama_checkpoints import CONFIG, llama, load, save_base
from tests.support.networks import TinyModel, randomize, snapshot
from tests.support.refusals import part, refused_unwritten

FIELDS = {"lora_rank": 2, "lora_alpha": 3, "target_modules": ["wq", "w1"], "quantize_base": "nf4"}
Q, DOWN = "model.layers.0.attention.wq", "model.layers.1.feed_forward.w2"


def base_of(folder, seed=1):
    """Returns a network and the checkpoint of its weights."""
    network = TinyModel()
    randomize(network.get_parameters(), seed)
    path = str(folder / f"base{seed}.safetensors")
    write_arrays(path, {p.name: p.asnumpy() for p in network.get_parameters()})
    return network, path


def run(folder, source, **fields):
    """Quantizes with LoftQ; returns the report."""
    return quantize_checkpoint(
        source,
        str(folder / "q.safetensors"),
        adapter=str(folder / "adapter"),
        config=LoraConfig(**{**FIELDS, "lora_init": "loftq_iter_3", **fields}),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lora_init": "loftq"},
        {"target_modules": "all-linear", "exclude_modules": ["wo"]},
        {"use_rslora": True},
        {"rank_pattern": {"w1": 3}, "alpha_pattern": {"wq": 5}, "layers_to_transform": 1, "lora_dropout": 0.25},
    ],
    ids=str,
)
def test_base_and_adapter_are_those_that_apply_lora_makes(fields, tmp_path):
    expected, source = base_of(tmp_path)
    report = run(tmp_path, source, **fields)
    apply_lora(expected, LoraConfig(**{**FIELDS, "lora_init": "loftq_iter_3", **fields}))
    stored = load(report.output)
    for name, parameter in expected.parameters_dict().items():
        if "lora" not in name:
            np.testing.assert_array_equal(stored.pop(name), parameter.asnumpy())
    assert not stored
    # Loaded onto the base that was written, whose fingerprint is the one that a network computes.
    found, _ = base_of(tmp_path)
    quantize_base(found)
    ms.load_param_into_net(found, ms.load_checkpoint(report.output, format="safetensors"), strict_load=True)
    load_lora(found, report.adapter, on_base_mismatch="error")
    assert snapshot(found) == snapshot(expected)
    assert base_fingerprint(found) == base_fingerprint(expected) == adapter_files.read(report.adapter).fingerprint
    assert {path: cell.scale for path, cell in lora_cells(found)} == {
        path: cell.scale for path, cell in lora_cells(expected)
    }
    assert {cell.dropout_rate for _, cell in lora_cells(found)} == {fields.get("lora_dropout", 0.0)}
    assert set(report.started) == {path for path, _ in lora_cells(expected)}


def test_an_adapter_trained_on_it_belongs_to_it_alone(tmp_path):
    in_float, source = base_of(tmp_path)
    report = run(tmp_path, source)
    network, _ = base_of(tmp_path)
    quantize_base(network)
    ms.load_param_into_net(network, ms.load_checkpoint(report.output, format="safetensors"))
    load_lora(network, report.adapter)
    save_lora(network, str(tmp_path / "trained"))
    nf4, _ = base_of(tmp_path)
    quantize_base(nf4)
    for path in (report.adapter, str(tmp_path / "trained")):
        for other in (nf4, in_float):
            with pytest.raises(BaseMismatchError, match="LoftQ changed the base"):
                load_lora(other, path, on_base_mismatch="error")


def test_the_error_falls_with_each_iteration(tmp_path):
    weight = np.random.default_rng(0).normal(size=(96, 192)).astype(np.float32)
    source = str(tmp_path / "base.safetensors")
    write_arrays(source, {f"{Q}.weight": weight})
    errors = [np.linalg.norm(weight - dequantize(quantize(weight)))]
    for turns in (1, 2, 5):
        folder = tmp_path / str(turns)
        report = run(folder, source, target_modules=["wq"], lora_rank=8, lora_init=f"loftq_iter_{turns}")
        stored, adapter = load(report.output), adapter_files.read(report.adapter)
        array = Nf4Array(**{field: stored[f"{Q}.{name}"] for field, name in TENSOR_NAMES.items()}, shape=weight.shape)
        assert adapter.scale(Q) == 3 / 8
        errors.append(np.linalg.norm(weight - dequantize(array) - adapter.delta(Q)))
    assert errors == sorted(errors, reverse=True) and errors[1] < 0.95 * errors[0] and errors[3] < 0.98 * errors[1]


def test_selected_cells_that_are_not_quantized_get_a_plain_pair(tmp_path):
    _, source = base_of(tmp_path)
    report = quantize_checkpoint(
        source,
        str(tmp_path / "q.safetensors"),
        ["w1"],
        adapter=str(tmp_path / "adapter"),
        config=LoraConfig(**{**FIELDS, "target_modules": ["wq", "w1", "lm_head"], "lora_init": "loftq"}),
    )
    assert set(report.started) == {f"model.layers.{layer}.attention.wq" for layer in range(2)}
    adapter = adapter_files.read(report.adapter)
    plain = [path for path in adapter.paths if path not in report.started]
    assert len(plain) == 3 and "lm_head" in plain
    for path in adapter.paths:
        a, b = adapter.parts(path).values()
        assert b.any() == (path in report.started)
        if path in plain:
            bound = 1 / np.sqrt(a.shape[1])
            assert 0.6 * bound < np.abs(a).max() <= bound and np.abs(a.mean()) < bound / 2
    network, _ = base_of(tmp_path)
    quantize_base(network, ["w1"])
    ms.load_param_into_net(network, ms.load_checkpoint(report.output, format="safetensors"))
    load_lora(network, report.adapter, on_base_mismatch="error")


def test_the_command(tmp_path, capsys):
    source = save_base(tmp_path / "hf", llama(), 2, **CONFIG)
    output, folder = str(tmp_path / "q.safetensors"), str(tmp_path / "adapter")
    words = [
        "base",
        "quantize",
        source,
        output,
        "--loftq",
        folder,
        "--rank",
        "4",
        "--alpha",
        "6",
        "--target-modules",
        "q_proj",
        "--target-modules",
        "feed_forward.w2",
        "--loftq-iterations",
        "2",
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"{folder}: LoftQ's adapter for 4 of them, model.layers.{{0..1}}.feed_forward.w2, model.layers" in said
    assert "weights in NF4: 14, " in said
    with open(os.path.join(folder, "adapter_config.json"), encoding="utf-8") as file:
        written = json.load(file)
    assert (written["r"], written["lora_alpha"], written["init_lora_weights"]) == (4, 6, True)
    weight = to_float32(llama()["model.layers.0.self_attn.q_proj.weight"])
    expected, a, b = initializers.loftq(weight, 4, quantize, dequantize, 2, 1.5)
    np.testing.assert_array_equal(load(output)[f"{Q}.weight"], expected.codes)
    adapter = adapter_files.read(folder)
    np.testing.assert_array_equal(adapter.tensors[Q, "A"], a)
    np.testing.assert_array_equal(adapter.tensors[Q, "B"], b)
    assert main([*words, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["adapter"] == folder
    assert main(["base", "quantize", source, output, "--loftq", folder, "--rank", "4", "--overwrite"]) == 0
    assert len(adapter_files.read(folder).paths) == 14 and adapter_files.read(folder).alphas[Q] == 16


PEAK = """
import sys
from mindlora import LoraConfig, quantize_checkpoint

def kib(field):
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(field)).split()[1])

config = LoraConfig(lora_rank=2, target_modules="all-linear", quantize_base="nf4", lora_init="loftq")
for source in sys.argv[1:]:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest so far is forgotten
    before = kib("VmRSS")
    quantize_checkpoint(source, source + ".q.safetensors", adapter=source + ".adapter", config=config)
    print(1024 * (kib("VmHWM") - before))
"""


def test_one_weight_is_in_memory_at_a_time(tmp_path):
    weight, sources = np.random.default_rng(0).normal(size=(128, 8192)).astype(np.float32), []
    for count in (1, 1, 6):  # the first one is a warm-up
        sources.append(str(tmp_path / f"{len(sources)}.safetensors"))
        write_arrays(sources[-1], {f"model.layers.{i}.attention.wq.weight": weight for i in range(count)})
    process = subprocess.run(
        [sys.executable, "-c", PEAK, *sources],
        text=True,
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert process.returncode == 0, process.stderr[-2000:]
    _, one, six = map(int, process.stdout.split())
    print(f"peaks {one / 2**20:.1f} and {six / 2**20:.1f} MiB; a weight {weight.nbytes / 2**20:.1f} MiB")
    assert six < one + weight.nbytes


# What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, error, message",
    [
        (
            {"lora_init": "gaussian"},
            ConfigError,
            "lora_init is 'gaussian', which quantize_checkpoint does not support.",
        ),
        ({"lora_init": None}, ConfigError, "lora_init is None, which quantize_checkpoint does not support."),
        ({"use_dora": True}, ConfigError, "use_dora is True, and quantize_checkpoint makes the adapters of plain LoRA"),
        (
            {"lora_rank": 7},
            ConfigError,
            "lora_init is 'loftq' and lora_rank is 7, more than the smaller side of a weight",
        ),
        (
            {"rank_pattern": {"w1": 7}},
            ConfigError,
            "lora_init is 'loftq' and lora_rank is 7, more than the smaller side",
        ),
        ({"target_modules": ["nothing"]}, TargetError, "target_modules ['nothing'] matches no linear cell"),
        ({"layers_to_transform": 5}, TargetError, "layers_to_transform names 5"),
    ],
    ids=str,
)
def test_configurations(fields, error, message, tmp_path):
    _, source = base_of(tmp_path)
    refused_unwritten(tmp_path, error, part(message), lambda: run(tmp_path, source, **fields))


def test_outputs_and_sources(tmp_path):
    _, source = base_of(tmp_path)
    config, output = LoraConfig(**FIELDS, lora_init="loftq"), str(tmp_path / "q.safetensors")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    (tmp_path / "file").write_text("")

    def check(error, message, adapter, output=output, source=source, overwrite=False, config=config):
        refused_unwritten(
            tmp_path,
            error,
            part(message),
            lambda: quantize_checkpoint(source, output, None, overwrite, None, adapter and str(adapter), config),
        )

    together = "quantize_checkpoint takes adapter and config together"
    check(ConfigError, together, None)
    check(ConfigError, together, tmp_path / "adapter", config=None)
    for overwrite in (False, True):
        check(
            LoraError, "more than an adapter: thesis.txt. It would be replaced", tmp_path / "mine", overwrite=overwrite
        )
    check(LoraError, "where there is a file", tmp_path / "file")
    check(LoraError, "format 'peft' writes a folder", tmp_path / "adapter.safetensors")
    check(
        CheckpointError, "are one inside the other", tmp_path / "adapter", str(tmp_path / "adapter" / "q.safetensors")
    )
    check(LoraError, "more than an adapter", tmp_path)
    weight = np.eye(8, dtype=np.float32)
    weight[2, 3] = np.nan
    bad = str(tmp_path / "bad.safetensors")
    write_arrays(bad, {f"{Q}.weight": np.eye(8, dtype=np.float32), f"{DOWN}.weight": weight})
    check(
        QuantizationError,
        f"{DOWN}.weight holds infinity, NaN",
        tmp_path / "adapter",
        source=bad,
        config=LoraConfig(**{**FIELDS, "target_modules": "all-linear"}, lora_init="loftq_iter_2"),
    )
    convert_base(
        save_base(tmp_path / "hf", llama(), **CONFIG), str(tmp_path / "joined"), "hf", "mindformers", concat=True
    )
    check(
        CheckpointError,
        "model.layers.{0..1}.attention.w_qkv are joined cells, whose rows only the model's config.json tells apart",
        tmp_path / "adapter",
        source=str(tmp_path / "joined"),
        config=LoraConfig(lora_rank=2, target_modules="all-linear", quantize_base="nf4", lora_init="loftq"),
    )


@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])
def test_a_joined_cell_has_a_pair_for_each_part_which_is_near_to_the_error_of_its_rows(model, tmp_path):
    """The converter of bases says which rows of an mcore cell in NF4 are those of q, k and v, or of gate and up."""
    tensors = {name: to_float32(array) for name, array in getattr(mcore_checkpoints, model)().items()}
    config = {**mcore_checkpoints.CONFIG, "model_type": model}
    if model == "deepseek_v3":
        config["q_lora_rank"] = len(tensors["model.layers.0.self_attn.q_a_proj.weight"])
    source = save_base(tmp_path / "hf", tensors, **config)
    report = run(tmp_path, source, target_modules="all-linear", lora_rank=3)
    adapter, deltas = adapter_files.read(report.adapter), {name: 0 * array for name, array in tensors.items()}
    for path in adapter.paths:
        pair = adapter.scale(path) * adapter.tensors[path, "B"] @ adapter.tensors[path, "A"]
        deltas[f"{names.to_hugging_face(path)}.weight"] = pair.astype(np.float32)
    converted = []
    for folder in (source, save_base(tmp_path / "deltas", deltas, **config)):
        convert_base(str(folder), f"{folder}.safetensors", "hf", "mcore")
        converted.append(load(f"{folder}.safetensors"))
    stored, (weights, added) = load(report.output), converted
    quantized = [name for name in weights if tensor_name(name, "absmax") in stored]
    assert len(quantized) > 4
    for name in quantized:
        fields = {field: stored[tensor_name(name, field)] for field in TENSOR_NAMES}
        error = weights[name] - dequantize(Nf4Array(**fields, shape=weights[name].shape))
        if name.rpartition(".")[0] in report.started:
            assert np.linalg.norm(error - added[name]) < 0.95 * np.linalg.norm(error), name


@pytest.mark.parametrize("broken", [(adapter_files, "write"), (os, "replace")], ids=["adapter", "base"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_both_or_neither(broken, overwrite, tmp_path, monkeypatch):
    _, source = base_of(tmp_path)
    if overwrite:
        run(tmp_path, source)
    before = contents(tmp_path)

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(*broken, fail)
    with pytest.raises(OSError, match="the disk is full"):
        quantize_checkpoint(
            source,
            str(tmp_path / "q.safetensors"),
            None,
            overwrite,
            None,
            str(tmp_path / "adapter"),
            LoraConfig(**FIELDS, lora_init="loftq"),
        )
    assert contents(tmp_path) == before


def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "words, message",
    [
        (["--rank", "4"], "--rank describes LoftQ's adapter, but --loftq is missing: give the folder to write it to."),
        (["--alpha", "4"], "--alpha describes LoftQ's adapter, but --loftq"),
        (["--target-modules", "wq"], "--target-modules describes LoftQ's adapter, but --loftq"),
        (["--loftq-iterations", "0"], "--loftq-iterations describes LoftQ's adapter, but --loftq"),
        (["--loftq", "adapter"], "--loftq needs --rank: give the lora_rank of the YAML that will train the adapter."),
        (
            ["--loftq", "adapter", "--rank", "4", "--loftq-iterations", "0"],
            "--loftq-iterations is 0: it must be a whole",
        ),
        (["--loftq", "adapter", "--rank", "0"], "lora_rank is 0: it must be a whole number of at least 1."),
        (["--loftq", "adapter", "--rank", "4", "--alpha", "-1"], "lora_alpha is -1.0: it must be a number above 0."),
    ],
    ids=" ".join,
)
def test_flags(words, message, tmp_path, capsys):
    _, source = base_of(tmp_path)
    assert main(["base", "quantize", source, str(tmp_path / "q.safetensors"), *words]) == 1
    assert f"mindlora: error: {message}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["base1.safetensors"]
