"""Rollouts: a sampler that computes as the network in training does, and takes no more memory than answers need."""

import pytest

from mindlora.run.plan.memory import memory_of
from mindlora.run.plan.run import read_run
from mindlora.serving.in_training import TRAINED
from mindlora.training.rl.rollouts import Rollouts
from mindlora.training.rl.settings import rl_settings
from tests.support.mcore_networks import TINY, tiny_config, tiny_qwen3, with_adapters
from tests.support.tiny_serving import tokenizer

SIZES = {"vocab_size": 256, "seq_length": 64, "params_dtype": "bfloat16"}

RL = {"reward_funcs": "exact_answer", "prompts_per_step": 2, "num_generations": 3, "max_completion_length": 8}
PET = {"lora_rank": 3, "lora_alpha": 6, "target_modules": "all-linear"}


@pytest.fixture
def made(library, graph_mode, monkeypatch):
    """Rollouts of a Qwen3 with a base in bfloat16, on a processor on which serving would round products to it."""
    monkeypatch.setattr("mindlora.serving.network.rounds_faster", lambda: True)
    network = with_adapters(tiny_qwen3(**SIZES), **PET)
    model_config = {**TINY, **SIZES, "model_type": "qwen3", "architectures": "Qwen3ForCausalLM"}
    return Rollouts({TRAINED: network}, {"model_config": model_config}, tokenizer(), [rl_settings(RL)], 20, "float32")


def test_products_are_those_of_the_trainer(made):
    assert not made.engine.runner.rounds


def test_the_plan_counts_the_pools_as_they_are_and_the_cache_of_the_longest_prompts(made, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("{}", encoding="utf-8")
    config = tiny_config("", 1, [], PET)
    config["model"]["model_config"].update(SIZES)
    config["runner_wrapper"]["rl"] = {**RL, "prompts": str(tmp_path / "prompts.jsonl"), "tokenizer": "model"}
    found = {line.name: line.size for line in memory_of(read_run(config)).lines if line.name.startswith("sampler")}
    pools = [parameter for parameter in made.engine.runner.network.get_parameters() if ".lora_" in parameter.name]
    small = ("lora_ranks", "lora_scales")
    assert found["sampler: pools of adapters"] == sum(
        parameter.nbytes for parameter in pools if not parameter.name.endswith(small)
    )
    # Keys and values of two heads of 12 numbers, in float32, of six rows.
    tokens = 6 * SIZES["seq_length"]
    assert found[f"sampler: KV cache of {tokens} tokens, at most"] == tokens * 2 * 2 * 12 * 4


def test_the_cache_has_room_for_the_longest_prompt_and_answer_of_each_row(made):
    # 28 tokens are two blocks of 16; six rows run at once.
    assert made.engine.snapshot().blocks_total == 2 * 6
