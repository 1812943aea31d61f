"""mindlora classify: labels of texts and words by classifiers, and scores by reward models."""

import argparse
import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Dict, List, Optional, Tuple

from mindlora.cli.engine import Adapters, add_engine_options, loaded_engine, read_adapters, remove_log, start
from mindlora.cli.verb import Verb, add_command
from mindlora.core import atomic
from mindlora.core.errors import ConfigError
from mindlora.core.interrupts import Interrupts

if TYPE_CHECKING:
    from mindlora.serving.engine import Engine
    from mindlora.serving.score_head import ScoreHead
    from mindlora.training.classifier.classification import Judgment, LabelMeasures, Text


@dataclasses.dataclass(frozen=True)
class ClassifyReport:
    """The adapters' labels of texts: text by text, and for each, adapter by adapter.

    Attributes:
        measures (tuple of LabelMeasures): The adapters' measures, if texts have labels.
    """

    model: str
    judgments: Tuple["Judgment", ...]
    measures: Tuple["LabelMeasures", ...]

    def __str__(self) -> str:
        several = len({judgment.adapter for judgment in self.judgments}) > 1
        lines: List[str] = []
        for judgment in self.judgments:
            mark = f"[{judgment.adapter}] " if several else ""
            lines += [mark + line for line in _lines(judgment)]
        for measure in self.measures:
            mark = f"[{measure.adapter}] " if several else ""
            lines.append(f"{mark}accuracy {measure.accuracy:.4f}, F1 {measure.f1:.4f} of {measure.labels} labels")
        return "\n".join(lines)


def _lines(judgment: "Judgment") -> List[str]:
    """Returns lines of label and text, separated by tabs; each word has its own line."""
    if judgment.words is not None:
        return [*(f"{word.label}\t{word.probabilities[word.label]:.4f}\t{word.word}" for word in judgment.words), ""]
    text = " ".join(judgment.text.split())
    if judgment.label is None:
        return [f"{judgment.score:.6f}\t{text}"]
    return [f"{judgment.label}\t{(judgment.probabilities or {})[judgment.label]:.4f}\t{text}"]


def _classify_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "mindlora classify (--config YAML | --model FOLDER) --adapter A [--text TEXT] [more options: --help]"
    parser.description += " docs/classifiers.md explains everything."
    parser.add_argument(
        "--text", action="append", default=[], metavar="TEXT", help="what to label; may be given repeatedly"
    )
    parser.add_argument(
        "--input",
        metavar="FILE",
        help="rows as for mindlora data labels: text, or tokens; where they have labels (label, tags), accuracy and F1 "
        "are printed. Without --text and --input, each line of standard input is a text",
    )
    parser.add_argument(
        "--labels",
        metavar="NAMES",
        help="names of the labels in the order of their numbers: A,B or the X-labels.json of mindlora data labels "
        "(default: labels.json in the adapter's folder, or LABEL_0, LABEL_1, ...)",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write the results to a .jsonl, a line for each text and adapter"
    )
    sizes = {"slots": "the adapters named, at most 8", "max-running": "32", "max-waiting": "1024"}
    add_engine_options(parser, sizes)
    add_command(parser, classify)


def classify(arguments: argparse.Namespace) -> Optional[ClassifyReport]:
    """Runs mindlora classify; returns None if everything was written to --output."""
    with Interrupts(clean_up=remove_log):
        return _classify(arguments)


def _classify(arguments: argparse.Namespace) -> Optional[ClassifyReport]:
    from mindlora.training.classifier import classification

    adapters = read_adapters(arguments)
    if not adapters.chosen:
        raise ConfigError("No adapter is named: give that of a classifier with --adapter.")
    if arguments.output and not arguments.output.endswith(".jsonl"):
        raise ConfigError(f"--output {arguments.output} does not end in .jsonl: name such a file.")
    names = _read_names(arguments.labels)
    texts = _read_texts(arguments)
    with loaded_engine(arguments, adapters, {"slots": max(1, min(8, len(adapters.chosen)))}) as engine:
        heads = _heads(engine, adapters, names)
        questions = classification.questions_of(engine, texts, heads)
        start(engine)
        judgments, measures = classification.classify(engine, questions, heads)
        report = ClassifyReport(engine.model_name, tuple(judgments), tuple(measures))
    if arguments.output:
        with atomic.replace_file(arguments.output) as written, open(written, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(judgment.row, ensure_ascii=False) + "\n" for judgment in judgments)
        return dataclasses.replace(report, judgments=()) if measures else None
    return report


def _read_names(labels: Optional[str]) -> Optional[List[str]]:
    """Returns the names of --labels, a list or a file; None if it was not given."""
    from mindlora.data.sources import read_text
    from mindlora.serving.score_head import read_names

    if labels is None:
        return None
    if labels.endswith(".json") or os.path.exists(labels):
        return read_names(read_text(labels), labels)
    return labels.split(",")


def _read_texts(arguments: argparse.Namespace) -> List["Text"]:
    """Returns the texts of --text and --input, or the lines of standard input.

    Raises DataError if a file or a row cannot be used, and ConfigError if there is no text.
    """
    from mindlora.training.classifier.classification import read_texts, text_of

    texts = [text_of(f"--text {number}", {"text": text}) for number, text in enumerate(arguments.text, 1)]
    if arguments.input is not None:
        texts += read_texts(arguments.input)
    elif not texts and not sys.stdin.isatty():
        lines = [line for line in sys.stdin.read().splitlines() if line.strip()]
        texts = [text_of(f"Text {number}", {"text": line}) for number, line in enumerate(lines, 1)]
    if not texts:
        raise ConfigError("There is no text: give --text or --input, or pipe lines in.")
    return texts


def _heads(engine: "Engine", adapters: Adapters, names: Optional[List[str]]) -> Dict[str, "ScoreHead"]:
    """Returns the heads of the chosen adapters; raises RequestError for an adapter that is not a classifier's."""
    from mindlora.serving.score_head import checked_names, misuse

    heads = {}
    for name in adapters.chosen:
        head = engine.score_head(name)
        problem = misuse(name, head, wants_scores=True)
        if problem is not None:
            raise problem
        heads[name] = head if names is None else head._replace(names=checked_names(names, len(head.weight), "--labels"))
    return heads


VERBS = (Verb("classify", "Label texts by classifiers, and score them by reward models.", _classify_options),)
