"""The page of a run: what is drawn lies where the numbers say, what users wrote stays text, and it stays small."""

import html.parser
import json
import math
import re

import numpy as np
import pytest

from mindlora.training.report import write_report
from mindlora.training.report.charts import (
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    Line,
    draw,
    smoothed,
    step_axis,
    thin,
    unit_of_bytes,
    value_axis,
)
from mindlora.training.report.heat_map import draw_health
from mindlora.training.report.history import History, read_history
from mindlora.training.report.page import differing, render, run_names, settings, summary
from tests.support.histories import DEFAULTS, description, health, step_record, write_history

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{7*7}}"


class Elements(html.parser.HTMLParser):
    """The elements of a page, the text outside of them, and whether every one is closed."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self, page):
        super().__init__()
        self.found, self.texts, self.open = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.texts.append(data)


def text_of(page):
    return " ".join(" ".join(Elements(page).texts).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_history(folder, steps=120, nan_at=(40, 41))
    return folder


def test_the_page_shows_the_run_and_needs_no_network(run):
    page = render([read_history(str(run))])
    elements = Elements(page)
    assert not elements.open
    text = text_of(page)
    for expected in (
        "Steps 120", "Tokens 491,520", "Skipped steps 2", "Time in training 5 min 0 s", "Most memory in use 2.05 GiB",
        "Loss (nats per token)", "Sent to the other devices in a step (KiB)", "Memory (GiB)",
        "40 guard The loss is NaN: the step is skipped.", "Who are you?", "the the the", "A tiny Llama.",
        "Evaluation tuned against the base: better. accuracy of q.jsonl (9 examples) model value tuned 0.75",
        "Divergence from the base on its own samples (nats per token)",
        "Change of the weight, |D| / |W|", "The change uses 4 of 16 ranks.", "rows 432", "MindSpore 2.9.0",
    ):  # fmt: skip
        assert expected in text, expected
    addresses = [
        value
        for _, attributes in elements.found
        for name, value in attributes.items()
        if name in ("href", "src", "xlink:href", "action", "data")
    ]
    assert addresses == ["data:,"] and "http" not in page and "@import" not in page and "url(" not in page
    assert len([tag for tag, _ in elements.found if tag == "svg"]) > 10


def test_what_users_wrote_stays_text(tmp_path):
    folder = tmp_path / "a<b>&run"
    write_history(folder, steps=20, **{HOSTILE: HOSTILE, "seed": HOSTILE})
    history = read_history(str(folder))
    history.events.append({"step": 5, "event": HOSTILE, "message": HOSTILE})
    history.answers.append({"step": 20, "answers": [{"prompt": HOSTILE, "answer": HOSTILE}]})
    history.evaluations.append(
        {"step": 20, "evaluation": {"tables": [{"title": HOSTILE, "rows": [[HOSTILE] * 2] * 2}], "verdicts": [HOSTILE]}}
    )
    for record in history.health:
        record["health"]["cells"] = {f"{HOSTILE}.0.{HOSTILE}": next(iter(record["health"]["cells"].values()))}
        record["health"]["findings"][0].update(rule=HOSTILE, path=HOSTILE, message=HOSTILE, advice=HOSTILE)
    clean = [tag for tag, _ in Elements(render([read_history(str(folder))])).found]
    for histories in ([history], [history, history]):
        elements = Elements(render(histories))
        assert not elements.open and not {"img", "b"} & {tag for tag, _ in elements.found}
        assert HOSTILE in " ".join(elements.texts)
        assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    scripts = Elements(render([history])).found
    assert [tag for tag, _ in scripts].count("script") == clean.count("script")


def test_several_runs_in_one_page(tmp_path, run):
    write_history(tmp_path / "fast" / "output", steps=80, speed=2, seed=7)
    write_history(tmp_path / "slow" / "output", steps=90, speed=0.5, optimizer={"type": "AdamW", "betas": [0.9, 0.95]})
    output = tmp_path / "page.html"
    write_report([str(tmp_path / name / "output") for name in ("fast", "slow")], str(output))
    page = output.read_text("utf-8")
    text = text_of(page)
    assert not Elements(page).open
    assert "Settings that differ key fast slow seed 7 42 optimizer.weight_decay 0 - Curves" in text
    assert "Training loss, mean of the steps around (nats per token) fast slow" in text
    data = [json.loads(block) for block in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    assert all([line["label"] for line in chart["lines"]] == ["fast", "slow"] for chart in data)
    write_report([str(run), str(run)], str(output))
    assert "The configurations are equal." in text_of(output.read_text("utf-8"))


def test_run_names_leave_out_what_is_common():
    assert run_names(["/a/b/output"]) == ["output"]
    assert run_names(["/a/b/output", "/a/c/output"]) == ["b", "c"]
    assert run_names(["/a/x", "/a/x/y"]) == ["x", "x/y"]
    assert run_names(["/a/x", "/a/x"]) == ["x", "x"]


def test_a_run_of_100_000_steps_makes_a_small_page():
    steps = [{"step": step, **step_record(step, 100_000)} for step in range(1, 100_001)]
    history = History("run", [{"step": 0, "run": description(100_000)}], steps, *([] for _ in range(6)))
    for step in steps[50_000:]:
        step["gradient_norm"] = math.nan
    history.events.extend({"step": step, "event": "guard", "message": "Skipped."} for step in range(1, 50_000))
    history.health.append({"step": 9, "health": health(9, 80)})
    page = render([history])
    assert len(page.encode()) < 1_000_000 and "and 49,799 more in metrics.jsonl" in text_of(page)
    del steps[20_000:]
    assert len(render([history] * 3).encode()) < 2_000_000


def test_a_run_that_has_just_begun():
    history = History("run", [{"step": 0, "run": description(10)}], [], *([] for _ in range(6)))
    assert "The run has not finished a step." in text_of(render([history]))
    history.steps.append({"step": 1, "loss": math.nan})
    assert "Loss (nats per token)" in text_of(render([history]))


def test_points_lie_where_the_axes_say():
    steps, values = np.array([0, 50, 100]), np.array([1.0, math.nan, 4.0])
    chart = draw("Loss", "nats", [Line("loss", 0, "marked", steps, values)], step_axis(0, 100), [(50, 1, "x")])
    marks = [(color, style, re.findall(r"M([\d.]+) ([\d.]+)h0", path)) for color, style, path in chart.paths]
    ticks = {label: position for position, label in chart.y_ticks}
    expected = [(f"{LEFT:.1f}", f"{ticks['1']:.1f}"), (f"{WIDTH - RIGHT:.1f}", f"{ticks['4']:.1f}")]
    assert marks == [(0, "marked", expected), (0, "dots", expected)]
    middle = (LEFT + WIDTH - RIGHT) / 2
    assert chart.not_finite == [middle] and chart.events == [(middle, 1, "step 50: x")]
    assert chart.data["lines"][0]["values"] == [1.0, "nan", 4.0] and chart.title == "Loss (nats)"
    assert all(0 < y < HEIGHT for y in ticks.values())


def test_thinning_keeps_the_extremes_of_every_part():
    values = np.sin(np.arange(10_000.0))
    values[[1234, 5000]] = 99, -99
    values[8000:] = math.nan
    line = thin(Line("x", 0, "line", np.arange(10_000) + 1, values), 400)
    assert len(line.steps) <= 400 and (np.diff(line.steps) > 0).all()
    np.testing.assert_array_equal(line.values, values[line.steps - 1])
    assert {99, -99} <= set(line.values) and np.isnan(line.values[-30:]).all()
    short = Line("x", 0, "line", np.arange(400), values[:400])
    assert thin(short, 400) is short


def test_smoothing_is_the_mean_of_the_finite_neighbours():
    values = np.random.default_rng(0).normal(size=1500)
    values[[3, 700]] = math.nan, math.inf
    values[900:990] = math.nan
    expected = []
    for index in range(1500):
        window = values[max(0, index - 15) : index + 16]
        window = window[np.isfinite(window)]
        expected.append(window.mean() if len(window) else math.nan)
    np.testing.assert_allclose(smoothed(values), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-7, 3e-5, 0.02, 1, 37, 5e3, 8e6, 1e12])
@pytest.mark.parametrize("low, high", [(0, 1), (0.31, 0.34), (-2, 5), (1, 1), (0, 0), (7, 7.7)])
def test_axes_of_values(scale, low, high):
    values = np.array([low, high, math.nan, math.inf]) * scale
    axis = value_axis(values)
    labels = [label for _, label in axis.ticks]
    assert axis.low <= low * scale and high * scale <= axis.high and axis.low < axis.high
    assert 2 <= len(labels) <= 8 and len(set(labels)) == len(labels)
    for value, label in axis.ticks:
        assert float(label.replace(",", "")) == pytest.approx(value, rel=1e-6, abs=1e-9 * scale)
        assert -1e-9 <= axis.fraction(value) <= 1 + 1e-9


def test_a_logarithmic_axis_where_values_differ_much():
    axis = value_axis(np.array([0.0, 0.02, 3, 4000]), may_be_logarithmic=True)
    assert axis.logarithmic and (axis.low, axis.high) == (0.01, 10_000)
    np.testing.assert_allclose(axis.fraction([0.01, 10, 10_000]), [0, 0.5, 1])
    assert np.isnan(axis.fraction([0.0, -1.0])).all()
    assert not value_axis(np.array([1.0, 99]), may_be_logarithmic=True).logarithmic


def test_rare_spikes_are_cut_off():
    values = np.linspace(4, 1, 1000)
    values[500:503] = 900, 1e9, math.inf
    axis = value_axis(values, may_be_logarithmic=True, cuts_spikes=True)
    assert (axis.low, axis.high, axis.logarithmic, axis.is_cut) == (1, 4, False, True)
    line = Line("loss", 0, "line", np.arange(1000), values)
    chart = draw("Loss", "nats", [line], step_axis(0, 999), [], may_be_logarithmic=True, cuts_spikes=True)
    assert chart.title == "Loss (nats, spikes cut off)"
    assert chart.data["lines"][0]["values"][500:503] == [900, 1e9, "inf"]
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", chart.paths[0][2])]
    assert len(heights) == 999 and heights[500] == min(heights) == dict(map(reversed, chart.y_ticks))["4"]
    values[600:] = 900  # no spikes
    assert value_axis(values, may_be_logarithmic=True, cuts_spikes=True).logarithmic


def test_axes_of_steps_have_whole_steps():
    for first, last in ((1, 1), (1, 3), (1, 27), (500, 700), (1, 100_000)):
        axis = step_axis(first, last)
        assert axis.low <= first and last <= axis.high and 1 <= len(axis.ticks) <= 8
        assert all(value == int(label.replace(",", "")) for value, label in axis.ticks)
    assert [unit_of_bytes(size)[1] for size in (5, 2048, 5e6, 5e9)] == ["B", "KiB", "MiB", "GiB"]


def test_heat_maps_have_a_square_for_each_cell():
    report = health(9, 4)
    report["cells"]["lm_head"] = {**report["cells"]["model.layers.0.attention.wq"], "change": 5.0}
    maps = {found.title: found for found in draw_health(report)}
    assert list(maps) == [
        "Change of the weight, |D| / |W|",
        "Effective rank / rank",
        "Norm of the gradient",
        "Largest relative update in a step",
    ]
    change = maps["Change of the weight, |D| / |W|"]
    squares = {square.title.split(":")[0]: square for square in change.squares}
    assert len(squares) == len({(square.x, square.y) for square in squares.values()}) == 25
    assert squares["lm_head"].shade == 1 and squares["model.layers.0.attention.wq"].shade == 0
    assert squares["model.layers.1.attention.wv"].shade is None and change.high == "5"
    assert [path for path, square in squares.items() if square.faulty] == ["model.layers.0.attention.wq"]
    assert [label for _, label in change.columns] == ["other", "0", "1", "2", "3"]
    assert squares["model.layers.3.attention.wk"].title.endswith("0.0035")
    for cell in report["cells"].values():
        cell["change"] = None
    assert draw_health(report)[0].title == "Norm of the change, |D|"
    assert draw_health({"cells": {}, "findings": []}) == []


def test_settings_say_what_differs_from_defaults():
    found = {setting.key: setting for setting in settings(description(5))}
    assert {key for key, setting in found.items() if setting.changed} == {
        "optimizer.betas",
        "model.model_config.pet_config.lora_rank",
    }
    assert found["optimizer.weight_decay"].changed is False  # 0.0 is 0
    assert found["seed"].changed is None and found["callbacks.MFLossMonitor"].value == "listed"
    assert found["callbacks.LoraCheckpoint.save_steps"].default == str(DEFAULTS["callbacks.LoraCheckpoint.save_steps"])
    first, second = description(5, seed=1), description(5, callbacks=[])
    assert differing([first, second]) == [
        ("seed", ["1", "42"]),
        ("callbacks.MFLossMonitor", ["listed", "-"]),
        ("callbacks.LoraCheckpoint.save_steps", ["100", "-"]),
        ("callbacks", ["-", "[]"]),
    ]


def test_the_time_of_a_resumed_run_leaves_the_pause_out():
    runs = [{"step": 0, "run": {"time": 100.0, "total_steps": 9}}, {"step": 2, "run": {"time": 5000.0}}]
    steps = [{"step": 1, "time": 110.0, "loss": 2.0}, {"step": 2, "time": 120.0, "loss": 1.0}]
    steps.append({"step": 3, "time": 5007.0, "loss": math.inf})
    figures = dict(summary(History("x", runs, steps, *([] for _ in range(6)))))
    assert figures == {
        "Steps": "3", "Training loss": "2 → 1.5", "Time in training": "27.0 s", "Resumed": "at step 2",
    }  # fmt: skip
