"""What vLLM, up to 0.33.0, and the servers that are built on it take of an adapter, version by version."""

import math
import os
import re
from typing import Iterator, List, Tuple

from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.core.numerics.dtypes import BFLOAT16
from mindlora.core.numerics.pair_shapes import EMBEDDING, EXPERTS, LINEAR
from mindlora.core.text import collapse_numbers, listed, number
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import peft
from mindlora.files.adapters.dialects.peft_config import json_object
from mindlora.files.adapters.expert_pairs import STACKED, stacked_paths
from mindlora.files.adapters.known_base import known_base
from mindlora.models import names

Version = Tuple[int, ...]

# The values that vLLM takes for --max-lora-rank; 16 is its default.
_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_REQUIRED = ("r", "lora_alpha", "target_modules")
# The weights of an adapted embedding and head are left out.
_SERVED_KEY = re.compile(r"\.lora_([AB]\.weight|embedding_[AB])$|\.(embed_tokens|lm_head)\.base_layer\.weight$")
_MERGE = "Merge it into the base (mindlora base merge), and serve that."
# The first versions of vLLM that take adapters of experts, stacked experts in PEFT's layout, and one scale a cell.
_EXPERTS, _STACKED, _PATTERNS = (0, 12), (0, 23), (0, 32)
# The first one that takes the whole head of a classifier, in every kind of classification, and the names of that head.
_HEADS_SINCE, _HEADS = (0, 33), ("classifier", "score")
# What of these mindlora's records name keeps the experts of a layer apart in vLLM (is_3d_moe_weight is False).
_APART = ("qwen3_moe", "deepseek_v3")


