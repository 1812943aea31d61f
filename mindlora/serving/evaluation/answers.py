"""Answers checked by a rule: the model answers freely, and either it is right or not."""

import dataclasses
import re
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from mindlora.core.errors import DataError, RequestError
from mindlora.data.conversion import progress
from mindlora.data.sources import Layout, read_inputs
from mindlora.serving.chat_prompt import PromptForm
from mindlora.serving.engine import Engine
from mindlora.serving.evaluation.scoring import Model, ask
from mindlora.serving.evaluation.statistics import Measure, measure
from mindlora.serving.request import Sampling

_LAYOUT = Layout(("question", "answer"), aliases={"question": "instruction", "answer": "output"})
# As GSM8K ends its answers (Cobbe et al., 2021).
_NUMBER = re.compile(r"####\s*([-$]*[0-9.,]*[0-9])")


@dataclasses.dataclass(frozen=True)
class Task:
    """A question, and the answer that is right."""

    location: str
    question: str
    answer: str


def exact(text: str) -> Optional[str]:
    """Returns a text without the space around it: answers must be equal."""
    return text.strip()


def number(text: str) -> Optional[str]:
    """Returns the number after the first ####, without commas and signs of currency, or None if there is none."""
    found = _NUMBER.search(text)
    if found is None:
        return None
    digits = found.group(1).replace(",", "").replace("$", "")
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


# What of an answer must be equal, by the name of the rule.
RULES: Dict[str, Callable[[str], Optional[str]]] = {"exact": exact, "number": number}


def read_tasks(path: str, rule: str) -> List[Task]:
    """Returns the rows of a file with the columns question and answer, or instruction and output.

    Raises DataError if the file cannot be read, or an answer has nothing that ``rule``, a key of RULES, could compare.
    """
    return [_task(row.location, row.record, rule) for row in read_inputs(path, _LAYOUT)[0].rows]


def _task(location: str, record: Any, rule: str) -> Task:
    fields = [record.get(name) if isinstance(record, dict) else None for name in _LAYOUT.fields]
    for name, text in zip(_LAYOUT.fields, fields):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{location} has no text in its column '{name}'. Correct the row, or remove it.")
    if RULES[rule](fields[1]) is None:
        raise DataError(f"{location}: the answer has no number after ####. Correct the row, or choose --rule exact.")
    return Task(location, *fields)


def measure_answers(
    engine: Engine,
    tasks: Sequence[Task],
    form: PromptForm,
    sampling: Sampling,
    rule: str,
    models: Sequence[Model],
    source: str,
    seed: int,
) -> Measure:
    """Returns how often the answers of each model are right by a rule; ``sampling`` says how they are chosen.

    Raises RequestError if a question leaves no room for an answer.
    """
    requests = []
    for task in tasks:
        tokens = form.tokens(task.question)
        room = engine.seq_length - len(tokens)
        if room < 1:
            raise RequestError(
                f"{task.location}: the question has {len(tokens)} tokens, and the model takes {engine.seq_length}, the "
                "answer included. Shorten it, or raise --seq-length."
            )
        ends = dataclasses.replace(
            sampling, max_tokens=min(sampling.max_tokens, room), stop_tokens=tuple(form.prompt.ends)
        )
        requests += [(tokens, ends, model) for model in models]
    right: Dict[Model, List[float]] = {model: [] for model in models}
    compared = RULES[rule]
    expected = [compared(task.answer) for task in tasks for _ in models]
    for (request, text), answer in zip(progress(ask(engine, requests), "answering", len(requests)), expected):
        right[request.adapter].append(float(compared(text) == answer))
    amounts = {model: np.array(values) for model, values in right.items()}
    return measure(f"right answers ({rule})", source, False, amounts, np.ones(len(tasks)), seed=seed)
