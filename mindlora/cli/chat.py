"""mindlora chat: a conversation with a base and its adapters, in a terminal or line by line from a pipe."""

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Optional, TextIO

from mindlora.cli.answer_options import add_prompt_options, add_sampling_options, read_sampling
from mindlora.cli.engine_options import add_engine_options, add_size_options, read_adapters
from mindlora.cli.terminal import loaded_engine, remove_log, say, start
from mindlora.cli.verb import Verb
from mindlora.common.interrupts import Interrupts
from mindlora.errors import LoraError

if TYPE_CHECKING:
    from mindlora.serving.dialogue import Dialogue
    from mindlora.serving.engine import Engine


def _chat_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "mindlora chat --config YAML [--adapter A] [more options: --help]"
    parser.description += (
        " The first --adapter answers first; /help lists commands. docs/generate.md explains everything."
    )
    add_engine_options(parser)
    add_prompt_options(parser, "chat")
    add_sampling_options(parser, 0.7, "as many as the window has room for")
    add_size_options(parser, {"slots": "2", "max-running": "2", "max-waiting": "1024"})
    parser.add_argument("--verbose", action="store_true", help="print MindFormers' log on standard error")
    parser.set_defaults(run=chat)


def chat(arguments: argparse.Namespace) -> None:
    """Runs mindlora chat, until /exit or the end of standard input."""
    with Interrupts(clean_up=remove_log) as interrupts:
        _run(arguments, interrupts)


def _run(arguments: argparse.Namespace, interrupts: Interrupts) -> None:
    from mindlora.serving.prompt_form import check_prompt_options, choose_prompt_form

    sampling = read_sampling(arguments)
    check_prompt_options(arguments.template, arguments.chat_template)
    adapters = read_adapters(arguments)
    with loaded_engine(arguments, adapters, {"slots": 2, "max_running": 2}) as engine:
        from mindlora.serving.dialogue import Dialogue

        form = choose_prompt_form(engine.tokenizer, arguments.template, arguments.chat_template, chat=True)
        first = adapters.chosen[0] if adapters.chosen else None
        dialogue = Dialogue(engine, form, sampling, first, arguments.system, arguments.max_tokens)
        start(engine)
        say(f"prompts: {form.title}; {first or 'the base'} answers; /help lists the commands")
        if not form.takes_conversations:
            say("such a prompt holds one message: earlier ones are not seen")
        if sys.stdin.isatty():
            interrupts.hand_to(lambda: None)
        _Chat(engine, dialogue, arguments.stdout, interrupts).run()


class _Chat:
    """The loop: reads a line, answers it.

    Args:
        engine (Engine): Started.
        dialogue (Dialogue): With it.
        screen (file): Where answers are written.
        interrupts (Interrupts): Ctrl-C.
    """

    def __init__(self, engine: "Engine", dialogue: "Dialogue", screen: TextIO, interrupts: Interrupts):
        from mindlora.cli.chat_commands import Commands

        self._dialogue, self._screen, self._interrupts = dialogue, screen, interrupts
        self._commands = Commands(dialogue, engine, self._answer_again)

    def run(self) -> None:
        """Answers until the user leaves."""
        from mindlora.cli.chat_commands import Leave

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
            except Leave:
                return
            except LoraError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)

    def _read(self) -> Optional[str]:
        """Returns the next line, None at the end of input; Ctrl-C discards what was typed."""
        if not sys.stdin.isatty():
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        try:
            # Once it is imported, readline edits the line where standard output is the terminal.
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


VERBS = (Verb("chat", "Chat with a base and its adapters.", _chat_options),)
