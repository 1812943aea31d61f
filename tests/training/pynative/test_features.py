"""Weighted accumulation, shifted and packed rows, LoRA+ and NEFTune under MindFormers' PyNative Trainer."""

import json

import numpy as np
import pytest

from mindlora.data.mindrecord import write_mindrecord
from mindlora.run.checks.data_rows import BOUNDARY
from tests.support import pynative_runs, tiny_runs
from tests.support.pynative_runs import IGNORED, LORA, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS = 3
BEGIN, LENGTH = 2, tiny_runs.SEQUENCE
# MindFormers compresses masks from this length on.
LONG = {**pynative_runs.QWEN3, "seq_length": 2048, "max_position_embeddings": 2048, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the same four examples as shifted rows, as rows of graph mode, and two in a row."""
    folder = tmp_path_factory.mktemp("features")
    rng = np.random.default_rng(0)
    half = LENGTH // 2
    short = rng.integers(4, tiny_runs.VOCABULARY, (4, half)).astype(np.int32)
    short[:, 0] = BEGIN
    # The last token of an example predicts nothing.
    targets = np.concatenate([short[:, 1:], np.full((4, 1), IGNORED, np.int32)], 1)
    padding = np.full((4, LENGTH - half), tiny_runs.PAD, np.int32)
    alone = np.concatenate([short, padding], 1), np.concatenate([targets, np.full_like(padding, IGNORED)], 1)
    packed = [array.reshape(2, LENGTH) for array in (short, targets)]
    write(folder / "alone.mindrecord", *alone)
    write(folder / "packed.mindrecord", *packed, **{BOUNDARY: np.array([BEGIN], np.int32)})
    write(folder / "mixed.mindrecord", *packed)

    pynative_runs.write_data(folder / "shifted.mindrecord", rows=4)
    tokens, labels = pynative_runs.counting_rows(4)
    write(folder / "graph.mindrecord", tokens, labels)
    return folder


def write(path, tokens, labels, **columns):
    pairs = ({"input_ids": ids, "labels": row, **columns} for ids, row in zip(tokens, labels))
    write_mindrecord(pairs, str(path), overwrite=True)


@pytest.fixture(scope="module")
def runs(folder):
    """Name of a run -> its losses, and what it has trained."""
    parts = {"training": {"steps": STEPS, "local_batch_size": 1, "global_batch_size": 4, "seed": 1}}
    pair = {"training": {"steps": STEPS, "local_batch_size": 2, "global_batch_size": 2, "seed": 1}}
    once = {"training": {"steps": 1, "local_batch_size": 4, "global_batch_size": 4, "seed": 1}}
    cases = {
        "shifted": ("shifted", {}),
        "graph": ("graph", {}),
        "parts": ("shifted", parts),
        "alone": ("alone", {}),
        "packed": ("packed", pair),
        "mixed": ("mixed", pair),
        # All examples begin with it, so that it acts on all of their tokens.
        "invoked": ("packed", {**pair, "pet_config": {"alora_invocation_tokens": [BEGIN]}}),
        "once": ("shifted", once),
        "faster": ("shifted", {**once, "pet_config": {"loraplus_lr_ratio": 4}}),
        "frozen": ("shifted", {**once, "lr_scheduler": scheduler(0.0)}),
        "noise": ("shifted", {**once, "pet_config": {"neftune_alpha": 5.0}}),
        "again": ("shifted", {**once, "pet_config": {"neftune_alpha": 5.0}}),
        "no_noise": ("shifted", {**once, "pet_config": {"neftune_alpha": 1e-5}}),
    }
    configs = []
    for name, (data, changes) in cases.items():
        callbacks = [{"type": "FillWeights"}, {"type": "RecordLosses", "directory": str(folder / name)}]
        path = folder / f"{data}.mindrecord"
        configs.append(
            pynative_runs.tiny_config("qwen3", path, STEPS, callbacks=callbacks, lora_config=LORA, **changes)
        )
    assert pynative_runs.series(configs, folder) == [None] * len(configs)
    return {name: (pynative_runs.losses(folder / name), pynative_runs.trained(folder / name)) for name in cases}


def scheduler(rate):
    return {"type": "ConstantWarmUpLR", "learning_rate": rate, "warmup_steps": 0}


@pytest.mark.parametrize("name", ["graph", "parts"])
def test_it_trains_as_the_whole_batch_of_shifted_rows_does(runs, name):
    """Rows of graph mode, and micro-batches of one row that have unequal numbers of tokens."""
    np.testing.assert_allclose(runs[name][0], runs["shifted"][0], rtol=1e-5)
    for parameter, expected in runs["shifted"][1].items():
        np.testing.assert_allclose(runs[name][1][parameter], expected, atol=1e-4, err_msg=parameter)


@shows("packed", "qwen3", trainer="pynative")
def test_examples_of_a_packed_row_do_not_see_each_other(runs):
    alone, packed, mixed = (runs[name][0] for name in ("alone", "packed", "mixed"))
    # MindFormers rounds rotary embeddings: an example's logits depend on where it begins, in packed rows or not.
    np.testing.assert_allclose(packed, alone, rtol=3e-4)
    assert abs(mixed[0] - alone[0]) > 5 * abs(packed[0] - alone[0])


def test_flash_attention_gets_the_ends_of_the_examples_in_place_of_a_mask(folder):
    """From the tokens, or from a column of the data; HeldOutLoss gives them too."""
    begins = np.array([0, 300, 1000, 1001])
    tokens = np.random.default_rng(1).integers(4, tiny_runs.VOCABULARY, (4, LONG["seq_length"])).astype(np.int32)
    tokens[:, begins] = BEGIN
    ends = {"actual_seq_len": np.append(begins[1:], LONG["seq_length"]).astype(np.int32)}
    path = folder / "long.mindrecord"
    write(path, tokens, np.roll(tokens, -1, 1), **ends, **{BOUNDARY: np.array([BEGIN], np.int32)})
    configs = []
    for name, compresses in (("mask", False), ("ends", True), ("column", True), ("one_mask", False)):
        model = {**LONG, "use_eod_attn_mask_compression": compresses, "use_attn_mask_compression": name == "one_mask"}
        callbacks = [{"type": "FillWeights"}, {"type": "RecordLosses", "directory": str(folder / name)}]
        callbacks.append({"type": "HeldOutLoss", "dataset_dir": str(path), "batch_size": 2})
        callbacks.append({"type": "RunReport", "directory": str(folder / name)})
        config = {**pynative_runs.tiny_config("qwen3", path, 2), "model": model, "callbacks": callbacks}
        config["training"] = {"steps": 2, "local_batch_size": 2, "global_batch_size": 2, "seed": 1}
        if name == "column":
            config["train_dataset"]["dataloader"]["column_names"] += ["actual_seq_len"]
        configs.append(config)
    *messages, refusal = pynative_runs.series(configs, folder)
    assert messages == [None] * 3
    assert "model.use_attn_mask_compression is True, with which one mask is for all rows" in refusal
    expected, *others = (run_of(folder / name) for name in ("mask", "ends", "column"))
    for found in others:
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def run_of(folder):
    """Returns the losses of a run, and the held-out loss at its end."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = [record["held_out_loss"] for record in map(json.loads, lines) if "held_out_loss" in record]
    return [*pynative_runs.losses(folder), *held_out]


def test_an_adapter_acts_from_its_tokens_on_in_each_example_of_a_packed_row(runs):
    (invoked, trained), (packed, expected) = runs["invoked"], runs["packed"]
    np.testing.assert_allclose(invoked[0], packed[0], rtol=1e-6)
    # Below an attention, which rounds to float16, runs move apart.
    np.testing.assert_allclose(invoked, packed, rtol=5e-5)
    for name, array in expected.items():
        np.testing.assert_allclose(trained[name], array, atol=1e-4, err_msg=name)


@shows("lora_plus", "qwen3", trainer="pynative")
def test_with_lora_plus_the_first_step_of_b_is_ratio_times_as_long(runs):
    before, once, faster = (runs[name][1] for name in ("frozen", "once", "faster"))
    assert {name[-1] for name in before} == {"a", "b"}
    for name, start in before.items():
        ratio = 4 if name.endswith("lora_b") else 1
        np.testing.assert_allclose(faster[name] - start, ratio * (once[name] - start), atol=1e-5, err_msg=name)
        assert np.abs(once[name] - start).max() > 1e-3


@shows("neftune", "qwen3", trainer="pynative")
def test_neftune_adds_noise_that_its_seed_fixes(runs):
    noise, again, none, plain = (runs[name][0][0] for name in ("noise", "again", "no_noise", "once"))
    assert noise == again and abs(noise - plain) > 1e-3
    assert none == pytest.approx(plain, rel=1e-4)
