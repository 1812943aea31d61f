"""Adapters on small Llama checkpoints, and what merge_checkpoint must make of the two."""

import json
import os

import numpy as np

from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.numerics.dtypes import BFLOAT16, to_float32

RANK, ALPHA = 4, 6


LINEARS = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}


DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": BFLOAT16}


Q = "model.layers.0.self_attn.q_proj"


def pairs(*paths, shapes=None, seed=1):
    """Returns {path: (A, B)} under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    result = {}
    for path in paths or [f"model.layers.{layer}.{name}" for layer in range(2) for name in LINEARS]:
        rows, columns = (shapes or {}).get(path) or LINEARS[path.split(".", 3)[-1]]
        result[path] = (
            rng.normal(size=(RANK, columns)).astype(np.float32),
            rng.normal(size=(rows, RANK)).astype(np.float32),
        )
    return result


def save_adapter(folder, found, saved_modules=None, **config):
    """Writes pairs, and the parameters of saved modules, as PEFT's folder; returns its path."""
    os.makedirs(folder)
    tensors = {f"base_model.model.{name}": array for name, array in (saved_modules or {}).items()}
    for path, (a, b) in found.items():
        tensors[f"base_model.model.{path}.lora_A.weight"], tensors[f"base_model.model.{path}.lora_B.weight"] = a, b
    write_arrays(os.path.join(folder, "adapter_model.safetensors"), tensors)
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump(
            {
                "peft_type": "LORA",
                "r": RANK,
                "lora_alpha": ALPHA,
                "modules_to_save": sorted({name.rpartition(".")[0].rpartition(".")[2] for name in saved_modules or ()})
                or None,
                "target_modules": sorted({path.rpartition(".")[2] for path in found}),
                **config,
            },
            file,
        )
    return str(folder)


def expected(source, found, scale=ALPHA / RANK):
    """Returns the oracle: W + scale B A in float64."""
    result = dict(source)
    for path, (a, b) in found.items():
        weight = to_float32(source[f"{path}.weight"]).astype(np.float64)
        result[f"{path}.weight"] = weight + scale * b.astype(np.float64) @ a.astype(np.float64)
    return result


def assert_merged(actual, source, found, scale=ALPHA / RANK):
    """Asserts that merged tensors are the rounded sums, and that all others are copies."""
    assert actual.keys() == source.keys()
    for name, array in expected(source, found, scale).items():
        assert (actual[name].dtype, actual[name].shape) == (source[name].dtype, array.shape)
        if name.rpartition(".")[0] not in found:
            assert actual[name].tobytes() == source[name].tobytes(), name
            continue
        half_a_step = {BFLOAT16: 2.0**-8, DTYPES["float16"]: 2.0**-11, DTYPES["float32"]: 2.0**-24}[actual[name].dtype]
        np.testing.assert_allclose(to_float32(actual[name]), array, rtol=half_a_step * 1.01, atol=2e-5, err_msg=name)
