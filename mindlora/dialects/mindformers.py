"""MindFormers' own LoRA parameter names, as they stand in its .ckpt and .safetensors files."""
from typing import Optional, Tuple

_HALVES = {"mindpet_delta_lora_a": "A", "mindpet_delta_lora_b": "B",
           # A LoRADense of MindPet's that was never put into a network saves under capital letters.
           "mindpet_delta_lora_A": "A", "mindpet_delta_lora_B": "B"}
_OPTIMIZER_PREFIXES = ("adam_m.", "adam_v.", "moments.", "moment1.", "moment2.", "accu_grads.")


def tensor_key(path: str, half: str) -> str:
    """Returns the key of half "A" or "B" of the adapter at ``path``."""
    leaf = f"mindpet_delta_lora_{half.lower()}"
    return f"{path}.{leaf}" if path else leaf


def parse_key(key: str) -> Optional[Tuple[str, str]]:
    """Returns (path, "A" or "B") for a LoRA tensor, or None for a tensor of the base or of the optimizer."""
    path, _, leaf = key.rpartition(".")
    if leaf not in _HALVES or key.startswith(_OPTIMIZER_PREFIXES):
        return None
    return path, _HALVES[leaf]
