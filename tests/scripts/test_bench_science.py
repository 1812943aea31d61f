"""scripts/bench.py science: the search for the best rate, the rows, one group with next to no steps."""

import json
import math
import os
import subprocess
import sys
import types

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.support.stories260k import data_file

sys.path.insert(0, os.path.join(ROOT, "scripts"))
from bench.science import data, rates  # noqa: E402
from bench.science.claims import faster, forgetting, nf4, rslora  # noqa: E402
from bench.science.training import Curve  # noqa: E402

BENCH = os.path.join(ROOT, "scripts", "bench.py")


def test_a_search_encloses_the_best_rate_and_its_parabola_finds_the_optimum():
    optimum = 2.0**-3.7
    sweep = rates.Sweep(lambda rate, seed: (math.log2(rate / optimum)) ** 2 + seed, [1, 2]).search(2.0**-9)
    assert sweep.best == 2.0**-4 and sweep.is_enclosed
    assert sweep.best_losses == pytest.approx([1.09, 2.09])
    assert sweep.optimum(2) == pytest.approx(optimum)


def test_a_search_that_ends_early_has_not_enclosed_the_best_rate_and_what_diverges_is_worst():
    assert not rates.Sweep(lambda rate, seed: -rate, [1]).search(1.0, moves=0).is_enclosed
    diverging = rates.Sweep(lambda rate, seed: math.nan if rate > 1 else 1 / rate, [1]).search(0.25)
    assert diverging.best == 1.0


def test_a_difference_is_told_apart_only_if_its_interval_leaves_out_zero():
    second = [1.0, 2.0, 3.0]
    lower = rates.difference([0.9, 1.8, 2.9], second)
    # 95 % of Student's distribution with two degrees of freedom.
    half = 4.30 * np.std([-0.1, -0.2, -0.1], ddof=1) / math.sqrt(3)
    assert lower == pytest.approx((-0.4 / 3, -0.4 / 3 - half, -0.4 / 3 + half))
    assert lower.verdict == rates.NOT_TOLD_APART
    assert rates.difference([0.9, 1.89, 2.9], second).verdict == rates.LOWER
    assert rates.difference([1.1, 2.11, 3.1], second).verdict == rates.HIGHER
    assert rates.difference([0.5], [1.0]).verdict == rates.NOT_TOLD_APART


def test_only_the_sentences_of_e2e_count_and_no_meaning_is_in_both_halves():
    folder = os.path.dirname(data_file("e2e_valid.txt"))
    task = data.read_e2e(folder, 128)
    meanings = {}
    for name, rows in task._asdict().items():
        assert rows.tokens.shape == rows.labels.shape == (len(rows.tokens), 129)
        counted = rows.labels != data.IGNORED
        np.testing.assert_array_equal(rows.labels[counted], rows.tokens[counted])
        assert (rows.labels[:, 0] == data.IGNORED).all() and (counted.sum(1) > 0).all()
        first = counted.argmax(1)
        meanings[name] = {tuple(row[:length]) for row, length in zip(rows.tokens.tolist(), first)}
    assert not meanings["train"] & meanings["held_out"]


