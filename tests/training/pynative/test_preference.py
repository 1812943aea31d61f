"""Preferences under MindFormers' PyNative Trainer, judged by the losses in NumPy on logits with and without adapter."""

import json

import numpy as np
import pytest
import yaml

from mindlora.data.mindrecord import write_mindrecord
from mindlora.run.checks.data_rows import BOUNDARY
from mindlora.training.preference.settings import preference_settings
from tests.support import preference_oracle, pynative_runs, tiny_runs
from tests.support.pynative_runs import LORA_WITH_EXPERTS, QWEN3, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS, ROWS, BEGIN, HALF, WIDTH = 4, 4, 2, 8, tiny_runs.SEQUENCE + 1
COLUMNS = ["input_ids", "labels", "answers", "pairs"]
FROZEN = {"type": "ConstantWarmUpLR", "learning_rate": 0.0, "warmup_steps": 0}
LOSSES = {
    "dpo": {"loss": "dpo", "beta": 0.5, "label_smoothing": 0.1},
    "simpo": {"loss": "simpo"},
    "kto": {"loss": "kto", "beta": 0.4, "desirable_weight": 1.3},
}


def examples():
    """Returns tokens and answer numbers [rows, 2, WIDTH]: each row has two prompts, of eight tokens with an answer."""
    rng = np.random.default_rng(4)
    tokens = np.full((ROWS, 2, WIDTH), tiny_runs.PAD, np.int32)
    answers = np.full_like(tokens, -1)
    for row in range(ROWS):
        prompt = rng.integers(4, tiny_runs.VOCABULARY, 3)
        for answer in range(2):
            length = int(rng.integers(2, 5))
            said = rng.integers(4, tiny_runs.VOCABULARY, length)
            tokens[row, answer, : 4 + length] = [BEGIN, *prompt, *said]
            answers[row, answer, 4 : 4 + length] = answer
    return tokens, answers


JUDGMENTS = np.array([1, -1, -1, 1], np.int32)


