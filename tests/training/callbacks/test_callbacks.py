"""HeldOutLoss against NumPy, the old name of RunReport, and what ProgressBar writes to a terminal and a file."""

import contextlib
import fcntl
import itertools
import os
import re
import struct
import termios
import time
import types

import mindspore as ms
import numpy as np
import pytest
from mindformers.models.build_model import build_network
from mindformers.tools.register import MindFormerConfig
from mindspore import Callback, Tensor, nn

from mindlora.core.errors import ConfigError
from mindlora.network.tree import lora_cells
from mindlora.training.callbacks import progress_bar
from mindlora.training.callbacks.common import report_event
from mindlora.training.callbacks.registry import HeldOutLoss, LossCurve, ProgressBar, RunReport
from mindlora.training.held_out.held_out_loss import HeldOutLossCell, held_out_loss
from mindlora.training.launch import hooks  # noqa: F401
from mindlora.training.report import run_report
from mindlora.training.report.history import read_history
from mindlora.training.step.train_step import LoraTrainOneStepCell
from tests.conftest import in_mode
from tests.support import networks, tiny_runs
from tests.support.tiny_runs import BATCH_SIZE, IGNORED, PAD

ROWS = 6


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """A MindRecord whose last batch is smaller than the others, and what it holds."""
    path = str(tmp_path_factory.mktemp("data") / "heldout.mindrecord")
    assert ROWS % BATCH_SIZE
    return path, *tiny_runs.write_data(path, ROWS)


@pytest.fixture(scope="module")
def network():
    """A tiny Llama with dropout on its adapters, none of which is zero."""
    config = MindFormerConfig(tiny_runs.LORA_YAML)
    config.model.model_config.update(tiny_runs.MODEL)
    config.model.model_config.pet_config.update({"lora_dropout": 0.5, "target_modules": ".*wq|.*w2"})
    built = build_network(config.model)
    networks.randomize(networks.adapters(built).values())
    return built


def cross_entropy(logits, input_ids, labels):
    """The oracle in float64: the mean over the labels that count, none of which is at a pad."""
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counts = (labels[:, 1:] != IGNORED) & (input_ids[:, :-1] != PAD)
    picked = np.take_along_axis(log_probabilities, np.where(counts, labels[:, 1:], 0)[..., None], -1)[..., 0]
    return -picked[counts].mean()


def test_held_out_loss_is_the_cross_entropy_of_the_logits(network, held_out, graph_mode):
    path, input_ids, labels = held_out
    network.set_train(False)
    with in_mode(ms.PYNATIVE_MODE):
        logits = network(Tensor(input_ids[:, :-1]))[0].asnumpy()
    cell = HeldOutLossCell(network, IGNORED)
    expected = cross_entropy(logits, input_ids, labels)
    np.testing.assert_allclose(held_out_loss(cell, path, BATCH_SIZE), expected, rtol=1e-6)


class FixedLogits(nn.Cell):
    """A language model that always gives the same logits."""

    def __init__(self, logits, sliced=False):
        super().__init__()
        self.logits = Tensor(logits)
        self.config = types.SimpleNamespace(input_sliced_sig=sliced, ignore_token_id=IGNORED)

    def construct(self, tokens, labels):
        mask = ((labels != IGNORED) & (tokens != PAD)).astype(ms.float32)
        return self.logits[: tokens.shape[0]], tokens, mask


@pytest.mark.parametrize("sliced", [False, True], ids=["shifted here", "sliced before"])
def test_held_out_loss_of_masked_labels(mode, held_out, sliced):
    path, input_ids, labels = held_out
    inputs, targets = input_ids, labels
    if sliced:
        # The label at each token is that of the next token.
        inputs = np.concatenate([input_ids, input_ids[:, :1]], 1)
        targets = np.concatenate([labels[:, :1], labels], 1)
    logits = np.random.default_rng(2).normal(size=(ROWS, inputs.shape[1] - 1, tiny_runs.VOCABULARY)).astype(np.float32)
    assert 0.2 < (labels == IGNORED).mean() < 0.4
    loss = held_out_loss(HeldOutLossCell(FixedLogits(logits, sliced), IGNORED), path, ROWS)
    np.testing.assert_allclose(loss, cross_entropy(logits, inputs, targets), rtol=1e-6)


