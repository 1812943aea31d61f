"""Tiny runs of MindFormers' PyNative Trainer, each in a process of its own with the stand-ins of pynative_cpu.

The processes begin with MindFormers imported (tests.support.forked).
"""

import importlib.metadata
import json
import os

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from mindlora.core.numerics.dtypes import to_float32
from mindlora.data.mindrecord import write_mindrecord
from mindlora.files.base.convert import convert_base
from mindlora.training.report.history import read_history
from tests.conftest import ROOT
from tests.support import forked, mcore_checkpoints, tiny_runs
from tests.support.mcore_networks import TINY

# A CPU's GatherD takes no -100 in the labels, so the label that does not count is a token that no row has.
IGNORED = 0

QWEN3 = {
    **TINY,
    "model_type": "qwen3",
    "architectures": "Qwen3ForCausalLM",
    "num_hidden_layers": 2,
    "pad_token_id": tiny_runs.PAD,
    "ignore_token_id": IGNORED,
    "input_layout": "BNSD",
}

# One layer with a dense MLP, one with experts; attention is multi-head latent attention in both.
DEEPSEEK_V3 = {
    **{key: value for key, value in QWEN3.items() if key != "head_dim"},
    "model_type": "deepseek_v3",
    "architectures": "DeepseekV3ForCausalLM",
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "rope_scaling": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 20,
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_router_load_balancing_type": "none",
    "num_nextn_predict_layers": 0,
}

BRIDGE = os.path.join(ROOT, "mindlora", "training", "launch", "register_path")
BASE_FILE = "checkpoint-model-0000000-0000001.safetensors"
MODELS = {"qwen3": QWEN3, "deepseek_v3": DEEPSEEK_V3}

# All linear cells of a layer: for fewer of them, MindFormers 2.0 adapts siblings too that its regex does not match.
LORA = {"target_modules": "self_attention.linear|mlp.*linear", "lora_rank": 4, "lora_alpha": 8}
LORA_WITH_EXPERTS = {**LORA, "target_modules": r"self_attention.linear|mlp.*linear|mlp\.experts"}


def trainer_version():
    """Returns the first two numbers of the installed MindFormers' version."""
    return tuple(map(int, importlib.metadata.version("mindformers").split(".")[:2]))


def has_pynative_trainer():
    """Whether the MindFormers that is installed has the Trainer: from 2.0 on."""
    return trainer_version() >= (2, 0)


only_with_pynative_trainer = pytest.mark.skipif(
    not has_pynative_trainer(), reason="MindFormers has no PyNative Trainer before 2.0."
)


