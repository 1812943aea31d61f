"""Classifiers and reward models under MindFormers' PyNative Trainer, judged by NumPy's losses of their own scores."""

import json

import numpy as np
import pytest
import yaml

from mindlora.data.mindrecord import write_mindrecord
from mindlora.run.plan.report import make_plan
from mindlora.training.classifier.labels import label_measures
from tests.support import pynative_runs, tiny_runs
from tests.support.peers.peer import read_json
from tests.support.pynative_runs import QWEN3, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS, ROWS, WIDTH, LABELS = 4, 4, tiny_runs.SEQUENCE + 1, 4
# A CPU's GatherD takes no -100, so the last label is one that no row has.
IGNORED = LABELS - 1
TEXTS = {**QWEN3, "architectures": "Qwen3ForSequenceClassification", "num_labels": LABELS, "ignore_token_id": IGNORED}
WORDS = {**TEXTS, "architectures": "Qwen3ForTokenClassification", "tie_word_embeddings": True}
REWARDS = {**TEXTS, "num_labels": 1}
REWARD = {"loss": "reward", "beta": 0.5}


def texts(words):
    """Returns tokens and labels [ROWS, WIDTH]: of a text one label, after its last token, or one for each word."""
    rng = np.random.default_rng(2)
    tokens = np.full((ROWS, WIDTH), tiny_runs.PAD, np.int32)
    labels = np.full_like(tokens, IGNORED)
    for row, length in enumerate((7, WIDTH - 1, 4, 9)):
        tokens[row, :length] = rng.integers(4, tiny_runs.VOCABULARY, length)
        places = np.arange(1, length + 1, 2) if words else [length]
        labels[row, places] = rng.integers(0, IGNORED, len(places))
    return tokens, labels


