"""Would a server take an adapter as it is: what is known of each server and its versions, and from where."""

import dataclasses
import re
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.tables import fields
from mindlora.core.text import suggestion
from mindlora.files.adapters import engine_rules, vllm_rules
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects.peft_config import Extras
from mindlora.files.adapters.vllm_rules import Version

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
        "0.32.0",
        f"{_VLLM} of 0.32.0, of main earlier in 2026 and of 0.11.0; stacked experts: SkyRL#1852",
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
        engine_rules.mindie_problems,
        engine_rules.mindie_notes,
    ),
    "llama.cpp": Server(
        "0",
        "src/llama-adapter.cpp of 2026; files that mindlora wrote were loaded by it",
        engine_rules.llama_cpp_problems,
        engine_rules.llama_cpp_notes,
    ),
    "ollama": Server(
        "0.34.1", "ollama#14969 (merged in September 2026)", engine_rules.ollama_problems, engine_rules.ollama_notes
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
