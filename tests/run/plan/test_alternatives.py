"""The smallest change that fits: it is the first in the order, the lines are YAML, and the changed run does fit."""

import pytest
import yaml

from mindlora.core.yaml_file import merged
from mindlora.run.plan.alternatives import fit, layouts_of
from mindlora.run.plan.memory import memory_of, needed_while_loading
from mindlora.run.plan.run import read_run
from mindlora.run.plan.units import GIB
from tests.support.planned_runs import LORA, run_of, yaml_of

MODEL = {"num_layers": 4, "num_heads": 8, "n_kv_heads": 8, "hidden_size": 256, "intermediate_size": 512}
MODEL |= {"vocab_size": 256, "seq_length": 256}
ROWS = {"batch_size": 8, "epochs": 1}
# The part of a CPU's memory that is filled.
FILLED = 0.9


def test_a_run_that_fits_needs_no_change():
    run = run_of()
    found = fit(run, int(memory_of(run).total / FILLED) + 2, [1])
    assert found.fits and not found.tried and not found.lines


def test_a_tenth_of_a_cpus_memory_is_not_filled():
    run = run_of()
    assert not fit(run, memory_of(run).total, [1]).fits


def test_the_longest_rows_fit_and_longer_ones_do_not():
    config = yaml_of(MODEL, runner_config={**ROWS, "batch_size": 2})
    run = read_run(config)
    found = fit(run, 8 * memory_of(run).total, [1])
    assert [row.batch_size for row in found.longest_rows] == [2, 1]
    for rows, tokens, is_the_models in found.longest_rows:
        assert tokens % 256 == 0 and not is_the_models
        assert (
            0
            < needed_while_loading(run.with_rows(rows, tokens))
            <= found.usable
            < needed_while_loading(run.with_rows(rows, tokens + 256))
        )
    changed = merged(config, {"runner_config": {"batch_size": 1}, "model": {"model_config": {"seq_length": 512}}})
    assert memory_of(run.with_rows(1, 512)) == memory_of(read_run(changed))


def test_rows_are_not_longer_than_the_positions_of_the_model():
    run = run_of({**MODEL, "max_position_embedding": 1024}, runner_config={**ROWS, "batch_size": 1})
    assert fit(run, 1000 * memory_of(run).total, [1]).longest_rows == ((1, 1024, True),)
    assert fit(run, 1000, [1]).longest_rows == ((1, 0, False),)


@pytest.mark.parametrize(
    "limit, filled, reason",
    [
        (None, 15, "MindSpore leaves a sixteenth to communication and the runtime"),
        ("11GB", 11, "MindSpore takes no more with context.max_device_memory: 11GB"),
        ("58GB", 15, "MindSpore leaves a sixteenth to communication and the runtime"),
    ],
)
def test_an_npu_is_filled_as_far_as_mindspore_fills_it(limit, filled, reason):
    context = {"device_target": "Ascend", **({"max_device_memory": limit} if limit else {})}
    found = fit(run_of(context=context), 16 * GIB, [1])
    assert found.usable == filled * GIB and found.reason == reason


@pytest.mark.parametrize(
    "keys, rows, share, words",
    [
        ({}, 8, 0.5, "recompute all layers"),
        ({}, 8, 0.25, "batch_size 1, gradient_accumulation_steps 8"),
        ({}, 8, 0.15, "recompute all layers; batch_size 1, gradient_accumulation_steps 8"),
        ({}, 8, 0.08, "QLoRA (quantize_base: nf4); recompute all layers; batch_size 1, gradient_accumulation_steps 8"),
        ({"seq_length": 4}, 1, 0.6, "QLoRA (quantize_base: nf4)"),
        ({"seq_length": 32}, 1, 0.35, "QLoRA (quantize_base: nf4); recompute all layers"),
    ],
)
def test_the_first_change_that_fits_is_taken(keys, rows, share, words):
    config = yaml_of({**MODEL, **keys}, runner_config={**ROWS, "batch_size": rows})
    memory = int(share * memory_of(read_run(config)).total / FILLED)
    found = fit(read_run(config), memory, [1])
    assert found.tried[-1].change == words, [(trial.change, trial.needed) for trial in found.tried]
    assert found.tried[-1].fits and not any(trial.fits for trial in found.tried[:-1])
    changed = read_run(merged(config, yaml.safe_load(found.lines)))
    assert memory_of(changed).total == found.tried[-1].needed <= memory * FILLED


def test_a_larger_step_is_never_made_of_a_smaller_batch():
    dataset = {"drop_remainder": True}
    config = yaml_of(MODEL, runner_config={**ROWS, "gradient_accumulation_steps": 3}, train_dataset=dataset)
    found = fit(read_run(config), int(0.25 * memory_of(read_run(config)).total), [1])
    changed = merged(config, yaml.safe_load(found.lines))["runner_config"]
    assert changed["batch_size"] * changed["gradient_accumulation_steps"] == 8 * 3
    config = yaml_of(MODEL, runner_config=ROWS)
    found = fit(read_run(config), int(0.25 * memory_of(read_run(config)).total), [1])
    assert yaml.safe_load(found.lines)["train_dataset"] == {"drop_remainder": True}


@pytest.mark.parametrize(
    "divided, step, offered",
    [
        ({}, "MFTrainOneStepCell", True),
        ({"model_parallel": 2}, "MFTrainOneStepCell", False),
        ({}, "LoraTrainOneStepCell", False),
    ],
)
def test_devices_that_share_rows_alone_are_told_of_data_parallel_first(divided, step, offered):
    parallel = {"data_parallel": 2, **divided}
    vocabulary = {**MODEL, "vocab_size": 64000}
    nodes = {"parallel": {"parallel_mode": 1}, "parallel_config": parallel, "runner_wrapper": {"type": step}}
    run = run_of(vocabulary, use_parallel=True, **nodes)
    found = fit(run, memory_of(run).total, [1])
    assert found.tried[0].change.startswith("parallel_mode 0, data parallel") == offered
    if offered:
        # Without the logits of all tokens.
        assert found.tried[0].needed < 0.8 * memory_of(run).total
        assert read_run(merged(run.yaml.config, yaml.safe_load(found.lines))).piece


def test_devices_are_tried_last():
    config = yaml_of(MODEL, {}, runner_config={**ROWS, "batch_size": 1})
    config = merged(config, {"recompute_config": {"recompute": True}})
    found = fit(read_run(config), int(0.6 * memory_of(read_run(config)).total), [1, 2, 4])
    assert found.tried[-1].change.startswith("model_parallel")
    assert yaml.safe_load(found.lines)["parallel_config"]["model_parallel"] in (2, 4)


def test_devices_are_not_offered_for_an_adapter_that_sharded_cells_refuse():
    config = yaml_of(MODEL, {**LORA, "use_dora": True}, runner_config={**ROWS, "batch_size": 1})
    assert not any("devices" in trial.change for trial in fit(read_run(config), 1000, [2, 4]).tried)
    (two,) = layouts_of(read_run(config), [2])
    assert two.model is None and "use_dora is not supported on sharded cells" in two.notes[-1]


def test_where_nothing_helps_all_that_was_tried_is_shown():
    found = fit(run_of(), 1000, [1])
    assert not found.fits and not found.lines and len(found.tried) == 6


def test_a_sharded_base_is_not_quantized():
    run = run_of(MODEL, use_parallel=True, parallel={"parallel_mode": 1}, parallel_config={"data_parallel": 2})
    assert not any("QLoRA" in trial.change for trial in fit(run, 1000, [1]).tried)
