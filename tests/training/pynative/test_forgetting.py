"""Forgetting, ForgettingBudget and SampleAnswers under MindFormers' PyNative Trainer."""

import json

import numpy as np
import pytest

from mindlora.data import tokenizers
from mindlora.training.report.history import read_history
from tests.support import pynative_runs
from tests.support.pynative_runs import QWEN3, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS, HALF, TOKENS = 6, 3, 280
MODEL = {**QWEN3, "bos_token_id": 2, "eos_token_id": 3}
FROZEN = {"type": "ConstantWarmUpLR", "learning_rate": 0.0, "warmup_steps": 0}
FORGETTING = {"type": "Forgetting", "every_steps": 1, "samples": 6, "max_tokens": 9, "batch_size": 4}
PROMPTS = ["good", "good morning, good"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a base, rows, and a tokenizer."""
    folder = tmp_path_factory.mktemp("forgetting")
    pynative_runs.write_data(folder / "rows.mindrecord", rows=4 * STEPS)
    pynative_runs.write_base(folder / "base", folder / "hf")
    trained = tokenizers.fit_tokenizer(["good morning, good evening, good night"] * 3, TOKENS)
    tokenizers.save_tokenizer(trained, str(folder / "tokenizer"))
    return folder


def train(folder, runs):
    """Runs each of name -> (callbacks, other nodes); returns name -> what refused it, or None."""
    configs = []
    for name, (callbacks, nodes) in runs.items():
        saved = {"enable_save": True, "save_path": str(folder / f"{name}_saved"), "save_interleaved_steps": HALF}
        loaded = nodes.pop("loaded", {"load_path": str(folder / "base"), "no_load_optim": True})
        recorded = [
            {"type": "LoraCheckpoint", "save_steps": STEPS, "directory": str(folder / f"{name}_peft")},
            {"type": "RecordLosses", "directory": str(folder / name)},
            {"type": "RunReport", "directory": str(folder / name)},
        ]
        nodes = {"model": MODEL, "checkpoint": {**saved, **loaded}, "callbacks": [*callbacks, *recorded], **nodes}
        configs.append({**pynative_runs.tiny_config("qwen3", folder / "rows.mindrecord", STEPS), **nodes})
        configs[-1]["train_dataset"]["dataloader"]["shuffle"] = False
    return dict(zip(runs, pynative_runs.series(configs, folder)))


@pytest.fixture(scope="module")
def messages(folder):
    """Name of a run -> what refused it, or None."""
    answers = {"type": "SampleAnswers", "prompts": PROMPTS, "tokenizer": str(folder / "tokenizer")}
    answers |= {"template": "plain", "max_tokens": 4}
    larger = {**MODEL, "vocab_size": TOKENS}
    found = train(
        folder,
        {
            "measured": ([FORGETTING], {}),
            "resumed": ([FORGETTING], {"loaded": {"load_path": str(folder / "measured_saved" / step_name(HALF))}}),
            "unmeasured": ([], {}),
            "frozen": ([FORGETTING], {"lr_scheduler": FROZEN}),
            "no_beginning": ([FORGETTING], {"model": QWEN3}),
            "alone": ([{"type": "ForgettingBudget", "budget": 1.0}], {}),
            "answers": ([answers], {"model": larger, "loaded": {}}),
        },
    )
    # As far away as the model is after the second step, and from the third one on it is further.
    budget = forgetting(folder, "measured")[1] * 1.01
    samples = state_of(folder, "measured")["Forgetting"]["samples"]
    pynative_runs.write_samples(folder / "samples.mindrecord", samples)
    held_out = {"type": "HeldOutLoss", "dataset_dir": str(folder / "samples.mindrecord"), "every_steps": STEPS}
    tuned = {"pet_config": {"adapter_path": str(folder / "measured_peft" / f"step_{STEPS}")}}
    slower = [FORGETTING, {"type": "ForgettingBudget", "budget": budget, "max_returns": 9, "rate_cut": 0.5}]
    halfway = {"load_path": str(folder / "slower_saved" / step_name(HALF))}
    return found | train(
        folder,
        {
            "base": ([held_out], {"lr_scheduler": FROZEN}),
            "tuned": ([held_out], {"lr_scheduler": FROZEN, **tuned}),
            "ended": ([FORGETTING, {"type": "ForgettingBudget", "budget": budget}], {}),
            "short": ([], {"training": {"steps": 2, "local_batch_size": 4, "global_batch_size": 4, "seed": 1}}),
            "slower": (slower, {}),
            "slower_resumed": (slower, {"loaded": halfway}),
        },
    )


def step_name(step):
    return f"iteration_{step:08d}"


def state_of(folder, name, step=STEPS):
    """Returns what was saved of the callbacks at a step."""
    path = folder / f"{name}_saved" / step_name(step) / "mindlora_run.json"
    return json.loads(path.read_text(encoding="utf-8"))["callbacks"]


def records(folder, key):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


def forgetting(folder, name):
    return records(folder / name, "forgetting")


def is_the_rest(folder, name, resumed):
    whole, rest = (pynative_runs.losses(folder / run) for run in (name, resumed))
    arrays, others = (pynative_runs.trained(folder / run) for run in (name, resumed))
    equal = all(np.array_equal(arrays[key], others[key]) for key in arrays)
    return equal and len(whole) == STEPS and rest == whole[HALF:]


@shows("forgetting", "qwen3", trainer="pynative")
def test_it_is_the_difference_of_two_held_out_losses_on_the_texts_of_the_base(folder, messages):
    assert messages["measured"] is messages["base"] is messages["tuned"] is None
    base, tuned = (records(folder / name, "held_out_loss")[-1] for name in ("base", "tuned"))
    measured = forgetting(folder, "measured")
    assert len(measured) == STEPS and measured[-1] > 0.005
    assert measured[-1] == pytest.approx(tuned - base, abs=1e-5)
    samples = state_of(folder, "measured")["Forgetting"]["samples"]
    assert all(sample[0] == MODEL["bos_token_id"] and 1 < len(sample) <= 10 for sample in samples)


def test_an_adapter_that_changes_nothing_has_forgotten_nothing_and_measuring_changes_nothing(folder, messages):
    assert messages["frozen"] is messages["unmeasured"] is None
    assert forgetting(folder, "frozen") == [0.0] * STEPS
    measured, unmeasured = (pynative_runs.losses(folder / name) for name in ("measured", "unmeasured"))
    assert measured == unmeasured


def test_a_resumed_run_measures_on_with_the_same_texts(folder, messages):
    assert messages["resumed"] is None
    assert is_the_rest(folder, "measured", "resumed")
    assert forgetting(folder, "resumed") == forgetting(folder, "measured")[HALF:]


def test_beyond_the_budget_a_run_goes_back_and_ends(folder, messages):
    assert messages["ended"] is None
    measured = forgetting(folder, "measured")
    beyond = next(step for step, value in enumerate(measured, 1) if value > measured[1] * 1.01)
    assert len(pynative_runs.losses(folder / "ended")) == beyond < STEPS
    (event,) = [event for event in read_history(str(folder / "ended")).events if event["event"] == "budget"]
    assert f"Adapter and optimizer are those of step {beyond - 1} again, and the run ends" in event["message"]
    left, expected = (pynative_runs.trained(folder / name) for name in ("ended", "short"))
    assert beyond == 3 and all(np.array_equal(left[name], expected[name]) for name in expected)


def test_or_goes_on_more_slowly_and_resumes_so(folder, messages):
    assert messages["slower"] is messages["slower_resumed"] is None
    assert state_of(folder, "slower", HALF)["ForgettingBudget"]["factor"] < 1
    assert is_the_rest(folder, "slower", "slower_resumed")
    budget = forgetting(folder, "measured")[1] * 1.01
    # What is measured last is of the state that is gone, if it was too far away.
    assert min(forgetting(folder, "slower")) <= budget


@shows("answers", "qwen3", trainer="pynative")
def test_answers_before_and_after_are_in_the_report(folder, messages):
    assert messages["answers"] is None
    pynative_runs.samples_before_and_after(folder / "answers", PROMPTS, STEPS)


@pytest.mark.parametrize(
    "name, message",
    [
        ("no_beginning", "bos_token_id of the model is None"),
        ("alone", "ForgettingBudget needs forgetting, which nothing measures"),
    ],
)
def test_it_is_refused_by_name(messages, name, message):
    assert message in (messages[name] or "")
