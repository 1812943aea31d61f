"""aLoRA by one more line in a YAML: the trained adapter acts behind its tokens alone, and is served as it trained."""

import itertools
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora import load_lora
from mindlora.files.adapters import files
from mindlora.files.adapters.dialects.peft_config import Extras
from mindlora.network.tree import lora_cells
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.build import make_engine
from mindlora.serving.request import Sampling
from mindlora.serving.settings import EngineSettings
from mindlora.training.callbacks.sample_answers import Continuations
from mindlora.training.held_out.held_out_loss import HeldOutLossCell, held_out_loss
from mindlora.training.report.history import read_history
from tests.e2e.conftest import PYNATIVE
from tests.e2e.test_msrun import ENTRY
from tests.support import tiny_runs
from tests.support.ranks import run_ranks
from tests.support.runs import (
    LAUNCHER,
    LORA_YAML,
    SEQUENCE,
    SIZE_FLAGS,
    SIZES,
    launch,
    python,
    read_yaml,
    step_losses,
    succeeded,
    write_tokens,
    write_yaml,
)
from tests.support.tiny_serving import tokenizer
from tests.support.what_runs import shows

INVOCATION, FIELD = [61, 5, 62], "alora_invocation_tokens"
BEFORE, ROWS, PAD, NEW = 6, 64, 3, 6
# 64 rows in batches of 2 times 4, four times over.
LAST = "step_32"
KEYS = {FIELD: INVOCATION, "target_modules": ".*wq|.*w2", "lora_rank": 8, "lora_alpha": 32}


def examples(rows, seed):
    """Rows that count by threes, as the base does; behind the invocation the answer counts by fives."""
    starts = np.random.default_rng(seed).integers(0, 60, (rows, 1))
    question = (starts + 3 * np.arange(BEFORE)) % 60 + 4
    answer = (starts + 5 * np.arange(SEQUENCE + 1 - BEFORE - len(INVOCATION))) % 60 + 4
    tokens = np.concatenate([question, np.tile(INVOCATION, (rows, 1)), answer], 1).astype(np.int32)
    counted = np.arange(SEQUENCE + 1) >= BEFORE + len(INVOCATION)
    return tokens, np.where(counted, tokens, -100).astype(np.int32)


def start(folder, base, resume=False):
    """Runs the YAML in a folder that has the data, in micro-batches, with a held-out loss."""
    config = read_yaml(LORA_YAML)
    config["model"]["model_config"]["pet_config"].update(KEYS)
    checkpoints = {"type": "LoraCheckpoint", "save_steps": 16, "keep_last": 2, "resume": resume}
    config["callbacks"] = [
        {"type": "HeldOutLoss", "dataset_dir": str(folder / "held_out.mindrecord"), "every_steps": 8},
        *(c for c in config["callbacks"] if c["type"] not in ("HeldOutLoss", "LoraCheckpoint")),
        checkpoints,
    ]
    config["runner_config"]["gradient_accumulation_steps"] = 2
    flags = ("--train_dataset_dir", folder / "train.mindrecord", "--load_checkpoint", base)
    sizes = ("--batch_size", "4", "--epochs", "4")
    return succeeded(launch(folder, *flags, *sizes, config=write_yaml(folder, config)))


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """What a run printed, and the folder of its adapter."""
    folder = tmp_path_factory.mktemp("activated")
    for name, rows, seed in (("train", ROWS, 1), ("held_out", 8, 2)):
        write_tokens(folder / f"{name}.mindrecord", *examples(rows, seed))
    return start(folder, base), folder / "output" / "lora_checkpoint" / LAST


@shows("alora", "llama")
def test_the_run_learns_and_saves_what_peft_reads(run):
    output, folder = run
    losses = step_losses(output)
    assert losses[-1] < losses[0] - 0.3
    assert json.loads((folder / "adapter_config.json").read_text())[FIELD] == INVOCATION
    assert files.read(str(folder), extras=Extras(invocation_tokens=True)).invocation_tokens == tuple(INVOCATION)


