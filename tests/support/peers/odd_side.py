"""PEFT's rarer adapters, in PEFT's process (see peft_side.py)."""

import os
import warnings

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def _load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _shake(adapted):
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)


def make_odd_adapter(model, folder, seed, config):
    """Saves an adapter as it is after training, with everything in it that trains moved away from its initial value."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(_load(model), LoraConfig(task_type="CAUSAL_LM", **config))
        _shake(adapted)
        adapted.save_pretrained(folder)


def odd_logits(model, adapter, ids, path):
    """Saves the logits with an adapter, whatever PEFT warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(_load(model), adapter).eval()
    with torch.no_grad():
        np.save(path, adapted(torch.tensor(ids)).logits.numpy())


def grow(model, folder, adapter, tokens, config):
    """Saves the model with more tokens in ``folder``, and an adapter for it that holds its embeddings."""
    torch.manual_seed(3)
    base = _load(model)
    base.resize_token_embeddings(base.config.vocab_size + tokens, mean_resizing=False)
    base.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(_load(folder), LoraConfig(task_type="CAUSAL_LM", **config))
        _shake(adapted)
        adapted.save_pretrained(adapter, save_embedding_layers=True)
    assert os.path.exists(os.path.join(adapter, "adapter_model.safetensors"))
