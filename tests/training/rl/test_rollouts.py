"""Rollouts: a sampler that computes as the network in training does, and takes no more memory than answers need."""

import pytest

from mindlora.serving.in_training import TRAINED
from mindlora.training.rl.rollouts import Rollouts
from mindlora.training.rl.settings import rl_settings
from tests.support.mcore_networks import TINY, tiny_qwen3, with_adapters
from tests.support.tiny_serving import tokenizer

SIZES = {"vocab_size": 256, "seq_length": 64, "params_dtype": "bfloat16"}


@pytest.fixture
def made(library, graph_mode, monkeypatch):
    """Rollouts of a Qwen3 with a base in bfloat16, on a processor on which serving would round products to it."""
    monkeypatch.setattr("mindlora.serving.network.rounds_faster", lambda: True)
    network = with_adapters(tiny_qwen3(**SIZES), lora_rank=3, lora_alpha=6, target_modules="all-linear")
    model_config = {**TINY, **SIZES, "model_type": "qwen3", "architectures": "Qwen3ForCausalLM"}
    keys = {"reward_funcs": "exact_answer", "prompts_per_step": 2, "num_generations": 3, "max_completion_length": 8}
    return Rollouts({TRAINED: network}, {"model_config": model_config}, tokenizer(), [rl_settings(keys)], 20, "float32")


def test_products_are_those_of_the_trainer(made):
    assert not made.engine.runner.rounds


def test_the_cache_has_room_for_the_longest_prompt_and_answer_of_each_row(made):
    # 28 tokens are two blocks of 16; six rows run at once.
    assert made.engine.snapshot().blocks_total == 2 * 6