def test_what_does_not_count_may_be_infinite(mode, held_out):
    path, input_ids, labels = held_out
    logits = np.random.default_rng(0).normal(size=(ROWS, tiny_runs.SEQUENCE, tiny_runs.VOCABULARY)).astype(np.float32)
    expected = cross_entropy(logits, input_ids, labels)
    ignored = labels[:, 1:] == IGNORED
    # Among these, the label in whose place 0 stands is impossible.
    logits[ignored, 0] = -np.inf
    assert ignored.any()
    loss = held_out_loss(HeldOutLossCell(FixedLogits(logits), IGNORED), path, ROWS)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_measuring_does_not_change_training(network, held_out, graph_mode):
    """Two steps with a measurement after each give the same as without it, and every cell keeps its mode."""
    path, input_ids, labels = held_out
    batch = Tensor(input_ids[:BATCH_SIZE]), Tensor(labels[:BATCH_SIZE])
    switch_dropout_off(network)  # Its masks differ from run to run.
    cell = LoraTrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.5))
    cell.set_train()
    cell(*batch)
    start = {p.name: p.asnumpy().copy() for p in network.trainable_params()}

    measured = []

    def two_steps(callback):
        for parameter in network.trainable_params():
            parameter.set_data(Tensor(start[parameter.name].copy()))
        params = Params(cell, epoch_num=1, batch_num=3)
        for params.cur_step_num in (1, 2):
            params.net_outputs = cell(*batch)
            if callback is not None:
                before = networks.snapshot(cell)
                callback.on_train_step_end(Context(params))
                assert networks.snapshot(cell) == before
                measured.append(params["eval_results"])
        return float(params.net_outputs[0].asnumpy())

    callback = HeldOutLoss(path, every_steps=1, batch_size=ROWS)
    trainings = {name: sub.training for name, sub in cell.cells_and_names()}
    loss = two_steps(callback)
    assert {name: sub.training for name, sub in cell.cells_and_names()} == trainings
    # Two compiled graphs, training and evaluation, however often they alternate.
    assert len(cell.compile_cache) == len(callback.cell.compile_cache) == 1
    first, second = measured
    assert first.keys() == second.keys() == {"held_out_loss"} and first != second
    assert two_steps(None) == loss


def switch_dropout_off(network):
    for _, cell in lora_cells(network):
        cell.low_rank = cell.low_rank.at_inference


class Params(dict):
    """MindSpore's callback parameters, as far as the callbacks use them."""

    def __init__(self, train_network=None, **known):
        super().__init__()
        self.update(train_network=train_network, cur_step_num=0, list_callback=[], **known)

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Context(types.SimpleNamespace):
    """MindSpore's run context."""

    def __init__(self, params):
        super().__init__(original_args=lambda: params)


def play(callbacks, losses, start=0, network=None):
    """Calls callbacks as in a run of one epoch, without training anything; it may start after step ``start``."""
    params = Params(network, epoch_num=1, batch_num=start + len(losses))
    params.list_callback = callbacks
    context = Context(params)
    for callback in callbacks:
        callback.on_train_begin(context)
    params.cur_step_num = start
    for callback in callbacks:
        callback.on_train_epoch_begin(context)
    for loss in losses:
        params.cur_step_num += 1
        params.net_outputs = (Tensor(loss, ms.float32), Tensor(False), 1.0, 0.1, None)
        for callback in callbacks:
            callback.on_train_step_end(context)
    for callback in callbacks:
        callback.on_train_end(context)


@pytest.mark.parametrize("start, steps", [(0, [3, 6, 7]), (4, [6, 7])], ids=["whole", "resumed"])
def test_held_out_loss_every_few_steps_and_at_the_end(held_out, start, steps):
    network = FixedLogits(np.zeros((ROWS, tiny_runs.SEQUENCE, tiny_runs.VOCABULARY), np.float32))
    callback = HeldOutLoss(held_out[0], every_steps=3)
    reports = Reports()
    play([callback, reports], [1.0] * (7 - start), start, network)
    assert list(reports.seen) == steps
    np.testing.assert_allclose(list(reports.seen.values()), np.log(tiny_runs.VOCABULARY), rtol=1e-6)


