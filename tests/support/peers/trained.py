"""Adapters that are trained here, on MindFormers' network, for PEFT to load."""

import mindspore as ms
import numpy as np

from mindlora import LoraConfig, apply_lora, freeze_base
from tests.support import networks
from tests.support.peers import cases

# Name -> (model, LoraConfig).
CONFIGS = {
    "attention": ("plain", LoraConfig(target_modules=cases.ATTENTION, lora_rank=4, lora_alpha=6, lora_dropout=0.1)),
    "all-linear": ("grouped", LoraConfig(target_modules="all-linear", lora_rank=8, lora_alpha=16, use_rslora=True)),
    "regex": (
        "tied",
        LoraConfig(target_modules=r".*\.1\.(attention\.w[kv]|feed_forward\.w1)", lora_rank=3, lora_alpha=7.5),
    ),
    "layers": ("grouped", LoraConfig(target_modules=["wq", "w2"], lora_rank=2, lora_alpha=4, layers_to_transform=[1])),
    "patterns": (
        "plain",
        LoraConfig(
            target_modules=["wq", "wv", "w3"],
            lora_rank=4,
            lora_alpha=6,
            rank_pattern={"wq": 2, r"layers\.1\.feed_forward\.w3": 7},
            alpha_pattern={"v_proj": 3, r"0\.attention\.wq": 16},
        ),
    ),
    "patterns-rslora": (
        "plain",
        LoraConfig(
            target_modules=["wq", "wv"],
            lora_rank=4,
            lora_alpha=6,
            use_rslora=True,
            rank_pattern={"wv": 9},
            alpha_pattern={r"0\.attention\.wq": 2.5},
        ),
    ),
    "whole": (
        "plain",
        LoraConfig(
            target_modules=["wq", "w2"], lora_rank=4, lora_alpha=6, modules_to_save=["lm_head", "attention_norm"]
        ),
    ),
    "whole-embedding": (
        "grouped",
        LoraConfig(target_modules=["wv"], lora_rank=4, lora_alpha=8, modules_to_save=["tok_embeddings", "norm_out"]),
    ),
    "frozen-a": ("plain", LoraConfig(target_modules=["wq", "w2"], lora_rank=4, lora_alpha=6, freeze_lora_a=True)),
    "lm_head": ("plain", LoraConfig(target_modules=["wq", "lm_head"], lora_rank=4, lora_alpha=8)),
    "dora": ("grouped", LoraConfig(target_modules=["wq", "wv", "w2"], lora_rank=4, lora_alpha=8, use_dora=True)),
    # A step moves a vector by RATE, which has little effect where the other vector is small.
    "vera": (
        "grouped",
        LoraConfig(
            target_modules=["wq", "wv", "w2"],
            lora_rank=6,
            lora_dropout=0.1,
            use_vera=True,
            d_initial=1.0,
            projection_prng_key=3,
        ),
    ),
    "miss": ("grouped", LoraConfig(target_modules=["wq", "wv", "w2"], lora_rank=6, lora_dropout=0.1, use_miss=True)),
    "embedding": ("plain", LoraConfig(target_modules=["tok_embeddings", "wv"], lora_rank=4, lora_alpha=8)),
    "float16": ("plain", LoraConfig(target_modules=["wq", "wv"], lora_rank=4, lora_alpha=8, param_init_type="float16")),
    "bfloat16": (
        "plain",
        LoraConfig(target_modules=["wq", "wv"], lora_rank=4, lora_alpha=8, param_init_type="bfloat16"),
    ),
}
STEPS = 2
# How far each element moves in a step.
RATE = 0.02


def train(network, config):
    """Puts LoRA on a network and trains it for a few steps of sign descent; returns the loss of each step.

    Sign descent needs no optimizer; MindSpore's Adam takes no bfloat16 on a CPU.
    """
    ms.set_seed(1)
    apply_lora(network, config)
    freeze_base(network, config)
    network.set_train(True)
    data = np.random.default_rng(5).integers(3, cases.VOCABULARY, (1, network.config.seq_length + 1))
    parameters = network.trainable_params()
    gradient = ms.value_and_grad(network, None, parameters)
    losses = []
    for _ in range(STEPS):
        loss, gradients = gradient(ms.Tensor(data.astype(np.int32)))
        losses.append(float(loss.asnumpy()))
        for parameter, slope in zip(parameters, gradients):
            moved = networks.as_array(parameter) - RATE * np.sign(networks.as_array(slope))
            parameter.set_data(ms.Tensor(moved.astype(np.float32), parameter.dtype))
    network.set_train(False)
    return losses
