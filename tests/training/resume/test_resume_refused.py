"""What a run cannot be resumed from, in runs whose losses are scripted."""

import os
import shutil
import types

import pytest
import yaml
from mindspore import nn

from mindlora.core.errors import BaseMismatchError, ConfigError
from mindlora.network.cells.embedding import NoisyEmbedding
from mindlora.training.callbacks.registry import LoraCheckpoint
from mindlora.training.resume import training_state
from tests.support import tiny_runs
from tests.support.scripted_runs import STEPS_PER_EPOCH, Model, ScriptedStep, StopAt, folders, marked_step, train

pytestmark = pytest.mark.usefixtures("pynative_mode")


@pytest.fixture
def stopped(tmp_path):
    """A run of two epochs that was stopped after step 7."""
    train([LoraCheckpoint(directory=str(tmp_path / "saved")), StopAt(7)], [1] * STEPS_PER_EPOCH, epochs=2)
    return str(tmp_path / "saved" / "step_7")


def resume_from(folder, losses=(1,) * STEPS_PER_EPOCH, epochs=2, skip=7, step=None):
    train([LoraCheckpoint(directory="resumed", resume=folder)], losses, epochs, skip, step)


def test_resumes_in_place_and_stops_at_the_last_step(stopped):
    resume_from(stopped)
    assert folders("resumed") == ["best", "step_10"]
    assert marked_step("resumed/step_10") == 10


def test_nothing_to_resume_from():
    with pytest.raises(ConfigError, match="resume is True, but .*resumed has no step_N folder"):
        resume_from(True)
    with pytest.raises(ConfigError, match="resume is elsewhere, which is not a folder"):
        resume_from("elsewhere")


def test_an_adapter_without_training_state(stopped):
    with pytest.raises(ConfigError, match="best has no training_state.json.*set pet_config.adapter_path"):
        resume_from(os.path.join(os.path.dirname(stopped), "best"))


def test_other_steps_per_epoch(stopped):
    with pytest.raises(ConfigError, match="saved by a run of 5 steps per epoch, but this run has 4"):
        resume_from(stopped, losses=[1] * 4)


def test_a_dataset_that_was_not_skipped(stopped):
    with pytest.raises(ConfigError, match="saved at step 7, but the dataset starts at step 0: set data_skip_steps: 7"):
        resume_from(stopped, skip=0)


def test_a_complete_run(stopped):
    params = types.SimpleNamespace(batch_num=STEPS_PER_EPOCH, epoch_num=1)
    with pytest.raises(ConfigError, match="saved at step 7, and this run ends at step 5.*Raise runner_config.epochs"):
        training_state.restore(stopped, params)


def test_another_optimizer(stopped):
    def momentum(parameters):
        return nn.Momentum(parameters, 0.1, 0.9)

    with pytest.raises(
        ConfigError,
        match=r"another optimizer.* only in the folder: adam_m.wq.mindpet_delta_lora_a, .*"
        r"only in this run: .*moments.wq.mindpet_delta_lora_a",
    ):
        resume_from(stopped, step=ScriptedStep(Model(), momentum))


def test_another_base(stopped):
    step = ScriptedStep(Model(weight=0.25))
    with pytest.raises(BaseMismatchError, match="another base"):
        resume_from(stopped, step=step)


@pytest.fixture
def warnings(monkeypatch):
    """The warnings that LoraCheckpoint logs."""
    messages = []
    monkeypatch.setattr(
        "mindlora.training.callbacks.lora_checkpoint.logger.warning",
        lambda text, *values: messages.append(text % values),
    )
    return messages


def test_dropout_gives_a_warning(stopped, warnings):
    resume_from(stopped)
    assert not warnings
    shutil.rmtree("resumed")
    resume_from(stopped, step=ScriptedStep(Model(dropout=0.1)))
    assert len(warnings) == 1 and "lora_dropout is above 0: the resumed run drops other elements" in warnings[0]


def test_noise_on_the_embedding_gives_a_warning(stopped, warnings):
    model = Model()
    model.noise = NoisyEmbedding(nn.Embedding(4, 2), 5)
    # The saved run had no table.
    model.noise.embedding = nn.ReLU()
    resume_from(stopped, step=ScriptedStep(model))
    assert len(warnings) == 1 and "neftune_alpha is set: the resumed run adds other noise" in warnings[0]


def test_preflight_refuses_to_resume_a_complete_run(tmp_path):
    from mindformers.tools.register import MindFormerConfig

    from mindlora.training.launch import preflight

    folder = tmp_path / "step_20"
    folder.mkdir()
    (folder / "training_state.json").write_text('{"step": 20, "steps_per_epoch": 10}')
    callbacks = [{"type": "LoraCheckpoint", "directory": str(tmp_path), "resume": True}]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_runs.tiny_config("unused", 2, callbacks)))
    with pytest.raises(
        ConfigError, match="step_20 was saved at the last step of 2 epochs, so nothing is left to train"
    ):
        preflight.prepare(MindFormerConfig(str(tmp_path / "run.yaml")))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_runs.tiny_config("unused", 3, callbacks)))
    config = MindFormerConfig(str(tmp_path / "run.yaml"))
    preflight.prepare(config)
    assert config.data_skip_steps == 20
