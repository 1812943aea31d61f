"""mindlora chat: a conversation with a base and its adapters, in a terminal or line by line from a pipe."""

import argparse
import contextlib
import dataclasses
import difflib
import sys
from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Optional, TextIO

from mindlora.cli.engine import (
    add_answer_options,
    loaded_engine,
    prompt_form,
    read_answer_options,
    remove_log,
    say,
    start,
)
from mindlora.cli.verb import Verb
from mindlora.core.errors import AdapterNotFoundError, LoraError, RequestError
from mindlora.core.interrupts import Interrupts
from mindlora.core.text import near_word

if TYPE_CHECKING:
    from mindlora.serving.dialogue import Dialogue
    from mindlora.serving.engine import Engine

# Maximum number of names that /adapters prints.
_SHOWN = 50


def _chat_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "mindlora chat (--config YAML | --model FOLDER) [--adapter A] [more options: --help]"
    parser.description += (
        " The first --adapter answers first; /help lists commands. docs/generate.md explains everything."
    )
    sizes = {"slots": "2", "max-running": "2", "max-waiting": "1024"}
    add_answer_options(parser, "chat", 0.7, "as many as the window has room for", sizes)
    parser.set_defaults(run=chat)


def chat(arguments: argparse.Namespace) -> None:
    """Runs mindlora chat, until /exit or the end of standard input."""
    with Interrupts(clean_up=remove_log) as interrupts:
        _run(arguments, interrupts)


def _run(arguments: argparse.Namespace, interrupts: Interrupts) -> None:
    sampling, adapters = read_answer_options(arguments)
    with loaded_engine(arguments, adapters, {"slots": 2, "max_running": 2}) as engine:
        from mindlora.serving.dialogue import Dialogue

        form = prompt_form(arguments, engine.tokenizer, chat=True)
        first = adapters.chosen[0] if adapters.chosen else None
        dialogue = Dialogue(engine, form, sampling, first, arguments.system, arguments.max_tokens)
        start(engine, scores=False, adapters=bool(adapters.registry.names()))
        say(f"prompts: {form.title}; {first or 'the base'} answers; /help lists the commands")
        if not form.takes_conversations:
            say("such a prompt holds one message: earlier ones are not seen")
        if sys.stdin.isatty():
            interrupts.hand_to(lambda: None)
        _Chat(engine, dialogue, arguments.stdout, interrupts).run()


class _Chat:
    """The loop: reads a line, answers it on ``screen``."""

    def __init__(self, engine: "Engine", dialogue: "Dialogue", screen: TextIO, interrupts: Interrupts):
        self._dialogue = dialogue
        self._screen = screen
        self._interrupts = interrupts
        self._commands = _Commands(dialogue, engine, self._answer_again)

    def run(self) -> None:
        """Answers until the user leaves."""
        while True:
            try:
                line = self._read()
                if line is None:
                    return
                if line.startswith("/"):
                    told = self._commands.run(line)
                    if told:
                        print(told, file=sys.stderr, flush=True)
                elif line.strip():
                    self._answer(line.strip())
            except _Leave:
                return
            except LoraError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)

    def _read(self) -> Optional[str]:
        """Returns the next line, None at the end of input; Ctrl-C discards the typed text."""
        if not sys.stdin.isatty():
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        try:
            # Once imported, readline edits the line if standard output is the terminal.
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
            with contextlib.redirect_stdout(self._screen), self._interrupts.raising():
                return input(f"{self._dialogue.adapter or 'base'}> ")
        except EOFError:
            print(file=self._screen)
            return None
        except KeyboardInterrupt:
            print(file=self._screen)
            return ""

    def _answer(self, question: str) -> None:
        stream = self._dialogue.ask(question)
        if self._dialogue.dropped:
            many = self._dialogue.dropped > 1
            turns = f"{self._dialogue.dropped} turns no longer fit" if many else "turn no longer fits"
            print(
                f"(the oldest {turns} into the window, and {'are' if many else 'is'} forgotten)",
                file=sys.stderr,
                flush=True,
            )
        texts = []
        try:
            with self._interrupts.raising():
                for piece in stream:
                    texts.append(piece.text)
                    print(piece.text, end="", file=self._screen, flush=True)
        except KeyboardInterrupt:
            stream.cancel()
        finally:
            print(file=self._screen, flush=True)
        self._dialogue.take(question, "".join(texts))

    def _answer_again(self) -> None:
        self._answer(self._dialogue.take_back())