def test_a_group_trains_all_sides_and_says_whether_its_claim_held(mindformers, tmp_path):
    folder = os.path.dirname(data_file("stories260K.bin"))
    path = tmp_path / "figures.json"
    command = [sys.executable, BENCH, "science", "nf4", "--quick", "--data", folder, "--json", str(path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    group = json.loads(path.read_text())["groups"]["nf4"]
    assert group["verdict"] in ("pass", "fail", "not told apart") and group["claim"] in process.stdout
    before = {line["side"]: line["before"] for line in group["rows"]}
    assert list(before) == ["float", "NF4", "uniform"] and before["float"] < before["NF4"]
    assert all(0 < line["least"] <= line["loss"] <= line["greatest"] < 6 for line in group["rows"])


def test_a_curve_reaches_a_loss_between_two_measurements_by_a_line():
    curve = Curve([0, 10, 20], [3.0, 2.0, 1.0])
    assert faster.steps_to(curve, 1.5) == pytest.approx(15)
    assert faster.steps_to(curve, 0.5) == 21


def test_a_value_is_read_where_a_curve_reaches_a_loss():
    assert rates.where_reached([3.0, 2.0, 1.0], [0.0, 0.2, 0.6], 1.5) == pytest.approx(0.4)
    assert rates.where_reached([3.0, 2.0], [0.0, 0.2], 1.0) is None


def test_where_full_fine_tuning_never_has_loras_loss_its_end_counts():
    full = [forgetting.Course([3.0, 2.0], [0.0, 0.8]), forgetting.Course([3.0, 2.0], [0.0, 0.6])]
    lora = [forgetting.Course([2.5], [0.1]), forgetting.Course([1.5], [0.2])]
    assert forgetting.beside(lora, full) == pytest.approx([0.4, 0.6])


class ScriptedTrainings:
    """Trainings without a network: the loss falls by ``speed`` a step, and what was known is lost as fast."""

    trained = 1

    def __init__(self, speed):
        self.speed = speed
        self.done = 0
        self.seed = 0

    def begin(self, weights):
        self.done = 0

    def own_texts(self, count, length):
        return "texts"

    def loss(self, rows):
        change = self.speed * self.done * (1 + 0.01 * self.seed)
        return 1 + change if rows == "texts" else 3 - change

    def states(self, rows, rate, seed, steps):
        self.seed = seed
        for self.done in range(steps + 1):
            yield self.done

    def train(self, task, rate, seed, steps, every):
        points = [(done, self.loss("held out")) for done in self.states(None, rate, seed, steps) if done % every == 0]
        return Curve(*map(list, zip(*points)))


def setting(speed_of):
    """Returns the setting of a claim; ``speed_of`` takes the fields of the adapter, None for full, and the ratio."""
    plays = types.SimpleNamespace(train=None, held_out="held out")
    return types.SimpleNamespace(
        trainings=lambda lora=None, ratio=1: ScriptedTrainings(speed_of(lora, ratio)),
        sweep=lambda trainings, task: rates.Sweep(
            lambda rate, seed: trainings.train(task, rate, seed, 12, 1).last, [1, 2, 3]
        ),
        plays=plays,
        seeds=[1, 2, 3],
        steps=12,
    )


def test_at_one_rate_what_learns_half_as_fast_forgets_less_but_not_at_an_equal_loss():
    result = forgetting.judge_at_one_rate(setting(lambda lora, ratio: 0.05 if lora else 0.1))
    assert result.verdict == "pass" and [line["loss"] for line in result.rows] == pytest.approx([1.776, 2.388, 2.388])
    assert "both at 0.000976562: KL -0.6120" in result.reason and result.reason.count("KL +0.0000 (") == 3
    assert "rank 2 at 0.00390625 against itself at 0.000976562: loss +0.0000" in result.reason


def test_at_one_rate_the_side_that_is_twice_as_fast_needs_half_the_steps():
    result = faster.judge_at_one_rate(setting(lambda lora, ratio: 0.05 if ratio == 1 else 0.1))
    steps = {line["side"]: line["steps to LoRA's loss"] for line in result.rows}
    assert steps == pytest.approx({"LoRA": 12, "PiSSA": 12, "LoRA+": 6})
    assert result.verdict == "not told apart" and "LoRA+ against LoRA: -6.0000" in result.reason


def test_at_one_rate_the_update_of_rslora_grows_with_the_rank_and_that_of_lora_does_not():
    def speed(lora, ratio):
        return 0.01 * (lora["lora_rank"] ** 0.5 if lora["use_rslora"] else 2)

    result = rslora.judge_at_one_rate(setting(speed))
    assert result.verdict == "pass" and [line["rank"] for line in result.rows] == [4, 64, 4, 64]
    assert "rsLoRA changes by -0.7344" in result.reason and "LoRA by +0.0000 (+0.0000 to +0.0000)" in result.reason


def test_15_equal_steps_end_at_the_absmax_of_each_block():
    weight = np.random.default_rng(0).standard_normal((3, 130)).astype(np.float32)
    rounded = nf4.uniform(weight)
    for start in (0, 64, 128):
        block, found = weight[:, start : start + 64], rounded[:, start : start + 64]
        step = np.abs(block).max(1, keepdims=True) / 7
        assert (np.abs(found - block) <= step / 2 * 1.0001).all()
        np.testing.assert_allclose(np.abs(found).max(1, keepdims=True), 7 * step, rtol=1e-6)


def test_a_group_that_there_is_not_is_refused_with_the_names_of_all():
    command = [sys.executable, BENCH, "science", "ranks", "--data", "."]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode != 0 and "ranks: no such group" in process.stderr and "There are: rate" in process.stderr
