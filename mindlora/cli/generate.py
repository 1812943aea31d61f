"""mindlora generate: answers of a base and its adapters to prompts."""

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Tuple

from mindlora.cli.engine import (
    add_answer_options,
    loaded_engine,
    prompt_form,
    read_answer_options,
    remove_log,
    say,
    start,
)
from mindlora.cli.verb import Verb, add_command
from mindlora.core.errors import ConfigError, DataError, RequestError
from mindlora.core.interrupts import Interrupts

if TYPE_CHECKING:
    from mindlora.serving.answer import Answer, Figures
    from mindlora.serving.chat_prompt import PromptForm
    from mindlora.serving.engine import Engine
    from mindlora.serving.request import Sampling

MAX_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class GenerateReport:
    """The answers to all prompts.

    Attributes:
        template (str): The form of the prompts.
        answers (tuple of Answer): In the order of the prompts; for each prompt the base first, if it is asked, then the
            adapters as they were named.
        figures (Figures): Their costs.
    """

    model: str
    template: str
    answers: Tuple["Answer", ...]
    figures: "Figures"

    @property
    def exit_code(self) -> int:
        """1 if there is a prompt without an answer."""
        return int(any(answer.error for answer in self.answers))

    def __str__(self) -> str:
        if len(self.answers) == 1:
            return _told(self.answers[0])
        adapters = len({answer.adapter for answer in self.answers})
        lines: List[str] = []
        for place, answer in enumerate(self.answers):
            if place % adapters == 0:
                lines += ["", f"> {answer.prompt}"] if lines else [f"> {answer.prompt}"]
            mark = f"[{answer.adapter or 'base'}] " if adapters > 1 else ""
            lines.append(mark + _told(answer))
        return "\n".join(lines)


def _told(answer):
    return f"{answer.text}(no answer: {answer.error})" if answer.error else answer.text


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "mindlora generate (--config YAML | --model FOLDER) [--adapter A] [--prompt TEXT] [more options: --help]"
    )
    parser.description += " docs/generate.md explains everything."
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="what to answer; may be given repeatedly"
    )
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="prompts, one a line, or a list of texts in a file that ends in .json; - for lines from standard input. "
        "Without --prompt and --prompts-file, all of standard input is one prompt",
    )
    parser.add_argument("--base", action="store_true", help="let the base answer too, to compare with --adapter")
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities, of the N likeliest tokens too"
    )
    max_tokens = f"{MAX_TOKENS}, or as many as the window has room for"
    sizes = {"slots": "the adapters named", "max-running": "all requests, at most 32", "max-waiting": "all requests"}
    add_answer_options(parser, "chat if the tokenizer has a chat template, else none", 0.0, max_tokens, sizes)
    add_command(parser, generate)


def generate(arguments: argparse.Namespace) -> Optional[GenerateReport]:
    """Runs mindlora generate; returns None if the answer was printed as it arrived."""
    with Interrupts(clean_up=remove_log):
        return _generate(arguments)


def _generate(arguments: argparse.Namespace) -> Optional[GenerateReport]:
    if arguments.logprobs is not None and not arguments.json:
        raise ConfigError("--logprobs is printed in JSON alone: add --json.")
    sampling, adapters = read_answer_options(arguments)
    sampling = dataclasses.replace(sampling, logprobs=arguments.logprobs)
    prompts = read_prompts(arguments.prompt, arguments.prompts_file)
    asked: List[Optional[str]] = [None, *adapters.chosen] if arguments.base else [*adapters.chosen] or [None]
    count = len(prompts) * len(asked)
    defaults = {"slots": max(1, min(8, len(adapters.chosen))), "max_running": min(32, count), "max_waiting": count}
    with loaded_engine(arguments, adapters, defaults) as engine:
        from mindlora.serving.network import takes_few

        form = prompt_form(arguments, engine.tokenizer)
        requests = []
        for number, prompt in enumerate(prompts, 1):
            which = f"Prompt {number} of {len(prompts)}"
            requests.append(_request(arguments, engine, form, sampling, which, prompt))
        # All prompts may be read in one step.
        tokens = len(asked) * sum(len(prompt) for prompt, _ in requests)
        many_tokens = not takes_few(tokens, decodes=False)
        start(engine, many_tokens=many_tokens, scores=False, adapters=bool(adapters.chosen))
        say(f"prompts: {form.title}")
        live = count == 1 and not arguments.json and arguments.stdout.isatty()
        report = _answered(engine, form.title, prompts, requests, asked, arguments.stdout if live else None)
    if live and not report.exit_code:
        print(file=arguments.stdout)
    say(str(report.figures))
    return None if live and not report.exit_code else report


