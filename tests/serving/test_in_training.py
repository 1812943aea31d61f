"""An engine over a network in training: one copy of the weights, the adapter as it is, and what is refused."""

import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.core.errors import UnsupportedCellError
from mindlora.network.tree import lora_cells
from mindlora.serving.in_training import TRAINED, TrainedEngine
from mindlora.serving.request import Sampling
from mindlora.serving.settings import EngineSettings
from mindlora.training.model.log_probabilities import row_log_probabilities
from tests.support.mcore_networks import TINY, tiny_qwen3, with_adapters
from tests.support.tiny_serving import tokenizer

VOCABULARY, LENGTH, NEW = 256, 24, 12
# Layouts of the joined weights, a tied head, and a base in 16 bits.
FORMS = {
    "as MindFormers trains by default": {},
    "parts one after another, tied": {
        "use_contiguous_weight_layout_attention": True,
        "use_interleaved_weight_layout_mlp": False,
        "tie_word_embeddings": True,
    },
}
SETTINGS = EngineSettings(LENGTH, block_size=8, max_running=4, max_tokens_per_step=32, slots=1, max_rank=4)
# One that the network sees as padding would hide other tokens from training.
SAMPLING = {"max_tokens": NEW, "logprobs": 0, "ignore_eos": True, "bad_words": ((0,),)}


def trained_network(**keys):
    made = tiny_qwen3(vocab_size=VOCABULARY, seq_length=LENGTH, **keys)
    return with_adapters(made, lora_rank=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear")


def engine_of(network, **keys):
    model_config = {**TINY, "vocab_size": VOCABULARY, "seq_length": LENGTH, "model_type": "qwen3", **keys}
    return TrainedEngine(
        network, {"model_config": {**model_config, "architectures": "Qwen3ForCausalLM"}}, tokenizer(), SETTINGS
    )


def move(network, rng, scale):
    for parameter in network.trainable_params():
        parameter.set_data(parameter + Tensor(rng.normal(0, scale, parameter.shape).astype(np.float32)))


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


@pytest.fixture(params=list(FORMS))
def trained(request, library, graph_mode):
    keys = FORMS[request.param]
    network = trained_network(**keys)
    made = engine_of(network, **keys)
    made.engine.start(scores=False)
    yield network, made
    made.engine.stop()


def test_sampler_and_trainer_agree_whatever_the_adapter_is_and_hold_one_copy(trained):
    network, made = trained
    own = {id(parameter) for parameter in network.get_parameters()}
    weights = [
        parameter for parameter in made.engine.runner.network.get_parameters() if parameter.name.endswith(".weight")
    ]
    assert len(weights) > 8 and all(id(parameter) in own for parameter in weights)
    policy = row_log_probabilities(network, "rl")
    policy.set_train(True)
    rng = np.random.default_rng(0)
    for scale in (0.0, 0.2, 0.05):
        move(network, rng, scale)
        made.publish()
        tokens, labels, found = sampled(made, TRAINED, seed=7)
        with made.engine.turns.turn():
            likely = policy(Tensor(tokens), Tensor(labels)).asnumpy().reshape(4, LENGTH)
        np.testing.assert_allclose(likely, found, rtol=0, atol=1e-4)
        # Another adapter than the last one: keys and values of before are not used again.
        assert np.abs(found).sum() > 0
    # At another temperature, the sampler's log-probabilities are the tempered ones of the logits.
    tokens, labels, found = sampled(made, TRAINED, seed=3, temperature=0.5, tempered_logprobs=True)
    assert np.abs(found - sampled(made, TRAINED, seed=3, temperature=0.5)[2]).max() > 0.1


def test_what_is_not_published_is_old(trained):
    network, made = trained
    move(network, np.random.default_rng(1), 0.3)
    made.publish()
    before = sampled(made, TRAINED, seed=1)[2]
    move(network, np.random.default_rng(2), 0.3)
    np.testing.assert_array_equal(sampled(made, TRAINED, seed=1)[2], before)
    base = sampled(made, None, seed=1)[2]
    made.publish()
    assert np.abs(sampled(made, TRAINED, seed=1)[2] - before).max() > 0.05
    np.testing.assert_array_equal(sampled(made, None, seed=1)[2], base)


def test_a_variant_that_comes_from_files_alone_is_refused(library):
    network = tiny_qwen3(vocab_size=VOCABULARY, seq_length=LENGTH)
    apply_lora(network, LoraConfig(lora_rank=4, lora_alpha=8, target_modules="all-linear", use_dora=True))
    freeze_base(network)
    assert any(cell.variant.row_norms for _, cell in lora_cells(network))
    with pytest.raises(UnsupportedCellError, match="use plain LoRA, without use_dora"):
        engine_of(network)
