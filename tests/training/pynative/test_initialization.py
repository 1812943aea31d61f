"""How adapters begin, and what trains beside them, under MindFormers' PyNative Trainer. One process trains all runs."""

import json

import numpy as np
import pytest
from mindspore import nn
from safetensors.numpy import load_file

from mindlora import LoraConfig, apply_lora
from mindlora.core.errors import CheckpointError
from mindlora.core.numerics import initializers
from mindlora.data.mindrecord import write_mindrecord
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.convert import Heads, convert_adapter
from mindlora.files.base.convert import convert_base
from mindlora.files.base.merge import merge_checkpoint
from mindlora.network.cells.cell import InitialDraws
from mindlora.network.tree import lora_cells
from tests.support import pynative_runs
from tests.support.pynative_runs import LORA, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS, HALFWAY = 4, "iteration_00000002"
SCALE = LORA["lora_alpha"] / LORA["lora_rank"]
QKV = "decoder.layers.1.self_attention.linear_qkv"
NORM = "decoder.final_layernorm.weight"
# The bases of adapters on joined cells are not compared.
NOT_JOINED = {**LORA, "target_modules": r"linear_(proj|fc2)$"}
SEEDED = {"seed": 3, "lora_a_init": "kaiming_uniform"}
PISSA = {"lora_init": "pissa", "modules_to_save": ["lm_head", "norm"], "freeze_include": ["decoder.layers.0.*"]}
# Its first half is trained on the base, its second half on what PiSSA has left of it.
TWICE = {**LORA, "lora_rank": 2 * LORA["lora_rank"], "lora_alpha": 2 * LORA["lora_alpha"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the bases hf and base, and with equal rows, so that each step has the same batch."""
    folder = tmp_path_factory.mktemp("initialization")
    (tokens,), (labels,) = pynative_runs.counting_rows(1)
    rows = [{"input_ids": tokens[:-1], "labels": labels[1:]}] * (4 * STEPS)
    write_mindrecord(iter(rows), str(folder / "rows.mindrecord"))
    pynative_runs.write_base(folder / "base", folder / "hf")
    return folder


@pytest.fixture(scope="module")
def messages(folder):
    """Name of a run -> what refused it, or None."""
    base = {"load_path": str(folder / "base"), "no_load_optim": True}
    halfway = {"load_path": str(folder / "pissa_saved" / HALFWAY)}
    plain = {"load_path": str(folder / "plain_saved" / "iteration_00000001")}
    adapter = str(folder / "pissa_peft" / "step_2")
    not_joined = str(folder / "not_joined_peft" / "step_1")
    dora = {"use_dora": True, "param_init_type": "float16", "freeze_exclude": ["*final_layernorm*"]}
    # Name -> steps, lora_config, pet_config, and what is loaded.
    runs = {
        "plain": (1, LORA, {}, base),
        "pissa": (STEPS, LORA, PISSA, base),
        "resumed": (STEPS, LORA, PISSA, halfway),
        "olora": (1, LORA, {"lora_init": "olora"}, base),
        "mica": (STEPS, LORA, {"lora_init": "mica"}, base),
        "mica_resumed": (STEPS, LORA, {"lora_init": "mica"}, {"load_path": str(folder / "mica_saved" / HALFWAY)}),
        "mica_of_another": (1, LORA, {"lora_init": "mica"}, {**plain, "no_load_optim": True}),
        "dora": (2, LORA, dora, base),
        "further": (2, TWICE, {"adapter_path": adapter, "modules_to_save": ["lm_head", "norm"]}, base),
        "goes_on": (2, TWICE, {"adapter_path": str(folder)}, {"load_path": str(folder / "further_saved")}),
        "other_rank": (1, LORA, {"adapter_path": adapter}, base),
        "not_said": (STEPS, LORA, {}, halfway),
        "said_later": (1, LORA, {"lora_init": "olora"}, {**plain, "no_load_optim": True}),
        "two_adapters": (1, LORA, {"adapter_path": adapter}, {**plain, "no_load_optim": True}),
        "not_joined": (1, NOT_JOINED, {}, base),
        "other_base": (1, NOT_JOINED, {"adapter_path": not_joined, "on_base_mismatch": "error"}, {}),
        "seeded": (1, LORA, SEEDED, base),
        "seeded_again": (1, LORA, SEEDED, base),
    }
    # What graph mode has for that; the Trainer's adapters have begun by then, and this changes nothing.
    beginning = [{"type": "BaseCheck"}, {"type": "LoraInitialization"}]
    configs = []
    for name, (steps, lora, pet_config, loaded) in runs.items():
        saved = {"enable_save": True, "save_path": str(folder / f"{name}_saved"), "save_interleaved_steps": 2}
        saving = {"type": "LoraCheckpoint", "save_steps": 2, "directory": str(folder / f"{name}_peft")}
        recording = {"type": "RecordLosses", "directory": str(folder / name)}
        nodes = {"checkpoint": {**saved, **loaded}, "callbacks": [saving, recording]}
        nodes |= {"lora_config": lora, "pet_config": pet_config}
        if name in ("pissa", "resumed", "other_base"):
            nodes["callbacks"] += beginning
        if name.startswith("seeded"):
            nodes["lr_scheduler"] = {"type": "ConstantWarmUpLR", "learning_rate": 0.0, "warmup_steps": 0}
        configs.append(pynative_runs.tiny_config("qwen3", folder / "rows.mindrecord", steps, **nodes))
        if name == "seeded_again":
            configs[-1]["training"]["seed"] = 2
    return dict(zip(runs, pynative_runs.series(configs, folder)))


def step_of(folder, name, step):
    """Returns the tensors of the model that MindFormers saved at a step."""
    return load_file(folder / f"{name}_saved" / f"iteration_{step:08d}" / pynative_runs.BASE_FILE)


@pytest.mark.parametrize("name", ["pissa", "olora"])
@shows("pissa", "qwen3", trainer="pynative")
def test_pairs_are_those_of_the_base_which_loses_their_product(folder, messages, name):
    assert messages["plain"] is messages[name] is None
    base = load_file(folder / "base" / pynative_runs.BASE_FILE)
    saved = step_of(folder, name, {"pissa": STEPS, "olora": 1}[name])
    cells = [key.removesuffix(".initial_lora_a") for key in saved if key.endswith(".initial_lora_a")]
    assert len(cells) == 8
    for cell in cells:
        weight, rank = base[f"{cell}.weight"], LORA["lora_rank"]
        a, b = saved[f"{cell}.initial_lora_a"], saved[f"{cell}.initial_lora_b"]
        for found, expected in zip((a, b), initializers.of_base(name, weight, rank, SCALE)):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6, err_msg=cell)
        np.testing.assert_array_equal(saved[f"{cell}.weight"], initializers.residual(weight, a, b, SCALE), cell)
    # The sum is the base that it was.
    first, plain = (pynative_runs.losses(folder / run)[0] for run in (name, "plain"))
    assert first == pytest.approx(plain, rel=1e-5)


@shows("mica", "qwen3", trainer="pynative")
def test_mica_trains_a_alone_in_the_minor_directions_of_the_base(folder, messages):
    assert messages["mica"] is None
    base, trained = load_file(folder / "base" / pynative_runs.BASE_FILE), pynative_runs.trained(folder / "mica")
    saved = step_of(folder, "mica", STEPS)
    assert len(trained) == 8 and all(name.endswith(".lora_a") for name in trained)
    for name in trained:
        weight, cell = base[f"{name.removesuffix('.lora_a')}.weight"], name.removesuffix(".lora_a")
        np.testing.assert_array_equal(saved[f"{cell}.lora_b"], initializers.mica(weight, LORA["lora_rank"])[1], cell)
        np.testing.assert_array_equal(saved[f"{cell}.weight"], weight, cell)
        assert saved[name].any()
    losses, plain = pynative_runs.losses(folder / "mica"), pynative_runs.losses(folder / "plain")
    assert losses[0] == plain[0] and losses[-1] < losses[0]


@shows("mica", "qwen3", trainer="pynative")
def test_a_resumed_run_of_mica_is_the_rest_of_the_whole_one(folder, messages):
    assert messages["mica_resumed"] is None
    whole, resumed = (pynative_runs.losses(folder / name) for name in ("mica", "mica_resumed"))
    assert len(whole) == STEPS and resumed == whole[2:]
    whole, resumed = (step_of(folder, name, STEPS) for name in ("mica", "mica_resumed"))
    assert whole.keys() == resumed.keys()
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)
    adapters = [adapter_files.read(str(folder / f"{name}_peft" / "step_4")) for name in ("mica", "mica_resumed")]
    assert all(np.array_equal(array, adapters[1].tensors[key]) for key, array in adapters[0].tensors.items())


def test_a_resumed_run_is_the_rest_of_the_whole_one(folder, messages):
    assert messages["resumed"] is None
    whole, resumed = (pynative_runs.losses(folder / name) for name in ("pissa", "resumed"))
    assert len(whole) == STEPS and resumed == whole[2:]
    whole, resumed = (step_of(folder, name, STEPS) for name in ("pissa", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)
    whole, resumed = (adapter_files.read(str(folder / f"{name}_peft" / "step_4")) for name in ("pissa", "resumed"))
    assert whole.fingerprint is not None and resumed.fingerprint == whole.fingerprint


def test_what_trains_beside_the_adapters(folder, messages):
    trained = pynative_runs.trained(folder / "pissa")
    assert {"output_layer.weight", NORM, f"{QKV}.lora_a"} < trained.keys()
    assert not any(name.startswith("decoder.layers.0.") or "initial" in name for name in trained)
    before, after = load_file(folder / "base" / pynative_runs.BASE_FILE), step_of(folder, "pissa", STEPS)
    changed = {name for name, array in before.items() if not np.array_equal(after[name], array)}
    saved_modules = {name for name in changed if not name.endswith(("_qkv.weight", "_proj.weight", "_fc1.weight"))}
    saved_modules = {name for name in saved_modules if not name.endswith("_fc2.weight")}
    assert saved_modules == {"output_layer.weight", NORM}


def test_peft_folders_are_for_the_base_that_was_loaded(folder, messages):
    """Merged into Hugging Face's base, the adapter is the model that was trained."""
    merge_checkpoint(str(folder / "hf"), str(folder / "pissa_peft" / f"step_{STEPS}"), str(folder / "merged"))
    convert_base(str(folder / "merged"), str(folder / "merged.safetensors"), None, "mcore")
    merged, trained = load_file(folder / "merged.safetensors"), step_of(folder, "pissa", STEPS)
    for name, array in merged.items():
        cell = name.removesuffix(".weight")
        if f"{cell}.lora_a" in trained:
            update = SCALE * trained[f"{cell}.lora_b"] @ trained[f"{cell}.lora_a"]
            np.testing.assert_allclose(array, trained[name] + update, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(array, trained[name], err_msg=name)


def test_mindformers_own_folders_are_read_as_adapters_for_that_base_too(folder, messages):
    step, converted = folder / "olora_saved" / "iteration_00000001", folder / "converted"
    convert_adapter(str(step), str(converted), "peft", heads=Heads(4, 2, 12))
    found, expected = (adapter_files.read(str(path)) for path in (converted, folder / "olora_peft" / "step_1"))
    assert found.paths == expected.paths
    for path in expected.paths:
        (a, b), (other_a, other_b) = found.pair(path), expected.pair(path)
        update, other = found.scale(path) * b @ a, expected.scale(path) * other_b @ other_a
        np.testing.assert_allclose(update, other, rtol=1e-6, atol=1e-8, err_msg=path)
    # As a base, they are not the model's.
    with pytest.raises(CheckpointError, match="pissa or olora, has changed the base"):
        convert_base(str(step), str(folder / "changed"), None, "hf")


def test_an_adapter_is_trained_further(folder, messages):
    """With the same batch in each step, the first loss is that of the step after the one at which it was saved."""
    assert messages["further"] is None
    whole, further = (pynative_runs.losses(folder / name) for name in ("pissa", "further"))
    assert further[0] == pytest.approx(whole[2], rel=1e-4) and further[1] < further[0]
    settings = json.loads((folder / "further_peft" / "step_2" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (settings["r"], settings["lora_alpha"]) == (TWICE["lora_rank"], TWICE["lora_alpha"])


def test_a_run_that_goes_on_loads_no_adapter(messages):
    assert messages["goes_on"] is None


def test_with_a_seed_of_its_own_an_adapter_begins_as_in_graph_mode(folder, messages):
    assert messages["seeded"] is messages["seeded_again"] is None
    seeded, again = (pynative_runs.trained(folder / name) for name in ("seeded", "seeded_again"))
    # The cells of a layer, as the Trainer builds them.
    leaves = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    paths = [f"decoder.layers.{layer}.{leaf}" for layer in (0, 1) for leaf in leaves]
    shapes = {path: (seeded[f"{path}.lora_b"].shape[0], seeded[f"{path}.lora_a"].shape[1]) for path in paths}
    network = nn.SequentialCell([nn.Dense(columns, rows) for rows, columns in shapes.values()])
    with InitialDraws(SEEDED["seed"]):
        apply_lora(network, LoraConfig(target_modules="all-linear", lora_rank=LORA["lora_rank"]))
    assert len(seeded) == 2 * len(paths)
    for path, (_, cell) in zip(paths, lora_cells(network)):
        np.testing.assert_array_equal(seeded[f"{path}.lora_a"], cell.mindpet_delta_lora_a.asnumpy(), err_msg=path)
        assert not seeded[f"{path}.lora_b"].any()
    assert all(np.array_equal(again[name], array) for name, array in seeded.items())


def test_a_magnitude_in_16_bits_is_the_norms_of_the_base(folder, messages):
    """The optimizer keeps a copy in 32 bits, which it made before the base was loaded."""
    assert messages["dora"] is None
    losses = pynative_runs.losses(folder / "dora")
    assert losses[0] == pytest.approx(pynative_runs.losses(folder / "plain")[0], rel=1e-3) and losses[1] < losses[0]
    trained = pynative_runs.trained(folder / "dora")
    weight = load_file(folder / "base" / pynative_runs.BASE_FILE)[f"{QKV}.weight"]
    np.testing.assert_allclose(trained[f"{QKV}.magnitude_lora_b"], np.linalg.norm(weight, axis=1), atol=0.03)
    assert NORM in trained and "output_layer.weight" not in trained


@pytest.mark.parametrize(
    "name, message",
    [
        ("other_rank", "RankMismatchError"),
        ("other_base", "BaseMismatchError"),
        ("not_said", "pissa or olora, has changed its base. Set lora_init to that of the run."),
        ("said_later", "holds an adapter of another one. Remove lora_init to go on"),
        ("two_adapters", "holds an adapter too. Remove adapter_path"),
        ("mica_of_another", "is trained, and not made of singular vectors as lora_init 'mica'"),
    ],
)
def test_it_is_refused_by_name(messages, name, message):
    assert message in (messages[name] or "")
