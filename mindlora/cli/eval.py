"""mindlora eval: measures a base and its adapters on the same texts, questions and samples."""

import argparse
import dataclasses
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, List, NamedTuple, Sequence, Tuple

from mindlora.cli.engine import (
    Adapters,
    add_answer_options,
    loaded_engine,
    prepare_imports,
    prompt_form,
    read_answer_options,
    remove_log,
    say,
    start,
)
from mindlora.cli.verb import Verb, add_command
from mindlora.core import atomic
from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.interrupts import Interrupts

if TYPE_CHECKING:
    from mindlora.serving.chat_prompt import PromptForm
    from mindlora.serving.engine import Engine
    from mindlora.serving.evaluation.questions import Question, Task
    from mindlora.serving.evaluation.report import EvalReport
    from mindlora.serving.evaluation.statistics import Measure
    from mindlora.serving.evaluation.texts import Model, ScoredText
    from mindlora.serving.request import Sampling

MAX_TOKENS = 256
_SAMPLE_TOKENS = 128
_RULES = ("exact", "number")


class _Inputs(NamedTuple):
    """The contents of a command line's files, each with its path."""

    texts: List[Tuple[str, List[str]]]
    questions: List[Tuple[str, List["Question"]]]
    tasks: List[Tuple[str, List["Task"]]]


