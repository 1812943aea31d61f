"""Several adapters in one run of MindFormers' PyNative Trainer: each learns what it learns alone there."""

import json

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from mindlora.data.mindrecord import write_mindrecord
from mindlora.run.checks.data_rows import BOUNDARY
from tests.support import pynative_runs, tiny_runs
from tests.support.event_files import scalars_of
from tests.support.pynative_runs import LORA, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS, BEGIN = 4, 2
PROJECTIONS = r"linear_(proj|fc2)$"
# Name -> what the adapter has of its own; "data" is the name of a file.
ADAPTERS = {
    "plain": {"seed": 1},
    "large": {"seed": 2, "lora_rank": 6, "lora_alpha": 9, "learning_rate": 6.0e-3, "use_rslora": True},
    "part": {
        "seed": 3,
        "data": "other",
        "target_modules": PROJECTIONS.replace("linear", ".*linear"),
        "alpha_pattern": {".*linear_fc2": 3},
        "lora_init": "orthogonal",
    },
}
# Micro-batches of two rows, whose numbers of tokens differ; some of the gradients are clipped.
PARTS = {"training": {"steps": STEPS, "local_batch_size": 2, "global_batch_size": 4, "seed": 1, "max_norm": 0.2}}
HALF = {"training": {"steps": STEPS // 2, "local_batch_size": 4, "global_batch_size": 4, "seed": 1}}
# Of the base, of the adapters and of the rows: pet_config, and the name of the data.
FORMS = {
    "in_4_bits": ({"quantize_base": "nf4"}, "rows"),
    "in_16_bits": ({"param_init_type": "float16"}, "rows"),
    "packed": ({}, "packed"),
}
# Multi-head latent attention, and tokens that go to all experts, as attention rounds to float16 and a choice may turn.
DEEPSEEK_V3 = {
    **pynative_runs.DEEPSEEK_V3,
    **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "moe_router_bias_update_rate": 0.0},
}
# The runs that MindFormers saves.
SAVED = ("together", "plain", "stopping", "guarded")
STOPPING = ({"name": "frozen", "seed": 1, "learning_rate": 0.0}, {"name": "learning", "seed": 2})
# Data with a row in which no token counts.
EMPTY = ({"name": "empty", "data": "unlabeled"}, {"name": "full"})


def configuration(folder, name, pet_config, **changes):
    """Returns the YAML of a run that writes to a folder of its name, and what it changes of the usual one."""
    held_out = folder / f"{changes.pop('held_out', 'held_out')}.mindrecord"
    callbacks = [
        {"type": "RunReport", "directory": str(folder / name)},
        {"type": "LoraCheckpoint", "save_steps": 2, "directory": str(folder / name)},
        {"type": "HeldOutLoss", "dataset_dir": str(held_out), "every_steps": 1, "batch_size": 4},
        {"type": "RecordLosses", "directory": str(folder / name)},
    ]
    callbacks += changes.pop("more_callbacks", [])
    rate = changes.pop("learning_rate", 3.0e-3)
    loaded = changes.pop("loaded", {"load_path": str(folder / "base"), "no_load_optim": True})
    saved = {"save_path": str(folder / f"{name}_saved"), "save_interleaved_steps": 1, "save_max": STEPS}
    saved["enable_save"] = name in SAVED
    config = pynative_runs.tiny_config("qwen3", folder / f"{changes.pop('data', 'rows')}.mindrecord", STEPS)
    config["lr_scheduler"] = {"type": "CosineWithWarmUpLR", "learning_rate": rate, "warmup_steps": 1}
    return {**config, "callbacks": callbacks, "checkpoint": {**saved, **loaded}, "pet_config": pet_config, **changes}


def alone(folder, name, **changes):
    own = dict(ADAPTERS[name])
    changes |= {key: own.pop(key) for key in ("learning_rate", "data") if key in own}
    lora = {key: own.pop(key) for key in ("lora_rank", "lora_alpha") if key in own}
    if own.pop("target_modules", None):
        lora["target_modules"] = PROJECTIONS
    return configuration(folder, name, own, lora_config={**LORA, **lora}, **changes)


def several(folder, name, adapters, **changes):
    nodes = [dict(node) for node in adapters]
    for node in nodes:
        if "data" in node:
            node["data"] = str(folder / f"{node['data']}.mindrecord")
    pet_config = {**changes.pop("pet_config", {}), "adapters": nodes}
    return configuration(folder, name, pet_config, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    pynative_runs.write_base(folder / "base", folder / "hf")
    for number, (name, rows) in enumerate({"rows": 20, "other": 8, "held_out": 6}.items()):
        pynative_runs.write_data(folder / f"{name}.mindrecord", rows, seed=number)
    pynative_runs.write_data(folder / "unlabeled.mindrecord", 16, labeled=6)
    tokens, labels = (array[:, 1:] for array in pynative_runs.counting_rows(8))
    # Two examples in a row.
    tokens[:, [0, tiny_runs.SEQUENCE // 2]] = BEGIN
    boundary = np.array([BEGIN], np.int32)
    rows = ({"input_ids": ids, "labels": row, BOUNDARY: boundary} for ids, row in zip(tokens, labels))
    write_mindrecord(rows, str(folder / "packed.mindrecord"))
    return folder


@pytest.fixture(scope="module")
def messages(folder):
    """Name of a run -> what refused it, or None."""

    def after(name, step):
        return {"load_path": str(folder / f"{name}_saved" / f"iteration_{step:08d}")}

    three = [{"name": name, **own} for name, own in ADAPTERS.items()]
    plain = ADAPTERS["plain"]
    waiting = [{"type": "EarlyStopping", "patience": 1, "min_delta": 1e-4}]
    guards = [{"type": "TrainingGuard", "max_skipped": 2, "rate_cut": 0.5}, {"type": "GracefulStop"}]
    spoiling = {"type": "SpoilStep", "steps": [1, 2], "path": str(folder / "changed.json")}
    constant = {"lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 3.0e-3, "warmup_steps": 0}}
    interrupted = [spoiling, {"type": "SendSignal", "step": 3}]
    configs = {
        "together": several(folder, "together", three, **PARTS),
        "resumed": several(folder, "resumed", three, **PARTS, loaded=after("together", 2)),
        **{name: alone(folder, name, **PARTS) for name in ADAPTERS},
        "stopping": several(folder, "stopping", STOPPING, more_callbacks=waiting),
        "stopped": several(folder, "stopped", STOPPING, more_callbacks=waiting, loaded=after("stopping", 3)),
        "guarded": several(folder, "guarded", three[:2], more_callbacks=[*guards, *interrupted], **constant),
        "guarded_rest": several(
            folder, "guarded_rest", three[:2], more_callbacks=guards, loaded=after("guarded", 3), **constant
        ),
        "empty": several(folder, "empty", EMPTY, more_callbacks=[{"type": "EmptySteps"}]),
        "others": several(folder, "others", three[:2], loaded=after("stopping", 3)),
        "more": several(folder, "more", three, loaded=after("stopping", 3)),
        "one_saved": several(folder, "one_saved", three, loaded=after("plain", 2)),
        "several_saved": configuration(folder, "several_saved", {}, loaded=after("together", 2)),
    }
    others = {}
    latent = {**HALF, "model": DEEPSEEK_V3, "loaded": {}, "more_callbacks": [{"type": "FillWeights", "base": True}]}
    latent["lora_config"] = pynative_runs.LORA_WITH_EXPERTS
    # The last one is not on routed experts.
    others["latent"] = several(folder, "latent", three, **latent)
    others["latent_alone"] = configuration(folder, "latent_alone", plain, **latent)
    others["balanced"] = several(folder, "balanced", three, model=pynative_runs.DEEPSEEK_V3, loaded={})
    for name, (pet_config, data) in FORMS.items():
        changes = {**HALF, "data": data, "held_out": data}
        others[name] = several(folder, name, three[:2], pet_config=pet_config, **changes)
        others[f"{name}_alone"] = configuration(folder, f"{name}_alone", {**pet_config, **plain}, **changes)
    # Two processes, as one has a limit of time.
    found = [pynative_runs.series(list(each.values()), folder) for each in (configs, others)]
    return dict(zip([*configs, *others], sum(found, [])))


def records(folder, key):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


def saved(folder, step=STEPS):
    return load_file(folder / f"step_{step}" / "adapter_model.safetensors")


SWEEP = """
from tests.support import pynative_cpu
pynative_cpu.install()
from mindlora import cli
raise SystemExit(cli.main(["sweep", "sweep.yaml", "--lr", "0.0,6e-3", "--seed", "1", "--output_dir", "swept",
                           "--report-to", "tensorboard"]))
"""


def test_a_sweep_compares_what_it_has_tried(folder, messages):
    config = configuration(folder, "sweep", {})
    config["callbacks"] = [node for node in config["callbacks"] if node["type"] == "HeldOutLoss"]
    config["training"]["steps"] = 2
    (folder / "sweep.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run = pynative_runs.python(["-c", SWEEP], folder)
    assert run.returncode == 0, run.stderr[-3000:]
    swept = folder / "swept"
    assert f"{swept / 'comparison.html'}\nbest: lr6e-3_seed1, in {swept / 'lr6e-3_seed1'}" in run.stdout
    assert len(records(swept / "lr0.0_seed1", "held_out_loss")) == 2
    assert (swept / "lr6e-3_seed1" / "report.html").is_file()
    for name in ("lr0.0_seed1", "lr6e-3_seed1"):
        scalars = scalars_of(swept / name / "tensorboard")
        assert [scalars["loss", step] for step in (1, 2)] == pytest.approx(records(swept / name, "loss"), rel=1e-6)


@pytest.mark.parametrize("name", ADAPTERS)
@shows("several", "qwen3", trainer="pynative")
def test_an_adapter_learns_what_it_learns_alone(folder, messages, name):
    assert messages["together"] is messages[name] is None
    together = folder / "together" / name
    for key in ("loss", "held_out_loss", "tokens", "learning_rate", "gradient_norm"):
        expected = records(folder / name, key)
        assert len(expected) == STEPS
        # Attention in float16 rounds what differs in the last bits.
        tolerance = 1e-4 if key == "gradient_norm" else 1e-5
        np.testing.assert_allclose(records(together, key), expected, rtol=tolerance, err_msg=key)
    adapter, expected = saved(together / "lora_checkpoint"), saved(folder / name)
    assert adapter.keys() == expected.keys()
    for key, array in expected.items():
        # Adam makes a step of its full length of a gradient near zero too, whatever its last bits are.
        difference = np.abs(adapter[key] - array)
        assert difference.mean() < 1e-5 and difference.max() < 1e-2 * np.abs(array).max(), key


def test_a_resumed_run_is_the_rest_of_the_whole_one(folder, messages):
    assert messages["resumed"] is None
    assert pynative_runs.losses(folder / "resumed") == pynative_runs.losses(folder / "together")[2:]
    whole, resumed = (pynative_runs.trained(folder / name) for name in ("together", "resumed"))
    assert whole.keys() == resumed.keys() and all(np.array_equal(resumed[name], whole[name]) for name in whole)
    for name in ADAPTERS:
        for key in ("loss", "held_out_loss", "learning_rate"):
            whole, rest = (records(folder / run / name, key) for run in ("together", "resumed"))
            assert rest == whole[2:]


@pytest.mark.parametrize("name", FORMS)
def test_the_base_in_4_bits_the_adapters_in_16_and_packed_rows_are_as_alone(folder, messages, name):
    assert messages[name] is messages[f"{name}_alone"] is None
    expected = records(folder / f"{name}_alone", "held_out_loss")
    assert len(expected) == STEPS // 2 and expected[0] != expected[1]
    np.testing.assert_allclose(records(folder / name / "plain", "held_out_loss"), expected, rtol=1e-5)


@shows("several", "deepseek_v3", trainer="pynative")
@shows("experts", "deepseek_v3", trainer="pynative")
def test_on_latent_attention_and_all_experts_an_adapter_learns_what_it_learns_alone(folder, messages):
    assert messages["latent"] is messages["latent_alone"] is None
    for key in ("loss", "held_out_loss"):
        expected = records(folder / "latent_alone", key)
        assert len(expected) == STEPS // 2 and expected[0] != expected[1]
        np.testing.assert_allclose(records(folder / "latent" / "plain", key), expected, rtol=1e-5)
    adapter = saved(folder / "latent" / "plain" / "lora_checkpoint", STEPS // 2)
    expected = saved(folder / "latent_alone", STEPS // 2)
    assert adapter.keys() == expected.keys()
    assert all(any(part in key for key in expected) for part in ("kv_b_proj", "mlp.experts", "shared_experts"))
    for key, array in expected.items():
        difference = np.abs(adapter[key] - array)
        assert difference.mean() < 1e-5 and difference.max() < 1e-2 * np.abs(array).max(), key


def test_routed_experts_that_all_rows_balance_are_refused(messages):
    assert "moe_router_bias_update_rate of the model is 0.001, and pet_config has adapters" in messages["balanced"]


def test_an_adapter_that_stops_early_stays_as_it_is_and_the_other_goes_on(folder, messages):
    assert messages["stopping"] is messages["stopped"] is None
    assert records(folder / "stopping" / "frozen", "event") == ["early_stop"]
    assert len(records(folder / "stopping" / "frozen", "loss")) == 2
    assert len(records(folder / "stopping" / "learning", "loss")) == STEPS
    adapters = pynative_runs.trained(folder / "stopping")
    # The run that goes on has what the whole one had.
    rest = pynative_runs.trained(folder / "stopped")
    assert all(np.array_equal(rest[name], array) for name, array in adapters.items())
    assert not (folder / "stopped" / "frozen" / "metrics.jsonl").exists()
    assert pynative_runs.losses(folder / "stopped") == pynative_runs.losses(folder / "stopping")[3:]


def test_a_guard_takes_each_adapter_back_and_a_run_that_a_signal_stopped_goes_on(folder, messages):
    assert "SIGTERM stopped the run after step 3 of 4" in messages["guarded"]
    assert messages["guarded_rest"] is None
    assert json.loads((folder / "changed.json").read_text(encoding="utf-8")) == [False, False]
    for name, rate in (("plain", 3e-3), ("large", 6e-3)):
        assert records(folder / "guarded" / name, "skipped") == [True, True, False]
        assert "rollback" in records(folder / "guarded" / name, "event")
        rates = [records(folder / run / name, "learning_rate") for run in ("guarded", "guarded_rest")]
        np.testing.assert_allclose(rates[0], [rate, rate, 0.5 * rate], rtol=1e-6)
        np.testing.assert_allclose(rates[1], [0.5 * rate], rtol=1e-6)


def test_an_adapter_whose_rows_have_no_label_that_counts_learns_nothing_in_that_step(folder, messages):
    assert messages["empty"] is None
    assert records(folder / "empty" / "empty", "skipped") == [False, False, True, True]
    assert records(folder / "empty" / "empty", "tokens")[2:] == [0, 0]
    assert records(folder / "empty" / "full", "skipped") == [False] * STEPS


@pytest.mark.parametrize(
    "name, message",
    [
        ("others", "was saved by a run with other adapters"),
        ("more", "holds 2 adapters, and pet_config.adapters names 3"),
        ("one_saved", "holds one adapter, and pet_config.adapters names 3"),
        ("several_saved", "holds 3 adapters that trained in one run, but pet_config has no adapters"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(messages, name, message):
    assert message in messages[name]
