"""Classifiers of words on tiny models: guarded, resumed, and on two processes."""

import types

import numpy as np
import pytest
import yaml

from mindlora.data.mindrecord import write_mindrecord
from mindlora.files.adapters import files
from mindlora.training.report.history import read_history
from tests.e2e.test_guarded_runs import POISONED
from tests.e2e.test_msrun import ENTRY
from tests.support import tiny_runs
from tests.support.mcore_networks import ARCHITECTURES
from tests.support.mcore_networks import tiny_config as mcore_config
from tests.support.ranks import run_ranks
from tests.support.runs import SEQUENCE, SIZES, VOCABULARY
from tests.support.what_runs import OF_EXPERTS, showing, shows

LABELS, ROWS, BATCH, EPOCHS = 3, 32, 8, 4
STEPS = ROWS // BATCH * EPOCHS
BAD_STEP = STEPS // 2 + 2


def row(rng):
    """Words of one token, labeled by a third of the vocabulary; some have no label."""
    tokens = rng.integers(4, VOCABULARY, SEQUENCE + 1).astype(np.int32)
    tokens[rng.integers(SEQUENCE // 2, SEQUENCE + 1) :] = tiny_runs.PAD
    is_labeled = (tokens != tiny_runs.PAD) & (rng.random(SEQUENCE + 1) < 0.8)
    labels = np.where(is_labeled, tokens * LABELS // VOCABULARY, tiny_runs.IGNORED)
    # A label stands behind its token.
    return {"input_ids": tokens, "labels": np.append(tiny_runs.IGNORED, labels[:-1]).astype(np.int32)}


class Runs:
    """Runs of one configuration on 32 rows, eight more held out."""

    # Adam divides by the size of the gradient, which would hide one twice as large.
    eps, rate = 1.0, 4.0
    # What held-out accuracy and F1 reach at least; by chance, a third.
    least = 0.7

    def __init__(self, folder):
        self.folder = folder
        self.train, self.held_out = folder / "train.mindrecord", folder / "heldout.mindrecord"
        rng = np.random.default_rng(0)
        write_mindrecord((row(rng) for _ in range(ROWS)), str(self.train))
        write_mindrecord((row(rng) for _ in range(8)), str(self.held_out))

    def config(self, *callbacks, processes=1, **checkpoint):
        """The YAML of one process, or of several that have the batch of one together."""
        callbacks = [
            *callbacks,
            {"type": "LoraCheckpoint", "save_steps": STEPS // 2, **checkpoint},
            {"type": "TrainingGuard", "snapshot_steps": 4},
            {"type": "WarmUp", "steps": 4},
        ]
        # Several processes with a load_checkpoint would wait at a Barrier, which has no CPU kernel.
        config = self.model_config(callbacks)
        config["train_dataset"]["data_loader"]["shuffle"] = False
        config["runner_config"]["batch_size"] = BATCH // processes
        config["optimizer"]["eps"], config["lr_schedule"]["learning_rate"] = self.eps, self.rate
        if processes > 1:
            config["use_parallel"], config["parallel_config"] = True, {"data_parallel": processes}
        return config

    def model_config(self, callbacks):
        """The YAML, but for the batch and the rate."""
        config = tiny_runs.tiny_config(self.train, EPOCHS, callbacks, load_checkpoint="")
        config["model"]["arch"]["type"] = "LlamaForTokenClassification"
        config["model"]["model_config"].update(SIZES, qkv_has_bias=True, num_labels=LABELS)
        return config

    def start(self, name, *callbacks, **checkpoint):
        """Runs it in one process, with a step whose loss is NaN."""
        poison = {"type": "Poison", "factors": {BAD_STEP: float("nan")}}
        config = self.config(*callbacks, poison, **checkpoint)
        config["runner_wrapper"]["type"] = "PoisonedStep"
        output = self.folder / name
        process = tiny_runs.launch(config, output, POISONED)
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
        return run_of(output)

    def start_two(self):
        """Runs it in two processes."""
        folder = self.folder / "two"
        folder.mkdir()
        (folder / "run.yaml").write_text(yaml.safe_dump(self.config(processes=2)))
        run_ranks(2, folder, ENTRY, "--config", "run.yaml", "--output_dir", folder / "output")
        return run_of(folder / "output")


def run_of(output):
    steps = output / "lora_checkpoint"
    return types.SimpleNamespace(steps=steps, losses=tiny_runs.losses(output), history=read_history(str(output)))


class McoreRuns(Runs):
    """The same, of one of MindFormers' mcore models."""

    # With the Llama's, it would not learn much in so few steps.
    eps, rate = 1e-3, 3e-2

    def __init__(self, folder, model):
        super().__init__(folder)
        self.model = model
        if model in OF_EXPERTS:
            # Random experts learn a little less in as many steps.
            self.least = 0.6

    def model_config(self, callbacks):
        """The YAML, but for the batch and the rate."""
        pet = {"lora_rank": 8, "lora_alpha": 12, "target_modules": "all-linear"}
        if self.model in OF_EXPERTS:
            pet["target_parameters"] = ["mlp.experts"]
        config = mcore_config(self.train, EPOCHS, callbacks, pet, self.model, load_checkpoint="")
        kind = ARCHITECTURES[self.model].replace("ForCausalLM", "ForTokenClassification")
        config["model"]["model_config"].update(architectures=kind, num_labels=LABELS)
        return config


@pytest.fixture(scope="module")
def runs(request, library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifiers")
    return Runs(folder) if request.param == "qwen2" else McoreRuns(folder, request.param)


def of_models(*names):
    return pytest.mark.parametrize("runs", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def whole(runs):
    held_out = {"type": "HeldOutLoss", "dataset_dir": str(runs.held_out), "every_steps": STEPS // 2}
    return runs.start("whole", held_out, best_metric="held_out_f1", best_mode="max")


@of_models("qwen2", pytest.param("qwen3", marks=pytest.mark.long), *showing("classifier", "guard"))
def test_words_get_their_labels_and_a_bad_step_is_skipped(whole, runs):
    accuracy, f1 = (whole.history.series(f"held_out_{name}")[1] for name in ("accuracy", "f1"))
    assert accuracy[-1] > runs.least and f1[-1] > runs.least
    assert [event["step"] for event in whole.history.events if event["event"] == "skipped_step"] == [BAD_STEP]
    adapter = files.read(str(whole.steps / "best"))
    assert adapter.peft_fields["task_type"] == "TOKEN_CLS"
    shapes = {name: array.shape for name, array in adapter.saved_modules.items()}
    assert shapes == {"score.weight": (LABELS, SIZES["hidden_size"]), "score.bias": (LABELS,)}


@of_models("qwen3_moe")
def test_a_resumed_run_equals_the_uninterrupted_one(runs, whole):
    half = STEPS // 2
    run = runs.start("resumed", resume=str(whole.steps / f"step_{half}"))
    assert run.losses.keys() == {step for step in whole.losses if step > half}
    assert all(loss == whole.losses[step] or np.isnan(loss) for step, loss in run.losses.items())
    tiny_runs.assert_same_state(whole.steps / f"step_{STEPS}", run.steps / f"step_{STEPS}")


@of_models("qwen3")
@shows("classifier", "qwen3", place="processes")
def test_two_processes_train_what_one_trains_on_the_joined_batch(runs, whole):
    two = runs.start_two()
    half = STEPS // 2
    losses = np.array([[run.losses[step] for step in range(1, half + 1)] for run in (whole, two)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    one, other = (tiny_runs.state(run.steps / f"step_{half}") for run in (whole, two))
    trained = [name for name in one if name.startswith("base_model")]
    assert any("score" in name for name in trained)
    for name in trained:
        np.testing.assert_allclose(other[name], one[name], atol=5e-6)
        assert np.abs(one[name]).max() > 1e-6
