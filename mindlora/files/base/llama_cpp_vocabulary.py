"""The tokenizer in a GGUF file: tokenizer.json of Hugging Face's folder in the keys that llama.cpp reads."""

import os
from typing import Any, Dict, Iterator, List, Mapping

from mindlora.core.errors import CheckpointError
from mindlora.core.formats.gguf_file import Uint32, Value
from mindlora.core.json_files import parse_object
from mindlora.core.text import shown

# llama.cpp's kinds of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The regular expression by which a text is cut before its bytes are joined -> llama.cpp's name of it.
SPLITS = {_CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe", _CONTRACTIONS + r"\p{N}" + _REST: "qwen2"}
# What ByteLevel cuts by itself.
_GPT2 = "gpt-2"
# The roles that llama.cpp knows -> the end of their key.
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def vocabulary(folder: str, config: Mapping[str, Any]) -> Dict[str, Value]:
    """Returns the tokenizer's keys and values; ``config`` is the content of the folder's config.json.

    Raises CheckpointError if there is no tokenizer.json, or llama.cpp has no tokenizer that does what it says.
    """
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and a GGUF file holds the tokenizer. Save it again with transformers: "
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
    """Returns each token -> its kind, in the order of their numbers, with one for every row of the embedding."""
    names = {number: token for token, number in model.get("vocab", {}).items()}
    names.update({token["id"]: token["content"] for token in added})
    if max(names) >= size:
        raise CheckpointError(
            f"{path} has the token {max(names)}, and the model's vocab_size is {size}: use the tokenizer of this model."
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
    """Returns scores by which sentencepiece, which joins the highest first, joins as the merges do, first to last."""
    joined: Dict[str, float] = {}
    for rank, merge in enumerate(merges):
        joined.setdefault(merge.replace(" ", "", 1), -float(rank))
    return [joined.get(token, 0.0) for token in tokens]


def _steps(content: Mapping, stage: str) -> Iterator[Mapping]:
    """Yields the steps of a stage of a tokenizer: the one that there is, or those of a sequence."""
    step = content.get(stage) or {}
    listed = step.get("normalizers") or step.get("pretokenizers") or step.get("processors")
    yield from (listed if step.get("type") == "Sequence" else [step]) or []


def _adds_space(content: Mapping) -> bool:
    """Returns whether a space is put before a text."""
    prepends = any(step.get("type") == "Prepend" for step in _steps(content, "normalizer"))
    metaspaces = (step for step in _steps(content, "pre_tokenizer") if step.get("type") == "Metaspace")
    return prepends or any(step.get("prepend_scheme", "always") != "never" for step in metaspaces)


def _split(content: Mapping, path: str) -> str:
    """Returns llama.cpp's name of the way in which a text is cut."""
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
    """Returns the text of a token of tokenizer_config.json, which is written in two ways; "" for none."""
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