class Reports(ms.Callback):
    """Records the steps at which held_out_loss is reported."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        if "held_out_loss" in params["eval_results"]:
            self.seen[params.cur_step_num] = params["eval_results"]["held_out_loss"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"every_steps": 0}, "every_steps is 0"),
        ({"batch_size": 1.5}, "batch_size is 1.5"),
        ({"dataset_dir": "nowhere"}, "dataset_dir is nowhere, which does not exist"),
        ({"dataset_dir": None}, "HeldOutLoss has neither of dataset_dir, a MindRecord, and data_loader"),
        ({"dataset_dir": "rows", "data_loader": {"type": "HFDataLoader"}}, "HeldOutLoss has both of dataset_dir"),
    ],
)
def test_wrong_arguments(held_out, arguments, message):
    with pytest.raises(ConfigError, match=message):
        HeldOutLoss(**{"dataset_dir": held_out[0], **arguments})


@pytest.mark.parametrize("listed", [(), (RunReport,)], ids=["alone", "beside a RunReport"])
def test_loss_curve_is_a_run_report_and_says_so_once(tmp_path, monkeypatch, listed):
    said = []
    monkeypatch.setattr(run_report.logger, "warning", lambda text, *values: said.append(text % values))
    run_report._say_the_new_name.cache_clear()
    folder = str(tmp_path / "run")
    play(
        [*(callback(folder) for callback in listed), LossCurve(folder), LossCurve(str(tmp_path / "other"))], [0.5, 2.0]
    )
    for written in (folder, str(tmp_path / "other")):
        history = read_history(written)
        assert history.series("loss")[1].tolist() == [0.5, 2.0] and len(history.runs) == 1
        assert sorted(os.listdir(written)) == ["metrics.jsonl", "report.html"]
    (renamed,) = [line for line in said if "LossCurve" in line]
    assert renamed.startswith('"LossCurve" is called "RunReport" now')


def on_a_terminal(do):
    """Calls a function with stderr on a terminal of 80 columns; returns what has been written there."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(writer, "w", encoding="utf-8") as stderr, contextlib.redirect_stderr(stderr):
        do()
    written = b""
    # What was written arrives part by part; after the last one, Linux says that the other end is closed.
    with contextlib.suppress(OSError):
        while True:
            written += os.read(reader, 1 << 16)
    os.close(reader)
    return written.decode()


@pytest.mark.parametrize("start, beginning", [(0, r"  0%\|[ ]+\| 0/8"), (6, r" 75%\|█+.?[ ]+\| 6/8")])
def test_progress_bar_draws_on_a_terminal(capfd, start, beginning):
    drawn = on_a_terminal(lambda: play([ProgressBar("fine-tuning")], [0.5] * (8 - start), start))
    first, *_, last = drawn.strip().split("\r")
    assert re.match(f"fine-tuning: {beginning} steps", first)
    assert re.fullmatch(r"fine-tuning: 100%\|█+\| 8/8 steps, 00:00 left, loss 0.500", last)
    assert capfd.readouterr() == ("", "")


def test_in_a_file_the_progress_is_a_line_each_half_a_minute(capfd, monkeypatch):
    clock = itertools.count(step=8.0)
    monkeypatch.setattr(progress_bar, "time", types.SimpleNamespace(monotonic=lambda: next(clock), time=time.time))
    play([ProgressBar("fine-tuning")], [0.5] * 40)
    printed = capfd.readouterr()
    assert printed.out == "" and "\r" not in printed.err and printed.err.endswith("\n")
    lines = printed.err.splitlines()
    form = r"fine-tuning: (\d+)/40 steps \(\d+%\), (?:[\d:]+|\?) left, loss 0.500"
    steps = [int(re.fullmatch(form, line).group(1)) for line in lines]
    # The clock goes on by 8 seconds when it is looked at: after each step, and once more for a line.
    assert steps == [1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 40] and lines[1].startswith("fine-tuning: 5/40 steps (12%)")


def test_remaining_time_is_that_of_steps_after_the_first_which_compiles(capfd):
    class Compiling(Callback):
        def on_train_step_end(self, run_context):
            params = run_context.original_args()
            if params.cur_step_num == 1:
                time.sleep(0.5)
            if params.cur_step_num == 2:
                report_event(params, "learning_rate", "lower")

    play([Compiling(), ProgressBar()], [0.5] * 500)
    first, second, _ = capfd.readouterr().err.splitlines()
    assert first == "training: 1/500 steps (0%), ? left, loss 0.500"
    assert re.fullmatch(r"training: 2/500 steps \(0%\), 00:\d\d left, loss 0.500", second)


def test_in_a_file_an_event_and_a_measurement_have_a_line_of_their_own(capfd):
    class Eventful(Callback):
        def on_train_step_end(self, run_context):
            params = run_context.original_args()
            params["eval_results"] = {"held_out_loss": 0.25} if params.cur_step_num == 4 else {}
            if params.cur_step_num == 7:
                report_event(params, "learning_rate", "lower")

    play([Eventful(), ProgressBar()], [0.5] * 10)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split("/")[0] for line in lines] == [f"training: {step}" for step in (1, 4, 7, 10)]
    assert [line.split("left")[1] for line in lines] == [", loss 0.500", *[", loss 0.500, held-out 0.250"] * 3]


def test_only_rank_0_shows_progress_and_writes_a_history(capfd, tmp_path, monkeypatch):
    for module in ("report.run_report", "callbacks.progress_bar"):
        monkeypatch.setattr(f"mindlora.training.{module}.get_real_rank", lambda: 1)
    play([ProgressBar(), LossCurve("run")], [0.5])
    assert capfd.readouterr().err == "" and not (tmp_path / "run").exists()
