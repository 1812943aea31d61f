"""Folders that save_lora wrote, against the rules of vLLM's adapter loader.

vLLM itself is not run here. These are its rules, restated from its source (vllm/lora/peft_helper.py, lora_model.py and
utils.py, read in 2026):

- adapter_config.json has r, lora_alpha and target_modules; other fields are ignored, except that modules_to_save,
  use_dora and a bias other than "none" are refused, and that r must not exceed max_lora_rank.
- Each tensor is base_model.model.<module>.lora_A.weight or lora_B.weight; a weight of the base's embeddings is
  ignored.
- The last component of <module> is one of the linear modules that the model serves.
- One scale for the whole adapter: lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.
"""

import math
import re

import pytest

from mindlora import save_lora
from mindlora.network import apply, tree
from tests.support.peers import cases, trained
from tests.support.peers.peer import read_json, stored

SERVED = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"}
# vLLM serves neither saved modules nor patterns.
SERVABLE = ["attention", "all-linear", "regex", "layers", "lm_head", "bfloat16"]


def refusal(config, keys, max_lora_rank=16):
    """Returns why vLLM would refuse an adapter, or None."""
    missing = {"r", "lora_alpha", "target_modules"} - set(config)
    if missing:
        return f"lacks {missing}"
    if config.get("modules_to_save") or config.get("use_dora") or config.get("bias", "none") != "none":
        return "trains more than A and B"
    if config["r"] > max_lora_rank:
        return "rank"
    for key in keys:
        if re.fullmatch(r"base_model\.model\.(lm_head|.*embed_tokens)\.base_layer\.weight", key):
            continue
        parsed = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", key)
        if not parsed or parsed[1].rpartition(".")[2] not in SERVED:
            return f"unexpected {key}"
    return None


def serves_as_trained(config, cells):
    """Returns whether vLLM's single scale and rank are those of every cell."""
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    return all(math.isclose(cell.scale, scale) and cell.lora_rank <= config["r"] for cell in cells)


@pytest.fixture
def saved(make_network, tmp_path):
    """Returns a function that returns configuration, keys and cells of an adapter saved without training."""

    def save(name):
        model, config = trained.CONFIGS[name]
        network = make_network(model)
        apply.apply_lora(network, config)
        save_lora(network, str(tmp_path / name))
        return (
            read_json(tmp_path / name, "adapter_config.json"),
            list(stored(tmp_path / name / cases.WEIGHTS)),
            [cell for _, cell in tree.lora_cells(network)],
        )

    return save


@pytest.mark.parametrize("name", SERVABLE)
def test_adapter_is_accepted(name, saved):
    config, keys, cells = saved(name)
    assert refusal(config, keys) is None
    assert len([key for key in keys if ".lora_" in key]) == 2 * len(cells)
    assert serves_as_trained(config, cells)


def test_saved_modules_are_declared(saved):
    """vLLM can refuse them only if the configuration names them."""
    config, keys, _ = saved("whole")
    assert refusal(config, keys) == "trains more than A and B"
