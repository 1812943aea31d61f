"""A whole model for llama.cpp and what is built on it, such as Ollama: weights, sizes and tokenizer in one file."""

import functools
import logging
import math
import os
from typing import Any, Callable, Dict, List, Mapping, Optional

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.formats import gguf_file
from mindlora.core.formats.gguf_file import F16, F32, Q8_0, GgufTensor, Uint32, Value
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.text import suggestion
from mindlora.files.base.llama_cpp_vocabulary import vocabulary
from mindlora.files.base.writer import OutputTensor
from mindlora.models import llama_cpp, names
from mindlora.models.architectures.hugging_face import HuggingFaceConfig, Rope
from mindlora.models.llama_cpp import LlamaCppModel

logger = logging.getLogger("mindlora")

# How weights can be stored -> general.file_type.
TYPES = {F32: 0, F16: 1, Q8_0: 7}
_SCRIPT = "Convert the merged folder with llama.cpp's convert_hf_to_gguf.py."


def check(folder: str, world: str, config: Mapping[str, Any], outtype: str) -> None:
    """Raises CheckpointError if no GGUF file can be made of the base in ``folder``, InstallationError without gguf."""
    gguf_file.require_gguf()
    if outtype not in TYPES:
        raise CheckpointError(
            f"outtype is {outtype!r}; it must be {', '.join(TYPES)}.{suggestion(outtype, list(TYPES))}"
        )
    if world != "hf" or not config:
        raise CheckpointError(
            f"{folder} is not a model's folder from Hugging Face, with config.json and tokenizer.json, which a GGUF "
            "file needs. Convert the base first: mindlora base convert --to hf, and copy the tokenizer there."
        )
    if config.get("model_type") not in llama_cpp.MODELS:
        raise CheckpointError(
            f"{folder} holds a {config.get('model_type')}, for which mindlora writes no GGUF file: it does for "
            f"{', '.join(llama_cpp.MODELS)}. Merge into a folder. {_SCRIPT}"
        )