def counting_rows(count, seed=0):
    """Returns rows of a token more than the model takes that count up by threes, and labels, some of them ignored."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, tiny_runs.VOCABULARY - 4, (count, 1))
    tokens = ((starts + 3 * np.arange(tiny_runs.SEQUENCE + 1)) % (tiny_runs.VOCABULARY - 4) + 4).astype(np.int32)
    return tokens, np.where(rng.random(tokens.shape) < 0.3, IGNORED, tokens).astype(np.int32)


def write_data(path, rows=24, seed=0, labeled=None):
    """Writes counting_rows as MindRecord, with labels that are shifted.

    After the first ``labeled`` rows, if that is a number, no label counts.
    """
    tokens, labels = counting_rows(rows, seed)
    labels[rows if labeled is None else labeled :] = IGNORED
    pairs = zip(tokens[:, :-1], labels[:, 1:])
    write_mindrecord(({"input_ids": ids, "labels": row} for ids, row in pairs), str(path), overwrite=True)


def write_samples(path, samples):
    """Writes texts as rows for the Trainer: each token but the last predicts the next one."""
    rows = []
    for sample in samples:
        row = {
            "input_ids": np.full(tiny_runs.SEQUENCE, tiny_runs.PAD, np.int32),
            "labels": np.full(tiny_runs.SEQUENCE, IGNORED, np.int32),
        }
        row["input_ids"][: len(sample)] = sample
        row["labels"][: len(sample) - 1] = sample[1:]
        rows.append(row)
    write_mindrecord(iter(rows), str(path))


def write_base(folder, source):
    """Writes a base for the Qwen3 above: as Hugging Face has it into ``source``, for the Trainer into ``folder``."""
    with pytest.MonkeyPatch.context() as patch:
        for name, key in (("HIDDEN", "hidden_size"), ("INNER", "intermediate_size"), ("VOCAB", "vocab_size")):
            patch.setattr(mcore_checkpoints, name, QWEN3[key])
        tensors = mcore_checkpoints.qwen3(QWEN3["num_hidden_layers"])
    tensors = {name: 0.2 * to_float32(array) + ("norm" in name) for name, array in tensors.items()}
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3", **mcore_checkpoints.CONFIG}), "utf-8")
    folder.mkdir()
    # MindFormers takes model.safetensors for Hugging Face's names.
    convert_base(str(source), str(folder / BASE_FILE), None, "mcore")
    common = {"epoch_num": 0, "step_num": 0, "global_step": 0, "loss_scale": 1.0, "global_batch_size": 4}
    (folder / "common.json").write_text(json.dumps(common), encoding="utf-8")


def tiny_config(model, data, steps, **changes):
    """Returns the content of a YAML that trains MindFormers' LoRA on a small model, and saves nothing.

    Args:
        model (str): A key of MODELS.
        data (Path): MindRecord, as write_data writes it.
        steps (int): Steps of four rows.
        **changes: Replaced top-level nodes.
    """
    loader = {"type": "MindDataset", "dataset_files": str(data), "column_names": ["input_ids", "labels"]}
    config = {
        "checkpoint": {"enable_save": False},
        "training": {"steps": steps, "local_batch_size": 4, "global_batch_size": 4, "seed": 1},
        "optimizer": {"type": "AdamW", "weight_decay": 0.0},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 0.01, "warmup_steps": 0},
        "train_dataset": {"dataloader": loader, "num_parallel_workers": 1},
        "model": MODELS[model],
        "context": {"device_target": "CPU"},
        "lora_config": LORA,
    }
    config.update(changes)
    return config


def bridged(model, data, steps, **changes):
    """Returns tiny_config's content with the line that loads mindlora, for a run with ``--register_path BRIDGE``."""
    config = tiny_config(model, data, steps, **changes)
    return {**config, "model": {**config["model"], "auto_register": "pynative_bridge.Adapters"}}


def launch(config, output, *flags, module="tests.support.pynative_launcher"):
    """Runs a configuration in a fresh process; returns the completed process, its output as text.

    Args:
        config (dict): The content of the YAML, to which a callback is added that ``losses`` and ``trained`` read.
        output (Path): Folder of what is recorded; the YAML and the working folder are beside it.
        *flags (str): More of the command line.
        module (str): What is run.
    """
    os.makedirs(output.parent, exist_ok=True)
    path = output.parent / f"{output.name}.yaml"
    recorded = [*config.get("callbacks", []), {"type": "RecordLosses", "directory": str(output)}]
    path.write_text(yaml.safe_dump({**config, "callbacks": recorded}, sort_keys=False), encoding="utf-8")
    return python(["-m", module, "--config", path, *flags], output.parent)


def series(configs, folder):
    """Runs configurations one after the other in one fresh process; returns what refused each, None if nothing did."""
    given, found = folder / "given.json", folder / "found.json"
    given.write_text(json.dumps(configs), encoding="utf-8")
    run = python(["-m", "tests.support.pynative_series", given, found], folder)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(found.read_text(encoding="utf-8"))


def python(arguments, folder):
    """Runs Python on ``arguments`` in ``folder``; returns the completed process, its output as text."""
    return forked.run(arguments, folder, environment(), trainer="pynative")


def environment():
    """Returns the environment of a run, in which tests and mindlora can be imported."""
    return {**os.environ, "PYTHONPATH": ROOT}


def losses(output):
    """Returns the losses of a run, in order."""
    return json.loads((output / "losses.json").read_text(encoding="utf-8"))


def samples_before_and_after(output, prompts, steps):
    """Asserts that SampleAnswers has answers to the prompts before the run and after it, which differ."""
    before, after = read_history(str(output)).answers
    assert (before["step"], after["step"]) == (0, steps)
    for moment in (before, after):
        assert [pair["prompt"] for pair in moment["answers"]] == prompts
    assert before["answers"] != after["answers"]


def trained(output):
    """Returns the trainable parameters of a run at its end, by name."""
    with np.load(output / "trained.npz") as arrays:
        return dict(arrays)
