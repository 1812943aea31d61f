"""AdaLoRA under MindFormers' PyNative Trainer: budget, importance and masks against NumPy, files, and a resumed run."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora import cli
from mindlora.core.numerics.rank_schedule import BudgetSchedule, BudgetSettings
from mindlora.files.adapters import files as adapter_files
from mindlora.training.report.history import read_history
from tests.support import pynative_runs
from tests.support.pynative_runs import BASE_FILE, LORA, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS, CELLS, RANK = 8, 8, LORA["lora_rank"]
BUDGET = {"target_r": 2, "tinit": 2, "tfinal": 2, "deltaT": 2}
SETTINGS = BudgetSettings(init_r=RANK, **BUDGET)
FROZEN = {"type": "ConstantWarmUpLR", "learning_rate": 0.0, "warmup_steps": 0}
ADALORA = {"use_adalora": True, **BUDGET, "seed": 3}
# A step of two micro-batches.
PARTS = {"training": {"steps": STEPS, "local_batch_size": 2, "global_batch_size": 4, "seed": 1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adalora")
    pynative_runs.write_data(folder / "rows.mindrecord", rows=4 * STEPS)
    pynative_runs.write_base(folder / "base", folder / "hf")
    return folder


def train(folder, runs):
    """Runs each of (name, pet_config, what is loaded, more callbacks, other nodes); returns name -> what refused it."""
    configs = []
    for name, pet_config, loaded, callbacks, nodes in runs:
        saved = {"enable_save": True, "save_path": str(folder / f"{name}_saved"), "save_interleaved_steps": 1}
        callbacks = [
            *callbacks,
            {"type": "LoraCheckpoint", "save_steps": STEPS, "directory": str(folder / f"{name}_peft")},
            {"type": "RecordLosses", "directory": str(folder / name)},
            {"type": "RunReport", "directory": str(folder / name)},
        ]
        nodes = {"checkpoint": {**saved, "save_max": STEPS, **loaded}, "callbacks": callbacks, **nodes}
        nodes["pet_config"] = pet_config
        configs.append(pynative_runs.tiny_config("qwen3", folder / "rows.mindrecord", STEPS, **nodes))
    messages = pynative_runs.series(configs, folder)
    return {name: message for (name, *_), message in zip(runs, messages)}


@pytest.fixture(scope="module")
def messages(folder):
    """Name of a run -> what refused it, or None."""
    base = {"load_path": str(folder / "base"), "no_load_optim": True}
    health = [{"type": "AdapterHealth", "every_steps": 1}]
    guarded = [{"type": "TrainingGuard", "max_skipped": 2}]
    spoiled = [*guarded, {"type": "SpoilStep", "steps": [3, 4], "path": str(folder / "changed.json")}]
    adapter = str(folder / "whole_peft" / f"step_{STEPS}")
    found = train(
        folder,
        [
            ("whole", ADALORA, base, health, {}),
            ("resumed", ADALORA, {"load_path": str(folder / "whole_saved" / "iteration_00000004")}, health, {}),
            ("initial", ADALORA, base, [], {"lr_scheduler": FROZEN}),
            ("parts", ADALORA, base, [], PARTS),
            ("guarded", ADALORA, base, spoiled, {}),
            ("too_long", {**ADALORA, "tinit": 6}, base, [], {}),
            ("loaded", {**ADALORA, "adapter_path": adapter}, base, [], {}),
            ("other_rank", {**ADALORA, "init_r": 6}, base, [], {}),
        ],
    )
    shutil.copytree(folder / "whole_saved" / "iteration_00000004", folder / "lost")
    (folder / "lost" / "mindlora_run.npz").unlink()
    return {**found, **train(folder, [("lost", ADALORA, {"load_path": str(folder / "lost")}, [], {})])}


def state_of(folder, step, name="whole"):
    """Returns what was saved at a step: the tensors of the model, and of the importance."""
    path = folder / f"{name}_saved" / f"iteration_{step:08d}"
    with np.load(path / "mindlora_run.npz") as arrays:
        return adapter_tensors(path), dict(arrays)


def adapter_tensors(path):
    return {name: array for name, array in load_file(path / BASE_FILE).items() if "lora" in name}


def lambdas(tensors):
    return {name: array for name, array in tensors.items() if name.endswith("lambda_lora_b")}


@shows("adalora", "qwen3", trainer="pynative")
def test_as_many_ranks_are_left_as_the_budget_says(folder, messages):
    assert messages["whole"] is None
    schedule = BudgetSchedule(SETTINGS, CELLS, STEPS)
    for step in range(2, STEPS + 1):
        tensors, _ = state_of(folder, step)
        left = sum(np.count_nonzero(array) for array in lambdas(tensors).values())
        # Between two allocations, masked ranks learn.
        assert left == RANK * CELLS - schedule.masked(step), step
    (event,) = [event for event in read_history(str(folder / "whole")).events if event["event"] == "rank_budget"]
    assert event["step"] == STEPS - 2 and event["message"].startswith(f"AdaLoRA has allocated {2 * CELLS} ranks: ")


def test_the_first_gradient_of_p_and_q_is_that_of_the_orthogonality_term(folder, messages):
    """Lambda is zero then. It is clipped with the others, and what the importance begins with follows from it."""
    tensors, state = state_of(folder, 1)
    gradients = {}
    for name, array in state_of(folder, 1, "initial")[0].items():
        if not name.endswith("lambda_lora_b"):
            is_p = name.endswith("lora_b")
            gradients[name] = orthogonality_gradient(array.T).T if is_p else orthogonality_gradient(array)
    cells = read_history(str(folder / "whole")).health[0]["health"]["cells"]
    recorded = {
        (path, part): measures["gradient_norm"]
        for path, cell in cells.items()
        for part, measures in cell["parts"].items()
    }
    clip = min(1.0, 1 / (np.linalg.norm(list(recorded.values())) + 1e-6))
    for name, gradient in gradients.items():
        cell, _, ending = name.rpartition(".")
        assert recorded[cell, ending[-1].upper()] == pytest.approx(np.linalg.norm(gradient), rel=1e-4)
        expected = (1 - SETTINGS.beta1) * np.abs(tensors[name] * gradient * clip)
        np.testing.assert_allclose(state[f"rank_budget.{name}.sensitivity"], expected, rtol=1e-3, atol=1e-9)


def orthogonality_gradient(rows):
    """Returns that of the orthogonality term by Q, in NumPy; by P it is that of its transpose, transposed."""
    difference = rows @ rows.T - np.eye(len(rows), dtype=np.float32)
    return difference @ rows * (SETTINGS.orth_reg_weight / CELLS) / np.linalg.norm(difference)


def test_the_ranks_worth_least_are_masked(folder, messages):
    """At the last allocation, after which importance does not change."""
    tensors, state = state_of(folder, STEPS - 2)
    scores = {}
    for name in lambdas(tensors):
        cell = name.removesuffix(".lambda_lora_b")
        parts = {part: f"rank_budget.{cell}.{part}" for part in ("lambda_lora_b", "lora_a", "lora_b")}
        each = {part: state[f"{key}.sensitivity"] * state[f"{key}.uncertainty"] for part, key in parts.items()}
        scores[name] = each["lambda_lora_b"] + each["lora_a"].mean(1) + each["lora_b"].mean(0)
    masked = CELLS * (RANK - BUDGET["target_r"])
    highest = np.sort(np.concatenate(list(scores.values())))[masked - 1]
    for name, array in lambdas(tensors).items():
        np.testing.assert_array_equal(array != 0, scores[name] > highest, err_msg=name)
    _, later = state_of(folder, STEPS)
    assert all(np.array_equal(later[name], array) for name, array in state.items())


def test_a_resumed_run_is_the_rest_of_the_whole_one(folder, messages):
    assert messages["resumed"] is None
    whole, resumed = (pynative_runs.losses(folder / name) for name in ("whole", "resumed"))
    assert len(whole) == STEPS and resumed == whole[4:]
    for arrays, others in zip(state_of(folder, STEPS), state_of(folder, STEPS, "resumed")):
        assert arrays.keys() == others.keys()
        assert all(np.array_equal(arrays[name], others[name]) for name in arrays)
    assert "does not hold the state of the run's train step" in messages["lost"]


def test_in_micro_batches_and_after_a_rollback_the_budget_is_kept(folder, messages):
    assert messages["parts"] is messages["guarded"] is None
    for name in ("parts", "guarded"):
        tensors, _ = state_of(folder, STEPS, name)
        assert sum(np.count_nonzero(array) for array in lambdas(tensors).values()) == 2 * CELLS
    assert json.loads((folder / "changed.json").read_text(encoding="utf-8")) == [False, False]


def test_the_folder_for_peft_is_a_plain_lora_and_mindformers_own_is_none(folder, messages, capsys):
    adapter = adapter_files.read(str(folder / "whole_peft" / f"step_{STEPS}"))
    assert adapter.allocation["target"] == 2 * CELLS
    converting = ["adapter", "convert", str(folder / "whole_saved" / f"iteration_{STEPS:08d}"), str(folder / "out")]
    assert cli.main([*converting, "--to", "peft"]) == 1
    assert "is a checkpoint of a run of AdaLoRA" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, message",
    [
        ("too_long", "tinit 6 and tfinal 2, which leave none of the run's 8 steps"),
        ("loaded", "the ranks of a saved adapter are fixed. Remove use_adalora"),
        ("other_rank", "pet_config.init_r is 6 and lora_config.lora_rank is 4"),
    ],
)
def test_it_is_refused_by_name(messages, name, message):
    assert message in (messages[name] or "")
