"""Learning from rewards under MindFormers' PyNative Trainer, judged by the same runs in graph mode."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.training.report.history import read_history
from tests.support import pynative_runs, rl_runs
from tests.support.pynative_runs import BASE_FILE, QWEN3, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS, RATE, ROWS = 6, 1e-2, 6
MODEL = {**QWEN3, **rl_runs.SIZES, "ignore_token_id": -100}
# How A begins, and what is sampled.
PET, SEED = {"lora_init": "kaiming", "seed": 7}, {"seed": 5}


def yaml(folder, name, pet=PET, resume=None, callbacks=(), nodes=(), **rl):
    """Returns the content of a YAML that learns from rewards; all that it writes goes to the folder of its name."""
    output = folder / name
    loaded = {"load_path": str(folder / "base"), "no_load_optim": True}
    if resume is not None:
        loaded = {"load_path": str(folder / resume / "iteration_00000004")}
    saved = {"enable_save": True, "save_path": str(output), "save_interleaved_steps": 2}
    callbacks = [
        {"type": "AttendInFloat32"},
        *callbacks,
        {"type": "RecordLosses", "directory": str(output)},
        {"type": "RunReport", "directory": str(output)},
        {"type": "LoraCheckpoint", "directory": str(output / "lora"), "save_steps": 2, "keep_last": 9},
    ]
    config = pynative_runs.tiny_config("qwen3", "", STEPS, callbacks=callbacks)
    config["model"] = MODEL
    config["training"].update(local_batch_size=ROWS, global_batch_size=ROWS)
    config["lr_scheduler"]["learning_rate"] = RATE
    config["optimizer"].update(betas=[0.9, 0.95], eps=1e-8)
    config.update(train_dataset={"dataloader": {"type": "RlSteps"}}, pet_config=dict(pet))
    return {**config, "checkpoint": {**saved, **loaded}, "rl": {**rl_runs.RL, **SEED, **rl}, **dict(nodes)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts, rewards, tokenizer and a base."""
    folder = tmp_path_factory.mktemp("rl")
    rl_runs.write_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(QWEN3, "vocab_size", rl_runs.SIZES["vocab_size"])
        pynative_runs.write_base(folder / "base", folder / "hf")
    return folder


@pytest.fixture(scope="module")
def messages(folder):
    """Name of a run -> what refused it, or None."""
    held_out = {"held_out_prompts": None}
    runs = {
        "grpo": {},
        "resumed": {"resume": "grpo"},
        "rloo": {"algorithm": "rloo", "num_iterations": 2, "temperature": 0.9, "scale_rewards": None},
        "nf4": {"pet": {**PET, "quantize_base": "nf4"}},
        "several": {"pet": {**PET, "adapters": [{"name": "grpo"}, {"name": "rloo", "seed": 8, "rl": {"seed": 6}}]}},
        "taught": {"teacher": str(folder / "grpo" / "lora" / "step_6"), "reward_funcs": None, "beta": 0.0},
    }
    configs = [yaml(folder, name, **keys) for name, keys in runs.items()]
    for config in configs:
        config["rl"] = {key: value for key, value in config["rl"].items() if value is not None}
    return dict(zip(runs, pynative_runs.series(configs, folder)))


@pytest.fixture(scope="module")
def in_graph_mode(folder):
    """The output folder of the same run in graph mode."""
    result, output = rl_runs.start(
        folder,
        "graph",
        base=folder / "base" / BASE_FILE,
        model={"num_hidden_layers": QWEN3["num_hidden_layers"]},
        pet={**PET, "target_modules": ".*linear_(qkv|proj|fc1|fc2)"},
        rate=RATE,
        **SEED,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return output


@shows("rl", "qwen3", trainer="pynative")
def test_it_learns_what_graph_mode_learns(folder, messages, in_graph_mode):
    assert messages["grpo"] is None
    ours, theirs = (read_history(str(output)) for output in (folder / "grpo", in_graph_mode))
    for name in ("reward", "held_out_reward"):
        print(name, ours.series(name), theirs.series(name))
    for name in ("loss", "kl", "agreement/max"):
        print(name, ours.series(name)[1], theirs.series(name)[1])
    a = load_file(folder / "grpo" / "lora" / "step_6" / "adapter_model.safetensors")
    b = load_file(in_graph_mode / "lora_checkpoint" / "step_6" / "adapter_model.safetensors")
    print(sorted(a)[:3], sorted(b)[:3], a.keys() == b.keys())
    for s in (2, 4, 6):
        a = load_file(folder / "grpo" / "lora" / f"step_{s}" / "adapter_model.safetensors")
        b = load_file(in_graph_mode / "lora_checkpoint" / f"step_{s}" / "adapter_model.safetensors")
        print(s, max(np.abs(a[n] - b[n]).max() for n in a if n in b), {n: np.abs(a[n] - b[n]).max() for n in list(a)[:4]})
    assert 0
