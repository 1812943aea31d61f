"""Learning from rewards under MindFormers' PyNative Trainer, judged by the same run in graph mode."""

import json

import numpy as np
import pytest
import yaml
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
EMPTY = {
    "reward_funcs": {"type": "length", "min_words": 1, "max_words": 3},
    "structured_outputs": None,
    "mask_truncated_completions": True,
    "max_completion_length": 1,
}
TAUGHT = {"reward_funcs": None, "structured_outputs": None, "beta": 0.0}
GENERALIZED = {**rl_runs.OF_GKD, "teacher": "grpo/lora/step_6", "gkd": {"beta": 0.3}}


def configuration(folder, name, pet=PET, steps=STEPS, resume=None, rounds=False, callbacks=(), **rl):
    """Returns the content of a YAML that learns from rewards; all that it writes goes to the folder of its name."""
    output = folder / name
    loaded = {"load_path": str(folder / "base"), "no_load_optim": True}
    if resume is not None:
        loaded = {"load_path": str(folder / resume / "iteration_00000004")}
    saved = {"enable_save": name == "grpo", "save_path": str(output), "save_interleaved_steps": 2}
    nodes = [
        *([] if rounds else [{"type": "AttendInFloat32"}]),
        *callbacks,
        {"type": "RecordLosses", "directory": str(output)},
        {"type": "RunReport", "directory": str(output)},
        {"type": "LoraCheckpoint", "directory": str(output / "lora"), "save_steps": 2, "keep_last": 9},
    ]
    config = pynative_runs.tiny_config("qwen3", "", steps, callbacks=nodes)
    config["model"] = MODEL
    config["training"].update(local_batch_size=ROWS, global_batch_size=ROWS)
    config["lr_scheduler"]["learning_rate"] = RATE
    config["optimizer"].update(betas=[0.9, 0.95], eps=1e-8)
    config.update(train_dataset={"dataloader": {"type": "RlSteps"}}, pet_config=dict(pet))
    node = {key: value for key, value in {**rl_runs.RL, **SEED, **rl}.items() if value is not None}
    return {**config, "checkpoint": {**saved, **loaded}, "rl": node}


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
    adapters = [{"name": "one"}, {"name": "two", "seed": 8, "rl": {"seed": 6, "algorithm": "rloo"}}]
    gkd = {"beta": 1, "lmbda": 0.6, "seq_kd": True}
    generalized = [{"name": "one"}, {"name": "two", "seed": 8, "rl": {"seed": 6, "gkd": gkd}}]
    guarded = [{"type": "TrainingGuard", "spike": 3.0}, {"type": "AdapterHealth", "every_steps": 1}]
    first = {
        # What MindFormers casts is cast until another run has changed that.
        "rounded": {"rounds": True, "steps": 1},
        "grpo": {},
        "resumed": {"resume": "grpo"},
        "rloo": {"steps": 4, "algorithm": "rloo", "num_iterations": 2, "temperature": 0.9, "callbacks": guarded},
        # One token is not an answer that ends.
        "empty": {"steps": 2, **EMPTY, "callbacks": [{"type": "EmptySteps"}]},
    }
    second = {
        "nf4": {"steps": 2, "pet": {**PET, "quantize_base": "nf4"}},
        "several": {"steps": 4, "pet": {**PET, "adapters": adapters}},
        "taught": {"steps": 2, **TAUGHT, "teacher": str(folder / "grpo" / "lora" / "step_6")},
        "generalized": GENERALIZED,
        "both_generalized": {**GENERALIZED, "steps": 4, "pet": {**PET, "adapters": generalized}},
        "nf4_generalized": {**GENERALIZED, "teacher": "base", "steps": 2, "pet": {**PET, "quantize_base": "nf4"}},
        "whole": {**GENERALIZED, "pet": {**PET, "loss_in_pieces": False}},
        "forgets": {"reward_funcs": "rewards.py:forgets"},
        "too_many": {"prompts_per_step": 5},
    }
    found = {}
    for runs in (first, second):
        configs = [configuration(folder, name, **keys) for name, keys in runs.items()]
        found.update(zip(runs, pynative_runs.series(configs, folder)))
    return found


def measured(folder, name):
    """Returns what a run in graph mode, or of the PyNative Trainer, has measured in each step."""
    return read_history(str(folder)).series(name)[1]


