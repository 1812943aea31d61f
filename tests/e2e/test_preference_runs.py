"""Runs that learn from preferences: with the reference kept in the data, on several processes, resumed, and with what
else a YAML may ask for."""

import re
import shlex
import shutil
import types

import mindspore as ms
import numpy as np
import pytest
import yaml

from mindlora.data.mindrecord import write_mindrecord
from mindlora.files.base.quantize import quantize_checkpoint
from mindlora.training.preference.loss import preference_loss
from mindlora.training.preference.settings import preference_settings
from mindlora.training.report.history import read_history
from tests.conftest import in_mode
from tests.e2e.test_msrun import ENTRY
from tests.support import tiny_runs
from tests.support.mcore_networks import MAKE, scaled, with_adapters
from tests.support.mcore_networks import tiny_config as mcore_config
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, SEQUENCE, VOCABULARY, python, succeeded
from tests.support.what_runs import OF_EXPERTS, showing, shows

COLUMNS = ["input_ids", "labels", "answers", "pairs"]
PAIRS, EPOCHS = 32, 4
STEPS = PAIRS // tiny_runs.BATCH_SIZE * EPOCHS
BEGIN = np.log(2)


def pair(rng):
    """A pair whose chosen answer has small tokens, and whose rejected one has large ones."""
    prompt = rng.integers(4, VOCABULARY, rng.integers(3, 7))
    tokens = np.full((2, SEQUENCE + 1), tiny_runs.PAD, np.int32)
    answers = np.full_like(tokens, -1)
    for side, least in enumerate((4, 34)):
        answer = rng.integers(least, least + 30, rng.integers(3, 9))
        text = np.concatenate([prompt, answer])
        tokens[side, : len(text)] = text
        answers[side, len(prompt) : len(text)] = side
    labels = np.where(answers >= 0, tokens, -100).astype(np.int32)
    return {"input_ids": tokens, "labels": labels, "answers": answers, "pairs": np.ones(1, np.int32)}


