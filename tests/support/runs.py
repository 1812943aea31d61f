"""Shared by the end-to-end tests: tiny data, real processes, and what they print and write."""

import json
import os
import pathlib
import re
import sys

import numpy as np
import yaml

from tests.support import forked

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny"
LORA_YAML, BASE_YAML = str(TINY / "lora_llama_tiny_cpu.yaml"), str(TINY / "pretrain_llama_tiny_cpu.yaml")
LAUNCHER = ("-m", "mindlora.training.launch.launcher")
ROWS, SEQUENCE, VOCABULARY = 32, 16, 64

# A Llama small enough that a run is mostly imports.
SIZES = {"seq_length": SEQUENCE, "hidden_size": 32, "num_layers": 1, "vocab_size": VOCABULARY, "intermediate_size": 48}
SIZE_FLAGS = [word for key, value in SIZES.items() for word in (f"--model.model_config.{key}", str(value))]


def write_rows(path, rows=ROWS, length=SEQUENCE + 1, step=3, seed=0, counted=1.0, shift=0):
    """Writes rows that count upwards by ``step`` from random starts as MindRecord.

    ``counted`` is the share of the labels that count in the loss: of all rows, or of each one. A label is the token
    ``shift`` places further on.
    """
    starts = np.random.default_rng(seed).integers(0, 60, rows)
    tokens = ((starts[:, None] + step * np.arange(length)) % 60 + 4).astype(np.int32)
    first_ignored = np.round(np.broadcast_to(counted, rows) * length)[:, None]
    targets = (starts[:, None] + step * (shift + np.arange(length))) % 60 + 4
    labels = np.where(np.arange(length) < first_ignored, targets, -100).astype(np.int32)
    write_tokens(path, tokens, labels)
    return tokens


def write_tokens(path, tokens, labels):
    """Writes rows of tokens and of labels, int32 [rows, length] each, as MindRecord."""
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(path), 1, overwrite=True)
    writer.set_page_size(1 << 15)
    column = {"type": "int32", "shape": [tokens.shape[1]]}
    writer.add_schema({"input_ids": column, "labels": column}, "counting")
    writer.write_raw_data([{"input_ids": ids, "labels": row} for ids, row in zip(tokens, labels)])
    writer.commit()


def environment(installed=True):
    """Returns the environment of a process: this interpreter first in PATH, mindlora importable or not."""
    values = {**os.environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}
    values.pop("PYTHONPATH", None)
    values.pop("REGISTER_PATH", None)
    return {**values, "PYTHONPATH": str(ROOT)} if installed else values


def python(arguments, folder):
    """Runs Python on ``arguments`` in ``folder``; returns the completed process, its output as text."""
    return forked.run(arguments, folder, environment())


def launch(folder, *flags, config=LORA_YAML):
    """Runs mindlora-run on a YAML with tiny sizes, its output in ``folder``/output."""
    os.makedirs(folder, exist_ok=True)
    return python([*LAUNCHER, "--config", config, *SIZE_FLAGS, "--output_dir", folder / "output", *flags], folder)


_ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from mindlora.training.launch import launcher
ended = []
for arguments in json.loads(sys.argv[1]):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        ended.append((launcher.main(arguments), stderr.getvalue()))
with open("ended.json", "w") as file:
    json.dump(ended, file)
"""


def launch_refused(folder, *launches, config=LORA_YAML):
    """Runs mindlora-run with each of several lists of flags, which it must refuse before it builds anything.

    All run in one process, because such a launch spends nearly all of its time on imports. Their outputs are in
    ``folder``/0, ``folder``/1 and so on.

    Returns:
        list of (exit code, stderr), and the stdout of the process.
    """
    start = ["--config", config, *SIZE_FLAGS, "--output_dir"]
    arguments = [[*start, folder / str(number), *flags] for number, flags in enumerate(launches)]
    stdout = succeeded(python(["-c", _ONE_AFTER_ANOTHER, json.dumps(arguments, default=str)], folder))
    return json.loads((folder / "ended.json").read_text()), stdout


def succeeded(run):
    """Asserts that a process succeeded and returns its output."""
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


def files(folder):
    """Returns the paths of all files under ``folder`` but logs."""
    found = (path.relative_to(folder) for path in pathlib.Path(folder).rglob("*") if path.is_file())
    return sorted(str(path) for path in found if path.parts[0] != "log")


def loss_of(network, tokens):
    """Returns the mean cross entropy of each token but the first, from the logits of ``network``."""
    import mindspore as ms

    network.set_train(False)
    logits = network(ms.Tensor(tokens))[0].asnumpy().reshape(*tokens.shape, -1)[:, :-1].astype(np.float64)
    log_sum = np.log(np.exp(logits).sum(-1))
    return (log_sum - np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]).mean()


def evaluated(folder, rows, base, adapter, *flags, mode=1):
    """Returns the loss that ``mindlora-run --run_mode eval`` prints of a base with an adapter."""
    given = ("--run_mode", "eval", "--batch_size", "4", "--eval_dataset_dir", rows, "--load_checkpoint", base)
    path = ("--model.model_config.pet_config.adapter_path", adapter)
    stdout = succeeded(launch(folder, *given, "--context.mode", mode, *flags, *path))
    return float(re.search(r"'PerplexityMetric': {'loss': ([\d.]+)", stdout)[1])


def step_losses(stdout):
    """Returns the loss of every step that MFLossMonitor printed."""
    return [float(loss) for loss in re.findall(r"loss:\[([\d.]+)/", stdout)]


def read_yaml(path):
    with open(path, encoding="utf-8") as file:
        return yaml.safe_load(file)


def write_yaml(folder, config):
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return str(path)
