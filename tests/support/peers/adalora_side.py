"""PEFT's AdaLoRA on given gradients: outputs, orthogonality, and which triplets are left after each step."""

import numpy as np
import torch
from peft import AdaLoraConfig, get_peft_model


class Two(torch.nn.Module):
    """Two linear layers, one after the other, with a loss so that PEFT adds its orthogonality term."""

    def __init__(self, sizes):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x):
        y = self.second(self.first(x))
        return Outputs(y, y.sum() * 0)


class Outputs:
    """What a model of transformers returns."""

    def __init__(self, y, loss):
        self.y, self.loss = y, loss


def adalora_steps(sizes, tensors, path, rate, config):
    """Trains by plain gradient descent on given gradients, as PEFT's documentation says to.

    Args:
        sizes (list): [in, out] of the two layers.
        tensors (str): .npz with the weights ("first.weight"), the initial parts ("first.lora_A"), x, and the gradients
            of each step ("3.first.lora_A").
        path (str): .npz to write: y before the steps, orthogonality before each of them, its gradients before the first
            ("gradient.first.lora_A"), and the parts after each ("3.first.lora_E").
        rate (float): The learning rate.
        config (dict): Fields of AdaLoraConfig.
    """
    given = np.load(tensors)
    model = Two(sizes)
    for layer in ("first", "second"):
        getattr(model, layer).weight.data = torch.from_numpy(given[f"{layer}.weight"])
    adapted = get_peft_model(model, AdaLoraConfig(target_modules=["first", "second"], **config))
    parts = {}
    for name, parameter in adapted.named_parameters():
        layer, _, part = name.removesuffix(".default").removeprefix("base_model.model.").partition(".")
        if part.startswith("lora_"):
            parts[f"{layer}.{part}"] = parameter
            parameter.data = torch.from_numpy(given[f"{layer}.{part}"])
    x, found, orthogonality = torch.from_numpy(given["x"]), {}, []
    found["y"] = adapted(x).y.detach().numpy()
    for step in range(1, config["total_step"] + 1):
        # PeftModel itself goes around AdaLoraModel, which adds the term.
        loss = adapted.base_model(x).loss
        orthogonality.append(loss.item())
        loss.backward()
        for name, parameter in parts.items():
            if step == 1 and parameter.grad is not None:
                found[f"gradient.{name}"] = parameter.grad.numpy().copy()
            regularizer = 0 if parameter.grad is None else parameter.grad
            parameter.grad = regularizer + torch.from_numpy(given[f"{step}.{name}"])
            parameter.data -= rate * parameter.grad
        adapted.base_model.update_and_allocate(step)
        adapted.zero_grad()
        found.update({f"{step}.{name}": parameter.detach().numpy().copy() for name, parameter in parts.items()})
    np.savez(path, orthogonality=np.array(orthogonality), **found)
