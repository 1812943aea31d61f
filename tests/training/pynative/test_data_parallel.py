"""MindFormers' PyNative Trainer in two processes that each have the whole model, against one with all rows.

One process trains all runs, and each of two ranks does. The stand-in for hyper_parallel sums gradients by AllReduce.
"""

import copy
import json

import numpy as np
import pytest
import yaml

from mindlora.data.mindrecord import write_mindrecord
from mindlora.files.adapters import files as adapter_files
from mindlora.run.checks.data_rows import BOUNDARY
from tests.support import pynative_mindlora_run, pynative_runs, pynative_series, tiny_runs
from tests.support.pynative_runs import IGNORED, only_with_pynative_trainer
from tests.support.ranks import run_ranks
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS, ROWS, BEGIN = 2, 4, 2
NOT_JOINED = {**pynative_runs.LORA, "target_modules": r"linear_(proj|fc2)$"}
DPO = {"loss": "dpo", "beta": 0.5}
CLASSIFIER = {
    **pynative_runs.QWEN3,
    "architectures": "Qwen3ForTokenClassification",
    "num_labels": 8,
    "ignore_token_id": 7,
}
# With other ranks, rates and data.
ADAPTERS = [
    {"name": "plain", "seed": 1},
    {"name": "large", "seed": 2, "lora_rank": 6, "lora_alpha": 9, "learning_rate": 6.0e-3, "data": "rows"},
]
# Name -> data, and changed nodes; "parts" is how many micro-batches each process has. Both sides train these.
COMPARED = {
    "labels": ("uneven", {"parts": 2}),
    "pissa": ("rows", {"pet_config": {"lora_init": "pissa", "modules_to_save": ["norm"]}}),
    "dora": ("rows", {"pet_config": {"use_dora": True}}),
    "vera": ("rows", {"pet_config": {"use_vera": True}, "lora_config": NOT_JOINED}),
    "adapters": ("uneven", {"parts": 2, "pet_config": {"adapters": ADAPTERS}}),
    "adalora": ("rows", {"pet_config": {"use_adalora": True, "target_r": 2, "tinit": 0, "tfinal": 1, "deltaT": 1}}),
    "packed": ("packed", {"pet_config": {"quantize_base": "nf4", "alora_invocation_tokens": [BEGIN]}}),
    "preferences": ("pairs", {"preference": DPO}),
    "words": ("words", {"model": CLASSIFIER}),
    # Where the head trains, several processes make the logits of all tokens.
    "guarded": ("rows", {"pet_config": {"modules_to_save": ["lm_head"]}}),
    # With the adapter that one process has trained first.
    "loaded": ("rows", {"pet_config": {"adapter_path": f"one/labels/step_{STEPS}"}}),
}
# What the runs show.
SHOWN = {
    "labels": ("lora", "held_out"),
    "pissa": ("pissa", "saved_modules"),
    "dora": ("dora",),
    "vera": ("vera",),
    "adapters": ("several",),
    "adalora": ("adalora",),
    "packed": ("packed", "nf4", "alora"),
    "preferences": ("preference",),
    "words": ("classifier",),
    "guarded": ("guard",),
}
# The folders of runs with one adapter, in which a report is.
REPORTS = [name for name in COMPARED if name != "adapters"]


