"""What MindFormers' PyNative Trainer trains on a DeepSeek-V3: latent attention, routed and shared experts.

The judge of an adapter is its base with it merged, in files. Three processes train all runs: those that are judged so,
the others, and the merged bases.
"""

import json

import numpy as np
import pytest

from mindlora.data import tokenizers
from mindlora.data.mindrecord import write_mindrecord
from mindlora.files.base.convert import convert_base
from mindlora.files.base.merge import merge_checkpoint
from mindlora.run.checks.data_rows import BOUNDARY
from tests.support import pynative_runs, tiny_runs
from tests.support.pynative_runs import IGNORED, LORA, LORA_WITH_EXPERTS, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS, ROWS, BEGIN, TOKENS = 3, 4, 2, 280
WIDTH = tiny_runs.SEQUENCE
# Tokens that go to all experts: where two are nearly as likely, rounding would send a token to another one.
MODEL = {
    **pynative_runs.DEEPSEEK_V3,
    **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "moe_router_bias_update_rate": 0.0},
    **{"bos_token_id": BEGIN, "eos_token_id": 3},
}
FROZEN = {"type": "ConstantWarmUpLR", "learning_rate": 0.0, "warmup_steps": 0}
FAST = {**FROZEN, "learning_rate": 0.5}
# Each of these has a form for PEFT on cells that are not joined.
NOT_JOINED = {**LORA, "target_modules": r"linear_(proj|fc2)$"}
BUDGET = {"use_adalora": True, "target_r": 2, "tinit": 0, "tfinal": 1, "deltaT": 1}
# Name -> pet_config, lora_config, and the feature that the run shows. A saved adapter has a merged form of each.
MERGED = {
    "plain": ({}, LORA_WITH_EXPERTS, "lora"),
    "stabilized": ({"use_rslora": True, "rank_pattern": {".*linear_fc2": 2}}, LORA, "rslora"),
    "frozen_a": ({"freeze_lora_a": True}, LORA, "lora_fa"),
    "embedding": ({}, {**LORA, "target_modules": "word_embeddings|linear_proj|output_layer"}, "embedding"),
    "dora": ({"use_dora": True}, LORA, "dora"),
    "miss": ({"use_miss": True}, LORA, "miss"),
    "vera": ({"use_vera": True}, NOT_JOINED, "vera"),
    "adalora": (BUDGET, LORA, "adalora"),
    "pissa": ({"lora_init": "pissa"}, LORA, "pissa"),
    "olora": ({"lora_init": "olora"}, LORA, "pissa"),
    "mica": ({"lora_init": "mica"}, LORA, "mica"),
    "modules": ({"modules_to_save": ["embed_tokens", "norm"]}, LORA, "saved_modules"),
}
FORGETTING = {"type": "Forgetting", "every_steps": 1, "samples": 4, "max_tokens": 8, "batch_size": 4}
PROMPTS = ["good", "good morning, good"]
DPO = {"loss": "dpo", "beta": 0.5}


def shown(feature):
    return shows(feature, "deepseek_v3", trainer="pynative")


def configuration(folder, name, data="rows", steps=STEPS, **changes):
    """Returns the YAML of a run from the base, and what it changes of the usual one."""
    callbacks = [
        *changes.pop("more_callbacks", []),
        {"type": "LoraCheckpoint", "save_steps": steps, "directory": str(folder / f"{name}_peft")},
        {"type": "RecordLosses", "directory": str(folder / name)},
        {"type": "RunReport", "directory": str(folder / name)},
    ]
    held_out = {"type": "HeldOutLoss", "dataset_dir": str(folder / f"{data}.mindrecord"), "batch_size": ROWS}
    callbacks.append({**held_out, "every_steps": changes.pop("measured", steps)})
    checkpoint = {"enable_save": False, "load_path": str(folder / changes.pop("base", "base")), "no_load_optim": True}
    config = pynative_runs.tiny_config("deepseek_v3", folder / f"{data}.mindrecord", steps)
    config |= {"model": MODEL, "callbacks": callbacks, "checkpoint": checkpoint, **changes}
    if data == "pairs":
        config["train_dataset"]["dataloader"]["column_names"] = ["input_ids", "labels", "answers", "pairs"]
    return config


def write(path, tokens, labels, **columns):
    pairs = ({"input_ids": ids, "labels": row, **columns} for ids, row in zip(tokens, labels))
    write_mindrecord(pairs, str(path))


def write_packed(folder):
    """Writes four examples alone and padded, and two in a row."""
    half = WIDTH // 2
    short = np.random.default_rng(0).integers(4, tiny_runs.VOCABULARY, (4, half)).astype(np.int32)
    short[:, 0] = BEGIN
    # The last token of an example predicts nothing.
    targets = np.concatenate([short[:, 1:], np.full((4, 1), IGNORED, np.int32)], 1)
    padding = np.full((4, WIDTH - half), tiny_runs.PAD, np.int32)
    alone = np.concatenate([short, padding], 1), np.concatenate([targets, np.full_like(padding, IGNORED)], 1)
    write(folder / "alone.mindrecord", *alone)
    packed = [array.reshape(2, WIDTH) for array in (short, targets)]
    write(folder / "packed.mindrecord", *packed, **{BOUNDARY: np.array([BEGIN], np.int32)})


