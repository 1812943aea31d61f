"""Folders of models as transformers saves them; a part of peft_side.py."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def make_folder(folder, kind, config, seed, dtype="float32"):
    """Saves a model of transformers' model_type ``kind`` with random weights, norms and biases among them."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        if tensor.ndim > 1:
            torch.nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5)
        elif "norm" in name:
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
        else:
            torch.nn.init.normal_(tensor, std=0.3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
