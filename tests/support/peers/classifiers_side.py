"""Classifiers of transformers and PEFT, in the process of peft_side.py."""

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

CLASSES = {
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
    "TOKEN_CLS": transformers.AutoModelForTokenClassification,
}


def _load(model, task, labels):
    torch.manual_seed(7)
    return CLASSES[task].from_pretrained(model, num_labels=labels, dtype=torch.float32).eval()


def make_classifier_adapter(model, folder, task, labels, config):
    """Saves an adapter of a classifier whose every trained tensor is random."""
    adapted = get_peft_model(_load(model, task, labels), LoraConfig(task_type=task, **config))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(folder)


def classifier_logits(model, adapter, ids, path, task, labels):
    """Saves the scores of token ids with an adapter loaded as PEFT loads it."""
    loaded = PeftModel.from_pretrained(_load(model, task, labels), adapter).eval()
    with torch.no_grad():
        np.save(path, loaded(torch.tensor(ids)).logits.numpy())


def hidden_states(model, ids, path, adapter=None):
    """Saves what the head takes for token ids, with an adapter loaded as PEFT loads it."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter:
        loaded = PeftModel.from_pretrained(loaded, adapter)
    with torch.no_grad():
        np.save(path, loaded.eval()(torch.tensor(ids), output_hidden_states=True).hidden_states[-1].numpy())