def vllm_problems(path: str, adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields what a version of vLLM would refuse or compute wrongly, and what to do."""
    yield from _problems(path, adapter, version)


def vllm_notes(adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields what vLLM must be told, or have."""
    yield from _notes(adapter)
    heads = _saved_heads(adapter)
    if heads and version >= _HEADS_SINCE:
        yield (
            f"It has a whole head ({listed(heads)}): vLLM must run the model as a classifier (--runner pooling), and "
            "with --max-lora-cls-labels if the head has more labels than the base's."
        )
    if stacked_paths(adapter):
        yield (
            "Its experts are stacked in PEFT's layout, which vLLM takes for models whose experts it keeps in one "
            "weight (Qwen3.5, Qwen3-VL-MoE, gpt-oss; vLLM's is_3d_moe_weight)."
        )


def ascend_notes(adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields the same of vllm-ascend."""
    yield from vllm_notes(adapter, version)
    yield (
        "With --tensor-parallel-size above 1, vllm-ascend 0.23.0 aborts or hangs on an NPU (vllm-ascend#16586, open in "
        "September 2026); --fully-sharded-loras goes around it (vllm#47650), from vllm-ascend 0.15 on (#6650)."
    )


def mindspore_problems(path: str, adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields the same of vllm-mindspore, which is built on vLLM 0.11."""
    yield from _problems(path, adapter, (0, 11))
    model_type = known_base(adapter).config.get("model_type")
    if model_type not in (None, "qwen2"):
        yield f"Its base is a {model_type}, and vllm-mindspore 0.5.1 serves adapters of Qwen2 alone. {_MERGE}"
    if any(array.dtype == BFLOAT16 for array in adapter.tensors.values()):
        yield (
            "It holds bfloat16, which vllm-mindspore 0.5.1 does not read from files. Save it in float16 with PEFT "
            "(model.half())."
        )


def mindspore_notes(adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields the same of vllm-mindspore."""
    yield from _notes(adapter)
    yield "vllm-mindspore 0.5.1 serves LoRA on Qwen2 alone, and needs --enforce-eager."


def _problems(path: str, adapter: Adapter, version: Version) -> Iterator[str]:
    config_file = os.path.join(path, peft.CONFIG_FILE)
    if adapter.dialect != peft.Peft.name or not os.path.isfile(config_file):
        yield (
            f"It is in the form of {adapter.dialect}, and servers read PEFT's folder. Write that: mindlora adapter "
            f"convert {path} served --to peft"
        )
        config: dict = {}
    else:
        config = json_object(config_file)
    if not adapter.variant.is_plain:
        yield f"It is a {adapter.variant.name} adapter ({adapter.variant.field}), which is refused. {_MERGE}"
    saved = config.get("modules_to_save") or (not config and adapter.saved_modules)
    if saved and not (version >= _HEADS_SINCE and _saved_heads(adapter) == adapter.trained_modules):
        yield f"It has modules_to_save ({listed(adapter.saved_modules)}), which are refused. {_MERGE}"
    if config.get("bias", "none") != "none":
        yield (
            f"Its configuration says bias {config['bias']!r}, which is refused, though the file holds none. Write it "
            f"again: mindlora adapter convert {path} served --to peft"
        )
    missing = [field for field in _REQUIRED if config and field not in config]
    if missing:
        yield (
            f"Its configuration lacks {', '.join(missing)}, without which it is refused. Write it again: mindlora "
            f"adapter convert {path} served --to peft"
        )
    yield from _key_problems(path, adapter, config)
    yield from _cell_problems(path, adapter, version)
    yield from _scale_problems(adapter, config, version)


def _saved_heads(adapter: Adapter) -> List[str]:
    """Returns what an adapter has of the whole head of a classifier."""
    return [name for name in adapter.trained_modules if name.rpartition(".")[0].rpartition(".")[2] in _HEADS]


def _key_problems(path: str, adapter: Adapter, config: dict) -> Iterator[str]:
    """Yields what is wrong with the keys of PEFT's file; those that other problems are about are left out."""
    weights = os.path.join(path, peft.WEIGHTS_FILE)
    if not config or not os.path.isfile(weights):
        return
    with TensorFile(weights) as file:
        odd = [key for key in file.tensors if not _SERVED_KEY.search(key)]
    if any(_SERVED_KEY.search(peft.saved_key(key)) for key in odd):
        yield (
            f"Its keys have the adapter's name in them ({odd[0]}), which is refused. Write it again: mindlora adapter "
            f"convert {path} served --to peft"
        )
    elif odd and adapter.saved_modules and not config.get("modules_to_save"):
        yield f"It holds weights besides A and B ({listed(adapter.saved_modules)}), which are refused. {_MERGE}"


def _cell_problems(path: str, adapter: Adapter, version: Version) -> Iterator[str]:
    odd = [cell for cell in adapter.paths if adapter.layout(cell) not in (LINEAR, EMBEDDING, EXPERTS)]
    if odd:
        yield f"It adapts cells that are neither linear nor an embedding: {listed(odd)}. {_MERGE}"
    experts = [cell for cell in adapter.paths if "experts" in cell.split(".")]
    if experts and version < _EXPERTS:
        yield f"It adapts routed experts, which are refused: {listed(experts)}. {_MERGE}"
        return
    stacked = stacked_paths(adapter)
    apart = known_base(adapter).config.get("model_type") in _APART
    if stacked and (apart or version < _STACKED):
        option = ", unless it runs with --enable-mixed-moe-lora-format and is given is_3d_lora_weight: true with it"
        yield (
            f"It has one pair for all experts of a layer ({listed(stacked)}), and this server takes pairs of each "
            f"expert by itself{option if version >= _STACKED else ''}. Write those: mindlora adapter convert {path} "
            "served --to peft --experts single"
        )
    elif stacked:
        lone = _lone_stacks(stacked)
        if lone:
            yield f"It adapts one of the two weights of a layer's experts ({listed(lone)}): vLLM fails then. {_MERGE}"


def _lone_stacks(stacked: List[str]) -> List[str]:
    """Returns the paths of stacked pairs whose layer has none for the other weight of its experts."""
    holders = [path.rpartition(".")[0] for path in stacked]
    return [path for path, holder in zip(stacked, holders) if holders.count(holder) < len(STACKED)]


def _scale_problems(adapter: Adapter, config: dict, version: Version) -> Iterator[str]:
    ranks = adapter.ranks
    if ranks[-1] > _MAX_RANKS[-1]:
        yield (
            f"Its rank is {ranks[-1]}, and at most {_MAX_RANKS[-1]} is served. Make it smaller: mindlora adapter "
            f"resize ADAPTER served --rank {_MAX_RANKS[-1]}"
        )
    # Before, vLLM computed one scale, from the r and lora_alpha of the configuration, and read neither pattern.
    if not adapter.alphas:
        yield "It does not state lora_alpha. Give it with --alpha, and convert the adapter with it."
        return
    if version >= _PATTERNS:
        return
    declared = config.get("r", ranks[-1])
    alpha = config.get("lora_alpha")
    scales = sorted({adapter.scale(path) for path in adapter.paths})
    used = scales[0]
    if alpha is not None and declared:
        used = alpha / adapter.alpha_growth(declared)
    if not all(math.isclose(scale, used, rel_tol=1e-6) for scale in scales):
        yield (
            f"Its cells have the scales {', '.join(map(number, scales))}, and a server scales all of them by "
            f"{number(used)}, without a word. Write it with one scale: mindlora adapter combine served --method cat "
            "--adapter ADAPTER 1"
        )


def _notes(adapter: Adapter) -> List[str]:
    rank = max(map(adapter.rank, adapter.paths))
    notes = []
    needed = next((allowed for allowed in _MAX_RANKS if allowed >= rank), None)
    if needed is not None and needed > 16:
        notes.append(
            f"Its rank is {rank}, and the default limit is 16: start the server with --max-lora-rank {needed}."
        )
    ends = sorted({names.to_hugging_face(path).rpartition(".")[2] for path in adapter.paths})
    notes.append(f"The model must serve modules of these names: {', '.join(ends)}.")
    embeddings = [path for path in adapter.paths if path in adapter.embeddings]
    if embeddings:
        shown = ", ".join(collapse_numbers(embeddings))
        notes.append(f"It adapts the embedding ({shown}): its vocabulary must be the served model's.")
    return notes