class Runs:
    """Runs of one of MindFormers' mcore models, of random weights, on 32 pairs, eight more held out."""

    def __init__(self, folder, model):
        self.folder, self.model, self.base = folder, model, folder / "base.ckpt"
        with in_mode(ms.GRAPH_MODE):
            ms.save_checkpoint(scaled(MAKE[model](), 0.4), str(self.base))
        self.train, self.held_out = folder / "pairs.mindrecord", folder / "heldout.mindrecord"
        rng = np.random.default_rng(0)
        write_mindrecord((pair(rng) for _ in range(PAIRS)), str(self.train))
        write_mindrecord((pair(rng) for _ in range(8)), str(self.held_out))

    def config(self, *callbacks, pet_config=None, rate=5e-2, base=None, data=None, holds_out=True, **preference):
        """The YAML; ``data`` is the folder of other files of the same names, ``holds_out`` whether the loss of held-out
        pairs, which compiles a graph of its own, is measured."""
        train, held_out = (path if data is None else data / path.name for path in (self.train, self.held_out))
        common = [{"type": "LoraCheckpoint", "save_steps": 8, "keep_last": 9}]
        if holds_out:
            common.insert(0, {"type": "HeldOutLoss", "dataset_dir": str(held_out), "every_steps": 8})
        base = self.base if base is None else base
        config = self.model_config(train, [*common, *callbacks], str(base))
        config["model"]["model_config"]["pet_config"].update(pet_config or {})
        config["lr_schedule"]["learning_rate"] = rate
        columns = [*COLUMNS, "reference"] if preference.get("precomputed_reference") else COLUMNS
        config["train_dataset"]["input_columns"] = columns
        config["train_dataset_task"]["dataset_config"] = config["train_dataset"]
        config["runner_wrapper"]["preference"] = {"loss": "dpo", "beta": 0.5, **preference}
        return config

    def model_config(self, train, callbacks, base):
        """The YAML of the model, which learns labels."""
        pet = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
        if self.model in OF_EXPERTS:
            pet["target_parameters"] = ["mlp.experts"]
        return mcore_config(train, EPOCHS, callbacks, pet, self.model, load_checkpoint=base)

    def start(self, name, *callbacks, resume=None, **changes):
        """Runs it; returns the process, the output folder, the losses and the history."""
        config = self.config(*callbacks, **changes)
        if resume:
            (saving,) = (callback for callback in config["callbacks"] if callback["type"] == "LoraCheckpoint")
            saving["resume"] = str(resume)
        output = self.folder / name
        process = tiny_runs.launch(config, output)
        if process.returncode:
            return types.SimpleNamespace(process=process, output=output)
        return types.SimpleNamespace(
            process=process, output=output, losses=tiny_runs.losses(output), history=read_history(str(output))
        )

    def keep_reference(self, folder, **changes):
        """Has ``mindlora reference`` add the reference to copies of the data; returns their folder."""
        folder.mkdir()
        for path in (self.train, self.held_out):
            for file in (path, path.with_name(path.name + ".db")):
                shutil.copy(file, folder)
        (folder / "run.yaml").write_text(yaml.safe_dump(self.config(data=folder, **changes)))
        report = succeeded(python(["-m", "mindlora.cli", "reference", "run.yaml"], folder))
        assert f"pairs.mindrecord: {PAIRS} rows" in report and "heldout.mindrecord: 8 rows" in report
        return folder


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Runs of the model that a test asks for; those of a Llama are in test_preferences."""
    request.getfixturevalue("mindformers")
    return Runs(tmp_path_factory.mktemp("preferences"), request.param)


def of_models(*names):
    return pytest.mark.parametrize("runs", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def plain(runs):
    """A run that computes the reference in each step."""
    run = runs.start("plain")
    assert run.process.returncode == 0, run.process.stderr[-3000:]
    return run


@pytest.fixture(scope="module")
def kept(runs, tmp_path_factory):
    """The folder of data that has the reference of ``plain``."""
    return runs.keep_reference(tmp_path_factory.mktemp("kept") / "data")


def held_out(run, name):
    return run.history.series(f"held_out_{name}")[1]


@of_models("qwen3")
def test_the_rewards_come_into_the_right_order(plain):
    assert len(plain.losses) == STEPS and plain.losses[1] == pytest.approx(BEGIN, rel=1e-5)
    assert held_out(plain, "reward_accuracy")[-1] > 0.8 and held_out(plain, "reward_margin")[-1] > 0.5
    kl = plain.history.series("kl")[1]
    assert kl[0] == 0 and kl[-1] > 0.01 and len(held_out(plain, "kl")) == STEPS // 8


def last_epoch(run, name):
    return run.history.series(name)[1][-STEPS // EPOCHS :]


@of_models(*showing("preference", "experts"))
def test_adapters_on_routed_experts_learn_the_pairs(runs):
    """With random weights and routers, eight held-out pairs say little: the last epoch says what was learned."""
    run = runs.start("experts", holds_out=False)
    assert run.process.returncode == 0, run.process.stderr[-3000:]
    assert len(run.losses) == STEPS and run.losses[1] == pytest.approx(BEGIN, rel=1e-5)
    assert last_epoch(run, "reward_accuracy").mean() > 0.8 and last_epoch(run, "reward_margin").min() > 1


@of_models("qwen3")
def test_with_the_commands_of_the_page_a_kept_reference_is_the_one_of_each_step(kept, plain):
    page = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
    block = re.search(r"^```\n(mindlora reference .*?)^```", page, re.M | re.S)[1]
    reference, training = (shlex.split(line) for line in block.replace("\\\n", " ").splitlines())
    # The first one is what made ``kept``, whose run.yaml does not say yet that the reference is there.
    assert reference == ["mindlora", "reference", "run.yaml"] and training.pop(0) == "mindlora-run"
    # The page has the default of beta, and the run in ``plain`` another one.
    words = [word.replace("loss: dpo", "loss: dpo, beta: 0.5") for word in training]
    succeeded(python(["-m", "mindlora.training.launch.launcher", *words], kept))
    run = types.SimpleNamespace(losses=tiny_runs.losses(kept / "output"), history=read_history(str(kept / "output")))
    np.testing.assert_allclose(list(run.losses.values()), list(plain.losses.values()), rtol=2e-5)
    for name in ("loss", "reward_margin", "kl"):
        np.testing.assert_allclose(held_out(run, name), held_out(plain, name), rtol=1e-4)


@of_models("qwen3")
def test_a_reference_of_another_base_is_refused(runs, kept, tmp_path):
    weights = ms.load_checkpoint(str(runs.base))
    for parameter in weights.values():
        parameter.set_data(parameter * 1.01)
    other = str(tmp_path / "other.ckpt")
    ms.save_checkpoint([{"name": name, "data": parameter} for name, parameter in weights.items()], other)
    run = runs.start("other-base", data=kept, base=other, precomputed_reference=True)
    assert run.process.returncode == 1 and "has log-probabilities of another reference" in run.process.stderr
    assert "Run mindlora reference again." in run.process.stderr


@of_models("qwen3")
def test_data_without_a_reference_is_refused(runs):
    run = runs.start("without", precomputed_reference=True)
    assert run.process.returncode == 1 and "Run mindlora reference on this YAML" in run.process.stderr


@of_models("qwen3")
def test_an_adapter_made_from_the_base_begins_at_its_own_reference(runs, tmp_path):
    pissa = {"lora_init": "pissa"}
    data = runs.keep_reference(tmp_path / "data", pet_config=pissa)
    run = runs.start("pissa", data=data, pet_config=pissa, holds_out=False, precomputed_reference=True)
    assert run.process.returncode == 0, run.process.stderr[-3000:]
    assert run.losses[1] == pytest.approx(BEGIN, rel=1e-5) and run.losses[STEPS] < 0.5 * BEGIN
    assert run.history.series("kl")[1][0] < 1e-8


@of_models("qwen3")
@shows("resume", "qwen3")
def test_a_resumed_run_equals_the_uninterrupted_one(runs, plain):
    run = runs.start("resumed", resume=plain.output / "lora_checkpoint" / "step_8")
    assert run.process.returncode == 0, run.process.stderr[-3000:]
    # Its graphs, for training and for the held-out loss, are those of the other run.
    assert run.process.stdout.count("was taken from") == 2
    assert run.losses == {step: loss for step, loss in plain.losses.items() if step > 8}
    tiny_runs.assert_same_state(*(each.output / "lora_checkpoint" / f"step_{STEPS}" for each in (plain, run)))


def test_the_noise_of_neftune_is_in_the_policy_alone(mindformers):
    base = scaled(MAKE["qwen3"](), 0.4)
    network = with_adapters(base, lora_rank=2, lora_alpha=4, target_modules="linear_proj", neftune_alpha=5.0)
    loss = preference_loss(network, preference_settings({"loss": "dpo"}))
    batch = [ms.Tensor(column[None]) for column in pair(np.random.default_rng(0)).values()]
    with mcore_in_pynative():
        evaluated, trained = (float(loss.set_train(trains)(*batch)[0].asnumpy()) for trains in (False, True))
        references = [loss.reference(*(column[0] for column in batch[:2])).asnumpy() for _ in range(2)]
    assert evaluated == pytest.approx(BEGIN, rel=1e-6) and abs(trained - BEGIN) > 1e-5
    np.testing.assert_array_equal(*references)


ADALORA = {"use_adalora": True, "lora_rank": None, "init_r": 6, "target_r": 3, "tinit": 2, "tfinal": 4, "deltaT": 2}


@of_models("qwen3")
@shows("nf4", "qwen3")
def test_it_goes_with_adalora_on_a_base_in_4_bits(runs, tmp_path):
    quantized = tmp_path / "base.safetensors"
    quantize_checkpoint(str(runs.base), str(quantized))
    pet_config = {**ADALORA, "quantize_base": "nf4"}
    run = runs.start("nf4", base=quantized, pet_config=pet_config, holds_out=False)
    assert run.process.returncode == 0, run.process.stderr[-3000:]
    assert run.losses[1] == pytest.approx(BEGIN, rel=1e-5) and last_epoch(run, "reward_accuracy").mean() > 0.8


@of_models("qwen3")
@shows("preference", "qwen3", place="processes")
def test_two_processes_train_what_one_trains_on_the_joined_batch(runs, tmp_path):
    states = {}
    for name, count in (("one", 1), ("two", 2)):
        # Several processes with a load_checkpoint would wait at a Barrier, which has no CPU kernel.
        config = runs.config(base="")
        config["train_dataset"]["data_loader"]["shuffle"] = False
        config["callbacks"] = [{"type": "MFLossMonitor"}, {"type": "LoraCheckpoint", "save_steps": 100}]
        config["runner_config"].update(batch_size=8 // count, epochs=1)
        # Adam divides by the size of the gradient, which would hide one twice as large.
        config["optimizer"]["eps"], config["lr_schedule"]["learning_rate"] = 1.0, 4.0
        if count == 2:
            config["use_parallel"], config["parallel_config"] = True, {"data_parallel": 2}
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        words = (ENTRY, "--config", "run.yaml", "--output_dir", folder / "output")
        if count == 1:
            succeeded(python(words, folder))
        else:
            run_ranks(2, folder, *words)
        states[name] = tiny_runs.state(folder / "output" / "lora_checkpoint" / f"step_{PAIRS // 8}")
        states[name, "margin"] = read_history(str(folder / "output")).series("reward_margin")[1]
    margins = states["one", "margin"]
    assert len(margins) == PAIRS // 8 and margins[-1] > 5e-5
    np.testing.assert_allclose(states["two", "margin"], margins, rtol=1e-3, atol=1e-6)
    for name, array in states["one"].items():
        # The others are the optimizer's.
        if name.startswith("base_model"):
            np.testing.assert_allclose(states["two"][name], array, atol=5e-6)
            assert np.abs(array).max() > 1e-6
