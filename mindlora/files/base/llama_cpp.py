"""A complete model for llama.cpp and programs built on it, such as Ollama: weights, sizes and tokenizer in one file."""

import functools
import logging
import math
import os
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.formats import gguf_file
from mindlora.core.formats.gguf_file import F16, F32, Q8_0, GgufTensor, Uint32, Value
from mindlora.core.json_files import parse_object
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.text import shown, suggestion
from mindlora.files.base.writer import OutputTensor
from mindlora.models import llama_cpp, names
from mindlora.models.architectures.hugging_face import HuggingFaceConfig, Rope
from mindlora.models.llama_cpp import LlamaCppModel

logger = logging.getLogger("mindlora")

# Form of stored weights -> general.file_type.
TYPES = {F32: 0, F16: 1, Q8_0: 7}
_SCRIPT = "Convert the merged folder with llama.cpp's convert_hf_to_gguf.py."
# llama.cpp's kinds of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The regular expression that splits a text before its bytes are joined -> llama.cpp's name for it.
SPLITS = {_CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe", _CONTRACTIONS + r"\p{N}" + _REST: "qwen2"}
# The regular expression of ByteLevel itself.
_GPT2 = "gpt-2"
# Roles of tokens in llama.cpp -> the end of their key.
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def check(folder: str, world: str, config: Mapping[str, Any], outtype: str) -> None:
    """Raises CheckpointError if the base in ``folder`` cannot become a GGUF file, InstallationError without gguf."""
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
        outtype (str): The form of stored weights, "f32", "f16" or "q8_0". Norms and biases are stored in float32, and
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
    """Returns the number of tokens for which llama.cpp computes what the model does; warns if the model takes more."""
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
    """Returns all rows, in llama.cpp's order; rows of q and k are ordered by ``heads``."""
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
    """Returns the divisor of each frequency (Llama 3.1): a factor for long waves, 1 for short ones."""
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    settings = config.scaling(rope, dict.fromkeys(keys))
    factor, low, high, length = (float(settings[key]) for key in keys)
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    waves = length * frequencies / (2 * math.pi)
    smooth = np.clip((waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def vocabulary(folder: str, config: Mapping[str, Any]) -> Dict[str, Value]:
    """Returns the tokenizer's keys and values; ``config`` is the content of the folder's config.json.

    Raises CheckpointError if there is no tokenizer.json, or llama.cpp has no equivalent tokenizer.
    """
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{folder} has no tokenizer.json, but a GGUF file holds the tokenizer. Save it again with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    content = _read(path)
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        raise CheckpointError(
            f"{path} is of type {shown(model.get('type'))}, and mindlora writes tokenizers of type BPE into GGUF. "
            "Convert the merged folder with llama.cpp's convert_hf_to_gguf.py."
        )
    settings = os.path.join(folder, "tokenizer_config.json")
    named = _read(settings) if os.path.isfile(settings) else {}
    size = int(config["vocab_size"])
    tokens = _tokens(model, content.get("added_tokens") or [], size, path)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    found: Dict[str, Value] = {
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(tokens.values()),
    }
    if model.get("byte_fallback"):
        found["tokenizer.ggml.model"] = "llama"
        found["tokenizer.ggml.scores"] = _scores(tokens, merges)
        found["tokenizer.ggml.add_space_prefix"] = _adds_space(content)
    else:
        found["tokenizer.ggml.model"] = "gpt2"
        found["tokenizer.ggml.pre"] = _split(content, path)
        found["tokenizer.ggml.merges"] = merges
    numbers = {token: number for number, token in enumerate(tokens)}
    found.update(_special(numbers, named, config))
    bos = _text(named.get("bos_token"))
    found["tokenizer.ggml.add_bos_token"] = bool(named.get("add_bos_token", bos and _begins_with(content, bos)))
    template = _template(folder, named)
    if template:
        found["tokenizer.chat_template"] = template
    return found


def _read(path: str) -> Dict[str, Any]:
    with open(path, "rb") as file:
        return parse_object(file.read(), path, CheckpointError)


def _tokens(model: Mapping, added: List[Mapping], size: int, path: str) -> Dict[str, int]:
    """Returns token -> kind in the order of token numbers, one for every row of the embedding."""
    names = {number: token for token, number in model.get("vocab", {}).items()}
    names.update({token["id"]: token["content"] for token in added})
    if max(names) >= size:
        raise CheckpointError(
            f"{path} has the token {max(names)}, but the model's vocab_size is {size}: use the tokenizer of this model."
        )
    kinds = {token["content"]: _CONTROL if token.get("special") else _USER_DEFINED for token in added}
    kinds[model.get("unk_token")] = _UNKNOWN
    tokens = {}
    for number in range(size):
        token = names.get(number)
        if token is None:
            tokens[f"[PAD{number}]"] = _UNUSED
        elif model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
            tokens[token] = _BYTE
        else:
            tokens[token] = kinds.get(token, _NORMAL)
    return tokens


def _scores(tokens: Mapping[str, int], merges: List[str]) -> List[float]:
    """Returns scores with which sentencepiece, which joins the highest first, follows the order of the merges."""
    joined: Dict[str, float] = {}
    for rank, merge in enumerate(merges):
        joined.setdefault(merge.replace(" ", "", 1), -float(rank))
    return [joined.get(token, 0.0) for token in tokens]


def _steps(content: Mapping, stage: str) -> Iterator[Mapping]:
    """Yields the steps of a stage of a tokenizer: a single one, or those of a sequence."""
    step = content.get(stage) or {}
    listed = step.get("normalizers") or step.get("pretokenizers") or step.get("processors")
    yield from (listed if step.get("type") == "Sequence" else [step]) or []


def _adds_space(content: Mapping) -> bool:
    """Returns whether the tokenizer puts a space before a text."""
    prepends = any(step.get("type") == "Prepend" for step in _steps(content, "normalizer"))
    metaspaces = (step for step in _steps(content, "pre_tokenizer") if step.get("type") == "Metaspace")
    return prepends or any(step.get("prepend_scheme", "always") != "never" for step in metaspaces)


def _split(content: Mapping, path: str) -> str:
    """Returns llama.cpp's name for the way in which a text is split."""
    steps = list(_steps(content, "pre_tokenizer"))
    patterns = [step.get("pattern", {}).get("Regex", "") for step in steps if step.get("type") == "Split"]
    if any(step.get("type") == "ByteLevel" for step in steps):
        if len(patterns) == 1 and patterns[0] in SPLITS:
            return SPLITS[patterns[0]]
        if not patterns and steps[-1].get("use_regex", True) and len(steps) == 1:
            return _GPT2
    raise CheckpointError(
        f"{path} cuts texts in a way that mindlora does not know from llama.cpp (those of Llama 3, Qwen2, Qwen3 and "
        "GPT-2 it does). Convert the merged folder with llama.cpp's convert_hf_to_gguf.py."
    )


def _special(numbers: Mapping[str, int], named: Mapping, config: Mapping) -> Dict[str, Value]:
    """Returns the numbers of the tokens with a role, by tokenizer_config.json or else by config.json."""
    found: Dict[str, Value] = {}
    for role, key in _ROLES.items():
        number = numbers.get(_text(named.get(f"{role}_token")), config.get(f"{role}_token_id"))
        # Several ends: the first is the model's own.
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and 0 <= number < len(numbers):
            found[f"tokenizer.ggml.{key}_token_id"] = Uint32(number)
    return found


def _text(token: Any) -> str:
    """Returns the text of a token of tokenizer_config.json, which has two forms; "" for none."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _begins_with(content: Mapping, token: str) -> bool:
    """Returns whether the tokenizer puts a token before each text."""
    for step in _steps(content, "post_processor"):
        first = (step.get("single") or [{}])[0]
        if first.get("SpecialToken", {}).get("id") == token:
            return True
    return False


def _template(folder: str, named: Mapping) -> str:
    """Returns the chat template, "" if there is none."""
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            return file.read()
    template = named.get("chat_template") or ""
    if isinstance(template, str):
        return template
    return str(next((each["template"] for each in template if each["name"] == "default"), ""))