def write(path, tokens, answers, **columns):
    labels = np.where(answers >= 0, tokens, -100).astype(np.int32)
    rows = []
    for number in range(len(tokens)):
        of_row = {name: values[number] for name, values in columns.items() if name != BOUNDARY}
        shared = {BOUNDARY: columns[BOUNDARY]} if BOUNDARY in columns else {}
        rows.append({"input_ids": tokens[number], "labels": labels[number], "answers": answers[number]})
        rows[-1].update({**of_row, **shared})
    write_mindrecord(iter(rows), str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a base, pairs, judged answers, and the pairs with both answers in one row."""
    folder = tmp_path_factory.mktemp("preference")
    pynative_runs.write_base(folder / "base", folder / "hf")
    pynative_runs.write_data(folder / "labels.mindrecord", rows=ROWS)
    tokens, answers = examples()
    write(folder / "pairs.mindrecord", tokens, answers, pairs=np.ones((ROWS, 1), np.int32))
    write(folder / "judged.mindrecord", tokens, answers, judgments=JUDGMENTS[:, None])
    packed = [np.full((ROWS, WIDTH), fill, np.int32) for fill in (tiny_runs.PAD, -1)]
    for array, whole in zip(packed, (tokens, answers)):
        array[:, : 2 * HALF] = whole[:, :, :HALF].reshape(ROWS, -1)
    boundary = np.array([BEGIN], np.int32)
    write(folder / "packed.mindrecord", *packed, pairs=np.ones((ROWS, 1), np.int32), **{BOUNDARY: boundary})
    return folder


# mindlora reference for two runs, and mindlora-run for a third whose reference is another one.
KEEPING = """
import sys
from tests.support import pynative_cpu
pynative_cpu.install()
from mindlora import cli
from mindlora.training.launch import launcher
pissa = ["--pet_config.lora_init", "pissa"]
kept = ["--train_dataset.dataloader.dataset_files", "kept_pissa.mindrecord"]
held_out = ["--callbacks.HeldOutLoss.dataset_dir", "kept_pissa.mindrecord"]
codes = [cli.main(["reference", "kept.yaml"]), cli.main(["reference", "kept.yaml", *pissa, *kept, *held_out])]
refused = [["--preference.loss", "simpo"], ["--checkpoint.no_load_optim", "False"]]
codes += [cli.main(["reference", "kept.yaml", *words]) for words in refused]
columns = ["--train_dataset.dataloader.column_names", "[input_ids, labels, answers, pairs, reference]"]
precomputed = ["--preference.precomputed_reference", "True", *columns]
codes.append(launcher.main(["--config", "kept.yaml", "--mode", "1", *pissa, *precomputed]))
print(*codes)
"""


@pytest.fixture(scope="module")
def kept(folder):
    """What KEEPING printed; kept.mindrecord and kept_pissa.mindrecord are pairs with a reference."""
    tokens, answers = examples()
    for name in ("kept", "kept_pissa"):
        write(folder / f"{name}.mindrecord", tokens, answers, pairs=np.ones((ROWS, 1), np.int32))
    config = pynative_runs.tiny_config("qwen3", folder / "kept.mindrecord", STEPS, preference=LOSSES["dpo"])
    config["train_dataset"]["dataloader"]["column_names"] = COLUMNS
    config["checkpoint"] = {"load_path": str(folder / "base"), "no_load_optim": True, "enable_save": False}
    config["callbacks"] = [{"type": "HeldOutLoss", "dataset_dir": str(folder / "kept.mindrecord")}]
    (folder / "kept.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return pynative_runs.python(["-c", KEEPING], folder)


@pytest.fixture(scope="module")
def messages(folder, kept):
    """Name of a run -> what refused it, or None."""
    parts = {"training": {"steps": STEPS, "local_batch_size": 2, "global_batch_size": 4, "seed": 1}}
    halfway = {"load_path": str(folder / "dpo_saved" / "iteration_00000002")}
    untrained = {"lr_scheduler": FROZEN}
    of_kept = {"load_path": str(folder / "kept_saved" / "iteration_00000002")}
    dpo = LOSSES["dpo"]
    precomputed = {**dpo, "precomputed_reference": True}
    # Name -> data, preference, other nodes.
    runs = {
        "dpo": ("pairs", dpo, {}),
        "resumed": ("pairs", dpo, {"loaded": halfway}),
        "simpo": ("pairs", LOSSES["simpo"], {}),
        "kto": ("judged", LOSSES["kto"], {}),
        "untrained": ("pairs", dpo, untrained),
        "parts": ("pairs", dpo, parts),
        "packed": ("packed", dpo, {}),
        "nf4": ("pairs", dpo, {"pet_config": {"quantize_base": "nf4"}}),
        "noisy": ("pairs", dpo, {"pet_config": {"neftune_alpha": 5.0}}),
        "experts": ("pairs", dpo, {"model": pynative_runs.DEEPSEEK_V3, "lora_config": LORA_WITH_EXPERTS, "loaded": {}}),
        "kept": ("kept", precomputed, {}),
        "kept_resumed": ("kept", precomputed, {"loaded": of_kept}),
        "kept_pissa": ("kept_pissa", precomputed, {"pet_config": {"lora_init": "pissa"}}),
        "kept_later": ("kept", precomputed, {"loaded": halfway}),
        "unknown_loss": ("pairs", {"loss": "dop"}, {}),
        "reward": ("pairs", {"loss": "reward"}, {}),
        "precomputed": ("pairs", {"precomputed_reference": True}, {}),
        "loaded_adapter": ("pairs", dpo, {"pet_config": {"adapter_path": str(folder)}}),
        "pissa": ("pairs", dpo, {"pet_config": {"lora_init": "pissa"}}),
        "wrong_kind": ("judged", dpo, {}),
        "labels": ("labels", dpo, {}),
        "not_said": ("pairs", None, {}),
        "longer": ("pairs", dpo, {"model": {**QWEN3, "seq_length": 12}}),
    }
    configs = []
    for name, (data, preference, nodes) in runs.items():
        path = folder / f"{data}.mindrecord"
        saved = {"enable_save": True, "save_path": str(folder / f"{name}_saved"), "save_interleaved_steps": 2}
        loaded = nodes.pop("loaded", {"load_path": str(folder / "base"), "no_load_optim": True})
        callbacks = [
            {"type": "RecordLosses", "directory": str(folder / name)},
            {"type": "RunReport", "directory": str(folder / name)},
        ]
        if preference is not None:
            callbacks.append({"type": "HeldOutLoss", "dataset_dir": str(path), "every_steps": 1, "batch_size": ROWS})
        if data.startswith("kept"):
            callbacks.append({"type": "ReferenceCheck", "files": [str(path)]})
        if name in (*LOSSES, "untrained"):
            # The rows of the network, each without its last token.
            ids = examples()[0].reshape(-1, WIDTH)[:, :-1].tolist()
            callbacks.append({"type": "RecordLogits", "ids": ids, "path": str(folder / f"{name}.npy")})
        config = pynative_runs.tiny_config("qwen3", path, STEPS)
        last = {"judged": "judgments"}.get(data, "pairs")
        reference = ["reference"] if data.startswith("kept") else []
        config["train_dataset"]["dataloader"]["column_names"] = [*COLUMNS[:3], last, *reference]
        config |= {"checkpoint": {**saved, **loaded}, "callbacks": callbacks, **nodes}
        configs.append({**config, **({"preference": preference} if preference is not None else {})})
    return dict(zip(runs, pynative_runs.series(configs, folder)))


def records(folder, key):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


def answer_log_probabilities(path):
    """Returns log p(answer | prompt) float64 [rows, 2], from the logits of all tokens."""
    tokens, answers = examples()
    logits = np.load(path).astype(np.float64).reshape(ROWS, 2, WIDTH - 1, -1)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    of_tokens = np.take_along_axis(logits, tokens[:, :, 1:, None], -1)[..., 0]
    return np.where(answers[:, :, 1:] >= 0, of_tokens, 0).sum(-1)


@pytest.mark.parametrize("name", LOSSES)
def test_the_held_out_loss_is_that_of_the_logits_with_and_without_the_adapter(folder, messages, name):
    assert messages[name] is messages["untrained"] is None
    settings = preference_settings(LOSSES[name])
    policy, base = (answer_log_probabilities(folder / f"{run}.npy") for run in (name, "untrained"))
    lengths = (examples()[1] >= 0).sum(-1)
    assert np.abs(policy - base).max() > 0.1
    if name == "kto":
        losses = preference_oracle.kto_losses(settings, policy, base, JUDGMENTS)
    else:
        references = base if settings.kind.uses_reference else [None] * ROWS
        losses = [preference_oracle.pair_loss(settings, *each) for each in zip(policy, references, lengths)]
    # MindFormers rounds what goes into attention, and RecordLogits does not.
    assert records(folder / name, "held_out_loss")[-1] == pytest.approx(np.mean(losses), abs=2e-3)
    rewards = settings.beta * (policy - base if settings.kind.uses_reference else policy / lengths)
    if name != "kto":
        accuracy = (rewards[:, 0] > rewards[:, 1]).mean()
        assert records(folder / name, "held_out_reward_accuracy")[-1] == accuracy
        assert records(folder / name, "held_out_reward_chosen")[-1] == pytest.approx(rewards[:, 0].mean(), abs=5e-3)


@pytest.mark.parametrize("name", LOSSES)
@shows("preference", "qwen3", trainer="pynative")
def test_a_step_learns_what_is_measured_before_it(folder, messages, name):
    """All rows are in each step."""
    held_out, losses = records(folder / name, "held_out_loss"), pynative_runs.losses(folder / name)
    np.testing.assert_allclose(losses[1:], held_out[:-1], rtol=1e-5)
    assert losses[-1] < losses[0]
    tokens = int((examples()[1] >= 0).sum())
    expected = tokens if name != "kto" else int((examples()[1][:, 0] >= 0).sum())
    assert records(folder / name, "tokens") == [expected] * STEPS
    assert len(records(folder / name, "reward_accuracy")) == STEPS


@pytest.mark.parametrize("name", ["dpo", "nf4", "experts"])
def test_before_the_first_step_the_model_is_the_reference(folder, messages, name):
    assert messages[name] is None
    assert pynative_runs.losses(folder / name)[0] == pytest.approx(np.log(2), rel=1e-5)
    divergences = records(folder / name, "kl")
    assert divergences[0] == pytest.approx(0, abs=1e-6) and divergences[-1] > 1e-5


def test_noise_is_on_the_model_alone(folder, messages):
    assert messages["noisy"] is None
    assert abs(pynative_runs.losses(folder / "noisy")[0] - np.log(2)) > 1e-4
    held_out = records(folder / "noisy", "held_out_kl")
    assert len(held_out) == STEPS and all(value >= 0 for value in held_out)


def test_a_resumed_run_is_the_rest_of_the_whole_one(folder, messages):
    assert messages["resumed"] is None
    whole, resumed = (pynative_runs.losses(folder / name) for name in ("dpo", "resumed"))
    assert len(whole) == STEPS and resumed == whole[2:]
    whole, resumed = (pynative_runs.trained(folder / name) for name in ("dpo", "resumed"))
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)


def test_a_reference_that_was_kept_is_the_one_that_is_computed_in_each_step(folder, kept, messages):
    assert kept.stdout.splitlines()[-1] == "0 0 1 1 1", kept.stderr[-3000:]
    assert f"{folder / 'kept.mindrecord'}: {ROWS} rows with the reference's log-probabilities" in kept.stdout
    assert "preference: set precomputed_reference: True; train_dataset.dataloader.column_names: add" in kept.stdout
    for message in (
        "precomputed_reference is True, and the loss simpo has no reference",
        "a run goes on, and its reference is that with which it began",
        "kept.mindrecord has log-probabilities of another reference",
    ):
        assert message in kept.stderr
    assert messages["kept"] is None
    for key in ("held_out_loss", "held_out_kl"):
        np.testing.assert_allclose(*(records(folder / name, key) for name in ("kept", "dpo")), rtol=1e-5, atol=1e-6)


def test_a_run_with_a_kept_reference_goes_on(folder, messages):
    assert messages["kept_resumed"] is None
    whole, resumed = (pynative_runs.losses(folder / name) for name in ("kept", "kept_resumed"))
    assert len(whole) == STEPS and resumed == whole[2:]
    whole, resumed = (pynative_runs.trained(folder / name) for name in ("kept", "kept_resumed"))
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)


def test_a_base_that_lora_init_changes_has_a_kept_reference(folder, messages):
    assert messages["kept_pissa"] is None
    losses = pynative_runs.losses(folder / "kept_pissa")
    assert losses[0] == pytest.approx(np.log(2), abs=1e-3) and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name, tolerance", [("parts", 1e-5), ("packed", 3e-4)])
def test_micro_batches_and_packed_rows_are_the_whole_batch(folder, messages, name, tolerance):
    """MindFormers rounds rotary embeddings: logits depend on where an example begins."""
    assert messages[name] is messages["dpo"] is None
    found, expected = (pynative_runs.losses(folder / run) for run in (name, "dpo"))
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    assert records(folder / name, "tokens") == records(folder / "dpo", "tokens")


@pytest.mark.parametrize(
    "name, message",
    [
        ("unknown_loss", "dop"),
        ("reward", "the loss reward needs one score of a text"),
        ("precomputed", "the last of which mindlora reference adds"),
        ("kept_later", "was saved by a run whose reference did not come from its data"),
        ("loaded_adapter", "is not the base with the adapter off, with which the loss dpo compares"),
        ("pissa", "lora_init is pissa, so the model that training finds is not the base"),
        ("wrong_kind", "the loss dpo compares answers. Write column_names"),
        ("labels", "lacks the columns answers, pairs"),
        ("not_said", "holds preferences, but the run learns labels. Set preference: {loss: dpo}"),
        ("longer", "model.seq_length is 12, but the rows of"),
    ],
)
def test_it_is_refused_by_name(messages, name, message):
    assert message in (messages[name] or "")