def pairs():
    """Returns tokens and answer numbers [ROWS, 2, WIDTH]; the second answer of the first row ends with the row."""
    rng = np.random.default_rng(3)
    tokens = np.full((ROWS, 2, WIDTH), tiny_runs.PAD, np.int32)
    answers = np.full_like(tokens, -1)
    for row in range(ROWS):
        for answer in range(2):
            length = WIDTH if (row, answer) == (0, 1) else int(rng.integers(5, WIDTH))
            tokens[row, answer, :length] = rng.integers(4, tiny_runs.VOCABULARY, length)
            answers[row, answer, 3:length] = answer
    return tokens, answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a base, labeled texts and words, and pairs of answers."""
    folder = tmp_path_factory.mktemp("classifier")
    pynative_runs.write_base(folder / "base", folder / "hf")
    for name, words in (("texts", False), ("words", True)):
        rows = [{"input_ids": ids, "labels": row} for ids, row in zip(*texts(words))]
        write_mindrecord(iter(rows), str(folder / f"{name}.mindrecord"))
    tokens, answers = pairs()
    rows = [
        {"input_ids": ids, "labels": np.where(which < 0, -100, ids).astype(np.int32), "answers": which}
        for ids, which in zip(tokens, answers)
    ]
    marked = ({**row, "pairs": np.ones(1, np.int32)} for row in rows)
    write_mindrecord(marked, str(folder / "pairs.mindrecord"))
    return folder


@pytest.fixture(scope="module")
def messages(folder):
    """Name of a run -> what refused it, or None."""
    halfway = {"load_path": str(folder / "texts_saved" / "iteration_00000002")}
    # Name -> data, model, other nodes.
    runs = {
        "texts": ("texts", TEXTS, {}),
        "resumed": ("texts", TEXTS, {"loaded": halfway}),
        "words": ("words", WORDS, {}),
        "rewards": ("pairs", REWARDS, {"preference": REWARD}),
        "further": ("texts", TEXTS, {"pet_config": {"adapter_path": str(folder / "texts_peft" / "step_4")}}),
        "no_number": ("texts", {**TEXTS, "num_labels": None}, {}),
        "no_classifier": ("texts", {**QWEN3, "num_labels": 2}, {}),
        "reward_of_tokens": ("pairs", QWEN3, {"preference": REWARD}),
        "dpo": ("pairs", REWARDS, {"preference": {"loss": "dpo"}}),
        "samples": ("texts", TEXTS, {"callbacks": [{"type": "SampleAnswers", "tokenizer": "t", "prompts": ["p"]}]}),
        "other_number": ("texts", {**TEXTS, "num_labels": 5}, {"loaded": halfway}),
    }
    configs = []
    for name, (data, model, nodes) in runs.items():
        path = folder / f"{data}.mindrecord"
        saved = {"enable_save": True, "save_path": str(folder / f"{name}_saved"), "save_interleaved_steps": 2}
        loaded = nodes.pop("loaded", {"load_path": str(folder / "base"), "no_load_optim": True})
        ids = (pairs()[0].reshape(-1, WIDTH) if data == "pairs" else texts(data == "words")[0])[:, :-1].tolist()
        config = pynative_runs.tiny_config("qwen3", path, STEPS) | {"model": model, **nodes}
        config["checkpoint"] = {**saved, **loaded}
        config["callbacks"] = [
            *nodes.get("callbacks", []),
            {"type": "RecordLosses", "directory": str(folder / name)},
            {"type": "RunReport", "directory": str(folder / name)},
            {"type": "HeldOutLoss", "dataset_dir": str(path), "every_steps": 1, "batch_size": 3},
            {"type": "LoraCheckpoint", "directory": str(folder / f"{name}_peft")},
            {"type": "RecordLogits", "ids": ids, "path": str(folder / f"{name}.npy")},
        ]
        if data == "pairs":
            config["train_dataset"]["dataloader"]["column_names"] = ["input_ids", "labels", "answers", "pairs"]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        configs.append(config)
    return dict(zip(runs, pynative_runs.series(configs, folder)))


def records(folder, key):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


@pytest.mark.parametrize("name", ["texts", "words"])
@shows("held_out", "qwen3", trainer="pynative")
def test_the_held_out_loss_and_measures_are_those_of_the_scores(folder, messages, name):
    assert messages[name] is None
    scores = np.load(folder / f"{name}.npy").astype(np.float64).reshape(ROWS, WIDTH - 1, LABELS)
    labels = texts(name == "words")[1][:, 1:]
    counts = labels != IGNORED
    log_probabilities = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    losses = -np.take_along_axis(log_probabilities, labels[..., None], -1)[..., 0][counts]
    # MindFormers rounds what goes into attention, and RecordLogits does not.
    assert records(folder / name, "held_out_loss")[-1] == pytest.approx(losses.mean(), abs=2e-3)
    confusion = np.zeros((LABELS, LABELS))
    np.add.at(confusion, (labels[counts], scores[counts].argmax(-1)), 1)
    for measure, value in label_measures(confusion).items():
        assert records(folder / name, f"held_out_{measure}")[-1] == value
    assert records(folder / name, "tokens") == [counts.sum()] * STEPS


@pytest.mark.parametrize("name", ["texts", "words", "rewards"])
@shows("classifier", "qwen3", trainer="pynative")
def test_a_step_learns_what_is_measured_before_it(folder, messages, name):
    """All rows are in each step."""
    assert messages[name] is None
    held_out, losses = records(folder / name, "held_out_loss"), pynative_runs.losses(folder / name)
    np.testing.assert_allclose(losses[1:], held_out[:-1], rtol=1e-5)
    assert losses[-1] < 0.9 * losses[0]


def test_a_pair_is_compared_by_the_scores_at_the_ends_of_its_answers(folder, messages):
    scores = np.load(folder / "rewards.npy").astype(np.float64).reshape(ROWS, 2, WIDTH - 1)
    # The model does not see the last token of a row.
    ends = np.minimum((pairs()[0] != tiny_runs.PAD).sum(-1) - 1, WIDTH - 2)
    chosen, rejected = np.moveaxis(np.take_along_axis(scores, ends[..., None], -1)[..., 0], 1, 0)
    losses = np.logaddexp(0, REWARD["beta"] * (rejected - chosen))
    assert records(folder / "rewards", "held_out_loss")[-1] == pytest.approx(losses.mean(), abs=2e-3)
    assert records(folder / "rewards", "held_out_reward_accuracy")[-1] == (chosen > rejected).mean()


def test_a_resumed_run_is_the_rest_of_the_whole_one(folder, messages):
    assert messages["resumed"] is None
    whole, resumed = (pynative_runs.losses(folder / name) for name in ("texts", "resumed"))
    assert len(whole) == STEPS and resumed == whole[2:]
    whole, resumed = (pynative_runs.trained(folder / name) for name in ("texts", "resumed"))
    assert "score.weight" in whole and all(np.array_equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize("name, task, has_bias", [("texts", "SEQ_CLS", False), ("words", "TOKEN_CLS", True)])
def test_the_adapter_is_saved_with_its_head_as_peft_has_it(folder, messages, name, task, has_bias):
    saved = read_json(folder / f"{name}_peft" / "step_4", "adapter_config.json")
    assert saved["task_type"] == task and saved["modules_to_save"] == ["score"]
    trained = pynative_runs.trained(folder / name)
    plan = make_plan(str(folder / f"{name}.yaml"))
    assert plan.trained == sum(array.size for array in trained.values())
    assert plan.adapter_file == (folder / f"{name}_peft" / "step_4" / "adapter_model.safetensors").stat().st_size
    assert ("score.bias" in trained) is has_bias and 0.01 < trained["score.weight"].std() < 0.1


def test_an_adapter_with_its_head_trains_further(folder, messages):
    assert messages["further"] is None
    last = records(folder / "texts", "held_out_loss")[-1]
    assert pynative_runs.losses(folder / "further")[0] == pytest.approx(last, rel=1e-5)


@pytest.mark.parametrize(
    "name, message",
    [
        ("no_number", "num_labels is None: it must be a whole number of at least 1"),
        ("no_classifier", "Set model.architectures: Qwen3ForSequenceClassification or Qwen3ForTokenClassification, or"),
        ("reward_of_tokens", "preference: the loss reward needs one score of a text"),
        ("dpo", "the loss dpo compares answers that a model writes"),
        ("samples", "SampleAnswers needs a model that writes texts"),
        ("other_number", "has score.weight of shape [4, "),
    ],
)
def test_it_is_refused_by_name(messages, name, message):
    assert message in (messages[name] or "")
