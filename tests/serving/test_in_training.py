"""An engine over a network in training: one copy of the weights, the adapter as it is, and what is refused."""

import contextlib

import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, save_lora
from mindlora.core.errors import BaseMismatchError, ConfigError, UnsupportedCellError
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from mindlora.network.tensors import to_array
from mindlora.network.tree import lora_cells
from mindlora.serving.in_training import TRAINED, TrainedEngine
from mindlora.serving.request import Sampling
from mindlora.serving.settings import EngineSettings
from mindlora.training.model.log_probabilities import row_log_probabilities
from tests.support.mcore_networks import ARCHITECTURES, MAKE, SIZES, Loss, tiny_qwen3, with_adapters
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.tiny_serving import tokenizer

VOCABULARY, LENGTH, NEW = 256, 24, 12
# Layouts of the joined weights, a tied head, routed experts, and what these are held in.
FORMS = {
    "as MindFormers trains by default": {},
    "parts one after another, tied": {
        "use_contiguous_weight_layout_attention": True,
        "use_interleaved_weight_layout_mlp": False,
        "tie_word_embeddings": True,
    },
    "a tied head in 16 bits": {"tie_word_embeddings": True, "params_dtype": "bfloat16"},
    "DoRA": {"use_dora": True},
    "DoRA on a base in 16 bits": {"use_dora": True, "params_dtype": "bfloat16"},
    "DoRA on a base in NF4": {"use_dora": True, "quantize_base": "nf4"},
    "routed experts": {"model_type": "qwen3_moe"},
    "routed experts in 16 bits": {"model_type": "qwen3_moe", "norm_topk_prob": True, "params_dtype": "bfloat16"},
    "routed experts in NF4": {"model_type": "qwen3_moe", "norm_topk_prob": True, "quantize_base": "nf4"},
}
# Its policy is a graph, as in a run; the others' compute in PyNative.
COMPILED = "as MindFormers trains by default"
# What runs before a release alone: DoRA on bases in 16 and in 4 bits takes the same way.
LONG = "DoRA"
# Training does not round products, and a processor for which serving does would.
SIZES_OF_ENGINE = {"block_size": 8, "max_running": 4, "max_tokens_per_step": 32, "slots": 2, "max_rank": 9}
SETTINGS = EngineSettings(LENGTH, product_dtype="float32", **SIZES_OF_ENGINE)
# [out, in] of some cells of TINY, under the names that files of adapters have: those of q and v, but not k, are joined.
APART = {
    "attention.wq": (48, 32),
    "attention.wv": (24, 32),
    "attention.wo": (32, 48),
    "feed_forward.w1": (40, 32),
    "feed_forward.w3": (40, 32),
}
# One that the network sees as padding would hide other tokens from training.
SAMPLING = {"max_tokens": NEW, "logprobs": 0, "ignore_eos": True, "bad_words": ((0,),)}


# Keys of pet_config.
OF_ADAPTER = ("quantize_base", "use_dora")


# All linear cells, and the experts.
TARGETS = {"qwen3": "all-linear", "qwen3_moe": ".*linear_.*|.*experts.*"}


def trained_network(seed=0, targets=None, model_type="qwen3", **keys):
    targets = targets or TARGETS[model_type]
    pet = {key: keys.pop(key) for key in OF_ADAPTER if key in keys}
    made = MAKE[model_type](seed, vocab_size=VOCABULARY, seq_length=LENGTH, **keys)
    return with_adapters(made, lora_rank=4, lora_alpha=8, lora_dropout=0.0, target_modules=targets, **pet)


def engine_of(network, adapters=None, model_type="qwen3", **keys):
    keys = {key: value for key, value in keys.items() if key not in OF_ADAPTER}
    model_config = {**SIZES[model_type], "vocab_size": VOCABULARY, "seq_length": LENGTH, "model_type": model_type}
    model_config.update(keys, architectures=ARCHITECTURES[model_type])
    return TrainedEngine({TRAINED: network}, {"model_config": model_config}, tokenizer(), SETTINGS, adapters)


