"""AdapterHealth in MindSpore's own training loop, with mindlora's train step on a small network."""

import json

import mindspore as ms
import numpy as np
import pytest
from mindformers.tools.register import MindFormerConfig
from mindspore import Tensor, nn
from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.core.errors import ConfigError
from mindlora.network.tree import lora_cells
from mindlora.training.health import adapter_health
from mindlora.training.health.adapter_health import AdapterHealth, float_parts
from mindlora.training.launch import preflight
from mindlora.training.step.train_step import LoraTrainOneStepCell
from tests.conftest import in_mode
from tests.support import tiny_runs
from tests.support.networks import normal, randomize

WIDTH, ROWS, EVERY, STEPS = 6, 4, 5, 12
RATE = 1e-2


class Regression(nn.Cell):
    """Mean squared error of two linear cells; the loss does not depend on a third one."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = (nn.Dense(WIDTH, WIDTH) for _ in range(3))

    def construct(self, x, target):
        return ((self.second(self.first(x)) - target) ** 2).mean() + 0 * self.unused(x).sum()


class Watch(ms.Callback):
    """Keeps what AdapterHealth reports, and the adapters and gradient norms after each step."""

    def __init__(self):
        super().__init__()
        self.reports, self.events, self.parts, self.norms = {}, [], {}, {}

    def on_train_begin(self, run_context):
        self.copy(run_context.original_args())

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        self.copy(params)
        if "adapter_health" in params:
            self.reports[params.cur_step_num] = params["adapter_health"]
        self.events = params.get("training_events") or []
        if getattr(params.train_network, "records_norms", False):
            self.norms[params.cur_step_num] = params.train_network.gradient_norms()

    def copy(self, params):
        cells = dict(lora_cells(params.train_network))
        self.parts[params.cur_step_num] = {
            path: {name: part.copy() for name, part in float_parts(cell).items()} for path, cell in cells.items()
        }


def network():
    built = Regression()
    randomize(built.get_parameters(), seed=1)
    apply_lora(built, LoraConfig(lora_rank=2, lora_alpha=4, target_modules="all-linear"))
    freeze_base(built)
    for number, (_, cell) in enumerate(lora_cells(built)):
        cell.load_part("A", normal(2, WIDTH, seed=number))
    return built


@pytest.fixture(scope="module")
def step():
    """mindlora's train step, compiled once for all tests, and the values that it starts from; SGD keeps no others."""
    net = network()
    step = LoraTrainOneStepCell(net, nn.SGD(net.trainable_params(), RATE), record_gradient_norms=True)
    return step, {p.name: p.asnumpy().copy() for p in step.get_parameters()}


def train(callbacks, step):
    """Trains for STEPS steps in two epochs from the start of ``step``, and returns what was seen."""
    step, start = step
    for parameter in step.get_parameters():
        # A tensor may share the memory of its array.
        parameter.set_data(Tensor(start[parameter.name].copy(), parameter.dtype))
    rows = STEPS // 2 * ROWS
    columns = normal(rows, WIDTH, seed=4), normal(rows, WIDTH, seed=5)
    data = ms.dataset.NumpySlicesDataset(columns, ["x", "target"], shuffle=False).batch(ROWS)
    watch = Watch()
    ms.Model(step).train(2, data, [*callbacks, watch], dataset_sink_mode=False)
    return watch


@pytest.fixture(scope="module")
def run(step):
    """A run that is measured at steps 5, 10 and 12."""
    with in_mode(ms.GRAPH_MODE):
        return train([AdapterHealth(every_steps=EVERY)], step)


def test_steps(run):
    assert list(run.reports) == [5, 10, 12]
    for step, report in run.reports.items():
        assert report.step == step and list(report.cells) == ["first", "second", "unused"]
        json.dumps(report.to_json(), allow_nan=False)


def test_figures(run):
    for step, report in run.reports.items():
        for path, cell in report.cells.items():
            for name, part in cell.parts.items():
                before, now = run.parts[step - 1][path][name], run.parts[step][path][name]
                np.testing.assert_allclose(part.norm, np.linalg.norm(now), rtol=1e-6)
                assert part.gradient_norm == run.norms[step][f"{path}.mindpet_delta_lora_{name.lower()}"]
                if before.any():
                    expected = np.linalg.norm(now - before) / np.linalg.norm(before)
                    np.testing.assert_allclose(part.update, expected, rtol=1e-5, atol=1e-12)
            now = run.parts[step][path]
            singular = np.linalg.svd(2.0 * now["B"].astype(np.float64) @ now["A"], compute_uv=False)
            np.testing.assert_allclose(cell.change_norm, np.sqrt((singular**2).sum()), rtol=1e-6)
    assert all(report.cells["first"].parts["A"].update > 1e-3 for report in run.reports.values())


def test_each_finding_is_one_event_until_it_clears(run):
    for report in run.reports.values():
        found = {(finding.rule, finding.path) for finding in report.findings}
        assert {("vanishing_gradient", "unused"), ("still_zero", "unused")} <= found
    assert [(event["step"], event["kind"]) for event in run.events] == [(5, "adapter_health")] * 2
    messages = " ".join(event["message"] for event in run.events)
    assert "still_zero at unused. B is still zero after 5 steps" in messages
    assert "vanishing_gradient at unused. The gradient has a norm of 0.0e+00 over 24 elements." in messages


