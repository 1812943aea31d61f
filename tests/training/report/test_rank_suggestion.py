"""mindlora suggest: rank goes where a made-up task needs it; the YAML works; runs that say too little are refused."""

import json

import numpy as np
import pytest
import yaml

from mindlora import LoraConfig
from mindlora.cli import main
from mindlora.core.errors import ConfigError, DataError
from mindlora.training.health.adapter_health import CellValues, change_factors, effective_rank, measure
from mindlora.training.report.history import HistoryWriter, read_history
from mindlora.training.report.rank_suggestion import LADDER, CellEvidence, suggest_ranks

SIZE, RANK, STEPS, RATE = 16, 4, 120, 0.02
# The rank of what each cell has to learn.
NEEDED = {"layers.0.wq": 12, "layers.1.wq": 0, "layers.0.wv": 1, "layers.1.wv": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four cells on targets x (W + change)^T with some noise, where only two changes are not zero: its folder.

    Trained by Adam in NumPy: y = x (W + B A)^T, with a mean squared error for each cell.
    """
    folder, rng = str(tmp_path_factory.mktemp("run")), np.random.default_rng(0)
    changes = {
        path: rng.normal(size=(SIZE, rank)) @ rng.normal(size=(rank, SIZE)) / np.sqrt(SIZE)
        for path, rank in NEEDED.items()
    }
    pairs = {path: {"A": rng.normal(size=(RANK, SIZE)) / 7, "B": np.zeros((SIZE, RANK))} for path in NEEDED}
    moments = {(path, part): np.zeros((2, *pair[part].shape)) for path, pair in pairs.items() for part in "AB"}
    history = HistoryWriter(folder, 0)
    for step in range(1, STEPS + 1):
        cells, x = {}, rng.normal(size=(32, SIZE))
        for path, pair in pairs.items():
            noise = 0.3 * rng.normal(size=(32, SIZE))
            back = 2 * (x @ (pair["B"] @ pair["A"] - changes[path]).T - noise) / x.size
            gradients = {"A": pair["B"].T @ back.T @ x, "B": back.T @ x @ pair["A"].T}
            for part, gradient in gradients.items():
                mean, square = moments[path, part]
                mean += 0.1 * (gradient - mean)
                square += 0.001 * (gradient**2 - square)
                corrected = mean / (1 - 0.9**step), square / (1 - 0.999**step)
                pair[part] -= RATE * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
            parts = {part: array.astype(np.float32) for part, array in pair.items()}
            norms = {part: float(np.linalg.norm(gradient)) for part, gradient in gradients.items()}
            cells[path] = CellValues(RANK, parts, "B", change_factors(parts["A"], parts["B"]), gradient_norms=norms)
        if step % 20 == 0:
            history.append(step, health=measure(step, cells).to_json())
    history.close()
    return folder


def ranks_of(suggestion):
    return {path: group.rank for group in suggestion.groups for path in group.paths}


def test_the_cells_that_matter_get_the_rank(run):
    suggestion = suggest_ranks(read_history(run))
    ranks = ranks_of(suggestion)
    assert suggestion.budget == suggestion.before == 4 * RANK and suggestion.spent <= 4 * RANK
    assert ranks["layers.0.wq"] >= 8 and max(ranks[path] for path in ("layers.1.wq", "layers.1.wv")) <= 3
    # What it learned has one direction, however much it matters.
    assert ranks["layers.0.wv"] <= 3
    assert suggestion.groups[0].paths == ("layers.0.wq",)


def test_what_is_printed_is_a_pet_config_with_these_ranks(run, capsys):
    assert main(["suggest", run, "--budget", "24"]) == 0
    text = capsys.readouterr().out
    fields = yaml.safe_load(text)
    assert set(fields) == {"lora_rank", "rank_pattern"} and fields["lora_rank"] == RANK
    config = LoraConfig(**fields)
    expected = ranks_of(suggest_ranks(read_history(run), 24))
    assert {path: config.for_cell(f"model.{path}").lora_rank for path in NEEDED} == expected
    assert 16 < sum(expected.values()) <= 24
    # A reason for each group of cells.
    assert "  # wq, 1 of 4 cells: " in text and "of the sensitivity, " in text and "so rank " in text
    assert main(["suggest", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["before"] == 4 * RANK


def test_scores_are_the_sensitivity_by_singular_values_and_fall_on_behind_the_last():
    cell = CellEvidence(rank=3, sensitivity=14.0, spectrum=(4.0, 2.0, 1.0), used=2.5)
    assert cell.scores(5) == pytest.approx([8, 4, 2, 1, 0.5])
    assert CellEvidence(1, 2.0, (3.0,), 1.0).scores(3) == pytest.approx([2, 1, 0.5])
    assert CellEvidence(2, 2.0, (3.0, 3.0), 2.0).scores(3) == pytest.approx([1, 1, 0.95])
    # The other half of a PiSSA's change is what it began with.
    assert CellEvidence(1, 2.0, (3.0, 1.0), 1.0).scores(1) == pytest.approx([2])
    assert CellEvidence(2, 2.0, (), 0.0).scores(2) == [0, 0]


def recorded(folder, cells, run=None):
    """A history of one measurement: path -> (rank, norm, gradient norm, singular values)."""
    writer = HistoryWriter(str(folder), 0)
    if run:
        writer.append(0, run=run)
    found = {}
    for path, (rank, norm, gradient, values) in cells.items():
        part = {"norm": norm, "gradient_norm": gradient}
        change = None if values is None else sum(values)
        names = ("lambda_d", "lambda_b") if path == "vera" else ("A", "B")
        used = effective_rank(np.array(values)) if values else None
        found[path] = {
            **{"rank": rank, "parts": dict.fromkeys(names, part), "singular_values": values or None},
            **{"change_norm": change, "effective_rank": used},
        }
    writer.append(20, health={"cells": found, "findings": []})
    writer.close()
    return read_history(str(folder))


def test_patterns_name_layers_where_a_kind_has_several_ranks(tmp_path):
    flat, steep = [1.0] * 4, [1.0, 1e-3, 1e-4, 1e-5]
    cells = {f"model.layers.{layer}.wo": (4, 1.0, 1.0, flat if layer < 2 else steep) for layer in range(4)}
    cells |= {"lm_head": (4, 1.0, 1e-9, flat), "model.layers.0.lm_head": (4, 1.0, 1.0, flat)}
    suggestion = suggest_ranks(recorded(tmp_path, cells), 21)
    patterns = {group.pattern: group.rank for group in suggestion.groups}
    assert patterns[r"layers\.(0|1)\.wo"] == 6 and patterns[r"layers\.(2|3)\.wo"] == 1
    assert patterns["^lm_head"] == 1
    config = LoraConfig(lora_rank=suggestion.lora_rank, rank_pattern=patterns)
    assert {path: config.for_cell(path).lora_rank for path in cells} == ranks_of(suggestion)


def test_a_cell_gets_at_most_four_times_the_mean(tmp_path):
    cells = {"a.wq": (2, 1.0, 1.0, [1.0, 1.0]), **{f"b{i}.wq": (2, 1.0, 0.0, [1.0, 1.0]) for i in range(9)}}
    ranks = ranks_of(suggest_ranks(recorded(tmp_path, cells)))
    assert ranks["a.wq"] == 8 and {rank for path, rank in ranks.items() if path != "a.wq"} == {1}
    assert set(ranks.values()) <= set(LADDER)


def test_what_an_initialization_began_with_is_no_rank_of_the_run(tmp_path):
    pet_config = {"lora_init": "pissa"}
    run = {"configuration": {"model": {"model_config": {"pet_config": pet_config}}}}
    suggestion = suggest_ranks(recorded(tmp_path, {"wq": (8, 1.0, 1.0, [1.0] * 8)}, run))
    assert (suggestion.before, suggestion.lora_rank) == (4, 4)
    assert "4.0 of 4 ranks in use" in str(suggestion)


def test_cells_of_which_nothing_is_known_keep_their_rank(tmp_path):
    history = recorded(tmp_path, {"wq": (4, 1.0, 1.0, [1.0] * 4), "conv": (4, 1.0, 1.0, None)})
    suggestion = suggest_ranks(history)
    assert (suggestion.without, suggestion.before) == (("conv",), 4)
    assert str(suggestion).endswith("# Nothing is known of conv, which keep their rank.")


@pytest.mark.parametrize(
    "cells, budget, error, message",
    [
        ({}, None, DataError, "has no measurements of adapters. Add AdapterHealth to callbacks"),
        ({"wq": (4, 1.0, None, [1.0])}, None, DataError, "has no norms of gradients. Set runner_wrapper.record_grad"),
        ({"wq": (4, 1.0, 1.0, None)}, None, DataError, "has no singular values of what its adapters change"),
        ({"vera": (4, 1.0, 1.0, None)}, None, DataError, "has no singular values of what its adapters change: VeRA"),
        (
            {"wq": (4, 1.0, 1.0, [1.0]), "wv": (4, 1.0, 1.0, [1.0])},
            1,
            ConfigError,
            "--budget is 1, and each of the 2 cells",
        ),
    ],
    ids=["no health", "no gradients", "no spectra", "VeRA", "a budget too small"],
)
def test_a_run_that_says_too_little_is_refused(tmp_path, cells, budget, error, message):
    history = recorded(tmp_path, cells)
    if not cells:
        history.health = []
    with pytest.raises(error) as caught:
        suggest_ranks(history, budget)
    assert message in str(caught.value)