def write(
    output: str,
    folder: str,
    config: Mapping[str, Any],
    tensors: List[OutputTensor],
    outtype: str,
    progress: Callable[[int], None],
    tokenizer: Optional[str] = None,
) -> None:
    """Writes a model in one atomic step, one tensor in memory at a time.

    Args:
        output (str): The file.
        folder (str): The model's folder.
        config (mapping): The content of config.json.
        tensors (list of OutputTensor): Under Hugging Face's names.
        outtype (str): What weights are stored as, "f32", "f16" or "q8_0". Norms and biases are stored in float32, and
            weights whose rows q8_0 cannot cut into blocks of 32 in float16.
        progress (callable): Takes the size of each tensor that was written, in bytes.
        tokenizer (str): The folder with the tokenizer. Default: None, the model's.

    Raises:
        CheckpointError: llama.cpp has no place for a tensor, or for a setting of the model or of its tokenizer.
    """
    hugging_face = HuggingFaceConfig(os.path.join(folder, "config.json"), config)
    model = llama_cpp.MODELS[hugging_face.model_type]
    hugging_face.require("hidden_act", "silu", f"llama.cpp's {model.name} has silu alone")
    heads = hugging_face.count("num_attention_heads")
    kv_heads = hugging_face.count("num_key_value_heads", heads)
    head_dim = hugging_face.count("head_dim", hugging_face.count("hidden_size") // heads)
    rope = hugging_face.rope()
    metadata: Dict[str, Value] = {
        "general.type": "model",
        "general.name": os.path.basename(os.path.abspath(folder)),
        "general.file_type": Uint32(TYPES[outtype]),
        "general.quantization_version": Uint32(2),
    }
    sizes: Dict[str, Value] = {
        "context_length": Uint32(_context_length(hugging_face, model)),
        "embedding_length": Uint32(hugging_face.count("hidden_size")),
        "block_count": Uint32(hugging_face.count("num_hidden_layers")),
        "feed_forward_length": Uint32(hugging_face.count("intermediate_size")),
        "vocab_size": Uint32(hugging_face.count("vocab_size")),
        "attention.head_count": Uint32(heads),
        "attention.head_count_kv": Uint32(kv_heads),
        "attention.key_length": Uint32(head_dim),
        "attention.value_length": Uint32(head_dim),
        "attention.layer_norm_rms_epsilon": hugging_face.number("rms_norm_eps", 1e-6),
        "rope.dimension_count": Uint32(head_dim),
        "rope.freq_base": rope.theta,
    }
    if rope.kind == "linear":
        sizes["rope.scaling.type"] = "linear"
        sizes["rope.scaling.factor"] = float(hugging_face.scaling(rope, {"factor": None})["factor"])
    elif rope.kind not in ("default", "llama3"):
        raise CheckpointError(
            f"{hugging_face.path}: mindlora writes no GGUF file with rope_type {rope.kind}. {_SCRIPT}"
        )
    metadata.update({f"{model.name}.{key}": value for key, value in sizes.items()})
    metadata.update(vocabulary(tokenizer or folder, config))
    counts = {"q_proj": heads, "k_proj": kv_heads}
    written = [_tensor(each, model, counts, outtype, progress) for each in tensors if not names.is_computed(each.name)]
    if rope.kind == "llama3":
        factors = _llama3_factors(hugging_face, rope, head_dim)
        written.append(GgufTensor("rope_freqs.weight", factors.shape, F32, lambda: factors))
    gguf_file.write(output, model.name, metadata, written)


def _context_length(config: HuggingFaceConfig, model: LlamaCppModel) -> int:
    """Returns for how many tokens llama.cpp does what the model does; warns if the model takes more."""
    length, window = config.count("max_position_embeddings", 2048), config.window()
    if window is None or window >= length:
        return length
    logger.warning(
        "%s: a token attends to the last %d (sliding_window), and llama.cpp's %s attends to all. Keep texts within %d "
        "tokens, up to which both are the same: the GGUF file states them as the model's context, instead of %d.",
        config.path,
        window,
        model.name,
        window,
        length,
    )
    return window


def _tensor(
    tensor: OutputTensor, model: LlamaCppModel, heads: Mapping[str, int], outtype: str, progress: Callable[[int], None]
) -> GgufTensor:
    path, _, leaf = tensor.name.rpartition(".")
    cell = llama_cpp.cell_name(path)
    if cell is None:
        raise CheckpointError(f"{tensor.name} has no place in llama.cpp's {model.name}. {_SCRIPT}")
    if len(tensor.shape) == 1:
        stored = F32
    elif outtype == Q8_0 and not gguf_file.takes_blocks(tensor.shape):
        stored = F16
    else:
        stored = outtype
    rows = heads[path.rpartition(".")[2]] if model.rotates_neighbors and llama_cpp.is_rotated(path) else None
    array = functools.partial(_whole, tensor, rows, stored, progress)
    return GgufTensor(f"{cell}.{leaf}", tensor.shape, stored, array)


def _whole(tensor: OutputTensor, heads: Optional[int], stored: str, progress: Callable[[int], None]) -> np.ndarray:
    """Returns all rows, in llama.cpp's order; those of q and k by ``heads``."""
    array = tensor.rows(0, tensor.row_count)
    if heads:
        array = llama_cpp.neighbors_from_halves(array, heads)
    if stored == F16:
        with np.errstate(over="ignore"):
            half = to_float32(array).astype(np.float16)
        if not np.isfinite(half).all():
            raise CheckpointError(
                f"{tensor.name} is too large for float16. Nothing was written: choose another --outtype, such as f32."
            )
        array = half
    progress(tensor.nbytes)
    return array


def _llama3_factors(config: HuggingFaceConfig, rope: Rope, head_dim: int) -> np.ndarray:
    """Returns by what each frequency is divided (Llama 3.1): long waves by a factor, short ones by 1."""
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    settings = config.scaling(rope, dict.fromkeys(keys))
    factor, low, high, length = (float(settings[key]) for key in keys)
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    waves = length * frequencies / (2 * math.pi)
    smooth = np.clip((waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