class _Leave(Exception):
    """Raised to end the chat."""


class _Command(NamedTuple):
    """A command: its function, and its lines in /help.

    ``run`` takes the argument, "" if there is none, and returns the reply to the user.
    """

    run: Callable[[str], str]
    argument: str
    help: str


class _Commands:
    """The commands of a chat; ``answer_again`` answers the last question again."""

    def __init__(self, dialogue: "Dialogue", engine: "Engine", answer_again: Callable[[], None]):
        self._dialogue = dialogue
        self._engine = engine
        self._answer_again = answer_again
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
        """Runs a line that begins with a slash and returns the reply to the user, which may be "".

        Raises _Leave to end the chat, and LoraError for unknown commands and failures.
        """
        name, _, argument = line[1:].strip().partition(" ")
        command = self._table.get(name)
        if command is None:
            near = near_word(name, self._table)
            meant = f" Did you mean /{near}?" if near else ""
            raise RequestError(
                f"There is no command /{name}.{meant} Type /help for all, or a space before the slash to send it."
            )
        if argument.strip() and not command.argument:
            raise RequestError(f"/{name} takes nothing behind it, and got {argument.strip()!r}.")
        return command.run(argument.strip())

    def _adapter(self, name: str) -> str:
        if not name:
            return f"answers come from {self.speaker}"
        if name not in self._engine.adapters.registry:
            near = difflib.get_close_matches(name, self._engine.adapters.registry.names(), n=3)
            meant = f" Did you mean {', '.join(near)}?" if near else ""
            raise AdapterNotFoundError(f"There is no adapter called {name}.{meant} Type /adapters for a list.")
        self._engine.adapters.memory.load(name)
        self._dialogue.adapter = self._last_adapter = name
        return f"answers come from {name}"

    def _base(self, _: str) -> str:
        dialogue = self._dialogue
        if dialogue.adapter is None and self._last_adapter is None:
            raise RequestError("Answers come from the base already: choose an adapter with /adapter NAME.")
        dialogue.adapter = None if dialogue.adapter else self._last_adapter
        return f"answers come from {self.speaker}"

    def _adapters(self, _: str) -> str:
        names = self._engine.adapters.registry.names()
        if not names:
            return "there are no adapters: start with --adapter PATH or --adapters DIR"
        lines: List[str] = [f"{'*' if name == self._dialogue.adapter else ' '} {name}" for name in names[:_SHOWN]]
        return "\n".join(lines + ([f"  and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []))

    def _again(self, _: str) -> str:
        self._answer_again()
        return ""

    def _system(self, text: str) -> str:
        if text and not self._dialogue.can_remember:
            raise RequestError(
                "A system message needs a chat template, but this chat has none. Start it with --chat-template FILE."
            )
        self._dialogue.system = text or None
        return "the system message is set" if text else "there is no system message"

    def _temperature(self, text: str) -> str:
        from mindlora.serving.sampling import check_sampling

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
        raise _Leave

    @property
    def speaker(self) -> str:
        """A description of who answers."""
        return self._dialogue.adapter or "the base"


def _number(text, kind, name):
    try:
        return kind(text)
    except ValueError as error:
        expected = "a whole number" if kind is int else "a number"
        raise RequestError(f"/{name} takes {expected}, and got {text!r}.") from error


VERBS = (Verb("chat", "Chat with a base and its adapters.", _chat_options),)
