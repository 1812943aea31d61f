"""What MindIE, llama.cpp and Ollama take of an adapter, version by version."""

import os
from typing import Iterator

from mindlora.core.numerics.pair_shapes import LINEAR
from mindlora.core.text import listed
from mindlora.files.adapters import llama_cpp
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import peft
from mindlora.files.adapters.vllm_rules import Version

_MERGE = "Merge it into the base (mindlora base merge), and serve that."
_MERGE_GGUF = "Merge it into the base, and serve that: mindlora base merge --output merged.gguf"
# The first version of MindIE that loads adapters while it serves, and of Ollama that refuses ADAPTER.
_HOT_LOAD, _NO_ADAPTERS = (2, 3), (0, 34, 1)


def mindie_problems(path: str, adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields what MindIE would refuse, and what to do."""
    if adapter.dialect != peft.Peft.name or not os.path.isfile(os.path.join(path, peft.CONFIG_FILE)):
        yield (
            f"It is in the form of {adapter.dialect}, and MindIE reads PEFT's folder. Write that: mindlora adapter "
            f"convert {path} served --to peft"
        )
    elif not os.path.isfile(os.path.join(path, peft.WEIGHTS_FILE)):
        yield (
            f"It has no {peft.WEIGHTS_FILE}, which MindIE reads. Write it: mindlora adapter convert {path} served --to "
            "peft --allow-pickle"
        )
    if not adapter.variant.is_plain:
        yield f"It is a {adapter.variant.name} adapter ({adapter.variant.field}); MindIE has plain LoRA alone. {_MERGE}"
    if adapter.trained_modules:
        yield f"It has modules_to_save ({listed(adapter.trained_modules)}), and MindIE takes A and B alone. {_MERGE}"
    odd = [cell for cell in adapter.paths if adapter.layout(cell) is not LINEAR]
    if odd:
        yield f"It adapts cells that are not linear, and MindIE takes linear ones alone: {listed(odd)}. {_MERGE}"


def mindie_notes(adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields what MindIE must be told, or have."""
    yield "At most ten adapters are recommended beside one base, whose names have at most 256 characters."
    if version < _HOT_LOAD:
        yield "It loads no adapter while it serves: name all of them in LoraModules of config.json before the start."
    else:
        yield "It loads adapters while it serves only where ATB Models builds its graph in Python (maxLoras)."
    yield (
        "It serves adapters of Llama 3.1 (8B, 70B), Qwen2-72B, Qwen2.5 (7B to 72B) and Qwen3-32B, not together with "
        "quantization, prefix caching, SplitFuse or MTP."
    )


def llama_cpp_problems(path: str, adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields what llama.cpp would refuse or leave out, and what to do."""
    problems = llama_cpp.refusals(adapter)
    yield from problems
    if not problems:
        yield (
            f"It is in the form of {adapter.dialect}, and llama.cpp reads GGUF. Write that: mindlora adapter convert "
            f"{path} served.gguf"
        )


def llama_cpp_notes(adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields what llama.cpp must be told, or have."""
    yield "Start it with the file as --lora, beside a GGUF file of the base, which another program converts."
    if adapter.embeddings:
        yield "It adapts the embedding: on a base with tied embeddings llama.cpp ends with a failed assertion."


def ollama_problems(path: str, adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields what Ollama would refuse, and what to do."""
    if version >= _NO_ADAPTERS:
        yield f"Since 0.34.1 Ollama refuses a Modelfile with ADAPTER. {_MERGE_GGUF}"
    else:
        yield from llama_cpp_problems(path, adapter, version)


def ollama_notes(adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields what Ollama must be told."""
    yield "Its Modelfile then begins with FROM ./merged.gguf."
