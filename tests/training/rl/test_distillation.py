"""Learning from a teacher's log-probabilities: by finite differences, and a run that comes nearer to its teacher."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.data import tokenizers
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from mindlora.training.report.history import read_history
from mindlora.training.rl.policy_loss import distillation, policy_loss
from mindlora.training.rl.settings import rl_settings
from tests.support import tiny_runs
from tests.support.finite_differences import finite_differences
from tests.support.mcore_networks import tiny_config
from tests.support.what_runs import shows

MASK = np.arange(5) < np.array([5, 2, 1, 4])[:, None]
# The student adapts what the teacher does.
PET = {"lora_rank": 8, "lora_alpha": 16, "target_modules": ".*linear_fc2", "lora_dropout": 0.0}
# A run with gkd reads no max_disagreement.
OF_GKD = {"num_generations": 8, "max_disagreement": None}
SIZES = {"vocab_size": 300, "seq_length": 24, "eos_token_id": 1, "pad_token_id": 2, "bos_token_id": 0}


def settings(**keys):
    return rl_settings({"prompts": "prompts.jsonl", "teacher": "base", "max_completion_length": 8, **keys})


@pytest.mark.parametrize("keys", [{}, {"loss_type": "grpo", "epsilon": 0.1}, {"loss_type": "dr_grpo", "beta": 0.3}])
def test_coefficients_are_the_gradient_where_each_token_has_an_advantage(keys):
    rng = np.random.default_rng(0)
    log_probs = -rng.uniform(0.1, 3, MASK.shape)
    old, reference, teacher = (log_probs + 0.4 * rng.normal(size=MASK.shape) for _ in range(3))
    chosen = settings(teacher_coef=0.7, **keys)
    values = rng.normal(size=(len(MASK), 1)) + distillation(old, teacher, MASK, chosen).values

    def loss():
        return policy_loss(log_probs, old, reference, values, MASK, chosen).loss

    found = policy_loss(log_probs, old, reference, values, MASK, chosen).coefficients
    np.testing.assert_allclose(found, finite_differences(loss, log_probs), rtol=1e-6, atol=1e-9)
    values[~MASK] = np.nan
    np.testing.assert_array_equal(policy_loss(log_probs, old, reference, values, MASK, chosen).coefficients, found)


def test_on_average_the_gradient_is_that_of_the_reverse_divergence():
    """Over all tokens that a policy may draw, each as often as it does: E[c grad log p] is the gradient of the KL."""
    rng = np.random.default_rng(1)
    logits, teacher = rng.normal(size=(1, 6)), np.log(rng.dirichlet(np.ones(6)))
    chosen = settings(teacher_coef=0.5)

    def log_softmax():
        return logits[0] - np.log(np.exp(logits[0]).sum())

    def divergence():
        likely = log_softmax()
        return 0.5 * (np.exp(likely) * (likely - teacher)).sum()

    likely, every = log_softmax(), np.ones((6, 1), bool)
    shares = np.exp(likely)
    values = distillation(likely[:, None], teacher[:, None], every, chosen)
    assert values.kl == pytest.approx((likely - teacher).mean())
    coefficients = 6 * policy_loss(likely[:, None], None, None, values.values, every, chosen).coefficients[:, 0]
    # The gradient of log p_v by logits is that of v alone less p.
    gradient = (shares * coefficients) @ (np.eye(6) - shares)
    np.testing.assert_allclose(gradient, finite_differences(divergence, logits)[0], rtol=1e-6, atol=1e-9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokenizer, prompts, and an adapter as PEFT has it, by which the tiny Qwen3 answers otherwise than without."""
    folder = tmp_path_factory.mktemp("distillation")
    texts = ["the cat sees the tree", "she sees three bees", "a dog and a boat on a hill"] * 5
    tokenizers.fit_tokenizer(texts, SIZES["vocab_size"]).save_pretrained(folder / "model")
    rows = [{"prompt": text, "completion": " and the tree"} for text in ("the cat", "she sees", "a dog", "three bees")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rows = [{"prompt": text} for text in ("the tree", "a boat", "the cat sees", "on a hill", "she", "a")]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rng, made, cell = np.random.default_rng(0), Adapter({}), "model.layers.0.feed_forward.w2"
    made.tensors[cell, "A"] = rng.normal(0, 40**-0.5, (4, 40)).astype(np.float32)
    made.tensors[cell, "B"] = rng.normal(0, 0.3, (32, 4)).astype(np.float32)
    made.alphas[cell] = 8.0
    files.write(made, str(folder / "teacher"))
    return folder


def start(folder, name, resume=False, epochs=8, pet=(), **rl):
    """Runs a step for each epoch; returns the output folder."""
    callbacks = [{"type": "LoraCheckpoint", "save_steps": 4, "resume": resume}]
    config = tiny_config("", epochs, callbacks, {**PET, **dict(pet)})
    # Large weights, so that the hidden states say something of the answers.
    config["model"]["model_config"].update(SIZES, initializer_range=0.3)
    config["runner_config"]["batch_size"] = 32
    config["lr_schedule"].update(learning_rate=3e-2, type="ConstantWarmUpLR", warmup_ratio=0.0)
    config["lr_schedule"].pop("lr_end", None)
    for node in ("train_dataset", "train_dataset_task"):
        del config[node]
    keys = {
        "prompts": "prompts.jsonl",
        "prompts_per_step": 4,
        "num_generations": 32,
        "max_completion_length": 12,
        "tokenizer": "model",
        "teacher": "teacher",
        "held_out_prompts": "held_out.jsonl",
        "held_out_steps": 4,
        "max_disagreement": 1e-4,
        **rl,
    }
    config["runner_wrapper"]["rl"] = {key: value for key, value in keys.items() if value is not None}
    result = tiny_runs.launch(config, folder / name)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return folder / name


@pytest.fixture(scope="module")
def taught(library, folder):
    """A run that learns from an adapter."""
    return start(folder, "taught")


@shows("rl", "qwen3")
def test_a_student_comes_nearer_to_its_teacher(taught):
    history = read_history(str(taught))
    steps, found = history.series("teacher/kl")
    assert steps.tolist() == list(range(1, 9))
    assert found[0] > 0.3 and found[-2:].mean() < 0.6 * found[:2].mean()
    assert not len(history.series("reward")[0])


def test_the_adapter_that_is_nearest_to_the_teacher_on_held_out_prompts_is_kept(taught):
    steps, held_out = read_history(str(taught)).series("held_out_teacher/kl")
    assert steps.tolist() == [4, 8] and (held_out > 0).all()
    best = json.loads((taught / "lora_checkpoint" / "best" / "best.json").read_text(encoding="utf-8"))
    assert best["step"] == steps[held_out.argmin()]


def test_a_resumed_run_learns_the_same_from_its_teacher(folder, taught):
    output = start(folder, "resumed", str(taught / "lora_checkpoint" / "step_4"))
    tiny_runs.assert_same_state(*(run / "lora_checkpoint" / "step_8" for run in (taught, output)))


@pytest.fixture(scope="module")
def generalized(library, folder):
    """A run that learns the whole distribution of an adapter, half of it on the completions of the data."""
    return start(folder, "generalized", pet={"seed": 2}, gkd={}, **OF_GKD)


@shows("rl", "qwen3")
def test_the_distribution_comes_nearer_to_the_teachers(generalized):
    history = read_history(str(generalized))
    steps, found = history.series("teacher/divergence")
    assert steps.tolist() == list(range(1, 9))
    assert found[0] > 0.02 and found[-2:].mean() < 0.5 * found[:2].mean()
    np.testing.assert_allclose(found, history.series("loss")[1], rtol=1e-6)
    steps, held_out = history.series("held_out_teacher/divergence")
    assert steps.tolist() == [4, 8] and held_out[1] < held_out[0]
    best = json.loads((generalized / "lora_checkpoint" / "best" / "best.json").read_text(encoding="utf-8"))
    assert best["step"] == 8
    answers = [answer["answer"].strip() for step in history.answers for answer in step["answers"]]
    assert set(answers) != {"and the tree"}


def test_a_resumed_run_learns_the_same_distribution(folder, generalized):
    step = str(generalized / "lora_checkpoint" / "step_4")
    output = start(folder, "generalized_resumed", step, gkd={}, **OF_GKD)
    tiny_runs.assert_same_state(*(run / "lora_checkpoint" / "step_8" for run in (generalized, output)))


@shows("several", "qwen3")
def test_beside_another_adapter_it_learns_the_same_distribution(folder, generalized):
    """The other one has another divergence, rank and rate, and answers of its teacher."""
    gkd = {"beta": 1, "lmbda": 0.6, "seq_kd": True}
    first = {"seed": 1, "lora_rank": 3, "learning_rate": 1e-2, "rl": {"seed": 1, "num_generations": 4, "gkd": gkd}}
    adapters = [{"name": "first", **first}, {"name": "second", "seed": 2}]
    output = start(folder, "several", epochs=4, pet={"adapters": adapters}, gkd={}, **OF_GKD)
    histories = [read_history(str(run)) for run in (output / "second", generalized)]
    for series, count in {"loss": 4, "held_out_teacher/divergence": 1}.items():
        (_, found), (_, expected) = (history.series(series) for history in histories)
        assert len(found) == count and found.all(), series
        np.testing.assert_allclose(found, expected[:count], rtol=0, atol=1e-6, err_msg=series)
    found, expected = (
        load_file(run / "lora_checkpoint" / "step_4" / "adapter_model.safetensors")
        for run in (output / "second", generalized)
    )
    assert found.keys() == expected.keys() and found
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-5, err_msg=key)


def test_the_teacher_answers_with_seq_kd(folder):
    # With the graphs of the runs before.
    output = start(folder, "answered", epochs=1, gkd={"lmbda": 0, "seq_kd": True}, **OF_GKD)
    history = read_history(str(output))
    assert len(history.series("teacher/divergence")[0]) == 1 and not len(history.series("completions/mean_length")[0])
    assert "and the tree" not in {answer["answer"].strip() for step in history.answers for answer in step["answers"]}