def move(network, rng, scale):
    for parameter in network.trainable_params():
        parameter.set_data(parameter + Tensor(rng.normal(0, scale, parameter.shape).astype(np.float32)))


def memory_of(parameter):
    """Returns the address of a parameter's values."""
    return to_array(parameter).ctypes.data


def sampled(trained, adapter, seed, **more):
    """Returns tokens and the sampler's log-probabilities of the answers to some prompts, as rows of training."""
    prompts = [[1, 5 + number, 9, 4] for number in range(4)]
    streams = [
        trained.engine.submit(prompt, Sampling(**{**SAMPLING, "seed": seed + row, **more}), adapter)
        for row, prompt in enumerate(prompts)
    ]
    tokens = np.zeros((4, LENGTH + 1), np.int32)
    labels = np.full(tokens.shape, -100, np.int32)
    found = np.zeros((4, LENGTH))
    for row, (prompt, stream) in enumerate(zip(prompts, streams)):
        answered, likely = [], []
        for piece in stream:
            answered += piece.tokens
            likely += [one.logprob for one in piece.logprobs or ()]
        tokens[row, : len(prompt) + NEW] = prompt + answered
        labels[row, len(prompt) : len(prompt) + NEW] = answered
        found[row, len(prompt) - 1 : len(prompt) - 1 + NEW] = likely
    return tokens, labels, found


@pytest.fixture(
    scope="module", params=[pytest.param(form, marks=[pytest.mark.long] if form == LONG else []) for form in FORMS]
)
def trained(request, library, module_in_graph_mode):
    keys = FORMS[request.param]
    network = trained_network(**keys)
    made = engine_of(network, **keys)
    made.engine.start(scores=False)
    yield network, made, contextlib.nullcontext if request.param == COMPILED else mcore_in_pynative
    made.engine.stop()


def test_sampler_and_trainer_agree_whatever_the_adapter_is_and_hold_one_copy(trained):
    network, made, its_mode = trained
    own = set(map(memory_of, network.get_parameters()))
    weights = [
        parameter
        for parameter in made.engine.runner.network.get_parameters()
        if parameter.name.endswith((".weight", ".weight1", ".weight2")) and parameter.ndim > 1
    ]
    assert len(weights) >= 5 and own.issuperset(map(memory_of, weights))
    policy = row_log_probabilities(network, "rl")
    policy.set_train(True)
    rng = np.random.default_rng(0)
    for scale in (0.0, 0.2, 0.05):
        move(network, rng, scale)
        made.publish()
        tokens, labels, found = sampled(made, TRAINED, seed=7)
        with made.engine.turns.turn(), its_mode():
            likely = policy(Tensor(tokens), Tensor(labels)).asnumpy().reshape(4, LENGTH)
        np.testing.assert_allclose(likely, found, rtol=0, atol=1e-4)
    assert own.issuperset(map(memory_of, weights))
    # At another temperature, the sampler's log-probabilities are the tempered ones of the logits.
    tokens, labels, found = sampled(made, TRAINED, seed=3, temperature=0.5, tempered_logprobs=True)
    assert np.abs(found - sampled(made, TRAINED, seed=3, temperature=0.5)[2]).max() > 0.1


@pytest.mark.parametrize("trained", ["as MindFormers trains by default", "routed experts"], indirect=True)
def test_what_is_not_published_is_old(trained):
    network, made, _ = trained
    move(network, np.random.default_rng(1), 0.3)
    made.publish()
    before = sampled(made, TRAINED, seed=1)[2]
    move(network, np.random.default_rng(2), 0.3)
    # The last bits of a router's product are not the same in each batch.
    np.testing.assert_allclose(sampled(made, TRAINED, seed=1)[2], before, rtol=0, atol=1e-5)
    base = sampled(made, None, seed=1)[2]
    made.publish()
    assert np.abs(sampled(made, TRAINED, seed=1)[2] - before).max() > 0.05
    np.testing.assert_allclose(sampled(made, None, seed=1)[2], base, rtol=0, atol=1e-5)


