"""The commands of a chat: lines that begin with a slash."""

import dataclasses
import difflib
from typing import Callable, Dict, List, NamedTuple, Optional

from mindlora.errors import AdapterNotFoundError, RequestError
from mindlora.serving.dialogue import Dialogue
from mindlora.serving.engine import Engine
from mindlora.serving.sampling import check_sampling

# Names that /adapters prints.
_SHOWN = 50


class Leave(Exception):
    """The chat is to end."""


class _Command(NamedTuple):
    """A command: what it does with its argument, and the lines of /help.

    ``run`` takes the argument, "" if there is none, and returns what the user is told.
    """

    run: Callable[[str], str]
    argument: str
    help: str


class Commands:
    """What a user can do in a chat besides talking.

    Args:
        dialogue (Dialogue): The chat.
        engine (Engine): Its engine.
        answer_again (callable): Has the last question answered once more.
    """

    def __init__(self, dialogue: Dialogue, engine: Engine, answer_again: Callable[[], None]):
        self._dialogue, self._engine, self._answer_again = dialogue, engine, answer_again
        self._last_adapter = dialogue.adapter
        self._table: Dict[str, _Command] = {
            "adapter": _Command(self._adapter, "NAME", "answers come from this adapter; without NAME: who answers now"),
            "base": _Command(self._base, "", "answers come from the base, or from the adapter again"),
            "adapters": _Command(self._adapters, "", "list the adapters"),
            "again": _Command(self._again, "", "answer the last message once more"),
            "system": _Command(self._system, "TEXT", "set the system message; without TEXT: none"),
            "temperature": _Command(self._temperature, "X", "0 takes the likeliest token each time"),
            "seed": _Command(self._seed, "N", "seed of the answers from here on; without N: a new one for each answer"),
            "reset": _Command(self._reset, "", "forget what was said"),
            "help": _Command(self._help, "", "list these commands"),
            "exit": _Command(self._exit, "", "leave (so does Ctrl-D; Ctrl-C stops an answer)"),
        }

    def run(self, line: str) -> str:
        """Runs a line that begins with a slash and returns what the user is told; "" for nothing.

        Raises:
            Leave: The chat is to end.
            LoraError: There is no such command, or it cannot be done.
        """
        name, _, argument = line[1:].strip().partition(" ")
        command = self._table.get(name)
        if command is None:
            near = difflib.get_close_matches(name, self._table, n=1)
            meant = f" Did you mean /{near[0]}?" if near else ""
            raise RequestError(
                f"There is no command /{name}.{meant} /help lists all; a space before the slash sends it."
            )
        if argument.strip() and not command.argument:
            raise RequestError(f"/{name} takes nothing behind it, and got {argument.strip()!r}.")
        return command.run(argument.strip())

    def _adapter(self, name: str) -> str:
        if not name:
            return f"answers come from {self.speaker}"
        if name not in self._engine.adapters.registry:
            near = difflib.get_close_matches(name, self._engine.adapters.names(), n=3)
            meant = f" Did you mean {', '.join(near)}?" if near else ""
            raise AdapterNotFoundError(f"There is no adapter called {name}.{meant} /adapters lists them.")
        self._engine.adapters.memory.load(name)
        self._dialogue.adapter = self._last_adapter = name
        return f"answers come from {name}"

    def _base(self, _: str) -> str:
        dialogue = self._dialogue
        if dialogue.adapter is None and self._last_adapter is None:
            raise RequestError("Answers come from the base already: /adapter NAME chooses an adapter.")
        dialogue.adapter = None if dialogue.adapter else self._last_adapter
        return f"answers come from {self.speaker}"

    def _adapters(self, _: str) -> str:
        names = self._engine.adapters.names()
        if not names:
            return "there are no adapters: start with --adapter PATH or --adapters DIR"
        lines: List[str] = [f"{'*' if name == self._dialogue.adapter else ' '} {name}" for name in names[:_SHOWN]]
        return "\n".join(lines + ([f"  and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []))

    def _again(self, _: str) -> str:
        self._answer_again()
        return ""

    def _system(self, text: str) -> str:
        if text and not self._dialogue.can_remember:
            raise RequestError("A system message needs a chat template, and this chat has none: start with one.")
        self._dialogue.system = text or None
        return "the system message is set" if text else "there is no system message"

    def _temperature(self, text: str) -> str:
        if text:
            changed = dataclasses.replace(self._dialogue.sampling, temperature=_number(text, float, "temperature"))
            check_sampling(changed)
            self._dialogue.sampling = changed
        return f"temperature is {self._dialogue.sampling.temperature:g}"

    def _seed(self, text: str) -> str:
        seed: Optional[int] = _number(text, int, "seed") if text else None
        self._dialogue.set_seed(seed)
        return "each answer draws a new seed" if seed is None else f"the next answer has seed {seed}, later ones add 1"

    def _reset(self, _: str) -> str:
        self._dialogue.reset()
        return "what was said is forgotten"

    def _help(self, _: str) -> str:
        usages = {f"/{name} {command.argument}".strip(): command.help for name, command in self._table.items()}
        width = max(map(len, usages))
        return "\n".join(f"{usage:{width}}  {text}" for usage, text in usages.items())

    def _exit(self, _: str) -> str:
        raise Leave

    @property
    def speaker(self) -> str:
        """Who answers, in words."""
        return self._dialogue.adapter or "the base"


def _number(text, kind, name):
    try:
        return kind(text)
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise RequestError(f"/{name} takes {wanted}, and got {text!r}.") from error
