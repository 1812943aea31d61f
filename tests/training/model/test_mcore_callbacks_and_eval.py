"""A run of an mcore model from the adapter of mindlora eva: what it forgets, what it answers, how it is evaluated."""

import json
import re

import mindspore as ms
import numpy as np
import pytest
import yaml
from mindspore import Tensor

from mindlora import load_lora
from mindlora.data import tokenizers
from mindlora.files.adapters import files
from mindlora.training.report.history import read_history
from tests.conftest import in_mode
from tests.support import tiny_runs
from tests.support.mcore_networks import MAKE, scaled, tiny_config
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.what_runs import showing, shows

PET = {"lora_rank": 3, "lora_alpha": 6, "target_modules": "all-linear"}


def on_models(*features):
    """Returns a mark: a test shows these features on each of the models; it is long on mixtures of experts."""
    models = [pytest.param("qwen3", marks=[shows(feature, "qwen3") for feature in features])]
    return pytest.mark.parametrize("model", [*models, *showing(*features, always=())], indirect=True, scope="module")


def make_base(model, vocabulary):
    return scaled(MAKE[model](vocab_size=vocabulary, pad_token_id=tiny_runs.PAD), 0.4)


@pytest.fixture(scope="module")
def model(request):
    return request.param


@pytest.fixture(scope="module")
def run(model, mindformers, tmp_path_factory):
    """The folder of a run with a base, its data and its YAML."""
    folder = tmp_path_factory.mktemp("callbacks")
    trained = tokenizers.fit_tokenizer(["good morning, good evening, good night"] * 3, 280)
    tokenizers.save_tokenizer(trained, str(folder / "tokenizer"))
    vocabulary = len(trained)
    with in_mode(ms.GRAPH_MODE):
        ms.save_checkpoint(make_base(model, vocabulary), str(folder / "base.ckpt"))
    tiny_runs.write_data(folder / "data.mindrecord", 16)
    answers = {"prompts": ["good"], "tokenizer": str(folder / "tokenizer"), "template": "plain", "max_tokens": 3}
    callbacks = [
        {"type": "Forgetting", "every_steps": 2, "samples": 16, "max_tokens": 12},
        {"type": "ForgettingBudget", "budget": 0.2},
        {"type": "SampleAnswers", **answers},
        {"type": "LoraCheckpoint", "save_steps": 2, "keep_last": 9},
    ]
    base = str(folder / "base.ckpt")
    config = tiny_config(str(folder / "data.mindrecord"), 8, callbacks, PET, model, load_checkpoint=base)
    config["model"]["model_config"].update(vocab_size=vocabulary, bos_token_id=1, eos_token_id=2)
    config["lr_schedule"]["learning_rate"] = 3e-2
    (folder / "eva.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = ["-m", "mindlora.cli", "eva", "eva.yaml", "--output", "eva", "--rows", "14", "--json"]
    process = tiny_runs.python(command, folder)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    report = json.loads(process.stdout.splitlines()[-1])
    config["model"]["model_config"]["pet_config"].update(report["keys"])
    result = tiny_runs.launch(config, folder / "output")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return folder, config, report


@on_models("eva")
def test_it_begins_with_the_adapter_that_the_command_made(run):
    folder, _, report = run
    assert report["batches"] == 4 and len(set(report["ranks"].values())) > 1
    first, trained = files.read(str(folder / "eva")), files.read(str(folder / "output" / "lora_checkpoint" / "step_2"))
    assert sorted(first.paths) == sorted(trained.paths)
    for path in first.paths:
        assert trained.rank(path) == first.rank(path) and trained.scale(path) == first.scale(path)
        assert not first.tensors[path, "B"].any() and trained.tensors[path, "B"].any()
        # In a step, Adam moves an element by about 0.03.
        np.testing.assert_allclose(trained.tensors[path, "A"], first.tensors[path, "A"], atol=0.07)


@on_models("forgetting", "guard")
def test_a_run_ends_with_the_last_state_within_its_budget(run):
    history = read_history(str(run[0] / "output"))
    measured = [record["forgetting"] for record in history.forgetting]
    assert measured[-1] > 0.2 and all(value <= 0.2 for value in measured[:-1])
    assert [event["event"] for event in history.events] == ["budget"]


@on_models("answers")
def test_prompts_are_answered_before_and_after(run):
    before, after = read_history(str(run[0] / "output")).answers
    assert before["step"] == 0 and before["answers"][0]["prompt"] == after["answers"][0]["prompt"] == "good"


@on_models()
def test_mindformers_evaluates_the_adapter(model, run):
    folder, config, _ = run
    adapter = folder / "output" / "lora_checkpoint" / "step_2"
    config = json.loads(json.dumps(config))
    config.update(run_mode="eval", callbacks=[{"type": "MFLossMonitor"}])
    config["model"]["model_config"]["pet_config"]["adapter_path"] = str(adapter)
    config["eval_dataset"]["data_loader"]["dataset_dir"] = str(folder / "data.mindrecord")
    result = tiny_runs.launch(config, folder / "eval")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (found,) = re.findall(r"'PerplexityMetric': \{'loss': ([\d.]+)", result.stdout + result.stderr)
    ids, labels = tiny_runs.write_data(folder / "again.mindrecord", 16)
    with in_mode(ms.GRAPH_MODE):
        network = make_base(model, config["model"]["model_config"]["vocab_size"])
        load_lora(network, str(adapter))
    network.set_train(False)
    # MindFormers judges rows without the last of their tokens, each token by those before it.
    ids, labels = ids[:, :-1], labels[:, :-1]
    with mcore_in_pynative():
        logits = network(Tensor(ids)).asnumpy().reshape(*ids.shape, -1).astype(np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counted = labels[:, 1:] != tiny_runs.IGNORED
    losses = -np.take_along_axis(log_probabilities[:, :-1], ids[:, 1:, None], -1)[..., 0] * counted
    batches = [slice(first, first + tiny_runs.BATCH_SIZE) for first in range(0, len(ids), tiny_runs.BATCH_SIZE)]
    expected = np.mean([losses[batch].sum() / counted[batch].sum() for batch in batches])
    assert float(found) == pytest.approx(expected, rel=2e-6)
