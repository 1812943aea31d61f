"""Tiny training runs through mindlora-run, for the tests of the plug-in."""

import copy
import os

import numpy as np
import yaml
from safetensors.numpy import load_file

from tests.conftest import ROOT
from tests.support import forked

LORA_YAML = os.path.join(ROOT, "configs", "tiny", "lora_llama_tiny_cpu.yaml")
SEQUENCE, VOCABULARY, PAD, IGNORED = 16, 64, 3, -100
BATCH_SIZE = 4

# A Llama small enough that a run is mostly imports.
MODEL = {"seq_length": SEQUENCE, "hidden_size": 32, "num_layers": 1, "vocab_size": VOCABULARY, "intermediate_size": 48}
PET = {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 12, "lora_dropout": 0.0, "target_modules": ".*wq|.*w2"}


def write_data(path, rows, seed=0):
    """Writes rows that count up by threes as MindRecord, with some labels ignored; returns (input_ids, labels)."""
    from mindspore.mindrecord import FileWriter

    rng = np.random.default_rng(seed)
    starts = rng.integers(0, VOCABULARY - 4, (rows, 1))
    input_ids = ((starts + 3 * np.arange(SEQUENCE + 1)) % (VOCABULARY - 4) + 4).astype(np.int32)
    labels = np.where(rng.random(input_ids.shape) < 0.3, IGNORED, input_ids).astype(np.int32)
    writer = FileWriter(str(path), 1, overwrite=True)
    writer.set_page_size(1 << 15)
    column = {"type": "int32", "shape": [SEQUENCE + 1]}
    writer.add_schema({"input_ids": column, "labels": column}, "tiny")
    writer.write_raw_data([{"input_ids": ids, "labels": row} for ids, row in zip(input_ids, labels)])
    writer.commit()
    return input_ids, labels


def tiny_config(data, epochs, callbacks, **changes):
    """Returns the tiny LoRA YAML in still smaller shapes, with ``callbacks`` after a loss monitor.

    Args:
        data (str): MindRecord to train on, in batches of BATCH_SIZE.
        epochs (int): Epochs.
        callbacks (list of dict): The rest of the callbacks.
        **changes: Replaced top-level nodes.
    """
    with open(LORA_YAML, encoding="utf-8") as file:
        config = yaml.safe_load(file)
    config["model"]["model_config"].update(MODEL, pet_config=dict(PET))
    config["runner_config"].update(epochs=epochs, batch_size=BATCH_SIZE)
    config["train_dataset"]["data_loader"]["dataset_dir"] = str(data)
    config["callbacks"] = [{"type": "MFLossMonitor"}] + callbacks
    config.update(changes)
    return copy.deepcopy(config)


def launch(config, output, script=None, queued=False):
    """Runs a configuration through mindlora-run in a fresh process.

    Args:
        config (dict): The content of the YAML.
        output (Path): Output folder; the YAML and the working folder are beside it.
        script (str): Python to run instead of mindlora-run; the arguments are in sys.argv.
        queued (bool): Whether PyNative queues its operators (see forked.run).

    Returns:
        subprocess.CompletedProcess, its output as text.
    """
    os.makedirs(output.parent, exist_ok=True)
    path = output.parent / f"{output.name}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    program = ["-c", script] if script else ["-m", "mindlora.training.launch.launcher"]
    return python(program + ["--config", str(path), "--output_dir", str(output)], output.parent, queued)


def python(arguments, folder, queued=False):
    """Runs Python in ``folder`` with mindlora importable, and returns the completed process."""
    return forked.run(arguments, folder, {**os.environ, "PYTHONPATH": ROOT}, queued=queued)


def losses(output):
    """Returns {step: loss} exactly as the history of a run has them."""
    from mindlora.training.report.history import read_history

    return dict(zip(*(values.tolist() for values in read_history(str(output)).series("loss"))))


def state(folder):
    """Returns the arrays of a step folder: A, B, moments, step and loss scale."""
    tensors = load_file(folder / "training_state.safetensors")
    tensors.update(load_file(folder / "adapter_model.safetensors"))
    return tensors


def assert_same_state(first, second):
    """Asserts that two step folders hold the same arrays, bit for bit."""
    first, second = state(first), state(second)
    assert first.keys() == second.keys()
    differing = [
        name
        for name in first
        if first[name].tobytes() != second[name].tobytes()
        or first[name].shape != second[name].shape
        or first[name].dtype != second[name].dtype
    ]
    assert not differing