def _request(
    arguments: argparse.Namespace, engine: "Engine", form: "PromptForm", sampling: "Sampling", which: str, prompt: str
) -> Tuple[List[int], "Sampling"]:
    """Returns the tokens of a prompt and its sampling, which fit into the window."""
    tokens = form.tokens(prompt, system=arguments.system)
    room = engine.seq_length - len(tokens)
    if room < (arguments.max_tokens or 1):
        raise RequestError(
            f"{which} has {len(tokens)} tokens, but the model takes {engine.seq_length}, the answer included: make it "
            "shorter, or lower --max-tokens."
        )
    max_tokens = min(MAX_TOKENS, room) if arguments.max_tokens is None else arguments.max_tokens
    return tokens, dataclasses.replace(sampling, max_tokens=max_tokens, stop_tokens=tuple(form.prompt.ends))


def _answered(
    engine: "Engine",
    title: str,
    prompts: Sequence[str],
    requests: Sequence[Tuple[List[int], "Sampling"]],
    asked: Sequence[Optional[str]],
    live: Any,
) -> GenerateReport:
    """Submits everything at once and waits for it; writes the text to ``live`` as it arrives, unless that is None."""
    from mindlora.serving.answer import await_answer, figures_of
    from mindlora.serving.detokenizer import TextDecoder, TokenTexts

    streams = [
        (prompt, engine.submit(tokens, sampling, adapter))
        for prompt, (tokens, sampling) in zip(prompts, requests)
        for adapter in asked
    ]

    def write(text):
        print(text, end="", file=live, flush=True)

    texts = TokenTexts(TextDecoder(engine.tokenizer), engine.tokenizer)
    answers = [await_answer(stream, prompt, texts, None if live is None else write) for prompt, stream in streams]
    figures = figures_of(zip(answers, (stream for _, stream in streams)))
    return GenerateReport(engine.model_name, title, tuple(answers), figures)


def read_prompts(texts: Sequence[str], path: Optional[str]) -> List[str]:
    r"""Returns the prompts of --prompt, unchanged, and of --prompts-file, or those on standard input.

    A file has one prompt per line, or, if it ends in .json, a list of strings; "-" stands for lines from standard
    input. Raises DataError for other contents, and ConfigError if there is no prompt.
    """
    from mindlora.data.sources import read_text

    prompts = list(texts)
    if path is not None and path.endswith(".json"):
        prompts += _json_list(path, read_text(path))
    elif path is not None:
        text = sys.stdin.read() if path == "-" else read_text(path)
        prompts += [line for line in text.splitlines() if line.strip()]
    elif not prompts and not sys.stdin.isatty():
        prompts = [sys.stdin.read().rstrip("\n")]
    if not any(prompt.strip() for prompt in prompts):
        raise ConfigError("There is no prompt: give --prompt or --prompts-file, or pipe a text in.")
    return prompts


def _json_list(path, text):
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}. Write a list of texts, one for each prompt.") from error
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise DataError(f"{path} must hold a JSON list of texts, one for each prompt.")
    return entries


VERBS = (Verb("generate", "Answer prompts with a base and its adapters.", _generate_options),)