def test_a_variant_that_comes_from_files_alone_is_refused(library):
    network = tiny_qwen3(vocab_size=VOCABULARY, seq_length=LENGTH)
    apply_lora(network, LoraConfig(lora_rank=4, target_modules="all-linear", use_vera=True))
    freeze_base(network)
    assert not any(cell.variant.is_plain for _, cell in lora_cells(network))
    with pytest.raises(UnsupportedCellError, match="are neither plain LoRA nor, on a CPU, DoRA"):
        engine_of(network)


def write_apart(path):
    """Writes an adapter as PEFT does, with a pair of its own for each cell in APART; returns its path."""
    rng, made = np.random.default_rng(5), Adapter({})
    for leaf, (out, wide) in APART.items():
        cell = f"model.layers.0.{leaf}"
        made.tensors[cell, "A"] = rng.normal(0, wide**-0.5, (3, wide)).astype(np.float32)
        made.tensors[cell, "B"] = rng.normal(0, 0.3, (out, 3)).astype(np.float32)
        made.alphas[cell] = 6.0
    files.write(made, str(path))
    return str(path)


def write_on_experts(path):
    """Writes an adapter on cells of a Qwen3-MoE, experts among them; returns its path."""
    teacher = trained_network(targets=".*linear_proj|.*weight1", model_type="qwen3_moe")
    move(teacher, np.random.default_rng(5), 0.3)
    save_lora(teacher, str(path))
    return str(path)


@pytest.mark.parametrize(
    "form", [form for form, keys in FORMS.items() if not set(keys) & {*OF_ADAPTER, "params_dtype"}]
)
def test_an_adapter_of_a_file_scores_texts_as_load_lora_has_it(form, library, graph_mode, tmp_path):
    keys = dict(FORMS[form])
    model_type = keys.pop("model_type", "qwen3")
    path = (write_apart if model_type == "qwen3" else write_on_experts)(tmp_path / "teacher")
    # The teacher has adapters on cells without a student's.
    network = trained_network(targets=".*fc2|.*qkv|.*weight2", model_type=model_type, **keys)
    move(network, np.random.default_rng(0), 0.3)
    teacher = MAKE[model_type](vocab_size=VOCABULARY, seq_length=LENGTH, **keys)
    load_lora(teacher, path)
    # It gives the model a loss that is log-probabilities. Without the wrapper of training, its rows are not one longer.
    row_log_probabilities(teacher, "rl")
    policy = Loss(teacher).set_train(True)
    tokens = np.random.default_rng(1).integers(1, VOCABULARY, (4, LENGTH)).astype(np.int32)
    with mcore_in_pynative():
        expected = policy(Tensor(tokens), Tensor(np.roll(tokens, -1, 1))).asnumpy().reshape(4, LENGTH)[:, 3:-1]
    made = engine_of(network, {"teacher": path}, model_type, **keys)
    made.engine.start(scores=False)
    try:
        found = {name: scored(made, tokens, name) for name in ("teacher", TRAINED, None)}
    finally:
        made.engine.stop()
    np.testing.assert_allclose(found["teacher"], expected, rtol=0, atol=1e-4)
    assert all(np.abs(found[name] - expected).max() > 0.1 for name in (TRAINED, None))


def scored(made, rows, adapter):
    """Returns the log-probabilities of the tokens of rows, from the fifth on."""
    sampling = Sampling(max_tokens=0, prompt_logprobs=0, scored_from=4)
    streams = [made.engine.submit(row.tolist(), sampling, adapter) for row in rows]
    return np.array([[one.logprob for one in next(iter(stream)).prompt_logprobs[4:]] for stream in streams])


def test_an_adapter_of_another_base_and_a_path_with_nothing_are_refused(library, tmp_path):
    other = trained_network(seed=1)
    move(other, np.random.default_rng(0), 0.3)
    save_lora(other, str(tmp_path / "other"))
    with pytest.raises(BaseMismatchError, match="other was trained on another base: .* other values"):
        engine_of(trained_network(), {"teacher": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match="nowhere, where there is nothing. Check the path"):
        engine_of(trained_network(), {"teacher": str(tmp_path / "nowhere")})
