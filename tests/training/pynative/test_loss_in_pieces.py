"""Head and loss in pieces under the PyNative Trainer: as with the logits of all tokens, or a reason why not."""

import json

import numpy as np
import pytest

from mindlora.data.mindrecord import write_mindrecord
from mindlora.run.checks.data_rows import BOUNDARY
from tests.support import pynative_runs, tiny_runs
from tests.support.pynative_runs import DEEPSEEK_V3, QWEN3, only_with_pynative_trainer

pytestmark = only_with_pynative_trainer
PIECE, ROWS, BEGIN, HALF = 5, 4, 2, tiny_runs.SEQUENCE // 2
# Cells after the last attention, into which MindFormers rounds: from it on, runs that differ in rounding move apart.
LAST = {**pynative_runs.LORA, "target_modules": r"layers\.1\.(self_attention.linear_proj|mlp.*linear)"}
ON_THE_HEAD = {**LAST, "target_modules": f"output_layer|{LAST['target_modules']}"}
# Likewise, tokens go to all experts.
EXPERTS = {**DEEPSEEK_V3, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4}
# Name -> data, steps, nodes of the YAML.
RUNS = {
    "labels": ("labels", 20, {}),
    "packed": ("packed", 3, {"training": {"steps": 3, "local_batch_size": 2, "global_batch_size": ROWS, "seed": 1}}),
    "saved_head": ("labels", 3, {"pet_config": {"modules_to_save": ["lm_head"]}}),
    "tied": ("labels", 3, {"model": {**QWEN3, "tie_word_embeddings": True, "chunk_loss_num": 2}}),
    "experts": ("labels", 3, {"model": EXPERTS}),
    "adapted_head": ("labels", 3, {"lora_config": ON_THE_HEAD}),
    "dpo": ("pairs", 3, {"preference": {"loss": "dpo"}, "lora_config": ON_THE_HEAD}),
    "simpo_experts": ("pairs", 3, {"preference": {"loss": "simpo"}, "model": EXPERTS}),
}
# Runs that make the logits of all tokens -> what the log says of them.
WHOLE = {"dora": "the output head has an adapter of DoRA", "predicting": "the model predicts several tokens"}