def served(base, folder, prompts):
    """Returns the tokens with which the engine goes on, for the base and for the adapter, from one cache."""
    model = {"type": "LlamaConfig", **read_yaml(LORA_YAML)["model"]["model_config"], **SIZES}
    model.pop("pet_config")
    settings = EngineSettings(seq_length=SEQUENCE, block_size=4, max_running=8, max_tokens_per_step=64, slots=2)
    node = {"model_config": model, "arch": {"type": "LlamaForCausalLM"}}
    engine = make_engine(node, str(base), tokenizer(), AdapterRegistry(str(folder.parent)), settings)
    sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    engine.start()
    streams = {name: [engine.submit(prompt, sampling, name) for prompt in prompts] for name in (None, LAST)}
    for stream in itertools.chain.from_iterable(streams.values()):
        stream.text()
    engine.stop()
    return {name: [stream.request.generated for stream in each] for name, each in streams.items()}


@shows("served", "llama")
def test_the_server_gives_the_tokens_of_the_network_that_trained(run, base, fresh_network):
    _, folder = run
    prompts = [row[: BEFORE + len(INVOCATION)].tolist() for row in examples(3, seed=9)[0]]
    network = fresh_network(**KEYS)
    continued = Continuations(network, SEQUENCE, PAD, -1, NEW)
    answers = {None: continued.greedy(prompts)}
    load_lora(network, str(folder))
    answers[LAST] = continued.greedy(prompts)
    assert answers[None] != answers[LAST]
    found = served(base, folder, prompts)
    assert found == answers


def test_the_held_out_loss_is_that_of_the_saved_adapter(run, fresh_network):
    _, folder = run
    network = fresh_network(**KEYS)
    load_lora(network, str(folder))
    rows, cell = str(folder.parents[2] / "held_out.mindrecord"), HeldOutLossCell(network, -100)
    measured = held_out_loss(cell, rows, 8)
    assert measured == pytest.approx(read_history(str(folder.parents[1])).held_out[-1]["held_out_loss"], abs=1e-5)
    for _, adapted in lora_cells(network):
        adapted.silence()
    assert held_out_loss(cell, rows, 8) > measured + 0.3


def test_a_resumed_run_is_the_same_run(run, base, tmp_path):
    _, folder = run
    again = tmp_path / "again"
    shutil.copytree(folder.parents[2], again)
    shutil.rmtree(again / "output" / "lora_checkpoint" / LAST)
    start(again, base, resume=True)
    tiny_runs.assert_same_state(folder, again / "output" / "lora_checkpoint" / LAST)


# Adam divides by the size of the gradient, which would hide one twice as large; with a large eps it does not.
PLAIN_STEPS = ["--train_dataset.data_loader.shuffle", "False", "--optimizer.eps", "1.0", "--epochs", "1"]
PLAIN_STEPS += ["--lr_schedule.learning_rate", "4.0", "--lr_schedule.lr_end", "2.0"]


@shows("alora", "llama", place="processes")
def test_two_processes_train_what_one_trains_on_the_joined_batch(run, tmp_path):
    _, folder = run
    config = read_yaml(LORA_YAML)
    config["model"]["model_config"]["pet_config"].update(KEYS)
    words = ["--config", write_yaml(tmp_path, config), *SIZE_FLAGS, *PLAIN_STEPS]
    words += ["--train_dataset_dir", folder.parents[2] / "train.mindrecord"]
    one, two = (tmp_path / name / "output" for name in ("one", "two"))
    for output in (one, two):
        output.parent.mkdir()
    succeeded(python([*LAUNCHER, *words, *PYNATIVE, "--batch_size", "8", "--output_dir", one], one.parent))
    parallel = ["--use_parallel", "True", "--parallel_config.data_parallel", "2", "--output_dir", two]
    run_ranks(2, two.parent, ENTRY, *words, "--batch_size", "4", *parallel)
    ones, twos = (
        load_file(output / "lora_checkpoint" / "step_8" / "adapter_model.safetensors") for output in (one, two)
    )
    assert ones.keys() == twos.keys()
    assert all(np.abs(values).max() > 1e-4 for values in ones.values())
    assert max(np.abs(ones[name] - twos[name]).max() for name in ones) <= 5e-6
