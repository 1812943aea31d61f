"""A folder of transformers -> mindlora configs --from -> MindFormers' network: the logits are transformers'."""

import types

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import cli
from mindlora.cli.doctor.examination import check_yaml
from mindlora.data.tokenizers import fit_tokenizer
from mindlora.files.base.convert import convert_base
from mindlora.network.load_base import load_base
from tests.support.mcore_networks import for_a_cpu, in_training, mcore_context
from tests.support.mcore_pynative import pynative_operators

# The parts of a model that a YAML must carry: sizes that differ from each other, few heads of keys.
SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
# name -> model_type and what else its config.json says. The rotary embeddings are scaled for the positions looked at.
LEGACY = {
    "llama-2": ("llama", {"rms_norm_eps": 1e-5, "num_key_value_heads": 4}),
    "llama-3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "eos_token_id": [2, 5]}),
    "llama-3.2": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "biased": ("llama", {"attention_bias": True}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "qwen2.5": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "use_sliding_window": False}),
    "qwen2.5-yarn": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 96}),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
MCORE = {
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rope_theta": 1e4}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, "norm_topk_prob": True, "num_hidden_layers": 1, **EXPERTS}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "rope_parameters": DEEPSEEK_YARN}),
    # One layer, which has no experts.
    "deepseek-v3-unscaled": ("deepseek_v3", {**LATENT, "num_hidden_layers": 1, "rope_theta": 1e4}),
}
IDS = np.random.default_rng(0).integers(4, 300, (1, 64)).astype(np.int32)


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer with bos, eos and padding."""
    return fit_tokenizer(["one cat and two dogs met on a wall"], 300)


@pytest.fixture(scope="module")
def drafted(peer, tokenizer, mindformers, tmp_path_factory):
    """Returns a function that makes the folder of a case and has its YAML written; it returns both, and the logits."""

    def draft(name, *options):
        kind, config = {**LEGACY, **MCORE}[name]
        folder = tmp_path_factory.mktemp(name)
        model, yaml = folder / "model", folder / "run.yaml"
        peer.make_folder(folder=model, kind=kind, config={**SIZES, **config}, seed=1)
        tokenizer.save_pretrained(model)
        peer.logits(model=model, ids=IDS.tolist(), path=folder / "logits.npy")
        assert cli.main(["configs", "--from", str(model), "--output", str(yaml), *options]) == 0
        logits = np.load(folder / "logits.npy").reshape(-1, SIZES["vocab_size"])
        return types.SimpleNamespace(folder=model, yaml=yaml, logits=logits)

    return draft


def read(yaml, **keys):
    """Returns the node model of a YAML as MindFormers reads it, without adapters, for rows as long as IDS."""
    from mindformers.tools.register import MindFormerConfig

    model = MindFormerConfig(str(yaml)).model
    del model.model_config["pet_config"]
    model.model_config.update(seq_length=IDS.shape[1], **keys)
    return model


def assert_same(logits, expected):
    assert np.abs(logits.reshape(expected.shape) - expected).max() <= 2e-5 * np.abs(expected).max()


def found_by_doctor(yaml):
    """Returns what the doctor finds wrong in a YAML."""
    return [finding for finding in check_yaml(str(yaml)) if finding.severity != "note"]


@pytest.mark.parametrize("name", LEGACY)
def test_a_legacy_model_is_transformers_model(name, drafted, pynative_mode):
    from mindformers.models.build_model import build_network

    case = drafted(name, "--device", "cpu", "--seq-length", "64")
    network = build_network(read(case.yaml))
    load_base(network, str(case.folder))
    network.set_train(False)
    assert_same(network(Tensor(IDS))[0].asnumpy(), case.logits)
    assert not found_by_doctor(case.yaml)


@pytest.fixture
def on_a_cpu():
    """Lets MindFormers build and run mcore models, in training and on a CPU."""
    with in_training(), mcore_context(), pynative_operators():
        yield


@pytest.mark.parametrize("name", MCORE)
def test_an_mcore_model_is_transformers_model(name, drafted, on_a_cpu, pynative_mode, tmp_path):
    from mindformers.models.build_model import build_network

    case = drafted(name, "--device", "npu", "--seq-length", "64")
    assert not found_by_doctor(case.yaml)
    network = build_network(read(case.yaml, params_dtype="float32", compute_dtype="float32"))
    convert_base(str(case.folder), str(tmp_path / "base.safetensors"), "hf", "mcore")
    weights = ms.load_checkpoint(str(tmp_path / "base.safetensors"), format="safetensors")
    missing, unexpected = ms.load_param_into_net(network, weights)
    assert not unexpected and not [name for name in missing if name.endswith((".weight", ".bias"))]
    for_a_cpu(network)
    assert_same(network.set_train(False)(Tensor(IDS)).asnumpy(), case.logits)