def write_pairs(path):
    rng = np.random.default_rng(4)
    tokens = rng.integers(4, tiny_runs.VOCABULARY, (ROWS, 2, WIDTH + 1)).astype(np.int32)
    answers = np.full_like(tokens, -1)
    answers[:, :, 4:8] = np.arange(2)[:, None]
    labels = np.where(answers < 0, -100, tokens).astype(np.int32)
    names = ("input_ids", "labels", "answers")
    rows = (dict(zip(names, row), pairs=np.ones(1, np.int32)) for row in zip(tokens, labels, answers))
    write_mindrecord(rows, str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the base that MindFormers has saved, data of several kinds, and a tokenizer."""
    folder = tmp_path_factory.mktemp("deepseek_v3")
    pynative_runs.write_data(folder / "rows.mindrecord", rows=ROWS)
    write_packed(folder)
    write_pairs(folder / "pairs.mindrecord")
    trained = tokenizers.fit_tokenizer(["good morning, good evening, good night"] * 3, TOKENS)
    tokenizers.save_tokenizer(trained, str(folder / "tokenizer"))
    saving = {"enable_save": True, "save_path": str(folder / "begun"), "save_interleaved_steps": 1}
    nodes = {"model": MODEL, "checkpoint": saving, "callbacks": [{"type": "FillWeights", "base": True}]}
    config = pynative_runs.tiny_config("deepseek_v3", folder / "rows.mindrecord", 1)
    assert pynative_runs.series([{**config, **nodes}], folder) == [None]
    convert_base(str(folder / "begun"), str(folder / "hf"), None, "hf")
    convert_base(str(folder / "hf"), str(folder / "base"), None, "pynative")
    return folder


@pytest.fixture(scope="module")
def messages(folder):
    """Name of a run -> what ended it, or None."""
    once = {"steps": 1}
    two = {"training": {"steps": STEPS, "local_batch_size": 2, "global_batch_size": 2, "seed": 1}}
    answers = {"type": "SampleAnswers", "prompts": PROMPTS, "tokenizer": str(folder / "tokenizer")}
    answers |= {"template": "plain", "max_tokens": 4}
    spoiled = {"type": "SpoilStep", "steps": [2], "path": str(folder / "changed.json")}
    health = {"type": "AdapterHealth", "every_steps": 1}
    invoked = {"pet_config": {"alora_invocation_tokens": [BEGIN]}}
    merged = {name: {"pet_config": pet, "lora_config": lora} for name, (pet, lora, _) in MERGED.items()}
    runs = {
        "once": once,
        "untrained": {**once, "lr_scheduler": FROZEN},
        "faster": {**once, "pet_config": {"loraplus_lr_ratio": 4}},
        **{name: {**once, "pet_config": {"neftune_alpha": 5.0}} for name in ("noise", "again")},
        "alone": {"data": "alone"},
        "packed": {"data": "packed", **two},
        "invoked": {"data": "packed", **two, **invoked},
        "uninvoked": {"lr_scheduler": FROZEN, **once, "pet_config": {"alora_invocation_tokens": [4, 5]}},
        "preferences": {"data": "pairs", "preference": DPO, "lora_config": LORA_WITH_EXPERTS, "measured": 1},
        "guarded": {"more_callbacks": [{"type": "TrainingGuard"}, health, spoiled], "measured": 1},
        "forgetting": {"more_callbacks": [FORGETTING]},
        # Fast enough that the answers change.
        "answers": {"more_callbacks": [answers], "model": {**MODEL, "vocab_size": TOKENS}, "lr_scheduler": FAST},
    }
    found = {}
    for group in (merged, runs):
        configs = {name: configuration(folder, name, **changes) for name, changes in group.items()}
        if group is runs:
            configs["answers"]["checkpoint"] = {"enable_save": False}
            configs["forgetting"]["checkpoint"] |= {"enable_save": True, "save_path": str(folder / "forgetting_saved")}
        found |= dict(zip(configs, pynative_runs.series(list(configs.values()), folder)))
    return found


def records(folder, key):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


@pytest.fixture(scope="module")
def merged(folder, messages):
    """Name of a run -> the held-out loss of its base with the adapter merged.

    That of the base, and of "forgetting", is that of the texts by which it has measured what is forgotten.
    """
    state = folder / "forgetting_saved" / f"iteration_{STEPS:08d}" / "mindlora_run.json"
    samples = json.loads(state.read_text(encoding="utf-8"))["callbacks"]["Forgetting"]["samples"]
    pynative_runs.write_samples(folder / "samples.mindrecord", samples)
    data = {**dict.fromkeys(MERGED, "rows"), "forgetting": "samples"}
    for name in data:
        adapter = folder / f"{name}_peft" / f"step_{STEPS}"
        merge_checkpoint(str(folder / "base"), str(adapter), str(folder / f"{name}_merged"))
    judged = {name: {"base": f"{name}_merged", "data": rows} for name, rows in data.items()}
    judged["base"] = {"base": "base", "data": "samples"}
    configs = [
        configuration(folder, f"{name}_judge", steps=1, lr_scheduler=FROZEN, **changes)
        for name, changes in judged.items()
    ]
    assert pynative_runs.series(configs, folder) == [None] * len(configs)
    return {name: records(folder / f"{name}_judge", "held_out_loss")[-1] for name in judged}


@pytest.mark.parametrize("name", [pytest.param(name, marks=shown(case[2])) for name, case in MERGED.items()])
def test_the_base_with_the_adapter_merged_is_the_model_that_was_trained(folder, messages, merged, name):
    assert messages[name] is messages["untrained"] is None
    (base,) = records(folder / "untrained", "held_out_loss")
    (loss,) = records(folder / name, "held_out_loss")
    assert loss < base - 1e-3 and loss == pytest.approx(merged[name], rel=2e-5)
    assert pynative_runs.losses(folder / name)[0] == pytest.approx(base, rel=1e-5)


@shown("lora_plus")
def test_with_lora_plus_the_first_step_of_b_is_ratio_times_as_long(folder, messages):
    assert messages["once"] is messages["faster"] is None
    once, faster = (pynative_runs.trained(folder / name) for name in ("once", "faster"))
    ends = {name: name.endswith("lora_b") for name in once}
    assert set(ends.values()) == {True, False}
    for name, is_b in ends.items():
        # B is zero before.
        expected = 4 * once[name] if is_b else once[name]
        np.testing.assert_allclose(faster[name], expected, atol=1e-5, err_msg=name)


@shown("neftune")
def test_neftune_adds_noise_that_its_seed_fixes(folder, messages):
    noise, again, plain = (pynative_runs.losses(folder / name)[0] for name in ("noise", "again", "once"))
    assert noise == again and abs(noise - plain) > 1e-3


@shown("packed")
def test_examples_of_a_packed_row_do_not_see_each_other(folder, messages):
    assert messages["alone"] is messages["packed"] is None
    # MindFormers rounds rotary embeddings: an example's logits depend on where it begins.
    for found, expected in zip(*(pynative_runs.losses(folder / name) for name in ("packed", "alone"))):
        assert found == pytest.approx(expected, rel=3e-4)


@shown("alora")
def test_an_adapter_acts_from_its_tokens_on_alone(folder, messages):
    assert messages["invoked"] is None
    # Each example begins with them.
    found, expected = (pynative_runs.losses(folder / name) for name in ("invoked", "packed"))
    np.testing.assert_allclose(found, expected, rtol=5e-5)
    settings = (folder / "invoked_peft" / f"step_{STEPS}" / "adapter_config.json").read_text(encoding="utf-8")
    assert json.loads(settings)["alora_invocation_tokens"] == [BEGIN]
    assert "rows without the tokens [4, 5]" in messages["uninvoked"]


@shown("preference")
def test_a_step_learns_from_preferences_what_is_measured_before_it(folder, messages):
    assert messages["preferences"] is None
    losses, held_out = pynative_runs.losses(folder / "preferences"), records(folder / "preferences", "held_out_loss")
    # The model that has learned nothing is its own reference.
    assert losses[0] == pytest.approx(np.log(2), rel=1e-5) and losses[-1] < losses[0]
    np.testing.assert_allclose(losses[1:], held_out[:-1], rtol=1e-5)
    assert records(folder / "preferences", "kl")[-1] > 1e-5


@shown("guard")
@shown("held_out")
def test_a_bad_step_changes_nothing_and_health_is_measured(folder, messages):
    assert messages["guarded"] is None
    assert json.loads((folder / "changed.json").read_text(encoding="utf-8")) == [False]
    assert records(folder / "guarded", "skipped") == [False, True, False]
    held_out = records(folder / "guarded", "held_out_loss")
    assert held_out[1] == held_out[0] > held_out[2]
    assert records(folder / "guarded", "loss")[-1] == pytest.approx(held_out[1], rel=1e-5)
    (*_, health) = records(folder / "guarded", "health")
    parts = [part for cell in health["cells"].values() for part in cell["parts"].values()]
    assert len(parts) == len(pynative_runs.trained(folder / "guarded")) and all(part["update"] > 0 for part in parts)


@shown("forgetting")
def test_forgetting_is_the_difference_of_two_held_out_losses_on_the_texts_of_the_base(folder, messages, merged):
    assert messages["forgetting"] is None
    measured = records(folder / "forgetting", "forgetting")
    assert len(measured) == STEPS and abs(measured[-1]) > 5e-3
    assert measured[-1] == pytest.approx(merged["forgetting"] - merged["base"], abs=1e-5)


@shown("answers")
def test_answers_before_and_after_are_in_the_report(folder, messages):
    assert messages["answers"] is None
    pynative_runs.samples_before_and_after(folder / "answers", PROMPTS, STEPS)