def shown(feature):
    """Returns a mark: the test shows a feature at work in two processes."""
    return shows(feature, "qwen3", trainer="pynative", place="processes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data_parallel")
    pynative_runs.write_base(folder / "base", folder / "hf")
    tokens, labels = (array[:, 1:] for array in pynative_runs.counting_rows(STEPS * ROWS))
    write(folder / "rows.mindrecord", tokens, labels)
    write(folder / "held_out.mindrecord", *(array[:3] for array in (tokens, labels)))
    # No row of the second process has labels in the first step.
    uneven = labels.copy()
    uneven[[1, 3]] = IGNORED
    write(folder / "uneven.mindrecord", tokens, uneven)
    packed = tokens.copy()
    packed[:, [0, tiny_runs.SEQUENCE // 2]] = BEGIN
    write(folder / "packed.mindrecord", packed, labels, **{BOUNDARY: np.array([BEGIN], np.int32)})
    write(folder / "words.mindrecord", tokens, np.where(labels == IGNORED, 7, labels % 7).astype(np.int32))
    write_pairs(folder / "pairs.mindrecord")
    return folder


def write(path, tokens, labels, **columns):
    pairs = ({"input_ids": ids, "labels": row, **columns} for ids, row in zip(tokens, labels))
    write_mindrecord(pairs, str(path))


def write_pairs(path):
    """Writes rows of two answers, of different lengths."""
    rng = np.random.default_rng(4)
    rows = []
    for _ in range(STEPS * ROWS):
        tokens = rng.integers(4, tiny_runs.VOCABULARY, (2, tiny_runs.SEQUENCE + 1)).astype(np.int32)
        answers = np.full_like(tokens, -1)
        for answer in range(2):
            answers[answer, 4 : 6 + rng.integers(1, 8)] = answer
        labels = np.where(answers < 0, -100, tokens).astype(np.int32)
        rows.append({"input_ids": tokens, "labels": labels, "answers": answers, "pairs": np.ones(1, np.int32)})
    write_mindrecord(iter(rows), str(path))


def configuration(folder, output, name, data, nodes):
    """Returns the YAML of a run of one process, which writes into ``output``."""
    nodes = copy.deepcopy(nodes)
    parts = nodes.pop("parts", 1)
    for adapter in nodes.get("pet_config", {}).get("adapters", []):
        if "data" in adapter:
            adapter["data"] = str(folder / f"{adapter['data']}.mindrecord")
    if name == "loaded":
        nodes["pet_config"]["adapter_path"] = str(folder / nodes["pet_config"]["adapter_path"])
    callbacks = [
        {"type": "RecordLosses", "directory": str(output / "{rank}" / name)},
        {"type": "RunReport", "directory": str(output / name)},
        {"type": "LoraCheckpoint", "directory": str(output / name)},
        {"type": "EmptySteps"},
    ]
    if name == "guarded":
        # The second process alone, where there are two.
        spoiled = {"type": "SpoilStep", "steps": [1], "rank": 1 if output.name == "two" else None}
        callbacks += [{"type": "TrainingGuard"}, {**spoiled, "path": str(output / "changed_{rank}.json")}]
    if name in ("labels", "words", "adapters"):
        held_out = str(folder / ("words" if name == "words" else "held_out")) + ".mindrecord"
        callbacks.append({"type": "HeldOutLoss", "dataset_dir": held_out, "batch_size": 2})
    nodes.setdefault("checkpoint", {"load_path": str(folder / "base"), "no_load_optim": True, "enable_save": False})
    config = {**pynative_runs.tiny_config("qwen3", folder / f"{data}.mindrecord", STEPS, callbacks=callbacks), **nodes}
    config["train_dataset"]["dataloader"]["shuffle"] = False
    if data == "pairs":
        config["train_dataset"]["dataloader"]["column_names"] = ["input_ids", "labels", "answers", "pairs"]
    config["training"]["local_batch_size"] = ROWS // parts
    return config


def in_two(config):
    """Returns the YAML of the same run in two processes."""
    config["training"]["local_batch_size"] //= 2
    return {**config, "parallelism": {"data_parallel_shard": 1}}


@pytest.fixture(scope="module")
def one(folder):
    """The folder of the runs of one process."""
    output = folder / "one"
    configs = [configuration(folder, output, name, *run) for name, run in COMPARED.items()]
    assert pynative_runs.series(configs, folder) == [None] * len(configs)
    return output


def further(folder, output):
    """Returns the YAMLs of runs of two processes that one does not train: name -> YAML."""
    saving = {"enable_save": True, "save_path": str(output / "saved"), "save_interleaved_steps": 1, "save_max": STEPS}
    after_a_step = {"enable_save": False, "load_path": str(output / "saved" / "iteration_00000001")}
    runs = {
        "stopped": {},
        "saved": {"checkpoint": {**saving, "load_path": str(folder / "base"), "no_load_optim": True}},
        "resumed": {"checkpoint": after_a_step},
    }
    configs = {name: in_two(configuration(folder, output, name, "rows", nodes)) for name, nodes in runs.items()}
    stopping = [{"type": "GracefulStop"}, {"type": "SendSignal", "step": 1, "rank": 1}]
    configs["stopped"]["callbacks"] += stopping
    data, nodes = COMPARED["adapters"]
    several = str(output / "several")
    checkpoints = {
        "adapters_stopped": {**configs["saved"]["checkpoint"], "save_path": several},
        "adapters_resumed": {"enable_save": False, "load_path": f"{several}/iteration_00000001"},
    }
    for name, checkpoint in checkpoints.items():
        configs[name] = in_two(configuration(folder, output, name, data, {**nodes, "checkpoint": checkpoint}))
    configs["adapters_stopped"]["callbacks"] += stopping
    return configs


@pytest.fixture(scope="module")
def two(folder, one):
    """(the folder of the runs of two processes, what refused each run on each rank, their logs)"""
    output = folder / "two"
    runs = {name: in_two(configuration(folder, output, name, *run)) for name, run in COMPARED.items()}
    runs |= further(folder, output)
    given, found = folder / "given.json", folder / "found_{rank}.json"
    given.write_text(json.dumps(list(runs.values())), encoding="utf-8")
    logs = run_ranks(2, folder, pynative_series.__file__, given, found, trainer="pynative")
    messages = [json.loads((folder / f"found_{rank}.json").read_text("utf-8")) for rank in range(2)]
    return output, [dict(zip(runs, each)) for each in messages], logs


@pytest.mark.parametrize("name", [pytest.param(name, marks=list(map(shown, SHOWN.get(name, ())))) for name in COMPARED])
def test_two_processes_learn_what_one_does(one, two, name):
    assert two[1][0][name] is two[1][1][name] is None
    expected, *ranks = (
        (pynative_runs.losses(run), pynative_runs.trained(run))
        for run in (one / "0" / name, two[0] / "0" / name, two[0] / "1" / name)
    )
    for losses, trained in ranks:
        np.testing.assert_allclose(losses, expected[0], rtol=2e-6)
        for parameter, array in expected[1].items():
            np.testing.assert_allclose(trained[parameter], array, atol=1e-4, err_msg=parameter)
            assert np.array_equal(trained[parameter], ranks[0][1][parameter])


def records(folder, key):
    """Returns what a run's metrics.jsonl holds under a key, in order."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


@pytest.mark.parametrize("name", [*REPORTS, *(f"adapters/{adapter['name']}" for adapter in ADAPTERS)])
def test_the_report_is_that_of_all_ranks(one, two, name):
    for key in ("loss", "tokens", "held_out_loss", "reward_margin", "skipped"):
        expected, found = (list(map(float, records(run / name, key))) for run in (one, two[0]))
        assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert records(two[0] / name, "tokens")


def test_rank_0_alone_writes_the_adapter_and_the_report(two):
    written = [("Adapter of step" in log, "The run is in" in log) for log in two[2]]
    assert written == [(True, True), (False, False)]


def test_a_step_that_is_bad_on_one_rank_is_skipped_on_all(two):
    assert json.loads((two[0] / "changed_1.json").read_text("utf-8")) == [False]
    assert records(two[0] / "guarded", "skipped") == [True, False]


@pytest.mark.parametrize("name", ["stopped", "adapters_stopped"])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(two, name):
    for rank, messages in enumerate(two[1]):
        assert "SIGTERM stopped the run after step 1 of 2" in messages[name]
        assert len(pynative_runs.losses(two[0] / str(rank) / name)) == 1


@shown("resume")
def test_a_resumed_run_is_the_rest_of_the_whole_one(two):
    for rank, messages in enumerate(two[1]):
        assert messages["saved"] is messages["resumed"] is None
        whole, resumed = (two[0] / str(rank) / name for name in ("saved", "resumed"))
        assert pynative_runs.losses(resumed) == pynative_runs.losses(whole)[1:]
        expected, trained = map(pynative_runs.trained, (whole, resumed))
        assert all(np.array_equal(trained[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", [adapter["name"] for adapter in ADAPTERS])
def test_each_of_several_adapters_is_saved_as_one_process_saves_it(one, two, name):
    expected, found = (
        adapter_files.read(str(run / "adapters" / name / "lora_checkpoint" / f"step_{STEPS}")) for run in (one, two[0])
    )
    assert found.fingerprint == expected.fingerprint is not None
    for key, array in expected.tensors.items():
        np.testing.assert_allclose(found.tensors[key], array, atol=1e-4, err_msg=str(key))


def test_several_adapters_go_on_as_if_they_had_not_stopped(two):
    for rank, messages in enumerate(two[1]):
        assert messages["adapters_resumed"] is None
        whole, resumed = (two[0] / str(rank) / name for name in ("adapters", "adapters_resumed"))
        assert pynative_runs.losses(resumed) == pynative_runs.losses(whole)[1:]
        expected, trained = map(pynative_runs.trained, (whole, resumed))
        assert all(np.array_equal(trained[name], expected[name]) for name in expected)


def test_the_logits_of_all_tokens_are_made_where_the_head_trains(two):
    whole = "Head and loss: the logits of all tokens are made at once, as the output head trains in 2 processes."
    for log in two[2]:
        assert log.count(whole) == 1
        assert log.count("Head and loss: some tokens at a time") >= len(COMPARED) - 3


def test_mindlora_run_adds_its_callbacks_in_each_process(folder, tmp_path):
    config = in_two(configuration(folder, tmp_path, "launched", "rows", {}))
    config["callbacks"] = []
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    words = ("--config", tmp_path / "run.yaml", "--mode", "1", "--training.steps", "1")
    run_ranks(2, tmp_path, pynative_mindlora_run.__file__, *words, trainer="pynative")
    assert records(tmp_path / "output", "tokens")