def write(path, tokens, labels, **columns):
    write_mindrecord(({"input_ids": ids, "labels": row, **columns} for ids, row in zip(tokens, labels)), str(path))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(the folder, what the log says of each run's head) of all RUNS, twice each, and of WHOLE."""
    folder = tmp_path_factory.mktemp("pieces")
    tokens, labels = pynative_runs.counting_rows(ROWS)
    write(folder / "labels.mindrecord", tokens, labels)
    packed = tokens.copy()
    packed[:, [0, HALF]] = BEGIN
    write(folder / "prompts.mindrecord", tokens, np.where(labels == pynative_runs.IGNORED, -100, labels))
    write(folder / "packed.mindrecord", packed, labels, **{BOUNDARY: np.array([BEGIN], np.int32)})
    # Two answers in a row of the data, to one prompt.
    answers = np.where(np.arange(tokens.shape[1]) < HALF, 0, 1) * np.ones_like(tokens)
    answers[:, [0, HALF]] = -1
    said = np.where(answers >= 0, packed, -100).astype(np.int32)
    rows = ({"input_ids": a, "labels": b, "answers": c} for a, b, c in zip(packed, said, answers.astype(np.int32)))
    shared = {"pairs": np.ones(1, np.int32), BOUNDARY: np.array([BEGIN], np.int32)}
    write_mindrecord(({**row, **shared} for row in rows), str(folder / "pairs.mindrecord"))
    configs = [config_of(folder, name, setting, *run) for name, run in RUNS.items() for setting in (False, PIECE)]
    # MindFormers' loss has no kernel on a CPU for this label.
    prompts = {"model": {**QWEN3, "ignore_token_id": -100}}
    configs.append(config_of(folder, "prompts", PIECE, "prompts", 3, prompts))
    dora = {"lora_config": ON_THE_HEAD, "pet_config": {"use_dora": True}}
    configs.append(config_of(folder, "dora", True, "labels", 1, dora))
    # A magnitude is made of weights that stay.
    del configs[-1]["callbacks"][0]
    predicting = {"model": {**DEEPSEEK_V3, "num_nextn_predict_layers": 1}}
    configs.append(config_of(folder, "predicting", True, "labels", 1, predicting))
    # Such a model has no kernels on a CPU: this ends the run before its first step.
    configs[-1]["callbacks"][-1]["dataset_dir"] = "missing"
    given, found = folder / "given.json", folder / "found.json"
    given.write_text(json.dumps(configs), encoding="utf-8")
    run = pynative_runs.python(["-m", "tests.support.pynative_series", given, found], folder)
    assert run.returncode == 0, run.stderr[-3000:]
    *messages, last = json.loads(found.read_text(encoding="utf-8"))
    assert messages == [None] * len(messages) and "dataset_dir is missing" in last
    lines = (run.stdout + run.stderr).splitlines()
    return folder, [line.partition("Head and loss: ")[2] for line in lines if "Head and loss: " in line]


def config_of(folder, name, setting, data, steps, nodes):
    """Returns the content of a run's YAML, which has the setting."""
    directory, path = folder / f"{name}_{setting}", str(folder / f"{data}.mindrecord")
    config = pynative_runs.tiny_config("qwen3", path, steps, lora_config=LAST)
    if data == "pairs":
        config["train_dataset"]["dataloader"]["column_names"] = ["input_ids", "labels", "answers", "pairs"]
    callbacks = [
        {"type": "FillWeights"},
        {"type": "RecordLosses", "directory": str(directory)},
        {"type": "RunReport", "directory": str(directory)},
        {"type": "HeldOutLoss", "dataset_dir": path, "every_steps": steps, "batch_size": ROWS},
    ]
    pet_config = {**nodes.get("pet_config", {}), "loss_in_pieces": setting}
    return {**config, **nodes, "pet_config": pet_config, "callbacks": callbacks}


def measured(folder, key):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return np.array([record[key] for record in map(json.loads, lines) if key in record])


@pytest.mark.parametrize("name", RUNS)
def test_it_trains_as_with_the_logits_of_all_tokens(runs, name):
    folder = runs[0]
    whole, pieces = (folder / f"{name}_{setting}" for setting in (False, PIECE))
    expected, found = (np.array(pynative_runs.losses(run)) for run in (whole, pieces))
    assert len(expected) == RUNS[name][1] and abs(expected[-1] / expected[0] - 1) > 1e-3
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(*(measured(run, "gradient_norm")[0] for run in (pieces, whole)), rtol=2e-6)
    (held_out,) = measured(pieces, "held_out_loss")
    assert held_out == pytest.approx(*measured(whole, "held_out_loss"), rel=1e-5)
    weights, expected = (pynative_runs.trained(run) for run in (pieces, whole))
    assert weights.keys() == expected.keys()
    assert any("output_layer" in path for path in weights) == (name in ("saved_head", "adapted_head", "dpo"))
    for path, weight in expected.items():
        np.testing.assert_allclose(weights[path], weight, rtol=0, atol=1e-5 * np.abs(weight).max(), err_msg=path)


def test_tokens_without_a_label_are_left_out(runs):
    """In the other run, they have a label that the model ignores."""
    expected, found = (pynative_runs.losses(runs[0] / f"{name}_{PIECE}") for name in ("labels", "prompts"))
    np.testing.assert_allclose(found, expected[: len(found)], rtol=1e-6)


def test_the_log_says_which_of_the_two_it_is(runs):
    at_once = "the logits of all tokens are made at once, as "
    in_pieces = f"{PIECE} tokens at a time, so that no logits of all tokens are made."
    expected = [f"{at_once}pet_config.loss_in_pieces is False.", in_pieces] * len(RUNS)
    assert runs[1] == [*expected, in_pieces, *(f"{at_once}{reason}." for reason in WHOLE.values())]