@pytest.fixture(scope="module")
def in_graph_mode(folder):
    """The output folder of the run grpo in graph mode."""
    return ran_in_graph_mode(folder, "graph")


def ran_in_graph_mode(folder, name, **rl):
    """Runs it in graph mode, and returns its output folder."""
    result, output = rl_runs.start(
        folder,
        name,
        base=folder / "base" / BASE_FILE,
        model={"num_hidden_layers": QWEN3["num_hidden_layers"]},
        pet={**PET, "target_modules": ".*linear_(qkv|proj|fc1|fc2)"},
        rate=RATE,
        **{**SEED, **rl},
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return output


@shows("rl", "qwen3", trainer="pynative")
def test_it_learns_what_graph_mode_learns(folder, messages, in_graph_mode):
    assert messages["grpo"] is None
    for name in ("reward", "held_out_reward", "completions/mean_length"):
        found, expected = (measured(output, name) for output in (folder / "grpo", in_graph_mode))
        assert len(found) == (STEPS // 2 if name == "held_out_reward" else STEPS)
        np.testing.assert_array_equal(found, expected, err_msg=name)
    for name in ("loss", "kl", "gradient_norm"):
        found, expected = (measured(output, name) for output in (folder / "grpo", in_graph_mode))
        assert len(found) == STEPS
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    kl = measured(folder / "grpo", "kl")
    assert kl[0] == 0 and kl[-1] > 0.1
    have_the_same_adapters(folder / "grpo", in_graph_mode)


def have_the_same_adapters(found, in_graph_mode):
    """Asserts that the adapters of a run of the Trainer are those of one in graph mode."""
    for step in (2, 4, 6):
        arrays = load_file(found / "lora" / f"step_{step}" / "adapter_model.safetensors")
        expected = load_file(in_graph_mode / "lora_checkpoint" / f"step_{step}" / "adapter_model.safetensors")
        assert arrays.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(arrays[name], array, atol=1e-4, err_msg=f"step {step}: {name}")


@pytest.mark.parametrize("name", ["grpo", "rloo", "nf4", "several/one", "several/two", "taught"])
def test_sampler_and_trainer_agree(folder, messages, name):
    assert messages[name.partition("/")[0]] is None
    assert 0 < measured(folder / name, "agreement/max").max() < 1e-4
    assert measured(folder / name, "agreement/k2").max() < 1e-10


def test_attention_in_16_bits_is_told(messages):
    """MindFormers casts queries, keys and values to float16, whatever the model computes in."""
    assert "Sampler and trainer differ by" in messages["rounded"]
    assert "rl.max_disagreement is 0.0001" in messages["rounded"]


def test_a_resumed_run_samples_and_learns_the_same(folder, messages):
    assert messages["resumed"] is None
    assert pynative_runs.losses(folder / "resumed") == pynative_runs.losses(folder / "grpo")[4:]
    whole, resumed = (pynative_runs.trained(folder / name) for name in ("grpo", "resumed"))
    assert whole and all(np.array_equal(resumed[name], whole[name]) for name in whole)


def test_the_adapter_with_the_largest_held_out_reward_is_kept(folder, messages):
    best = json.loads((folder / "grpo" / "lora" / "best" / "best.json").read_text(encoding="utf-8"))
    steps, rewards = read_history(str(folder / "grpo")).series("held_out_reward")
    assert best["step"] == steps[rewards.argmax()]
    assert (folder / "grpo" / "report.html").is_file()
    assert [len(shown["answers"]) for shown in read_history(str(folder / "grpo")).answers] == [2, 2]


def test_steps_on_the_same_answers_differ_in_their_losses_alone(folder, messages):
    rewards, losses = (measured(folder / "rloo", name) for name in ("reward", "loss"))
    assert rewards[0] == rewards[1] and rewards[2] == rewards[3] and losses[0] != losses[1]
    assert len(measured(folder / "rloo", "gradient_norm")) == 4


def test_an_adapter_learns_beside_another_what_it_learns_alone(folder, messages):
    alone, beside = folder / "grpo", folder / "several" / "one"
    for name, steps in {"reward": 4, "held_out_reward": 2, "loss": 4, "kl": 4}.items():
        found, expected = measured(beside, name), measured(alone, name)[:steps]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    own, other = (measured(folder / "several" / name, "reward") for name in ("one", "two"))
    assert not np.array_equal(own, other)


def test_a_step_in_which_no_token_counts_is_skipped(folder, messages):
    assert messages["empty"] is None
    trained = pynative_runs.trained(folder / "empty")
    assert [name for name, array in trained.items() if name.endswith("lora_b") and array.any()] == []


def test_a_teacher_is_learned_from(folder, messages):
    divergences = measured(folder / "taught", "teacher/kl")
    assert len(divergences) == 2 and not len(measured(folder / "taught", "reward"))


def test_the_distribution_of_a_teacher_is_learned_as_in_graph_mode(folder, messages):
    assert messages["generalized"] is None
    output = ran_in_graph_mode(folder, "graph_generalized", **GENERALIZED)
    for name, count in {"loss": STEPS, "held_out_teacher/divergence": STEPS // 2}.items():
        found, expected = (measured(each, name) for each in (folder / "generalized", output))
        assert len(found) == count and found.min() > 1e-3, name
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=name)
    have_the_same_adapters(folder / "generalized", output)


def test_an_adapter_learns_it_beside_another_too(folder, messages):
    assert messages["both_generalized"] is None
    for name, steps in {"loss": 4, "held_out_teacher/divergence": 2}.items():
        found = measured(folder / "both_generalized" / "one", name)
        np.testing.assert_allclose(found, measured(folder / "generalized", name)[:steps], atol=1e-6, err_msg=name)
    own, other = (measured(folder / "both_generalized" / name, "loss") for name in ("one", "two"))
    assert not np.array_equal(own, other)


def test_a_base_in_4_bits_is_the_teacher_of_a_new_adapter_on_it(folder, messages):
    """Both compute the same until the first update."""
    assert messages["nf4_generalized"] is None
    first, second = measured(folder / "nf4_generalized", "loss")
    assert first < 1e-6 < second


@pytest.mark.parametrize(
    "name, message",
    [
        ("whole", "pet_config.loss_in_pieces is False, and rl.gkd compares the whole vocabulary"),
        ("forgets", "forgets: it returned 1 rewards for 14 completions"),
        ("too_many", "prompts.jsonl has 4 prompts, and rl.prompts_per_step is 5"),
    ],
)
def test_what_fails_ends_the_run_with_one_error(messages, name, message):
    assert message in messages[name]


# Each answer in a row of its own, as with a setting that lets a row have no positions; mindlora rl; what is shared.
ALONE = """
import json
from tests.support import pynative_cpu, pynative_launcher
pynative_cpu.install()
pynative_launcher.register_callbacks()
from mindlora import cli
from mindlora.core.errors import ConfigError
from mindlora.network.load_base import CACHES
from mindlora.serving import in_training
from mindlora.training.rl import pynative

share = in_training.share_base

def say_what_is_shared(served, network):
    share(served, network)
    trained = {id(parameter) for parameter in network.get_parameters()}
    base = [parameter for parameter in served.get_parameters() if not parameter.name.endswith(CACHES)]
    names = {share: [p.name for p in base if (id(p) in trained) == share] for share in (True, False)}
    with open("shared.json", "w", encoding="utf-8") as file:
        json.dump([names[True], names[False]], file)

in_training.share_base = say_what_is_shared

def refuse(*arguments):
    raise ConfigError("Rows cannot hold several sequences.")

pynative.PyNativePolicyGraphs._install_positions = refuse
raise SystemExit(cli.main(["rl", "alone.yaml", "--training.steps", "2"]))
"""


def test_answers_in_one_row_are_learned_as_in_rows_of_their_own(folder, messages):
    config = configuration(folder, "alone")
    # mindlora rl fills it in.
    del config["train_dataset"]
    (folder / "alone.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run = pynative_runs.python(["-c", ALONE], folder)
    assert run.returncode == 0, run.stderr[-3000:]
    shared, others = json.loads((folder / "shared.json").read_text(encoding="utf-8"))
    # Two ends, a norm, and eight parameters of each of two layers.
    assert (len(shared), others) == (19, [])
    assert "rl: each answer takes a row of its own." in run.stdout + run.stderr
    for name in ("reward", "loss", "kl"):
        found, expected = measured(folder / "alone", name), measured(folder / "grpo", name)[:2]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)
