"""Adapters as arrays, and files assembled byte by byte, for the tests of the code that reads and writes them."""

import json
import math
import pathlib

import numpy as np

from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.adapters.adapter import Adapter

FLOAT32 = np.dtype("<f4")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q, K = "model.layers.0.attention.wq", "model.layers.0.attention.wk"
_NAMES = {
    np.dtype("<f8"): "F64",
    np.dtype("<f4"): "F32",
    np.dtype("<f2"): "F16",
    BFLOAT16: "BF16",
    np.dtype("<i8"): "I64",
    np.dtype("<i4"): "I32",
}


def make(ranks=None, alphas=None, dtype=FLOAT32, seed=0, rows=None, **fields):
    """An adapter of normal values: rank 2 and lora_alpha 3 on wq [6, 6] and wk [4, 6] of layer 0, by default."""
    ranks = ranks or {Q: 2, K: 2}
    rng = np.random.default_rng(seed)
    tensors = {}
    for path, rank in ranks.items():
        out = (rows or {}).get(path, 4 if path.endswith("wk") else 6)
        tensors[path, "A"], tensors[path, "B"] = (
            from_float32(rng.normal(size=shape).astype(np.float32), dtype) for shape in ((rank, 6), (out, rank))
        )
    return Adapter(tensors, alphas or dict.fromkeys(ranks, 3.0), **fields)


def assert_same(found, expected):
    """Asserts that two adapters hold the same bits and the same metadata."""
    for mine, other in ((found.tensors, expected.tensors), (found.saved_modules, expected.saved_modules)):
        assert mine.keys() == other.keys()
        for key, array in other.items():
            assert (mine[key].dtype, mine[key].shape) == (array.dtype, array.shape)
            assert mine[key].tobytes() == array.tobytes()
    for field in ("alphas", "use_rslora", "dropout", "selection", "base_model", "fingerprint"):
        assert getattr(found, field) == getattr(expected, field), field


def key(path, half):
    """Returns PEFT's key of a tensor."""
    renamed = path.replace("attention.wq", "self_attn.q_proj").replace("attention.wk", "self_attn.k_proj")
    return f"base_model.model.{renamed}.lora_{half}.weight"


def peft_tensors(adapter):
    return {key(*part_key): array for part_key, array in adapter.tensors.items()}


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def header_of(tensors):
    """The header of a safetensors file of ``tensors`` as a dict, and the bytes that follow it."""
    header, content = {}, b""
    for name, array in tensors.items():
        header[name] = entry(_NAMES[array.dtype], array.shape, (len(content), len(content) + array.nbytes))
        content += array.tobytes()
    return header, content


def safetensors(header, content=b"", length=None):
    """A safetensors file with a header, given as a dict or bytes, that may be invalid."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + content


def folder(path, tensors=None, weights=None, **fields):
    """Writes PEFT's adapter folder: ``weights`` unchanged, or a file of ``tensors``; and a config with ``fields``."""
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / WEIGHTS).write_bytes(safetensors(*header_of(tensors)) if weights is None else weights)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "k_proj"], **fields}
    (path / CONFIG).write_text(json.dumps(config))
    return str(path)


def record(*values):
    """A .ckpt of (name, dtype, dims, bytes) records, which may be invalid."""
    from mindspore.train.checkpoint_pb2 import Checkpoint

    checkpoint = Checkpoint()
    for name, dtype, dims, content in values:
        added = checkpoint.value.add()
        added.tag, added.tensor.tensor_type, added.tensor.tensor_content = name, dtype, content
        added.tensor.dims.extend(dims)
    return checkpoint.SerializeToString()


def ckpt_records(adapter):
    """The records of a .ckpt of MindFormers' for ``adapter``."""
    return [
        (f"{path}.mindpet_delta_lora_{half.lower()}", "Float32", array.shape, array.tobytes())
        for (path, half), array in adapter.tensors.items()
    ]


def text(value):
    """A string as a .ckpt stores it: NumPy's array of one string."""
    return ("str", (1,), np.array(value).tobytes() if value else b"\0" * 4)


def scale_of(alpha, rank, rslora):
    return alpha / (math.sqrt(rank) if rslora else rank)
