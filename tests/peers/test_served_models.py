"""Folders of models from Hugging Face as `mindlora generate --model` serves them: the tokens are those of PEFT."""

import itertools

import numpy as np
import pytest

from mindlora.data.tokenizers import load_tokenizer
from mindlora.run.checks.mcore import check_served
from mindlora.run.configs.folder import CPU, read_folder, served_content
from mindlora.run.yaml_run import YamlRun
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.build import make_engine
from mindlora.serving.request import Reading, Sampling
from mindlora.serving.settings import EngineSettings
from tests.conftest import in_mode
from tests.peers.test_folders_against_transformers import LEGACY, MCORE, SIZES, tokenizer  # noqa: F401
from tests.support.mixed_requests import TIE

INVOCATION = [44, 5]
PROMPTS, NEW = ([1, 9, 31, *INVOCATION], [*range(40, 60), *INVOCATION, *range(60, 75), *INVOCATION, 50]), 12
EVERY_CELL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODELS = {
    # Half of each head is turned, neighbours together; norms after attention and feed-forward network.
    "glm4": ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True, "pad_token_id": 0}),
    "qwen3-moe": MCORE["qwen3-moe"],
    "qwen3": ("qwen3", {"head_dim": 16, "rope_theta": 1e4}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2.5": ("qwen2", {**LEGACY["qwen2.5"][1], "tie_word_embeddings": True}),
    # MindFormers' mcore model, from a YAML that names the folder.
    "qwen2-mcore": LEGACY["qwen2.5"],
    # Positions beyond the original ones, where the scaling of the rotary embedding counts.
    "llama-3.2": LEGACY["llama-3.2"],
}
# On every cell; on some, with two ranks and two scales.
ADAPTERS = {
    "every": {"r": 4, "lora_alpha": 16, "target_modules": EVERY_CELL},
    "some": {
        "r": 8,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"q_proj": 24},
    },
    "dora": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": EVERY_CELL},
}
# It acts from the last INVOCATION of a prompt on.
ACTIVATED = {"r": 8, "lora_alpha": 16, "target_modules": EVERY_CELL, "alora_invocation_tokens": INVOCATION}
# Without tied embeddings, and with them: then PEFT gives the head what it gives the embedding.
UNTIED = {
    "tables": {"r": 4, "target_modules": ["q_proj", "up_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding": {"r": 4, "lora_alpha": 16, "target_modules": ["embed_tokens", "v_proj"]},
    "head": {"r": 4, "target_modules": ["o_proj", "lm_head"]},
}
TIED = {
    "tables": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
}


def node_of(name, folder):
    """Returns the node ``model`` of the YAML by which a folder is served."""
    if name != "qwen2-mcore":
        return served_content(read_folder(str(folder)), CPU)["model"]
    keys = {"add_qkv_bias": True, "rope_theta": 1e6, "params_dtype": "float32", "compute_dtype": "float32"}
    yaml = {"use_legacy": False, "pretrained_model_dir": str(folder), "model": {"model_config": keys}}
    assert not list(check_served(YamlRun({**yaml, "context": {"device_target": "CPU"}})))
    return {"model_config": YamlRun(yaml).model}


def adapters_for(config):
    """Returns the adapters of a model: those of cells that it has."""
    adapters = {**ADAPTERS, **(TIED if config.get("tie_word_embeddings") else UNTIED)}
    if "partial_rotary_factor" in config:
        # Its gate and up are one cell.
        joined = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
        adapters = {
            name: {**settings, "target_modules": [joined.get(cell, cell) for cell in settings["target_modules"]]}
            for name, settings in adapters.items()
        }
    if "num_experts" not in config:
        return {**adapters, "activated": ACTIVATED}
    # transformers has no module for a single expert: it is the stacked weights of all that are adapted.
    attention = {"q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens", "lm_head"}
    adapters = {
        name: {**settings, "target_modules": [cell for cell in settings["target_modules"] if cell in attention]}
        for name, settings in adapters.items()
    }
    adapters["every"]["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapters["experts"] = {"r": 2, "lora_alpha": 24, "target_modules": [], "target_parameters": ["experts.down_proj"]}
    return adapters


# Name -> task and labels, of adapters with a score head.
CLASSIFIERS = {"texts": ("SEQ_CLS", 3), "words": ("TOKEN_CLS", 2), "reward": ("SEQ_CLS", 1)}
CLASSIFIER = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj"]}


def settings_for():
    """The settings of an engine for short texts, which computes in float32 on every processor."""
    sizes = {"seq_length": 64, "block_size": 8, "max_running": 16, "max_tokens_per_step": 300}
    return EngineSettings(**sizes, slots=7, max_rank=8, product_dtype="float32")


def read_texts(engine, names):
    """Returns (name, prompt, every) -> vectors of every token, or of the last alone."""
    streams = {}
    for name, prompt in itertools.product(names, PROMPTS):
        for every in (True, False):
            sampling = Sampling(max_tokens=0, reading=Reading(name in CLASSIFIERS, every))
            streams[name, tuple(prompt), every] = engine.submit(prompt, sampling, name)
    return {key: list(stream)[-1].vectors for key, stream in streams.items()}


def peft_vectors(peer, model, folder, name, prompt, path):
    """Returns what transformers and PEFT give for every token of a prompt, or where it is a score, for the last."""
    asked = {"model": model, "ids": [prompt], "path": path, "adapter": folder / name if name else None}
    if name in CLASSIFIERS:
        task, labels = CLASSIFIERS[name]
        peer.classifier_logits(task=task, labels=labels, **asked)
    else:
        peer.hidden_states(**asked)
    found = np.load(path)
    return found[0] if found.ndim == 3 else found


# For a release: qwen3-tied has its cells, and glm4 adapters on the tables of an mcore model that are not tied.
LONG = "qwen3"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name == LONG else []) for name in MODELS]
)
def test_the_base_and_adapters_in_one_batch_say_what_peft_says(
    name,
    peer,
    tokenizer,  # noqa: F811
    library,
    mindformers,
    tmp_path,
):
    kind, config = MODELS[name]
    model = tmp_path / "model"
    # Three of them in 16 bits, in which they are held; PEFT computes in float32 too.
    dtype = "bfloat16" if name in ("qwen3", "qwen3-tied", "qwen2.5") else "float32"
    peer.make_folder(folder=model, kind=kind, config={**SIZES, **config}, seed=1, dtype=dtype)
    tokenizer.save_pretrained(model)
    adapters = adapters_for(config)
    for seed, (adapter, settings) in enumerate(adapters.items()):
        peer.make_adapter(
            model=model,
            folder=tmp_path / adapter,
            seed=seed,
            kind="LoraConfig",
            config=settings,
            dtype="float32",
            safetensors=True,
            embeddings=False,
        )
    for adapter, (task, labels) in CLASSIFIERS.items():
        config = CLASSIFIER
        peer.make_classifier_adapter(model=model, folder=tmp_path / adapter, task=task, labels=labels, config=config)
    registry = AdapterRegistry(None, {adapter: str(tmp_path / adapter) for adapter in (*adapters, *CLASSIFIERS)})
    with in_mode(0):
        engine = make_engine(node_of(name, model), str(model), load_tokenizer(str(model)), registry, settings_for())
        engine.start(scores=False)
        asked = list(itertools.product((None, *adapters), PROMPTS))
        sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True)
        streams = [engine.submit(prompt, sampling, adapter) for adapter, prompt in asked]
        for stream in streams:
            stream.text()
        readings = read_texts(engine, (None, "some", "dora", *CLASSIFIERS))
        engine.stop()
    judged = {}
    for (adapter, prompt, every), vectors in readings.items():
        if (adapter, prompt) not in judged:
            judged[adapter, prompt] = peft_vectors(peer, model, tmp_path, adapter, prompt, tmp_path / "vectors.npy")
        expected = judged[adapter, prompt]
        if every and len(expected) == 1:
            vectors = vectors[-1:]
        np.testing.assert_allclose(vectors, expected if every else expected[-1:], atol=2e-5, err_msg=f"{adapter}")
    answers, compared = {}, 0
    for (adapter, prompt), stream in zip(asked, streams):
        folder = tmp_path / adapter if adapter else None
        tokens, gaps = peer.generate(model=model, ids=prompt, new=NEW, adapter=folder)
        # Where two logits tie, either token is right, and what follows depends on it.
        decided = next((at for at, gap in enumerate(gaps) if gap < TIE), NEW)
        assert stream.request.generated[:decided] == tokens[:decided], adapter
        answers.setdefault(adapter, []).append(tokens)
        compared += decided
    assert compared >= 0.8 * NEW * len(asked)
    assert all(answers[adapter] != answers[None] for adapter in adapters)
    if "activated" in adapters:
        activated = streams[asked.index(("activated", PROMPTS[1]))].request
        assert (activated.adapted_from, activated.cached) == (37, 32), "the base computed the blocks before"
