"""LoRA on routed experts: PEFT's adapters of a Qwen3-MoE of transformers (target_parameters) in MindFormers' model."""

import json

import numpy as np
import pytest
from mindspore import Tensor
from safetensors.numpy import save_file

from mindlora import LoraConfig, apply_lora, load_lora, resize_adapter, save_lora
from mindlora.files.adapters import expert_pairs
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.base.convert import convert_base
from mindlora.network.tree import lora_cells
from tests.support.mcore_networks import arrays, in_training, tokens
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.moe_networks import QWEN3_MOE, changed_weight, tiny_moe
from tests.support.networks import randomize
from tests.support.peers import cases
from tests.support.peers.peer import arrays as arrays_of_file
from tests.support.peers.peer import read_json

RANK, ALPHA, IDS = 2, 6, tokens(rows=1)
EXPERTS, HIDDEN, INNER = (QWEN3_MOE[key] for key in ("num_experts", "hidden_size", "moe_intermediate_size"))
HOLDER = "model.layers.0.mlp.experts"
KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
)


@pytest.fixture(scope="module")
def network(mindformers):
    """A Qwen3-MoE with an adapter on its experts, which does nothing yet, in evaluation mode."""
    with in_training(), mcore_in_pynative():
        found = tiny_moe("qwen3_moe")
        apply_lora(found, LoraConfig(target_parameters=["mlp.experts"], lora_rank=RANK, lora_alpha=ALPHA))
        yield found.set_train(False)


@pytest.fixture(scope="module")
def base(network, tmp_path_factory):
    """The same model as a folder of transformers, converted by mindlora."""
    folder = tmp_path_factory.mktemp("qwen3-moe")
    config = {
        **{key: QWEN3_MOE[key] for key in KEYS},
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    tensors = {name: array for name, array in arrays(network).items() if "lora" not in name}
    save_file(tensors, str(folder / "mcore.safetensors"))
    convert_base(str(folder / "mcore.safetensors"), str(folder / "hf"), "mcore", "hf", heads=4, kv_heads=2)
    (folder / "hf" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "hf"


@pytest.fixture(scope="module")
def made(peer, base, tmp_path_factory):
    """An adapter that PEFT made, all of it random."""
    folder = tmp_path_factory.mktemp("made") / "adapter"
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": [], "target_parameters": parameters}
    peer.make_adapter(
        model=base,
        folder=folder,
        seed=1,
        kind="LoraConfig",
        config=config,
        dtype="float32",
        safetensors=True,
        embeddings=False,
    )
    return folder


@pytest.fixture(scope="module")
def judged(peer, base, tmp_path_factory):
    """Returns a function that returns PEFT's logits of IDS [tokens, vocabulary]."""
    folder = tmp_path_factory.mktemp("logits")

    def logits(adapter=None):
        peer.logits(model=base, ids=IDS.tolist(), path=folder / "logits.npy", adapter=adapter)
        return np.load(folder / "logits.npy").reshape(-1, QWEN3_MOE["vocab_size"])

    return logits


def close(ours, theirs):
    # MindFormers computes attention in float16, whatever compute_dtype is.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-3 * np.abs(theirs).max())


def test_logits_are_pefts_without_an_adapter_with_pefts_and_with_ours(network, judged, made, tmp_path):
    plain = network(Tensor(IDS)).asnumpy()
    close(plain, judged())
    load_lora(network, made)
    ours = network(Tensor(IDS)).asnumpy()
    assert np.abs(ours - plain).max() > 0.1
    close(ours, judged(made))
    randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()], seed=1)
    ours = network(Tensor(IDS)).asnumpy()
    save_lora(network, tmp_path / "ours")
    assert np.abs(ours - plain).max() > 1
    close(ours, judged(tmp_path / "ours"))


def test_a_file_of_pefts_is_written_again_bit_for_bit(made, tmp_path):
    adapter_files.write(adapter_files.read(str(made)), str(tmp_path / "again"))
    found, expected = (arrays_of_file(folder / cases.WEIGHTS) for folder in (tmp_path / "again", made))
    assert len(expected) == 4 and found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array)
    assert read_json(tmp_path / "again" / "adapter_config.json")["target_modules"] == []