def test_log_has_a_line_for_each_measurement_and_a_table_of_what_is_new(step, graph_mode, caplog):
    caplog.set_level("INFO", "mindlora")
    train([AdapterHealth(every_steps=EVERY)], step)
    lines = [record.getMessage() for record in caplog.records]
    assert [line[:7] for line in lines if "3 adapters" in line] == ["step 5:", "step 10", "step 12"]
    (table,) = [line for line in lines if line.startswith("The adapters with new findings")]
    assert "unused" in table and "first" not in table


def test_training_is_the_same_with_and_without(run, step, graph_mode):
    without = train([], step)
    assert not without.reports
    for number, cells in run.parts.items():
        for path, parts in cells.items():
            assert all(parts[name].tobytes() == without.parts[number][path][name].tobytes() for name in parts)


def test_every_step_in_pynative(run, step, pynative_mode):
    watch = train([AdapterHealth(every_steps=1)], step)
    assert list(watch.reports) == list(range(1, STEPS + 1))
    for number, report in run.reports.items():
        for path, cell in report.cells.items():
            np.testing.assert_allclose(watch.reports[number].cells[path].change_norm, cell.change_norm, rtol=1e-4)
    # A has no gradient while B is zero.
    updates = [report.cells["first"].parts["A"].update for report in watch.reports.values()]
    assert updates[0] == 0 and min(updates[1:]) > 1e-3


def test_a_skipped_step_says_nothing_of_gradients_and_updates(step, graph_mode):
    trained, start = step
    no_loss = np.array([0, np.inf], np.float32)
    watch = train([AdapterHealth(every_steps=EVERY)], (trained, {**start, trained.limits.name: no_loss}))
    cells = [cell for report in watch.reports.values() for cell in report.cells.values()]
    parts = [part for cell in cells for part in cell.parts.values()]
    assert len(parts) == 18 and all(part.update is None and part.gradient_norm is None for part in parts)
    assert {finding.rule for report in watch.reports.values() for finding in report.findings} == {"still_zero"}


@pytest.mark.parametrize("kind", ["not recorded", "not mindlora's"])
def test_unknown_gradients_are_said_once(kind, step, graph_mode, caplog, monkeypatch):
    if kind == "not recorded":
        monkeypatch.setattr(step[0], "records_norms", False)
    else:
        net = network()
        foreign = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), RATE))
        step = foreign, {p.name: p.asnumpy().copy() for p in foreign.get_parameters()}
    watch = train([AdapterHealth(every_steps=EVERY)], step)
    cells = [cell for report in watch.reports.values() for cell in report.cells.values()]
    assert len(cells) == 9 and all(cell.gradient_norm is None for cell in cells)
    assert cells[0].parts["A"].update > 1e-3
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.startswith("AdapterHealth: the train step records no gradient norms") for text in warnings] == [True]


def test_only_rank_0_measures(step, graph_mode, monkeypatch):
    monkeypatch.setattr(adapter_health, "get_real_rank", lambda: 1)
    monkeypatch.setattr(adapter_health, "cell_values", None)
    monkeypatch.setattr(adapter_health, "float_parts", None)
    assert not train([AdapterHealth(every_steps=1)], step).reports


def test_a_resumed_run_does_not_repeat_events(step, graph_mode):
    callback = AdapterHealth(every_steps=EVERY)
    train([callback], step)
    resumed = AdapterHealth(every_steps=EVERY)
    resumed.restore_training_state(json.loads(json.dumps(callback.training_state())))
    watch = train([resumed], step)
    assert watch.reports[5].findings and not watch.events


def test_several_steps_at_once_have_no_update(step):
    """With data sinking, MindSpore calls callbacks once for several steps."""
    params = InternalCallbackParam(train_network=step[0], cur_step_num=0, epoch_num=1, batch_num=100)
    context, callback = RunContext(params), AdapterHealth(every_steps=EVERY)
    callback.on_train_begin(context)
    callback.on_train_epoch_begin(context)
    seen = []
    for params.cur_step_num in (4, 8, 12, 13, 14, 15):
        callback.on_train_step_begin(context)
        callback.on_train_step_end(context)
        if "adapter_health" in params:
            report = params["adapter_health"]
            seen.append((report.step, report.cells["first"].parts["A"].update))
    assert seen == [(8, None), (12, None), (15, 0.0)]


def test_refusals(graph_mode):
    with pytest.raises(ConfigError, match="every_steps is 0"):
        AdapterHealth(every_steps=0)
    net = Regression()
    plain = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), RATE))
    with pytest.raises(ConfigError, match="the network has no adapters"):
        train([AdapterHealth()], (plain, {p.name: p.asnumpy() for p in plain.get_parameters()}))


@pytest.mark.parametrize(
    "callbacks, wrapper, recorded",
    [
        (["AdapterHealth"], {"type": "LoraTrainOneStepCell"}, True),
        ([], {"type": "LoraTrainOneStepCell"}, None),
        (["AdapterHealth"], {"type": "MFTrainOneStepCell"}, None),
        (["AdapterHealth"], {"type": "LoraTrainOneStepCell", "record_gradient_norms": False}, False),
    ],
)
def test_mindlora_run_has_gradient_norms_recorded(callbacks, wrapper, recorded):
    config = MindFormerConfig(tiny_runs.LORA_YAML)
    config.callbacks = [MindFormerConfig(type=name) for name in callbacks]
    config.runner_wrapper = MindFormerConfig(**wrapper)
    # A CPU needs mindlora's train step.
    config.context.device_target = "Ascend"
    preflight.prepare(config)
    assert config.runner_wrapper.get("record_gradient_norms") is recorded
