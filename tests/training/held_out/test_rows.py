"""Batches that callbacks give to a network: of one size, divided in the semi-automatic modes; each row counts once."""

import types

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora.data.mindrecord import write_mindrecord
from mindlora.training.callbacks.registry import Forgetting
from mindlora.training.callbacks.sample_answers import Continuations
from mindlora.training.held_out.held_out_loss import (
    HeldOutLabelsCell,
    HeldOutLossCell,
    held_out_labels,
    held_out_loss,
    held_out_preferences,
)
from mindlora.training.held_out.rows import parts_of_batch
from mindlora.training.preference.loss import PreferenceLoss
from mindlora.training.preference.settings import PreferenceSettings
from tests.support import tiny_runs
from tests.support.tiny_runs import IGNORED, PAD, SEQUENCE, VOCABULARY

pytestmark = pytest.mark.usefixtures("pynative_mode")

DATA_PARALLEL = 4
ROWS, BATCH = 7, 3
TABLE = np.random.default_rng(4).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)


class Bigrams(nn.Cell):
    """A language model of a table, which refuses a batch that the devices could not divide."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts
        self.sizes = set()
        self.table = Tensor(TABLE)
        parallel = types.SimpleNamespace(data_parallel=DATA_PARALLEL)
        tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD, "ignore_token_id": IGNORED}
        self.config = types.SimpleNamespace(seq_length=SEQUENCE, parallel_config=parallel, **tokens)

    def construct(self, tokens, labels=None):
        assert tokens.shape[0] % self.parts == 0
        self.sizes.add(tokens.shape[0])
        counted = None if labels is None else ops.logical_and(labels != IGNORED, tokens != PAD).astype(ms.float32)
        return ops.gather(self.table, tokens, 0), tokens, counted


@pytest.fixture(params=["data_parallel", "semi_auto_parallel", "auto_parallel"])
def network(request):
    """The model, in a parallel mode; with the rows of a batch divided in all but the first."""
    ms.set_auto_parallel_context(parallel_mode=request.param)
    yield Bigrams(1 if request.param == "data_parallel" else DATA_PARALLEL)
    ms.reset_auto_parallel_context()


@pytest.fixture
def held_out(tmp_path):
    """A MindRecord whose batches neither have equal sizes nor can be divided."""
    path = str(tmp_path / "held_out.mindrecord")
    tiny_runs.write_data(path, ROWS)
    return path


def test_rows_are_divided_by_data_parallel_in_the_semi_automatic_modes_alone(network):
    assert parts_of_batch(network) == network.parts


def test_the_held_out_loss_is_that_of_the_rows_of_the_data(network, held_out):
    expected = held_out_loss(HeldOutLossCell(alone(), IGNORED), held_out, ROWS)
    assert held_out_loss(HeldOutLossCell(network, IGNORED), held_out, BATCH) == pytest.approx(expected, rel=1e-6)
    # A graph is compiled for each size.
    assert len(network.sizes) == 1


def test_held_out_labels_are_counted_once(network, held_out):
    expected = held_out_labels(HeldOutLabelsCell(alone(), IGNORED, VOCABULARY), held_out, ROWS)
    found = held_out_labels(HeldOutLabelsCell(network, IGNORED, VOCABULARY), held_out, BATCH)
    assert found == pytest.approx(expected, rel=1e-6)


def test_each_prompt_gets_its_own_answer(network):
    prompts = [[5, 6], [7], [9, 8, 7]]
    answers = [Continuations(model, SEQUENCE, PAD, 2, 6).greedy(prompts) for model in (network, alone())]
    assert answers[0] == answers[1]


def test_forgetting_is_measured_on_the_samples(network):
    losses = []
    for model in (network, alone()):
        callback = Forgetting(samples=ROWS, max_tokens=6, batch_size=BATCH)
        callback.samples = callback._draw(model)
        losses.append((callback.samples, callback._loss(model)))
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-6)
    assert len(network.sizes) == 1


class LabelLogProbabilities(nn.Cell):
    """The log-probability of each label but the first, of a table."""

    def __init__(self):
        super().__init__()
        self.sizes = set()
        self.table = ops.log_softmax(Tensor(TABLE))

    def construct(self, tokens, labels):
        self.sizes.add(tokens.shape[0])
        return self.table[tokens[:, :-1].reshape(-1), ops.relu(labels[:, 1:]).reshape(-1)] * (
            labels[:, 1:] >= 0
        ).reshape(-1)


@pytest.mark.parametrize("loss", ["orpo", "kto"])
def test_held_out_preferences_are_those_of_the_rows_of_the_data(loss, tmp_path):
    path = str(tmp_path / "preferences.mindrecord")
    rng = np.random.default_rng(5)
    write_mindrecord((_preference(rng, "judgments" if loss == "kto" else "pairs") for _ in range(ROWS)), path)
    settings = PreferenceSettings(loss=loss)
    reference = LabelLogProbabilities() if settings.kind.uses_reference else None
    measured = []
    # KTO estimates the distance from the reference batch by batch, which is 0 from itself.
    for size in (ROWS, BATCH):
        network = LabelLogProbabilities()
        measured.append(held_out_preferences(PreferenceLoss(network, reference, settings), path, size))
        assert len(network.sizes) == 1
    assert measured[0] == pytest.approx(measured[1], rel=1e-5)


def _preference(rng, marks):
    tokens = rng.integers(4, VOCABULARY, (2, SEQUENCE)).astype(np.int32)
    answers = np.repeat([[0], [1]], SEQUENCE, 1).astype(np.int32)
    answers[:, :5] = -1
    return {"input_ids": tokens, "labels": tokens, "answers": answers, marks: np.ones(1, np.int32)}


def alone():
    """Returns the model where nothing divides its rows."""
    model = Bigrams(1)
    model.config.parallel_config.data_parallel = 1
    return model
