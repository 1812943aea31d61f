"""An adapter merged into a base checkpoint, and exported in other formats: files only, without a network.

Run it with ``python examples/merge_and_export.py``. It makes a tiny base checkpoint and an adapter first. The same is
done on the command line by ``mindlora base merge``, ``mindlora base convert`` and ``mindlora adapter convert``.
"""

import json
import os
import tempfile

import numpy as np
from safetensors.numpy import load_file, save_file

import mindlora

HIDDEN, RANK, ALPHA = 16, 4, 8
MODULE = "model.layers.0.self_attn.{}_proj"


def write_base(folder: str) -> None:
    """Writes the attention weights of one layer under Hugging Face's names, in place of a whole Llama."""
    rng = np.random.default_rng(0)
    tensors = {f"{MODULE.format(part)}.weight": rng.standard_normal((HIDDEN, HIDDEN), np.float32) for part in "qkvo"}
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "model.safetensors"))


def write_adapter(folder: str) -> None:
    """Writes an adapter for q and v in PEFT's format."""
    rng, tensors = np.random.default_rng(1), {}
    for part in "qv":
        key = f"base_model.model.{MODULE.format(part)}"
        tensors[f"{key}.lora_A.weight"] = rng.standard_normal((RANK, HIDDEN), np.float32)
        tensors[f"{key}.lora_B.weight"] = rng.standard_normal((HIDDEN, RANK), np.float32)
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj"]}
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)


def difference_from_numpy(base: str, adapter: str, merged: str) -> float:
    """Returns the largest difference of the merged weights from W + (alpha / rank) B A, computed here."""
    weights, result = (load_file(os.path.join(folder, "model.safetensors")) for folder in (base, merged))
    factors = load_file(os.path.join(adapter, "adapter_model.safetensors"))
    differences = []
    for name, weight in weights.items():
        key = f"base_model.model.{name[: -len('.weight')]}"
        if f"{key}.lora_A.weight" in factors:
            weight = weight + ALPHA / RANK * factors[f"{key}.lora_B.weight"] @ factors[f"{key}.lora_A.weight"]
        differences.append(np.abs(result[name] - weight).max())
    return max(differences)


def main() -> None:
    """Merges, checks the result in NumPy, then exports base and adapter for MindFormers."""
    with tempfile.TemporaryDirectory() as folder:
        base, adapter, merged = (os.path.join(folder, name) for name in ("base", "adapter", "merged"))
        write_base(base)
        write_adapter(adapter)
        print(mindlora.merge_checkpoint(base, adapter, merged))
        print(f"largest difference from NumPy: {difference_from_numpy(base, adapter, merged):.1e}")

        exported = os.path.join(folder, "merged_for_mindformers.safetensors")
        mindlora.convert_base(merged, exported, "hf", "mindformers")
        print(f"base for MindFormers: {', '.join(sorted(load_file(exported)))}")

        mindlora.convert_adapter(adapter, os.path.join(folder, "adapter.ckpt"), "ckpt")
        print(mindlora.compare_adapters(adapter, os.path.join(folder, "adapter.ckpt")))


if __name__ == "__main__":
    main()
