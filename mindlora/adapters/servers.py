"""Would a server take an adapter as it is: the rules of vLLM's loader, and what to do where one is broken."""

import dataclasses
import math
import os
import re
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

from mindlora.adapters import files as adapter_files
from mindlora.adapters.adapter import Adapter
from mindlora.adapters.dialects import peft
from mindlora.adapters.dialects.peft_config import Extras, json_object
from mindlora.common.tables import fields, number
from mindlora.common.text import collapse_numbers, listed, suggestion
from mindlora.errors import ConfigError
from mindlora.formats.safetensors_file import TensorFile
from mindlora.models import names
from mindlora.numerics.pair_shapes import EMBEDDING, LINEAR

# The values that vLLM takes for --max-lora-rank; 16 is its default.
_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_REQUIRED = ("r", "lora_alpha", "target_modules")
# The weights of an adapted embedding and head are left out.
_SERVED_KEY = re.compile(r"\.lora_([AB]\.weight|embedding_[AB])$|\.(embed_tokens|lm_head)\.base_layer\.weight$")
_MERGE = "Merge it into the base (mindlora merge), and serve that."


class Server(NamedTuple):
    """A server whose rules are known, and where they were read; ``notes`` say what else must hold."""

    rules: str
    experts: bool
    notes: Tuple[str, ...] = ()


_VLLM = "vllm/lora/peft_helper.py and lora_model.py of vLLM's main branch in 2026 (0.11.0 differs in experts)"
SERVERS: Dict[str, Server] = {
    "vllm": Server(_VLLM, True),
    "vllm-ascend": Server(f"{_VLLM}, with which vllm-ascend loads adapters", True),
    "vllm-mindspore": Server(
        "vLLM 0.11.0, which vllm-mindspore 0.5.1 is built on",
        False,
        ("vllm-mindspore 0.5.1 serves LoRA on Qwen2 alone, and needs --enforce-eager.",),
    ),
}


@dataclasses.dataclass(frozen=True)
class ServerReport:
    """Whether a server would take an adapter.

    Attributes:
        rules (str): Where its rules were read. The server itself was not run.
        accepted (bool): Whether it would take the adapter as it is, and compute what was trained.
        problems (tuple of str): What it would refuse or compute wrongly, and what to do, a sentence or two each.
        notes (tuple of str): What the server must be told, or have.
    """

    path: str
    server: str
    rules: str
    accepted: bool
    problems: Tuple[str, ...]
    notes: Tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """That of the command: 0 if the adapter would be served as it is."""
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
    """Reports whether a server ("vllm", "vllm-ascend" or "vllm-mindspore") would take an adapter as it is.

    ``path`` and ``allow_pickle`` are as for adapter_files.read; ``alpha`` is lora_alpha, if the file does not state it.
    Raises ConfigError if the server is not known, and AdapterError if there is no usable adapter.
    """
    if server not in SERVERS:
        raise ConfigError(f"No rules are known of a server {server!r}.{suggestion(server, list(SERVERS))}")
    rules = SERVERS[server]
    refusals: List[str] = []
    (adapter,) = adapter_files.read_adapters([path], alpha, allow_pickle, extras=Extras(refusals=refusals))
    problems = [*refusals, *_problems(path, adapter, rules)]
    return ServerReport(path, server, rules.rules, not problems, tuple(problems), (*_notes(adapter), *rules.notes))


def _problems(path: str, adapter: Adapter, rules: Server) -> Iterator[str]:
    config_file = os.path.join(path, peft.CONFIG_FILE)
    if adapter.dialect != peft.Peft.name or not os.path.isfile(config_file):
        yield (
            f"It is in the form of {adapter.dialect}, and servers read PEFT's folder. Write that: mindlora convert "
            f"{path} served --to peft"
        )
        config: dict = {}
    else:
        config = json_object(config_file)
    if not adapter.variant.is_plain:
        yield f"It is a {adapter.variant.name} adapter ({adapter.variant.field}), which is refused. {_MERGE}"
    if config.get("modules_to_save") or (not config and adapter.saved_modules):
        yield f"It has modules_to_save ({listed(adapter.saved_modules)}), which are refused. {_MERGE}"
    if config.get("bias", "none") != "none":
        yield (
            f"Its configuration says bias {config['bias']!r}, which is refused, though the file holds none. Write it "
            f"again: mindlora convert {path} served --to peft"
        )
    missing = [field for field in _REQUIRED if config and field not in config]
    if missing:
        yield (
            f"Its configuration lacks {', '.join(missing)}, without which it is refused. Write it again: mindlora "
            f"convert {path} served --to peft"
        )
    yield from _key_problems(path, adapter, config)
    yield from _cell_problems(adapter, rules)
    yield from _scale_problems(adapter, config)


def _key_problems(path: str, adapter: Adapter, config: dict) -> Iterator[str]:
    """Yields what is wrong with the keys of PEFT's file; those that other problems are about are left out."""
    weights = os.path.join(path, peft.WEIGHTS_FILE)
    if not config or not os.path.isfile(weights):
        return
    with TensorFile(weights) as file:
        odd = [key for key in file.tensors if not _SERVED_KEY.search(key)]
    if any(_SERVED_KEY.search(peft.saved_key(key)) for key in odd):
        yield (
            f"Its keys have the adapter's name in them ({odd[0]}), which is refused. Write it again: mindlora convert "
            f"{path} served --to peft"
        )
    elif odd and adapter.saved_modules and not config.get("modules_to_save"):
        yield f"It holds weights besides A and B ({listed(adapter.saved_modules)}), which are refused. {_MERGE}"


def _cell_problems(adapter: Adapter, rules: Server) -> Iterator[str]:
    odd = [path for path in adapter.paths if adapter.layout(path) not in (LINEAR, EMBEDDING) and "experts" not in path]
    if odd:
        yield f"It adapts cells that are neither linear nor an embedding: {listed(odd)}. {_MERGE}"
    experts = [path for path in adapter.paths if "experts" in path.split(".")]
    if experts and not rules.experts:
        yield f"It adapts routed experts, which are refused: {listed(experts)}. {_MERGE}"


def _scale_problems(adapter: Adapter, config: dict) -> Iterator[str]:
    ranks = sorted({adapter.rank(path) for path in adapter.paths})
    if ranks[-1] > _MAX_RANKS[-1]:
        yield (
            f"Its rank is {ranks[-1]}, and at most {_MAX_RANKS[-1]} is served. Make it smaller: mindlora resize "
            f"ADAPTER served --rank {_MAX_RANKS[-1]}"
        )
    # vLLM computes one scale, from the r and lora_alpha of the configuration, and reads neither pattern.
    if not adapter.alphas:
        yield "It does not state lora_alpha. Give it with --alpha, and convert the adapter with it."
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
            f"{number(used)}, without a word. Write it with one scale: mindlora combine served --method cat --adapter "
            "ADAPTER 1"
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
