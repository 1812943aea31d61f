"""Whether a server would take an adapter as it is: the rules of each server and its versions, with their source."""

import dataclasses
import math
import os
import re
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.core.numerics.dtypes import BFLOAT16
from mindlora.core.numerics.pair_shapes import EMBEDDING, EXPERTS, LINEAR
from mindlora.core.text import collapse_numbers, fields, listed, number, suggestion
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import llama_cpp
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import peft
from mindlora.files.adapters.dialects.peft_config import Extras, json_object
from mindlora.files.adapters.expert_pairs import STACKED, stacked_paths
from mindlora.files.adapters.known_base import known_base
from mindlora.models import names

Version = Tuple[int, ...]

# The values that vLLM takes for --max-lora-rank; 16 is its default.
_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_REQUIRED = ("r", "lora_alpha", "target_modules")
# The weights of an adapted embedding and head are left out.
_SERVED_KEY = re.compile(r"\.lora_([AB]\.weight|embedding_[AB])$|\.(embed_tokens|lm_head)\.base_layer\.weight$")
# The first versions of vLLM that take adapters of experts, stacked experts in PEFT's layout, and one scale a cell.
_EXPERTS, _STACKED, _PATTERNS = (0, 12), (0, 23), (0, 32)
# The first one known to take the whole head of a text classifier (not of tokens), and the head's names.
_HEADS_SINCE, _HEADS = (0, 32), ("classifier", "score")
# The models in mindlora's records whose experts vLLM keeps apart (is_3d_moe_weight is False).
_APART = ("qwen3_moe", "deepseek_v3")
_MERGE = "Merge it into the base (mindlora base merge), and serve that."
_MERGE_GGUF = "Merge it into the base, and serve that: mindlora base merge --output merged.gguf"
# The first version of MindIE that loads adapters while it serves, and of Ollama that refuses ADAPTER.
_HOT_LOAD, _NO_ADAPTERS = (2, 3), (0, 34, 1)


