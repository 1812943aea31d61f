"""vLLM itself: it loads what inspect --for vllm accepts, with the tokens of PEFT, and refuses what that refuses.

Not on CI, since vLLM is 3.5 GB: MINDLORA_VLLM_PYTHON names the Python of an environment that has it (CONTRIBUTING.md).
"""

import json
import os
import pathlib
import subprocess
import types

import pytest

from mindlora.files.adapters.servers import check_for_server
from tests.peers.test_llama_cpp import byte_tokenizer
from tests.support.peers import cases

SIDE = pathlib.Path(__file__).parents[1] / "support" / "peers" / "vllm_side.py"
# vLLM's attention on a CPU takes heads of 32 elements, and not of 8.
SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPTS = [[5, 17, 99, 200, 3], [42, 7]]
COUNT = 16


def case(kind="LoraConfig", dtype="float32", safetensors=True, **config):
    config = {"target_modules": cases.ATTENTION, "r": 8, **config}
    if kind == "LoraConfig":
        config = {"lora_alpha": 16, **config}
    return {"kind": kind, "dtype": dtype, "safetensors": safetensors, "embeddings": False, "config": config}


ACCEPTED = {
    "attention": case(),
    "all-linear": case(target_modules="all-linear"),
    "two": case(target_modules=["q_proj", "down_proj"]),
    "rslora": case(use_rslora=True),
    "float16": case(dtype="float16"),
    "bfloat16": case(dtype="bfloat16"),
    "bin": case(safetensors=False),
    "rank-7": case(r=7),
    "rank-400": case(target_modules=["q_proj"], r=400),
    "one-layer": case(layers_to_transform=[1]),
    "regex": case(target_modules=r".*\.1\.self_attn\.[qv]_proj"),
    "lm_head": case(target_modules=["q_proj", "lm_head"]),
    "embedding": case(target_modules=["embed_tokens", "q_proj"]),
    "ranks": case(rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 8}),
    "scales": case(rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 3}),
}
REFUSED = {
    "dora": case(use_dora=True),
    "saved": case(modules_to_save=["lm_head"]),
    "saved-norm": case(modules_to_save=["norm"]),
    "vera": case("VeraConfig"),
    "miss": case("MissConfig"),
}


@pytest.fixture(scope="module")
def found(peer, tmp_path_factory):
    """Every case's folder, PEFT's tokens, and what vLLM answers: one start of vLLM for all of them."""
    python = os.environ.get("MINDLORA_VLLM_PYTHON")
    if not python:
        pytest.skip("MINDLORA_VLLM_PYTHON names no Python with vLLM (CONTRIBUTING.md)")
    folder = tmp_path_factory.mktemp("vllm")
    peer.make_model(folder=folder / "model", seed=0, shard_size="1GB", **SIZES)
    byte_tokenizer(folder / "model", None, bos=True)
    adapters = {"base": None}
    for number, (name, made) in enumerate({**ACCEPTED, **REFUSED}.items()):
        adapters[name] = str(folder / name)
        peer.make_adapter(folder=folder / name, seed=100 + number, model=folder / "model", **made)
    request = {"model": str(folder / "model"), "adapters": adapters, "prompts": PROMPTS, "count": COUNT}
    asked = subprocess.run(
        [python, str(SIDE)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert asked.returncode == 0, asked.stderr[-3000:]

    def tokens(name):
        return [
            peer.generate(model=folder / "model", ids=prompt, new=COUNT, adapter=adapters[name])[0]
            for prompt in PROMPTS
        ]

    return types.SimpleNamespace(adapters=adapters, answers=json.loads(asked.stdout), tokens=tokens)


@pytest.mark.parametrize("name", ["base", *ACCEPTED])
def test_what_is_accepted_is_loaded_and_gives_pefts_tokens(found, name):
    if found.adapters[name]:
        report = check_for_server(found.adapters[name], "vllm", allow_pickle=True)
        assert report.accepted, report.problems
    assert found.answers[name] == {"tokens": found.tokens(name)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_fails_there(found, name):
    assert not check_for_server(found.adapters[name], "vllm", allow_pickle=True).accepted
    assert "error" in found.answers[name]
