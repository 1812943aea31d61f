"""Variants of LoRA on mcore models, by one more line in a YAML.

The loss that a run measures is that of its base with the saved adapter merged in, in a network without adapters: in the
step after the save, or of held-out rows.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora import LoraConfig
from mindlora.core.numerics.initializers import vera_projection
from mindlora.files.adapters import files as adapter_files
from tests.support import tiny_runs
from tests.support.judged_runs import STEPS, JudgedRuns
from tests.support.what_runs import shows

LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear"}
# Name -> pet_config, and the features that it shows.
VARIANTS = {
    "ranks": (
        {
            **LORA,
            "use_rslora": True,
            "loraplus_lr_ratio": 4,
            "target_modules": ["linear_qkv", "linear_proj", "word_embeddings"],
            "rank_pattern": {"linear_proj": 6},
            "alpha_pattern": {"linear_qkv": 3},
            "modules_to_save": ["output_layer", "norm"],
        },
        ["rslora", "lora_plus", "embedding", "saved_modules", "held_out"],
    ),
    "frozen A": (
        {**LORA, "lora_init": "orthogonal", "freeze_lora_a": True, "neftune_alpha": 5},
        ["lora_fa", "neftune"],
    ),
    "dora": ({**LORA, "use_dora": True}, ["dora"]),
    "miss": ({"lora_rank": 4, "lora_dropout": 0.0, "target_modules": "all-linear", "use_miss": True}, ["miss"]),
    "vera": (
        {
            **{"lora_rank": 16, "lora_dropout": 0.0, "target_modules": ".*linear_(proj|fc2)"},
            **{"use_vera": True, "d_initial": 1.0, "projection_prng_key": 5},
        },
        ["vera"],
    ),
    "adalora": (
        {
            **{"lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear", "use_adalora": True},
            **{"init_r": 4, "target_r": 2, "tinit": 2, "tfinal": 3, "deltaT": 2},
        },
        ["adalora"],
    ),
    "pissa": ({**LORA, "lora_init": "pissa_niter_4"}, ["pissa"]),
    "olora": ({**LORA, "lora_init": "olora"}, ["pissa"]),
    "mica": ({**LORA, "lora_init": "mica"}, ["mica"]),
    "4 bits": ({**LORA, "quantize_base": "nf4"}, ["nf4"]),
    "loftq": ({**LORA, "quantize_base": "nf4"}, ["loftq"]),
}
IN_4_BITS = {name: f"{name} in 4 bits" for name in ("dora", "miss", "vera", "adalora")}
VARIANTS.update(
    {
        key: ({**VARIANTS[name][0], "quantize_base": "nf4"}, [*VARIANTS[name][1], "nf4_variants"])
        for name, key in IN_4_BITS.items()
    }
)
# Which measure the loss of held-out rows, that of training being of noise for one of them.
HOLDS_OUT = ("ranks", "frozen A")
# On a Qwen3, a joined cell and a plain one get adapters; on the other models, all linear cells do.
ON_QWEN3 = ".*linear_(qkv|proj)"
_LONG = ["frozen A", "dora", "miss", "vera", "adalora", "pissa", "mica", "4 bits"]
# What runs with each change, and what before a release. Other tests train a Qwen3 with AdaLoRA and in 4 bits, and
# olora begins as pissa does. In 4 bits, MiSS and VeRA are in tests/network/quantized and tests/peers too.
ALWAYS = {
    "qwen3": ["ranks", "frozen A", "dora", "miss", "vera", "olora", "loftq", IN_4_BITS["dora"], IN_4_BITS["adalora"]],
    "qwen3_moe": ["ranks"],
    "deepseek_v3": ["ranks"],
}
LONG = {"qwen3": ["pissa", IN_4_BITS["miss"], IN_4_BITS["vera"]], "qwen3_moe": [*_LONG, "loftq"], "deepseek_v3": _LONG}


def cases():
    always = [(model, name, []) for model, names in ALWAYS.items() for name in names]
    long = [(model, name, [pytest.mark.long]) for model, names in LONG.items() for name in names]
    for model, name, others in [*always, *long]:
        marks = [shows(feature, model) for feature in ["lora", *VARIANTS[name][1]]]
        yield pytest.param(model, name, marks=[*marks, *others])


@pytest.fixture(scope="module")
def trained(mindformers, tmp_path_factory):
    """Returns a function that returns the runs of a model, and one of them, which is trained at its first use."""
    models, known = {}, {}

    def train(model, name):
        if model not in models:
            models[model] = JudgedRuns(model, tmp_path_factory.mktemp(model))
        runs = models[model]
        if (model, name) not in known:
            known[model, name] = start(runs, name)
        return runs, known[model, name]

    return train


def pet_config_of(model, name):
    """Returns the pet_config of a variant on a model."""
    pet = dict(VARIANTS[name][0])
    if model == "qwen3" and pet["target_modules"] == "all-linear":
        pet["target_modules"] = ON_QWEN3
    return pet


def start(runs, name):
    """Trains a variant; ``against`` is the base in float that the run computed with, where it is another one."""
    pet, base, against = pet_config_of(runs.model_type, name), None, None
    if name.endswith("4 bits"):
        base, against = runs.quantized(name)
    if name == "loftq":
        config, initial = LoraConfig(lora_init="loftq_iter_3", **pet), str(runs.folder / "initial")
        base, against = runs.quantized(name, of_folder=True, adapter=initial, config=config)
        pet["adapter_path"] = initial
    run = runs.start(name, pet, base, holds_out=name in HOLDS_OUT)
    run.against = against
    return run


@pytest.mark.parametrize("model, name", cases())
def test_the_loss_is_that_of_the_base_with_the_adapter_merged(model, name, trained):
    runs, run = trained(model, name)
    if name in HOLDS_OUT:
        steps, losses = run.history.series("held_out_loss")
        assert list(steps) == [STEPS // 2, STEPS]
        assert losses[1] == pytest.approx(runs.loss(runs.held_out, runs.merged(run.adapter)), rel=2e-6)
        assert losses[1] < losses[0] < runs.loss(runs.held_out)
        return
    losses = tiny_runs.losses(run.output)
    begun = runs.merged(runs.folder / "initial", run.against) if name == "loftq" else run.against
    assert losses[1] == pytest.approx(runs.loss(runs.first_batch, begun), rel=2e-6)
    merged = runs.merged(run.steps / f"step_{STEPS // 2}", run.against)
    assert losses[STEPS // 2 + 1] == pytest.approx(runs.loss(runs.first_batch, merged), rel=2e-6)
    assert losses[STEPS // 2 + 1] < losses[1]


@pytest.mark.parametrize("model", ALWAYS)
def test_ranks_alphas_embeddings_and_saved_modules_together(model, trained):
    run = trained(model, "ranks")[1]
    adapter = adapter_files.read(str(run.adapter))
    assert adapter.use_rslora and len(adapter.embeddings) == 1
    for path in adapter.paths:
        rank = 6 if path.endswith(("o_proj", "wo", "linear_proj")) else 4
        assert adapter.rank(path) == rank, path
        assert all(part.any() for part in adapter.parts(path).values())
    assert set(adapter.alphas.values()) == {3, 8}
    assert len(adapter.saved_modules) == 2
    # B begins at zero. In each of 16 steps, Adam moves an element of A by 0.02 at most, and LoRA+ one of B by 0.08.
    linear = [path for path in adapter.paths if path not in adapter.embeddings]
    assert 0.35 < max(np.abs(adapter.tensors[path, "B"]).max() for path in linear) < 1.3
    assert "LoRA+: B learns at 4 times the rate of lr_schedule." in run.stdout


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
@shows("resume", "qwen3_moe", "deepseek_v3")
def test_a_resumed_run_is_the_same_run(model, trained):
    runs, run = trained(model, "ranks")
    resumed = runs.start("resumed", VARIANTS["ranks"][0], holds_out=True, resume=str(run.steps / f"step_{STEPS // 2}"))
    tiny_runs.assert_same_state(run.adapter, resumed.adapter)
    losses = tiny_runs.losses(run.output)
    assert tiny_runs.losses(resumed.output) == {step: losses[step] for step in range(STEPS // 2 + 1, STEPS + 1)}


@shows("resume", "qwen3")
def test_a_resumed_run_on_a_base_in_4_bits_is_the_same_run(trained):
    name = IN_4_BITS["dora"]
    runs, run = trained("qwen3", name)
    base = runs.folder / f"{name}.nf4.safetensors"
    pet = pet_config_of("qwen3", name)
    resumed = runs.start("resumed", pet, base, resume=str(run.steps / f"step_{STEPS // 2}"))
    assert resumed.stdout.count("was taken from") == 1
    tiny_runs.assert_same_state(run.adapter, resumed.adapter)
    losses = tiny_runs.losses(run.output)
    assert tiny_runs.losses(resumed.output) == {step: losses[step] for step in range(STEPS // 2 + 1, STEPS + 1)}


def test_b_alone_trains_from_an_orthogonal_initialization(trained):
    _, run = trained("qwen3", "frozen A")
    adapter = adapter_files.read(str(run.adapter))
    for path in adapter.paths:
        a, b = adapter.parts(path).values()
        # A still has its initial values, in half of the r-dimensional space; B has left its half.
        assert np.linalg.matrix_rank(a) == 2 and np.linalg.matrix_rank(b) > 2
    trainable = sum(adapter.tensors[path, "B"].size for path in adapter.paths)
    assert f"trainable params: {trainable:,} " in run.stdout


def test_olora_starts_from_the_loaded_base(trained):
    runs, run = trained("qwen3", "olora")
    assert run.stdout.count("Adapters initialized from the base by lora_init: 2") == 1
    adapter = adapter_files.read(str(run.adapter))
    # Saved for the base as it was: what trained, and what was taken out of the base.
    assert adapter.initialization == "olora" and {adapter.rank(path) for path in adapter.paths} == {8}
    (path,) = [path for path in adapter.paths if path.endswith("wo")]
    q, r = np.linalg.qr(load_file(runs.base)["decoder.layers.0.self_attention.linear_proj.weight"])
    np.testing.assert_allclose(adapter.tensors[path, "A"][4:], r[:4], atol=1e-5)
    np.testing.assert_allclose(adapter.tensors[path, "B"][:, 4:], -q[:, :4], atol=1e-5)
    assert np.abs(adapter.tensors[path, "A"][:4] - r[:4]).max() > 1e-3


def test_doras_magnitudes_start_from_the_norms_of_the_loaded_base(trained):
    runs, run = trained("qwen3", "dora")
    adapter = adapter_files.read(str(run.adapter))
    (path,) = [path for path in adapter.paths if path.endswith("wo")]
    weight = load_file(runs.base)["decoder.layers.0.self_attention.linear_proj.weight"]
    moved = np.abs(adapter.tensors[path, "magnitude"] - np.linalg.norm(weight, axis=1))
    # Adam moves a number by about the learning rate in a step.
    assert 0 < moved.max() < 0.4


def test_veras_adapter_is_peft_s(trained):
    folder = trained("qwen3", "vera")[1].adapter
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["projection_prng_key"]) == ("VERA", 16, 5)
    adapter = adapter_files.read(str(folder))
    # Each path uses a part of A and of B.
    a, b = (max((adapter.tensors[path, half] for path in adapter.paths), key=np.size) for half in "AB")
    for array, expected in zip((a, b), vera_projection(5, 16, a.shape[1], b.shape[0])):
        np.testing.assert_array_equal(array, expected)
    assert all(adapter.tensors[path, "lambda_b"].any() for path in adapter.paths)


def test_loftqs_adapter_trains_on_the_base_that_it_was_made_for(trained):
    runs, run = trained("qwen3", "loftq")
    started, adapter = (adapter_files.read(str(folder)) for folder in (runs.folder / "initial", run.adapter))
    assert f"Adapter loaded from {runs.folder / 'initial'}." in run.stdout
    assert "made for another quantized base" not in run.stdout and adapter.fingerprint["quantization"] == "loftq"
    assert set(adapter.tensors) == set(started.tensors)
    assert all(np.abs(adapter.tensors[key] - array).max() > 1e-3 for key, array in started.tensors.items())
