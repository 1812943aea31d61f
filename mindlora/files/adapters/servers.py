"""Would a server take an adapter as it is: what is known of each server and its versions, and from where."""

import dataclasses
import os
import re
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.pair_shapes import LINEAR
from mindlora.core.text import fields, listed, suggestion
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import llama_cpp, vllm_rules
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import peft
from mindlora.files.adapters.dialects.peft_config import Extras
from mindlora.files.adapters.vllm_rules import Version

# What MindIE, llama.cpp and Ollama take of an adapter, version by version.

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


_VERSION = re.compile(r"\d+(\.\d+)*")


class Server(NamedTuple):
    """A server whose rules are known.

    Attributes:
        version (str): The newest one whose rules were read, which is meant where a user names none.
        rules (str): Where they were read.
        problems (callable): Path, adapter and version -> what the server would refuse or compute wrongly.
        notes (callable): Adapter and version -> what it must be told, or have.
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
        vllm_rules.vllm_problems,
        vllm_rules.vllm_notes,
    ),
    "vllm-ascend": Server(
        "0.23.0",
        f"{_VLLM} of the vLLM of its version, with which vllm-ascend loads adapters; its issues #16586, #6143",
        vllm_rules.vllm_problems,
        vllm_rules.ascend_notes,
    ),
    "vllm-mindspore": Server(
        "0.5.1",
        "vLLM 0.11.0, which vllm-mindspore 0.5.1 is built on",
        vllm_rules.mindspore_problems,
        vllm_rules.mindspore_notes,
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
    """Returns the rules and the version that a user means."""
    name, _, version = server.partition("==")
    if name not in SERVERS:
        raise ConfigError(
            f"No rules are known of a server {name!r}.{suggestion(name, list(SERVERS))} Name one of "
            f"{', '.join(SERVERS)}."
        )
    rules = SERVERS[name]
    if "==" not in server:
        version = rules.version
    match = _VERSION.match(version)
    if match is None:
        raise ConfigError(f"The version of {server!r} is not a number. Write it as in {name}=={rules.version}.")
    return rules, tuple(map(int, match[0].split(".")))