def test_the_change_of_each_experts_weights_is_pefts(peer, base, made, tmp_path):
    check_merged_experts(peer, base, made, tmp_path, dict.fromkeys(("weight1", "weight2"), RANK))


def test_peft_reads_stacks_of_different_ranks_that_resize_wrote(peer, base, made, tmp_path):
    adapter = adapter_files.read(str(made))
    # gate_up_proj keeps one rank, down_proj two: a rank_pattern.
    adapter.tensors[f"{HOLDER}.weight1", "B"][:, :, 1] = 0
    adapter_files.write(adapter, str(tmp_path / "wide"))
    resize_adapter(str(tmp_path / "wide"), str(tmp_path / "small"), energy=1 - 1e-9)
    check_merged_experts(peer, base, tmp_path / "small", tmp_path / "merged", {"weight1": 1, "weight2": 2})


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj"]])
def test_modules_that_transformers_5_has_as_parameters(peer, base, judged, tmp_path, targets):
    """PEFT makes target_parameters of their names, and of gate_proj and up_proj one pair of twice the rank."""
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    settings = {"dtype": "float32", "safetensors": True, "embeddings": False}
    peer.make_adapter(model=base, folder=tmp_path / "made", seed=2, kind="LoraConfig", config=config, **settings)
    found = adapter_files.read(str(tmp_path / "made"))
    assert ("model.layers.0.mlp.router" in found.paths) == (targets == "all-linear")
    check_merged_experts(peer, base, tmp_path / "made", tmp_path / "merged", {"weight1": 2 * RANK, "weight2": RANK})
    adapter_files.write(found, str(tmp_path / "again"))
    np.testing.assert_array_equal(judged(tmp_path / "again"), judged(tmp_path / "made"))


def check_merged_experts(peer, base, folder, merged, ranks):
    adapter = adapter_files.read(str(folder))
    peer.merge(model=base, adapter=folder, folder=merged)
    before, after = (weights_of_experts(weights) for weights in (base, merged))
    for leaf in ("weight1", "weight2"):
        a, b = (adapter.tensors[f"{HOLDER}.{leaf}", half] for half in "AB")
        assert adapter.rank(f"{HOLDER}.{leaf}") == ranks[leaf]
        changed = changed_weight(before[leaf], a, b, ALPHA / RANK)
        assert np.abs(changed - before[leaf]).max() > 0.01
        np.testing.assert_allclose(after[leaf], changed, rtol=0, atol=1e-5)


def weights_of_experts(folder):
    """Returns W [experts, in, out] of weight1 and of weight2 from a folder of transformers."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found.update(arrays_of_file(path))
    single = [
        [found[f"{HOLDER}.{expert}.{cell}_proj.weight"].T for cell in ("gate", "up", "down")]
        for expert in range(EXPERTS)
    ]
    return {
        "weight1": np.stack([np.concatenate([gate, up], axis=1) for gate, up, _ in single]),
        "weight2": np.stack([down for _, _, down in single]),
    }


def test_pairs_of_single_experts_become_what_peft_makes_of_them(peer, base, tmp_path):
    rng, tensors = np.random.default_rng(0), {}
    for expert in range(EXPERTS):
        for cell, (rows, columns) in {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items():
            for half, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                tensors[f"{HOLDER}.{expert}.{cell}_proj", half] = rng.normal(size=shape).astype(np.float32)
    adapter = Adapter(tensors, {path: float(ALPHA) for path, _ in tensors})
    adapter_files.write(adapter, str(tmp_path / "single"))
    peer.save_stacked(model=base, adapter=tmp_path / "single", folder=tmp_path / "peft")
    theirs = adapter_files.read(str(tmp_path / "peft"))
    expert_pairs.stack_pairs(adapter)
    assert theirs.tensors.keys() == adapter.tensors.keys() and theirs.alphas == adapter.alphas
    for key, array in adapter.tensors.items():
        np.testing.assert_array_equal(theirs.tensors[key], array)