def _eval_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "mindlora eval (--config YAML | --model FOLDER) [--adapter A] (--texts | --rows | --choices | --answers) FILE "
        "[more options: --help]"
    )
    parser.description += " docs/eval.md explains everything."
    measured = parser.add_argument_group("what is measured; each may be given repeatedly")
    for option, text in (
        ("texts", "perplexity and bits per byte of the texts in a .txt, or of the column text of rows (.jsonl, ...)"),
        ("rows", "the same for the rows of a MindRecord that mindlora data wrote, such as those of --holdout"),
        ("choices", "accuracy on rows with question, choices and answer"),
        ("answers", "how many answers are right, on rows with question and answer (or instruction and output)"),
    ):
        measured.add_argument(f"--{option}", action="append", default=[], metavar="FILE", help=text)
    measured.add_argument(
        "--forgetting",
        type=int,
        metavar="N",
        help=f"how far the adapters have moved from the base's own answers, on N samples of {_SAMPLE_TOKENS} tokens",
    )
    parser.add_argument("--separator", default="", metavar="TEXT", help="what separates the texts in a .txt")
    parser.add_argument(
        "--overlap", type=int, metavar="N", help="tokens that windows of a long text share (default: half a window)"
    )
    parser.add_argument(
        "--rule",
        choices=_RULES,
        default="exact",
        help="what must be equal for an answer to be right: all of it, or the number after #### (default: %(default)s)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="take the first N texts, rows or questions of each file")
    parser.add_argument("--picture", metavar="FILE", help="draw what was found to a .png; needs matplotlib")
    parser.add_argument(
        "--run", metavar="FOLDER", dest="run_folder", help="add what was found to a training run, for its report.html"
    )
    sizes = {"slots": "the adapters named, at most 8", "max-running": "32", "max-waiting": "1024"}
    add_answer_options(parser, "chat if the tokenizer has a chat template, else none", 0.0, str(MAX_TOKENS), sizes)
    add_command(parser, evaluate)


def evaluate(arguments: argparse.Namespace) -> "EvalReport":
    """Runs mindlora eval."""
    with Interrupts(clean_up=remove_log):
        return _evaluate(arguments)


def _evaluate(arguments: argparse.Namespace) -> "EvalReport":
    from mindlora.serving.evaluation.report import EvalReport, draw_evaluation

    sampling, adapters = read_answer_options(arguments)
    _check(arguments, adapters)
    inputs = _read(arguments)
    with loaded_engine(arguments, adapters, {"slots": max(1, min(8, len(adapters.chosen)))}) as engine:
        form = prompt_form(arguments, engine.tokenizer)
        passages = _passages(arguments, engine, inputs)
        start(engine)
        if inputs.questions or inputs.tasks:
            say(f"questions: {form.title}")
        models: List["Model"] = [None, *adapters.chosen]
        sampling = dataclasses.replace(sampling, max_tokens=arguments.max_tokens or MAX_TOKENS)
        measures = _measure_all(arguments, engine, form, sampling, inputs, passages, models)
        report = EvalReport(engine.model_name, tuple(measures))
    if arguments.picture:
        with atomic.replace_file(arguments.picture) as path:
            draw_evaluation(report, path)
    if arguments.run_folder:
        _add_to_run(arguments.run_folder, report)
    return report


def _check(arguments: argparse.Namespace, adapters: Adapters) -> None:
    """Raises ConfigError for options that are wrong regardless of the files."""
    if not any((arguments.texts, arguments.rows, arguments.choices, arguments.answers, arguments.forgetting)):
        raise ConfigError("There is nothing to measure: give --texts, --rows, --choices, --answers or --forgetting.")
    if arguments.forgetting and not adapters.chosen:
        raise ConfigError("--forgetting compares adapters with their base: name at least one with --adapter.")
    for option in ("forgetting", "overlap", "limit"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option} is {value}: it must be at least 1.")
    if "base" in adapters.chosen:
        raise ConfigError("--adapter: base is what the report calls the base. Write NAME=PATH with another name.")
    if arguments.picture and not arguments.picture.endswith(".png"):
        raise ConfigError(f"--picture {arguments.picture} does not end in .png: name such a file.")
    if arguments.picture and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--picture needs matplotlib: pip install 'mindlora[plot]'.")
    if arguments.run_folder:
        from mindlora.training.report.history import read_history

        read_history(arguments.run_folder)


def _read(arguments: argparse.Namespace) -> _Inputs:
    """Reads the files that do not need the model, so that mistakes in them are reported at once."""
    from mindlora.serving.evaluation.questions import read_questions, read_tasks
    from mindlora.serving.evaluation.texts import read_documents

    separator = arguments.separator.replace("\\n", "\n")
    limit = arguments.limit
    return _Inputs(
        [(path, read_documents(path, separator)[:limit]) for path in arguments.texts],
        [(path, read_questions(path)[:limit]) for path in arguments.choices],
        [(path, read_tasks(path, arguments.rule)[:limit]) for path in arguments.answers],
    )


def _passages(arguments: argparse.Namespace, engine: "Engine", inputs: _Inputs) -> List[Tuple[str, List["ScoredText"]]]:
    """Returns the windows of all texts and the rows of all MindRecords, each with its path."""
    from mindlora.serving.evaluation.texts import passages_of_rows, passages_of_texts

    length = engine.seq_length
    overlap = arguments.overlap or length // 2
    if overlap > length:
        raise ConfigError(f"--overlap is {overlap}, but a window has {length} tokens: give less.")
    made = [(path, passages_of_texts(texts, engine.tokenizer, length, overlap)) for path, texts in inputs.texts]
    made += [(path, passages_of_rows(path, engine.tokenizer, length)[: arguments.limit]) for path in arguments.rows]
    return made


def _measure_all(
    arguments: argparse.Namespace,
    engine: "Engine",
    form: "PromptForm",
    sampling: "Sampling",
    inputs: _Inputs,
    passages: Sequence[Tuple[str, List["ScoredText"]]],
    models: Sequence["Model"],
) -> List["Measure"]:
    from mindlora.serving.evaluation.questions import measure_answers, measure_choices
    from mindlora.serving.evaluation.texts import measure_forgetting, measure_texts

    seed = arguments.seed or 0
    measures: List["Measure"] = []
    for path, texts in passages:
        measures += measure_texts(engine, texts, models, _name(path), seed)
    for path, questions in inputs.questions:
        measures += measure_choices(engine, questions, form, models, _name(path), seed)
    for path, tasks in inputs.tasks:
        measures.append(measure_answers(engine, tasks, form, sampling, arguments.rule, models, _name(path), seed))
    if arguments.forgetting:
        measures.append(measure_forgetting(engine, arguments.forgetting, _SAMPLE_TOKENS, models, seed))
    return measures


def _name(path: str) -> str:
    return os.path.basename(os.path.normpath(path))


def _add_to_run(folder: str, report: "EvalReport") -> None:
    """Appends a record to the history of a completed run, and rewrites its page."""
    from mindlora.training.report.history import HistoryWriter, read_history

    step = read_history(folder).last_step
    history = HistoryWriter(folder, None)
    history.append(step, evaluation={"tables": report.tables(), "verdicts": list(report.verdicts)})
    history.close()
    say(f"added to {folder}: mindlora report {folder} shows it")


def harness() -> int:
    """Runs lm-eval's command line with the model ``mindlora`` in its registry (mindlora-lm-eval)."""
    prepare_imports()
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        print(f"mindlora: error: lm-eval cannot be imported ({error}): pip install 'mindlora[eval]'", file=sys.stderr)
        return 1
    import mindlora.cli.harness  # noqa: F401  registers the model

    try:
        cli_evaluate()
    except LoraError as error:
        print(f"mindlora: error: {error}", file=sys.stderr)
        return 1
    return 0


VERBS = (Verb("eval", "Measure whether adapters are better than their base.", _eval_options),)