def vllm_problems(path: str, adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields each feature that a version of vLLM would refuse or compute wrongly, and what to do."""
    yield from _problems_in_vllm(path, adapter, version)


def vllm_notes(adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields the options with which vLLM must be started for the adapter, and its other needs."""
    yield from _notes_in_vllm(adapter)
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
    """Yields the options with which vllm-ascend must be started, and its other needs."""
    yield from vllm_notes(adapter, version)
    yield (
        "With --tensor-parallel-size above 1, vllm-ascend 0.23.0 aborts or hangs on an NPU (vllm-ascend#16586, open in "
        "September 2026); --fully-sharded-loras goes around it (vllm#47650), from vllm-ascend 0.15 on (#6650)."
    )


def mindspore_problems(path: str, adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields each feature that vllm-mindspore, built on vLLM 0.11, would refuse or compute wrongly, and what to do."""
    yield from _problems_in_vllm(path, adapter, (0, 11))
    model_type = known_base(adapter).config.get("model_type")
    if model_type not in (None, "qwen2"):
        yield f"Its base is a {model_type}, and vllm-mindspore 0.5.1 serves adapters of Qwen2 alone. {_MERGE}"
    if any(array.dtype == BFLOAT16 for array in adapter.tensors.values()):
        yield (
            "It holds bfloat16, which vllm-mindspore 0.5.1 does not read from files. Save it in float16 with PEFT "
            "(model.half())."
        )


def mindspore_notes(adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields the options with which vllm-mindspore must be started, and its other needs."""
    yield from _notes_in_vllm(adapter)
    yield "vllm-mindspore 0.5.1 serves LoRA on Qwen2 alone, and needs --enforce-eager."


def _problems_in_vllm(path: str, adapter: Adapter, version: Version) -> Iterator[str]:
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
    elif saved and config.get("task_type") == "TOKEN_CLS":
        yield f"It has the whole head of a classifier of tokens, which is refused: only one of texts is taken. {_MERGE}"
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
    """Returns the tensors of a classifier's whole head in an adapter."""
    return [name for name in adapter.trained_modules if name.rpartition(".")[0].rpartition(".")[2] in _HEADS]


def _key_problems(path: str, adapter: Adapter, config: dict) -> Iterator[str]:
    """Yields faults in the keys of PEFT's file, except those that other problems cover."""
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
            f"It has one pair for all experts of a layer ({listed(stacked)}), but this server takes pairs of each "
            f"expert by itself{option if version >= _STACKED else ''}. Write those: mindlora adapter convert {path} "
            "served --to peft --experts single"
        )
    elif stacked:
        lone = _lone_stacks(stacked)
        if lone:
            yield f"It adapts one of the two weights of a layer's experts ({listed(lone)}): vLLM fails then. {_MERGE}"


def _lone_stacks(stacked: List[str]) -> List[str]:
    """Returns the paths of stacked pairs whose layer lacks a pair for the other weight of its experts."""
    holders = [path.rpartition(".")[0] for path in stacked]
    return [path for path, holder in zip(stacked, holders) if holders.count(holder) < len(STACKED)]


def _scale_problems(adapter: Adapter, config: dict, version: Version) -> Iterator[str]:
    ranks = adapter.ranks
    if ranks[-1] > _MAX_RANKS[-1]:
        yield (
            f"Its rank is {ranks[-1]}, but at most {_MAX_RANKS[-1]} is served. Make it smaller: mindlora adapter "
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


def _notes_in_vllm(adapter: Adapter) -> List[str]:
    rank = max(map(adapter.rank, adapter.paths))
    notes = []
    needed = next((allowed for allowed in _MAX_RANKS if allowed >= rank), None)
    if needed is not None and needed > 16:
        notes.append(
            f"Its rank is {rank}, but the default limit is 16: start the server with --max-lora-rank {needed}."
        )
    ends = sorted({names.to_hugging_face(path).rpartition(".")[2] for path in adapter.paths})
    notes.append(f"The model must serve modules of these names: {', '.join(ends)}.")
    embeddings = [path for path in adapter.paths if path in adapter.embeddings]
    if embeddings:
        shown = ", ".join(collapse_numbers(embeddings))
        notes.append(f"It adapts the embedding ({shown}): its vocabulary must be the served model's.")
    return notes


def mindie_problems(path: str, adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields each feature that MindIE would refuse, and what to do."""
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
        yield f"It has modules_to_save ({listed(adapter.trained_modules)}), but MindIE takes A and B alone. {_MERGE}"
    odd = [cell for cell in adapter.paths if adapter.layout(cell) is not LINEAR]
    if odd:
        yield f"It adapts cells that are not linear, but MindIE takes linear ones alone: {listed(odd)}. {_MERGE}"


def mindie_notes(adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields how MindIE must be set up for the adapter, and its other needs."""
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
    """Yields each feature that llama.cpp would refuse or leave out, and what to do."""
    problems = llama_cpp.refusals(adapter)
    yield from problems
    if not problems:
        yield (
            f"It is in the form of {adapter.dialect}, and llama.cpp reads GGUF. Write that: mindlora adapter convert "
            f"{path} served.gguf"
        )


def llama_cpp_notes(adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields how llama.cpp must be started for the adapter, and its other needs."""
    yield "Start it with the file as --lora, beside a GGUF file of the base, which another program converts."
    if adapter.embeddings:
        yield "It adapts the embedding: on a base with tied embeddings llama.cpp ends with a failed assertion."


def ollama_problems(path: str, adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields each feature that Ollama would refuse, and what to do."""
    if version >= _NO_ADAPTERS:
        yield f"Since 0.34.1 Ollama refuses a Modelfile with ADAPTER. {_MERGE_GGUF}"
    else:
        yield from llama_cpp_problems(path, adapter, version)


def ollama_notes(adapter: Adapter, version: Version) -> Iterator[str]:
    """Yields how Ollama must be set up for the adapter."""
    yield "Its Modelfile then begins with FROM ./merged.gguf."


_VERSION = re.compile(r"\d+(\.\d+)*")


class Server(NamedTuple):
    """A server whose rules are known.

    Attributes:
        version (str): The newest version whose rules were read, used when the user names none.
        rules (str): The source of the rules.
        problems (callable): Path, adapter and version -> features that the server would refuse or compute wrongly.
        notes (callable): Adapter and version -> options and other needs of the server.
    """

    version: str
    rules: str
    problems: Callable[[str, Adapter, Version], Iterator[str]]
    notes: Callable[[Adapter, Version], Iterator[str]]


_VLLM = "vllm/lora (peft_helper.py, lora_model.py, model_manager.py)"
SERVERS: Dict[str, Server] = {
    "vllm": Server(
        "0.33.0",
        f"{_VLLM} of 0.33.0, 0.32.0, of main earlier in 2026 and of 0.11.0; stacked experts: SkyRL#1852",
        vllm_problems,
        vllm_notes,
    ),
    "vllm-ascend": Server(
        "0.23.0",
        f"{_VLLM} of the vLLM of its version, with which vllm-ascend loads adapters; its issues #16586, #6143",
        vllm_problems,
        ascend_notes,
    ),
    "vllm-mindspore": Server(
        "0.5.1", "vLLM 0.11.0, which vllm-mindspore 0.5.1 is built on", mindspore_problems, mindspore_notes
    ),
    "mindie": Server(
        "2.3.0",
        "hiascend.com, MindIE LLM, Multi-LoRA (mindie_llm0298) of 2.0.RC1 to 2.3.0",
        mindie_problems,
        mindie_notes,
    ),
    "llama.cpp": Server(
        "0",
        "src/llama-adapter.cpp of 2026; files that mindlora wrote were loaded by it",
        llama_cpp_problems,
        llama_cpp_notes,
    ),
    "ollama": Server("0.34.1", "ollama#14969 (merged in September 2026)", ollama_problems, ollama_notes),
}


@dataclasses.dataclass(frozen=True)
class ServerReport:
    """Whether a server would take an adapter.

    Attributes:
        rules (str): The source of its rules. The server itself was not run.
        accepted (bool): Whether it would take the adapter as it is, and compute what was trained.
        problems (tuple of str): Features that it would refuse or compute wrongly, and what to do, in a sentence or two
            each.
        notes (tuple of str): Options and other needs of the server.
    """

    path: str
    server: str
    rules: str
    accepted: bool
    problems: Tuple[str, ...]
    notes: Tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 if the adapter would be served as it is."""
        return 0 if self.accepted else 1

    def __str__(self) -> str:
        return fields(
            [
                ("adapter", self.path),
                (self.server, "would serve it as it is" if self.accepted else "would not serve it as it is"),
                *(("problem", text) for text in self.problems),
                *(("note", text) for text in self.notes),
                ("rules", f"read from {self.rules}; the server was not run"),
            ]
        )


def check_for_server(
    path: str, server: str, *, alpha: Optional[float] = None, allow_pickle: bool = False
) -> ServerReport:
    """Reports whether a server would take an adapter as it is.

    ``server`` is one of SERVERS, such as "vllm", or one with a version, such as "vllm==0.23". ``path`` and
    ``allow_pickle`` are as for adapter_files.read; ``alpha`` is lora_alpha, if the file does not state it. Raises
    ConfigError if the server is not known, and AdapterError if there is no usable adapter.
    """
    rules, version = _parse(server)
    refusals: List[str] = []
    (adapter,) = adapter_files.read_adapters([path], alpha, allow_pickle, extras=Extras(refusals=refusals))
    problems = [*refusals, *rules.problems(path, adapter, version)]
    return ServerReport(path, server, rules.rules, not problems, tuple(problems), tuple(rules.notes(adapter, version)))


def _parse(server: str) -> Tuple[Server, Version]:
    """Returns the rules and the version for a server's name."""
    name, _, version = server.partition("==")
    if name not in SERVERS:
        raise ConfigError(
            f"No rules are known for a server {name!r}.{suggestion(name, list(SERVERS))} Name one of "
            f"{', '.join(SERVERS)}."
        )
    rules = SERVERS[name]
    if "==" not in server:
        version = rules.version
    match = _VERSION.match(version)
    if match is None:
        raise ConfigError(f"The version of {server!r} is not a number. Write it as in {name}=={rules.version}.")
    return rules, tuple(map(int, match[0].split(".")))
